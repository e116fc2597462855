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
from loragate.losses import TokenStatistics, token_statistics, verify_head
from loragate.losses.causal_head import read_head
from loragate.losses.head import IGNORED, statistics_of_logits
from loragate.training.sharding import causal_model

Row = dict[str, Any]
Batch = dict[str, Tensor]
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


def counted(batch: Batch) -> Tensor:
    """bool [B, S-1]: positions whose next token is a response token."""
    return batch["labels"][:, 1:] != IGNORED


class Reader:
    """What a causal model says at the counted positions of a batch, with whatever acts on it at the moment."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.causal = causal_model(model)
        self.fused = verify_head(self.causal)

    @property
    def device(self) -> torch.device:
        """Of the model's first parameter."""
        return next(self.model.parameters()).device

    def states(self, batch: Batch) -> Tensor:
        """Final hidden states [T, D], or full logits [T, V] where the output head is not one frozen linear map."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        output = self.causal.base_model(**inputs).last_hidden_state if self.fused else self.causal(**inputs).logits
        return output[:, :-1][counted(batch).to(output.device)]

    def logits(self, states: Tensor) -> Tensor:
        """Logits [C, V] of a chunk of states, fp32 (fp64 stays fp64), differentiable."""
        head = read_head(self.causal) if self.fused else None
        working = torch.float64 if states.dtype == torch.float64 else torch.float32
        if head is None:
            return states.to(working)
        bias = None if head.bias is None else head.bias.to(working)
        z = torch.nn.functional.linear(states.to(working), head.weight.to(working), bias) * head.scale
        return z if head.softcap is None else head.softcap * torch.tanh(z / head.softcap)

    def statistics(self, batch: Batch, k: int = 100) -> TokenStatistics:
        """log p, entropy and normalised top-k entropy at the counted positions, each [T]; without gradients."""
        labels = batch["labels"][:, 1:]
        with torch.no_grad():
            states = self.states(batch)
            labels_T = labels[labels != IGNORED].to(states.device)
            head = read_head(self.causal) if self.fused else None
            if head is None:
                return statistics_of_logits(states, labels_T, k)
            return token_statistics(
                states, head.weight, labels_T, k=k, bias=head.bias, scale=head.scale, softcap=head.softcap
            )
