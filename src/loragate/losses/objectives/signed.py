"""The two objectives of the paper's catalogue that are no weighted cross-entropy: EKSFT and Forgetting. Re-implementations.

Both average a term over the tokens it concerns ("sets"), as their own releases and texts do, so a rare kind of token counts
as much as a frequent one; `reduction="all"` divides every term by all response tokens instead, as the paper does for its
baselines. Sets are those of one forward pass: over several, the passes are averaged by their tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from loragate.errors import ConfigError, nearest
from loragate.losses.head import TokenStatistics
from loragate.losses.objectives.base import ObjectiveContext, require

REDUCTIONS = ("sets", "all")
COMBINATIONS = ("union", "intersection")
SCHEDULES = ("linear", "constant")


@dataclass(frozen=True)
class EntropyKLSelective:
    """EKSFT: cross-entropy where the model is neither uncertain nor far from a reference, regularised where it is.

    Per forward pass, with S_H the `ratio` of response tokens of the highest entropy H and S_K that of the highest
    KL(p ‖ reference):

        L = mean over T∖(S_H ∪ S_K) of −log p_t  −  entropy_weight · mean over S_H of H_t / log V
            +  kl_weight · mean over S_K of KL_t

    The sets are chosen under no_grad; H and KL are differentiated.

    Attributes:
        ratio: share of the response tokens in each of S_H and S_K, in [0, 1).
        entropy_weight, kl_weight: the coefficients λ_H and λ_K.
        combine: which tokens lose their cross-entropy: those in either set ("union") or in both ("intersection").
        reduction: "sets" or "all", see the module text.
    """

    ratio: float = 0.2
    entropy_weight: float = 0.05
    kl_weight: float = 0.05
    combine: str = "union"
    reduction: str = "sets"

    name = "eksft"
    k = 0
    requires = frozenset({"reference_kl"})
    outputs = ("log_prob", "entropy")
    gradients = None

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ConfigError(f"EKSFT's ratio is a share in [0, 1), found {self.ratio!r}")
        for name in ("entropy_weight", "kl_weight"):
            _require_not_negative("EKSFT", name, getattr(self, name))
        _require_among("EKSFT", "combine", self.combine, COMBINATIONS)
        _require_among("EKSFT", "reduction", self.reduction, REDUCTIONS)

    @property
    def settings(self) -> dict[str, Any]:
        """The constants, for run records."""
        names = ("ratio", "entropy_weight", "kl_weight", "combine", "reduction")
        return {name: getattr(self, name) for name in names}

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """The loss per token, shaped like the statistics.

        Raises:
            ConfigError: for statistics without a KL to a reference.
        """
        require(self, stats, context or ObjectiveContext())
        assert stats.kl is not None
        count = int(int(stats.mask.sum()) * self.ratio)
        high_entropy = largest_share(stats.entropy, stats.mask, count)
        high_kl = largest_share(stats.kl, stats.mask, count)
        masked = high_entropy | high_kl if self.combine == "union" else high_entropy & high_kl
        share = self._share(stats.mask)
        return (
            -share(stats.mask & ~masked) * stats.log_prob
            - self.entropy_weight * share(high_entropy) * stats.entropy / math.log(stats.k)
            + self.kl_weight * share(high_kl) * stats.kl
        )

    def _share(self, mask: torch.Tensor) -> Any:
        return lambda members: mean_weights(members, mask, self.reduction)


@dataclass(frozen=True)
class Forgetting:
    """Forgetting: learn the tokens that were judged useful, unlearn those that were judged harmful.

        L = mean over kept tokens of −log p_t  −  λ · mean over the others of −log p_t

    The judgement is the data's `keep_mask` (1 keep, 0 forget; `loragate mask` makes one from token influence). With the
    schedule "linear" λ grows from 0 to `coefficient` over the run. The second term has no lower bound.

    Attributes:
        coefficient: λ at the end of the run (linear) or throughout (constant).
        schedule: "linear" or "constant".
        reduction: "sets" or "all", see the module text.
    """

    coefficient: float = 0.1
    schedule: str = "linear"
    reduction: str = "sets"

    name = "forgetting"
    k = 2
    requires = frozenset({"keep_mask"})
    outputs = ("log_prob",)
    gradients = ("log_prob",)

    def __post_init__(self) -> None:
        _require_not_negative("Forgetting", "coefficient", self.coefficient)
        _require_among("Forgetting", "schedule", self.schedule, SCHEDULES)
        _require_among("Forgetting", "reduction", self.reduction, REDUCTIONS)

    @property
    def settings(self) -> dict[str, Any]:
        """The constants, for run records."""
        return {name: getattr(self, name) for name in ("coefficient", "schedule", "reduction")}

    def strength(self, context: ObjectiveContext) -> float:
        """λ at this point of the run."""
        return self.coefficient * (context.progress if self.schedule == "linear" else 1.0)

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """The loss per token, shaped like the statistics: negative on tokens to forget.

        Raises:
            ConfigError: for a context without a keep_mask.
        """
        context = context or ObjectiveContext()
        require(self, stats, context)
        assert context.keep_mask is not None
        keep = context.keep_mask.bool()
        learned = mean_weights(stats.mask & keep, stats.mask, self.reduction)
        unlearned = mean_weights(stats.mask & ~keep, stats.mask, self.reduction)
        return -(learned - self.strength(context) * unlearned) * stats.log_prob


def largest_share(values: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """Bool, shaped like `mask`: the `count` largest values among the labelled tokens; no gradient."""
    chosen = torch.zeros_like(mask)
    if count > 0:
        inside = torch.zeros_like(values.detach()[mask], dtype=torch.bool)
        inside[torch.topk(values.detach()[mask], count).indices] = True
        chosen[mask] = inside
    return chosen


def mean_weights(members: torch.Tensor, mask: torch.Tensor, reduction: str) -> torch.Tensor:
    """Weights whose sum over tokens, divided by all labelled tokens, is a mean over `members` ("sets"), or 1 for each."""
    weights = members.to(torch.float32)
    if reduction == "all":
        return weights
    return weights * (mask.sum() / members.sum().clamp(min=1))


def _require_not_negative(method: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{method}'s {name} is a number of at least 0, found {value!r}")


def _require_among(method: str, name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{method}'s {name} is {' or '.join(known)}, found {value!r}{nearest(str(value), known)}")
