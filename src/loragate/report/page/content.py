"""What a page is made of: sections of blocks, each block a kind that the template knows and plain data.

- text: {"paragraphs": [str]}
- scores: {"columns": [str], "rows": [{"name", "group", "estimate": {mean, low, high} or None, "not_run": bool, "cells":
  [str]}], "caption": str}
- table: {"columns": [str], "rows": [[str]], "caption": str}, "plain" where all cells are words, and "folded": str, what a long
  table says while it is closed
- curves: {"chart": a chart of `charts.py`, "columns": [str], "rows": [[str]]}
- map: {"columns": [str], "rows": [{"name": str, "cells": [{"text", "note", "background", "ink", "mark"} or None]}],
  "caption": str, "corner": str}
- tokens: {"questions": int, "left_out": int}; the traces themselves are given to `build_page`

Numbers arrive as text where they are only shown; "estimate" carries shares of 1, from which bars are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Block:
    """One table, chart or paragraph.

    Attributes:
        kind: names the template that shows it; data: what the kind shows, see the module's table.
        title: heading above it; empty for none.
    """

    kind: str
    data: Mapping[str, Any]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page with an entry in its contents."""

    anchor: str
    title: str
    blocks: Sequence[Block] = ()


def text(*paragraphs: str) -> Block:
    """Paragraphs."""
    return Block("text", {"paragraphs": list(paragraphs)})


def score(
    name: str, group: str, estimate: Mapping[str, float] | None, cells: Iterable[str] = (), not_run: bool = False
) -> dict[str, Any]:
    """One row of a block of scores; its group gives the bar its colour."""
    return {"name": name, "group": group, "estimate": estimate, "not_run": not_run, "cells": list(cells)}


def scores(rows: Sequence[Any], columns: Sequence[str] = (), caption: str = "", title: str = "") -> Block:
    """Rows of `score`, with further columns."""
    return Block("scores", {"rows": rows, "columns": list(columns), "caption": caption}, title)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", title: str = "", **more: Any
) -> Block:
    """A table; `folded` is what a long one says while it is closed, `plain` that all its cells are words."""
    return Block(
        "table", {"columns": list(columns), "rows": [list(row) for row in rows], "caption": caption, **more}, title
    )
