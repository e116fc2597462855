"""Exact KL to a frozen reference model, beside log-probability and entropy, without full logits.

Objectives that hold a model near a reference (EKSFT, and Stage II's anchors) need KL(p ‖ r) over the whole vocabulary at every
response token, and its gradient. Both models' hidden states are projected chunk by chunk, so that two chunks of fp32 logits
are alive at a time; the backward projects them once more. Which tokens carry which term is decided between forward and
backward, which is why nothing is folded into the forward. The reference carries no gradient, and neither does a head.

Shapes: T labelled tokens, D hidden, V vocabulary, C tokens of one chunk, P passes of a model that make one reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from loragate.errors import ConfigError
from loragate.losses.head import IGNORED, TokenStatistics
from loragate.losses.projection import Head, Projection
from loragate.losses.tiling import BUDGET, LEAST, chunks

Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """The reference's next-token distributions at the labelled positions of one batch, in row order."""

    states: (
        torch.Tensor
    )  # hidden [T, D], or logits [T, V] where there is no head; with `combine` one dimension more, [P, T, …]
    head: Head | None  # the reference's own frozen head; None if `states` are logits
    # from the log-probabilities of P passes, [P, ..., V], to those of the reference, [..., V]; None for one pass
    combine: Combine | None = None

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, V."""
        return int(self.states.shape[-1] if self.head is None else self.head.weight.shape[0])

    def log_probs(self, vocabulary: int) -> torch.Tensor:
        """log r of all positions, [T, V] fp32: for the slow path over full logits.

        Raises:
            ConfigError: if the vocabularies differ.
        """
        require_same_vocabulary(self.vocabulary, vocabulary)
        return _log_softmax_of(self, slice(None), None if self.head is None else Projection(self.head))


def reference_statistics(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, reference: Reference, *, chunk_tokens: int | None = None
) -> TokenStatistics:
    """Log-probability, full entropy and KL(p ‖ reference) at the positions whose label counts.

    Args:
        hidden: [..., D], already shifted: position t predicts `labels[..., t]`.
        head: the model's frozen output head.
        labels: [...] int64, −100 where a position does not count.
        reference: of the same batch; its rows are the positions that count, in order.
        chunk_tokens: positions per chunk; by default as many as fit 64 MiB of fp32 logits, at most 128 on a CPU.

    Returns:
        `TokenStatistics` shaped like `labels` with `kl`; `topk_entropy` is the full entropy divided by log V. All are
        differentiable with respect to `hidden`.

    Raises:
        ConfigError: if the reference has another vocabulary or another number of positions.
    """
    vocabulary = head.weight.shape[0]
    require_same_vocabulary(reference.vocabulary, vocabulary)
    mask = labels != IGNORED
    chosen_TD = hidden[mask]
    count = chosen_TD.shape[0]
    if reference.states.shape[-2] != count:
        raise ConfigError(f"the reference holds {reference.states.shape[-2]} positions, the batch has {count} labels")
    if count == 0:
        return TokenStatistics.without_labels(hidden, mask, vocabulary, kl=True)
    if chunk_tokens is None:
        most = 128 if hidden.device.type == "cpu" else 1 << 20
        chunk_tokens = min(most, max(LEAST, BUDGET // (4 * vocabulary)))
    moved = replace(reference, states=reference.states.detach().to(hidden.device))
    log_prob_T, entropy_T, kl_T = _ReferenceStatistics.apply(chosen_TD, labels[mask], head, moved, chunk_tokens)
    values = TokenStatistics(log_prob_T, entropy_T, entropy_T / math.log(vocabulary), mask, vocabulary, kl_T)
    return values.spread(labels.shape, mask)


def _projections(head: Head, other: Head | None) -> tuple[Projection, Projection | None]:
    """(the model's, the reference's); one and the same where they share the head's weight."""
    # a shared head's rows are widened once, and both write their logits into the same memory
    own = Projection(head)
    if other is None:
        return own, None
    return own, own if other.weight is head.weight else Projection(other)


class _ReferenceStatistics(torch.autograd.Function):
    """(log_prob [T], entropy [T], KL [T]) in fp32 nats."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, labels_T: torch.Tensor, head: Head, reference: Reference, chunk: int
    ) -> Any:
        parts = []
        with torch.autocast(hidden_TD.device.type, enabled=False):
            own, other = _projections(head, reference.head)
            for rows in chunks(hidden_TD.shape[0], chunk):
                log_p_CV, log_r_CV, _ = _distributions(own, other, reference, hidden_TD[rows], rows)
                p_CV = log_p_CV.exp()
                parts.append(
                    (
                        log_p_CV.gather(-1, labels_T[rows].unsqueeze(-1)).squeeze(-1),
                        -torch.linalg.vecdot(p_CV, log_p_CV),
                        torch.linalg.vecdot(p_CV, log_p_CV - log_r_CV),
                    )
                )
        ctx.save_for_backward(hidden_TD, labels_T)  # no [T, V]: the backward projects both models again
        ctx.head, ctx.reference, ctx.chunk = head, reference, chunk
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob_T: Any, grad_entropy_T: Any, grad_kl_T: Any) -> Any:
        hidden_TD, labels_T = ctx.saved_tensors
        parts = []
        with torch.autocast(hidden_TD.device.type, enabled=False):
            own, other = _projections(ctx.head, ctx.reference.head)
            for rows in chunks(hidden_TD.shape[0], ctx.chunk):
                log_p_CV, log_r_CV, slope = _distributions(own, other, ctx.reference, hidden_TD[rows], rows)
                p_CV = log_p_CV.exp()
                grad_y, grad_h, grad_k = (
                    grad[rows].unsqueeze(-1) for grad in (grad_log_prob_T, grad_entropy_T, grad_kl_T)
                )
                # d log p_y/dz = e_y − p;  dH/dz = −p (log p + H);  dKL/dz = p (log p − log r − KL)
                # the last two are p (x − Σ p x), with x = −log p and x = log p − log r: their x are added first
                inner_CV = (grad_k - grad_h) * log_p_CV - grad_k * log_r_CV
                mean_C1 = torch.linalg.vecdot(p_CV, inner_CV).unsqueeze(-1)
                coefficient_CV = p_CV * (inner_CV - mean_C1 - grad_y)
                coefficient_CV.scatter_add_(-1, labels_T[rows].unsqueeze(-1), grad_y)
                parts.append(own.pull_back(coefficient_CV, slope))
        return torch.cat(parts).to(hidden_TD.dtype), None, None, None, None


def _distributions(
    own: Projection, other: Projection | None, reference: Reference, hidden_CD: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """(log p [C, V], log r [C, V], slope of the model's logits)."""
    # a projection reuses its buffer, and both may be one: the reference is normalised into memory of its own first
    log_r_CV = _log_softmax_of(reference, rows, other)
    z_CV, slope = own.logits(hidden_CD)
    return torch.log_softmax(z_CV, -1), log_r_CV, slope


def _log_softmax_of(reference: Reference, rows: slice, projection: Projection | None) -> torch.Tensor:
    """log r of some positions, [C, V]; a pass is normalised into memory of its own before the next is projected."""
    states_PCD = reference.states[..., rows, :]
    logs = []
    for states_CD in states_PCD if reference.combine is not None else [states_PCD]:
        if projection is None:
            logs.append(torch.log_softmax(states_CD if states_CD.dtype == torch.float64 else states_CD.float(), -1))
        else:
            z_CV, _ = projection.logits(states_CD.to(projection.weight_VD.device))
            logs.append(torch.log_softmax(z_CV, -1).to(states_CD.device))
    return logs[0] if reference.combine is None else reference.combine(logs)


def require_same_vocabulary(reference: int, model: int) -> None:
    """Raises ConfigError for two heads of different sizes."""
    if reference != model:
        raise ConfigError(
            f"the reference model has a vocabulary of {reference} and the model one of {model}; a KL between them is not "
            "defined. Take a reference of the same family with the same tokenizer and padding"
        )
