"""What needs no gates, asked on the same labelled probe: the base without the adapter, and the adapter sampled cooler.

Neither can be picked, as what is written is the adapter, gated or not. But whoever may switch the adapter off or lower the
temperature should learn from the same questions whether that does more.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from loragate.evaluation import average_at_k, compare
from loragate.selection.probe import COOL, Probe

BASE = "base"
COOLER = f"adapter T={COOL:g}"  # as an evaluation names the same row
_DOES = {
    BASE: "the base without the adapter",
    COOLER: f"the plain adapter at temperature {COOL:g}",
}
_HINT = {
    BASE: "if nothing else speaks for the adapter, leave it off",
    COOLER: "where the temperature is yours to choose, lower it first",
}


@dataclass(frozen=True)
class Reference:
    """One comparison on the probe that cannot be picked: the base, or the adapter at a lower temperature.

    Attributes:
        name: as printed and recorded.
        folder: name of its folder.
        probe: the questions, as this one is asked.
        without_adapter: the adapter is off.
    """

    name: str
    folder: str
    probe: Probe
    without_adapter: bool = False

    def acting(self, model: Any) -> AbstractContextManager[Any]:
        """Within this context the PEFT model without gates answers as the reference."""
        return model.disable_adapter() if self.without_adapter else nullcontext()


def references_of(probe: Probe, can_be_off: bool = True) -> tuple[Reference, ...]:
    """What can be compared on a probe; nothing where the adapter's own majority stands in for labels.

    Args:
        can_be_off: switching the adapter off gives the base; not so where it trained biases along.
    """
    if probe.kind != "labelled":
        return ()
    found = [Reference(BASE, "base", probe, without_adapter=True)] if can_be_off else []
    if probe.sampling.temperature > COOL:
        cooler = replace(probe, sampling=replace(probe.sampling, temperature=COOL))
        found.append(Reference(COOLER, "cooler", cooler))
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
