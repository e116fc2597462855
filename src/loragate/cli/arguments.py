"""From a frozen dataclass to a command line: every field is a key of the `--config` file, and nearly every one a flag.

Precedence: flag, then configuration file, then the field's default. cyclopts splits the command line, suggests the nearest
flag and draws the help; values are read as those of a file are, by `loragate.validate`. Help texts come from the
"Attributes:" part of the class docstrings, so that a setting is described once. Knows no command.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
import shlex
import textwrap
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter, UnknownOptionError, UnusedCliTokensError
from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, NameRenderer
from docstring_parser.google import parse as parse_docstring
from rich.console import Console

from loragate.errors import ConfigError
from loragate.validate import coerce_fields

# what every command takes beside its own settings
GLOBAL: dict[str, tuple[Any, str]] = {
    "config": (Path | None, "YAML file with any of these settings; flags override it."),
    "print_config": (bool | None, "print the resolved settings and stop."),
    "debug": (bool | None, "show the traceback of an error."),
}
WIDTH = 100
FLAG_ALIASES: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    **dict.fromkeys(
        ("bs", "batch", "per_device_batch_size", "gradient_accumulation_steps"),
        ("batch_size", "per_device_train_batch_size"),
    ),
    "epochs": ("num_train_epochs",),
    **dict.fromkeys(("probe", "dev", "dev_set", "validation_data"), ("dev_data",)),
    **dict.fromkeys(("range", "bounds"), ("ranges",)),
    **dict.fromkeys(("model", "lora", "peft_model"), ("adapter", "model")),
    **dict.fromkeys(("adapter", "model_name_or_path"), ("model", "adapter")),
    "base_model": ("base", "model"),
    **dict.fromkeys(("output", "output_dir", "output_path", "save_dir"), ("out",)),
    **dict.fromkeys(("train_data", "train_dataset", "train_file", "dataset"), ("data",)),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), ("rank",)),
    "lora_alpha": ("alpha",),
    "bf16": ("precision bf16", "dtype bfloat16"),
    "format": ("to",),
    "scale": ("constant",),
}
"""Names that people bring along, and what they may be called here, perhaps with a value: the first that the command has."""


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: as typed.
        options: frozen dataclass of its settings; fields without default are required.
        run: called with an instance of `options`; returns the exit status.
        examples: lines that work when pasted.
        positional: name of the field that is given without a flag, or None; a field of type tuple takes several.
        required_at_run: fields that have a default, so that a file can give them, without which the command still refuses.
        common: names, between spaces, of the fields that `--help` shows beside the required ones; empty for all.
        rare: names, between spaces, of the fields that hardly anybody changes: --help-all names them last, in a line each.
        summary: one line for the overview and the help; `loragate.cli.main` has it, as it is read before this room.
    """

    name: str
    options: type
    run: Callable[[Any], int]
    examples: tuple[str, ...]
    positional: str | None = None
    required_at_run: tuple[str, ...] = ()
    common: str = ""
    rare: str = ""
    summary: str = ""

    @property
    def required(self) -> tuple[str, ...]:
        """Fields that must be given, by a flag or by a file."""
        unfilled = [
            field.name
            for field in dataclasses.fields(self.options)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        return (*unfilled, *(name for name in self.required_at_run if name not in unfilled))


def parse(command: Command, argv: list[str]) -> tuple[Any, dict[str, Any]]:
    """(options instance, those of `GLOBAL` that were given) of a command line."""
    try:
        _, bound, _ = build_app(command).parse_args(
            [command.name, *argv], exit_on_error=False, print_error=False, help_on_error=False
        )
    except CycloptsError as error:
        said = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, UnknownOptionError):
            said = _suggest_flag(command, str(error.token.keyword or error.token.value), argv) or said
        elif isinstance(error, UnusedCliTokensError):
            said = _describe_stray_words(command, error.unused_tokens or [], argv)
        raise ConfigError(f"loragate {command.name}: {said} (loragate {command.name} --help-all lists all)") from error
    values = dict(bound.arguments)  # what was typed alone, as the application has no defaults
    known = {flag_of(name) for name in (*field_types(command.options), *GLOBAL)}
    for name, value in values.items():
        if isinstance(value, str) and value in known:  # --out --resume
            raise ConfigError(f"loragate {command.name}: {flag_of(name)} expects a value, found the flag {value}")
    given = {name: values.pop(name) for name in GLOBAL if name in values}
    read = read_config(given["config"], command) if "config" in given else {}
    try:
        values = read | coerce_fields(command.options, values)  # what was typed wins
        if isinstance(values.get("out"), str):  # a shell leaves the ~ of --out=~/run as it is
            values["out"] = os.path.expanduser(values["out"])
        _refuse_missing(
            command, [name for name in command.required if name not in command.required_at_run and name not in values]
        )
        return command.options(**values), given
    except ConfigError as error:
        name = re.split(r"[ .\[]", str(error), maxsplit=1)[0]  # a setting that is refused opens the sentence
        named = name in field_types(command.options)
        raise ConfigError(f"{flag_of(name)}{str(error).removeprefix(name)}" if named else str(error)) from None


def _suggest_flag(command: Command, flag: str, argv: list[str]) -> str:
    """What to say to a flag that has another name here or is given without one; empty for any other."""
    typed, _, value = flag.partition("=")
    name = typed.removeprefix("--").replace("-", "_")
    other = name if name == command.positional else find_alias(command, name)
    if other and other == command.positional:
        value = value or next((word for word in argv[argv.index(flag) + 1 :][:1] if not word.startswith("-")), "")
        return f"unknown option {typed}; give it without a flag: loragate {command.name} {value or other.upper()}"
    return other and f"unknown option {typed}; did you mean {flag_of(other)}?"


def _describe_stray_words(command: Command, words: list[str], argv: list[str]) -> str:
    """What to say to words without a flag: the first required flag that is not there may be meant."""
    given = {word.partition("=")[0] for word in argv}
    flags = [flag_of(name) for name in command.required if name != command.positional]
    meant = next((f"; did you mean {flag} {words[0]}?" for flag in flags if flag not in given), "")
    return f"{shlex.join(words)} stands without a flag{meant}"


def find_alias(command: Command, name: str) -> str:
    """The field of a command that a name of `FLAG_ALIASES` stands for, perhaps with its value; empty where there is none."""
    return next((field for field in FLAG_ALIASES.get(name, ()) if field.split()[0] in field_types(command.options)), "")


def require_given(command: Command, options: Any) -> None:
    """Refuse options without the command's `required_at_run`; a class may name another setting that does, in its `INSTEAD`."""
    instead = getattr(options, "INSTEAD", {})
    missing = [name for name in command.required_at_run if not getattr(options, name)]
    _refuse_missing(command, [name for name in missing if not (name in instead and getattr(options, instead[name]))])


def _refuse_missing(command: Command, names: list[str]) -> None:
    if names:
        flags = ", ".join(name.upper() if name == command.positional else flag_of(name) for name in names)
        raise ConfigError(f"loragate {command.name} needs {flags}; for example: {command.examples[0]}")


def print_help(command: Command, everything: bool = False) -> None:
    """Print the help of one command: a screen of options, or all of them under the headings that they belong to."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)
    build_app(command, hidden=not everything, for_help=True).help_print([command.name], console=console)
    if everything and command.rare:
        print("rare settings, with their defaults:")
        texts, defaults = help_texts(command.options), _defaults(command.options)
        for name in (name for name in field_types(command.options) if name in command.rare.split()):
            shown = _format_default(defaults[name])
            line = f"{flag_of(name)}: {texts[name]}" + f" [default: {shown}]" * bool(shown)
            print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    "))
    print("\n".join(["examples:", *(f"  {line}" for line in command.examples)]))
    if not everything:
        hidden = len(field_types(command.options)) - sum(
            not heading.startswith("advanced") for heading in headings(command).values()
        )
        more = f"{hidden} more settings: " if hidden else ""
        print(
            f"every command takes --config FILE.yaml, --print-config, --debug; {more}loragate {command.name} --help-all"
        )


def build_app(command: Command, hidden: bool = False, for_help: bool = False) -> App:
    """The cyclopts application of a command. What it parses is what was given, without the defaults.

    Args:
        hidden: leave what is advanced out of the help.
        for_help: whether it is made for a help, which has no room for --no-resume.
    """

    def taken(*_: Any, **__: Any) -> None:
        """Stands for the command: only its signature is used."""

    app = App(name="loragate", version_flags=[], help_flags=["--help", "-h", "--help-all"], help_format="plaintext")
    taken.__signature__ = inspect.Signature(list(_parameters(command, hidden, for_help)))  # type: ignore[attr-defined]
    app.command(taken, name=command.name, help=command.summary)
    return app


def _parameters(command: Command, hidden: bool, shown: bool) -> Iterator[inspect.Parameter]:
    """The parameters of a command's signature: the one without a flag first, as Python demands, then the fields."""
    texts, hints, found = help_texts(command.options), field_types(command.options), headings(command)
    defaults, named = _defaults(command.options), {int: "INT", float: "NUMBER", dict: "JSON"}
    read_later = {name: named[kind] for name, hint in hints.items() if (kind := _kind(hint)) in named}
    found |= dict.fromkeys(command.rare.split(), "rare")
    order = ["required", "options", *dict.fromkeys(found.values()), "every command"]
    look = DefaultFormatter(column_specs=_columns)
    groups = {heading: Group(heading, sort_key=order.index(heading), help_formatter=look) for heading in order}
    first = [command.positional, *command.required, *command.common.split()]
    for name in sorted(found, key=lambda name: first.index(name) if name in first else len(first)):
        without_flag, hint, default = name == command.positional, hints[name], defaults[name]
        about = Parameter(
            help=texts.get(name, ""),
            group=groups[found[name]],
            show=found[name] != "rare" and not (hidden and found[name].startswith("advanced")),
            show_default=_format_default if _format_default(default) else False,
            required=False,  # a file may give it
            allow_leading_hyphen=not without_flag,  # --ranges -3,1
            negative_iterable=(),
            # --no-resume is for those whose file says resume
            negative_bool=() if shown and not default else None,
            # texts, bools and choices are cyclopts'; numbers and objects are read as those of a file are
            converter=_as_text if name in read_later else None,
            metavar=read_later.get(name),
            accepts_keys=False,
        )
        kind = inspect.Parameter.POSITIONAL_ONLY if without_flag else inspect.Parameter.KEYWORD_ONLY
        # cyclopts holds defaults to their annotation
        hint = hint | str if name in read_later else hint
        annotation: Any = Annotated[hint | None if default is None else hint, about]
        yield inspect.Parameter(name, kind, default=default, annotation=annotation)
    for name, (hint, text) in GLOBAL.items():
        about = Parameter(help=text, group=groups["every command"], show=not hidden, negative=(), show_default=False)
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, kind, default=None, annotation=Annotated[hint, about])


def _columns(console: Console, options: Any, entries: Any) -> tuple[ColumnSpec, ...]:
    """cyclopts' own columns of a help, the flags' wide enough for the longest one on a terminal of 80 columns."""
    width = max(math.ceil(console.width * 0.35), len("--per-device-train-batch-size"))
    name = ColumnSpec(renderer=NameRenderer(max_width=width), header="", style="cyclopts.name", max_width=width)
    return name, ColumnSpec(renderer=DescriptionRenderer(), header="", overflow="fold")


def headings(command: Command) -> dict[str, str]:
    """{flag's field: heading of the help under which it stands}; an advanced one is named after the class that has the field."""
    found = {}
    for name in (name for name in field_types(command.options) if name not in command.rare.split()):
        if name in command.required:
            found[name] = "required"
        elif not command.common or name in command.common.split() or name == command.positional:
            found[name] = "options"
        else:
            # the class that declares the field, not one that inherits it
            owner = next(cls for cls in command.options.__mro__ if name in inspect.get_annotations(cls))
            words = re.findall("[A-Z][a-z]+", re.sub("(Options|Settings|Inputs)$", "", owner.__name__))
            found[name] = f"advanced: {' '.join(words).lower()}"  # ModelOptions: model
    return found


def field_types(options: type) -> dict[str, Any]:
    """{field: its type} of what a command offers.

    A class of settings that shares fields with another and gives some of them no effect names those in its `WITHHELD`.
    """
    hints = typing.get_type_hints(options)
    return {
        field.name: hints[field.name] for field in dataclasses.fields(options) if field.name not in _withheld(options)
    }


def read_config(path: Path, command: Command) -> dict[str, Any]:
    """The keys of a YAML file, checked against the command's settings."""
    from loragate.strict_yaml import read_mapping

    where = f"--config {path}"
    return checked_values(read_mapping(path, where), command, where)


def checked_values(loaded: dict[Any, Any], command: Command, where: str) -> dict[str, Any]:
    """A YAML mapping, checked against the command's settings and converted to their types; `where` opens every error."""
    seen: dict[str, Any] = {}
    for key in loaded:
        name = str(key).replace("-", "_")
        if name in seen:
            raise ConfigError(f"{where}: '{seen[name]}' and '{key}' are one key")
        if name in _withheld(command.options):
            raise ConfigError(f"{where}: loragate {command.name} has no key '{key}'")
        if name not in field_types(command.options) and (other := find_alias(command, name)):
            raise ConfigError(f"{where}: unknown key '{key}'; did you mean '{': '.join(other.split())}'?")
        seen[name] = key
    return coerce_fields(command.options, loaded, where)


def resolved_yaml(options: Any) -> str:
    """The options as a YAML text that `--config` reads back."""
    import yaml

    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in _withheld(options)}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def help_texts(options: type) -> dict[str, str]:
    """{field: text} out of the "Attributes:" parts of the class and its bases."""
    return {
        found.arg_name: " ".join((found.description or "").split())
        for cls in reversed(options.__mro__[:-1])  # bases first, so that the text of a subclass wins
        for found in parse_docstring(cls.__doc__ or "").params
    }


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def _kind(hint: Any) -> Any:
    """The type of a field without its arguments; of a union with None, of its other member."""
    # `int | None` has another origin than `Optional[int]`
    if typing.get_origin(hint) in (typing.Union, UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    return typing.get_origin(hint) or hint


def _as_text(_: Any, tokens: Any) -> str:
    return str(tokens[0].value)


def _defaults(options: type) -> dict[str, Any]:
    """{field: its default}; None where it has none."""
    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(options)
    }


def _withheld(options: Any) -> frozenset[str]:
    return getattr(options, "WITHHELD", frozenset())


def _format_default(default: Any) -> str:
    """A default as it stands behind a help text; nothing for what is empty or off."""
    if default in (None, "", ()) or default is False:
        return ""
    if default is True:
        return "on"
    return f"{default:g}" if isinstance(default, float) else str(default)
