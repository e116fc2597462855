"""Dataclasses as JSON, and with which packages they were made; `loragate.validate` reads them back.

Evaluations and diagnostics leave frozen dataclasses behind as files. This module knows no record; the schema number and the
words of a missing file belong to the room that defines one.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from loragate.errors import DataError

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
    value = record.item() if isinstance(record, np.generic) else record
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"found {value} in a record; every figure must be finite, and None where it is not known")
    return value


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of Python, the system and the installed ones of `packages`, "absent" for the others."""
    versions = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return versions
