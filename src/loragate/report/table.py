"""Tables of results, each described once and shown in three ways: on a terminal, as Markdown, and on the report's page.

A cell is a tuple of parts, the figure first, then what stands under it on a terminal and behind it in brackets elsewhere; only
a terminal breaks lines at the line ends in a part or in a column's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable
from rich.text import Text

from loragate.display import format_points, percent, temperature_label
from loragate.printable import escape_for_terminal

Cell = tuple[str, ...]

ABSENT = "–"
GROUP_OF = {"base": "control", "adapter": "baseline", "scale": "baseline", "gated": "scale", "gates": "scale"}
"""{weights, as evaluations and selections name them: the group that a `Line` is of, whatever the temperature}"""
BEST = "At its best temperature %"
BEST_HOW = "At its best temperature: each picked on one half of the questions and scored on the other."


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Attributes:
        name: the first column.
        cells: the other ones.
        group: "control", "baseline", "scale" (bold) or "intervention": the colour of the page's bar; empty for none.
        score: {mean, low, high} in shares of 1 where the first cell is a score, which the page draws as a bar.
    """

    name: str
    cells: Sequence[Cell]
    group: str = ""
    score: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        columns: their names, that of the lines' names first; a unit follows its name after a comma or a space.
        caption: what stands below it, or above on the page.
        hidden_on_terminal: places of columns that a terminal of 80 has no room for.
        terminal_note: what a terminal shows above the caption in their place.
        collapsed_label: what a long table says on the page while it is closed; it is not shown on a terminal.
    """

    kind: ClassVar[str] = "table"
    title: str
    columns: Sequence[str]
    lines: Sequence[Line]
    caption: str = ""
    hidden_on_terminal: tuple[int, ...] = ()
    terminal_note: str = ""
    collapsed_label: str = ""

    @property
    def bars(self) -> bool:
        """Whether the page draws the first cells as bars."""
        return any(line.score for line in self.lines)

    def __rich__(self) -> RichTable:
        """For a terminal of 80 columns: the unit goes under the name, and what belongs to a figure under the figure."""
        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True, show_edge=False)
        table.title_justify = table.caption_justify = "left"
        # text, as brackets in a string can be read as markup
        table.title = Text(escape_for_terminal(self.title), "table.title") if self.title else None
        below = "\n".join(filter(None, (self.terminal_note, self.caption)))
        table.caption = Text(escape_for_terminal(below)) if below else None
        table.add_column(self.columns[0], min_width=12, overflow="fold")
        shown = [place for place in range(1, len(self.columns)) if place not in self.hidden_on_terminal]
        for name in (self.columns[place] for place in shown):
            parts = name.split(", ") if ", " in name else name.rsplit(" ", 1)
            table.add_column("\n".join(parts), justify="right", no_wrap=True)
        for line in self.lines:
            cells = ["\n".join(filter(None, line.cells[place - 1])) for place in shown]
            style = "bold" if line.group == "scale" else None
            texts = [Text(escape_for_terminal(cell)) for cell in (line.name, *cells)]
            table.add_row(*texts, style=style)
        return table

    def markdown(self) -> str:
        """Title, table and caption, without a line end."""
        lines = [self.columns, ["---", *("---:" for _ in self.columns[1:])]]
        lines += [[line.name, *map(format_cell, line.cells)] for line in self.lines]
        rows = [[part.replace("\n", " ").replace("|", "\\|") for part in line] for line in lines]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return "\n\n".join(filter(None, (f"### {self.title}", table, self.caption)))


def format_cell(cell: Sequence[str]) -> str:
    """Return a cell on one line, as "41.0 (38.2–43.9)"."""
    first, *rest = (part.replace("\n", " ") for part in cell)
    return f"{first} ({'; '.join(filter(None, rest))})" if any(rest) else first


def format_optional(value: Any, show: Callable[[Any], str]) -> str:
    """Return a value as `show` writes it, or the sign of what was not measured for None."""
    return ABSENT if value is None else show(value)


def share_cell(estimate: Mapping[str, float] | None) -> Cell:
    """Return a mean with its ends, shares of 1."""
    if estimate is None:
        return (ABSENT,)
    return percent(estimate["mean"]), f"{percent(estimate['low'])}–{percent(estimate['high'])}"


def difference_cell(
    versus: Mapping[str, float] | None, verdict: str | None = "", adjusted_p: float | None = None
) -> Cell:
    """Return a paired difference with the p that the verdict was made with, the ends that agree with it, and the verdict."""
    if versus is None:
        return (ABSENT,)
    p = versus["p"] if adjusted_p is None else adjusted_p
    said = {"better": "better", "worse": "worse"}.get(verdict or "", "not significant" if verdict else "")
    sign = "<0.001" if p < 0.001 else f"={p:.3f}"
    return f"{format_points(versus['mean'])}, p{sign}", ends_of(versus), said


def ends_of(versus: Mapping[str, float]) -> str:
    """Return "-1.2 to +3.4", the ends of an interval in points."""
    return f"{format_points(versus['low'])} to {format_points(versus['high'])}"


def with_best_scores(sheet: Table, values: Sequence[Mapping[str, Any] | None]) -> Table:
    """Return the table with a last column, what its lines score at their best temperatures, where any does.

    A terminal has no room for it and says it in a sentence.
    """
    if not any(values):
        return sheet
    cells = [_best_cell(value) for value in [*values, *[None] * (len(sheet.lines) - len(values))]]
    lines = [replace(line, cells=[*line.cells, cell]) for line, cell in zip(sheet.lines, cells, strict=True)]
    said = "; ".join(f"{line.name} {format_cell(cell)}" for line, cell in zip(lines, cells) if cell != (ABSENT,))
    return replace(
        sheet,
        columns=(*sheet.columns, BEST),
        lines=lines,
        hidden_on_terminal=(*sheet.hidden_on_terminal, len(sheet.columns)),
        terminal_note=f"{BEST}: {said}.",
        caption="\n".join(filter(None, (BEST_HOW, sheet.caption))),
    )


def _best_cell(value: Mapping[str, Any] | None) -> Cell:
    if value is None:
        return (ABSENT,)
    versus = value.get("comparison")
    gap = f"vs adapter {format_points(versus['mean'])}, {ends_of(versus)}" if versus else ""
    return (*share_cell(value["score"]), temperature_label(value["temperature"]), gap)
