"""What a folder given to `loragate report` holds: recognised by its files, read into plain records.

One folder may hold several things (a quickstart has scores, trainings, artifacts and a diagnosis), and every one of them becomes a
source. A folder that holds nothing known is an error that says what was looked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loragate.errors import DataError
from loragate.files import RunFolder
from loragate.records import read_value
from loragate.selection_record import FILE

T = TypeVar("T")
BROKEN = "was it written to its end?"
KINDS = {
    "results*.json": "evaluation",
    "selection.json": "selection",
    "gate_config.json": "artifact",
    "doctor.json": "examination",
    "entropy.json": "diagnosis",
    "gates.json": "diagnosis",
    "interventions.json": "diagnosis",
    "alignment.json": "diagnosis",
    "tokens.json": "traces",
    "metrics.jsonl": "training",
}
"""{pattern of a file's name: what it is a record of}, in the order in which a page shows those of one kind"""
SETS = ("dev", "retention")
"""Folders inside that of a job (a choice of gates, a check-up) with the evaluations by which it recommends; kinds of their own."""
DEPTHS = tuple("*/" * depth for depth in range(6))  # the deepest is RUN/gated/run/trials/TRIAL/run of a quickstart
KNOWN = (
    "an artifact (gate_config.json), an evaluation (results.json), a selection (selection.json), a check-up "
    "(doctor.json), a training (run/metrics.jsonl), a diagnosis (entropy.json, gates.json, interventions.json, "
    "alignment.json, tokens.json)"
)


@dataclass(frozen=True)
class Source:
    """One record found.

    Attributes:
        kind: artifact, evaluation, selection, examination, training, diagnosis or traces; dev or retention for an evaluation
            that a choice was made on, which is no test of what was chosen.
        path: the file it came from.
        record: its content; for a training {"history": [log records]}.
        name: what to call it.
    """

    kind: str
    path: Path
    record: Any
    name: str

    def convert(self, make: Callable[[Any], T]) -> T:
        """What `make` makes of the record.

        Raises:
            DataError: naming the file, for a record that was changed, or written by another version.
        """
        try:
            return make(self.record)
        except (DataError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"
            raise DataError(
                f"{self.path}: not the {self.kind} record that this version writes ({why}); make it anew with the command that "
                "wrote it, or leave it out"
            ) from error


def all_sources(places: Sequence[str]) -> list[Source]:
    """Everything known in some places, each read once; places of one name are told apart by the folders above them.

    Raises:
        DataError: as `find_sources`.
    """
    given: dict[Path, Path] = {}
    for text in places:
        given.setdefault(Path(text).resolve(), Path(text))
    parts = {place: (place.with_suffix("") if place.is_file() else place).parts for place in given}
    found: list[Source] = []
    for place, own in parts.items():
        others = [other for there, other in parts.items() if there != place]
        count = next((n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)), len(own))
        found += find_sources(given[place], "/".join(own[-count:]))
    return found


def find_sources(place: Path, name: str = "") -> list[Source]:
    """Everything known in a folder and five folders down; or the one file that was named.

    Args:
        name: of the place in the report; by default its own.

    Raises:
        DataError: for a place that does not exist, holds nothing known, or holds a file that cannot be read.
    """
    if not place.exists():
        raise DataError(f"{place} does not exist; give folders that loragate commands have written")
    if place.is_file():
        found = [_file(place, name or place.stem)]
    else:
        name = name or place.resolve().name
        files = [
            file for pattern in KINDS for depth in DEPTHS for file in sorted(place.glob(depth + pattern), key=_order)
        ]
        inside = [file.parent.relative_to(place) for file in files]
        found = [_file(file, name if at == Path() else f"{name}/{at}") for file, at in zip(files, inside, strict=True)]
    if not any(found):
        raise DataError(f"{place} holds nothing that a report can show; looked for {KNOWN}")
    return [source for source in found if source is not None]


def _order(file: Path) -> tuple[Path, str]:
    """By folder; results.json before the other grades of the same answers."""
    return file.parent, file.stem


def _file(file: Path, name: str) -> Source | None:
    """The source that a file is; None for a file of another program, and for a cell of a sweep, whose results speak for it."""
    kind = next((kind for pattern, kind in KINDS.items() if file.match(pattern)), None)
    if kind is None:
        return None
    if kind == "training":
        return Source(kind, file, {"history": _lines(file)}, name.removesuffix("/run"))
    record = read_value(file, BROKEN)
    keys = set(record) if isinstance(record, dict) else set()
    # other programs write files of these names too
    wanted = {
        "evaluation": {"results", "tasks", "suites"},
        "diagnosis": {"kind", "conclusion"},
        "examination": {"verdict", "findings", "measures"},
    }
    of_sweep = kind == "artifact" and file.parent.parent.parent.name == "trials"
    if of_sweep or not wanted.get(kind, set()) <= keys:
        return None
    if kind == "evaluation" and file.name != "results.json":
        name += f" ({file.stem})"
    # where the job was killed, or is a check-up, there is no record of a selection
    of_job = any((file.absolute().parent.parent / record_of).is_file() for record_of in (FILE, RunFolder.RECORD))
    if kind == "evaluation" and file.parent.name in SETS and of_job:
        kind = file.parent.name
    return Source(kind, file, record, name)


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
