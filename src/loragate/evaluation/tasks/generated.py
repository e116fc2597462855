"""The sets that are made on the spot: name -> rows from (count, seed)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loragate.evaluation.tasks import arithmetic, tiny

GENERATORS: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {
    "arithmetic": arithmetic.rows,
    "tiny": tiny.arithmetic_rows,
    "tiny_retention": tiny.retention_rows,
}
