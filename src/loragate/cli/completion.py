"""`loragate completion`: a script that completes commands and their options in bash, zsh or fish.

Written from the option dataclasses, so that it knows what the commands know. The words stand in the script itself: pressing
Tab starts no Python. Values of options are completed as files.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from loragate.cli.arguments import GLOBAL_FLAGS, Command, field_kinds, help_texts
from loragate.errors import ConfigError, nearest


@dataclass(frozen=True)
class CompletionOptions:
    """Settings of `loragate completion`.

    Attributes:
        shell: bash, zsh or fish.
    """

    shell: str = ""


@dataclass(frozen=True)
class Flag:
    """One option of a command line.

    Attributes:
        name: with its dashes.
        takes_value: whether a value follows.
        text: first words of its help.
    """

    name: str
    takes_value: bool
    text: str


def commands() -> dict[str, tuple[str, tuple[Flag, ...]]]:
    """{command: (one line, flags)} of everything `loragate` knows."""
    from loragate.cli.main import COMMANDS

    found = {}
    for name, (module, text) in COMMANDS.items():
        command = importlib.import_module(f"loragate.cli.{module}").COMMAND
        found[name] = (text, flags_of(command))
    return found


def flags_of(command: Command) -> tuple[Flag, ...]:
    """The flags of one command, its own before those that all commands share."""
    texts, kinds = help_texts(command.options), field_kinds(command.options)
    found = []
    for name, kind in kinds.items():
        if name == command.positional:
            continue
        dashed, text = name.replace("_", "-"), texts.get(name, "")
        found.append(Flag(f"--{dashed}", kind is not bool, text))
        if kind is bool:
            found.append(Flag(f"--no-{dashed}", False, f"the opposite of --{dashed}"))
    shared = {"config": "YAML file with any of these keys", "print-config": "print the resolved configuration and stop"}
    shared |= {"debug": "show the traceback of an error", "help": "describe the command"}
    return (*found, *(Flag(f"--{name}", name == "config", shared[name]) for name in GLOBAL_FLAGS))


def bash() -> str:
    """A script for `source`, or for the folder of bash-completion."""
    cases, values = [], set()
    for name, (_, flags) in commands().items():
        cases.append(f"    {name}) words='{' '.join(flag.name for flag in flags)}' ;;")
        values |= {flag.name for flag in flags if flag.takes_value}
    return f"""# loragate completion for bash: source <(loragate completion bash)
_loragate() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=''
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W '{" ".join(commands())} --help --version' -- "$word"))
    return
  fi
  case $before in
    {"|".join(sorted(values))})
      COMPREPLY=($(compgen -f -- "$word"))
      return ;;
  esac
  case ${{COMP_WORDS[1]}} in
{chr(10).join(cases)}
  esac
  if [[ $word == -* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _loragate loragate
"""


def zsh() -> str:
    """A script for `source` after compinit, or for a file _loragate in $fpath."""
    names = " ".join(_quoted(f"{name}:{_short(text)}") for name, (text, _) in commands().items())
    cases = []
    for name, (_, flags) in commands().items():
        specs = [
            f"{flag.name}[{_bracketed(flag.text)}]" + (":value:_files" if flag.takes_value else "") for flag in flags
        ]
        cases.append(f"    {name}) _arguments -s {' '.join(map(_quoted, specs))} '*:file:_files' ;;")
    return f"""#compdef loragate
# loragate completion for zsh: source <(loragate completion zsh)
_loragate() {{
  local -a names
  names=({names})
  if (( CURRENT == 2 )); then
    _describe command names
    return
  fi
  local name=${{words[2]}}
  shift words
  (( CURRENT-- ))
  case $name in
{chr(10).join(cases)}
  esac
}}
if [[ $funcstack[1] == _loragate ]]; then _loragate "$@"; else compdef _loragate loragate; fi
"""


def fish() -> str:
    """A script for `source`, or for ~/.config/fish/completions/loragate.fish."""
    lines = ["# loragate completion for fish: loragate completion fish | source"]
    for name, (text, flags) in commands().items():
        lines.append(f"complete -c loragate -n __fish_use_subcommand -f -a {name} -d {_quoted(_short(text))}")
        for flag in flags:
            value = " -r" if flag.takes_value else ""
            seen = f"'__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c loragate -n {seen} -l {flag.name[2:]}{value} -d {_quoted(_short(flag.text))}")
    return "\n".join(lines) + "\n"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def run(options: CompletionOptions) -> int:
    """Print the script."""
    if options.shell not in SHELLS:
        raise ConfigError(
            f"loragate completion: expected {', '.join(SHELLS)}, found {options.shell or 'nothing'}"
            f"{nearest(options.shell, SHELLS)}; for example: {COMMAND.examples[0]}"
        )
    print(SHELLS[options.shell](), end="")
    return 0


def _short(text: str) -> str:
    """The beginning of a help text, on one line; nothing in it means anything to a shell inside single quotes."""
    line = " ".join(text.split()).replace("'", "’").replace("\\", "/")
    return line if len(line) <= 60 else line[:59].rstrip() + "…"


def _bracketed(text: str) -> str:
    return _short(text).replace("[", "(").replace("]", ")").replace(":", ";")


def _quoted(text: str) -> str:
    return f"'{text}'"


COMMAND = Command(
    name="completion",
    summary="Print a script that completes commands and options in bash, zsh or fish.",
    options=CompletionOptions,
    run=run,
    examples=(
        "loragate completion bash > ~/.local/share/bash-completion/completions/loragate",
        "loragate completion fish",
    ),
    positional="shell",
)
