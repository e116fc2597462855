"""Dataclasses as JSON and back, read as strictly as they were written.

Evaluations and diagnostics leave frozen dataclasses behind as files. A key too many, one too few or a value of the wrong
kind is an error that names the place, because a record read halfway gives a table that looks whole. This module knows no
record; the schema number and the words of a missing file belong to the room that defines one.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Literal, TypeVar

import numpy as np

from loragate.errors import DataError, LoragateError, nearest

PACKAGES = ("loragate", "torch", "transformers", "peft", "vllm", "math-verify", "sympy", "lm_eval")
T = TypeVar("T")


def to_json(record: Any) -> Any:
    """Dataclasses, mappings, sequences and numpy's numbers as JSON values; the names of fields become keys.

    Raises `DataError` for a figure that is not finite.
    """
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


def from_json(kind: type[T], value: Any, place: str, remedy: str) -> T:
    """The instance of the dataclass `kind` that `to_json` gave.

    Args:
        place: of the value, such as its file; opens every error message.
        remedy: what to do about a damaged record; closes most of them.

    Raises:
        DataError: for an unknown key, a missing one, or a value of another kind than the field's annotation.
    """
    if not isinstance(value, dict):
        raise DataError(f"{place}: found {value!r:.80}, expected an object with the keys of {kind.__name__}")
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(typing.cast(Any, kind))]
    for key in value:
        if key not in names:
            raise DataError(f"{place}: unknown key {key!r}{nearest(key, names)}; remove it, or upgrade loragate")
    for name in names:
        if name not in value:
            raise DataError(f"{place}: the key {name!r} is missing; {remedy}")
    fields = {name: _value(hints[name], value[name], f"{place}.{name}", remedy) for name in names}
    try:
        return kind(**fields)
    except LoragateError as error:
        raise DataError(f"{place}: {error}") from None


def _value(kind: Any, value: Any, place: str, remedy: str) -> Any:
    """`value` as an instance of the annotation `kind`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return from_json(typing.cast(type, kind), value, place, remedy)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return None if value is None else _value(inner, value, place, remedy)
    if origin is Literal and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], item, f"{place}[{index}]", remedy) for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        whole = arguments[0] is int
        if whole and not all(key.isdecimal() for key in value):
            raise DataError(f"{place}: found the keys {', '.join(value)}; expected whole numbers")
        items = {key: _value(arguments[1], item, f"{place}.{key}", remedy) for key, item in value.items()}
        return {int(key): item for key, item in items.items()} if whole else items
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind in (int, str, bool) and type(value) is kind:
        return value
    expected = (
        " or ".join(map(repr, arguments)) if origin is Literal else getattr(origin or kind, "__name__", str(kind))
    )
    raise DataError(f"{place}: found {value!r:.80}, expected {expected}; {remedy}")


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of Python, the system and the installed ones of `packages`, "absent" for the others."""
    versions = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions
