"""What a task says about a data set's columns: their types, checked row by row before anything is asked, and templates over them.

A type is written `text`, `integer`, `number`, `boolean`, `texts` (a list of text) or `object`; `text|number` allows either, and
a `?` at the end allows null or no such column. Columns that a schema does not name are left alone.

Templates are Jinja, sandboxed: no attribute tricks, files or globals. A name that a row cannot fill is an error and never an
empty text, as a prompt with a hole looks like a model that cannot answer. Two filters are added to Jinja's own: `boxed`, the
content of the last \boxed{...}, and `undollar`, which takes the dollar signs of LaTeX mathematics away.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.answers import last_boxed
from loragate.printable import excerpt


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # True is an int to Python


TYPES: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": lambda value: _is_integer(value) or (isinstance(value, float) and math.isfinite(value)),
    "boolean": lambda value: isinstance(value, bool),
    "texts": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "object": lambda value: isinstance(value, dict),
}


def check_schema(schema: Mapping[str, str], place: str) -> None:
    """Raise ConfigError for a type that is not known; `place` names file and key."""
    for column, type_name in schema.items():
        for word in type_name.removesuffix("?").split("|"):
            if word not in TYPES:
                raise ConfigError(
                    f"{place}: the column '{column}' has the unknown type '{word}'{nearest(word, TYPES)}; "
                    f"known: {', '.join(TYPES)}, joined by |, with ? where null is allowed"
                )


def describe_schema(schema: Mapping[str, str]) -> str:
    """The columns that must be there: "problem (text), answer (text or number)"."""
    return ", ".join(f"{name} ({_words(kind)})" for name, kind in schema.items() if not kind.endswith("?"))


def check_row(row: Mapping[str, Any], schema: Mapping[str, str], where: str, task: str) -> None:
    """Raise DataError naming place and column if a column is absent or of another type than the schema's."""
    for column, type_name in schema.items():
        value = row.get(column)
        if value is None and type_name.endswith("?"):
            continue
        if column not in row:
            raise DataError(
                f"{where}: no column '{column}'{nearest(column, map(str, row)) or '.'} {found_columns(row)}; "
                f"{task} expects {describe_schema(schema)}"
            )
        if not any(TYPES[word](value) for word in type_name.removesuffix("?").split("|")):
            raise DataError(f"{where}: column '{column}' holds {shown(value)}, expected {_words(type_name)}")


def found_columns(row: Mapping[str, Any]) -> str:
    """ "Found the columns a, b", the first twelve, safe to print."""
    names = [excerpt(str(name), 40).strip("'") for name in row]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"Found the columns {', '.join(names[:12])}{more}" if names else "Found no columns"


def shown(value: Any) -> str:
    """A text between quotes, any other value as JSON writes it; cut and escaped for a message."""
    return excerpt(value) if isinstance(value, str) else excerpt(json.dumps(value, default=str)).strip("'")


def _words(type_name: str) -> str:
    return type_name.removesuffix("?").replace("|", " or ")


def _boxed(text: str) -> str:
    found = last_boxed(text)
    if not found:
        raise ValueError(r"there is no \boxed{...} in it")
    return found


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.globals.clear()  # Jinja's own: range, dict, lipsum, …
    environment.filters |= {"boxed": _boxed, "undollar": lambda text: re.sub(r"(?<!\\)\$", "", text).strip()}
    return environment


@cache
def _compile(source: str) -> Template:
    return _environment().from_string(source)


def is_template(text: str) -> bool:
    """Whether a text is a template rather than the name of a column."""
    return "{{" in text or "{%" in text


def variables(source: str, place: str) -> set[str]:
    """Names of columns that a template reads; the name of a column reads itself.

    Raises:
        ConfigError: for a template that cannot be read; `place` names file and key.
    """
    if not is_template(source):
        return {source}
    try:
        _compile(source)  # `parse` alone takes a filter that does not exist
        return meta.find_undeclared_variables(_environment().parse(source))
    except TemplateSyntaxError as error:
        raise ConfigError(f"{place}: line {error.lineno} of the template: {error.message}") from None


def render(source: str, values: Mapping[str, Any], what: str) -> str:
    """The text of a template.

    Raises:
        DataError: naming `what` (place and template) if it cannot be filled.
    """
    try:
        return _compile(source).render(values)
    except Exception as error:  # filters raise whatever the row's values make them raise
        raise DataError(f"{what} cannot be filled: {error}") from None
