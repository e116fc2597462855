"""From a frozen dataclass to a command line: every field is a flag, and a key of the `--config` file.

Precedence: flag, then configuration file, then the field's default. Help texts come from the "Attributes:" part of the
class docstrings, so that a setting is described once. Knows no command.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import math
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from loragate.errors import ConfigError, nearest

GLOBAL_FLAGS = ("config", "debug", "print-config", "help")


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: as typed.
        summary: one line for the overview.
        options: frozen dataclass of its settings; fields without default are required.
        run: called with an instance of `options`; returns the exit status.
        examples: lines that work when pasted.
        positional: name of the field that may be given without a flag, or None; a field of type tuple takes several.
        needs: fields that have a default, so that a file can give them, without which the command still refuses.
    """

    name: str
    summary: str
    options: type
    run: typing.Callable[[Any], int]
    examples: tuple[str, ...]
    positional: str | None = None
    needs: tuple[str, ...] = ()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if found := re.search(r"unrecognized arguments: (\S+)", message):
            flag = found.group(1).split("=")[0].lstrip("-")
            known = [action.option_strings[0].lstrip("-") for action in self._actions if action.option_strings]
            guess = nearest(flag, known).replace("'", "'--", 1) if flag else ""
            raise ConfigError(f"{self.prog}: unknown argument {found.group(1)}{guess} (see {self.prog} --help)")
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")


def parse(command: Command, argv: list[str]) -> tuple[Any, argparse.Namespace]:
    """(options instance, global flags) of a command line.

    Raises:
        ConfigError: naming the flag, or the file and key, what was found and what is known.
    """
    parser = build_parser(command)
    # "--range -3,1" would be read as two flags
    joined: list[str] = []
    for argument in argv:
        if joined and joined[-1] in ("--range", "--ranges", "--constants") and re.match(r"-\d", argument):
            joined[-1] = f"{joined[-1]}={argument}"
        else:
            joined.append(argument)
    several = command.positional is not None and field_kinds(command.options)[command.positional] is tuple
    # words may then stand before and after flags
    namespace = parser.parse_intermixed_args(joined) if several else parser.parse_args(joined)
    values = read_config(Path(namespace.config), command) if namespace.config else {}
    kinds = field_kinds(command.options)
    for name in kinds:
        given = getattr(namespace, name)
        if given is not None and given != []:
            values[name] = tuple(given) if isinstance(given, list) else given
    missing = [
        field.name
        for field in dataclasses.fields(command.options)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and values.get(field.name) is None
    ]
    if missing:
        flags = ", ".join(name.upper() if name == command.positional else flag_of(name) for name in missing)
        raise ConfigError(f"loragate {command.name} needs {flags}; for example: {command.examples[0]}")
    return command.options(**values), namespace


def require_given(command: Command, options: Any) -> None:
    """Refuse options without the command's `needs`.

    Raises:
        ConfigError: naming all that are missing.
    """
    missing = ", ".join(flag_of(name) for name in command.needs if not getattr(options, name))
    if missing:
        raise ConfigError(f"loragate {command.name} needs {missing}; for example: {command.examples[0]}")


def build_parser(command: Command) -> argparse.ArgumentParser:
    """The argparse parser of one command."""
    parser = _Parser(
        prog=f"loragate {command.name}",
        usage=f"loragate {command.name} {f'[{command.positional.upper()}] ' if command.positional else ''}[options]",
        description=command.summary,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in command.examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    texts = help_texts(command.options)
    defaults = {field.name: field.default for field in dataclasses.fields(command.options)}
    needed = [name for name in defaults if name in command.needs or defaults[name] is dataclasses.MISSING]
    shared = {name for parent in command.options.__mro__[1:] for name in inspect.get_annotations(parent)}
    # what must be given, then the command's own settings, then those it shares with others
    kinds = field_kinds(command.options)
    for name in sorted(kinds, key=lambda name: 0 if name in needed else 2 if name in shared else 1):
        kind, default = kinds[name], defaults[name]
        text = (texts.get(name, "") + (" [required]" if name in needed else _shown(default))).replace("%", "%%")
        if name == command.positional:
            several = kind is tuple
            parser.add_argument(name, nargs="*" if several else "?", help=text, metavar=name.upper())
        elif kind is bool:
            parser.add_argument(
                flag_of(name), dest=name, default=None, action=argparse.BooleanOptionalAction, help=text
            )
        elif kind is tuple:
            parser.add_argument(flag_of(name), dest=name, default=None, action="append", help=text, metavar="TEXT")
        else:
            convert = _converter(kind)
            parser.add_argument(flag_of(name), dest=name, default=None, type=convert, help=text, metavar=_meta(kind))
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these keys; flags override it")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def field_kinds(options: type) -> dict[str, Any]:
    """{field name: plain type} of what a command offers, with `X | None` reduced to X.

    A class of settings that shares fields with another and gives some of them no effect names those in its `WITHHELD`.
    """
    hints = typing.get_type_hints(options)
    return {
        field.name: _plain(hints[field.name])
        for field in dataclasses.fields(options)
        if field.name not in _withheld(options)
    }


def read_config(path: Path, command: Command) -> dict[str, Any]:
    """The keys of a YAML file, checked against the command's settings."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    try:
        loaded = yaml.safe_load(text)
        node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--config {path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: expected keys and values, found {type(loaded).__name__}")
    seen: dict[str, int] = {}
    for key, _ in node.value:
        name, line_of = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"--config {path} line {line_of}: key '{key.value}' stands in line {seen[name]} already")
        seen[name] = line_of
    return checked_values(loaded, command, f"--config {path}")


def checked_values(loaded: dict[Any, Any], command: Command, where: str) -> dict[str, Any]:
    """Keys and values of a YAML mapping, checked against the command's settings and converted to their types.

    A key without a value (`probe:`, or null) is left at its default, or is None where the setting can be that.

    Args:
        where: opens every error message.

    Raises:
        ConfigError: naming the key, what was found and the nearest known key.
    """
    kinds, hints = field_kinds(command.options), typing.get_type_hints(command.options)
    optional = {name for name in kinds if type(None) in typing.get_args(hints[name])}
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in kinds:
            raise ConfigError(
                f"{where}: unknown key '{key}'{nearest(name, kinds)} (loragate {command.name} --help lists them)"
            )
        if value is not None or name in optional:
            values[name] = _from_yaml(where, str(key), value, kinds[name])
    return values


def resolved_yaml(options: Any) -> str:
    """The options as a YAML text that `--config` reads back."""
    import yaml

    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in _withheld(options)}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def help_texts(options: type) -> dict[str, str]:
    """{field: text} out of the "Attributes:" parts of the class and its bases."""
    texts: dict[str, str] = {}
    for cls in reversed(options.__mro__):
        names: list[str] = []
        inside = False
        for line in (cls.__doc__ or "").splitlines():
            if line.strip() == "Attributes:":
                inside = True
                continue
            if not inside:
                continue
            if start := re.match(r"\s{8}([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line):
                names = start.group(1).split(", ")
                for name in names:
                    texts[name] = start.group(2).strip()
            elif line.strip() and line.startswith(" " * 12):
                for name in names:
                    texts[name] += " " + line.strip()
            elif line.strip():
                inside = False
    return texts


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def comma_list(text: str) -> list[str]:
    """The parts of a value that is a list separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _from_yaml(place: str, key: str, value: Any, kind: Any) -> Any:
    if value is None:
        return None
    where = f"{place}: key '{key}'"
    if kind is tuple:
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise ConfigError(f"{where} must be a list of texts, found {value!r}")
        return tuple(value)
    if kind is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} must be a mapping, found {value!r}")
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false, found {value!r}")
        return value
    if kind is str:
        if isinstance(value, list):
            parts = [",".join(map(str, part)) if isinstance(part, list) else str(part) for part in value]
            # a list of ranges, whose parts have commas of their own
            return (";" if any("," in part for part in parts) else ",").join(parts)
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            quote = " (YAML reads yes, no, on and off as true and false; put them in quotes)"
            raise ConfigError(f"{where} must be text, found {value!r}{quote if isinstance(value, bool) else ''}")
        return str(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f"{where} must be a number, found {value!r}")
    try:
        return _number(str(value), kind)
    except ValueError as error:
        raise ConfigError(f"{where} must be {_meta(kind).lower()}, found {value!r}") from error


def _number(text: str, kind: Any) -> Any:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    if kind is int:
        if number != int(number):
            raise ValueError(text)
        return int(number)
    return number


def _converter(kind: Any) -> typing.Callable[[str], Any]:
    def convert(text: str) -> Any:
        if kind is str:
            return text
        if kind is dict:
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = None
            if not isinstance(value, dict):
                raise argparse.ArgumentTypeError(
                    f"expected a JSON object such as '{{\"threshold\": 0.1}}', found {text!r}"
                )
            return value
        try:
            return _number(text, kind)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {_meta(kind).lower()}, found {text!r}") from error

    return convert


def _plain(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return str
    return typing.get_origin(kind) or kind


def _meta(kind: Any) -> str:
    return {int: "INTEGER", float: "NUMBER", dict: "JSON"}.get(kind, "TEXT")


def _withheld(options: Any) -> frozenset[str]:
    return getattr(options, "WITHHELD", frozenset())


def _shown(default: Any) -> str:
    """A default as it stands behind a help text; nothing for what is empty or off."""
    if default in (dataclasses.MISSING, None, "", ()) or default is False:
        return ""
    if default is True:
        return " [on]"
    return f" [{default:g}]" if isinstance(default, float) else f" [{default}]"
