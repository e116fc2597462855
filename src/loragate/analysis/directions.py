"""Directions in the gate parameters: where entropy descent goes, and where the task value goes.

Four vectors per row, as sums over its counted positions; all are gradients at the gates as they are, on the top-k support
of the moment:

- entropy_semi: the row's part of Ĝ_k = −log k · D_ψ F_k, the direction of training (gate inputs detached);
- entropy: of G_k = −log k · ∇_ψ F_k, the complete gradient (eq:rw-stopped-directions);
- value_topk: of ∇_ψ V_k, the conditional value on the same support;
- value: of ∇_ψ V over the full vocabulary (eq:rw-total-error).

All share one form, Σ_a q(a) A(a) s(a) (eq:rw-two-policy-gradients), so only the logit gradients q·A differ; these are
written down in closed form and pulled back through head and body.

Shapes: T counted positions, C chunk of them, V vocabulary, K support, P gate parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loragate.analysis.reading import CHUNK, Batch, Reader
from loragate.analysis.task_values import ActionValues
from loragate.gates import gate_parameters
from loragate.gates.attach import GLOBAL_BIAS, gate_modules
from loragate.losses.entropy import support_size

NAMES = ("entropy_semi", "entropy", "value_topk", "value")


def entropy_logit_gradient(logits_CV: Tensor, k: int) -> Tensor:
    """−∂H(q)/∂z = q (log q + H) on the top-k support and 0 elsewhere (eq:rw-topk-logit-gradient), [C, V]."""
    top = logits_CV.topk(support_size(k, logits_CV.shape[-1]), -1)
    log_q = torch.log_softmax(top.values, -1)
    q = log_q.exp()
    advantage = log_q - (q * log_q).sum(-1, keepdim=True)
    return torch.zeros_like(logits_CV).scatter_(-1, top.indices, q * advantage)


def value_logit_gradient(logits_CV: Tensor, values_CV: Tensor, k: int | None) -> Tensor:
    """∂E_q[r]/∂z = q (r − E_q r) on the top-k support (k None: the full vocabulary), [C, V]."""
    width = logits_CV.shape[-1] if k is None else support_size(k, logits_CV.shape[-1])
    top = logits_CV.topk(width, -1)
    q = torch.softmax(top.values, -1)
    r = values_CV.gather(-1, top.indices)
    return torch.zeros_like(logits_CV).scatter_(-1, top.indices, q * (r - (q * r).sum(-1, keepdim=True)))


@dataclass(frozen=True)
class RowDirections:
    """One row.

    Attributes:
        vectors: {name: [P]} fp32 on the CPU, in the order of `slices`; sums over the row's positions.
        tokens: number of counted positions.
        top_is_best: number of them at which the likeliest action is among those of the highest value (on the support).
    """

    vectors: dict[str, Tensor]
    tokens: int
    top_is_best: int


def parameter_slices(model: Any) -> dict[str, slice]:
    """{module path: its place in a direction}, weight before bias; one entry "global" for a shared bias."""
    slices: dict[str, slice] = {}
    at = 0
    for name, parameter in gate_parameters(model).items():
        path = "global" if name == GLOBAL_BIAS else name.rpartition(".")[0]
        begin = slices[path].start if path in slices else at
        at += parameter.numel()
        slices[path] = slice(begin, at)
    return slices


@contextmanager
def differentiable_gates(model: Any) -> Iterator[None]:
    """Gate parameters require a gradient inside the context, and nothing else does; the model is in evaluation mode."""
    training = model.training
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    chosen = {id(parameter) for parameter in gate_parameters(model).values()}
    for parameter, _ in before:
        parameter.requires_grad_(id(parameter) in chosen)
    model.eval()
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
        model.train(training)


@contextmanager
def gate_input_gradient(model: Any, *, detached: bool) -> Iterator[None]:
    """Gate inputs detached (the paper's semi-gradient) or not (the complete gradient); the forward is the same."""
    gates = gate_modules(model).values()
    before = [gate.config for gate in gates]
    for gate in gates:
        gate.config = dataclasses.replace(gate.config, detach_input=detached)
    try:
        yield
    finally:
        for gate, config in zip(gates, before, strict=True):
            gate.config = config


def row_directions(reader: Reader, batch: Batch, values: ActionValues, k: int) -> RowDirections:
    """The four directions of one row; call inside `differentiable_gates`.

    Args:
        reader: of the gated model.
        batch: one row from `batches`.
        values: its action values.
        k: support of the entropy objective.
    """
    parameters = list(gate_parameters(reader.model).values())
    vectors: dict[str, Tensor] = {}
    with torch.enable_grad():
        with gate_input_gradient(reader.model, detached=True):
            states = reader.states(batch)
            (grad,), _ = state_gradients(reader, states, values, k, ("entropy",))
            vectors["entropy_semi"] = _flat(
                torch.autograd.grad(states, parameters, grad, allow_unused=True), parameters
            )
        with gate_input_gradient(reader.model, detached=False):
            states = reader.states(batch)
            names = ("entropy", "value_topk", "value")
            grads, best = state_gradients(reader, states, values, k, names)
            for index, (name, grad) in enumerate(zip(names, grads, strict=True)):
                keep = index < len(names) - 1
                found = torch.autograd.grad(states, parameters, grad, retain_graph=keep, allow_unused=True)
                vectors[name] = _flat(found, parameters)
    return RowDirections(vectors, len(states), best)


def state_gradients(
    reader: Reader, states: Tensor, values: ActionValues, k: int, names: tuple[str, ...]
) -> tuple[list[Tensor], int]:
    """Gradients with respect to the states [T, D] of "entropy", "value_topk" and "value", and `top_is_best`.

    The head is applied in chunks, so that no more than a chunk of logits is held.
    """
    gathered: dict[str, list[Tensor]] = {name: [] for name in names}
    best = 0
    for start in range(0, len(states), CHUNK):
        part = states[start : start + CHUNK].detach().requires_grad_()
        logits = reader.logits(part)
        fixed = logits.detach()
        with torch.no_grad():
            table = values.table(start, start + len(part), fixed)
            top = fixed.topk(support_size(k, fixed.shape[-1]), -1).indices
            on_support = table.gather(-1, top)
            best += int((on_support[:, 0] >= on_support.amax(-1)).sum())
            wanted = {name: _logit_gradient(name, fixed, table, k) for name in names}
        for index, name in enumerate(names):
            keep = index < len(names) - 1
            gathered[name].append(torch.autograd.grad(logits, part, wanted[name], retain_graph=keep)[0])
    return [torch.cat(gathered[name]) for name in names], best


def _logit_gradient(name: str, logits_CV: Tensor, values_CV: Tensor, k: int) -> Tensor:
    if name == "entropy":
        return entropy_logit_gradient(logits_CV, k)
    return value_logit_gradient(logits_CV, values_CV, k if name == "value_topk" else None)


def merged(rows: Sequence[RowDirections], groups: Sequence[int]) -> list[RowDirections]:
    """Rows of one group (answers to one question) summed into one, in the order of the groups' first rows."""
    found: dict[int, RowDirections] = {}
    for row, group in zip(rows, groups, strict=True):
        before = found.get(group)
        found[group] = (
            row
            if before is None
            else RowDirections(
                {name: before.vectors[name] + row.vectors[name] for name in NAMES},
                before.tokens + row.tokens,
                before.top_is_best + row.top_is_best,
            )
        )
    return list(found.values())


def _flat(gradients: Any, parameters: list[Any]) -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).detach().reshape(-1).cpu()
            for g, p in zip(gradients, parameters, strict=True)
        ]
    )
