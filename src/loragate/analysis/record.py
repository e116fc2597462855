"""The records that diagnostics leave behind: JSON with a schema number, read as strictly as it was written.

Each diagnostic defines its record as frozen dataclasses; this room turns them into JSON and back. A key too many, one too
few or a value of the wrong kind is an error that names the place, because a record read halfway gives a picture that
looks whole. It knows no diagnostic.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from loragate.errors import DataError, nearest
from loragate.files import write_json

SCHEMA = 1
R = TypeVar("R")


@dataclass(frozen=True)
class About:
    """What stands in every record.

    Attributes:
        created: time, ISO 8601 with time zone.
        models: {"base": …, "adapter": …, "gated": …}, as far as there were any.
        source: what was read: rows, answers, tasks.
        seed: of sampling and of the bootstrap.
        settings: the command's settings that decide the figures, as text.
        versions: of the packages and the machine's system.
        seconds: of the whole command.
    """

    created: str
    models: dict[str, str]
    source: str
    seed: int
    settings: dict[str, str]
    versions: dict[str, str]
    seconds: float


def about(models: Mapping[str, str], source: str, seed: int, settings: Mapping[str, Any], seconds: float) -> About:
    """`About` of a diagnostic that has just ended; settings are kept as text."""
    from loragate.evaluation.results import package_versions

    return About(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        models=dict(models),
        source=source,
        seed=seed,
        settings={name: str(value) for name, value in settings.items()},
        versions=package_versions(),
        seconds=round(seconds, 3),
    )


def to_json(record: Any) -> Any:
    """The record as JSON values; raises `DataError` for a figure that is not finite."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {str(key): to_json(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [to_json(value) for value in record]
    value = record.item() if isinstance(record, np.generic) else record
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"found {value} in a record; every figure must be finite, and None where it is not known")
    return value


def write(record: Any, path: Path) -> None:
    """Write a record as JSON, atomically."""
    write_json(path, to_json(record))


def read(kind: type[R], path: str | Path) -> R:
    """The record of one kind in a file.

    Raises:
        DataError: naming file and key, for anything that `write` did not write.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; `loragate diagnose` writes such records") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); run the diagnostic again") from None
    return from_json(kind, value, str(path))


def from_json(kind: type[R], value: Any, source: str = "record") -> R:
    """The record that `to_json` gave; `source` names it in errors."""
    wanted = {field.name: field.default for field in dataclasses.fields(typing.cast(Any, kind))}["kind"]
    found = value.get("kind") if isinstance(value, dict) else None
    if found != wanted:
        raise DataError(f"{source}: found kind {found!r}, expected {wanted!r}; this is another record")
    schema = value.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise DataError(f"{source}: found schema {schema!r}, this version reads {SCHEMA}; run the diagnostic again")
    return typing.cast(R, _parse(kind, value, source))


def _parse(kind: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _parse_fields(kind, value, place)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _parse(inner, value, place)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_parse(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _parse(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise DataError(f"{place}: found {value!r:.80}, expected {_name(kind)}; run the diagnostic again")


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return str(getattr(typing.get_origin(kind) or kind, "__name__", kind))


def _parse_fields(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise DataError(f"{place}: found {value!r:.80}, expected an object with the keys of {kind.__name__}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for key in value:
        if key not in names:
            raise DataError(f"{place}: unknown key {key!r}{nearest(key, names)}; upgrade loragate, or remove it")
    for name in names:
        if name not in value:
            raise DataError(f"{place}: the key {name!r} is missing; run the diagnostic again")
    return kind(**{name: _parse(hints[name], value[name], f"{place}.{name}") for name in names})
