"""The one store of trials: a folder per candidate, whose files say what is finished, whoever ran it.

trials/<slug>/result.json         scores and figures; written last, so a trial with a valid one is finished
trials/<slug>/gated/              the trained gates as a gated adapter, whose adapter/ is hard links to adapters/<label>/
trials/<slug>/trained.json        record of the training; from here on it is not trained again
trials/<slug>/part.json           what came of the first quarter of the training, where others were to be stopped there
trials/<slug>/run/                log and checkpoints of the training
trials/<slug>/attempts.jsonl      one line per start: when, where, by which process
trials/<slug>/status.json         where it stands, for the live table; may be out of date
trials/<slug>/failed.json         why the last attempt failed, until another one starts; final where the training diverged
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import DivergenceError, LoragateError
from loragate.files import write_json
from loragate.selection.candidate import Candidate
from loragate.selection.probe import Probe, ProbeScores
from loragate.selection.study import Study, digest
from loragate.training.guards import Reading

GATED, ADAPTERS = "gated", "adapters"
RESULT, TRAINED, PART, FAILED, STATUS, ATTEMPTS = (
    "result.json",
    "trained.json",
    "part.json",
    "failed.json",
    "status.json",
    "attempts.jsonl",
)
WRITE_EVERY_S = 0.5


@dataclass(frozen=True)
class Scored:
    """What a model did on a set of questions.

    Attributes:
        scores: float64 [questions, samples], 1 where the sample counts.
        signs: finished, tokens, distinct, read, as in `selection.probe.ProbeScores`.
        answers_sha256: over the tokens of all answers; equal for equal answers.
        questions: fingerprint of questions and sampling.
        about: description of the questions (`Probe.as_dict`).
        reading: the answers as a guard sees them; None in records that do not hold it.
    """

    scores: np.ndarray
    signs: dict[str, float]
    answers_sha256: str
    questions: str
    about: dict[str, Any] = field(default_factory=dict)
    reading: Reading | None = None

    @classmethod
    def of(cls, probe: Probe, found: ProbeScores) -> Scored:
        """What a candidate did on a probe."""
        answers = [[sample.question, sample.sample, list(sample.token_ids)] for sample in found.samples]
        return cls(found.scores, found.signs, digest(answers), probe.fingerprint, probe.as_dict(), found.reading)

    def with_more(self, more: Scored) -> Scored:
        """The same with further questions; signs and reading are means over the answers of both."""
        here, there = self.scores.size, more.scores.size

        def mean(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
            return {name: (here * value + there * other[name]) / (here + there) for name, value in one.items()}

        reading = None
        if self.reading is not None and more.reading is not None:
            one, other = ({k: v for k, v in asdict(r).items() if v is not None} for r in (self.reading, more.reading))
            reading = Reading(**{**mean(one, other), "step": 0, "answers": here + there})  # type: ignore[arg-type]
        return replace(
            self,
            scores=np.concatenate([self.scores, more.scores]),
            signs=mean(self.signs, more.signs),
            answers_sha256=digest([self.answers_sha256, more.answers_sha256]),
            reading=reading,
        )


@dataclass(frozen=True)
class TrialResult:
    """What one trial came to: the content of a result.json.

    Attributes:
        candidate: what was tried.
        probe, test, retention: scores; None without a probe, a test set, or a retention probe.
        training: the training's record (`CalibrationResult.evidence()["training"]` and its parity); empty where nothing
            is trained.
        modules: {module: λ statistics} after training.
        seconds: by stage.
        attempt: number of the start that finished it, its process and machine.
    """

    candidate: Candidate
    probe: Scored | None
    test: Scored | None = None
    retention: Scored | None = None
    training: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    attempt: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Store:
    """The trials of a study in its folder.

    Attributes:
        folder: of the study.
        study: what is tried there; what another study left in the folder does not count.
    """

    folder: Path
    study: Study

    @classmethod
    def open(cls, folder: Path) -> Store:
        """The store of a study that was begun; raises DataError where there is none."""
        return cls(folder, Study.read(folder))

    def place(self, candidate: Candidate) -> Path:
        """Where a trial's files lie."""
        return self.folder / "trials" / candidate.slug

    def write(self, result: TrialResult) -> None:
        """Make the trial finished."""
        record: dict[str, Any] = {
            "format": "loragate sweep trial",
            "version": 1,
            "sweep": self.study.fingerprint,
            "kind": result.candidate.kind,
            "trial": result.candidate.as_record(),
            "probe": _plain(result.probe),
            "test": _plain(result.test),
            **({} if result.retention is None else {"retention": _plain(result.retention)}),
            "training": result.training,
            "gates": result.modules,
            "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
            "attempt": result.attempt,
        }
        write_json(self.place(result.candidate) / RESULT, record)

    def read(self, candidate: Candidate) -> TrialResult | None:
        """The result of a finished trial; None where there is none, or one of another study or version."""
        try:
            record = json.loads((self.place(candidate) / RESULT).read_text(encoding="utf-8"))
            # a study without a probe says so; a result without its score is none where there is one
            if record["probe"] is None and self.study.identity.get("probe", True) is not None:
                return None
            known = (self.study.fingerprint, candidate.as_record(), 1)
            if (record["sweep"], record["trial"], record["version"]) != known:
                return None
            return TrialResult(
                candidate,
                _scored(record["probe"]),
                _scored(record["test"]),
                _scored(record.get("retention")),
                record["training"],
                record["gates"],
                record["seconds"],
                record["attempt"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def finished(self) -> dict[str, TrialResult]:
        """{slug: result} of all finished trials."""
        found = {one.slug: self.read(one) for one in self.study.candidates}
        return {slug: result for slug, result in found.items() if result is not None}

    def diverged(self) -> dict[str, str]:
        """{slug: why} of the trials whose training met a value that is not finite; another attempt would meet it again."""
        notes = {one.slug: read_json(self.place(one.model) / FAILED) for one in self.study.candidates}
        return {
            slug: str(note.get("error"))
            for slug, note in notes.items()
            if note.get("diverged") is True and note.get("sweep") == self.study.fingerprint
        }

    def pending(self) -> list[Candidate]:
        """What is neither finished nor diverged."""
        final = {*self.finished(), *self.diverged()}
        return [one for one in self.study.candidates if one.slug not in final]

    def note_attempt(self, candidate: Candidate, **facts: Any) -> dict[str, Any]:
        """Add a line to attempts.jsonl and return it; its number counts from 1."""
        path = self.place(candidate) / ATTEMPTS
        before = path.read_bytes() if path.exists() else b""
        torn = bool(before) and not before.endswith(b"\n")
        record = {
            "attempt": before.count(b"\n") + torn + 1,
            "started": round(time.time(), 3),
            "process": os.getpid(),
            "machine": socket.gethostname(),
            **facts,
        }
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(record) + "\n")
        return record

    def note_failure(self, candidate: Candidate, error: BaseException) -> None:
        """Keep why an attempt failed."""
        text = str(error) if isinstance(error, LoragateError) else f"{type(error).__name__}: {error}"
        with suppress(LoragateError):  # the failure itself matters more than its note
            note = {
                "error": text[:2000],
                "diverged": isinstance(error, DivergenceError),
                "sweep": self.study.fingerprint,
            }
            write_json(self.place(candidate) / FAILED, {**note, "time": round(time.time(), 3)})


def read_json(path: Path) -> dict[str, Any]:
    """A small JSON object; empty where the file is absent or being written."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Status:
    """Writes a trial's status.json, at most twice a second while a stage lasts."""

    def __init__(self, place: Path) -> None:
        self.path = place / STATUS
        self.stage, self.written = "", 0.0

    def __call__(self, stage: str, done: int = 0, total: int = 0, entropy: float | None = None) -> None:
        now = time.monotonic()
        if stage == self.stage and done < total and now - self.written < WRITE_EVERY_S:
            return
        self.stage, self.written = stage, now
        record = {"stage": stage, "done": done, "total": total, "entropy": entropy, "process": os.getpid()}
        temporary = self.path.with_suffix(f".{os.getpid()}.partial")
        with suppress(OSError):  # only a display depends on it
            temporary.write_text(json.dumps(record), encoding="utf-8")
            temporary.replace(self.path)


def _plain(scored: Scored | None) -> dict[str, Any] | None:
    if scored is None:
        return None
    return {
        "questions": scored.questions,
        "scores": scored.scores.tolist(),
        "signs": scored.signs,
        "answers_sha256": scored.answers_sha256,
        "about": scored.about,
        "reading": None if scored.reading is None else asdict(scored.reading),
    }


def _scored(record: dict[str, Any] | None) -> Scored | None:
    if record is None:
        return None
    scores = np.array(record["scores"], dtype=np.float64)
    if scores.ndim != 2 or not scores.size or not np.isfinite(scores).all():
        raise ValueError("not a table of scores")
    reading = record.get("reading")
    return Scored(
        scores,
        record["signs"],
        record["answers_sha256"],
        record["questions"],
        record.get("about", {}),
        None if reading is None else Reading(**reading),
    )
