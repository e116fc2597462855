"""The files of one trial, and the locks that keep two processes out of one folder.

trials/<slug>/result.json         scores and figures; written last, so a trial with a valid one is finished
trials/<slug>/gated/              the trained gates as a gated adapter, whose adapter/ is hard links to adapters/<label>/
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import DivergenceError, LoragateError
from loragate.files import write_json
from loragate.sweep.plan import SweepPlan, Trial

try:
    import fcntl
except ImportError:  # no such locks on Windows
    fcntl = None  # type: ignore[assignment]

CELL = "gated"
"""Folder of a trial's gated adapter."""
RESULT, FAILED, STATUS, ATTEMPTS = "result.json", "failed.json", "status.json", "attempts.jsonl"
WRITE_EVERY_S = 0.5


@dataclass(frozen=True)
class Scored:
    """What a model did on a set of questions.

    Attributes:
        scores: float64 [questions, samples], 1 where the sample counts.
        signs: finished, tokens, distinct, as in `selection.probe.ProbeScores`.
        answers_sha256: over the tokens of all answers; equal for equal answers.
        questions: fingerprint of questions and sampling.
    """

    scores: np.ndarray
    signs: dict[str, float]
    answers_sha256: str
    questions: str


@dataclass(frozen=True)
class TrialResult:
    """The content of a result.json.

    Attributes:
        trial: which one.
        probe, test: scores; None without a probe, or without a test set.
        training: the training's record (`CalibrationResult.evidence()["training"]`); empty for the adapter.
        modules: {module: λ statistics} after training.
        seconds: by stage.
        attempt: number of the start that finished it, its process and machine.
    """

    trial: Trial
    probe: Scored | None
    test: Scored | None = None
    training: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    attempt: dict[str, Any] = field(default_factory=dict)


def trial_folder(folder: Path, trial: Trial) -> Path:
    """Where a trial's files lie."""
    return folder / "trials" / trial.slug


def write_result(folder: Path, plan: SweepPlan, result: TrialResult) -> None:
    """Make the trial finished."""
    record: dict[str, Any] = {
        "format": "loragate sweep trial",
        "version": 1,
        "sweep": plan.fingerprint,
        "kind": result.trial.kind,
        "trial": asdict(result.trial),
        "probe": _plain(result.probe),
        "test": _plain(result.test),
        "training": result.training,
        "gates": result.modules,
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        "attempt": result.attempt,
    }
    write_json(trial_folder(folder, result.trial) / RESULT, record)


def read_result(folder: Path, plan: SweepPlan, trial: Trial) -> TrialResult | None:
    """The result of a finished trial; None where there is none, or one of another sweep or version."""
    path = trial_folder(folder, trial) / RESULT
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        # a plan without a probe says so; a result without its score is none where there is one
        if record["probe"] is None and plan.identity.get("probe", True) is not None:
            return None
        if record["sweep"] != plan.fingerprint or record["trial"] != asdict(trial) or record["version"] != 1:
            return None
        return TrialResult(
            trial,
            _scored(record["probe"]),
            _scored(record["test"]),
            record["training"],
            record["gates"],
            record["seconds"],
            record["attempt"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finished(folder: Path, plan: SweepPlan) -> dict[str, TrialResult]:
    """{slug: result} of all finished trials."""
    found = {trial.slug: read_result(folder, plan, trial) for trial in plan.trials}
    return {slug: result for slug, result in found.items() if result is not None}


def note_attempt(place: Path, **facts: Any) -> dict[str, Any]:
    """Add a line to attempts.jsonl and return it; its number counts from 1."""
    path = place / ATTEMPTS
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


def diverged(folder: Path, plan: SweepPlan) -> dict[str, str]:
    """{slug: reason} of the trials whose training met a value that is not finite; another attempt would meet it again."""
    notes = {trial.slug: read_json(trial_folder(folder, trial) / FAILED) for trial in plan.trials}
    return {
        slug: str(note.get("error"))
        for slug, note in notes.items()
        if note.get("diverged") is True and note.get("sweep") == plan.fingerprint
    }


def note_failure(place: Path, plan: SweepPlan, error: BaseException) -> None:
    """Keep why an attempt failed."""
    text = str(error) if isinstance(error, LoragateError) else f"{type(error).__name__}: {error}"
    with suppress(LoragateError):  # the failure itself matters more than its note
        note = {"error": text[:2000], "diverged": isinstance(error, DivergenceError), "sweep": plan.fingerprint}
        write_json(place / FAILED, {**note, "time": round(time.time(), 3)})


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


@contextmanager
def held(path: Path, wait_s: float, taken: str) -> Iterator[None]:
    """Hold a lock file; the system releases it however the process ends.

    Raises:
        LoragateError: saying `taken` if another process still holds it after `wait_s` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    until = time.monotonic() + wait_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise LoragateError(taken) from None
                time.sleep(0.2)
            except OSError:
                break  # a file system without locks
        yield


def _plain(scored: Scored | None) -> dict[str, Any] | None:
    if scored is None:
        return None
    return {
        "questions": scored.questions,
        "scores": scored.scores.tolist(),
        "signs": scored.signs,
        "answers_sha256": scored.answers_sha256,
    }


def _scored(record: dict[str, Any] | None) -> Scored | None:
    if record is None:
        return None
    scores = np.array(record["scores"], dtype=np.float64)
    if scores.ndim != 2 or not scores.size or not np.isfinite(scores).all():
        raise ValueError("not a table of scores")
    return Scored(scores, record["signs"], record["answers_sha256"], record["questions"])
