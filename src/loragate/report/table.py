"""Results as a table, for the terminal and for Markdown.

A row is a plain dictionary, written by whoever measured it:

    {"name": str, "group": "control" | "baseline" | "scale" | "intervention",
     "accuracy": {"mean", "low", "high"} | None, "retention": {"mean", "low", "high"} | None,
     "truncated": float, "entropy": float, "tokens": float,
     "versus_lora": {"mean", "low", "high", "p"} | None, "not_run": bool}

Accuracy, retention, truncation and differences are shares of 1, entropy is in nats per token, tokens are per answer; None
stands for what was not measured. The table shows what it is given: a control that was not run has its line and says so,
so that its absence is seen. What the numbers mean is `reading.py`'s business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

Row = Mapping[str, Any]

NOT_RUN = "not run"
ABSENT = "–"
COLUMNS = ("Method", "Accuracy %", "vs LoRA, points", "p", "Retention %", "Truncated %", "Entropy", "Tokens")
CAPTION = (
    "[low, high] is a 95 % interval over questions; differences are paired by question. "
    "Truncated: answers cut off at the length limit. Entropy: nats per token."
)


def percent(share: float) -> str:
    """Return a share of 1 as a percentage with one decimal, without its sign."""
    return f"{_tenths(share):.1f}"


def points(share: float) -> str:
    """Return a difference of shares in percentage points, signed."""
    value = _tenths(share)
    return f"{value:+.1f}" if value else "0.0"


def p_value(p: float) -> str:
    """Return a p-value with three decimals, or a bound where these would show zero."""
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def results_table(rows: Sequence[Row]) -> Table:
    """Return the rows in their order as a table for the terminal, with a rule between groups."""
    table = Table(title="Results", caption=Text(CAPTION), caption_justify="left")
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row, following in zip(rows, [*rows[1:], None]):
        ends_group = following is not None and following["group"] != row["group"]
        style = "bold" if row["group"] == "scale" else "dim" if row.get("not_run") else None
        # Text, because brackets in a plain string can be read as markup.
        table.add_row(*(Text(cell) for cell in _cells(row)), style=style, end_section=ends_group)
    return table


def results_markdown(rows: Sequence[Row]) -> str:
    """Return the rows in their order as a Markdown table with its caption, ending in a line end."""
    lines = [COLUMNS, ("---", *("---:" for _ in COLUMNS[1:])), *(_cells(row) for row in rows)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return f"{table}\n\n{CAPTION}\n"


def _cells(row: Row) -> tuple[str, ...]:
    if row.get("not_run"):
        return (row["name"], NOT_RUN, *(ABSENT for _ in COLUMNS[2:]))
    versus = row.get("versus_lora")
    return (
        row["name"],
        _interval(row.get("accuracy"), percent),
        _interval(versus, points),
        ABSENT if versus is None else p_value(versus["p"]),
        _interval(row.get("retention"), percent),
        _number(row.get("truncated"), percent),
        _number(row.get("entropy"), "{:.2f}".format),
        _number(row.get("tokens"), "{:.1f}".format),
    )


def _interval(value: Mapping[str, float] | None, show: Any) -> str:
    return ABSENT if value is None else f"{show(value['mean'])} [{show(value['low'])}, {show(value['high'])}]"


def _number(value: float | None, show: Any) -> str:
    return ABSENT if value is None else show(value)


def _tenths(share: float) -> float:
    return round(100 * share, 1) + 0.0  # adding zero turns -0.0 into 0.0
