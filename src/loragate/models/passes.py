"""Which rows may share a forward pass: no row may compute other numbers for the rows beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def find_longrope_length(model: Any) -> int | None:
    """Tokens up to which a row's rotary angles are those of short rows; None where they do not depend on its length.

    "longrope" (Phi-3 with 128k, Phi-4-mini) turns every position of a forward pass by other angles as soon as its longest row
    passes `original_max_position_embeddings`, so what a row computes depends on the rows beside it. ("dynamic" changes
    beyond `max_position_embeddings`, where no row reaches.)
    """
    given = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [given, *(kind for kind in given.values() if isinstance(kind, dict))]  # one, or one for each type of layer
    lengths = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min(lengths, default=None)


def iter_passes(
    model: Any, lengths: Sequence[int], size: int, limits: Sequence[int] = (), positions: int | None = None
) -> Iterator[list[int]]:
    """Cut rows in their order into passes of at most `size` that change no row; yields the indices of each.

    In a model of `find_longrope_length` the rows of a pass cross that length together: none of them, all before they are read,
    or, where answers are drawn, those of one length.

    Args:
        lengths: tokens of each row.
        limits: tokens that are drawn behind each row at most, where answers are; the longest row must come first then.
        positions: a pass ends before the first row whose answer would carry the pass's longest prompt past that many: where a row
            that has ended is fed on until its batch is done, it must not pass the end of a table of positions.
    """
    rope, limits = find_longrope_length(model), limits or [0] * len(lengths)
    rows: list[int] = []
    for row, length in enumerate(lengths):
        if rows:
            first = rows[0]
            beyond = positions is not None and lengths[first] + limits[row] > positions
            shorter, reached = min(length, lengths[first]), max(lengths[at] + limits[at] for at in (first, row))
            crossing = rope is not None and length != lengths[first] and shorter <= rope < reached
            if len(rows) == size or beyond or crossing:
                yield rows
                rows = []
        rows.append(row)
    if rows:
        yield rows
