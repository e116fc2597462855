"""The token-statistics head: log-probability, entropy and top-k entropy without full logits.

Hidden states of response positions are projected in token chunks with fp32 logits; a chunk's logits die with the chunk.
The gradient of top-k entropy lives on k logits only, so the forward keeps k indices and k derivatives per token and the
backward is one `embedding_bag` over rows of the head: exact, at k/V of the dense cost. Log-probability and full entropy
have dense gradients; these are either projected in the forward while the logits are there (`gradients=`), or recomputed
chunk by chunk in the backward.

The head's weight is frozen here: gradients flow to `hidden` only.

Shapes: T tokens, D hidden, V vocabulary, K support, C tokens of one chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from loragate.errors import ConfigError
from loragate.losses.entropy import support_size
from loragate.losses.projection import HeadOptions, Projection, largest

IGNORED = -100
STATISTICS = ("log_prob", "entropy", "topk_entropy")
_DENSE = ("log_prob", "entropy")
_CHUNK_BYTES = 128 << 20


class TokenStatistics(NamedTuple):
    """Per-position statistics of the next-token distribution, all fp32 and shaped like `labels`.

    Attributes:
        log_prob: log p(label); zero where the label is ignored.
        entropy: full-vocabulary entropy in nats; zero where ignored.
        topk_entropy: top-k entropy divided by log k; zero where ignored.
        mask: bool, True where the label counts.
        k: support size of `topk_entropy`.
        kl: KL(p ‖ reference) over the vocabulary in nats, zero where ignored; None without a reference.

    A statistic that was not asked for holds an empty tensor, so that using it fails on its shape.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor
    topk_entropy: torch.Tensor
    mask: torch.Tensor
    k: int
    kl: torch.Tensor | None = None

    def spread(self, shape: torch.Size, mask: torch.Tensor) -> TokenStatistics:
        """Statistics of the labelled positions, each [T], laid out over `shape` with zeros elsewhere."""

        def lay(value: torch.Tensor) -> torch.Tensor:
            return value.new_zeros(shape).masked_scatter(mask, value)

        kl = None if self.kl is None else lay(self.kl)
        return TokenStatistics(lay(self.log_prob), lay(self.entropy), lay(self.topk_entropy), mask, self.k, kl)


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
        hidden: [..., D], already shifted: position t predicts `labels[..., t]`.
        weight: [V, D] frozen output embedding; `bias` [V] likewise.
        labels: [...] int64, −100 where a position does not count (it is not projected).
        k: support of the top-k entropy; k ≥ V, or 0, makes it the full entropy divided by log V.
        scale, softcap: the family's logit scale and soft cap.
        outputs: the statistics to compute, out of "log_prob", "entropy" and "topk_entropy"; all by default.
        gradients: the statistics that will be differentiated. Naming them saves a recomputation of the logits; the
            others come back detached. None keeps all of `outputs` differentiable.
        chunk_tokens: positions per chunk; by default as many as fit 128 MiB of fp32 logits, at most 128 on a CPU.

    Returns:
        `TokenStatistics` shaped like `labels`, connected to `hidden` even when no label counts.

    Raises:
        ConfigError: for mismatching shapes, an unknown name in `outputs` or `gradients`, or a head that requires a
            gradient.
    """
    _check(hidden, weight, labels, outputs, gradients)
    vocabulary = weight.shape[0]
    k = support_size(k, vocabulary)
    mask = labels != IGNORED
    chosen_TD = hidden[mask]
    if chunk_tokens is None:
        # on a CPU smaller chunks are faster: their logits are still in the cache when they are searched
        limit = 128 if hidden.device.type == "cpu" else 1 << 20
        chunk_tokens = min(limit, max(16, _CHUNK_BYTES // (4 * vocabulary)))
    if chosen_TD.shape[0] == 0:
        # keeps the graph alive, so that an empty micro-batch can be back-propagated on every rank
        nothing = hidden.float().sum() * 0.0
        zeros = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device) + nothing
        return TokenStatistics(zeros, zeros, zeros, mask, k)
    plan = _Plan(k, tuple(outputs), gradients, chunk_tokens, HeadOptions(scale, softcap))
    values = _TokenStatistics.apply(chosen_TD, weight, bias, labels[mask], plan)
    empty = torch.empty(0, device=hidden.device)
    spread = [
        value.new_zeros(labels.shape).masked_scatter(mask, value) if name in outputs else empty
        for name, value in zip(STATISTICS, values, strict=True)
    ]
    return TokenStatistics(spread[0], spread[1], spread[2], mask, k)


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
    working = hidden if hidden.dtype == torch.float64 else hidden.float()
    logits = F.linear(working, weight.to(working.dtype), None if bias is None else bias.to(working.dtype)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return statistics_of_logits(logits, labels, k)


def statistics_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, k: int, reference: torch.Tensor | None = None
) -> TokenStatistics:
    """Token statistics of given logits [..., V] (already shifted), in fp32 (fp64 stays fp64), by plain autograd.

    With the logits (or log-probabilities) of a reference, [..., V], `kl` is KL(p ‖ reference).
    """
    from loragate.losses.entropy import topk_entropy

    working = logits if logits.dtype == torch.float64 else logits.float()
    mask = labels != IGNORED
    log_p = torch.log_softmax(working, -1)
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


@dataclass(frozen=True)
class _Plan:
    k: int
    outputs: tuple[str, ...]
    gradients: tuple[str, ...] | None
    chunk: int
    options: HeadOptions


class _TokenStatistics(torch.autograd.Function):
    """Returns (log_prob [T], entropy [T], normalised top-k entropy [T]) in fp32; empty where not asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_T: torch.Tensor,
        plan: _Plan,
    ) -> Any:
        full = plan.k >= weight_VD.shape[0]
        needed = plan.outputs if plan.gradients is None else plan.gradients
        if not hidden_TD.requires_grad:
            needed = ()
        # With k = V the top-k entropy is the full one: one dense gradient serves both.
        planned = {"entropy" if name == "topk_entropy" and full else name for name in needed}
        eager = tuple(name for name in _DENSE if name in planned) if plan.gradients is not None else ()
        with torch.autocast(hidden_TD.device.type, enabled=False):
            head = Projection(weight_VD, bias_V, plan.options)
            run = _ForwardRun(head, plan, full, sparse="topk_entropy" in planned, eager=eager)
            for hidden_CD, labels_C in zip(hidden_TD.split(plan.chunk), labels_T.split(plan.chunk), strict=True):
                run.add(hidden_CD, labels_C)
        recompute = plan.gradients is None and any(name in planned for name in _DENSE)
        dense = [run.joined(f"d {name}") for name in eager]
        ctx.save_for_backward(
            hidden_TD if recompute else None,
            weight_VD,
            bias_V,
            labels_T,
            run.joined("index"),
            run.joined("slope"),
            *dense,
        )
        ctx.plan, ctx.full, ctx.eager, ctx.recompute, ctx.hidden_dtype = plan, full, eager, recompute, hidden_TD.dtype
        ctx.set_materialize_grads(False)
        values = {name: run.joined(name) for name in STATISTICS}
        results = tuple(
            torch.empty(0, device=hidden_TD.device) if value is None else value for value in values.values()
        )
        ctx.mark_non_differentiable(
            *[result for name, result in zip(STATISTICS, results, strict=True) if name not in needed]
        )
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Any, grad_entropy: Any, grad_topk: Any) -> Any:
        hidden_TD, weight_VD, bias_V, labels_T, index_TK, slope_TK, *dense = ctx.saved_tensors
        if ctx.full and grad_topk is not None:
            grad_entropy = grad_topk / math.log(ctx.plan.k) + (0 if grad_entropy is None else grad_entropy)
            grad_topk = None
        head = Projection(weight_VD, bias_V, ctx.plan.options)
        upstream = {"log_prob": grad_log_prob, "entropy": grad_entropy}
        parts = []
        if grad_topk is not None:
            parts.append(head.pull_back_sparse(index_TK, slope_TK * grad_topk.unsqueeze(-1)))
        if ctx.recompute and not (grad_log_prob is None and grad_entropy is None):
            parts.append(_recomputed(head, hidden_TD, labels_T, grad_log_prob, grad_entropy, ctx.plan.chunk))
        for name, direction_TD in zip(ctx.eager, dense, strict=True):
            if upstream[name] is not None:
                parts.append(upstream[name].unsqueeze(-1) * direction_TD)
        grad_hidden = sum(parts).to(ctx.hidden_dtype) if parts else None  # type: ignore[union-attr]
        return grad_hidden, None, None, None, None


class _ForwardRun:
    """Collects the statistics, and what their gradients need, chunk by chunk."""

    def __init__(self, head: Projection, plan: _Plan, full: bool, sparse: bool, eager: tuple[str, ...]) -> None:
        self.head, self.plan, self.full, self.sparse, self.eager = head, plan, full, sparse, eager
        self.columns: dict[str, list[torch.Tensor]] = {}

    def joined(self, name: str) -> torch.Tensor | None:
        return torch.cat(self.columns[name]) if name in self.columns else None

    def _put(self, name: str, value: torch.Tensor) -> None:
        self.columns.setdefault(name, []).append(value)

    def add(self, hidden_CD: torch.Tensor, labels_C: torch.Tensor) -> None:
        outputs, log_k = self.plan.outputs, math.log(self.plan.k)
        z_CV, slope_CV = self.head.logits(hidden_CD)
        if "topk_entropy" in outputs and not self.full:
            self._add_topk(z_CV, slope_CV, log_k)
        wants_entropy = "entropy" in outputs or "entropy" in self.eager or ("topk_entropy" in outputs and self.full)
        if not wants_entropy and "log_prob" not in outputs:
            return
        log_z_C = torch.logsumexp(z_CV, -1)
        if "log_prob" in outputs:
            self._put("log_prob", z_CV.gather(-1, labels_C.unsqueeze(-1)).squeeze(-1) - log_z_C)
        if not wants_entropy and "log_prob" not in self.eager:
            return
        p_CV = torch.exp(z_CV - log_z_C.unsqueeze(-1))
        if wants_entropy:
            entropy_C = log_z_C - torch.linalg.vecdot(p_CV, z_CV)
            if "entropy" in outputs:
                self._put("entropy", entropy_C)
            if "topk_entropy" in outputs and self.full:
                self._put("topk_entropy", entropy_C / log_k)
            if "entropy" in self.eager:
                slope = _entropy_slope(p_CV, z_CV, log_z_C, entropy_C)
                self._put("d entropy", self.head.pull_back(slope, slope_CV))
        if "log_prob" in self.eager:
            self._put("d log_prob", self.head.pull_back(_log_prob_slope(p_CV, labels_C), slope_CV))

    def _add_topk(self, z_CV: torch.Tensor, slope_CV: torch.Tensor | None, log_k: float) -> None:
        top_CK, index_CK = largest(z_CV, self.plan.k)
        log_q_CK = torch.log_softmax(top_CK, -1)
        q_CK = log_q_CK.exp()
        entropy_C = -(q_CK * log_q_CK).sum(-1)
        self._put("topk_entropy", entropy_C / log_k)
        if self.sparse:
            # dH/dz = −q (log q + H) on the support (eq:rw-topk-logit-gradient), zero elsewhere
            gradient_CK = -q_CK * (log_q_CK + entropy_C.unsqueeze(-1)) / log_k
            gradient_CK *= self.head.options.scale if slope_CV is None else slope_CV.gather(-1, index_CK)
            self._put("index", index_CK)
            self._put("slope", gradient_CK)


def _recomputed(
    head: Projection,
    hidden_TD: torch.Tensor,
    labels_T: torch.Tensor,
    grad_log_prob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    chunk: int,
) -> torch.Tensor:
    parts = []
    with torch.autocast(hidden_TD.device.type, enabled=False):
        for at in range(0, hidden_TD.shape[0], chunk):
            rows = slice(at, at + chunk)
            z_CV, slope_CV = head.logits(hidden_TD[rows])
            log_z_C = torch.logsumexp(z_CV, -1)
            p_CV = torch.exp(z_CV - log_z_C.unsqueeze(-1))
            coefficient_CV: torch.Tensor | float = 0.0
            if grad_entropy is not None:
                entropy_C = log_z_C - (p_CV * z_CV).sum(-1)
                coefficient_CV = _entropy_slope(p_CV, z_CV, log_z_C, entropy_C) * grad_entropy[rows].unsqueeze(-1)
            if grad_log_prob is not None:
                coefficient_CV = (
                    _log_prob_slope(p_CV, labels_T[rows]) * grad_log_prob[rows].unsqueeze(-1) + coefficient_CV
                )
            parts.append(head.pull_back(torch.as_tensor(coefficient_CV), slope_CV))
    return torch.cat(parts)


def _entropy_slope(
    p_CV: torch.Tensor, z_CV: torch.Tensor, log_z_C: torch.Tensor, entropy_C: torch.Tensor
) -> torch.Tensor:
    """dH/dz = −p (log p + H)."""
    return -p_CV * (z_CV + (entropy_C - log_z_C).unsqueeze(-1))


def _log_prob_slope(p_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
    """d log p_y / dz = e_y − p."""
    slope_CV = -p_CV
    slope_CV.scatter_add_(-1, labels_C.unsqueeze(-1), torch.ones_like(slope_CV[:, :1]))
    return slope_CV


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    outputs: tuple[str, ...],
    gradients: tuple[str, ...] | None,
) -> None:
    if hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)} must agree but for hidden's last dimension"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ConfigError(
            f"head weight {tuple(weight.shape)} does not project hidden states of width {hidden.shape[-1]}"
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "the output head is trainable, but token statistics carry gradients to the hidden states only; freeze it "
            "(take lm_head out of modules_to_save)"
        )
    if unknown := sorted({*outputs, *(gradients or ())} - set(STATISTICS)):
        raise ConfigError(f"unknown statistic {unknown[0]!r}; known: {', '.join(STATISTICS)}")
    if absent := sorted(set(gradients or ()) - set(outputs)):
        raise ConfigError(f"gradients names {absent[0]!r}, which is not among outputs")
