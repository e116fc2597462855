"""What a folder given to `loragate report` holds: recognised by its files, read into plain records.

One folder may hold several things (a quickstart has results, trainings and an artifact), and every one of them becomes a
source. A folder that holds nothing known is an error that says what was looked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.errors import DataError

TRACES = "tokens.json"
DIAGNOSES = ("entropy.json", "gates.json", "interventions.json", "alignment.json")
DEPTHS = ("", "*/", "*/*/", "*/*/*/")
PATTERNS = [
    depth + name
    for name in ("results*.json", "sweep_results.json", "gate_config.json", *DIAGNOSES, TRACES, "metrics.jsonl")
    for depth in DEPTHS
]
KNOWN = (
    "an artifact (gate_config.json)",
    "an evaluation or a quickstart (results.json)",
    "a sweep (sweep_results.json)",
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


def find_sources(place: Path) -> list[Source]:
    """Everything known in a folder and three folders down; or the one file that was named.

    Raises:
        DataError: for a place that does not exist, holds nothing known, or holds a file that cannot be read.
    """
    if not place.exists():
        raise DataError(f"{place} does not exist; give folders that loragate commands have written")
    if place.is_file():
        found = _file(place, place.stem)
        if not found:
            raise DataError(f"{place} is no record that a report can show; known are {', '.join(KNOWN)}")
        return found
    found = []
    for pattern in PATTERNS:
        for file in sorted(place.glob(pattern)):
            folder = file.parent
            found += _file(
                file, place.resolve().name if folder == place else f"{place.resolve().name}/{folder.relative_to(place)}"
            )
    if not found:
        raise DataError(f"{place} holds nothing that a report can show; looked for {', '.join(KNOWN)}")
    return found


def _file(file: Path, name: str) -> list[Source]:
    if file.name == "gate_config.json":
        return [Source("artifact", file, _json(file), name)]
    if file.name == "sweep_results.json":
        return [Source("sweep", file, _json(file), name)]
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
