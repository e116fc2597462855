"""Texts read by a model: rows of token ids with the positions that count, and what the model says there.

A row is what `loragate.data` makes of demonstrations, or an answer behind its prompt; either way its labels say which
tokens are response. Final hidden states stand for logits as long as they can: the head is applied in chunks.

Shapes: B sequences, S positions, T counted positions of a batch in row order, D hidden, V vocabulary, C chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from loragate.data import Collator
from loragate.generation import Sample
from loragate.losses import TokenStatistics
from loragate.losses.head import IGNORED, STATISTICS
from loragate.training.scoring import Batch, ResponseScorer
from loragate.training.scoring import counted as counted

Row = dict[str, Any]
CHUNK = 256


def answer_rows(tokenizer: Any, prompts: Sequence[str], samples: Sequence[Sample]) -> list[Row]:
    """Rows {input_ids, labels, row} of answers behind their prompts; `row` is the index of the sample."""
    prompt_ids = tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
    rows = []
    for index, sample in enumerate(samples):
        head, answer = list(prompt_ids[sample.question]), list(sample.token_ids)
        rows.append({"input_ids": [*head, *answer], "labels": [*[IGNORED] * len(head), *answer], "row": index})
    return rows


def batches(rows: Sequence[Row], pad_token_id: int, size: int, device: Any) -> Iterator[Batch]:
    """Right-padded batches in the order of the rows, on `device`; right of causal attention padding changes nothing."""
    collate = Collator(pad_token_id)
    plain = [{key: row[key] for key in ("input_ids", "labels", "row")} for row in rows]
    for start in range(0, len(plain), size):
        batch = collate(plain[start : start + size])
        yield {key: value.to(device) for key, value in batch.items()}


class Reader(ResponseScorer):
    """What a causal model says at the counted positions of a batch, with whatever acts on it at the moment."""

    @property
    def device(self) -> torch.device:
        """Of the model's first parameter."""
        return next(self.model.parameters()).device

    def logits(self, states: Tensor) -> Tensor:
        """Logits [C, V] of a chunk of states, fp32 (fp64 stays fp64), differentiable."""
        working = torch.float64 if states.dtype == torch.float64 else torch.float32
        return self.head().logits(states, working) if self.fused else states.to(working)

    @torch.no_grad()
    def read(self, batch: Batch, k: int = 100) -> TokenStatistics:
        """log p, entropy and normalised top-k entropy at the counted positions, each [T]; without gradients."""
        return self.statistics(self.states(batch), batch, k, STATISTICS, ())
