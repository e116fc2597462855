"""Dataclasses as JSON files and back, and with which packages they were made.

Evaluations and diagnostics leave frozen dataclasses behind as files. This module knows no record; the schema number and the
words of a missing file belong to the room that defines one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from loragate.errors import DataError, LoragateError
from loragate.validate import validate

T = TypeVar("T")

PACKAGES = ("loragate", "torch", "transformers", "peft", "vllm", "math-verify", "sympy", "lm_eval")


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
    value = record.item() if hasattr(record, "dtype") else record  # numpy's number as Python's
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"found {value} in a record; every figure must be finite, and None where it is not known")
    return value


def read_value(path: Path, remedy: str, raised: type[LoragateError] = DataError) -> Any:
    """The content of a JSON file; raises `raised`, naming the file and the remedy, for anything else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise raised(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    except ValueError as error:
        raise raised(f"{path} is not JSON ({error}); {remedy}") from None


def read_object(path: Path, remedy: str, raised: type[LoragateError] = DataError) -> dict[str, Any]:
    """The object of a JSON file; raises as `read_value`, and for a value that is none."""
    value = read_value(path, remedy, raised)
    if not isinstance(value, dict):
        raise raised(f"{path}: found {value!r:.40}, expected a record; {remedy}")
    return value


def read(kind: type[T], path: Path, remedy: str) -> T:
    """The dataclass of a JSON file that `to_json` gave; raises `DataError`, naming file, key and remedy, for anything else."""
    return validate(kind, read_value(path, remedy), str(path), DataError, remedy)


def read_lines(path: Path, remedy: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of each line of a file of JSON lines.

    Raises `DataError`, naming the line and the remedy, for what is not JSON.
    """
    # not splitlines: a text may hold unusual line separators, which JSON leaves as they are
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        where = f"{path}, line {number}"
        try:
            yield where, json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error}); {remedy}") from None


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of Python, the system and the installed ones of `packages`, "absent" for the others."""
    versions = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions
