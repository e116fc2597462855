"""Results as a table, for the terminal and for Markdown.

A row is a plain dictionary, written by whoever measured it:

    {"name": str, "group": "control" | "baseline" | "scale" | "intervention",
     "accuracy": {"mean", "low", "high"} | None, "retention": {"mean", "low", "high"} | None,
     "truncated": float, "entropy": float, "tokens": float,
     "versus_lora": {"mean", "low", "high", "p"} | None, "not_run": bool,
     "at_best": {"temperature", "score": {"mean", "low", "high"}} | None}

Accuracy, retention, truncation and differences are shares of 1, entropy is in nats per token, tokens are per answer; None
stands for what was not measured. The table shows what it is given: a control that was not run has its line and says so,
so that its absence is seen. What the numbers mean is `reading.py`'s business.

All tables of the package are made here: a cell is a tuple of parts, the figure first, then what stands under it on a terminal
and behind it in brackets elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from loragate.display import percent, points

Row = Mapping[str, Any]
Cell = tuple[str, ...]

NOT_RUN = "not run"
ABSENT = "–"
AT_BEST = "At its best temperature"
HOW = "each picked on one half of the questions and scored on the other"
COLUMNS = ("Method", "Accuracy %", "vs LoRA points", "Retention %", "Cut off %", "Entropy nats", "Tokens")
CAPTION = (
    "Ranges are 95 % intervals over questions; vs LoRA is paired by question. Cut off: answers that met the length limit. "
    "Entropy: per token. Tokens: per answer."
)


def p_value(p: float) -> str:
    """Return a p-value behind its sign, with three decimals or as a bound where these would show zero."""
    return "<0.001" if p < 0.001 else f"={p:.3f}"


def or_absent(value: Any, show: Callable[[Any], str]) -> str:
    """Return a value as `show` writes it, or the sign of what was not measured for None."""
    return ABSENT if value is None else show(value)


def share_cell(estimate: Mapping[str, float] | None) -> Cell:
    """Return a mean with its ends, shares of 1."""
    if estimate is None:
        return (ABSENT,)
    return percent(estimate["mean"]), f"{percent(estimate['low'])}–{percent(estimate['high'])}"


def difference_cell(versus: Mapping[str, float] | None, verdict: str | None = "") -> Cell:
    """Return a paired difference with p and its ends, and what may be said of it."""
    if versus is None:
        return (ABSENT,)
    ends = f"{points(versus['low'])} to {points(versus['high'])}"
    return f"{points(versus['mean'])}, p{p_value(versus['p'])}", ends, verdict or ""


def at_best_cell(value: Mapping[str, Any] | None) -> Cell:
    """Return a score at the best temperature, its ends, and that temperature."""
    if value is None:
        return (ABSENT,)
    heat = value["temperature"]
    return *share_cell(value["score"]), f"T = {heat:g}" if heat else "greedy"


def at_best_line(rows: Sequence[tuple[str, Mapping[str, Any] | None]]) -> str:
    """Return the scores of rows (name, value) at their best temperatures as one sentence; empty where there are none."""
    said = "; ".join(f"{name} {joined(at_best_cell(value))}" for name, value in rows if value is not None)
    return f"{AT_BEST} in %, {HOW}: {said}." if said else ""


def joined(cell: Sequence[str]) -> str:
    """Return a cell on one line, as "41.0 (38.2–43.9)"."""
    first, *rest = cell
    return f"{first} ({'; '.join(filter(None, rest))})" if any(rest) else first


def interval(estimate: Mapping[str, float] | None) -> str:
    """Return a mean and its ends on one line."""
    return joined(share_cell(estimate))


def terminal_table(title: str, columns: Sequence[str], caption: str = "") -> Table:
    """Return a table without rows that fits 80 columns: the unit goes under the name, as the ends under a mean."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True, show_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.caption = Text(caption) if caption else None
    table.add_column(columns[0], min_width=12, overflow="fold")
    for column in columns[1:]:
        lines = column.split(", ") if ", " in column else column.rsplit(" ", 1)
        table.add_column("\n".join(lines), justify="right", no_wrap=True)
    return table


def stacked(cells: Iterable[Sequence[str]]) -> list[Text]:
    """Return cells with their parts under one another, as text: brackets in a name can be read as markup."""
    # the longest verdict takes two lines, or 80 columns would not hold the table
    return [Text("\n".join(filter(None, cell)).replace("difference shown", "difference\nshown")) for cell in cells]


def markdown_table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[Cell]]]) -> str:
    """Return (name, cells) of every row as a Markdown table, without a line end."""
    lines = [columns, ("---", *("---:" for _ in columns[1:]))]
    lines += [[part.replace("|", "\\|") for part in (name, *map(joined, cells))] for name, cells in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def results_table(rows: Sequence[Row]) -> Table:
    """Return the rows in their order as a table for the terminal, with a gap between groups."""
    best = at_best_line([(row["name"], row.get("at_best")) for row in rows])
    table = terminal_table("Results", COLUMNS, "\n".join(filter(None, (best, CAPTION))))
    table.title_justify = "center"
    for row, following in zip(rows, [*rows[1:], None]):
        ends_group = following is not None and following["group"] != row["group"]
        style = "bold" if row["group"] == "scale" else "dim" if row.get("not_run") else None
        table.add_row(*stacked([(row["name"],), *result_cells(row)]), style=style, end_section=ends_group)
    return table


def results_markdown(rows: Sequence[Row]) -> str:
    """Return the rows in their order as a Markdown table with its caption, ending in a line end."""
    lines = [(row["name"], [*result_cells(row), at_best_cell(row.get("at_best"))]) for row in rows]
    return f"{markdown_table([*COLUMNS, f'{AT_BEST} %'], lines)}\n\n{CAPTION} {AT_BEST}: {HOW}.\n"


def result_cells(row: Row) -> list[Cell]:
    """The cells of every column after the name."""
    if row.get("not_run"):
        return [(NOT_RUN,), *((ABSENT,) for _ in COLUMNS[2:])]
    forms = (("truncated", percent), ("entropy", "{:.2f}".format), ("tokens", "{:.1f}".format))
    return [
        share_cell(row.get("accuracy")),
        difference_cell(row.get("versus_lora")),
        share_cell(row.get("retention")),
        *((or_absent(row.get(key), show),) for key, show in forms),
    ]


def place_of(path: str) -> tuple[int | None, str]:
    """Return the layer and kind of a module: the first whole number in its path, if there is one, and the last name."""
    number = re.search(r"(?<![^.])\d+(?![^.])", path)
    return (int(number[0]) if number else None), path.rsplit(".", 1)[-1]
