"""The records that diagnostics leave behind: JSON with a schema number, read as strictly as it was written.

Each diagnostic defines its record as frozen dataclasses with the fields `kind` and `schema`; this module writes and reads
their files (`loragate.records`). It knows no diagnostic.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from loragate import records
from loragate.errors import DataError
from loragate.files import write_json
from loragate.validate import validate

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
    return About(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        models=dict(models),
        source=source,
        seed=seed,
        settings={name: str(value) for name, value in settings.items()},
        versions=records.package_versions(),
        seconds=round(seconds, 3),
    )


def write(record: Any, path: Path) -> None:
    """Write a record as JSON, atomically."""
    write_json(path, records.to_json(record))


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
    """The record that `write` wrote, out of its JSON value; `source` names it in errors."""
    wanted = {field.name: field.default for field in dataclasses.fields(typing.cast(Any, kind))}["kind"]
    found = value.get("kind") if isinstance(value, dict) else None
    if found != wanted:
        raise DataError(f"{source}: found kind {found!r}, expected {wanted!r}; this is another record")
    schema = value.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise DataError(f"{source}: found schema {schema!r}, this version reads {SCHEMA}; run the diagnostic again")
    return validate(kind, value, source, DataError, "run the diagnostic again")
