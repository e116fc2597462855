"""What sampled answers look like, and the prompts of training rows: what the probe reads, without a training behind it.

A reading counts what is visible without labels (endless repetition, lengths, endings, one answer to everything).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError, DataError
from loragate.generation import Sample
from loragate.losses.head import IGNORED
from loragate.validate import Count, Share, check

logger = logging.getLogger("loragate")

Reward = Callable[[Mapping[str, Any], str, bool], float]
"""(row with all its columns, answer text, whether the model ended it) to a number."""


@dataclass(frozen=True)
class Prompt:
    """What an answer is sampled from: the row's index, the text for the engine and the ids it must become."""

    row: int
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """One sampled answer.

    Attributes:
        prompt: index into the run's prompts.
        token_ids: generated tokens, the stop token included.
        text: decoded, without the stop token.
        finished: whether the model ended it.
        reward, advantage: zero unless a reward is given.
    """

    prompt: int
    token_ids: tuple[int, ...]
    text: str
    finished: bool
    reward: float = 0.0
    advantage: float = 0.0


def training_prompts(
    encoded: EncodedRows, rows: Rows, tokenizer: Any, max_new_tokens: int, positions: int | None
) -> list[Prompt]:
    """The prompt of each row's last response, in training order.

    Engines take text, so only rows count whose prompt survives the way ids → text → ids, and leaves room for an answer.

    Raises:
        DataError: if no row is left.
    """
    found, lossy, long = [], 0, 0
    for item in encoded:
        ids, labels = item["input_ids"], item["labels"]
        # a conversation has several responses, each of which begins where labels do; the last one is asked for again
        starts = [at for at in range(1, len(labels)) if labels[at] != IGNORED and labels[at - 1] == IGNORED]
        prompt_ids = list(ids[: starts[-1]]) if starts else []
        if positions is not None and len(prompt_ids) + max_new_tokens > positions:
            long += 1
            continue
        # the chat template is part of the ids: the text is what an engine is given, special tokens and all
        text = tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if not prompt_ids or tokenizer(text, add_special_tokens=False)["input_ids"] != prompt_ids:
            lossy += 1
            continue
        found.append(Prompt(item["row"], text, tuple(prompt_ids)))
    account = (
        f"{long} of {len(encoded)} prompts leave no room for {max_new_tokens} new tokens in the model's {positions} "
        f"positions, and {lossy} change when their tokens are written as text"
    )
    if not found:
        raise DataError(f"{rows.source}: nothing can be sampled: {account}. Lower max_new_tokens or change the rows")
    if long or lossy:
        logger.warning("left out: %s", account)
    return found


def as_answers(samples: Sequence[Sample]) -> list[Answer]:
    """Samples of an engine as answers; `prompt` is the index of the question."""
    return [
        Answer(sample.question, tuple(sample.token_ids), sample.text, sample.finish_reason == "stop")
        for sample in samples
    ]


@dataclass(frozen=True)
class Reading:
    """What a set of sampled answers looks like.

    Attributes:
        step: optimiser step at which the answers were complete.
        answers: how many there were.
        repetition: share of answers in which some n-gram occurs too often (see `repeats`).
        length: mean number of tokens.
        terminated: share that the model ended itself.
        distinct: number of different answers divided by their number, over all prompts together.
        saturated: share of λ within 1 % of the way from 1 to a bound; None where it was not measured.
    """

    step: int
    answers: int
    repetition: float
    length: float
    terminated: float
    distinct: float
    saturated: float | None = None


@dataclass(frozen=True)
class GuardLimits:
    """How far a reading may move away from the first one.

    Attributes:
        repetition: largest rise of the share of repetitive answers.
        terminated: largest fall of the share of ended answers.
        length: largest factor by which the mean length may grow or shrink.
        distinct: smallest part of the first share of distinct answers.
        saturated: largest share of λ at a bound, whatever it was at first; 1 never stops a run.
        answers: answers that make up one reading.
    """

    repetition: Share = 0.2
    terminated: Share = 0.2
    length: Annotated[float, Ge(1)] = 3.0
    distinct: Share = 0.5
    saturated: Share = 1.0
    answers: Count = 256

    def __post_init__(self) -> None:
        check(self)


def repeats(token_ids: Sequence[int], n: int = 6, times: int = 3) -> bool:
    """Whether some run of `n` tokens occurs at least `times` times."""
    # the runs may overlap: a loop of four tokens repeats every run of six after each four
    counts = Counter(tuple(token_ids[at : at + n]) for at in range(len(token_ids) - n + 1))
    return max(counts.values(), default=0) >= times


def generation_stats(answers: Sequence[Answer], step: int, saturated: float | None = None) -> Reading:
    """The reading of some answers; a pure function.

    Raises:
        ConfigError: for no answers.
    """
    if not answers:
        raise ConfigError("a guard reading needs at least one answer")
    count = len(answers)
    return Reading(
        step=step,
        answers=count,
        repetition=sum(repeats(answer.token_ids) for answer in answers) / count,
        length=sum(len(answer.token_ids) for answer in answers) / count,
        terminated=sum(answer.finished for answer in answers) / count,
        distinct=len({tuple(answer.token_ids) for answer in answers}) / count,
        saturated=saturated,
    )


def exceeded(start: Reading, now: Reading, limits: GuardLimits) -> list[str]:
    """What went beyond the limits, each as a phrase with its figures; empty when all is well."""
    found = []
    if now.repetition > start.repetition + limits.repetition:
        found.append(f"{now.repetition:.0%} of the answers repeat themselves, {start.repetition:.0%} at the start")
    if now.terminated < start.terminated - limits.terminated:
        found.append(f"{now.terminated:.0%} of the answers come to an end, {start.terminated:.0%} at the start")
    # answers that loop grow to the token limit, and answers that give up shrink
    if now.length > start.length * limits.length or now.length < start.length / limits.length:
        found.append(f"an answer has {now.length:.1f} tokens on average, {start.length:.1f} at the start")
    if now.distinct < start.distinct * limits.distinct:
        found.append(f"{now.distinct:.0%} of the answers are different ones, {start.distinct:.0%} at the start")
    if now.saturated is not None and now.saturated > limits.saturated:
        found.append(f"{now.saturated:.0%} of the λ are at a bound (limit {limits.saturated:.0%})")
    return found
