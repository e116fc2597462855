"""`Rows`: data rows that remember where they came from.

A row keeps its place ("train.jsonl:12") through shuffling and taking, so that any later error can name it. The
fingerprint is over the content alone: equal rows from JSONL and from parquet have the same one. This room knows nothing
of row formats and does not read files.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from loragate.errors import ConfigError, DataError

FETCHED = 1000  # rows that are read together out of a column store


class Rows(Sequence[dict[str, Any]]):
    """An immutable sequence of row dicts.

    Attributes:
        source: the path or hub id that the rows were read from, "rows in memory" for a list.
    """

    def __init__(
        self,
        items: Sequence[Any],
        *,
        source: str,
        place: str,
        numbers: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        """`place` + `numbers[i]` names `items[i]`; `order` lists the items that this view shows, in its order."""
        self.source = source
        self._items = items
        self._place = place
        self._numbers = range(len(items)) if numbers is None else numbers
        self._order = range(len(items)) if order is None else order

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Rows:
        if isinstance(index, slice):
            return self._view(self._order[index])
        row = self._items[self._order[index]]
        return row if isinstance(row, dict) else dict(row)

    def where(self, index: int) -> str:
        """Name row `index` for a person: 'file.jsonl:12' (lines from 1), 'org/name[train] row 7' (rows from 0)."""
        return f"{self._place}{self._numbers[self._order[index]]}"

    def earliest(self) -> int:
        """The index of the row that comes first in its file, however the rows are ordered here."""
        return min(range(len(self)), key=self._order.__getitem__)  # items are in the file's order

    def shuffled(self, seed: int) -> Rows:
        """The same rows in a random order that depends on `seed` and the number of rows only."""
        order = list(self._order)
        random.Random(seed).shuffle(order)
        return self._view(order)

    def take(self, n: int) -> Rows:
        """The first `n` rows, or all when there are fewer."""
        return self._view(self._order[: check_limit(n)])

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the rows in their order, each as canonical JSON.

        Keys are sorted, null fields dropped (a column store writes null for an absent key) and whole floats written as
        integers (a column of mixed numbers is stored as floats).
        """
        return self._hashes[0]

    def as_record(self) -> dict[str, Any]:
        """What these rows are known by: their number, their content in any order, and their order."""
        order, content = self._hashes
        return {"rows": len(self), "content_sha256": content, "order_sha256": order}

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        ordered = hashlib.sha256()
        each: list[bytes] = []
        for index, row in enumerate(self):
            try:
                line = json.dumps(_canonical(row), sort_keys=True, separators=(",", ":")).encode() + b"\n"
            except RecursionError:
                raise DataError(f"{self.where(index)}: the row is nested too deeply to be read") from None
            ordered.update(line)
            each.append(hashlib.sha256(line).digest())
        # sorted, so that the second does not depend on the order
        return ordered.hexdigest(), hashlib.sha256(b"".join(sorted(each))).hexdigest()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The rows in their order; those of a column store are fetched many at a time, which is far quicker."""
        for start in range(0, len(self), FETCHED):
            yield from self.fetch(range(start, min(start + FETCHED, len(self))))

    def fetch(self, indices: range) -> list[dict[str, Any]]:
        """The rows at these indices, read in one access."""
        if not hasattr(self._items, "column_names"):
            return [self[index] for index in indices]
        # `datasets` gives many rows as {column: values}, in one read where single rows take one each
        columns: dict[str, list[Any]] = self._items[[self._order[index] for index in indices]]  # type: ignore[call-overload]
        return [dict(zip(columns, values)) for values in zip(*columns.values())]

    def _view(self, order: Sequence[int]) -> Rows:
        return Rows(self._items, source=self.source, place=self._place, numbers=self._numbers, order=order)

    def __repr__(self) -> str:
        return f"Rows({len(self)} from {self.source})"


def check_limit(limit: int) -> int:
    """Return `limit`, or raise ConfigError unless it is at least 1."""
    if limit < 1:
        raise ConfigError(f"found limit={limit!r}, expected a whole number of rows, at least 1")
    return limit


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, str | int | float):
        return value
    # what JSON lines cannot hold and parquet can: bytes, dates, decimals
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
