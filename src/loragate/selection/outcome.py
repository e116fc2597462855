"""What candidates did on the probe, what was picked, and the record of both that the artifact keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from loragate.selection.candidate import Candidate
from loragate.selection.choose import Choice
from loragate.selection.references import better, references_record
from loragate.selection.retention import retention_record
from loragate.training.guards import GuardLimits, Reading, breaches

ADAPTER = "adapter"
FEW_READ = 0.5
WARN = GuardLimits(terminated=0.1, length=2.0)
"""How far a candidate's probe answers may look away from the adapter's before the record says so."""


def unread(share: float, grader: str) -> list[str]:
    """A warning where the grader finds no answer in most of the adapter's samples, so that the probe measures its form."""
    if share >= FEW_READ:
        return []
    return [
        f"an answer could be read from only {100 * share:.0f} % of the adapter's samples by the grader {grader!r}; does the "
        "probe's prompt ask for the form that it reads, or does another --probe-grader fit?"
    ]


@dataclass(frozen=True)
class Outcome:
    """What one candidate did.

    Attributes:
        name: of the candidate, "adapter" for the untouched one.
        scores: float64 [questions, samples] on the probe.
        signs: what its answers look like (`ProbeScores.signs`).
        reading: the same as a guard sees them.
        retention: float64 [questions, samples] on the retention probe; None where there is none.
        evidence: record of its training (`CalibrationResult.evidence`); empty for the adapter.
        gates: its tensors; empty for the adapter.
        seconds: of training and probing.
    """

    name: str
    scores: np.ndarray
    signs: dict[str, float]
    reading: Reading
    retention: np.ndarray | None = None
    evidence: dict[str, Any] = field(default_factory=dict)
    gates: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """What was chosen, and everything it was chosen from.

    Attributes:
        choice: pick and evidence.
        candidate: the picked candidate; None where the adapter remains.
        outcomes: by name, the adapter among them.
        probe: description of the questions.
        retention: description of the retention probe; None where there is none.
        failed: {candidate: why its training could not go on}; these have no outcome.
        references: by name, what was asked for comparison only (`references.py`).
    """

    choice: Choice
    candidate: Candidate | None
    outcomes: dict[str, Outcome]
    probe: dict[str, Any]
    retention: dict[str, Any] | None = None
    failed: dict[str, str] = field(default_factory=dict)
    references: dict[str, Outcome] = field(default_factory=dict)

    def warnings(self, name: str) -> list[str]:
        """How the answers of a candidate look worse than the adapter's, and whether its training was stopped.

        Of a reference: whether it did better than what was picked.
        """
        if name in self.references:
            said = better(name, self.references[name].scores, self.outcomes[self.choice.name].scores, self.choice.name)
            return [] if said is None else [said]
        outcome = self.outcomes[name]
        stopped = outcome.evidence.get("training", {}).get("stopped")
        found = breaches(self.outcomes[ADAPTER].reading, outcome.reading, WARN)
        if name == ADAPTER:
            return unread(outcome.signs["read"], str(self.probe["grader"]))
        return [*([stopped] if stopped else []), *(f"on the probe {phrase} (the adapter)" for phrase in found)]

    def as_record(self) -> dict[str, Any]:
        """What the artifact keeps under "selection"."""
        trainings = [outcome for outcome in self.outcomes.values() if outcome.evidence]
        asked = {**self.outcomes, **self.references}
        return {
            "method": f"best of {len(trainings)} on a {self.probe['kind']} probe, the adapter among the candidates",
            "accepted": self.choice.accepted,
            "picked": self.choice.name,
            "probe": self.probe,
            "evidence": self.choice.evidence,
            "signs": {name: outcome.signs for name, outcome in asked.items()},
            "warnings": {name: found for name in asked if (found := self.warnings(name))},
            "vetoed": self.choice.vetoed,
            **({"failed": self.failed} if self.failed else {}),
            **self._retention_record(),
            **self._references_record(),
            "cost": {
                "trainings": len(trainings),
                "training_seconds": round(sum(o.seconds.get("training", 0.0) for o in self.outcomes.values()), 1),
                "probing_seconds": round(sum(o.seconds.get("probing", 0.0) for o in asked.values()), 1),
            },
        }

    def _references_record(self) -> dict[str, Any]:
        scores = {name: outcome.scores for name, outcome in self.references.items()}
        return {"references": references_record(scores, self.outcomes[self.choice.name].scores)} if scores else {}

    def _retention_record(self) -> dict[str, Any]:
        scores = {name: o.retention for name, o in self.outcomes.items() if o.retention is not None}
        return {"retention": retention_record(scores, ADAPTER, self.retention)} if self.retention and scores else {}
