"""The rows of a training: read and chosen, and held against what will read them, an objective and a model.

Messages name a row by its file and line; the indices of tokenised rows lead back to them. What is done with rows that fit, how
they are cut into forward passes, is in `arrangement.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from loragate.data import Collator, EncodedRows, Rows, load_rows
from loragate.effects import require_effect
from loragate.errors import ConfigError, DataError, TrainingError
from loragate.losses.causal_head import causal_model
from loragate.losses.head import IGNORED
from loragate.losses.objectives import Objective
from loragate.training.settings import RowsSettings


def read_rows(asked: RowsSettings, max_rows: int, seed: int | None = None) -> Rows:
    """All rows, the first `max_rows` (0: all), or as many of a shuffle.

    Args:
        seed: of the shuffle where `select_seed` names none; None leaves that subset to the caller.

    Raises:
        ConfigError: for a select_seed without effect.
        DataError: for data that cannot be read.
    """
    require_effect("rows", asked, flags=True, max_rows=max_rows)
    first = max_rows if asked.select == "first" else 0
    rows = load_rows(asked.data, split=asked.split or None, revision=asked.revision or None, limit=first or None)
    chosen_by = seed if asked.select_seed is None else asked.select_seed
    if first or not max_rows or chosen_by is None:
        return rows
    return rows.shuffled(chosen_by).take(max_rows)


def require_mask_column(objective: Objective, encoded: EncodedRows, source: Rows) -> None:
    """Refuse rows without the column that the objective reads.

    Raises:
        ConfigError: naming the data and the ways to a keep_mask.
    """
    if "keep_mask" in objective.requires and "keep_mask" not in encoded[0]:
        raise ConfigError(
            f"objective {objective.name!r} needs a keep_mask, and {source.source} has no such column: a list of 0 and 1, one "
            "per response token. Make one with loragate mask --model BASE --reference MODEL --data IN --out OUT"
        )


def require_encoded(encoded: EncodedRows | None, rows: Rows) -> None:
    """Refuse tokenised rows that are not of `rows`; None is for the stage to tokenise.

    Raises:
        DataError: for more encoded rows than rows, or an index beyond them.
    """
    if encoded is None:
        return
    last = max(encoded.arrays["rows"], default=-1)
    if len(encoded) > len(rows) or last >= len(rows):
        raise DataError(
            f"encoded holds {len(encoded)} rows up to index {last}, and rows has {len(rows)} ({rows.source}): they do not "
            "belong together. Give the rows that were encoded, in their order"
        )


def positions_of(model: Any) -> int | None:
    """The positions that a model has, None where their number has no limit."""
    positions: int | None = getattr(causal_model(model).config.get_text_config(), "max_position_embeddings", None)
    return positions


def require_short_enough(model: Any, encoded: EncodedRows, where: Callable[[int], str]) -> None:
    """Refuse rows that are longer than the model has positions, or that hold tokens which it does not have.

    Args:
        where: from a row's index to the words that name it.

    Raises:
        TrainingError: naming the longest row.
        DataError: naming the row with the largest token id.
    """
    positions = positions_of(model)
    # [rows], [tokens of all rows, end to end] and [rows]: tokens of each row, their ids, and the row's index in the data
    lengths, ids, places = (encoded.arrays[name] for name in ("lengths", "ids", "rows"))
    longest = int(lengths.argmax())
    if positions is not None and lengths[longest] > positions:
        raise TrainingError(
            f"{where(int(places[longest]))} has {lengths[longest]} tokens, but the model has {positions} positions; "
            f"set max_length to {positions} or less"
        )
    weight = getattr(causal_model(model).get_input_embeddings(), "weight", None)
    # ZeRO-3 leaves an empty tensor in the place of a weight that it has spread
    shape = tuple(getattr(weight, "ds_shape", getattr(weight, "shape", ())))
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
    columns = [ids, np.where(learned, ids, IGNORED)]
    if "kept" in encoded.arrays:
        columns.append(encoded.arrays["kept"].astype(np.int64))
    ends = np.cumsum(encoded.arrays["lengths"])
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        for column in columns:
            digest.update(column[begin:end].tobytes())
    return digest.hexdigest()


def collator_for(tokenizer: Any) -> Collator:
    """Right-padding batches; a tokenizer without a pad token pads with EOS, which the attention mask hides."""
    pad = tokenizer.pad_token_id
    return Collator(int(pad if pad is not None else tokenizer.eos_token_id or 0))
