"""A whole dataset, encoded: format detection, tokenising in batches, the account of what happened to the rows, and their batches.

A hundred thousand tokenised rows are small as numbers and large as Python lists; here they stay numbers until a row is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from loragate.data.formats import EmptyResponse, Turns, detect_format, normalize
from loragate.data.loading import load_rows
from loragate.data.rendering import IGNORED, Encoder
from loragate.data.rows import Rows
from loragate.errors import DataError
from loragate.validate import check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 256  # rows per call of the tokenizer


@dataclass
class Summary:
    """What became of the rows.

    Attributes:
        format: the row format.
        rows: rows given.
        dropped: rows left out because max_length cut their whole response.
        truncated: kept rows that max_length cut.
        response_tokens, prompt_tokens: tokens of the kept rows after truncation, with and without a label.
        plain: rows used as plain text, without the chat template.
        last_turn_only: kept rows of which only the last assistant turn is trained (the template rewrites earlier ones).
        empty: rows left out because their response is empty.
    """

    format: str
    rows: int
    dropped: int = 0
    truncated: int = 0
    response_tokens: int = 0
    prompt_tokens: int = 0
    last_turn_only: int = 0
    plain: int = 0
    empty: int = 0


class EncodedRows(Sequence[dict[str, Any]]):
    """Items `{"input_ids", "labels", "row"[, "keep_mask"]}`, kept as arrays; an item is made when it is read.

    Attributes:
        arrays: `ids`, `learned` and `kept` run over all positions of all items; `lengths` and `rows` have one entry per item,
            `rows` the index into the rows that were given.
        summary: what became of the rows; `encode_rows` sets it.
    """

    summary: Summary

    def __init__(self, items: Iterable[dict[str, Any]]) -> None:
        """The labels of an item are the token itself or -100; all items have a keep_mask or none has."""
        ids, learned, kept, lengths, rows = array("i"), bytearray(), bytearray(), array("q"), array("q")
        for item in items:
            ids.extend(item["input_ids"])
            learned.extend(label != IGNORED for label in item["labels"])
            kept.extend(item.get("keep_mask", ()))
            lengths.append(len(item["input_ids"]))
            rows.append(item["row"])
        self.arrays = {"ids": np.array(ids), "learned": np.array(learned, bool)}
        self.arrays |= {"lengths": np.array(lengths), "rows": np.array(rows)}
        if kept:
            self.arrays["kept"] = np.array(kept, bool)
        self._ends = np.concatenate([[0], np.cumsum(self.arrays["lengths"])])

    def __len__(self) -> int:
        return len(self.arrays["lengths"])

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[position] for position in range(len(self))[index]]
        index = range(len(self))[index]
        span = slice(int(self._ends[index]), int(self._ends[index + 1]))
        ids, learned = self.arrays["ids"][span], self.arrays["learned"][span]
        item = {
            "input_ids": ids.tolist(),
            "labels": np.where(learned, ids, IGNORED).tolist(),
            "row": int(self.arrays["rows"][index]),
        }
        if "kept" in self.arrays:
            item["keep_mask"] = self.arrays["kept"][span].astype(np.int8).tolist()
        return item


def encode_rows(
    rows: Rows | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    system: str = "none",
    on_progress: Callable[[int, int], None] | None = None,
) -> EncodedRows:
    """Encode every row; rows without a response, or whose response is cut completely, are left out and counted.

    Args:
        rows: from `load_rows`, or a list of dicts; all of the format of the row that comes first in its file.
        max_length: longest sequence in tokens, cut on the right; None for no limit.
        system: "none" or "keep", see `Chat`.
        on_progress: called with (rows done, rows in all) after each batch.

    Raises:
        DataError: for the first row that cannot be used, named by its place; or when no row is left.
    """
    rows = load_rows(rows)
    first = rows.earliest()
    try:
        name = detect_format(rows[first])
    except DataError as error:
        raise DataError(f"{rows.where(first)}: {error}") from None
    encoder = Encoder(tokenizer, max_length=max_length, system=system)
    summary = Summary(name, len(rows))
    encoded = EncodedRows(_items(encoder, rows, summary, on_progress or (lambda done, of: None)))
    if summary.empty == len(rows):
        raise DataError(
            f"{rows.source}: the response of every one of {len(rows)} rows is empty, so there is nothing to learn"
        )
    if not len(encoded):
        without = f" ({summary.empty} of them have none)" if summary.empty else ""
        raise DataError(
            f"{rows.source}: max_length={max_length} cuts the whole response of every one of {len(rows)} rows{without}, so "
            "nothing is left to learn. Raise max_length."
        )
    summary.dropped = len(rows) - len(encoded) - summary.empty
    encoded.summary = summary
    return encoded


def _items(
    encoder: Encoder, rows: Rows, summary: Summary, on_progress: Callable[[int, int], None]
) -> Iterator[dict[str, Any]]:
    """The item of every row that has a response; what becomes of the rows is counted in `summary`."""
    masked = rows[0].get("keep_mask") is not None
    for start in range(0, len(rows), BATCH):
        indices = range(start, min(start + BATCH, len(rows)))
        turns: list[tuple[Turns, str]] = []
        places: list[int] = []
        for index, row in zip(indices, rows.fetch(indices), strict=True):
            where = rows.where(index)
            try:
                one = normalize(row, summary.format, where)
            except EmptyResponse:
                summary.empty += 1
                continue
            if (one.keep_mask is not None) != masked:  # as a batch has it or has it not
                raise DataError(
                    f"{where}: the row has {'no' if masked else 'a'} keep_mask, unlike {rows.where(0)}; "
                    "give it on every row or on none"
                )
            turns.append((one, where))
            places.append(index)
        summary.plain += sum(one.is_plain for one, _ in turns)
        for index, encoded in zip(places, encoder.encode(turns), strict=True):
            if encoded.responses == 0:
                continue
            item: dict[str, Any] = {"input_ids": encoded.input_ids, "labels": encoded.labels, "row": index}
            if encoded.keep_mask is not None:
                item["keep_mask"] = encoded.keep_mask
            yield item
            learned = sum(label != IGNORED for label in encoded.labels)
            summary.response_tokens += learned
            summary.prompt_tokens += len(encoded.labels) - learned
            summary.truncated += encoded.truncated
            summary.last_turn_only += encoded.last_turn_only
        on_progress(indices.stop, len(rows))


@dataclass(frozen=True)
class Collator:
    """Pads encoded rows on the right to one length; a `collate_fn` for a DataLoader.

    Attributes:
        pad_token_id: id to pad `input_ids` with; attention is 0 there and the label -100, so any valid id serves.
    """

    pad_token_id: int

    def __post_init__(self) -> None:
        check(self)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return input_ids, attention_mask, labels [B,S] and row [B] as int64, and keep_mask [B,S] bool when present."""
        length = max(len(row["input_ids"]) for row in rows)

        def pad(columns: Iterable[Sequence[int]], value: int) -> torch.Tensor:
            return torch.tensor([[*column, *[value] * (length - len(column))] for column in columns], dtype=torch.int64)

        batch = {
            "input_ids": pad((row["input_ids"] for row in rows), self.pad_token_id),
            "attention_mask": pad(([1] * len(row["input_ids"]) for row in rows), 0),
            "labels": pad((row["labels"] for row in rows), IGNORED),
            "row": torch.tensor([row["row"] for row in rows], dtype=torch.int64),
        }
        if "keep_mask" in rows[0]:
            batch["keep_mask"] = pad((row["keep_mask"] for row in rows), 0).bool()
        return batch
