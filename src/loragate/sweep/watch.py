"""Where every trial stands, read from its files: the same for both runners and for workers on other machines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loragate.sweep.plan import SweepPlan, Trial
from loragate.sweep.records import FAILED, STATUS, TrialResult, diverged, read_json, read_result, trial_folder

RUNNING = ("loading", "training", "probing", "testing")


@dataclass(frozen=True)
class TrialState:
    """One line of the live table.

    Attributes:
        trial: which one.
        state: waiting, loading, training, probing, testing, finished or failed.
        done, total: steps, or answers while they are sampled.
        entropy: normalised top-k entropy of the training so far, None where there is none.
        score: mean probe score, 0 to 1, when finished; None without a probe.
        error: why it failed.
    """

    trial: Trial
    state: str
    done: int = 0
    total: int = 0
    entropy: float | None = None
    score: float | None = None
    error: str = ""


class Watch:
    """Reads the states again at every call; what earlier processes left behind counts as waiting, unless it is final.

    Args:
        folder, plan: of the sweep.
    """

    def __init__(self, folder: Path, plan: SweepPlan) -> None:
        self.folder, self.plan = folder, plan
        self.began = time.time() - 1.0
        self.finished: dict[str, TrialState] = {}
        self.diverged = diverged(folder, plan)  # by an earlier process; what diverges in this one is recent

    def states(self) -> list[TrialState]:
        """One per trial, in the plan's order."""
        return [self._state(trial) for trial in self.plan.trials]

    def _state(self, trial: Trial) -> TrialState:
        if trial.slug in self.finished:
            return self.finished[trial.slug]
        if (result := read_result(self.folder, self.plan, trial)) is not None:
            return self.finished.setdefault(trial.slug, _finished(result))
        place = trial_folder(self.folder, trial)
        if trial.slug in self.diverged:
            return TrialState(trial, "failed", error=self.diverged[trial.slug])
        if self._recent(place / FAILED):
            return TrialState(trial, "failed", error=str(read_json(place / FAILED).get("error", "")))
        status = read_json(place / STATUS) if self._recent(place / STATUS) else {}
        if status.get("stage") not in RUNNING:
            return TrialState(trial, "waiting")
        return TrialState(trial, status["stage"], status.get("done", 0), status.get("total", 0), status.get("entropy"))

    def _recent(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime >= self.began
        except OSError:
            return False


def _finished(result: TrialResult) -> TrialState:
    steps = int(result.training.get("steps", 0))
    score = None if result.probe is None else float(np.mean(result.probe.scores))
    return TrialState(result.trial, "finished", steps, steps, result.training.get("entropy_after"), score)
