"""How much of the logits exists at a time: tiles of tokens × vocabulary columns, sized from one budget of bytes.

All sizes of the token-statistics head come from here, so that its memory is the same whatever the batch, the vocabulary
and the width. Beside a tile of logits live, for log-probability and entropy, at most two more of its size.
"""

from __future__ import annotations

from dataclasses import dataclass

BUDGET = 64 << 20
"""Bytes of one tile of logits, of the head rows widened for it, and of the rows that a sparse backward gathers at a time."""

LEAST = 16
"""Tokens, and columns, of a tile at the least, whatever the budget."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of one tile: `tokens` × `columns` of the vocabulary."""

    tokens: int
    columns: int

    def spans(self, vocabulary: int) -> list[tuple[int, int]]:
        """First column and end of each tile of a row, as even as multiples of 64 allow."""
        count = -(-vocabulary // self.columns)
        unit = 64 if self.columns >= 64 and self.columns % 64 == 0 else 1  # sizes that matrix products like
        blocks = -(-vocabulary // unit)
        ends = [min(vocabulary, unit * (blocks * (at + 1) // count)) for at in range(count)]
        return list(zip([0, *ends[:-1]], ends, strict=True))


def preferred_tokens(device: str) -> int:
    """Tokens that make the product with a tile of head rows worth reading them, by device type.

    A GPU needs some 300 multiplications per weight read to be busy; a CPU is content with fewer tokens, and the search for
    the largest is quicker the wider the tile.
    """
    return 128 if device == "cpu" else 512


def tiling(vocabulary: int, width: int, device: str, *, widened: bool, tokens: int | None = None) -> Tiling:
    """Tile sizes for logits of four bytes.

    Args:
        vocabulary: V, or the part of it that this process holds.
        width: D.
        device: device type of the head.
        widened: whether head rows are copied to fp32 for the product; their copy then keeps to the budget too.
        tokens: positions per tile where the caller insists.
    """
    # 64 MiB: 128 tokens × 131,072, or 512 × 32,768
    columns = max(LEAST, BUDGET // (4 * (tokens or preferred_tokens(device))))
    if widened:
        columns = min(columns, max(LEAST, BUDGET // (4 * width)))
    columns = min(columns, vocabulary)
    if tokens is None:
        tokens = max(LEAST, BUDGET // (4 * columns))
        if device == "cpu" and not widened:
            # the logits of a narrow vocabulary are then still in the cache when they are searched
            tokens = min(tokens, preferred_tokens(device))
    return Tiling(tokens, columns)


def chunks(count: int, size: int) -> list[slice]:
    """Slices of `size` that cover `count` positions."""
    return [slice(at, at + size) for at in range(0, count, size)]
