"""Controls that train an adapter's own weights on entropy: does it take gates, or would the loss alone have done it?

"entropy" is Stage II's objective put on LoRA factors. "interleaved" takes cross-entropy and entropy steps in turn, so that
each objective's fixed point moves under the other (eq:rw-drift); freezing the delta removes that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loragate.losses.entropy import support_size
from loragate.losses.head import TokenStatistics
from loragate.losses.objectives.base import ObjectiveContext
from loragate.validate import Count, check


@dataclass(frozen=True)
class EntropyMinimisation:
    """Normalised top-k entropy of the next-token distribution (eq:rw-topk), on whatever trains.

    Attributes:
        k: support; 0 for the whole vocabulary.
    """

    k: int = 100

    name = "entropy"
    requires = frozenset[str]()
    outputs = ("log_prob", "topk_entropy")
    gradients = ("topk_entropy",)

    def __post_init__(self) -> None:
        support_size(self.k, 1 << 30)

    @property
    def settings(self) -> dict[str, Any]:
        """The constants, for run records."""
        return {"k": self.k}

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """H(q_t) / log k."""
        return stats.topk_entropy


@dataclass(frozen=True)
class Interleaved:
    """`ce_steps` optimiser steps on cross-entropy, then `entropy_steps` on entropy, and so on.

    Attributes:
        ce_steps, entropy_steps: length of each turn, at least 1.
        k: support of the entropy; 0 for the whole vocabulary.
    """

    ce_steps: Count = 1
    entropy_steps: Count = 1
    k: int = 100

    name = "interleaved"
    requires = frozenset[str]()
    outputs = ("log_prob", "topk_entropy")
    gradients = None

    def __post_init__(self) -> None:
        support_size(self.k, 1 << 30)
        check(self)

    @property
    def settings(self) -> dict[str, Any]:
        """The constants, for run records."""
        return {"ce_steps": self.ce_steps, "entropy_steps": self.entropy_steps, "k": self.k}

    def takes_entropy(self, step: int) -> bool:
        """Whether the optimiser step after `step` finished ones is one on entropy."""
        return step % (self.ce_steps + self.entropy_steps) >= self.ce_steps

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """−log p_t, or H(q_t) / log k, by the step."""
        step = 0 if context is None else context.step
        return stats.topk_entropy if self.takes_entropy(step) else -stats.log_prob
