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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import DivergenceError, LoragateError
from loragate.files import read_json, write_json
from loragate.selection.candidate import Candidate
from loragate.selection.probe import Scored
from loragate.selection.study import Study

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
RUNNING = ("loading", "training", "probing", "retention")


@dataclass(frozen=True)
class TrialResult:
    """What one trial came to: the content of a result.json.

    Attributes:
        candidate: what was tried.
        probe, retention: scores; None without such questions.
        training: the training's record (`CalibrationResult.evidence()["training"]` and its parity); empty where nothing
            is trained.
        modules: {module: λ statistics} after training.
        seconds: by stage.
        attempt: number of the start that finished it, its process and machine.
    """

    candidate: Candidate
    probe: Scored | None
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


@dataclass(frozen=True)
class TrialState:
    """One line of the live table.

    Attributes:
        candidate: what is tried.
        state: waiting, loading, training, probing, retention, finished or failed.
        done, total: steps, or answers while they are sampled.
        entropy: normalised top-k entropy of the training so far, None where there is none.
        score: mean probe score, 0 to 1, when finished; None without a probe.
        error: why it failed.
    """

    candidate: Candidate
    state: str
    done: int = 0
    total: int = 0
    entropy: float | None = None
    score: float | None = None
    error: str = ""


class Watch:
    """Reads the states again at every call; what earlier processes left behind counts as waiting, unless it is final."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.began = time.time() - 1.0
        self.finished: dict[str, TrialState] = {}
        self.diverged = store.diverged()  # in an earlier process; what diverges in this one is recent

    def states(self) -> list[TrialState]:
        """The state of each trial, in the study's order."""
        return [self._state(one) for one in self.store.study.candidates]

    def _state(self, one: Candidate) -> TrialState:
        if one.slug in self.finished:
            return self.finished[one.slug]
        if (result := self.store.read(one)) is not None:
            return self.finished.setdefault(one.slug, _finished(result))
        place = self.store.place(one)
        if one.slug in self.diverged:
            return TrialState(one, "failed", error=self.diverged[one.slug])
        if self._recent(place / FAILED):
            return TrialState(one, "failed", error=str(read_json(place / FAILED).get("error", "")))
        status = read_json(place / STATUS) if self._recent(place / STATUS) else {}
        if status.get("stage") not in RUNNING:
            return TrialState(one, "waiting")
        return TrialState(one, status["stage"], status.get("done", 0), status.get("total", 0), status.get("entropy"))

    def _recent(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime >= self.began
        except OSError:
            return False


def _finished(result: TrialResult) -> TrialState:
    steps = int(result.training.get("steps", 0))
    score = None if result.probe is None else float(np.mean(result.probe.scores))
    return TrialState(result.candidate, "finished", steps, steps, result.training.get("entropy_after"), score)


def _plain(scored: Scored | None) -> dict[str, Any] | None:
    return None if scored is None else {**vars(scored), "scores": scored.scores.tolist()}


def _scored(record: dict[str, Any] | None) -> Scored | None:
    if record is None:
        return None
    scores = np.array(record["scores"], dtype=np.float64)
    if scores.ndim != 2 or not scores.size or not np.isfinite(scores).all():
        raise ValueError("not a table of scores")
    return Scored(scores, record["signs"], record["answers_sha256"], record["questions"], record.get("about", {}))
