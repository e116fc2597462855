"""Where every trial stands, read from its files: the same for both runners and for workers on other machines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loragate.selection.candidate import Candidate
from loragate.selection.store import FAILED, STATUS, Store, TrialResult, read_json

RUNNING = ("loading", "training", "probing", "retention", "testing")


@dataclass(frozen=True)
class TrialState:
    """One line of the live table.

    Attributes:
        candidate: what is tried.
        state: waiting, loading, training, probing, testing, finished or failed.
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
