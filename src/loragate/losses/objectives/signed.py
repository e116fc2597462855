"""The objectives that are no weighted cross-entropy: EKSFT and Forgetting, re-implemented, and two controls.

EKSFT and Forgetting average a term over the tokens it concerns ("sets"), as their own releases and texts do, so a rare kind of
token counts as much as a frequent one; `reduction="all"` divides every term by all response tokens instead, as the paper does
for its baselines. Sets and their sizes are those of the whole batch, whatever forward passes it is cut into.

The controls train an adapter's own weights on entropy: does it take gates, or would the loss alone have done it? "entropy" is
Stage II's objective put on LoRA factors. "interleaved" takes cross-entropy and entropy steps in turn, so that each objective's
fixed point moves under the other (eq:rw-drift); freezing the delta removes that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt

from loragate.errors import ConfigError
from loragate.losses.entropy import support_size
from loragate.losses.head import TokenStatistics
from loragate.losses.objectives.base import DataclassSettings, Gather, ObjectiveContext, require, within_batch
from loragate.validate import NonNegativeFloat, PositiveInt, check_fields

Reduction = Literal["sets", "all"]


@dataclass(frozen=True)
class EntropyKLSelective(DataclassSettings):
    """EKSFT: cross-entropy where the model is neither uncertain nor far from a reference, regularised where it is.

    With S_H the `ratio` of the batch's response tokens of the highest entropy H and S_K that of the highest
    KL(p ‖ reference):

        L = mean over T∖(S_H ∪ S_K) of −log p_t  −  entropy_weight · mean over S_H of H_t / log V
            +  kl_weight · mean over S_K of KL_t

    The sets are chosen under no_grad; H and KL are differentiated. Tokens that tie with the first one outside a set are
    outside too: before the first step the model is its reference, every KL is 0 and S_K is empty.
    """

    ratio: Annotated[float, Ge(0), Lt(1)] = 0.2  # share of the response tokens in each of S_H and S_K
    entropy_weight: NonNegativeFloat = 0.05  # λ_H
    kl_weight: NonNegativeFloat = 0.05  # λ_K
    # which tokens lose their cross-entropy: those in either set ("union") or in both ("intersection")
    combine: Literal["union", "intersection"] = "union"
    reduction: Reduction = "sets"  # or "all", see the module text

    name = "eksft"
    k = 0
    requires = frozenset({"reference_kl"})
    outputs = ("log_prob", "entropy")
    gradients = None
    batch_reads = ("entropy",)

    def __post_init__(self) -> None:
        check_fields(self)

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """The loss per token, shaped like the statistics; a ConfigError where these have no KL to a reference."""
        require(self, stats, context or ObjectiveContext())
        assert stats.kl is not None
        learned, high_entropy, high_kl = within_batch(self.over_batch, stats, context).batch
        return (
            -learned * stats.log_prob
            - self.entropy_weight * high_entropy * stats.entropy / math.log(stats.k)
            + self.kl_weight * high_kl * stats.kl
        )

    def over_batch(self, parts: Sequence[tuple[TokenStatistics, ObjectiveContext]], gather: Gather) -> list[Any]:
        """For each part the token weights of the three terms, each shaped like its statistics."""
        masks = [stats.mask for stats, _ in parts]
        high_entropy = top_ratio_masks([stats.entropy for stats, _ in parts], masks, self.ratio, gather)
        high_kl = top_ratio_masks([stats.kl for stats, _ in parts], masks, self.ratio, gather)
        union = self.combine == "union"
        both = zip(masks, high_entropy, high_kl, strict=True)
        learned = [mask & ~(entropy | kl if union else entropy & kl) for mask, entropy, kl in both]
        terms = [mean_weights(members, masks, self.reduction, gather) for members in (learned, high_entropy, high_kl)]
        return list(zip(*terms, strict=True))


@dataclass(frozen=True)
class Forgetting(DataclassSettings):
    """Forgetting: learn the tokens that were judged useful, unlearn those that were judged harmful.

        L = mean over kept tokens of −log p_t  −  λ · mean over the others of −log p_t

    The judgement is the data's `keep_mask` (1 keep, 0 forget; `loragate mask` makes one from token influence, of which the
    released code keeps 0.7). With the schedule "linear" λ = (t_max − t_min) · share of the run that is done, as in the
    released code; "constant" is t_max throughout. The second term has no lower bound.
    """

    t_max: NonNegativeFloat = 0.25  # the released constants of λ
    t_min: NonNegativeFloat = 1e-5
    schedule: Literal["linear", "constant"] = "linear"
    reduction: Reduction = "sets"  # or "all", see the module text

    name = "forgetting"
    k = 2
    requires = frozenset({"keep_mask"})
    outputs = ("log_prob",)
    gradients = ("log_prob",)
    batch_reads = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.t_min > self.t_max:
            raise ConfigError(f"Forgetting's t_min is at most its t_max ({self.t_max!r}), found {self.t_min!r}")

    def strength(self, context: ObjectiveContext) -> float:
        """λ at this point of the run."""
        return (self.t_max - self.t_min) * context.progress if self.schedule == "linear" else self.t_max

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """The loss per token, shaped like the statistics, negative on tokens to forget; a ConfigError without a keep_mask."""
        context = context or ObjectiveContext()
        require(self, stats, context)
        learned, unlearned = within_batch(self.over_batch, stats, context).batch
        return -(learned - self.strength(context) * unlearned) * stats.log_prob

    def over_batch(self, parts: Sequence[tuple[TokenStatistics, ObjectiveContext]], gather: Gather) -> list[Any]:
        """For each part the token weights of the two terms, each shaped like its statistics."""
        masks = [stats.mask for stats, _ in parts]
        kept = [context.keep_mask.bool() for _, context in parts if context.keep_mask is not None]
        learned = [mask & keep for mask, keep in zip(masks, kept, strict=True)]
        unlearned = [mask & ~keep for mask, keep in zip(masks, kept, strict=True)]
        terms = [mean_weights(members, masks, self.reduction, gather) for members in (learned, unlearned)]
        return list(zip(*terms, strict=True))


def top_ratio_masks(
    values: Sequence[Any], masks: Sequence[torch.Tensor], ratio: float, gather: Gather
) -> list[torch.Tensor]:
    """Bool, shaped like `masks`: int(ratio · N) largest values among the N labelled tokens of the batch; no gradient.

    Fewer where values tie with the largest one that is left out.
    """
    inside = [value.detach()[mask] for value, mask in zip(values, masks, strict=True)]
    whole = gather(torch.cat(inside))
    if not whole.numel():
        return [torch.zeros_like(mask) for mask in masks]
    bound = torch.topk(whole, int(whole.numel() * ratio) + 1).values[-1]  # the largest that is left out
    return [mask & (value.detach() > bound) for value, mask in zip(values, masks, strict=True)]


def mean_weights(
    members: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], reduction: str, gather: Gather
) -> list[torch.Tensor]:
    """Weights whose sum over tokens, divided by all labelled tokens of the batch, is a mean over `members` ("sets"), or 1 for
    each."""
    weights = [member.to(torch.float32) for member in members]
    if reduction == "all":
        return weights
    counts = [torch.stack([mask.sum(), member.sum()]) for mask, member in zip(masks, members, strict=True)]
    tokens, chosen = gather(torch.stack(counts)).sum(0)  # from [parts of all processes, 2]
    return [weight * (tokens / chosen.clamp(min=1)) for weight in weights]


@dataclass(frozen=True)
class EntropyMinimisation(DataclassSettings):
    """Normalised top-k entropy of the next-token distribution (eq:rw-topk), on whatever trains."""

    k: int = 100  # support; 0 for the whole vocabulary

    name = "entropy"
    requires = frozenset[str]()
    outputs: ClassVar[tuple[str, ...]] = ("log_prob", "topk_entropy")
    gradients = ("topk_entropy",)

    def __post_init__(self) -> None:
        support_size(self.k, 1 << 30)

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """H(q_t) / log k."""
        return stats.topk_entropy


@dataclass(frozen=True)
class Interleaved(DataclassSettings):
    """`ce_steps` optimiser steps on cross-entropy, then `entropy_steps` on entropy, and so on."""

    ce_steps: PositiveInt = 1
    entropy_steps: PositiveInt = 1
    k: int = 100  # support of the entropy; 0 for the whole vocabulary

    name = "interleaved"
    requires = frozenset[str]()
    outputs = ("log_prob", "topk_entropy")
    gradients = None

    def __post_init__(self) -> None:
        support_size(self.k, 1 << 30)
        check_fields(self)

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """−log p_t, or H(q_t) / log k, by the step."""
        step = 0 if context is None else context.step
        on_entropy = step % (self.ce_steps + self.entropy_steps) >= self.ce_steps
        return stats.topk_entropy if on_entropy else -stats.log_prob
