"""Types of a data set's columns, checked row by row before anything is asked.

A type is written `text`, `integer`, `number`, `boolean`, `texts` (a list of text) or `object`; `text|number` allows
either, and a `?` at the end allows null or no such column. Columns that a schema does not name are left alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loragate.errors import ConfigError, DataError, nearest
from loragate.printable import excerpt


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


def found_columns(row: Mapping[str, Any], limit: int = 12) -> str:
    """ "Found the columns a, b", safe to print."""
    names = [excerpt(str(name), 40).strip("'") for name in row]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"Found the columns {', '.join(names[:limit])}{more}" if names else "Found no columns"


def shown(value: Any) -> str:
    """A value and its type, cut and escaped for a message."""
    if value is None:
        return "null"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return f"{excerpt(text)} ({_kind(value)})"


def _kind(value: Any) -> str:
    for name in ("boolean", "integer", "text", "texts", "object", "number"):
        if TYPES[name](value):
            return _words(name)
    return "a list" if isinstance(value, list) else type(value).__name__


def _words(type_name: str) -> str:
    names = {"text": "text", "integer": "whole number", "texts": "list of texts"}
    words: Iterable[str] = type_name.removesuffix("?").split("|")
    return " or ".join(names.get(word, word) for word in words)
