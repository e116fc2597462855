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
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

NOT_RUN = "not run"
ABSENT = "–"
AT_BEST = "At its best temperature"
HOW = "each picked on one half of the questions and scored on the other"
COLUMNS = ("Method", "Accuracy %", "vs LoRA points", "Retention %", "Cut off %", "Entropy nats", "Tokens")
CAPTION = (
    "Ranges are 95 % intervals over questions; vs LoRA is paired by question. Cut off: answers that met the length limit. "
    "Entropy: per token. Tokens: per answer."
)


def percent(share: float) -> str:
    """Return a share of 1 as a percentage with one decimal, without its sign."""
    return f"{_tenths(share):.1f}"


def points(share: float) -> str:
    """Return a difference of shares in percentage points, signed."""
    value = _tenths(share)
    return f"{value:+.1f}" if value else "0.0"


def p_value(p: float) -> str:
    """Return a p-value behind its sign, with three decimals or as a bound where these would show zero."""
    return "<0.001" if p < 0.001 else f"={p:.3f}"


def interval(estimate: Mapping[str, float] | None) -> str:
    """Return a mean and its ends, as "41.0 (38.2–43.9)"."""
    figure, ends = share_cell(estimate)
    return f"{figure} ({ends})" if ends else figure


def or_absent(value: Any, show: Callable[[Any], str]) -> str:
    """Return a value as `show` writes it, or the sign of what was not measured for None."""
    return ABSENT if value is None else show(value)


def results_table(rows: Sequence[Row]) -> Table:
    """Return the rows in their order as a table for the terminal, with a gap between groups.

    Intervals stand under their means, and the best temperatures under the table, so that it fits a terminal of 80 columns.
    """
    table = Table(
        title="Results", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True, show_edge=False
    )
    best = at_best_line([(row["name"], row.get("at_best")) for row in rows])
    table.caption, table.caption_justify = Text("\n".join(filter(None, (best, CAPTION)))), "left"
    table.add_column(COLUMNS[0], min_width=12, overflow="fold")
    for column in COLUMNS[1:]:
        # The unit goes under the name.
        table.add_column("\n".join(column.rsplit(" ", 1)), justify="right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None]):
        ends_group = following is not None and following["group"] != row["group"]
        style = "bold" if row["group"] == "scale" else "dim" if row.get("not_run") else None
        # Text, because the brackets of a range in a name can be read as markup.
        cells = [Text("\n".join(filter(None, cell))) for cell in _cells(row)]
        table.add_row(Text(row["name"]), *cells, style=style, end_section=ends_group)
    return table


def results_markdown(rows: Sequence[Row]) -> str:
    """Return the rows in their order as a Markdown table with its caption, ending in a line end."""
    columns = (*COLUMNS, f"{AT_BEST} %")
    lines = [columns, ("---", *("---:" for _ in columns[1:]))]
    for row in rows:
        cells = [*_cells(row), at_best_cell(row.get("at_best"))]
        values = (f"{figure} ({'; '.join(more)})" if any(more) else figure for figure, *more in cells)
        lines.append((row["name"].replace("|", "\\|"), *values))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n{CAPTION} {AT_BEST}: {HOW}.\n"


def _cells(row: Row) -> list[tuple[str, str]]:
    """The figure and the interval, or "", of every column after the name."""
    if row.get("not_run"):
        return [(NOT_RUN, ""), *((ABSENT, "") for _ in COLUMNS[2:])]
    versus = row.get("versus_lora")
    return [
        share_cell(row.get("accuracy")),
        (ABSENT, "") if versus is None else _difference(versus),
        share_cell(row.get("retention")),
        *(
            (ABSENT if row.get(key) is None else show(row[key]), "")
            for key, show in (("truncated", percent), ("entropy", "{:.2f}".format), ("tokens", "{:.1f}".format))
        ),
    ]


def share_cell(value: Mapping[str, float] | None) -> tuple[str, str]:
    """Return a mean, and its ends apart from it."""
    if value is None:
        return ABSENT, ""
    return percent(value["mean"]), f"{percent(value['low'])}–{percent(value['high'])}"


def at_best_line(rows: Sequence[tuple[str, Mapping[str, Any] | None]]) -> str:
    """Return the scores of rows (name, value) at their best temperatures as one sentence; empty where there are none."""
    found = [(name, at_best_cell(value)) for name, value in rows if value is not None]
    said = "; ".join(f"{name} {figure} % ({', '.join(more)})" for name, (figure, *more) in found)
    return f"{AT_BEST}, {HOW}: {said}." if said else ""


def at_best_cell(value: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return a score at the best temperature, its ends, and that temperature."""
    if value is None:
        return ABSENT, ""
    heat = value["temperature"]
    return *share_cell(value["score"]), f"T = {heat:g}" if heat else "greedy"


def _difference(value: Mapping[str, float]) -> tuple[str, str]:
    return f"{points(value['mean'])}, p{p_value(value['p'])}", f"{points(value['low'])} to {points(value['high'])}"


def _tenths(share: float) -> float:
    return round(100 * share, 1) + 0.0  # adding zero turns -0.0 into 0.0
