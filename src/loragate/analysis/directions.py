"""Where entropy descent goes and where a task value goes: in the gate parameters, and λ by λ.

**Action values.** The theory assumes fixed action values r_t(a) at every position (text before eq:rw-alignment-identity). Two
kinds are given here, both independent of entropy:

- reference: r_t(a) = log π_ref(a | c_t) of another model on the same prefix; V is then minus the cross-entropy to it.
- reward: an answer sampled by a policy μ and graded R, spread over its own tokens with a baseline b from the other
  answers to its question: r_t(y_t) = b + (R − b)/μ(y_t | c_t) and r_t(a) = b elsewhere. By eq:rw-is-sft its gradient at
  μ is the policy gradient (R − b)·∇log μ(y_t). Unbiased, and noisy.

**Directions.** In the gate parameters there are four vectors per row, as sums over its counted positions; all are gradients at
the gates as they are, on the top-k support of the moment:

- entropy_semi: the row's part of Ĝ_k = −log k · D_ψ F_k, the direction of training (gate inputs detached);
- entropy: of G_k = −log k · ∇_ψ F_k, the complete gradient (eq:rw-stopped-directions);
- value_topk: of ∇_ψ V_k, the conditional value on the same support;
- value: of ∇_ψ V over the full vocabulary (eq:rw-total-error).

All share one form, Σ_a q(a) A(a) s(a) (eq:rw-two-policy-gradients), so only the logit gradients q·A differ. These are written
down in closed form and pulled back in two stages: through the head to the hidden states, which is the same for whatever is
asked of them, then through the body to the gate parameters or to single λ.

**Coordinates.** For the coordinate i = (module, position) the paper's appendix compares −log k·∂F_k/∂λ_i = β h_i + b_i with
h_i = mean Cov_q(r, ∂z/∂λ_i) = ∂V_k/∂λ_i (eq:rw-coordinate-signal): entropy points the right way where both have one sign.
λ is supplied from outside there (eq:rw-causal-jacobian), at the values that the gates give it, so a coordinate's effect
includes all later positions and all later modules, but no other gate's reaction.

Shapes: T counted positions of one row, N of all rows, C chunk of positions, V vocabulary, K support, D hidden,
P gate parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from loragate.analysis.context import Answers, DiagnosticContext
from loragate.analysis.rows import (
    CHUNK,
    CLASSES,
    Interval,
    Reader,
    Row,
    TokenClasses,
    bootstrap_ratio,
    distinct,
    no_progress,
)
from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.supplied import supplied_coefficients
from loragate.data.encoding import IGNORED
from loragate.errors import ConfigError, DataError
from loragate.gates import gate_parameters
from loragate.gates.attach import GLOBAL_BIAS, gate_modules
from loragate.generation import OnProgress
from loragate.losses.entropy import support_size
from loragate.models.source import Kind

ROWS = 48

ActionValues = Callable[[slice, Tensor], Tensor]
"""Values of every action at some counted positions of one row: (positions, logits there [C, V]) to r [C, V] of the same kind."""


@dataclass(frozen=True)
class Case:
    """One row that directions are computed on.

    Attributes:
        row: of token ids.
        values: of the actions at its counted positions.
        group: what is drawn together for intervals, as the answers to one question are, and rows that repeat.
    """

    row: Row
    values: ActionValues
    group: int


def gather(context: DiagnosticContext, settings: DiagnoseSettings) -> tuple[list[Case], str, str]:
    """Rows of a file, or stored answers, with their action values; where they come from, and the values, in words.

    Raises:
        ConfigError: for a reference of another vocabulary, and answers that were not sampled as their values require.
        DataError: for answers that are not graded.
    """
    of, most = settings.of or "adapter", settings.max_rows or ROWS
    if settings.rows:
        rows, source = context.rows(settings, ROWS)
        groups = distinct(rows).tolist()
    else:
        found, source = context.answers(of, settings)
        if len(found) > 1:
            source += f"; the first task, {found[0].prepared.task.name}, is used"
        # one answer of every question before the second of any, so that a limit cuts answers and not questions
        graded = sorted(found[0].graded, key=lambda pair: (pair[0].sample, pair[0].question))
        one = Answers(found[0].prepared, graded[:most])
        rows = context.answer_rows(one, settings.max_length)
        context.require_rows(rows, source)
        one = Answers(one.prepared, [one.graded[row["row"]] for row in rows])
        groups = [sample.question for sample in one.samples]
    if settings.value == "reference":
        values, what = _reference(context, settings.reference, rows)
    elif None in one.grades:
        raise DataError(f"the answers of the {of} model are not graded; finish the evaluation first")
    else:
        values, what = _reward(context, one, rows, of)
    return list(map(Case, rows, values, groups)), source, what


def _reference(context: DiagnosticContext, name: str, rows: Sequence[Row]) -> tuple[list[ActionValues], str]:
    """Values from another policy on the same prefixes."""
    reader, what = context.reader, f"log-probability under {name}"
    acting: AbstractContextManager[None] = nullcontext()
    if name in ("base", "adapter"):
        kind: Kind = "base" if name == "base" else "adapter"
        acting, what = context.acting(kind), f"log-probability under the {name} itself"
    else:
        other = context.load_reference(name)
        own = context.loaded.tokenizer
        if own.get_vocab() != other.tokenizer.get_vocab():
            raise ConfigError(
                f"--reference {name} has another vocabulary ({len(other.tokenizer)} tokens, the model {len(own)}); values of "
                "actions need the same tokens"
            )
        reader = Reader(other.model, own)
    with context.job("reading with the reference"), acting:
        return [reference_values(reader, row) for row in rows], what


def _reward(
    context: DiagnosticContext, answers: Answers, rows: Sequence[Row], of: Kind
) -> tuple[list[ActionValues], str]:
    """Verdicts spread over the answers' own tokens."""
    sampling = answers.prepared.sampling
    if (sampling.temperature, sampling.top_p) != (1.0, 1.0):
        raise ConfigError(
            f"--value reward needs answers sampled at temperature 1 and top-p 1, found {sampling.temperature:g} and "
            f"{sampling.top_p:g}; use --value reference"
        )
    rewards = [float(grade.correct) for grade in answers.grades if grade]
    baselines = leave_one_out([sample.question for sample in answers.samples], rewards)
    with context.acting(of):
        values: list[ActionValues] = [
            reward_values(context.reader, *each) for each in zip(rows, rewards, baselines, strict=True)
        ]
    grader = answers.prepared.task.grader
    return values, f"verdicts of {grader} on the {of} model's answers, with the question's mean as baseline"


@torch.no_grad()
def reference_values(reader: Reader, row: Row) -> ActionValues:
    """log π_ref at the row's counted positions, from the model as it acts at the moment.

    `reader` may hold another model than the one that is diagnosed, with the same vocabulary. Hidden states [T, D] are kept, where
    the head is a plain one; T × V log-probabilities would fill the memory.
    """
    states_TD, head = reader.states(reader.batch(row)), reader.head() if reader.fused else None

    @torch.no_grad()
    def table(at: slice, logits: Tensor) -> Tensor:
        found = states_TD[at] if head is None else head.logits(states_TD[at], torch.float32)
        return torch.log_softmax(found.float(), -1).to(logits)

    return table


def reward_values(reader: Reader, row: Row, reward: float, baseline: float) -> ActionValues:
    """One graded answer's reward spread over its tokens; the model acts as the policy that wrote the answer."""
    batch = reader.batch(row)
    log_prob = reader.label_log_probs(batch)
    labels = batch["labels"][0, 1:]
    actions_T = labels[labels != IGNORED]
    values_T = baseline + (reward - baseline) * torch.exp(-log_prob)

    def table(at: slice, logits: Tensor) -> Tensor:
        own = values_T[at, None].to(logits)
        return torch.full_like(logits, baseline).scatter_(1, actions_T[at, None].to(logits.device), own)

    return table


def leave_one_out(questions: Sequence[int], rewards: Sequence[float]) -> list[float]:
    """For each answer the mean reward of the other answers to its question; of all answers where it is the only one."""
    group: dict[int, list[float]] = {}
    for question, reward in zip(questions, rewards, strict=True):
        group.setdefault(question, []).append(reward)
    overall = float(np.mean(rewards))
    return [
        (sum(group[question]) - reward) / (len(group[question]) - 1) if len(group[question]) > 1 else overall
        for question, reward in zip(questions, rewards, strict=True)
    ]


NAMES = ("entropy_semi", "entropy", "value_topk", "value")


def entropy_logit_gradient(logits_CV: Tensor, k: int) -> Tensor:
    """−∂H(q)/∂z = q (log q + H) on the top-k support and 0 elsewhere (eq:rw-topk-logit-gradient), [C, V]."""
    top = logits_CV.topk(support_size(k, logits_CV.shape[-1]), -1)
    log_q = torch.log_softmax(top.values, -1)
    q = log_q.exp()
    advantage = log_q - (q * log_q).sum(-1, keepdim=True)
    return torch.zeros_like(logits_CV).scatter_(-1, top.indices, q * advantage)


def value_logit_gradient(logits_CV: Tensor, values_CV: Tensor, k: int = 0) -> Tensor:
    """∂E_q[r]/∂z = q (r − E_q r) on the top-k support (0: the full vocabulary), [C, V]."""
    top = logits_CV.topk(support_size(k, logits_CV.shape[-1]), -1)
    q = torch.softmax(top.values, -1)
    r = values_CV.gather(-1, top.indices)
    return torch.zeros_like(logits_CV).scatter_(-1, top.indices, q * (r - (q * r).sum(-1, keepdim=True)))


@dataclass(frozen=True)
class RowDirections:
    """One row, or several that belong together, summed.

    Attributes:
        vectors: [4, P] fp32 on the CPU, in the order of `NAMES` and of `parameter_slices`; sums over counted positions.
        tokens: number of counted positions.
        top_is_best: number of them at which the likeliest action is among those of the highest value (on the support).
    """

    vectors: Tensor
    tokens: int
    top_is_best: int

    def __add__(self, other: RowDirections) -> RowDirections:
        return RowDirections(
            self.vectors + other.vectors, self.tokens + other.tokens, self.top_is_best + other.top_is_best
        )


Part = TypeVar("Part", RowDirections, np.ndarray)


def by_group(
    cases: Sequence[Case], measure: Callable[[Case], Part], on_progress: OnProgress = no_progress
) -> list[Part]:
    """What is measured of each case, summed over those of one group (answers to one question), in order of first appearance."""
    found: dict[int, Part] = {}
    for number, case in enumerate(cases, 1):
        part = measure(case)
        found[case.group] = found[case.group] + part if case.group in found else part
        on_progress(number, len(cases))
    return list(found.values())


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


def row_directions(reader: Reader, case: Case, k: int) -> RowDirections:
    """The four directions of one row for the entropy on a support of k; the gates must require gradients."""
    parameters, batch = list(gate_parameters(reader.model).values()), reader.batch(case.row)
    with torch.enable_grad():
        with gate_input_gradient(reader.model, detached=True):
            states = reader.states(batch)
            grads, best = state_gradients(reader, states, case.values, k)
            semi = vector_jacobian_products(states, parameters, grads[:1])  # of the entropy
        # the same states, over another graph
        with gate_input_gradient(reader.model, detached=False):
            complete = vector_jacobian_products(reader.states(batch), parameters, grads)
    vectors = [torch.cat([part.reshape(-1).cpu() for part in parts]) for parts in (*semi, *complete)]
    return RowDirections(torch.stack(vectors), len(states), best)


def vector_jacobian_products(
    outputs: Tensor, inputs: Sequence[Tensor], grads: Tensor | Sequence[Tensor]
) -> list[tuple[Tensor, ...]]:
    """The gradients of `inputs` for each gradient of `outputs`: zeros for one that played no part, such as an idle expert's.

    The graph is freed with the last, so that no two graphs of a body are held at once.
    """
    return [
        torch.autograd.grad(outputs, inputs, grad, retain_graph=number < len(grads), materialize_grads=True)
        for number, grad in enumerate(grads, 1)
    ]


def state_gradients(reader: Reader, states: Tensor, values: ActionValues, k: int) -> tuple[Tensor, int]:
    """Gradients with respect to the states [T, D] of entropy, value on the support and value, [3, T, D], and `top_is_best`.

    The head is applied in chunks, so that no more than a chunk of logits is held.
    """
    chunks, best = [], 0
    for start in range(0, len(states), CHUNK):
        part = states[start : start + CHUNK].detach().requires_grad_()
        logits = reader.logits(part)  # [C, V]
        fixed = logits.detach()
        with torch.no_grad():
            table = values(slice(start, start + len(part)), fixed)
            on_support = table.gather(-1, fixed.topk(support_size(k, fixed.shape[-1]), -1).indices)
            # of the support, the first is the likeliest
            best += int((on_support[:, 0] >= on_support.amax(-1)).sum())
            wanted = (
                entropy_logit_gradient(fixed, k),
                value_logit_gradient(fixed, table, k),
                value_logit_gradient(fixed, table),
            )
        chunks.append(torch.stack([found for (found,) in vector_jacobian_products(logits, [part], wanted)]))
    return torch.cat(chunks, 1), best


PROMPT = "prompt"
GROUPS = (*CLASSES, PROMPT)
"""Class of the token that a position predicts; "prompt" where the next token is not learned, in the prompt and between answers."""
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


def coordinate_sums(reader: Reader, case: Case, k: int, classes: TokenClasses) -> np.ndarray:
    """What one row's λ add to the sums of `AGREEMENT`, [groups, sums]; the model carries the gates as they are."""
    gates, leaves = gate_modules(reader.model), {}

    def leaf(path: str, _layer: Any, x: Tensor) -> Tensor | None:
        if path not in gates:
            return None  # the adapter's delta without a gate
        leaves[path] = gates[path].coefficients(x).detach().requires_grad_()
        return leaves[path]

    with torch.enable_grad(), supplied_coefficients(reader.model, leaf):
        states = reader.states(reader.batch(case.row))
        grads, _ = state_gradients(reader, states, case.values, k)
        # of entropy, and of value on the support
        wants, helps = vector_jacobian_products(states, list(leaves.values()), grads[:2])
    # of positions 0 to S - 2 by the token that follows; the last position predicts nothing
    ids, labels = case.row["input_ids"][1:], np.asarray(case.row["labels"][1:])
    groups = np.where(labels == IGNORED, len(CLASSES), classes.indices(ids))
    found = np.zeros((len(GROUPS), len(AGREEMENT)))
    for want, help_ in zip(wants, helps, strict=True):  # of one module, [1, S] each
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
            shares = bootstrap_ratio(agree, count, seed), bootstrap_ratio(agreed, size, seed)
            found.append(Agreement(name, int(total), *shares, raised.sum() / total, value_raised.sum() / total))
    return tuple(found)
