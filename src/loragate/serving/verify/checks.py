"""The checks of a served adapter: each asks a runtime a few requests and gives a figure, its limit and a verdict.

Two kinds of evidence. Against transformers: the log-probs of the very tokens that were served, read again by the reference model
(`evaluation.agreement`), which also tells whether another model explains them better. Against itself: two answers of the runtime
to one request, which must not depend on what was asked before or beside it. What batching alone changes is measured first, so
that rounding is not taken for a fault.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from loragate.data import Endings, prompt_ids
from loragate.data.chat import active_template
from loragate.display import pluralize
from loragate.errors import DataError, LoragateError
from loragate.evaluation.agreement import LOGPROB_TOLERANCES, ServedAnswer
from loragate.evaluation.results import VariantAgreement
from loragate.serving.settings import VerifySettings
from loragate.serving.verify.served import (
    ADAPTER,
    BASE,
    Answer,
    Difference,
    Prompt,
    Runtime,
    Target,
    compare_answers,
)

Verdict = Literal["passes", "FAILS", "not measured", "–"]
PASSES: Verdict = "passes"
FAILS: Verdict = "FAILS"
UNMEASURED: Verdict = "not measured"
FIGURE: Verdict = "–"
BATCH_NOISE_FACTOR = 4.0
"""How many times the difference that batching alone makes is put down to it."""
SHARED_TOKENS = 272  # of the prompt that all models share: two whole blocks of the longest that vLLM caches by default
PROMPT_TOKENS, SEED = 40, 0
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 7 * 8?"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello. What can I do for you?"},
        {"role": "user", "content": "Name a river.\nOne word!"},
    ],
    [{"role": "system", "content": "Answer in one line."}, {"role": "user", "content": "What is 7 * 8?"}],
)
Read = Callable[[Mapping[Target, Sequence[ServedAnswer]]], Mapping[Target, VariantAgreement]]
"""Answers of targets read again by transformers."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: what was checked.
        of: the model that it is of, or a count.
        figure, limit: in `unit`; None where there is none, infinite where an answer has another token.
        unit: "nats" for a difference of log-probs, "of N" for a count of what agrees.
        verdict: "passes", "FAILS", "not measured", or "–" for what is only a figure.
        note: why, in one sentence; empty where the figure says it.
    """

    name: str
    of: str
    verdict: Verdict
    figure: float | None = None
    limit: float | None = None
    unit: str = "nats"
    note: str = ""


class Prompts:
    """Prompts that every tokenizer reads back as they were written, no two alike, the same on every machine."""

    def __init__(self, tokenizer: Any, positions: int, answer: int) -> None:
        self._tokenizer, self._draw = tokenizer, random.Random(SEED)
        self._room = max(1, positions - answer - 1)
        special = set(tokenizer.all_special_ids)
        self._ids = [index for index in range(len(tokenizer)) if index not in special]

    def draw(self, tokens: int = PROMPT_TOKENS) -> Prompt:
        """About so many tokens and never more; fewer where the model has no room for them."""
        length = min(tokens, self._room)
        text = self._tokenizer.decode(self._draw.sample(self._ids, min(length, len(self._ids)))).replace("\ufffd", "")
        while True:
            text = " ".join(text.split())
            ids = self._tokenizer(text)["input_ids"]
            # the text of so many drawn tokens may be read as more of them
            if len(ids) <= length or len(text) < 2:
                return Prompt(tuple(ids[: self._room]), text)
            text = text[:-1]


class Checks:
    """All checks of one runtime.

    Args:
        runtime: what is checked.
        prompts: to ask with.
        read: reads answers again with transformers.
        settings: `dtype` (what the runtime computes in), `limit`, `prompts` for each model, `tokens` of each answer.
    """

    def __init__(self, runtime: Runtime, prompts: Prompts, read: Read, settings: VerifySettings) -> None:
        self.runtime, self.prompts, self.read = runtime, prompts, read
        self.per_target, self.tokens = settings.prompts, settings.tokens
        self.rounding = settings.limit or LOGPROB_TOLERANCES.get(settings.dtype, LOGPROB_TOLERANCES["16 bits"])
        self.batching = 0.0

    def chat_template(self, tokenizer: Any) -> Check:
        """Whether conversations become the token ids that transformers makes of them."""
        name = "chat template"
        if active_template(tokenizer) is None:
            return Check(name, "–", UNMEASURED, note="the tokenizer has no chat template")
        same, asked, notes = 0, 0, []
        for messages in CONVERSATIONS:
            try:
                expected = [prompt_ids(messages, tokenizer, system=system) for system in ("keep", "none")]
            except DataError:
                continue  # a template that refuses system messages
            asked += 1
            try:
                found = self.runtime.chat_prompt(messages)
            except LoragateError as error:
                notes.append(str(error))
                continue
            if found is None:
                why = "the server does not say how many tokens a conversation has (usage.prompt_tokens)"
                return Check(name, "–", UNMEASURED, note=why)
            shown = [len(ids) if isinstance(found, int) else ids for ids in expected]
            same += found in shown
            if found not in shown:
                notes.append(_chat_note(messages, found, expected[0]))
            elif found != shown[0]:
                notes.append("the template's default system message is left out, as loragate trains")
        verdict: Verdict = PASSES if same == asked else FAILS
        return Check(name, f"{asked} conversations", verdict, same, asked, f"of {asked}", _sentences(notes))

    def stop_tokens(self, endings: Endings, tokenizer: Any) -> Check:
        """Whether an answer ends at every token that ends one; a bias makes the runtime choose the token."""
        stopped, tried, notes = 0, 0, []
        for token in sorted(endings.token_ids):
            answer = self.runtime.complete(Target(ADAPTER), self.prompts.draw(), 4, forced=token)
            chose = not answer.token_ids or answer.token_ids[0] == token
            name = repr(tokenizer.decode([token]))
            count = answer.count if answer.count is not None else len(answer.steps)
            if answer.finish == "stop" and count <= 1 and chose:
                stopped, tried = stopped + 1, tried + 1
            elif answer.token_ids and chose:
                tried += 1
                notes.append(f"it goes on after {name} ({token}); send stop_token_ids or stop, or set it in the server")
            else:
                notes.append(
                    f"whether it ends at {name} ({token}) cannot be told: a bias did not bring the token about"
                )
        if not tried:
            return Check("stop tokens", pluralize(len(endings.token_ids), "token"), UNMEASURED, note=_sentences(notes))
        verdict: Verdict = PASSES if stopped == tried else FAILS
        return Check(
            "stop tokens", pluralize(tried, "token"), verdict, stopped, tried, f"of {tried}", _sentences(notes)
        )

    def parity(self) -> list[Check]:
        """Every model on prompts of its own, one request at a time, so that no cache and no batch plays a part."""
        answers = {
            target: [
                (prompt, self._ask(target, prompt, with_prompt_logprobs=True)) for prompt in self._draw(self.per_target)
            ]
            for target in self.runtime.targets
        }
        name, found = "parity with transformers", self._read(answers)
        return [
            self._judged(name, target, found[target])
            if target in found
            else Check(name, target.label, UNMEASURED, note=NO_LOGPROBS)
            for target in answers
        ]

    def batches(self) -> list[Check]:
        """The same requests alone and at once: of one model, which is what batching alone does, then of all models."""
        if not self.runtime.parallel:
            why = "it answers one request at a time"
            return [Check("mixed batch", "–", UNMEASURED, note=why)]
        targets = [*self.runtime.targets]
        # the model that is least likely to be wrong in a batch of its own
        first = targets[0]
        alike = self._alone_and_together([(first, prompt) for prompt in self._draw(4 * self.per_target)])
        mixed = [(target, prompt) for prompt in self._draw(self.per_target) for target in targets]
        random.Random(SEED).shuffle(mixed)
        among = self._alone_and_together(mixed)
        batching = self._judge_differences("batching alone", first.label, alike)
        if batching.figure is not None:
            # more is no rounding, and would excuse anything
            self.batching = min(batching.figure, LOGPROB_TOLERANCES["16 bits"])
            rounds = batching.figure <= BATCH_NOISE_FACTOR * LOGPROB_TOLERANCES["16 bits"]
            batching = replace(batching, limit=None, verdict=FIGURE if rounds else FAILS)
        return [batching, self._judge_differences("mixed batch", pluralize(len(mixed), "request"), among)]

    def strengths(self, not_applicable_reasons: Mapping[float, str]) -> list[Check]:
        """Strength 0 is the base and strength 1 the adapter, on the runtime itself.

        Args:
            not_applicable_reasons: why the adapter at 0 is not the base, and at 1 not what is served; empty where they are.
        """
        served = {*self.runtime.targets}
        checks = []
        for name, strength, other in (("zero is the base", 0.0, BASE), ("one is the adapter", 1.0, ADAPTER)):
            target = Target(ADAPTER, strength)
            if target not in served or Target(other) not in served:
                why = "no such strength is served" if target not in served else f"no {other} is served"
                checks.append(Check(name, target.label, UNMEASURED, note=why))
                continue
            if not_applicable_reasons[strength]:
                checks.append(Check(name, target.label, UNMEASURED, note=not_applicable_reasons[strength]))
                continue
            found = [
                compare_answers(self._ask(Target(other), prompt), self._ask(target, prompt))
                for prompt in self._draw(self.per_target)
            ]
            checks.append(self._judge_differences(name, target.label, found))
        return checks

    def isolation(self) -> list[Check]:
        """One long prompt asked of all models in turn and back again: a cache must not hand on what another model computed."""
        prompt, targets = self.prompts.draw(SHARED_TOKENS), [*self.runtime.targets]
        there = {target: self._ask(target, prompt) for target in targets}
        back = {target: self._ask(target, prompt) for target in reversed(targets)}
        itself = {target: compare_answers(there[target], back[target]) for target in targets}
        checks = [self._judge_differences("isolation: asked again", pluralize(len(targets), "model"), itself.values())]
        if checks[0].verdict == FAILS:
            changed = [target.label for target, one in itself.items() if one and one.largest == checks[0].figure]
            why = f"{changed[0]} answers otherwise once others were asked the same"
            checks = [replace(checks[0], note=why)]
        read = self._read({target: [(prompt, there[target]), (prompt, back[target])] for target in targets})
        if read:
            furthest = max(read, key=lambda target: math.inf if read[target].mean is None else read[target].mean or 0.0)
            judged = [self._judged("isolation: with transformers", target, found) for target, found in read.items()]
            failed = [one for one in judged if one.verdict == FAILS]
            checks.append((failed or [one for one in judged if one.of == furthest.label])[0])
        return checks

    def _draw(self, count: int) -> list[Prompt]:
        return [self.prompts.draw() for _ in range(count)]

    def _ask(self, target: Target, prompt: Prompt, with_prompt_logprobs: bool = False) -> Answer:
        return self.runtime.complete(target, prompt, self.tokens, with_prompt_logprobs=with_prompt_logprobs)

    def _alone_and_together(self, asked: Sequence[tuple[Target, Prompt]]) -> list[Difference | None]:
        """Each request alone against all of them at once."""
        alone = [self._ask(target, prompt) for target, prompt in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            together = [*pool.map(lambda one: self._ask(*one), asked)]
        return [compare_answers(*pair) for pair in zip(alone, together)]

    def _judge_differences(self, name: str, of: str, found: Iterable[Difference | None]) -> Check:
        seen = [*found]
        known = [one for one in seen if one is not None]
        if len(known) < len(seen):
            return Check(name, of, UNMEASURED, note=NO_LOGPROBS)
        worst, parted = max(one.largest for one in known), sum(one.has_diverged for one in known)
        limit = max(self.rounding, BATCH_NOISE_FACTOR * self.batching)
        fits = worst <= limit
        note = f"{parted} of {pluralize(len(known), 'answer')} part" + ", at near ties" * fits if parted else ""
        return Check(name, of, PASSES if fits else FAILS, worst, limit, note=note)

    def _read(self, answers: Mapping[Target, Sequence[tuple[Prompt, Answer]]]) -> Mapping[Target, VariantAgreement]:
        """Read again what has log-probs and token ids; the prompt's own tokens too, where the runtime scored them."""
        served: dict[Target, list[ServedAnswer]] = {}
        for target, pairs in answers.items():
            for prompt, answer in pairs:
                if not answer.token_ids:
                    continue
                own = tuple(step.logprob for step in answer.steps)
                scored = len(answer.prompt_logprobs) == len(prompt.ids) - 1
                cut = 1 if scored else len(prompt.ids)
                ids, values = prompt.ids[cut:] + answer.token_ids, (answer.prompt_logprobs if scored else ()) + own
                served.setdefault(target, []).append(ServedAnswer(prompt.ids[:cut], ids, (), values))
        return self.read(served) if served else {}

    def _judged(self, name: str, target: Target, found: VariantAgreement) -> Check:
        note = "" if found.nearest == target.label else f"nearer to {found.nearest}"
        mean = math.inf if found.mean is None else found.mean
        return Check(name, target.label, PASSES if found.agrees else FAILS, mean, found.limit, note=note)


NO_LOGPROBS = "the answers carry no log-probs of tokens that can be told; nothing shows which model answered"


def _chat_note(messages: Sequence[Mapping[str, Any]], found: list[int] | int, expected: list[int]) -> str:
    roles = ", ".join(str(message["role"]) for message in messages)
    if isinstance(found, int):
        return f"the turns {roles} become {pluralize(found, 'token')}, in transformers {len(expected)}"
    shorter = min(len(found), len(expected))
    at = next((place for place in range(shorter) if found[place] != expected[place]), shorter)
    shown = f"{found[at : at + 3]}, in transformers {expected[at : at + 3]}"
    return f"the turns {roles} become other tokens from place {at} on ({shown})"


def _sentences(notes: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(notes))
