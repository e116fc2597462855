"""Where entropy descent goes and where the task value goes: in the gate parameters, and λ by λ.

In the gate parameters there are four vectors per row, as sums over its counted positions; all are gradients at the gates as
they are, on the top-k support of the moment:

- entropy_semi: the row's part of Ĝ_k = −log k · D_ψ F_k, the direction of training (gate inputs detached);
- entropy: of G_k = −log k · ∇_ψ F_k, the complete gradient (eq:rw-stopped-directions);
- value_topk: of ∇_ψ V_k, the conditional value on the same support;
- value: of ∇_ψ V over the full vocabulary (eq:rw-total-error).

All share one form, Σ_a q(a) A(a) s(a) (eq:rw-two-policy-gradients), so only the logit gradients q·A differ; these are
written down in closed form and pulled back through head and body.

For the coordinate i = (module, position) the paper's appendix compares −log k·∂F_k/∂λ_i = β h_i + b_i with
h_i = mean Cov_q(r, ∂z/∂λ_i) = ∂V_k/∂λ_i (eq:rw-coordinate-signal): entropy points the right way where both have one sign.
λ is supplied from outside there (eq:rw-causal-jacobian), at the values that the gates give it, so a coordinate's effect
includes all later positions and all later modules, but no other gate's reaction.

Shapes: T counted positions, C chunk of them, V vocabulary, K support, P gate parameters, N rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from loragate.analysis.rows import CHUNK, CLASSES, Interval, Reader, Row, TokenClasses, ratio
from loragate.analysis.supplied import supplied_coefficients
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

    def __add__(self, other: RowDirections) -> RowDirections:
        vectors = {name: self.vectors[name] + other.vectors[name] for name in NAMES}
        return RowDirections(vectors, self.tokens + other.tokens, self.top_is_best + other.top_is_best)


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


def row_directions(reader: Reader, row: Row, values: ActionValues, k: int) -> RowDirections:
    """The four directions of one row for the entropy on a support of k; call inside `differentiable_gates`."""
    parameters, batch = list(gate_parameters(reader.model).values()), reader.batch(row)
    vectors: dict[str, Tensor] = {}
    with torch.enable_grad():
        for detached, names in ((True, ("entropy",)), (False, ("entropy", "value_topk", "value"))):
            with gate_input_gradient(reader.model, detached=detached):
                states = reader.states(batch)
                grads, best = state_gradients(reader, states, values, k, names)
                for name, found in zip(names, pulled_back(states, parameters, grads), strict=True):
                    parts = [(torch.zeros_like(p) if g is None else g) for g, p in zip(found, parameters, strict=True)]
                    flat = torch.cat([part.detach().reshape(-1).cpu() for part in parts])
                    vectors["entropy_semi" if detached else name] = flat
    return RowDirections(vectors, len(states), best)


def pulled_back(outputs: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Sequence[Tensor | None]]:
    """The gradients of `inputs` for each gradient of `outputs`, whose graph is gone after the last."""
    return [
        torch.autograd.grad(outputs, inputs, grad, retain_graph=number < len(grads), allow_unused=True)
        for number, grad in enumerate(grads, 1)
    ]


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
            table = values(slice(start, start + len(part)), fixed)
            top = fixed.topk(support_size(k, fixed.shape[-1]), -1).indices
            on_support = table.gather(-1, top)
            best += int((on_support[:, 0] >= on_support.amax(-1)).sum())
            wanted = [
                entropy_logit_gradient(fixed, k)
                if name == "entropy"
                else value_logit_gradient(fixed, table, k if name == "value_topk" else None)
                for name in names
            ]
        for name, (found,) in zip(names, pulled_back(logits, [part], wanted), strict=True):
            assert found is not None
            gathered[name].append(found)
    return [torch.cat(gathered[name]) for name in names], best


Part = TypeVar("Part", RowDirections, np.ndarray)


def by_group(rows: Sequence[Part], groups: Sequence[int]) -> list[Part]:
    """Rows of one group (answers to one question) summed into one, in the order of the groups' first rows."""
    found: dict[int, Part] = {}
    for row, group in zip(rows, groups, strict=True):
        found[group] = found[group] + row if group in found else row
    return list(found.values())


PROMPT = "prompt"
GROUPS = (*CLASSES, PROMPT)
"""Class of the token that a position predicts; positions whose next token belongs to the prompt are "prompt"."""
AGREEMENT = ("count", "agree", "|h|", "|h| where they agree", "raised", "value raised")


@dataclass(frozen=True)
class Agreement:
    """How often entropy and task value agree on the sign of a λ's change.

    Attributes:
        name: "all", or a class of tokens.
        coordinates: number of λ with a non-zero derivative of both.
        share: share of them with one sign, with its interval over rows.
        weighted: the same, each counted by |∂V_k/∂λ|.
        raised: share of the λ that entropy wants larger; value_raised: that the task value wants larger.
    """

    name: str
    coordinates: int
    share: Interval
    weighted: Interval
    raised: float
    value_raised: float


def coordinate_sums(
    reader: Reader, row: Row, values: ActionValues, k: int, classes: TokenClasses, prompt_length: int
) -> np.ndarray:
    """What one row's λ add to the sums of `AGREEMENT`, [groups, sums]; the model carries the gates as they are.

    Args:
        prompt_length: tokens of the row that precede the response.
    """
    gates, leaves = gate_modules(reader.model), {}

    def leaf(path: str, _layer: Any, x: Tensor) -> Tensor | None:
        if path not in gates:
            return None  # the adapter's delta without a gate
        leaves[path] = gates[path].coefficients(x).detach().clone().requires_grad_()
        return leaves[path]

    with torch.enable_grad(), supplied_coefficients(reader.model, leaf):
        states = reader.states(reader.batch(row))
        grads, _ = state_gradients(reader, states, values, k, ("entropy", "value_topk"))
        wants, helps = pulled_back(states, list(leaves.values()), grads)
    groups = np.where(
        np.arange(1, len(row["input_ids"])) < prompt_length, len(CLASSES), classes.indices(row["input_ids"][1:])
    )
    found = np.zeros((len(GROUPS), len(AGREEMENT)))
    for want, help_ in zip(wants, helps, strict=True):
        if want is None or help_ is None:
            continue
        w, h = (tensor[0, :-1].double().cpu().numpy() for tensor in (want, help_))
        kept = (w != 0) & (h != 0)
        agree = kept & (np.sign(w) == np.sign(h))
        columns = [kept, agree, kept * np.abs(h), agree * np.abs(h), kept & (w > 0), kept & (h > 0)]
        for column, numbers in enumerate(columns):
            found[:, column] += np.bincount(groups, numbers, minlength=len(GROUPS))
    return found


def agreements(rows: Sequence[np.ndarray], seed: int = 0) -> tuple[Agreement, ...]:
    """Agreement over everything and per class, of `coordinate_sums` of rows; classes with no coordinate are left out."""
    table, found = np.stack(rows), []
    for name, sums in (("all", table.sum(1)), *((name, table[:, index]) for index, name in enumerate(GROUPS))):
        count, agree, size, agreed, raised, value_raised = sums.T
        if total := count.sum():
            shares = ratio(agree, count, seed), ratio(agreed, size, seed)
            found.append(Agreement(name, int(total), *shares, raised.sum() / total, value_raised.sum() / total))
    return tuple(found)
