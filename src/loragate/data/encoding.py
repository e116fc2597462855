"""A whole dataset, encoded: format detection, tokenising in batches, and the account of what happened to the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from loragate.data.formats import Turns, detect_format, normalize
from loragate.data.loading import load_rows
from loragate.data.rendering import IGNORED, Encoder
from loragate.data.rows import Rows
from loragate.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 256  # rows per call of the tokenizer, which works on them in parallel


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
        fingerprint: of the rows given, see `Rows.fingerprint`.
    """

    format: str
    rows: int
    dropped: int
    truncated: int
    response_tokens: int
    prompt_tokens: int
    last_turn_only: int
    fingerprint: str
    plain: int = 0


class EncodedRows(Sequence[dict[str, Any]]):
    """Encoded rows `{"input_ids", "labels", "row"[, "keep_mask"]}` and their `summary`.

    `row` is the index into the rows that were given.
    """

    def __init__(self, items: list[dict[str, Any]], summary: Summary) -> None:
        self._items = items
        self.summary = summary

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self._items[index]

    def __repr__(self) -> str:
        return f"EncodedRows({len(self)} rows, {self.summary})"


def encode_rows(
    rows: Rows | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    system: str = "none",
    format: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> EncodedRows:
    """Encode every row; rows whose response is cut completely are dropped and counted.

    Args:
        rows: from `load_rows`, or a list of dicts.
        max_length: longest sequence in tokens, cut on the right; None for no limit.
        system: "none" or "keep", see `Chat`.
        format: name of the row format; detected from the first row when None. All rows must have it.
        on_progress: called with (rows done, rows in all) after each batch.

    Raises:
        DataError: for the first row that cannot be used, named by its place; or when no row is left.
    """
    rows = load_rows(rows)
    encoder = Encoder(tokenizer, max_length=max_length, system=system)
    name = format or _detect(rows)
    items: list[dict[str, Any]] = []
    truncated = response_tokens = prompt_tokens = last_turn_only = plain = 0
    for start in range(0, len(rows), BATCH):
        batch = list(_normalized(rows, name, range(start, min(start + BATCH, len(rows)))))
        plain += sum(turns.is_plain for turns, _ in batch)
        for index, encoded in enumerate(encoder.encode(batch), start):
            if encoded.responses == 0:
                continue
            item: dict[str, Any] = {"input_ids": encoded.input_ids, "labels": encoded.labels, "row": index}
            if encoded.keep_mask is not None:
                item["keep_mask"] = encoded.keep_mask
            items.append(item)
            learned = sum(label != IGNORED for label in encoded.labels)
            response_tokens += learned
            prompt_tokens += len(encoded.labels) - learned
            truncated += encoded.truncated
            last_turn_only += encoded.last_turn_only
        if on_progress is not None:
            on_progress(start + len(batch), len(rows))
    if not items:
        raise DataError(
            f"{rows.source}: max_length={max_length} cuts the whole response of every one of {len(rows)} rows, so "
            "nothing is left to learn. Raise max_length."
        )
    summary = Summary(
        format=name,
        rows=len(rows),
        dropped=len(rows) - len(items),
        truncated=truncated,
        response_tokens=response_tokens,
        prompt_tokens=prompt_tokens,
        last_turn_only=last_turn_only,
        fingerprint=rows.fingerprint,
        plain=plain,
    )
    return EncodedRows(items, summary)


def _detect(rows: Rows) -> str:
    try:
        return detect_format(rows[0])
    except DataError as error:
        raise DataError(f"{rows.where(0)}: {error}") from None


def _normalized(rows: Rows, format: str, indices: range) -> Iterator[tuple[Turns, str]]:
    """Turns and place of each row; a keep_mask is on all rows or on none, as a batch has it or has it not."""
    masked = rows[0].get("keep_mask") is not None
    for index in indices:
        row, where = rows[index], rows.where(index)
        turns = normalize(row, format, where)
        if (turns.keep_mask is not None) != masked:
            raise DataError(
                f"{where}: the row has {'no' if masked else 'a'} keep_mask, unlike {rows.where(0)}; "
                "give it on every row or on none"
            )
        yield turns, where
