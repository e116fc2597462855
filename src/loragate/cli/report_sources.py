"""What a folder given to `loragate report` holds: recognised by its files, read into plain records.

One folder may hold several things (a quickstart has results, trainings and an artifact), and every one of them becomes a
source. A folder that holds nothing known is an error that says what was looked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.errors import DataError, LoragateError

TRACES = "tokens.json"
DIAGNOSES = ("entropy.json", "gates.json", "interventions.json", "alignment.json")
DEPTHS = ("", "*/", "*/*/", "*/*/*/")
PATTERNS = [
    depth + name
    for name in (
        "results*.json",
        "sweep_results.json",
        "cells_*.json",
        "gate_config.json",
        *DIAGNOSES,
        TRACES,
        "metrics.jsonl",
    )
    for depth in DEPTHS
]
KNOWN = (
    "an artifact (gate_config.json)",
    "an evaluation or a quickstart (results.json)",
    "a sweep (sweep_results.json) or its evaluation (cells_*.json)",
    "a training (run/metrics.jsonl)",
    "a diagnosis (entropy.json, gates.json, interventions.json, alignment.json, tokens.json)",
)


@dataclass(frozen=True)
class Source:
    """One record found.

    Attributes:
        kind: artifact, evaluation, quickstart, sweep, training, diagnosis or traces.
        path: the file it came from.
        record: its content; for a training {"run": run.json or {}, "history": [log records]}.
        name: what to call it.
    """

    kind: str
    path: Path
    record: Any
    name: str


def all_sources(places: Sequence[str]) -> list[Source]:
    """Everything known in some places, each read once; places of one name are told apart by the folders above them.

    Raises:
        DataError: as `find_sources`.
    """
    whole = list(dict.fromkeys(Path(place).resolve() for place in places))
    found: list[Source] = []
    for place in whole:
        own = _parts_of(place)
        others = [_parts_of(other) for other in whole if other != place]
        count = next((n for n in range(1, len(own)) if all(part[-n:] != own[-n:] for part in others)), len(own))
        given = next(Path(text) for text in places if Path(text).resolve() == place)
        found += find_sources(given, "/".join(own[-count:]))
    return found


def _parts_of(place: Path) -> tuple[str, ...]:
    return (place.with_suffix("") if place.is_file() else place).parts


@contextmanager
def readable(source: Source) -> Iterator[None]:
    """Turns the failure to find in a record what it should hold into one sentence that names its file.

    Raises:
        DataError: for a record that was changed, or written by another version.
    """
    try:
        yield
    except LoragateError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise DataError(
            f"{source.path}: not the {source.kind} record that this version writes ({type(error).__name__}: {error}); make it "
            "anew with the command that wrote it, or leave it out"
        ) from error


def find_sources(place: Path, name: str = "") -> list[Source]:
    """Everything known in a folder and three folders down; or the one file that was named.

    Args:
        name: of the place in the report; by default its own.

    Raises:
        DataError: for a place that does not exist, holds nothing known, or holds a file that cannot be read.
    """
    if not place.exists():
        raise DataError(f"{place} does not exist; give folders that loragate commands have written")
    if place.is_file():
        found = _file(place, name or place.stem)
        if not found:
            raise DataError(f"{place} is no record that a report can show; known are {', '.join(KNOWN)}")
        return found
    found, name = [], name or place.resolve().name
    for pattern in PATTERNS:
        for file in sorted(place.glob(pattern)):
            folder = file.parent
            found += _file(file, name if folder == place else f"{name}/{folder.relative_to(place)}")
    if not found:
        raise DataError(f"{place} holds nothing that a report can show; looked for {', '.join(KNOWN)}")
    return found


def _file(file: Path, name: str) -> list[Source]:
    if file.name == "gate_config.json":
        if file.parent.parent.parent.name == "trials":
            return []  # a cell of a sweep, whose results say what it is
        return [Source("artifact", file, _json(file), name)]
    if file.name == "sweep_results.json":
        return [Source("sweep", file, _json(file), name)]
    if file.name.startswith("cells_"):
        return [Source("sweep", file, _json(file), f"{name} ({file.stem.removeprefix('cells_')})")]
    if file.name == "metrics.jsonl":
        run = file.with_name("run.json")
        record = {"run": _json(run) if run.is_file() else {}, "history": _lines(file)}
        return [Source("training", file, record, name.removesuffix("/run"))]
    if file.name == TRACES:
        return [Source("traces", file, _json(file), name)]
    if file.name in DIAGNOSES:
        record = _json(file)
        known = isinstance(record, dict) and {"kind", "conclusion"} <= set(record)
        return [Source("diagnosis", file, record, name)] if known else []
    if file.name.startswith("results") and file.suffix == ".json":
        record = _json(file)
        if isinstance(record, dict) and "table" in record and "calibrations" in record:
            return [Source("quickstart", file, record, name)]
        if isinstance(record, dict) and {"results", "tasks", "suites"} <= set(record):
            label = name if file.name == "results.json" else f"{name} ({file.stem})"
            return [Source("evaluation", file, record, label)]
    return []


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON ({error}); was it written to its end?") from error


def _lines(file: Path) -> list[dict[str, Any]]:
    """The log's records; a torn last line of a run that still goes on is left out."""
    records = []
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise DataError(f"{file} line {number} is not JSON ({error})") from error
    return records
