"""Batches: encoded rows of unequal lengths to rectangular tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loragate.data.rendering import IGNORED
from loragate.errors import ConfigError, DataError, nearest

SIDES = ("right", "left")


@dataclass(frozen=True)
class Collator:
    """Pads encoded rows to one length; a `collate_fn` for a DataLoader.

    Attributes:
        pad_token_id: id to pad `input_ids` with; attention is 0 there and the label -100, so any valid id serves.
        pad_to_multiple_of: round the length up to a multiple.
        side: "right" for training, "left" to go on generating.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    side: str = "right"

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise ConfigError(
                f"found side={self.side!r}, expected one of {', '.join(SIDES)}{nearest(str(self.side), SIDES)}"
            )
        if self.pad_token_id is None:
            raise ConfigError(
                "found pad_token_id=None; pass tokenizer.pad_token_id, or eos_token_id where there is none"
            )
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ConfigError(f"found pad_to_multiple_of={self.pad_to_multiple_of}, expected at least 1, or None")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return input_ids, attention_mask, labels [B,S] and row [B] as int64, and keep_mask [B,S] bool when present."""
        longest = max(len(row["input_ids"]) for row in rows)
        step = self.pad_to_multiple_of or 1
        length = -(-longest // step) * step

        def pad(key: str, value: int) -> torch.Tensor:
            return torch.tensor([self._padded(row[key], length, value) for row in rows], dtype=torch.int64)

        batch = {
            "input_ids": pad("input_ids", self.pad_token_id),
            "attention_mask": torch.tensor(
                [self._padded([1] * len(row["input_ids"]), length, 0) for row in rows], dtype=torch.int64
            ),
            "labels": pad("labels", IGNORED),
            "row": torch.tensor([row["row"] for row in rows], dtype=torch.int64),
        }
        masked = [row["row"] for row in rows if "keep_mask" in row]
        if masked and len(masked) < len(rows):
            raise DataError(
                f"found keep_mask on rows {masked} of a batch of {len(rows)}; give it on every row or on none"
            )
        if masked:
            batch["keep_mask"] = pad("keep_mask", 0).bool()
        return batch

    def _padded(self, values: Sequence[int], length: int, value: int) -> list[int]:
        padding = [value] * (length - len(values))
        return [*values, *padding] if self.side == "right" else [*padding, *values]
