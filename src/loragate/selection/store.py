"""A study and its store: the candidates, what their numbers depend on, and a folder per candidate that says what is finished.

`loragate calibrate` is a study of a few candidates, `loragate sweep` one of many. A resumed study must be the same study; what
is finished in its store is never run again, whoever ran it.

sweep.json                        the study, written before anything runs
trials/<slug>/result.json         scores and figures; written last, so a trial with a valid one is finished
trials/<slug>/gated/              the trained gates as a gated adapter, whose adapter/ is hard links to adapters/<label>/
trials/<slug>/trained.json        record of the training; from here on it is not trained again
trials/<slug>/part.json           what came of the first quarter of the training, where others were to be stopped there
trials/<slug>/run/                log and checkpoints of the training
trials/<slug>/failed.json         why the last attempt failed, until another one starts; final where the training diverged
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import ConfigError, DataError, DivergenceError, GateError, LoragateError
from loragate.files import read_json, require_same, write_json
from loragate.records import read_object
from loragate.selection.candidate import Candidate
from loragate.selection.probe import Scored, digest

RECORD = "sweep.json"
GATED, ADAPTERS = "gated", "adapters"
RESULT, TRAINED, PART, FAILED = "result.json", "trained.json", "part.json", "failed.json"


@dataclass(frozen=True)
class Study:
    """All candidates, in the order in which they are tried, and what their numbers depend on.

    Attributes:
        candidates: an adapter comes before the gates on it.
        identity: JSON-able; equal identities give equal numbers.
    """

    candidates: tuple[Candidate, ...]
    identity: Mapping[str, Any]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the identity; every result carries it."""
        return digest(self.identity)

    def as_dict(self) -> dict[str, Any]:
        """The content of sweep.json."""
        content = {
            "format": "loragate sweep",
            "version": 1,
            **self.identity,
            "fingerprint": self.fingerprint,
            "trials": {one.slug: one.as_record() for one in self.candidates},
        }
        return json.loads(json.dumps(content))

    @classmethod
    def read(cls, folder: Path) -> Study:
        """The study that was begun in `folder`.

        Raises:
            DataError: if there is none, or it cannot be read.
        """
        path = folder / RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            candidates = tuple(map(Candidate.from_record, record.pop("trials").values()))
            fingerprint = record.pop("fingerprint")
            study = cls(candidates, {key: value for key, value in record.items() if key not in ("format", "version")})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, GateError) as error:
            raise DataError(
                f"{path}: not the record of a sweep ({error}); give the --out of `loragate sweep`"
            ) from None
        if study.fingerprint != fingerprint:
            raise DataError(f"{path} was changed by hand: its fingerprint is of other settings; restore it")
        return study

    def begin(self, folder: Path, resume: bool) -> None:
        """Write down what is being tried, or check that a resumed study is the same; a ConfigError names the difference."""
        path, wanted = folder / RECORD, self.as_dict()
        if not path.exists():
            write_json(path, wanted)
            return
        if not resume:
            raise ConfigError(
                f"{folder} holds candidates of an earlier run; go on with --resume, or choose another --out"
            )
        remedy = "repeat the command with the same settings, rows and loragate, or choose another --out"
        stored = read_object(path, "choose another --out")
        for known in ({"fingerprint": None}, {}):  # it follows from the rest, and alone says nothing to a person
            require_same(path, {**stored, **known}, {**wanted, **known}, remedy)


@dataclass(frozen=True)
class TrialResult:
    """What one trial came to: the content of a result.json.

    Attributes:
        candidate: what was tried.
        probe, retention: scores; None without such questions.
        training: the training's record (`GateTrainingResult.evidence()["training"]` and its parity); empty where nothing
            is trained.
        modules: {module: λ statistics} after training.
        seconds: by stage, rounded to milliseconds, so that sums are the same after a resumption.
    """

    candidate: Candidate
    probe: Scored | None
    retention: Scored | None = None
    training: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", {stage: round(value, 3) for stage, value in self.seconds.items()})


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
            "seconds": result.seconds,
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
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def finished(self) -> dict[str, TrialResult]:
        """{slug: result} of all finished trials."""
        found = {one.slug: self.read(one) for one in self.study.candidates}
        return {slug: result for slug, result in found.items() if result is not None}

    def failure(self, candidate: Candidate) -> dict[str, Any]:
        """What `note_failure` kept of the last attempt; empty where it did not fail."""
        return read_json(self.place(candidate) / FAILED)

    def diverged(self) -> dict[str, str]:
        """{slug: why} of the trials whose training met a value that is not finite; another attempt would meet it again."""
        notes = {one.slug: self.failure(one.model) for one in self.study.candidates}
        return {
            slug: str(note.get("error"))
            for slug, note in notes.items()
            if note.get("diverged") is True and note.get("sweep") == self.study.fingerprint
        }

    def pending(self) -> list[Candidate]:
        """What is neither finished nor diverged."""
        final = {*self.finished(), *self.diverged()}
        return [one for one in self.study.candidates if one.slug not in final]

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


def _plain(scored: Scored | None) -> dict[str, Any] | None:
    return None if scored is None else {**vars(scored), "scores": scored.scores.tolist()}


def _scored(record: dict[str, Any] | None) -> Scored | None:
    if record is None:
        return None
    scores = np.array(record["scores"], dtype=np.float64)
    if scores.ndim != 2 or not scores.size or not np.isfinite(scores).all():
        raise ValueError("not a table of scores")
    forms = record.get("forms", [])  # an earlier version kept none
    return Scored(
        scores, record["signs"], record["answers_sha256"], record["questions"], record.get("about", {}), forms
    )
