"""Action values r_t(a): what the paper's task value V is made of, and what it leaves unmeasured.

The theory assumes fixed action values r_t(a) at every position (text before eq:rw-alignment-identity). Three kinds are
given here, all independent of entropy:

- reference: r_t(a) = log π_ref(a | c_t) of another model on the same prefix; V is then minus the cross-entropy to it.
- reward: an answer sampled by a policy μ and graded R, spread over its own tokens with a baseline b from the other
  answers to its question: r_t(y_t) = b + (R − b)/μ(y_t | c_t) and r_t(a) = b elsewhere. By eq:rw-is-sft its gradient at
  μ is the policy gradient (R − b)·∇log μ(y_t). Unbiased, and noisy.
- rollouts: at a position the likeliest actions are each taken, the answer is completed by a fixed continuation policy and
  graded; r_t(a) is the mean verdict. Actions not tried get the mean over those tried, so that they count neither for
  nor against.

Shapes: T counted positions of one row, V vocabulary, A actions tried, C chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from loragate.analysis.reading import Reader, Row, batches
from loragate.data.rendering import IGNORED
from loragate.errors import DataError
from loragate.generation import Sample, SamplingConfig, TransformersEngine


class ActionValues(Protocol):
    """Task values of every action, at the positions of one row."""

    def table(self, start: int, stop: int, like: Tensor) -> Tensor:
        """r [C, V] of the counted positions start … stop, with dtype, device and width of the logits `like`."""
        ...


@dataclass(frozen=True)
class DenseValues:
    """Values of all actions, [T, V]."""

    values: Tensor

    def table(self, start: int, stop: int, like: Tensor) -> Tensor:
        return self.values[start:stop].to(like)


@dataclass(frozen=True)
class SparseValues:
    """Values of a few actions.

    Attributes:
        actions: int64 [T, A].
        values: [T, A].
        elsewhere: value of all other actions, [T].
    """

    actions: Tensor
    values: Tensor
    elsewhere: Tensor

    def table(self, start: int, stop: int, like: Tensor) -> Tensor:
        table = self.elsewhere[start:stop, None].to(like).expand(-1, like.shape[-1]).clone()
        return table.scatter_(1, self.actions[start:stop].to(like.device), self.values[start:stop].to(like))


def reference_values(reader: Reader, row: Row, pad_token_id: int) -> DenseValues:
    """log π_ref at the row's counted positions, from the model as it acts at the moment.

    `reader` may hold another model than the one that is diagnosed, with the same vocabulary.
    """
    (batch,) = batches([row], pad_token_id, 1, reader.device)
    with torch.no_grad():
        return DenseValues(torch.log_softmax(reader.logits(reader.states(batch)), -1))


def reward_values(reader: Reader, row: Row, reward: float, baseline: float, pad_token_id: int) -> SparseValues:
    """One graded answer's reward spread over its tokens; the model acts as the policy that wrote the answer."""
    (batch,) = batches([row], pad_token_id, 1, reader.device)
    log_prob = reader.read(batch).log_prob
    labels = batch["labels"][0, 1:]
    actions = labels[labels != IGNORED].unsqueeze(-1).cpu()
    values = baseline + (reward - baseline) * torch.exp(-log_prob.cpu())
    return SparseValues(actions, values.unsqueeze(-1), torch.full((len(actions),), baseline))


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


def some_positions(row: Row, count: int, generator: np.random.Generator) -> Row:
    """The row with `count` of its response tokens counted, drawn without replacement; all where it has fewer."""
    labels = list(row["labels"])
    response = [at for at, label in enumerate(labels) if label != IGNORED]
    kept = set(generator.choice(response, size=min(count, len(response)), replace=False).tolist())
    return {**row, "labels": [label if at in kept else IGNORED for at, label in enumerate(labels)]}


@dataclass(frozen=True)
class Branch:
    """One action tried at one counted position of one row: the tokens up to and with it."""

    row: int
    position: int
    action: int
    prompt_length: int
    token_ids: tuple[int, ...]


def branches(
    reader: Reader, rows: Sequence[Row], prompt_lengths: Sequence[int], actions: int, pad_token_id: int
) -> list[Branch]:
    """The likeliest `actions` tokens at every counted position, under the model as it acts at the moment."""
    found = []
    for index, row in enumerate(rows):
        (batch,) = batches([row], pad_token_id, 1, reader.device)
        with torch.no_grad():
            top = reader.logits(reader.states(batch)).topk(actions, -1).indices.tolist()
        counted = [at for at, label in enumerate(row["labels"]) if label != IGNORED and at > 0]
        for position, (at, tokens) in enumerate(zip(counted, top, strict=True)):
            prefix = tuple(row["input_ids"][:at])
            found += [Branch(index, position, token, prompt_lengths[index], (*prefix, token)) for token in tokens]
    return found


Grader = Callable[[Sequence[tuple[int, Sample]]], Sequence[bool]]
"""Verdicts on (row, whole answer)."""


def rollout_values(
    model: Any,
    tokenizer: Any,
    tried: Sequence[Branch],
    grade: Grader,
    sampling: SamplingConfig,
    stop_token_ids: Collection[int],
    positions: int | None = None,
    batch_size: int = 64,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[int, SparseValues]:
    """Mean verdict of answers completed from every branch, by row; the model acts as the continuation policy.

    Args:
        grade: judges answers from their first token on, the part before the branch included.
        sampling: samples per branch, temperature, and the limit of the whole answer in tokens.
        stop_token_ids: ids that end an answer; a branch that ends with one is complete.
        positions: of the model; an answer that would pass them is cut off.
    """
    left = {
        number: 0 if branch.action in stop_token_ids else _room(branch, sampling, positions)
        for number, branch in enumerate(tried)
    }
    answers: list[tuple[int, Sample]] = []
    owners: list[int] = []
    before = 0
    total = sampling.samples * sum(room > 0 for room in left.values())

    def report(done: int, _of: int) -> None:
        if on_progress is not None:
            on_progress(before + done, total)

    for part, numbers in enumerate(_parts(tried, left, positions)):
        before, ids = len(answers), [list(tried[number].token_ids) for number in numbers]
        engine = TransformersEngine(model, _Spelled(tokenizer, ids), batch_size)
        limit = max(left[number] for number in numbers)
        # the streams of random numbers are told apart by the places in a part
        how = replace(sampling, max_new_tokens=limit, seed=sampling.seed + part)
        for drawn in engine.generate([str(place) for place in range(len(ids))], how, report):
            branch = tried[numbers[drawn.question]]
            whole = (*branch.token_ids[branch.prompt_length :], *drawn.token_ids)
            answers.append(
                (branch.row, _answer(tokenizer, whole, sampling.max_new_tokens, drawn.finish_reason == "stop"))
            )
            owners.append(numbers[drawn.question])
    for number, branch in enumerate(tried):
        if not left[number]:
            whole = branch.token_ids[branch.prompt_length :]
            ended = branch.action in stop_token_ids
            answers.append((branch.row, _answer(tokenizer, whole, sampling.max_new_tokens, ended)))
            owners.append(number)
    right = np.asarray(grade(answers), dtype=float)
    sums, sizes = np.zeros(len(tried)), np.zeros(len(tried))
    np.add.at(sums, owners, right)
    np.add.at(sizes, owners, 1)
    return _tables(tried, sums / sizes)


def _room(branch: Branch, sampling: SamplingConfig, positions: int | None) -> int:
    """Tokens that may still follow: what is left of the whole answer's limit, and of the model's positions."""
    left = sampling.max_new_tokens - (len(branch.token_ids) - branch.prompt_length)
    return max(0, left if positions is None else min(left, positions - len(branch.token_ids)))


def _parts(tried: Sequence[Branch], left: Mapping[int, int], positions: int | None) -> list[list[int]]:
    """Numbers of the open branches, in parts that can be completed together.

    One call of the engine has one limit of new tokens, for which the longest of its branches must have the positions; a late
    branch must not take them from an early one.
    """
    order = sorted((number for number in left if left[number]), key=lambda number: -len(tried[number].token_ids))
    parts: list[list[int]] = []
    room = 0.0
    for number in order:
        if not parts or left[number] > room:
            parts.append([])
            # the first of a part is its longest
            room = math.inf if positions is None else positions - len(tried[number].token_ids)
        parts[-1].append(number)
    return [sorted(part) for part in parts]


def _answer(tokenizer: Any, ids: Sequence[int], limit: int, ended: bool) -> Sample:
    """A whole answer as a sample; one that passed the limit of the whole is cut there."""
    ended = ended and len(ids) <= limit
    kept = tuple(ids[:limit])
    text = tokenizer.decode(kept[:-1] if ended else kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Sample(0, 0, text, kept, "stop" if ended else "length", None)


def _tables(tried: Sequence[Branch], values: np.ndarray) -> dict[int, SparseValues]:
    by_row: dict[int, dict[int, list[tuple[int, float]]]] = {}
    for branch, value in zip(tried, values.tolist(), strict=True):
        by_row.setdefault(branch.row, {}).setdefault(branch.position, []).append((branch.action, value))
    tables = {}
    for row, positions in by_row.items():
        pairs = [positions[at] for at in sorted(positions)]
        actions = torch.tensor([[action for action, _ in line] for line in pairs])
        table = torch.tensor([[value for _, value in line] for line in pairs])
        tables[row] = SparseValues(actions, table, table.mean(-1))
    return tables


class _Spelled:
    """A tokenizer whose prompts are numbers of rows of ids, so that ids need not survive being spelled out as text."""

    def __init__(self, tokenizer: Any, ids: Sequence[list[int]]) -> None:
        self._tokenizer, self._ids = tokenizer, ids

    def __call__(self, prompts: Sequence[str], **_: Any) -> dict[str, Any]:
        try:
            return {"input_ids": [self._ids[int(prompt)] for prompt in prompts]}
        except (ValueError, IndexError) as error:
            raise DataError(f"no row of ids is called {error}") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
