"""What needs no gates, asked on the same labelled probe: the base without the adapter, and the adapter sampled cooler.

Neither can be picked, as what is written is the adapter, gated or not. But whoever may switch the adapter off or lower the
temperature should learn from the same questions whether that does more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from loragate.evaluation import average_at_k, compare
from loragate.selection.candidate import ADAPTER, BASE, Candidate
from loragate.selection.probe import COOL, Probe

COOLER = f"{ADAPTER} T={COOL:g}"  # as an evaluation names the same row
_DOES = {
    BASE: "the base without the adapter",
    COOLER: f"the plain adapter at temperature {COOL:g}",
}
_HINT = {
    BASE: "if nothing else speaks for the adapter, leave it off",
    COOLER: "where the temperature is yours to choose, lower it first",
}


def references_of(probe: Probe, can_be_off: bool = True) -> tuple[Candidate, ...]:
    """What can be compared on a probe; nothing where the adapter's own majority stands in for labels.

    Args:
        can_be_off: switching the adapter off gives the base; not so where it trained biases along.
    """
    if probe.kind != "labelled":
        return ()
    found = [Candidate(None, BASE)] if can_be_off else []
    if probe.sampling.temperature > COOL:
        found.append(Candidate(None, ADAPTER, temperature=COOL))
    return tuple(found)


def references_record(scores: Mapping[str, np.ndarray], picked: np.ndarray) -> dict[str, Any]:
    """For the artifact: the score of each, and its paired difference from what was picked.

    Args:
        scores: {name: scores [questions, samples]}.
        picked: the same of the pick, or of the adapter where that remains.
    """
    return {
        name: {**asdict(average_at_k(values)), "against_picked": asdict(compare(values, picked))}
        for name, values in scores.items()
    }


def better(name: str, scores: np.ndarray, picked: np.ndarray, picked_name: str) -> str | None:
    """A sentence where a reference scored more than what was picked, else None; scores are [questions, samples]."""
    found = compare(scores, picked)
    if found.mean <= 0:
        return None
    return (
        f"{_DOES[name]} scores {100 * np.mean(scores):.1f} % on the same questions, {100 * found.mean:.1f} points more than "
        f"{picked_name} (95 % interval {100 * found.low:+.1f} to {100 * found.high:+.1f}); "
        + (_HINT[name] if found.low > 0 else "so few questions cannot tell the two apart")
    )
