"""The weighted cross-entropies of the paper's table of token correctors: one rule for w_t each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt

from loragate.errors import ConfigError
from loragate.losses.entropy import support_size
from loragate.losses.head import TokenStatistics
from loragate.losses.objectives.base import Gather, ObjectiveContext, WeightedCrossEntropy
from loragate.validate import PositiveFloat, UnitInterval, validate

# what constants may be
_POSITIVE: Any = PositiveFloat
_BELOW_ONE: Any = Annotated[float, Ge(0), Lt(1)]
_TAU: Any = PositiveFloat | Literal["median"]


def sft() -> WeightedCrossEntropy:
    """Plain cross-entropy, w = 1 (eq:rw-sft)."""
    return WeightedCrossEntropy("sft", lambda stats, _: torch.ones_like(stats.log_prob))


def dft() -> WeightedCrossEntropy:
    """Dynamic fine-tuning, w = p_t: the detached probability of the target."""
    return WeightedCrossEntropy("dft", lambda stats, _: stats.log_prob.exp())


def profit(threshold: float = 0.1) -> WeightedCrossEntropy:
    """ProFit, w = 1[p_t > threshold]; the released code's default threshold 0.1 (unstated in the paper)."""
    validate(_BELOW_ONE, threshold, "ProFit's threshold, a probability")
    return WeightedCrossEntropy(
        "profit",
        lambda stats, _: (stats.log_prob.exp() > threshold).to(stats.log_prob.dtype),
        settings={"threshold": threshold},
    )


def eaft(k: int = 20, power: float = 1.0, normalizer: float | None = None) -> WeightedCrossEntropy:
    """EAFT, w = (top-k entropy / normaliser)^power; None divides by log k, 3.0 is the released code's (0.14 % smaller weights)."""
    support_size(k, 1 << 30)
    if k == 0:
        raise ConfigError("EAFT's k is a number of tokens, at least 2; its authors use 20")
    validate(_POSITIVE, power, "EAFT's power")
    validate(_POSITIVE, 1.0 if normalizer is None else normalizer, "EAFT's normalizer")
    factor = 1.0 if normalizer is None else math.log(k) / normalizer

    def rule(stats: TokenStatistics, _: ObjectiveContext) -> torch.Tensor:
        if stats.k != k:
            raise ConfigError(f"EAFT reads top-{k} entropy, the statistics were made with k = {stats.k}")
        return (stats.topk_entropy.clamp(min=0) * factor) ** power

    return WeightedCrossEntropy(
        "eaft", rule, k=k, reads=("topk_entropy",), settings={"k": k, "power": power, "normalizer": normalizer}
    )


def talr(tau: float | str = "median", floor: float = 0.01) -> WeightedCrossEntropy:
    """TALR, w = max(floor, p_t^(1/τ)).

    Args:
        tau: "median" takes the median over the batch (all rows of the optimiser step, on all processes) of the
            per-sequence mean loss, anew at each step; of an even number of sequences the lower of the middle two, as torch's
            median is. A number fixes it, and saves the pass that measures the losses.
        floor: smallest weight. Both defaults rest on third-party evidence; the paper states neither.
    """
    validate(_TAU, tau, "TALR's tau")
    validate(UnitInterval, floor, "TALR's floor, a weight")
    fixed = None if isinstance(tau, str) else torch.as_tensor(tau)

    def rule(stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
        scale = context.batch if fixed is None else fixed
        return torch.exp(stats.log_prob / scale.to(stats.log_prob)).clamp(min=floor)  # p^(1/τ)

    return WeightedCrossEntropy(
        "talr",
        rule,
        settings={"tau": tau, "floor": floor},
        over_batch=median_sequence_loss if fixed is None else None,
        batch_reads=("log_prob",) if fixed is None else (),
    )


def median_sequence_loss(
    parts: Sequence[tuple[TokenStatistics, ObjectiveContext]], gather: Gather
) -> list[torch.Tensor]:
    """Lower median over the batch's sequences of the mean token loss, a scalar of at least 1e-6; the same for every part."""
    means = gather(torch.cat([sequence_losses(stats, context) for stats, context in parts]))
    # with a NaN in the median every row's loss would be one, and the message could not name the row at fault
    median = means.nanmedian().clamp(min=1e-6) if means.numel() else means.new_ones(())
    return [median] * len(parts)


def sequence_losses(stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
    """Mean token loss of each sequence with a label, [sequences]; rows are sequences unless ids say so."""
    loss, mask = -stats.log_prob, stats.mask
    if context.sequence_ids is not None:
        ids = context.sequence_ids[mask]
        _, ids = torch.unique(ids, return_inverse=True)  # rows of the data set, renumbered from 0
        count = int(ids.max()) + 1 if ids.numel() else 0
        sums = loss.new_zeros(count).index_add_(0, ids, loss[mask])
        sizes = loss.new_zeros(count).index_add_(0, ids, torch.ones_like(loss[mask]))
    else:
        rows = loss.reshape(-1, loss.shape[-1]) if loss.dim() > 1 else loss.reshape(1, -1)
        kept = mask.reshape(rows.shape)
        sums, sizes = (rows * kept).sum(-1), kept.sum(-1).to(loss.dtype)
    return sums[sizes > 0] / sizes[sizes > 0]


def mask() -> WeightedCrossEntropy:
    """Offline token mask: w = 1 where the data's keep_mask column is 1."""

    def rule(stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
        assert context.keep_mask is not None
        return context.keep_mask.to(stats.log_prob.dtype)

    return WeightedCrossEntropy("mask", rule, requires=frozenset({"keep_mask"}))
