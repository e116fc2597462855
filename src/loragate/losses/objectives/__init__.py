"""Stage-I token objectives as a registry of small objects over token statistics; docs/methods.md derives each.

weighted   sft, dft, profit, eaft, talr, mask: cross-entropies with a detached weight w_t ≥ 0
signed     eksft, forgetting: with terms that no nonnegative weight gives
controls   entropy, interleaved: the adapter itself trained on entropy
"""

from __future__ import annotations

from collections.abc import Callable

from loragate.losses.objectives.base import (
    Objective,
    ObjectiveContext,
    WeightedCrossEntropy,
)
from loragate.losses.objectives.controls import EntropyMinimisation, Interleaved
from loragate.losses.objectives.signed import EntropyKLSelective, Forgetting
from loragate.losses.objectives.weighted import dft, eaft, mask, median_sequence_loss, profit, sft, talr

FACTORIES: dict[str, Callable[..., Objective]] = {
    "sft": sft,
    "dft": dft,
    "profit": profit,
    "eaft": eaft,
    "talr": talr,
    "mask": mask,
    "eksft": EntropyKLSelective,
    "forgetting": Forgetting,
    "entropy": EntropyMinimisation,
    "interleaved": Interleaved,
}
objectives: dict[str, Objective] = {name: make() for name, make in FACTORIES.items()}

__all__ = [
    "FACTORIES",
    "EntropyKLSelective",
    "EntropyMinimisation",
    "Forgetting",
    "Interleaved",
    "Objective",
    "ObjectiveContext",
    "WeightedCrossEntropy",
    "dft",
    "eaft",
    "mask",
    "median_sequence_loss",
    "objectives",
    "profit",
    "sft",
    "talr",
]
