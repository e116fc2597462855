"""Entry point of `loragate`: finds the subcommand, turns user errors into one clear paragraph.

Imports nothing heavy, so that `loragate --help` answers at once; a command's room is imported when it is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
import textwrap
import traceback
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from loragate.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG,
    ConfigError,
    DataError,
    LoragateError,
    is_disk_full,
    nearest,
)
from loragate.printable import escape_for_terminal
from loragate.signals import sigterm_as_ctrl_c
from loragate.version import __version__

if TYPE_CHECKING:
    from loragate.cli.arguments import Command

# name: (module, one line); recipes are chains of commands and stand above them
COMMANDS = {
    "quickstart": ("cli.quickstart", "the whole method on a tiny world, offline, with a table of results"),
    "doctor": ("cli.doctor", "is a finished adapter right, what does it do to its model, how strongly should it act"),
    "sft": ("cli.sft", "fine-tuning: train a LoRA or DoRA adapter with a token objective"),
    "calibrate": ("cli.calibrate", "train gates for a finished adapter, and choose on a dev set how to use it"),
    "sweep": ("cli.sweep", "many ranges, learning rates, seeds and objectives, on Ray or one after the other"),
    "eval": ("cli.evaluate", "scores of base, adapter and gated adapter, and what their differences show"),
    "regrade": ("cli.regrade", "judge the stored answers of an evaluation with another grader"),
    "generate": ("cli.generate", "text from a gated adapter, a plain adapter or a base"),
    "diagnose": ("cli.diagnose", "what adapter and gates do: entropy, λ, interventions, alignment with a task value"),
    "report": ("cli.report", "one self-contained HTML file, or the paper's figures, from any runs"),
    "explore": ("cli.explore", "a local page: one prompt, three models, every token coloured by its gates"),
    "serve": ("cli.serve", "vLLM's OpenAI-compatible server for gated adapters, plain adapters and the base"),
    "verify": ("cli.verify", "whether a server or llama.cpp computes a served adapter as transformers does"),
    "export": ("cli.export", "write an adapter for PEFT, llama.cpp or MLX, or merged into its base"),
    "push": ("cli.push", "upload a gated adapter to the hub, with its model card"),
    "recipes": ("recipes.command", "the trainings of the paper, by name: list, show and run"),
    "mask": ("cli.mask", "a mask of the response tokens on which a reference model gains most over the base"),
    "env": ("cli.env", "versions, devices and optional parts of this installation"),
}

SUGGESTED_COMMANDS = {"inspect": "doctor --quick", "merge": "export --to merged", "train": "sft"}
"""What people know from elsewhere, or from before, and how it is called here."""
SERVERS = ("explore", "serve")  # which are silent while nobody asks

REPEATED_PREFIX = re.compile(
    r"^(?:(?:loragate: )?error: )+|(?<!\S)(?P<said>[^\s:]{3,}): (?=(?P=said)(?::\d|[\s:,\[]|$))", re.IGNORECASE
)
"""What an error says twice: the word, or a file that both a floor and the floor below it name."""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 a check or result failed, 2 wrong call or bad input, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return DONE
    if arguments[0] in ("-V", "--version"):
        print(f"loragate {__version__}")
        return DONE
    debug = "--debug" in arguments
    try:
        with sigterm_as_ctrl_c():
            status = _run(arguments[0], arguments[1:])
        # launchers have statuses of their own, as for a process that a signal ended
        return status if status in (DONE, FAILED, WRONG, INTERRUPTED) else FAILED
    except LoragateError as error:
        return _fail(error, debug)
    except KeyboardInterrupt as stop:
        kept = "nothing half-written was left"
        if arguments[0] in COMMANDS and hasattr(load_command(arguments[0]).options, "resume"):
            kept = "what was finished is kept, and the same command with --resume goes on with a run that had begun"
        asked_by = "SIGTERM" if "SIGTERM" in str(stop) else "Ctrl-C"
        print(f"\nloragate: stopped by {asked_by}; {kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # who read the output has gone (| head): the interpreter's own last flush must not fail as well
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if is_disk_full(error):
            return _fail(LoragateError(f"the disk is full{where}; free some space and run again"), debug)
        named = isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError))
        return _fail((DataError if named else LoragateError)(f"{error.strerror or error}{where}"), debug)
    except Exception as error:
        if is_disk_full(error):
            full = "the disk is full; free some space and run again (with --resume if it was a training)"
            return _fail(LoragateError(full), debug)
        hint = "this is a fault of loragate or of a library under it; run again with --debug for the traceback"
        return _fail(LoragateError(f"{type(error).__name__}: {error}\n{hint}"), debug)


def load_command(name: str) -> Command:
    """What a name stands for; its module is imported."""
    room, summary = COMMANDS[name]
    found: Command = importlib.import_module(f"loragate.{room}").COMMAND
    return dataclasses.replace(found, summary=summary)


def overview() -> str:
    """The text of `loragate --help`."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        f"loragate {__version__}: gate a finished LoRA adapter by entropy, token by token (SCALE)\n\n"
        f"usage: loragate COMMAND [options]\n\ncommands:\n{rows}\n\n"
        "examples:\n"
        "  loragate quickstart\n"
        "  loragate doctor path/to/adapter --quick\n"
        "  loragate calibrate --adapter path/to/adapter --data train.jsonl --dev-data dev.jsonl --out gated\n\n"
        "loragate COMMAND --help describes a command; every option is also a key of its --config FILE."
    )


def _run(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        meant = (
            f"; did you mean '{SUGGESTED_COMMANDS[name]}'?" if name in SUGGESTED_COMMANDS else nearest(name, COMMANDS)
        )
        raise ConfigError(f"unknown command {name!r}{meant} (loragate --help lists them)")
    # cyclopts and rich take longer to import than the overview to print
    from loragate.cli.arguments import parse, print_help, resolved_yaml
    from loragate.display import configure_logging, heartbeat

    configure_logging()
    found = load_command(name)
    if {"-h", "--help", "--help-all"} & set(arguments):
        print_help(found, everything="--help-all" in arguments)
        return 0
    # fields of `required_at_run` may still be missing, so that --print-config shows the rest
    options, given = parse(found, arguments)
    if given.get("print_config"):
        print(resolved_yaml(options), end="")
        return 0
    check_options(name, found, options)
    with nullcontext() if name in SERVERS else heartbeat(f"loragate {name}"):
        return found.run(options)


def check_options(name: str, command: Command, options: Any) -> None:
    """Refuse, with a ConfigError, a command line that lacks something, or of which something has no effect or cannot be loaded."""
    from loragate.cli.arguments import require_given
    from loragate.effects import SETTING_CONDITIONS, require_effect
    from loragate.models.settings import Loading
    from loragate.training.preflight import check_loading

    require_given(command, options)
    if name in SETTING_CONDITIONS:
        require_effect(name, options, flags=True)
    if isinstance(options, Loading) and name != "serve":  # which knows vLLM's own flag
        check_loading(options, getattr(options, "engine", ""))


def _fail(error: LoragateError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    lines = [
        textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False, subsequent_indent="  ")
        if len(line) > 100
        else line
        for line in map(escape_for_terminal, REPEATED_PREFIX.sub("", str(error)).splitlines())
    ]
    print("loragate: error: " + "\n".join(lines), file=sys.stderr)
    return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
