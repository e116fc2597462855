"""The token-statistics head as one differentiable operation: chunks of tokens over tiles of the vocabulary.

The gradient of top-k entropy lives on k logits, so that k indices and k derivatives per token are kept. That of
log-probability alone is taken in the forward, where it needs no second projection (see `running.py`); other dense gradients are
recomputed tile by tile from the hidden states.

Shapes: T tokens, D hidden, V vocabulary, K support, C tokens of one chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from loragate.losses.projection import Head, Projection
from loragate.losses.running import RunningRows, recomputed_gradient
from loragate.losses.tiling import Tiling, chunks

STATISTICS = ("log_prob", "entropy", "topk_entropy")


@dataclass(frozen=True)
class Plan:
    """What one call computes, under which head and on which tiles; `gradients` None stands for all `outputs`."""

    head: Head
    k: int
    outputs: tuple[str, ...]
    gradients: tuple[str, ...] | None
    tiling: Tiling

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.head.weight.shape[0])

    @property
    def full(self) -> bool:
        """The top-k entropy is the full one, divided by log V."""
        return self.k >= self.vocabulary

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
        eager = plan.gradients is not None and dense == {"log_prob"}
        recompute = bool(dense) and not eager
        sparse = "topk_entropy" in plan.outputs and not plan.full
        with_entropy = "entropy" in plan.outputs or ("topk_entropy" in plan.outputs and plan.full)
        columns: dict[str, torch.Tensor] = {}
        spans = plan.tiling.spans(plan.vocabulary)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            head = Projection(plan.head)
            for rows in chunks(hidden_TD.shape[0], plan.tiling.tokens):
                running = RunningRows(
                    head,
                    hidden_TD[rows],
                    labels_T[rows],
                    top=plan.k if sparse else 0,
                    normalise=recompute or with_entropy or "log_prob" in plan.outputs,
                    entropy=with_entropy,
                    direction=eager,
                )
                for span in spans:
                    running.take(*span)
                found = {"log_z": running.normaliser()} if recompute else {}
                if "log_prob" in plan.outputs:
                    found["log_prob"] = running.log_prob()
                if eager:
                    found["direction"] = running.direction()
                if with_entropy:
                    found["entropy"] = running.entropy()
                if sparse:
                    found |= _of_largest(running, "topk_entropy" in needed)
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
                spans = plan.tiling.spans(plan.vocabulary)
                columns = (hidden_TD, labels_T, log_z_T, entropy_T, grad_log_prob, grad_entropy)
                for rows in chunks(hidden_TD.shape[0], plan.tiling.tokens):
                    parts: list[Any] = [None if column is None else column[rows] for column in columns]
                    total_TD[rows] += recomputed_gradient(head, spans, *parts)
        if direction_TD is not None and grad_log_prob is not None:
            factor_T1 = grad_log_prob.unsqueeze(-1)
            total_TD = factor_T1 * direction_TD if total_TD is None else total_TD.addcmul_(factor_T1, direction_TD)
        return None if total_TD is None else total_TD.to(ctx.hidden_dtype), None, None


def _of_largest(running: RunningRows, differentiate: bool) -> dict[str, torch.Tensor]:
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
