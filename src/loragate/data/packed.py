"""Encoded rows in a few flat arrays, and rows padded to rectangular batches.

A hundred thousand tokenised rows are small as numbers and large as Python lists; here they stay numbers until a row is
asked for. Knows nothing of formats, templates or tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch

from loragate.data.rendering import IGNORED
from loragate.errors import DataError
from loragate.validate import check


class PackedRows(Sequence[dict[str, Any]]):
    """Items `{"input_ids", "labels", "row"[, "keep_mask"]}` as arrays; an item is made when it is read.

    `ids`, `learned` and `kept` run over all positions of all items; `lengths` and `rows` have one entry per item.
    """

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self._ends = np.concatenate([[0], np.cumsum(arrays["lengths"])])

    @classmethod
    def of(cls, items: Iterable[dict[str, Any]]) -> PackedRows:
        """Pack items; their labels are the token itself or -100."""
        items = list(items)
        lengths = np.array([len(item["input_ids"]) for item in items], np.int64)

        def joined(key: str, kind: Any) -> np.ndarray:
            return np.fromiter((value for item in items for value in item[key]), kind, int(lengths.sum()))

        arrays = {
            "ids": joined("input_ids", np.int32),
            "learned": joined("labels", np.int32) != IGNORED,
            "lengths": lengths,
            "rows": np.array([item["row"] for item in items], np.int64),
        }
        if items and "keep_mask" in items[0]:
            arrays["kept"] = joined("keep_mask", np.bool_)
        return cls(arrays)

    @classmethod
    def joined(cls, parts: Sequence[PackedRows]) -> PackedRows:
        """Several one after the other."""
        parts = [part for part in parts if len(part)] or list(parts[:1])
        return cls({name: np.concatenate([part.arrays[name] for part in parts]) for name in parts[0].arrays})

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
        masked = [row["row"] for row in rows if "keep_mask" in row]
        if masked and len(masked) < len(rows):
            raise DataError(
                f"found keep_mask on rows {masked} of a batch of {len(rows)}; give it on every row or on none"
            )
        if masked:
            batch["keep_mask"] = pad((row["keep_mask"] for row in rows), 0).bool()
        return batch
