"""Greedy answers of an engine to prompts of any length, with what the harness does not tell: why each one ended.

A prompt that leaves too little room is cut at its beginning, and that is counted; an answer gets what room its prompt leaves.
Nothing here knows tasks or the harness, or which engine answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from loragate.data import ending_health
from loragate.generation import Engine, SamplingConfig
from loragate.generation.requests import FinishReason


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    `text` is without the stop token or string; `tokens` counts what was generated, the stop included; `budget` is the
    token limit that held for it; `cut` counts the prompt tokens that had to be left out.
    """

    text: str
    tokens: int
    finish_reason: FinishReason
    budget: int
    cut: int


def stop_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's, the model's generation config's, and the chat template's end of turn."""
    found: set[int] = set()
    for declared in (tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)):
        if declared is not None:
            found.update([declared] if isinstance(declared, int) else declared)
    turn_end = ending_health(tokenizer).end_ids
    if len(turn_end) == 1:
        found.update(turn_end)
    return frozenset(found)


def greedy_answers(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    stops: Sequence[str],
    max_new_tokens: int,
    positions: int | None,
    on_answers: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Answer every prompt (token ids) greedily, in the order given.

    An answer gets `max_new_tokens`, or what the model's `positions` leave after its prompt (None: no limit), rounded down by at
    most 6 %. A prompt keeps at most the positions that leave a quarter of them (or `max_new_tokens`, if that is less) to its
    answer. `on_answers` receives how many answers came since its last call.
    """
    reserve = max(1, min(max_new_tokens, (positions or 0) // 4))
    kept = [ids if positions is None else ids[-(positions - reserve) :] for ids in prompts]
    groups: dict[int, list[int]] = {}
    for row, ids in enumerate(kept):
        groups.setdefault(_budget(len(ids), max_new_tokens, positions), []).append(row)
    answers: dict[int, Answer] = {}
    for budget, rows in groups.items():
        done = 0

        def report(now: int, _: int) -> None:
            nonlocal done
            if on_answers is not None:
                on_answers(now - done)
            done = now

        sampling = SamplingConfig(temperature=0.0, max_new_tokens=budget, stop=tuple(stops))
        for row, sample in zip(rows, engine.generate([kept[row] for row in rows], sampling, report), strict=True):
            cut = len(prompts[row]) - len(kept[row])
            answers[row] = Answer(sample.text, len(sample.token_ids), sample.finish_reason, budget, cut)
    return [answers[row] for row in range(len(prompts))]


def _budget(prompt: int, max_new_tokens: int, positions: int | None) -> int:
    """Tokens that an answer may have; a lowered limit keeps its five leading bits, so that few differ and batches stay full."""
    room = max_new_tokens if positions is None else min(max_new_tokens, positions - prompt)
    return room if room == max_new_tokens else room & -(1 << max(0, room.bit_length() - 5))
