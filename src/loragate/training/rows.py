"""The rows of a training: read and chosen, held against what will read them, and cut into forward passes.

Messages name a row by its file and line; the indices of tokenised rows lead back to them. An optimiser step always consists of
the same rows, in plain, length-grouped and packed runs alike: grouping sorts within a step, packing lays the rows of a step end
to end into as many passes as it would have had. The gradient of a step is the same sum over the same tokens, so the three runs
agree up to rounding, and the seeded order of rows decides all.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets

from loragate.data import Collator, EncodedRows, Rows, encode_rows, load_rows
from loragate.effects import require_effect
from loragate.errors import ConfigError, DataError, SetupError
from loragate.losses.causal_head import causal_model
from loragate.losses.head import IGNORE_INDEX
from loragate.losses.objectives import Objective
from loragate.models.passes import find_longrope_length
from loragate.modes import evaluation_mode
from loragate.training.settings import RowsSettings, TrainSettings

logger = logging.getLogger("loragate")

Row = dict[str, Any]
DATASET_CHUNK_ROWS = 2048  # that are Python lists while a data set is made


def read_rows(asked: RowsSettings, max_rows: int, seed: int | None = None) -> Rows:
    """All rows, the first `max_rows` (0: all), or as many of a shuffle.

    Args:
        seed: of the shuffle where `select_seed` names none; None leaves that subset to the caller.

    Raises:
        DataError: for data that cannot be read.
        ConfigError: for a `select_seed` beside the first rows.
    """
    require_effect("rows", asked)
    first = max_rows if asked.select == "first" else 0
    rows = load_rows(asked.data, split=asked.split or None, revision=asked.revision or None, limit=first or None)
    chosen_by = seed if asked.select_seed is None else asked.select_seed
    if first or not max_rows or chosen_by is None:
        return rows
    return rows.shuffled(chosen_by).take(max_rows)


def training_rows(
    source: Rows, tokenizer: Any, settings: TrainSettings, system: str = "none", **how: Any
) -> tuple[Rows, EncodedRows]:
    """Rows in training order, shuffled by the seed, those of gates no more than `max_rows`; and their tokens.

    `how` goes on to `encode_rows`: on_progress.
    """
    chosen = source.shuffled(settings.seed)
    if most := getattr(settings, "max_rows", 0):
        chosen = chosen.take(most)
    return chosen, encode_rows(chosen, tokenizer, max_length=settings.max_length, system=system, **how)


def require_mask_column(objective: Objective, encoded: EncodedRows, source: str) -> None:
    """Refuse (ConfigError) rows without the column that the objective reads, and rows longer than what `loragate mask` scored.

    `source` is what the rows are called in the message; of a file that `loragate mask` wrote, its path.
    """
    if "keep_mask" not in objective.requires:
        return
    if "keep_mask" not in encoded[0]:
        raise ConfigError(
            f"objective {objective.name!r} needs a keep_mask, and {source} has no such column: a list of 0 and 1, one "
            "per response token. Make one with loragate mask --model BASE --reference MODEL --data IN --out OUT"
        )
    record, longest = Path(source + ".record.json").expanduser(), int(encoded.arrays["lengths"].max())
    scored = json.loads(record.read_text(encoding="utf-8")).get("max_length") if record.is_file() else None
    if scored is not None and longest > scored:
        raise ConfigError(
            f"{source} was masked with max_length {scored}, and a row of this training has {longest} tokens: what lies beyond was "
            f"never scored and counts as not kept, which {objective.name!r} would take for a judgement. Set max_length to "
            f"{scored} or less, or make the mask with loragate mask --max-length {longest} or more"
        )


def check_encoded_matches_rows(encoded: EncodedRows | None, rows: Rows) -> None:
    """Refuse (DataError) tokenised rows that are not of `rows`; None is for the stage to tokenise."""
    if encoded is None:
        return
    last = max(encoded.arrays["rows"], default=-1)
    if len(encoded) > len(rows) or last >= len(rows):
        raise DataError(
            f"encoded holds {len(encoded)} rows up to index {last}, and rows has {len(rows)} ({rows.source}): they do not "
            "belong together. Give the rows that were encoded, in their order"
        )


def check_fits_model(model: Any, encoded: EncodedRows, where: Callable[[int], str]) -> None:
    """Refuse rows longer than the model's positions (SetupError) or with tokens that it lacks (DataError); `where` names a row."""
    positions: int | None = getattr(causal_model(model).config.get_text_config(), "max_position_embeddings", None)
    # [rows], [tokens of all rows, end to end] and [rows]: tokens of each row, their ids, and the row's index in the data
    lengths, ids, places = (encoded.arrays[name] for name in ("lengths", "ids", "rows"))
    longest = int(lengths.argmax())
    if positions is not None and lengths[longest] > positions:
        raise SetupError(
            f"{where(int(places[longest]))} has {lengths[longest]} tokens, but the model has {positions} positions; "
            f"set max_length to {positions} or less"
        )
    weight = getattr(causal_model(model).get_input_embeddings(), "weight", None)
    shape = tuple(getattr(weight, "shape", ()))
    embedded = int(shape[0]) if len(shape) == 2 else None
    largest = int(ids.argmax())
    if embedded is not None and ids[largest] >= embedded:
        at = int(places[lengths.cumsum().searchsorted(largest, side="right")])
        raise DataError(
            f"{where(at)} has the token id {ids[largest]}, but the base embeds {embedded} tokens: the tokenizer belongs to "
            "another base. Load the base's own, or give the base more embeddings (resize_token_embeddings)"
        )


def encoded_fingerprint(encoded: EncodedRows) -> str:
    """sha256 over token ids and labels in training order."""
    digest = hashlib.sha256()
    # ids are held in four bytes each; run records hash them as eight
    ids, learned = encoded.arrays["ids"].astype(np.int64), encoded.arrays["learned"]
    columns = [ids, np.where(learned, ids, IGNORE_INDEX)]
    if "kept" in encoded.arrays:
        columns.append(encoded.arrays["kept"].astype(np.int64))
    ends = np.cumsum(encoded.arrays["lengths"])
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        for column in columns:
            digest.update(column[begin:end].tobytes())
    return digest.hexdigest()


def iter_step_rows(
    rows: Sequence[Row],
    batch_size: int,
    per_device: int,
    processes: int = 1,
    *,
    packing: bool = False,
    group_by_length: bool = False,
) -> Iterator[list[Row]]:
    """Items for the loader, in its order; with `packing` an item is a whole forward pass (see `pack_rows`).

    They come one optimiser step at a time: a data set as lists of numbers is many times its size. Over several processes
    a step is filled up with rows that carry no label: each process needs equally many forward passes, and repeating real
    rows would change the last step. Neighbours go to different processes, so that the passes which run at the same time
    are of like length.
    """
    together = per_device * processes
    for start in range(0, len(rows), batch_size):
        step = [rows[index] for index in range(start, min(start + batch_size, len(rows)))]
        if packing:
            passes = -(-len(step) // together) * processes  # rounded up: as many as these rows make unpacked
            yield [pack_rows(part or [_ignore_all_labels(step[0])]) for part in partition_by_tokens(step, passes)]
            continue
        if group_by_length:
            step = sorted(step, key=lambda row: -len(row["input_ids"]))
        if processes > 1:
            step += [_ignore_all_labels(step[0])] * (-len(step) % together)
        yield step


def iter_evaluated_rows(model: Any, rows: Sequence[Row], per_device: int, processes: int = 1) -> Iterator[list[Row]]:
    """Items for the loader of an evaluation, where the order of rows changes nothing.

    Rows of a longrope model that are beyond its length (see `find_longrope_length`) share no pass with shorter ones: these come
    first, and rows that carry no label fill their last pass, as they fill that of several processes.
    """
    change, together = find_longrope_length(causal_model(model)), per_device * processes
    sides: list[list[int]] = [[], []]
    for index in range(len(rows)):
        sides[change is not None and len(rows[index]["input_ids"]) > change].append(index)
    for side, after in zip(sides, (bool(sides[1]), False)):
        for start in range(0, len(side), together):
            step = [rows[index] for index in side[start : start + together]]
            if after or processes > 1:
                step += [_ignore_all_labels(step[0])] * (-len(step) % together)
            yield step


def warn_where_rows_change_others(model: Any, rows: EncodedRows) -> None:
    """Warn where rows to learn from, several to a pass, lie on both sides of a longrope model's length, `find_longrope_length`.

    An optimiser step keeps its rows, so they are not drawn apart here.
    """
    change, lengths = find_longrope_length(model), rows.arrays["lengths"]
    beyond = 0 if change is None else int((lengths > change).sum())
    if 0 < beyond < len(lengths):
        logger.warning(
            "%d of %d rows have more than %d tokens, beyond which this model (longrope) turns all positions of a forward pass "
            "by other angles: shorter rows beside one are learned with the angles of long ones. To keep them apart set "
            "per_device_train_batch_size to 1 and leave out packing, or limit all rows with max_length %d",
            beyond, len(lengths), change, change,
        )  # fmt: skip


def as_dataset(steps: Iterator[list[Row]]) -> Dataset:
    """What `iter_step_rows` gives (input_ids, labels, row, optional keep_mask) as a `datasets.Dataset` in memory."""
    rows, parts = chain.from_iterable(steps), []
    while some := list(islice(rows, DATASET_CHUNK_ROWS)):
        parts.append(Dataset.from_list(some))
    return concatenate_datasets(parts)


def partition_by_tokens(rows: Sequence[Row], parts: int) -> list[list[Row]]:
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


def pack_rows(rows: Sequence[Row]) -> Row:
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
                column[0] = IGNORE_INDEX
            item.setdefault(key, []).extend(column)
    return item


class TrainingCollator:
    """Rows, or one packed item, to the tensors of a forward pass.

    Rows are padded on the right; a tokenizer without a pad token pads with EOS, which the attention mask hides. A packed item has
    no padding and no attention mask, which is what tells the model that it is packed.
    """

    def __init__(self, tokenizer: Any) -> None:
        pad = tokenizer.pad_token_id
        self.padded = Collator(int(pad if pad is not None else tokenizer.eos_token_id or 0))

    def __call__(self, items: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Of rows what `loragate.data.Collator` gives; of a packed item input_ids, labels, position_ids and row [1, T] int64, and
        keep_mask [1, T] bool when present."""
        if "position_ids" not in items[0]:
            return self.padded(items)
        (item,) = items
        batch = {key: torch.tensor([values], dtype=torch.int64) for key, values in item.items()}
        if "keep_mask" in batch:
            batch["keep_mask"] = batch["keep_mask"].bool()
        return batch


@torch.no_grad()
def check_packing_isolation(model: Any, device: torch.device) -> None:
    """Two short sequences must give the same logits packed and alone, or packing would let one read the other.

    Flash attention reads the boundaries from `position_ids`; with SDPA, eager and flex attention transformers builds a
    block mask from them. A model that does neither (recurrent layers, its own attention code) is refused (ConfigError).
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


def _ignore_all_labels(row: Row) -> Row:
    return {**row, "labels": [IGNORE_INDEX] * len(row["labels"])}
