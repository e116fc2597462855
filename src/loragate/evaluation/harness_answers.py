"""Greedy answers of an engine to prompts of any length, with what the harness does not tell: why each one ended.

A prompt that leaves too little room is cut at its beginning, and that is counted; an answer gets what room its prompt leaves.
Nothing here knows tasks or the harness, or which engine answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loragate.generation import Engine, OnProgress, SamplingConfig
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


def greedy_answers(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    stops: Sequence[str],
    max_new_tokens: int,
    positions: int | None,
    on_progress: OnProgress | None = None,
) -> list[Answer]:
    """Answer every prompt (token ids) greedily, in the order given.

    An answer gets `max_new_tokens`, or what the model's `positions` leave after its prompt (None: no limit). A prompt keeps at
    most the positions that leave a quarter of them (or `max_new_tokens`, if that is less) to its answer.
    """
    reserve = max(1, min(max_new_tokens, (positions or 0) // 4))
    kept = [ids if positions is None else ids[-(positions - reserve) :] for ids in prompts]
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=max_new_tokens, stop=tuple(stops))
    samples = engine.generate(kept, sampling, on_progress)
    return [
        Answer(
            sample.text,
            len(sample.token_ids),
            sample.finish_reason,
            max_new_tokens if positions is None else min(max_new_tokens, positions - len(own)),
            len(prompt) - len(own),
        )
        for sample, own, prompt in zip(samples, kept, prompts, strict=True)
    ]
