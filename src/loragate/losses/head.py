"""The token-statistics head: log-probability, entropy and top-k entropy without full logits.

Hidden states of response positions are projected in chunks of tokens and tiles of the vocabulary with fp32 logits; a tile's
logits die with the tile (`projection.py`). The gradient of top-k entropy lives on k logits only, so the forward keeps k indices
and k derivatives per token and the backward is one `embedding_bag` over rows of the head: exact, at k/V of the dense cost.
Log-probability and full entropy have dense gradients; that of log-probability alone is summed in the forward, where it needs no
second projection (`gradients=`), others are recomputed tile by tile in the backward.

The head's weight is frozen here: gradients flow to `hidden` only.

Shapes: T tokens, D hidden, V vocabulary, K support, C tokens of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from loragate.errors import ConfigError
from loragate.losses.entropy import support_size, topk_entropy
from loragate.losses.projection import (
    Head,
    OnlineSoftmaxStatistics,
    Projection,
    Tiling,
    chunks,
    needs_widening,
    recomputed_gradient,
    tiling,
)

IGNORE_INDEX = -100
STATISTICS = ("log_prob", "entropy", "topk_entropy")


class TokenStatistics(NamedTuple):
    """Per-position statistics of the next-token distribution, all fp32 and shaped like `labels`.

    Attributes:
        log_prob: log p(label); zero where the label is ignored.
        entropy: full-vocabulary entropy in nats; zero where ignored.
        topk_entropy: top-k entropy divided by log k; zero where ignored.
        mask: bool, True where the label counts.
        k: support size of `topk_entropy`.
        kl: KL(p ‖ reference) over the vocabulary in nats, zero where ignored; None without a reference.

    A statistic that was not asked for holds an empty tensor: used beside another one it fails on its shape, and its sum is 0.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor
    topk_entropy: torch.Tensor
    mask: torch.Tensor
    k: int
    kl: torch.Tensor | None = None

    def only(self, names: Collection[str]) -> TokenStatistics:
        """These statistics without those that are not named, as if they had not been asked for; the KL stays."""
        nothing: dict[str, Any] = dict.fromkeys(STATISTICS, self.log_prob.new_empty(0))
        return self._replace(**{name: empty for name, empty in nothing.items() if name not in names})

    def spread(self, shape: torch.Size, mask: torch.Tensor) -> TokenStatistics:
        """Statistics of the labelled positions, each [T], laid out over `shape` with zeros elsewhere."""

        # masked_scatter is differentiable with respect to the values
        def lay(value: torch.Tensor) -> torch.Tensor:
            return value.new_zeros(shape).masked_scatter(mask, value) if value.numel() else value

        kl = None if self.kl is None else lay(self.kl)
        return TokenStatistics(lay(self.log_prob), lay(self.entropy), lay(self.topk_entropy), mask, self.k, kl)

    @classmethod
    def without_labels(cls, source: torch.Tensor, mask: torch.Tensor, k: int, kl: bool = False) -> TokenStatistics:
        """Zeros that keep the graph of `source` alive, so that an empty micro-batch is back-propagated on every rank."""
        # DDP waits for a gradient of every parameter, also on a process that has nothing to learn from. The sum is of no number:
        # that of all times 0 would be NaN where one is not finite, as masked logits are
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=source.device) + source[..., :0].float().sum()
        return cls(zeros, zeros, zeros, mask, k, zeros if kl else None)


def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    k: int = 100,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    outputs: tuple[str, ...] = STATISTICS,
    gradients: tuple[str, ...] | None = None,
    chunk_tokens: int | None = None,
) -> TokenStatistics:
    """Statistics of softmax(W h) at the positions whose label counts.

    Args:
        hidden: [..., D], after the final norm and already shifted: position t predicts `labels[..., t]`.
        weight: [V, D] frozen output embedding; `bias` [V] likewise, where −inf masks a token (not for the full entropy).
        labels: [...] int64 indices of the vocabulary, −100 where a position does not count (it is not projected).
        k: support of the top-k entropy; k ≥ V, or 0, makes it the full entropy divided by log V.
        scale, softcap: the family's logit scale and soft cap.
        outputs: the statistics to compute, out of "log_prob", "entropy" and "topk_entropy"; all by default.
        gradients: the statistics that will be differentiated. Naming them saves a recomputation of the logits; the
            others come back detached. None keeps all of `outputs` differentiable.
        chunk_tokens: positions per chunk; by default as many as `loragate.losses.projection.tiling` finds best. The memory of a
            tile of logits is 64 MiB at most either way.

    Returns:
        `TokenStatistics` shaped like `labels`, connected to `hidden` even when no label counts; differentiable once.

    Raises:
        ConfigError: for labels that do not fit `hidden`, one outside the vocabulary, an unknown name in `outputs` or `gradients`,
            a head that requires a gradient, or one whose rows are spread over processes.
    """
    if hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)} must agree but for hidden's last dimension"
        )
    if unknown := sorted({*outputs, *(gradients or ())} - set(STATISTICS)):
        raise ConfigError(f"unknown statistic {unknown[0]!r}; known: {', '.join(STATISTICS)}")
    if absent := sorted(set(gradients or ()) - set(outputs)):
        raise ConfigError(f"gradients names {absent[0]!r}, which is not among outputs")
    if torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        raise ConfigError(
            "the output head is trainable, but token statistics carry gradients to the hidden states only; freeze it "
            "(take lm_head out of modules_to_save)"
        )
    if hasattr(weight, "full_tensor"):
        raise ConfigError(
            "the output head is a DTensor, whose rows are spread over processes; pass weight.full_tensor()"
        )
    vocabulary, width = weight.shape
    k = support_size(k, vocabulary)
    mask = labels != IGNORE_INDEX
    chosen_TD, chosen_T = hidden[mask], labels[mask]  # response positions alone: T is often a small part of B·S
    require_labels(chosen_T, vocabulary)
    if chosen_TD.shape[0] == 0:
        return TokenStatistics.without_labels(hidden, mask, k)
    sizes = tiling(vocabulary, width, weight.device.type, widened=needs_widening(weight), tokens=chunk_tokens)
    plan = Plan(Head(weight, bias, scale, softcap), k, tuple(outputs), gradients, sizes)
    log_prob_T, entropy_T, topk_T = TokenStatisticsFunction.apply(chosen_TD, chosen_T, plan)
    return TokenStatistics(log_prob_T, entropy_T, topk_T, mask, k).spread(labels.shape, mask)


def statistics_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, k: int, reference: torch.Tensor | None = None
) -> TokenStatistics:
    """Token statistics of given logits [..., V] (already shifted), in fp32 (fp64 stays fp64), by plain autograd.

    With the logits (or log-probabilities) of a reference, [..., V], `kl` is KL(p ‖ reference).
    """
    working = logits if logits.dtype == torch.float64 else logits.float()
    mask = labels != IGNORE_INDEX
    require_labels(labels[mask], logits.shape[-1])
    log_p = torch.log_softmax(working, -1)
    # of token 0 where a label is ignored, for the mask to drop
    log_prob = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    partial = topk_entropy(working, k)
    zero = torch.zeros((), dtype=working.dtype, device=working.device)
    kl = None
    if reference is not None:
        log_r = torch.log_softmax(reference.detach().to(working.dtype), -1)
        kl = torch.where(mask, (log_p.exp() * (log_p - log_r)).sum(-1), zero)
    return TokenStatistics(
        torch.where(mask, log_prob, zero),
        torch.where(mask, entropy, zero),
        torch.where(mask, partial, zero),
        mask,
        support_size(k, logits.shape[-1]),
        kl,
    )


def require_labels(labels_T: torch.Tensor, vocabulary: int) -> None:
    """Refuse (ConfigError) labels that are no index of the vocabulary; other losses ignore other numbers than ours, −100."""
    if labels_T.numel() == 0 or labels_T.is_meta or type(labels_T) is not torch.Tensor:
        return  # nothing to look at: tensors without data are how a plan counts
    low, high = (int(value) for value in labels_T.aminmax())
    if low < 0 or high >= vocabulary:
        raise ConfigError(
            f"labels reach from {low} to {high}, but the head has {vocabulary} rows: give indices from 0 to {vocabulary - 1}, "
            f"and {IGNORE_INDEX} where a position does not count"
        )


@dataclass(frozen=True)
class Plan:
    """What one call computes, under which head and on which tiles; `gradients` None stands for all `outputs`."""

    head: Head
    k: int
    outputs: tuple[str, ...]
    gradients: tuple[str, ...] | None
    tiling: Tiling

    @property
    def full(self) -> bool:
        """The top-k entropy is the full one, divided by log V."""
        return self.k >= self.head.vocabulary

    @property
    def needed(self) -> tuple[str, ...]:
        """What the caller may differentiate."""
        return self.outputs if self.gradients is None else self.gradients


class TokenStatisticsFunction(torch.autograd.Function):
    """Returns (log_prob [T], entropy [T], normalised top-k entropy [T]) in fp32; empty where not asked for."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: torch.Tensor, labels_T: torch.Tensor, plan: Plan) -> Any:
        needed = plan.needed if hidden_TD.requires_grad else ()
        # with k = V one dense gradient serves both entropies
        dense = {name.removeprefix("topk_") for name in needed if plan.full or name != "topk_entropy"}
        # it costs a product per tile, which is not wasted on a caller that named its gradients, and will use them
        accumulate_gradient = plan.gradients is not None and dense == {"log_prob"}
        recompute = bool(dense) and not accumulate_gradient
        sparse = "topk_entropy" in plan.outputs and not plan.full
        with_entropy = "entropy" in plan.outputs or ("topk_entropy" in plan.outputs and plan.full)
        columns: dict[str, torch.Tensor] = {}
        spans = plan.tiling.spans(plan.head.vocabulary)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            head = Projection(plan.head)
            for rows in chunks(hidden_TD.shape[0], plan.tiling.tokens):
                running = OnlineSoftmaxStatistics(
                    head,
                    hidden_TD[rows],
                    labels_T[rows],
                    top=plan.k if sparse else 0,
                    normalise=recompute or with_entropy or "log_prob" in plan.outputs,
                    entropy=with_entropy,
                    direction=accumulate_gradient,
                )
                for span in spans:
                    running.add_tile(*span)
                found = {"log_z": running.logsumexp()} if recompute else {}
                if "log_prob" in plan.outputs:
                    found["log_prob"] = running.log_prob()
                if accumulate_gradient:
                    found["direction"] = running.direction()
                if with_entropy:
                    found["entropy"] = running.entropy()
                if sparse:
                    found |= _topk_entropy_of_chunk(running, "topk_entropy" in needed)
                elif "topk_entropy" in plan.outputs:
                    found["topk_entropy"] = found["entropy"] / math.log(plan.k)
                for name, value in found.items():
                    if name not in columns:
                        columns[name] = value.new_empty((hidden_TD.shape[0], *value.shape[1:]))
                    columns[name][rows] = value
        kept = [columns.get(name) for name in ("index", "slope", "log_z", "entropy", "direction")]
        # K indices and slopes a token; hidden states only where the logits are projected once more
        ctx.save_for_backward(hidden_TD if recompute else None, labels_T, *kept)
        ctx.plan, ctx.hidden_dtype = plan, hidden_TD.dtype
        ctx.set_materialize_grads(False)  # None, not zeros, for a statistic that nobody differentiates
        nothing = torch.empty(0, device=hidden_TD.device)
        results = {name: columns[name] if name in plan.outputs else nothing.clone() for name in STATISTICS}
        ctx.mark_non_differentiable(*[result for name, result in results.items() if name not in needed])
        return tuple(results.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Any, grad_entropy: Any, grad_topk: Any) -> Any:
        hidden_TD, labels_T, index_TK, slope_TK, log_z_T, entropy_T, direction_TD = ctx.saved_tensors
        plan: Plan = ctx.plan
        if plan.full and grad_topk is not None:
            # with k = V both entropies are one, up to the factor log V
            grad_entropy = grad_topk / math.log(plan.k) + (0 if grad_entropy is None else grad_entropy)
            grad_topk = None
        total_TD = None
        with torch.autocast(labels_T.device.type, enabled=False):
            head = Projection(plan.head)
            if grad_topk is not None:
                total_TD = head.pull_back_sparse(index_TK, slope_TK * grad_topk.unsqueeze(-1))
            if hidden_TD is not None and not (grad_log_prob is None and grad_entropy is None):
                if total_TD is None:
                    total_TD = log_z_T.new_zeros(hidden_TD.shape)
                spans = plan.tiling.spans(plan.head.vocabulary)
                columns = (hidden_TD, labels_T, log_z_T, entropy_T, grad_log_prob, grad_entropy)
                for rows in chunks(hidden_TD.shape[0], plan.tiling.tokens):
                    parts: list[Any] = [None if column is None else column[rows] for column in columns]
                    total_TD[rows] += recomputed_gradient(head, spans, *parts)
        if direction_TD is not None and grad_log_prob is not None:
            factor_T1 = grad_log_prob.unsqueeze(-1)
            total_TD = factor_T1 * direction_TD if total_TD is None else total_TD.addcmul_(factor_T1, direction_TD)
        return None if total_TD is None else total_TD.to(ctx.hidden_dtype), None, None


def _topk_entropy_of_chunk(running: OnlineSoftmaxStatistics, differentiate: bool) -> dict[str, torch.Tensor]:
    """Normalised top-k entropy of a chunk; with its slope and index on the support where it is differentiated."""
    assert running.top.found is not None
    top_CK, index_CK = running.top.found
    log_k = math.log(top_CK.shape[1])
    log_q_CK = torch.log_softmax(top_CK, -1)
    q_CK = log_q_CK.exp()
    log_q_CK.masked_fill_(q_CK == 0.0, 0.0)  # a logit of −inf adds nothing; 0 · log 0 would be NaN
    entropy_C = -(q_CK * log_q_CK).sum(-1)
    found = {"topk_entropy": entropy_C / log_k}
    if differentiate:
        # dH/dz = −q (log q + H) on the support (eq:rw-topk-logit-gradient), zero elsewhere
        gradient_CK = -q_CK * (log_q_CK + entropy_C.unsqueeze(-1)) / log_k
        found["slope"] = gradient_CK * running.head.slope(top_CK)
        found["index"] = index_CK.to(torch.int32)  # a vocabulary has fewer than 2³¹ entries
    return found
