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

Shapes: T counted positions of one row, N of all rows, V vocabulary, A actions tried, C chunk, D hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from loragate.analysis.rows import Reader, Row, no_progress
from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.subject import Answers, DiagnosticContext
from loragate.data.rendering import IGNORED
from loragate.errors import ConfigError, DataError
from loragate.evaluation.judging import grader_for, judge
from loragate.generation import OnProgress, Sample, SamplingConfig, TransformersEngine
from loragate.models.source import Kind

ROWS = 48

ActionValues = Callable[[slice, Tensor], Tensor]
"""Values of every action at some counted positions of one row: (positions, logits there [C, V]) to r [C, V] of the same kind."""


def sparse_values(actions_TA: Tensor, values_TA: Tensor, elsewhere_T: Tensor) -> ActionValues:
    """Values of a few actions at each position, and one for all others there."""

    def table(at: slice, logits: Tensor) -> Tensor:
        table = elsewhere_T[at, None].to(logits).expand(-1, logits.shape[-1]).clone()
        return table.scatter_(1, actions_TA[at].to(logits.device), values_TA[at].to(logits))

    return table


@dataclass(frozen=True)
class Case:
    """One row that directions are computed on.

    Attributes:
        row: of token ids; for rollouts only some of its response tokens count.
        values: of the actions at its counted positions.
        group: what is drawn together for intervals, as the answers to one question are.
        prompt_length: tokens before its response.
    """

    row: Row
    values: ActionValues
    group: int
    prompt_length: int


def gather(subject: DiagnosticContext, settings: DiagnoseSettings) -> tuple[list[Case], str, str]:
    """Rows of a file, or answers stored or drawn now, with their action values; where they come from, and the values, in words.

    Raises:
        ConfigError: for a reference of another vocabulary, and answers that were not sampled as their values require.
        DataError: for answers that are not graded.
    """
    of, most = settings.of or "adapter", settings.max_rows or ROWS
    if settings.rows:
        rows, source = subject.rows(settings, ROWS)
        groups = list(range(len(rows)))
    else:
        found, source = subject.answers(of, settings)
        if len(found) > 1:
            source += f"; the first task, {found[0].prepared.task.name}, is used"
        # one answer of every question before the second of any, so that a limit cuts answers and not questions
        graded = sorted(found[0].graded, key=lambda pair: (pair[0].sample, pair[0].question))
        one = Answers(found[0].prepared, graded[:most])
        rows, groups = one.rows(subject.loaded.tokenizer), [sample.question for sample in one.samples]
    lengths = [next(at for at, label in enumerate(row["labels"]) if label != IGNORED) for row in rows]
    if settings.value == "reference":
        values, what = _reference(subject, settings.reference, rows)
    elif None in one.grades:
        raise DataError(f"the answers of the {of} model are not graded; finish the evaluation first")
    elif settings.value == "reward":
        values, what = _reward(subject, one, rows, of)
    else:
        generator = np.random.default_rng(subject.seed)
        rows = [some_positions(row, settings.positions, generator) for row in rows]
        values, what = _rollouts(subject, one, rows, lengths, settings)
    return list(map(Case, rows, values, groups, lengths)), source, what


def _reference(subject: DiagnosticContext, name: str, rows: Sequence[Row]) -> tuple[list[ActionValues], str]:
    """Values from another policy on the same prefixes."""
    reader, what = subject.reader, f"log-probability under {name}"
    context: AbstractContextManager[None] = nullcontext()
    if name in ("base", "adapter"):
        kind: Kind = "base" if name == "base" else "adapter"
        context, what = subject.acting(kind), f"log-probability under the {name} itself"
    else:
        other = subject.beside(name)
        own = subject.loaded.tokenizer
        if own.get_vocab() != other.tokenizer.get_vocab():
            raise ConfigError(
                f"--reference {name} has another vocabulary ({len(other.tokenizer)} tokens, the model {len(own)}); values of "
                "actions need the same tokens"
            )
        reader = Reader(other.model, own)
    with subject.job("reading with the reference"), context:
        return [reference_values(reader, row) for row in rows], what


def _reward(
    subject: DiagnosticContext, answers: Answers, rows: Sequence[Row], of: Kind
) -> tuple[list[ActionValues], str]:
    """Verdicts spread over the answers' own tokens."""
    sampling = answers.prepared.sampling
    if (sampling.temperature, sampling.top_p) != (1.0, 1.0):
        raise ConfigError(
            f"--value reward needs answers sampled at temperature 1 and top-p 1, found {sampling.temperature:g} and "
            f"{sampling.top_p:g}; use --value rollouts"
        )
    rewards = [float(grade.correct) for grade in answers.grades if grade]
    baselines = leave_one_out([sample.question for sample in answers.samples], rewards)
    with subject.acting(of):
        values: list[ActionValues] = [
            reward_values(subject.reader, *each) for each in zip(rows, rewards, baselines, strict=True)
        ]
    grader = answers.prepared.task.grader
    return values, f"verdicts of {grader} on the {of} model's answers, with the question's mean as baseline"


def _rollouts(
    subject: DiagnosticContext,
    answers: Answers,
    rows: Sequence[Row],
    prompt_lengths: Sequence[int],
    settings: DiagnoseSettings,
) -> tuple[list[ActionValues], str]:
    """Values of the likeliest actions at a few positions, by completing and grading."""
    prepared, request, loaded = answers.prepared, subject.request, subject.loaded
    if prepared.sampling.stop:
        raise ConfigError(
            f"--value rollouts: {prepared.task.name} ends answers at texts, which rollouts do not know; use reward"
        )
    tried = branches(subject.reader, rows, prompt_lengths, settings.actions)
    grader = grader_for(prepared.task, request.grading.grader)

    def grade(whole: Sequence[tuple[int, Sample]]) -> list[bool]:
        asked = [
            replace(answer, question=answers.samples[row].question, sample=index)
            for index, (row, answer) in enumerate(whole)
        ]
        verdicts = judge(prepared.task, prepared.questions, asked, grader, request.grading)
        return [verdict.correct for verdict in verdicts]

    completions = 1 if prepared.sampling.temperature == 0 else settings.rollouts
    sampling = replace(prepared.sampling, samples=completions, seed=subject.seed)
    engine = TransformersEngine(loaded.model, loaded.tokenizer, subject.batch_size)
    ends = loaded.endings.token_ids
    with subject.job(f"completing {len(tried) * completions:,} answers") as on_progress, subject.acting("adapter"):
        values = rollout_values(engine, tried, settings.actions, grade, sampling, ends, loaded.positions, on_progress)
    what = (
        f"mean verdict of {grader} over {completions} completions by the adapter, of the {settings.actions} likeliest tokens "
        f"at {settings.positions} positions per answer"
    )
    return values, what


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
    log_prob = reader.read(batch).log_prob
    labels = batch["labels"][0, 1:]
    actions = labels[labels != IGNORED].unsqueeze(-1).cpu()
    values = baseline + (reward - baseline) * torch.exp(-log_prob.cpu())
    return sparse_values(actions, values.unsqueeze(-1), torch.full((len(actions),), baseline))


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
    """One action tried at one counted position of one row: its prompt, and its answer up to and with the action, in token ids."""

    row: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def branches(reader: Reader, rows: Sequence[Row], prompt_lengths: Sequence[int], actions: int) -> list[Branch]:
    """The likeliest `actions` tokens at every counted position, by row, position and rank, under the model as it acts now."""
    found = []
    for index, (row, length) in enumerate(zip(rows, prompt_lengths, strict=True)):
        with torch.no_grad():
            top_TA = reader.logits(reader.states(reader.batch(row))).topk(actions, -1).indices
        prompt, answer = tuple(row["input_ids"][:length]), tuple(row["input_ids"][length:])
        # a label at `at` is predicted at the position before, and takes the place of the token at `at`
        counted = [at - length for at, label in enumerate(row["labels"]) if label != IGNORED and at > 0]
        for at, tokens in zip(counted, top_TA.tolist(), strict=True):
            found += [Branch(index, prompt, (*answer[:at], token)) for token in tokens]
    return found


def rollout_values(
    engine: TransformersEngine,
    tried: Sequence[Branch],
    actions: int,
    grade: Callable[[Sequence[tuple[int, Sample]]], Sequence[bool]],
    sampling: SamplingConfig,
    stop_token_ids: Collection[int],
    positions: int | None = None,
    on_progress: OnProgress = no_progress,
) -> list[ActionValues]:
    """Mean verdict of answers completed from every branch, for each row; the engine's model acts as the continuation policy.

    Args:
        tried: as `branches` gives them, `actions` at each position.
        grade: judges (row, answer from its first token on, the part before the branch included).
        sampling: samples per branch, temperature, and the limit of the whole answer in tokens.
        stop_token_ids: ids that end an answer; a branch that ends with one is complete.
        positions: of the model; an answer that would pass them is cut off.
    """

    def room(branch: Branch) -> int:
        """Tokens that may still follow."""
        if branch.answer[-1] in stop_token_ids:
            return 0
        left = sampling.max_new_tokens - len(branch.answer)
        return max(0, left if positions is None else min(left, positions - len(branch.prompt) - len(branch.answer)))

    def whole(ids: Sequence[int], ended: bool) -> Sample:
        """A whole answer; one that passed the limit of the whole is cut there."""
        ended = ended and len(ids) <= sampling.max_new_tokens
        kept = tuple(ids[: sampling.max_new_tokens])
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text = engine.tokenizer.decode(kept[:-1] if ended else kept, **plain)
        return Sample(0, 0, text, kept, "stop" if ended else "length", None)

    rooms = [room(branch) for branch in tried]
    still = [number for number, left in enumerate(rooms) if left]
    # (branch, its answer): first those that go on, then those that ended with the branch itself
    answers: list[tuple[int, Sample]] = []
    if still:
        prompts = [(*tried[number].prompt, *tried[number].answer) for number in still]
        # all may draw what the one with the most room may; the others are cut to their own by `whole`
        for drawn in engine.generate(prompts, replace(sampling, max_new_tokens=max(rooms)), on_progress):
            number = still[drawn.question]
            answers.append((number, whole((*tried[number].answer, *drawn.token_ids), drawn.finish_reason == "stop")))
    for number, branch in enumerate(tried):
        if not rooms[number]:
            answers.append((number, whole(branch.answer, branch.answer[-1] in stop_token_ids)))
    right = grade([(tried[number].row, answer) for number, answer in answers])
    owners = [number for number, _ in answers]
    means = np.bincount(owners, np.asarray(right, dtype=float)) / np.bincount(owners)
    values_NA = torch.from_numpy(means).float().view(-1, actions)
    actions_NA = torch.tensor([branch.answer[-1] for branch in tried]).view(-1, actions)
    of_rows = list(Counter(branch.row for branch in tried[::actions]).values())  # positions of each row
    return [
        sparse_values(actions_TA, values_TA, values_TA.mean(-1))
        for actions_TA, values_TA in zip(actions_NA.split(of_rows), values_NA.split(of_rows), strict=True)
    ]
