"""Which rows go through the model together: forward passes cut out of optimiser steps.

An optimiser step always consists of the same rows, in plain, length-grouped and packed runs alike: grouping sorts within a
step, packing lays the rows of a step end to end into as many passes as it would have had. The gradient of a step is the
same sum over the same tokens, so the three runs agree up to rounding, and the seeded order of rows decides all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from loragate.errors import ConfigError
from loragate.losses.head import IGNORED
from loragate.modes import evaluation_mode
from loragate.training.settings import TrainSettings

Row = dict[str, Any]


def arranged_steps(rows: Sequence[Row], settings: TrainSettings, processes: int = 1) -> Iterator[list[Row]]:
    """Items for the loader, in its order; with `packing` an item is a whole forward pass (see `packed`).

    They come one optimiser step at a time: a data set as lists of numbers is many times its size. Over several processes
    a step is filled up with rows that carry no label: each process needs equally many forward passes, and repeating real
    rows would change the last step. Neighbours go to different processes, so that the passes which run at the same time
    are of like length.
    """
    together = settings.per_device_train_batch_size * processes
    for start in range(0, len(rows), settings.batch_size):
        step = [rows[index] for index in range(start, min(start + settings.batch_size, len(rows)))]
        if settings.packing:
            passes = -(-len(step) // together) * processes  # rounded up: as many as these rows make unpacked
            yield [packed(part or [_unlabelled(step[0])]) for part in balanced(step, passes)]
            continue
        if settings.group_by_length:
            step = sorted(step, key=lambda row: -len(row["input_ids"]))
        if processes > 1:
            step += [_unlabelled(step[0])] * (-len(step) % together)
        yield step


def balanced(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Rows dealt into `parts` parts of nearly equal token counts: the longest row first, to the lightest part.

    Within a part rows keep their order. A part may be empty if there are fewer rows than parts.
    """
    heap = [(0, part) for part in range(parts)]  # (tokens, part): of equally light parts the first, on every machine
    members: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(rows)), key=lambda index: -len(rows[index]["input_ids"])):
        tokens, part = heapq.heappop(heap)
        members[part].append(index)
        heapq.heappush(heap, (tokens + len(rows[index]["input_ids"]), part))
    return [[rows[index] for index in sorted(part)] for part in members]


def packed(rows: Sequence[Row]) -> Row:
    """Rows laid end to end: one item with the columns of a row, `row` now per token, and `position_ids` from 0 in each.

    The first label of each sequence is dropped, as the shift drops it in a padded row: it would be predicted from the
    sequence before.
    """
    item: Row = {"row": [], "position_ids": []}
    for row in rows:
        length = len(row["input_ids"])
        item["row"] += [row["row"]] * length
        item["position_ids"] += range(length)
        for key, values in row.items():
            if key == "row":
                continue
            column = list(values)  # a copy: the caller's row keeps its first label
            if key == "labels":
                column[0] = IGNORED
            item.setdefault(key, []).extend(column)
    return item


class PackedCollator:
    """One packed item to tensors [1, T]: no padding and no attention mask, which is what tells the model that it is packed."""

    def __call__(self, items: Sequence[Row]) -> dict[str, torch.Tensor]:
        """input_ids, labels, position_ids and row [1, T] int64, keep_mask [1, T] bool when present."""
        (item,) = items
        batch = {key: torch.tensor([values], dtype=torch.int64) for key, values in item.items()}
        if "keep_mask" in batch:
            batch["keep_mask"] = batch["keep_mask"].bool()
        return batch


@torch.no_grad()
def require_separate_sequences(model: Any, device: torch.device) -> None:
    """Two short sequences must give the same logits packed and alone, or packing would let one read the other.

    Flash attention reads the boundaries from `position_ids`; with SDPA, eager and flex attention transformers builds a
    block mask from them. A model that does neither (recurrent layers, its own attention code) is refused.

    Raises:
        ConfigError: naming the attention implementation.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    lengths = (5, 7)
    # some tokens that differ: one row of [1, 12] whose positions begin anew after five, against [1, 5] and [1, 7]
    ids = (torch.arange(sum(lengths), device=device) * 7919 + 11) % min(vocabulary, 1 << 15)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    with evaluation_mode(model):
        together = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
        alone = torch.cat(
            [model(input_ids=part[None], use_cache=False).logits[0].float() for part in ids.split(lengths)]
        )
    half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    if not bool((together - alone).abs().max() <= (5e-2 if half else 1e-3) * max(1.0, float(alone.abs().max()))):
        kind = getattr(model.config, "_attn_implementation", "unknown")
        raise ConfigError(
            f"packing: with this model ({type(model).__name__}, attention implementation {kind!r}) packed sequences read each "
            "other, so the run would learn something else. Leave packing out and use group_by_length, or load the model with "
            "flash attention"
        )


def _unlabelled(row: Row) -> Row:
    return {**row, "labels": [IGNORED] * len(row["labels"])}
