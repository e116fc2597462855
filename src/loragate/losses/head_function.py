"""The token-statistics head as one differentiable operation: chunks of tokens over tiles of the vocabulary.

The gradient of top-k entropy lives on k logits, so that k indices and k derivatives per token are kept. Dense gradients
are taken in the forward where that is free, and else recomputed tile by tile from the hidden states.

Shapes: T tokens, D hidden, V vocabulary, K support, C tokens of one chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from loragate.losses.projection import Head, Projection
from loragate.losses.running import RunningRows, Wanted, recomputed_gradient
from loragate.losses.tiling import Tiling, chunks

STATISTICS = ("log_prob", "entropy", "topk_entropy")
_DENSE = ("log_prob", "entropy")


@dataclass(frozen=True)
class Plan:
    """What one call computes, on which tiles."""

    k: int
    outputs: tuple[str, ...]
    gradients: tuple[str, ...] | None
    tiling: Tiling
    scale: float
    softcap: float | None
    vocabulary: int

    @property
    def full(self) -> bool:
        """The top-k entropy is the full one, divided by log V."""
        return self.k >= self.vocabulary

    def planned(self, requires_grad: bool) -> set[str]:
        """What will be differentiated; with k = V one dense gradient serves both entropies."""
        needed = self.needed if requires_grad else ()
        return {"entropy" if name == "topk_entropy" and self.full else name for name in needed}

    @property
    def needed(self) -> tuple[str, ...]:
        """What the caller may differentiate."""
        return self.outputs if self.gradients is None else self.gradients

    def eager(self, planned: set[str], tiles: int) -> str | None:
        """The one dense gradient that is worth taking in the forward, if any.

        That of log-probability needs no second projection (see `running.py`). That of entropy would need two products
        instead of one once a row has several tiles, as many as recomputing it.
        """
        dense = [name for name in _DENSE if name in planned]
        if self.gradients is None or len(dense) != 1:
            return None
        return dense[0] if dense[0] == "log_prob" or tiles == 1 else None


class TokenStatisticsFunction(torch.autograd.Function):
    """Returns (log_prob [T], entropy [T], normalised top-k entropy [T]) in fp32; empty where not asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_T: torch.Tensor,
        plan: Plan,
    ) -> Any:
        planned = plan.planned(hidden_TD.requires_grad)
        spans = plan.tiling.spans(weight_VD.shape[0])
        eager = plan.eager(planned, len(spans))
        recompute = eager is None and any(name in planned for name in _DENSE)
        wanted = Wanted(
            top=plan.k if "topk_entropy" in plan.outputs and not plan.full else 0,
            log_prob="log_prob" in plan.outputs,
            entropy="entropy" in plan.outputs or ("topk_entropy" in plan.outputs and plan.full),
            direction=eager,
            normaliser=recompute,
        )
        found = _Found(hidden_TD.shape[0])
        with torch.autocast(hidden_TD.device.type, enabled=False):
            head = Head(weight_VD, bias_V, plan.scale, plan.softcap).projection()
            for rows in chunks(hidden_TD.shape[0], plan.tiling.tokens):
                running = RunningRows(head, hidden_TD[rows], labels_T[rows], wanted)
                running.run(spans)
                _collect(found, rows, running, plan, "topk_entropy" in planned, eager, recompute)
        kept = [found.get(name) for name in ("index", "slope", "log_z", "full entropy", "direction")]
        # K indices and slopes a token; hidden states only where the logits are projected once more
        ctx.save_for_backward(hidden_TD if recompute else None, weight_VD, bias_V, labels_T, *kept)
        ctx.plan, ctx.spans, ctx.eager, ctx.hidden_dtype = plan, spans, eager, hidden_TD.dtype
        ctx.set_materialize_grads(False)  # None, not zeros, for a statistic that nobody differentiates
        values = [found.get(name) for name in STATISTICS]
        results = tuple(torch.empty(0, device=hidden_TD.device) if value is None else value for value in values)
        needed = plan.needed if hidden_TD.requires_grad else ()
        ctx.mark_non_differentiable(
            *[result for name, result in zip(STATISTICS, results, strict=True) if name not in needed]
        )
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Any, grad_entropy: Any, grad_topk: Any) -> Any:
        hidden_TD, weight_VD, bias_V, labels_T, index_TK, slope_TK, log_z_T, entropy_T, direction_TD = ctx.saved_tensors
        plan: Plan = ctx.plan
        if plan.full and grad_topk is not None:
            # with k = V both entropies are one, up to the factor log V
            grad_entropy = grad_topk / math.log(plan.k) + (0 if grad_entropy is None else grad_entropy)
            grad_topk = None
        dense = {"log_prob": grad_log_prob, "entropy": grad_entropy}
        total_TD = None
        with torch.autocast(weight_VD.device.type, enabled=False):
            head = Head(weight_VD, bias_V, plan.scale, plan.softcap).projection()
            if grad_topk is not None:
                total_TD = head.pull_back_sparse(index_TK, slope_TK * grad_topk.unsqueeze(-1))
            if hidden_TD is not None and any(value is not None for value in dense.values()):
                saved = (hidden_TD, labels_T, log_z_T, entropy_T)
                total_TD = _recomputed(head, saved, dense, plan, ctx.spans, total_TD)
        if ctx.eager is not None and dense[ctx.eager] is not None:
            factor_T1 = dense[ctx.eager].unsqueeze(-1)
            total_TD = factor_T1 * direction_TD if total_TD is None else total_TD.addcmul_(factor_T1, direction_TD)
        return None if total_TD is None else total_TD.to(ctx.hidden_dtype), None, None, None, None


class _Found:
    """Columns of per-token results, laid out once and filled chunk by chunk."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.columns: dict[str, torch.Tensor] = {}

    def get(self, name: str) -> torch.Tensor | None:
        return self.columns.get(name)

    def put(self, name: str, rows: slice, value: torch.Tensor) -> None:
        if name not in self.columns:
            self.columns[name] = value.new_empty((self.count, *value.shape[1:]))
        self.columns[name][rows] = value


def _collect(
    found: _Found, rows: slice, running: RunningRows, plan: Plan, sparse: bool, eager: str | None, recompute: bool
) -> None:
    if running.wanted.log_prob:
        found.put("log_prob", rows, running.log_prob())
    if running.wanted.entropy:
        entropy_C = running.entropy()
        if "entropy" in plan.outputs:
            found.put("entropy", rows, entropy_C)
        if plan.full and "topk_entropy" in plan.outputs:
            found.put("topk_entropy", rows, entropy_C / math.log(plan.k))
        if recompute:
            found.put("full entropy", rows, entropy_C)
    if recompute:
        found.put("log_z", rows, running.normaliser())
    if eager is not None:
        found.put("direction", rows, running.direction())
    if running.top.found is not None:
        _collect_topk(found, rows, running, math.log(plan.k), sparse)


def _collect_topk(found: _Found, rows: slice, running: RunningRows, log_k: float, sparse: bool) -> None:
    assert running.top.found is not None
    top_CK, index_CK = running.top.found
    log_q_CK = torch.log_softmax(top_CK, -1)
    q_CK = log_q_CK.exp()
    log_q_CK.masked_fill_(q_CK == 0.0, 0.0)  # a logit of −inf adds nothing; 0 · log 0 would be NaN
    entropy_C = -(q_CK * log_q_CK).sum(-1)
    found.put("topk_entropy", rows, entropy_C / log_k)
    if sparse:
        # dH/dz = −q (log q + H) on the support (eq:rw-topk-logit-gradient), zero elsewhere
        gradient_CK = -q_CK * (log_q_CK + entropy_C.unsqueeze(-1)) / log_k
        found.put("slope", rows, gradient_CK * running.head.slope(top_CK))
        found.put("index", rows, index_CK.to(torch.int32))  # a vocabulary has fewer than 2³¹ entries


def _recomputed(
    head: Projection,
    saved: tuple[torch.Tensor, ...],
    dense: dict[str, torch.Tensor | None],
    plan: Plan,
    spans: list[tuple[int, int]],
    total_TD: torch.Tensor | None,
) -> torch.Tensor:
    """Adds the dense gradients to `total_TD`, chunk by chunk."""
    hidden_TD, labels_T, log_z_T, entropy_T = saved
    if total_TD is None:
        total_TD = log_z_T.new_zeros(hidden_TD.shape)
    for rows in chunks(hidden_TD.shape[0], plan.tiling.tokens):
        total_TD[rows] += recomputed_gradient(
            head,
            hidden_TD[rows],
            labels_T[rows],
            log_z_T[rows],
            None if entropy_T is None else entropy_T[rows],
            {name: None if value is None else value[rows] for name, value in dense.items()},
            spans,
        )
    return total_TD
