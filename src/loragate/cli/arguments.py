"""From a frozen dataclass to a command line: every field is a flag, and a key of the `--config` file.

Precedence: flag, then configuration file, then the field's default. cyclopts splits and types the command line, suggests the
nearest flag, draws the help and writes the completion scripts; help texts come from the "Attributes:" part of the class
docstrings, so that a setting is described once. Knows no command.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter
from docstring_parser.google import parse as parse_docstring
from rich.console import Console

from loragate.errors import ConfigError
from loragate.validate import check, typed_values

# what every command takes beside its own settings
GLOBAL: dict[str, tuple[Any, str]] = {
    "config": (Path | None, "YAML file with any of these settings; flags override it."),
    "print_config": (bool | None, "print the resolved settings and stop."),
    "debug": (bool | None, "show the traceback of an error."),
}
WIDTH = 100
View = Literal["common", "all", "completion"]


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: as typed.
        options: frozen dataclass of its settings; fields without default are required.
        run: called with an instance of `options`; returns the exit status.
        examples: lines that work when pasted.
        positional: name of the field that is given without a flag, or None; a field of type tuple takes several.
        needs: fields that have a default, so that a file can give them, without which the command still refuses.
        common: names, between spaces, of the fields that `--help` shows beside the required ones; empty for all.
        summary: one line for the overview and the help; `loragate.cli.main` has it, as it is read before this room.
    """

    name: str
    options: type
    run: Callable[[Any], int]
    examples: tuple[str, ...]
    positional: str | None = None
    needs: tuple[str, ...] = ()
    common: str = ""
    summary: str = ""

    @property
    def required(self) -> tuple[str, ...]:
        """Fields that must be given, by a flag or by a file."""
        unfilled = [
            field.name
            for field in dataclasses.fields(self.options)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        return (*unfilled, *(name for name in self.needs if name not in unfilled))


def parse(command: Command, argv: list[str]) -> tuple[Any, dict[str, Any]]:
    """(options instance, those of `GLOBAL` that were given) of a command line.

    Raises:
        ConfigError: naming the flag, or the file and key, what was found and what is known.
    """
    try:
        _, bound, _ = build_app([command]).parse_args(
            [command.name, *argv], exit_on_error=False, print_error=False, help_on_error=False
        )
    except CycloptsError as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"loragate {command.name}: {said} (loragate {command.name} --help-all lists all)") from error
    values = dict(bound.arguments)  # what was typed alone, as the application has no defaults
    known = {flag_of(name) for name in (*field_kinds(command.options), *GLOBAL)}
    for name, value in values.items():
        if isinstance(value, str) and value in known:  # --out --resume
            raise ConfigError(f"loragate {command.name}: {flag_of(name)} expects a value, found the flag {value}")
    given = {name: values.pop(name) for name in GLOBAL if name in values}
    if "config" in given:  # what was typed wins
        values = read_config(given["config"], command) | values
    _refuse_missing(command, [name for name in command.required if name not in command.needs and name not in values])
    try:
        options = command.options(**values)
        check(options)
    except ConfigError as error:
        name = re.split(r"[ .\[]", str(error), maxsplit=1)[0]  # a setting that is refused opens the sentence
        named = name in field_kinds(command.options)
        raise ConfigError(f"{flag_of(name)}{str(error).removeprefix(name)}" if named else str(error)) from None
    return options, given


def require_given(command: Command, options: Any) -> None:
    """Refuse options without the command's `needs`.

    Raises:
        ConfigError: naming all that are missing.
    """
    _refuse_missing(command, [name for name in command.needs if not getattr(options, name)])


def _refuse_missing(command: Command, names: list[str]) -> None:
    if names:
        flags = ", ".join(name.upper() if name == command.positional else flag_of(name) for name in names)
        raise ConfigError(f"loragate {command.name} needs {flags}; for example: {command.examples[0]}")


def print_help(command: Command, everything: bool = False) -> None:
    """Print the help of one command: a screen of options, or all of them under the headings that they belong to."""
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH)
    build_app([command], "all" if everything else "common").help_print([command.name], console=console)
    print("\n".join(["examples:", *(f"  {line}" for line in command.examples)]))
    if not everything:
        hidden = sum(heading.startswith("advanced") for heading in headings(command).values())
        more = f"{hidden} more options: " if hidden else ""
        print(
            f"\nEvery command takes --config FILE.yaml, --print-config and --debug. {more}loragate {command.name} --help-all"
        )


def build_app(commands: Iterable[Command], view: View | None = None) -> App:
    """The cyclopts application of some commands. What it parses is what was given, without the defaults.

    Args:
        view: what the application is made for, where that is not parsing: a help, or a completion script, in which every
            text may be a file.
    """
    app = App(name="loragate", version_flags=[], help_flags=["--help", "-h", "--help-all"], help_format="plaintext")
    for command in commands:

        def taken(*_: Any, **__: Any) -> None:
            """Stands for the command: only its signature is used."""

        taken.__signature__ = inspect.Signature(list(_parameters(command, view)))  # type: ignore[attr-defined]
        app.command(taken, name=command.name, help=command.summary)
    return app


def _parameters(command: Command, view: View | None) -> Iterator[inspect.Parameter]:
    """The parameters of a command's signature: the one without a flag first, as Python demands, then the fields."""
    texts, hints, found = help_texts(command.options), field_kinds(command.options), headings(command)
    defaults = {field.name: field.default for field in dataclasses.fields(command.options)}
    order = ["required", "options", *dict.fromkeys(found.values()), "every command"]
    groups = {heading: Group(heading, sort_key=order.index(heading)) for heading in order}
    first = [command.positional, *command.required, *command.common.split()]
    for name in sorted(hints, key=lambda name: first.index(name) if name in first else len(first)):
        without_flag, hint = name == command.positional, hints[name]
        if view == "completion":
            hint = {str: Path, tuple[str, ...]: tuple[Path, ...]}.get(hint, hint)
        default = None if defaults[name] is dataclasses.MISSING else defaults[name]
        about = Parameter(
            help=texts.get(name, ""),
            group=groups[found[name]],
            show=view != "common" or not found[name].startswith("advanced"),
            show_default=_shown if _shown(default) else False,
            required=False,  # a file may give it
            allow_leading_hyphen=not without_flag,  # --range -3,1
            negative_iterable=(),
            # --no-resume is for those whose file says resume, and takes no room in a help
            negative_bool=() if view in ("common", "all") and not default else None,
            converter=_converter(hints[name]),
            accepts_keys=False,
        )
        kind = inspect.Parameter.POSITIONAL_ONLY if without_flag else inspect.Parameter.KEYWORD_ONLY
        # cyclopts holds defaults to their annotation
        annotation: Any = Annotated[hint | None if default is None else hint, about]
        yield inspect.Parameter(name, kind, default=default, annotation=annotation)
    for name, (hint, text) in GLOBAL.items():
        about = Parameter(
            help=text, group=groups["every command"], show=view != "common", negative=(), show_default=False
        )
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, kind, default=None, annotation=Annotated[hint, about])


def headings(command: Command) -> dict[str, str]:
    """{field: heading of the help under which it stands}; an advanced one is named after the class that has the field."""
    found = {}
    for name in field_kinds(command.options):
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


def field_kinds(options: type) -> dict[str, Any]:
    """{field: its type} of what a command offers.

    A class of settings that shares fields with another and gives some of them no effect names those in its `WITHHELD`.
    """
    hints = typing.get_type_hints(options)
    return {
        field.name: hints[field.name] for field in dataclasses.fields(options) if field.name not in _withheld(options)
    }


def read_config(path: Path, command: Command) -> dict[str, Any]:
    """The keys of a YAML file, checked against the command's settings.

    Raises:
        ConfigError: naming the file, the line or the key, what was found and the nearest known key.
    """
    from loragate.strict_yaml import read_mapping

    where = f"--config {path}"
    return checked_values(read_mapping(path, where), command, where)


def checked_values(loaded: dict[Any, Any], command: Command, where: str) -> dict[str, Any]:
    """Keys and values of a YAML mapping, checked against the command's settings and converted to their types.

    Args:
        where: opens every error message.

    Raises:
        ConfigError: naming the key, what was found and the nearest known key.
    """
    seen: dict[str, Any] = {}
    for key in loaded:
        name = str(key).replace("-", "_")
        if name in seen:
            raise ConfigError(f"{where}: '{seen[name]}' and '{key}' are one key")
        if name in _withheld(command.options):
            raise ConfigError(f"{where}: loragate {command.name} has no key '{key}'")
        seen[name] = key
    return typed_values(command.options, loaded, where)


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


def _converter(hint: Any) -> Callable[[Any, Any], Any] | None:
    """How cyclopts reads a value where its own reading is too kind (1.5 as an integer, nan) or has no rule (JSON)."""
    # `int | None` has another origin than `Optional[int]`; either way the type that is not None decides
    if typing.get_origin(hint) in (typing.Union, UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    kind = typing.get_origin(hint) or hint

    def number(_: Any, tokens: Any) -> Any:
        with suppress(ValueError):
            found = float(tokens[0].value)
            if math.isfinite(found) and (kind is float or found == int(found)):
                return kind(found)
        raise ValueError(f"expected {'a whole number' if kind is int else 'a number'}, found {tokens[0].value!r}")

    def mapping(_: Any, tokens: Any) -> Any:
        try:
            value = json.loads(tokens[0].value)
        except json.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object such as '{{\"threshold\": 0.1}}', found {tokens[0].value!r}")
        return value

    return {int: number, float: number, dict: mapping}.get(kind)


def _withheld(options: Any) -> frozenset[str]:
    return getattr(options, "WITHHELD", frozenset())


def _shown(default: Any) -> str:
    """A default as it stands behind a help text; nothing for what is empty or off."""
    if default in (None, "", ()) or default is False:
        return ""
    if default is True:
        return "on"
    return f"{default:g}" if isinstance(default, float) else str(default)
