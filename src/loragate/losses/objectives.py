"""Stage-I token objectives as a registry of small objects over token statistics.

Every weighted objective is −w_t · log p_t with a detached w_t ≥ 0; the trainer divides the sum by the response tokens of
the global batch, so masked or down-weighted tokens stay in the denominator (the paper's 1/|T| for every baseline).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from loragate.errors import ConfigError
from loragate.losses.head import TokenStatistics


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective may need beside the statistics, shaped like them.

    Attributes:
        keep_mask: bool, the precomputed token mask of the "mask" objective.
        sequence_ids: int64, which sequence a token belongs to, for packed rows; None means one sequence per row.
        reference_log_prob: log p of a reference model.
    """

    keep_mask: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    reference_log_prob: torch.Tensor | None = None


class Objective(Protocol):
    """A per-token training objective."""

    name: str
    k: int
    requires: frozenset[str]

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """Loss per token, shaped like the statistics, zero where the label is ignored."""


Rule = Callable[[TokenStatistics, ObjectiveContext], torch.Tensor]


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """−w_t · log p_t with w_t from a rule under no_grad.

    Attributes:
        name: registry name.
        rule: gives w_t ≥ 0 for every position.
        k: support of the top-k entropy the rule reads (2 where it reads none).
        requires: names of `ObjectiveContext` fields the rule needs.
        reads_entropy: whether the rule reads the top-k entropy.
        settings: the rule's constants, for run records.
    """

    name: str
    rule: Rule
    k: int = 2
    requires: frozenset[str] = frozenset()
    reads_entropy: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def weights(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """Detached CE coefficients w_t, shaped like the statistics, zero where the label is ignored.

        Raises:
            ConfigError: if the context lacks something the rule needs.
        """
        context = context or ObjectiveContext()
        for name in sorted(self.requires):
            if getattr(context, name) is None:
                raise ConfigError(
                    f"objective {self.name!r} needs {name}; give the data a column {name!r} (0/1 per response token)"
                    if name == "keep_mask"
                    else f"objective {self.name!r} needs {name}"
                )
        with torch.no_grad():
            return torch.where(stats.mask, self.rule(stats, context), torch.zeros_like(stats.log_prob)).detach()

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """−w_t · log p_t."""
        return -self.weights(stats, context) * stats.log_prob


def sft() -> WeightedCrossEntropy:
    """Plain cross-entropy, w = 1 (eq:rw-sft)."""
    return WeightedCrossEntropy("sft", lambda stats, _: torch.ones_like(stats.log_prob))


def dft() -> WeightedCrossEntropy:
    """Dynamic fine-tuning, w = p_t: the detached probability of the target."""
    return WeightedCrossEntropy("dft", lambda stats, _: stats.log_prob.exp())


def profit(threshold: float = 0.1) -> WeightedCrossEntropy:
    """ProFit, w = 1[p_t > threshold]; the released code's default threshold 0.1 (unstated in the paper)."""
    if not 0 <= threshold < 1:
        raise ConfigError(f"ProFit's threshold is a probability in [0, 1), found {threshold!r}")
    return WeightedCrossEntropy(
        "profit",
        lambda stats, _: (stats.log_prob.exp() > threshold).to(stats.log_prob.dtype),
        settings={"threshold": threshold},
    )


def eaft(k: int = 20, power: float = 1.0, normalizer: float | None = None) -> WeightedCrossEntropy:
    """EAFT, w = (top-k entropy / normaliser)^power.

    Args:
        k: support of the entropy, 20.
        power: exponent, 1.
        normalizer: None divides by log k; 3.0 reproduces the released code (0.14 % smaller weights).
    """
    factor = 1.0 if normalizer is None else math.log(k) / normalizer

    def rule(stats: TokenStatistics, _: ObjectiveContext) -> torch.Tensor:
        if stats.k != k:
            raise ConfigError(f"EAFT reads top-{k} entropy, the statistics were made with k = {stats.k}")
        return (stats.topk_entropy.clamp(min=0) * factor) ** power

    return WeightedCrossEntropy(
        "eaft", rule, k=k, reads_entropy=True, settings={"k": k, "power": power, "normalizer": normalizer}
    )


def talr(tau: float | str = "median", floor: float = 0.01) -> WeightedCrossEntropy:
    """TALR, w = max(floor, p_t^(1/τ)).

    Args:
        tau: "median" takes the median over the batch of the per-sequence mean loss, anew at each step; it depends on
            how the batch is split. A number fixes it.
        floor: smallest weight. Both defaults rest on third-party evidence; the paper states neither.
    """
    if isinstance(tau, str) and tau != "median":
        raise ConfigError(f"TALR's tau is a positive number or 'median', found {tau!r}")
    if not isinstance(tau, str) and tau <= 0:
        raise ConfigError(f"TALR's tau must be positive, found {tau!r}")

    def rule(stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
        scale = median_sequence_loss(stats, context) if isinstance(tau, str) else torch.as_tensor(tau)
        return torch.exp(stats.log_prob / scale.to(stats.log_prob)).clamp(min=floor)

    return WeightedCrossEntropy("talr", rule, settings={"tau": tau, "floor": floor})


def median_sequence_loss(stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
    """Median over sequences of the mean token loss, a scalar of at least 1e-6; rows are sequences unless ids say so."""
    loss, mask = -stats.log_prob, stats.mask
    if context.sequence_ids is not None:
        ids = context.sequence_ids[mask]
        _, ids = torch.unique(ids, return_inverse=True)
        count = int(ids.max()) + 1 if ids.numel() else 0
        sums = loss.new_zeros(count).index_add_(0, ids, loss[mask])
        sizes = loss.new_zeros(count).index_add_(0, ids, torch.ones_like(loss[mask]))
    else:
        rows = loss.reshape(-1, loss.shape[-1]) if loss.dim() > 1 else loss.reshape(1, -1)
        kept = mask.reshape(rows.shape)
        sums, sizes = (rows * kept).sum(-1), kept.sum(-1).to(loss.dtype)
    means = sums[sizes > 0] / sizes[sizes > 0]
    return means.median().clamp(min=1e-6) if means.numel() else loss.new_ones(())


def mask() -> WeightedCrossEntropy:
    """Offline token mask: w = 1 where the data's keep_mask column is 1."""

    def rule(stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
        assert context.keep_mask is not None
        return context.keep_mask.to(stats.log_prob.dtype)

    return WeightedCrossEntropy("mask", rule, requires=frozenset({"keep_mask"}))


objectives: dict[str, WeightedCrossEntropy] = {
    objective.name: objective for objective in (sft(), dft(), profit(), eaft(), talr(), mask())
}
FACTORIES: dict[str, Callable[..., WeightedCrossEntropy]] = {
    "sft": sft,
    "dft": dft,
    "profit": profit,
    "eaft": eaft,
    "talr": talr,
    "mask": mask,
}
