"""Greedy answers that end at stop tokens or stop strings, with what the harness does not tell: why each one ended.

The model's own generation settings (repetition penalty, temperature) are hidden while it answers; a tokenizer's end of
sequence is not the only end, as chat models end a turn with a token of their own. A prompt that leaves too little room is
cut at its beginning, and that is counted. Nothing here knows tasks or the harness.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from loragate.generation.engine import own_generation_settings
from loragate.generation.requests import batches, positions_end


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    `text` is without the stop token or string; `tokens` counts what was generated, the stop included; `budget` is the
    token limit that held for it; `cut` counts the prompt tokens that had to be left out.
    """

    text: str
    tokens: int
    finish_reason: Literal["stop", "length"]
    budget: int
    cut: int


def greedy_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    *,
    stops: Sequence[str],
    stop_ids: Collection[int],
    max_new_tokens: int,
    max_length: int,
    batch_size: int,
    on_batch: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Answer every prompt (token ids) greedily, in the order given.

    An answer gets `max_new_tokens`, or what `max_length` positions leave after its prompt. A prompt keeps at most the
    positions that leave a quarter of `max_length` (or `max_new_tokens`, if that is less) to its answer.
    `on_batch` receives the number of answers of each finished batch.
    """
    reserve = max(1, min(max_new_tokens, max_length // 4))
    kept = [ids[-(max_length - reserve) :] for ids in prompts]
    order = sorted(range(len(prompts)), key=lambda index: (-len(kept[index]), index))
    answers: dict[int, Answer] = {}
    lengths = [len(ids) for ids in kept]
    room = [min(max_new_tokens, max_length - length) for length in lengths]
    with torch.no_grad(), own_generation_settings(model):
        for rows in batches(order, lengths, room, batch_size, max_length if positions_end(model) else None):
            budgets = [room[row] for row in rows]
            batch = _batch(model, tokenizer, [kept[row] for row in rows], budgets, stops, stop_ids)
            for row, budget, (text, tokens, reason) in zip(rows, budgets, batch):
                answers[row] = Answer(text, tokens, reason, budget, len(prompts[row]) - len(kept[row]))
            if on_batch is not None:
                on_batch(len(rows))
    return [answers[index] for index in range(len(prompts))]


def _batch(
    model: Any,
    tokenizer: Any,
    prompts: list[list[int]],
    budgets: list[int],
    stops: Sequence[str],
    stop_ids: Collection[int],
) -> list[tuple[str, int, Literal["stop", "length"]]]:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(stop_ids, default=0)
    width = max(map(len, prompts))
    watch = _StopStrings(tokenizer, stops, width, len(prompts))
    output = model.generate(
        input_ids=torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts]).to(model.device),
        attention_mask=torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]).to(model.device),
        stopping_criteria=StoppingCriteriaList([watch]),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=max(budgets),
            eos_token_id=sorted(stop_ids) or None,
            pad_token_id=pad,
            use_cache=True,
        ),
    )
    results: list[tuple[str, int, Literal["stop", "length"]]] = []
    for row, (ids, budget) in enumerate(zip(output[:, width:].tolist(), budgets)):
        ids = ids[: min(budget, watch.lengths[row] or budget)]
        end = next((place for place, token in enumerate(ids) if token in stop_ids), None)
        text = tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        cuts = [place for place in (text.find(stop) for stop in stops) if place >= 0]
        tokens = len(ids) if end is None else end + 1
        stopped = end is not None or bool(cuts) or watch.lengths[row] == len(ids)
        results.append((text[: min(cuts)] if cuts else text, tokens, "stop" if stopped else "length"))
    return results


class _StopStrings(StoppingCriteria):
    """Ends a row as soon as its last tokens spell a stop string; `lengths` holds how many tokens it had by then."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], width: int, rows: int) -> None:
        self.tokenizer, self.stops, self.width = tokenizer, list(stops), width
        self.lengths: list[int | None] = [None] * rows
        # Text can be tokenised in other ways than the tokenizer would; two more tokens leave room for that.
        sizes = [len(tokenizer.encode(stop, add_special_tokens=False)) for stop in stops]
        self.window = max(sizes, default=0) + 2

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        start = max(self.width, input_ids.shape[1] - self.window)
        for row, tail in enumerate(input_ids[:, start:].tolist()):
            if self.lengths[row] is None and self.stops:
                text = self.tokenizer.decode(tail)
                if any(stop in text for stop in self.stops):
                    self.lengths[row] = input_ids.shape[1] - self.width
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)
