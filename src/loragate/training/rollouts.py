"""Answers that the gated model gives to the training prompts, made into rows to train on.

What is drawn is a function of the seed, the number of the refresh and the gates at that moment, so that a resumed run
meets the same answers. Sampling arrives as a callable: any engine of `loragate.generation`, or a server that holds the
same gates. The reward arrives as a callable too; what makes an answer right is not known here.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loragate.data import EncodedRows, Rows
from loragate.errors import DataError, TrainingError
from loragate.generation import Sample, SamplingConfig
from loragate.losses.head import IGNORED
from loragate.training.settings import CalibrationSettings

logger = logging.getLogger("loragate")

Sampler = Callable[[Sequence[str], SamplingConfig], Sequence[Sample]]
"""Samples of rendered prompts, ordered by (question, sample), drawn with the gates as they are at the call."""

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
        starts = [at for at in range(1, len(labels)) if labels[at] != IGNORED and labels[at - 1] == IGNORED]
        prompt_ids = list(ids[: starts[-1]]) if starts else []
        if positions is not None and len(prompt_ids) + max_new_tokens > positions:
            long += 1
            continue
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


def draw_answers(
    prompts: Sequence[Prompt], chosen: Sequence[int], sampler: Sampler, settings: CalibrationSettings, refresh: int
) -> list[Answer]:
    """Answers to the chosen prompts, `answers_per_prompt` each, in their order; a pure function of gates and arguments.

    Raises:
        TrainingError: if the sampler returns something else than was asked for.
    """
    each = settings.answers_per_prompt
    config = SamplingConfig(
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
        samples=each,
        seed=stream_seed(settings.seed, refresh),
    )
    samples = sampler([prompts[index].text for index in chosen], config)
    pairs = [(sample.question, sample.sample) for sample in samples]
    if pairs != [(question, sample) for question in range(len(chosen)) for sample in range(each)]:
        raise TrainingError(
            f"the sampler returned {len(pairs)} answers for {len(chosen)} prompts × {each}, or in another order; it must "
            "return them ordered by (question, sample)"
        )
    return [replace(answer, prompt=chosen[answer.prompt]) for answer in as_answers(samples)]


def as_answers(samples: Sequence[Sample]) -> list[Answer]:
    """Samples of an engine as answers; `prompt` is the index of the question."""
    return [
        Answer(sample.question, tuple(sample.token_ids), sample.text, sample.finish_reason == "stop")
        for sample in samples
    ]


def stream_seed(seed: int, refresh: int) -> int:
    """The seed of one refresh's random stream."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{refresh}".encode()).digest()[:8], "little") >> 1


def rewarded(
    answers: Sequence[Answer],
    prompts: Sequence[Prompt],
    rows: Rows,
    reward: Reward,
    settings: CalibrationSettings,
) -> list[Answer]:
    """The answers with rewards and advantages; each `answers_per_prompt` answers in a row belong to one prompt.

    Raises:
        TrainingError: for a reward that is not a finite number.
    """
    scored: list[Answer] = []
    group = settings.answers_per_prompt
    for at in range(0, len(answers), group):
        members = answers[at : at + group]
        rewards = []
        for answer in members:
            row = prompts[answer.prompt].row
            value = float(reward(rows[row], answer.text, answer.finished))
            if not math.isfinite(value):
                raise TrainingError(f"the reward of an answer to {rows.where(row)} is {value}; it must be finite")
            rewards.append(value)
        scored += [
            replace(answer, reward=value, advantage=gain)
            for answer, value, gain in zip(members, rewards, group_advantages(rewards, settings.advantage), strict=True)
        ]
    return scored


def group_advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """Reward minus the group's mean, divided by the group's deviation for "std"; zero where all are equal."""
    mean = sum(rewards) / len(rewards)
    centred = [value - mean for value in rewards]
    deviation = math.sqrt(sum(value * value for value in centred) / len(rewards))
    if deviation < 1e-12:
        return [0.0] * len(rewards)
    return [value / deviation for value in centred] if kind == "std" else centred


def as_training_row(answer: Answer, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """An answer as an encoded row: labels on its tokens, none on the prompt."""
    prompt = prompts[answer.prompt]
    return {
        "input_ids": [*prompt.ids, *answer.token_ids],
        "labels": [IGNORED] * len(prompt.ids) + list(answer.token_ids),
        "row": prompt.row,
    }
