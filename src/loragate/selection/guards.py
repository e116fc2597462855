"""Guard rails: what sampled answers look like while gates train, compared with the adapter they started from.

The training loss cannot see a collapse; the answers can. A `Reading` counts what is visible without labels (endless
repetition, lengths, endings, one answer to everything, gates stuck at their bounds) and a `Guard` compares readings with
the first one. A guard is necessary, not sufficient: answers may be well formed and wrong, so what to keep is decided by
the caller, on a probe. What makes an answer right is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from annotated_types import Ge

from loragate.errors import ConfigError
from loragate.gates import record_gates
from loragate.losses.causal_head import causal_model
from loragate.training.rollouts import Answer
from loragate.validate import Count, Share, check

MARGIN = 0.01  # λ this near to a bound, as a share of the way there from 1, is at it


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


@dataclass
class Guard:
    """Collects answers into readings and remembers why to stop.

    Attributes:
        limits: what is allowed.
        readings: all readings; the first is what the others are compared with.
        verdict: None, or the sentence that says why training stopped.
    """

    limits: GuardLimits = field(default_factory=GuardLimits)
    readings: list[Reading] = field(default_factory=list)
    verdict: str | None = None
    waiting: list[Answer] = field(default_factory=list)

    def observe(
        self,
        step: int,
        answers: Sequence[Answer],
        saturation: Callable[[], float | None] | None = None,
    ) -> str | None:
        """Add answers; once there are enough, take a reading and compare it.

        Returns:
            The verdict, None while all is well.
        """
        self.waiting += answers
        if len(self.waiting) < self.limits.answers:
            return self.verdict
        reading = generation_stats(self.waiting, step, None if saturation is None else saturation())
        self.waiting = []
        return self.judge(reading)

    def judge(self, reading: Reading) -> str | None:
        """Add a finished reading and compare it with the first one; returns the verdict."""
        self.readings.append(reading)
        found = exceeded(self.readings[0], reading, self.limits)
        if found:
            self.verdict = f"stopped by the guard at step {reading.step}: " + "; ".join(found)
        return self.verdict

    def as_records(self) -> list[dict[str, Any]]:
        """The readings as plain dictionaries, for the result and checkpoints."""
        return [asdict(reading) for reading in self.readings]


@torch.no_grad()
def saturation(model: Any, batches: Sequence[dict[str, torch.Tensor]], adapter_name: str) -> float | None:
    """Share of λ at a bound over the response tokens of some collated batches, over all modules that count them.

    None where none does: the gates sit in experts alone, which see routed tokens.
    """
    # the gates all lie below the head, and logits of a whole vocabulary would be the largest tensor of the pass
    below_head = causal_model(model).base_model
    with record_gates(model, adapter_name, MARGIN) as recording:
        for batch in batches:
            recording.token_mask = batch["labels"].ne(-100)
            below_head(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    return recording.total().get("saturated")
