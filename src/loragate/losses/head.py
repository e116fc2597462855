"""The token-statistics head: log-probability, entropy and top-k entropy without full logits.

Hidden states of response positions are projected in chunks of tokens and tiles of the vocabulary with fp32 logits; a
tile's logits die with the tile, and `tiling.py` sizes it by a budget of bytes. The gradient of top-k entropy lives on k
logits only, so the forward keeps k indices and k derivatives per token and the backward is one `embedding_bag` over rows
of the head: exact, at k/V of the dense cost. Log-probability and full entropy have dense gradients; that of log-probability
is summed in the forward where nothing else is asked for (`gradients=`), others are recomputed tile by tile in the backward.

The head's weight is frozen here: gradients flow to `hidden` only.

Shapes: T tokens, D hidden, V vocabulary, K support, C tokens of one chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from loragate.errors import ConfigError
from loragate.losses.entropy import support_size, topk_entropy
from loragate.losses.head_function import STATISTICS, Plan, TokenStatisticsFunction
from loragate.losses.projection import Head, needs_widening
from loragate.losses.tiling import tiling

IGNORED = -100


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
        chunk_tokens: positions per chunk; by default as many as `loragate.losses.tiling` finds best. The memory of a tile
            of logits is 64 MiB at most either way.

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
    mask = labels != IGNORED
    chosen_TD, chosen_T = hidden[mask], labels[mask]  # response positions alone: T is often a small part of B·S
    require_labels(chosen_T, vocabulary)
    if chosen_TD.shape[0] == 0:
        return TokenStatistics.without_labels(hidden, mask, k)
    sizes = tiling(vocabulary, width, weight.device.type, widened=needs_widening(weight), tokens=chunk_tokens)
    plan = Plan(Head(weight, bias, scale, softcap), k, tuple(outputs), gradients, sizes)
    log_prob_T, entropy_T, topk_T = TokenStatisticsFunction.apply(chosen_TD, chosen_T, plan)
    return TokenStatistics(log_prob_T, entropy_T, topk_T, mask, k).spread(labels.shape, mask)


def token_statistics_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    k: int = 100,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> TokenStatistics:
    """The same statistics from full logits by autograd: the oracle of the tests, and the naive baseline of benchmarks."""
    working = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return statistics_of_logits(Head(weight, bias, scale, softcap).logits(hidden, working), labels, k)


def statistics_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, k: int, reference: torch.Tensor | None = None
) -> TokenStatistics:
    """Token statistics of given logits [..., V] (already shifted), in fp32 (fp64 stays fp64), by plain autograd.

    With the logits (or log-probabilities) of a reference, [..., V], `kl` is KL(p ‖ reference).
    """
    working = logits if logits.dtype == torch.float64 else logits.float()
    mask = labels != IGNORED
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
    """Refuse labels that are no index of the vocabulary; other losses ignore other numbers than ours, −100.

    Raises:
        ConfigError: naming the smallest and the largest label.
    """
    if labels_T.numel() == 0 or labels_T.is_meta or type(labels_T) is not torch.Tensor:
        return  # nothing to look at: tensors without data are how a plan counts
    low, high = (int(value) for value in labels_T.aminmax())
    if low < 0 or high >= vocabulary:
        raise ConfigError(
            f"labels reach from {low} to {high}, but the head has {vocabulary} rows: give indices from 0 to {vocabulary - 1}, "
            f"and {IGNORED} where a position does not count"
        )
