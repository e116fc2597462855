"""A whole dataset, encoded: format detection, tokenising in batches, and the account of what happened to the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loragate.data.formats import EmptyResponse, Turns, detect_format, normalize
from loragate.data.loading import load_rows
from loragate.data.packed import PackedRows
from loragate.data.rendering import IGNORED, Encoder
from loragate.data.rows import Rows
from loragate.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 256  # rows per call of the tokenizer
COUNTED = ("truncated", "response_tokens", "prompt_tokens", "last_turn_only", "plain", "empty")
"""What is counted of each batch, by its name in `Summary`."""


@dataclass(frozen=True)
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
    dropped: int
    truncated: int
    response_tokens: int
    prompt_tokens: int
    last_turn_only: int
    plain: int = 0
    empty: int = 0


class EncodedRows(PackedRows):
    """Encoded rows `{"input_ids", "labels", "row"[, "keep_mask"]}` and their `summary`.

    `row` is the index into the rows that were given.
    """

    def __init__(self, packed: PackedRows, summary: Summary) -> None:
        super().__init__(packed.arrays)
        self.summary = summary

    def __repr__(self) -> str:
        return f"EncodedRows({len(self)} rows, {self.summary})"


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
    counts = Counter[str]()
    parts: list[PackedRows] = []
    for start in range(0, len(rows), BATCH):
        indices = range(start, min(start + BATCH, len(rows)))
        parts.append(_encode(encoder, rows, name, indices, counts))
        if on_progress is not None:
            on_progress(indices.stop, len(rows))
    items = PackedRows.joined(parts)
    if counts["empty"] == len(rows):
        raise DataError(
            f"{rows.source}: the response of every one of {len(rows)} rows is empty, so there is nothing to learn"
        )
    if not len(items):
        without = f" ({counts['empty']} of them have none)" if counts["empty"] else ""
        raise DataError(
            f"{rows.source}: max_length={max_length} cuts the whole response of every one of {len(rows)} rows{without}, so "
            "nothing is left to learn. Raise max_length."
        )
    dropped = len(rows) - len(items) - counts["empty"]
    counted = {key: counts[key] for key in COUNTED}
    return EncodedRows(items, Summary(format=name, rows=len(rows), dropped=dropped, **counted))


def _encode(encoder: Encoder, rows: Rows, format: str, indices: range, counts: Counter[str]) -> PackedRows:
    """The items of the rows at these indices; what becomes of them is added to `counts`."""
    masked = rows[0].get("keep_mask") is not None
    turns: list[tuple[Turns, str]] = []
    places: list[int] = []
    for index, row in zip(indices, rows.fetch(indices), strict=True):
        where = rows.where(index)
        try:
            one = normalize(row, format, where)
        except EmptyResponse:
            counts["empty"] += 1
            continue
        if (one.keep_mask is not None) != masked:  # as a batch has it or has it not
            raise DataError(
                f"{where}: the row has {'no' if masked else 'a'} keep_mask, unlike {rows.where(0)}; "
                "give it on every row or on none"
            )
        turns.append((one, where))
        places.append(index)
    counts["plain"] += sum(one.is_plain for one, _ in turns)
    items = []
    for index, encoded in zip(places, encoder.encode(turns), strict=True):
        if encoded.responses == 0:
            continue
        item: dict[str, Any] = {"input_ids": encoded.input_ids, "labels": encoded.labels, "row": index}
        if encoded.keep_mask is not None:
            item["keep_mask"] = encoded.keep_mask
        items.append(item)
        learned = sum(label != IGNORED for label in encoded.labels)
        counts["response_tokens"] += learned
        counts["prompt_tokens"] += len(encoded.labels) - learned
        counts["truncated"] += encoded.truncated
        counts["last_turn_only"] += encoded.last_turn_only
    return PackedRows.of(items)
