"""What a conformance check asks of a runtime and what it gets, be that an HTTP server or a library in this process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loragate.models.source import Kind

BASE: Kind = "base"
ADAPTER: Kind = "adapter"


@dataclass(frozen=True)
class Target:
    """A model that the runtime serves.

    Attributes:
        name: "base", "adapter" or one of --adapters.
        strength: what multiplies the adapter; None leaves the runtime's own, which is the adapter as it is.
    """

    name: str
    strength: float | None = None

    @property
    def label(self) -> str:
        """As printed: "adapter at 0.5"."""
        return self.name if self.strength is None else f"{self.name} at {self.strength:g}"


@dataclass(frozen=True)
class Prompt:
    """A prompt; its token ids are what the tokenizer makes of its text."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Step:
    """One token of an answer: as the runtime writes it, its log-prob in nats, and those of the most likely ones."""

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """What the runtime answered.

    Attributes:
        steps: of the answer's tokens; empty where the runtime gives no log-probs.
        token_ids: likewise; None where they cannot be told.
        prompt_logprobs: of the prompt's tokens from the second on; empty where not asked for or not to be had.
        finish: why it ended: "stop", "length".
        count: tokens of the answer, its end included; None where the runtime does not count.
    """

    steps: tuple[Step, ...]
    token_ids: tuple[int, ...] | None
    prompt_logprobs: tuple[float, ...] = ()
    finish: str = ""
    count: int | None = None


class Runtime(Protocol):
    """A program that serves a base and adapters.

    Attributes:
        label: name and version, such as "vLLM 0.32.0".
        targets: what it serves: "base" where it does, "adapter", others, and strengths of "adapter".
        parallel: whether it takes several requests at once.
        scales_all_modules: whether a strength reaches all that the adapter adapts, modules that are never gated, too.
    """

    label: str
    targets: list[Target]
    parallel: bool
    scales_all_modules: bool

    def complete(
        self,
        target: Target,
        prompt: Prompt,
        tokens: int,
        *,
        forced: int | None = None,
        with_prompt_logprobs: bool = False,
    ) -> Answer:
        """One greedy answer of so many tokens, which goes on after tokens that end one.

        Args:
            forced: a token that the runtime is made to choose by a bias, and after which it may stop.
            with_prompt_logprobs: whether the log-probs of the prompt's tokens are wanted too.
        """

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int] | int | None:
        """The token ids that the runtime makes of a conversation, their number where it shows no more, None where neither."""


@dataclass(frozen=True)
class Difference:
    """Two answers to one request.

    Attributes:
        largest: difference of a log-prob, in nats, as far as both answers have the same tokens and at the token where they part;
            infinite where one lists a token that the other does not have among its most likely ones.
        has_diverged: whether they part at all. Where `largest` is small they part at a near tie.
    """

    largest: float
    has_diverged: bool


def compare_answers(one: Answer, other: Answer) -> Difference | None:
    """How far two answers to one request are apart, up to where they part: behind it the contexts differ.

    None where an answer has no log-probs.
    """
    if not one.steps or not other.steps:
        return None
    largest = 0.0
    for first, second in zip(one.steps, other.steps):
        for own, there in ((first, second), (second, first)):
            found = there.logprob if own.token == there.token else there.top.get(own.token, -math.inf)
            apart = abs(own.logprob - found)
            largest = max(largest, apart if math.isfinite(apart) else math.inf)
        if first.token != second.token:
            return Difference(largest, True)
    return Difference(largest, len(one.steps) != len(other.steps))
