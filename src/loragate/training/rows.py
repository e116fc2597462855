"""The rows of a training: read and chosen."""

from __future__ import annotations

from loragate.data import Rows, load_rows
from loragate.effects import require_effect
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
