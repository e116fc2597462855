"""What was selected, and what the alternatives score, from the record of a selection: a sentence, a table, a map of the ranges.

`read_selection` makes a view of a selection, or of the cells of a sweep on a suite; everything else is made of views. A square of
the map says the mean of a range [L, U] and half of its 95 % interval, coloured by its distance from the adapter. A dot marks an
interval of the paired difference that contains 0; a frame marks the recommended variant, a dashed one the best on a test set (an
oracle, which was not used to choose). Ranges that form no grid stand in one column.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loragate.display import percent, points
from loragate.files import write_text
from loragate.report.figures import Draw, Target, drawn
from loragate.report.table import ABSENT, Cell, Line, Table, interval, or_absent, share_cell
from loragate.selection_record import SelectionRecord, is_selection, read_selection_record

Record = Mapping[str, Any]
COLUMNS = ("Variant", "Score %", "vs adapter, points", "Retention %")
ROWS = 15  # of a table on a terminal
SHOWN = 4  # alternatives in a sentence
COLOURS = "PuOr"  # orange is worse than the adapter, purple better; told apart by all common kinds of colour vision
CHOSEN, ORACLE = "#000000", "#009E73"
LEAST_REACH = 0.05
RANGE = re.compile(r"\[(-?[\d.]+), ?(-?[\d.]+)\]")


@dataclass(frozen=True)
class ScoredVariant:
    """One variant: {mean, low, high} of its score and of its paired difference to the adapter, shares of 1."""

    label: str
    score: Record
    difference: Record | None = None
    retention: float | None = None

    @property
    def range(self) -> tuple[float, float] | None:
        """[L, U] of gates, as the label has it."""
        found = RANGE.search(self.label)
        return (float(found[1]), float(found[2])) if found else None

    @property
    def group(self) -> str:
        """Whose colour it has."""
        return "scale" if self.range else "control" if self.label.startswith("base") else "baseline"


@dataclass(frozen=True)
class SelectionView:
    """A selection as it is shown.

    Attributes:
        label: of the recommended variant.
        advice: what to do, as the command said it.
        score: what that scores; empty where it is not known.
        alternatives: what the others score, a sentence.
        variants: all that were scored, the recommended one among them.
        on: what they were scored on, such as "the dev set".
        reason: why this one, a sentence.
        rule: the rule in words.
        sentences: all of it.
        oracle: label of the best on a test set, and a sentence on it.
    """

    label: str
    advice: str
    score: str
    alternatives: str
    sentences: tuple[str, ...]
    variants: tuple[ScoredVariant, ...]
    on: str = "the dev set"
    questions: int | None = None
    reason: str = ""
    rule: str = ""
    oracle: tuple[str, str] = ("", "")

    @property
    def adapter(self) -> ScoredVariant | None:
        """The plain adapter, first of its variants."""
        return next((one for one in self.variants if one.label.startswith("adapter")), None)

    @property
    def size(self) -> str:
        """ "the dev set (64 questions)"."""
        return self.on + (f" ({self.questions} questions)" if self.questions else "")


def best_of(variants: Sequence[ScoredVariant], most: int | None) -> list[ScoredVariant]:
    """From the best down, the first `most` of them and the best of every group: adapter, base and gates."""
    ordered = sorted(variants, key=lambda one: -one.score["mean"])  # of equal ones as in the record
    if most is None:
        return ordered
    best = {one.group: one for one in reversed(ordered)}
    kept = [*ordered[:most], *(one for one in best.values() if one not in ordered[:most])]
    return sorted(kept, key=ordered.index)


def read_selection(record: Record | SelectionRecord | None) -> list[SelectionView]:
    """The selections that a record tells of; none in a record without scores.

    Read are `selection.json`, which an artifact keeps as evidence too, and the cells of a sweep on a suite (`cells_*.json`).
    """
    if isinstance(record, SelectionRecord):
        return [_of_record(record)]
    if record and "cells" in record:
        return [_of_cells(record)]
    return [_of_record(read_selection_record(record))] if record and is_selection(record) else []


def _of_record(record: SelectionRecord) -> SelectionView:
    """What was selected on a dev set."""
    variants = tuple(
        ScoredVariant(
            one.label,
            {"mean": one.mean, "low": one.low, "high": one.high},
            None if one.difference is None else asdict(one.difference),
            None if one.retention is None else one.retention.mean,
        )
        for one in record.variants
    )
    found = record.recommendation
    return SelectionView(
        found.label,
        found.advice(),
        record.score(),
        record.alternatives(),
        tuple(record.sentences()),
        variants,
        questions=record.dev.questions,
        reason=f"Why: {found.reason}.",
        rule=record.rule,
    )


def _of_cells(record: Record) -> SelectionView:
    """The cells of a sweep on a suite, where the best one is an oracle."""
    variants = [ScoredVariant("adapter", record["adapter_score"])]
    variants += [ScoredVariant(cell["name"], cell["score"], cell["difference"]) for cell in record["cells"]]
    oracle = record["oracle"]
    said = f"Highest on {record['suite']}: {oracle['name']}, an oracle that was not used to choose; its mean is optimistic."
    if regret := oracle["regret"]:
        said += f" The choice lies {percent(regret['mean'])} points below it there."
    label = record["picked"] or "adapter"
    others = [one for one in variants if one.label != label]
    shown = best_of(others, SHOWN)
    listed = ", ".join(f"{one.label} {percent(one.score['mean'])} %" for one in shown)
    more = f", and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
    alternatives = f"Alternatives: {listed}{more}." if listed else ""
    on, questions = f"{record['suite']}, mean over {len(record['tasks'])} tasks", record["questions"]
    own = next(one.score for one in variants if one.label == label)
    advice = f"The dev set chose the gates {label}" if record["picked"] else "The dev set chose no gates: the adapter"
    score = f"{percent(own['mean'])} % ({percent(own['low'])}–{percent(own['high'])}) on {on} ({questions} questions)"
    sentences = tuple(filter(None, (f"{advice}: {score}.", alternatives, said)))
    return SelectionView(
        label, advice, score, alternatives, sentences, tuple(variants), on, questions, oracle=(oracle["name"], said)
    )


def selection_table(view: SelectionView, most: int | None = ROWS) -> Table:
    """The adapter, then the others from the best down, the first `most` of them."""
    others = [one for one in view.variants if one is not view.adapter]
    shown = best_of(others, most)
    lines = []
    for one in [*([view.adapter] if view.adapter else []), *shown]:
        difference = one.difference
        versus: Cell = (ABSENT,)
        if difference is not None:
            z = f"z = {difference['z']:.1f}" if difference.get("z") is not None else ""
            versus = (points(difference["mean"]), f"{points(difference['low'])} to {points(difference['high'])}", z)
        chosen = one.label == view.label
        name = f"{one.label} (recommended)" if chosen else one.label
        cells = [share_cell(one.score), versus, (or_absent(one.retention, percent),)]
        lines.append(Line(name, cells, one.group, one.score))
    left = f"{len(others) - len(shown)} more are in the files." if len(others) > len(shown) else ""
    caption = (
        "Ranges are 95 % intervals over questions; vs adapter is paired by question. The best of many is optimistic."
    )
    text = " ".join(filter(None, (caption, view.rule, left)))
    columns, lines = _without_empty(COLUMNS, lines)
    return Table(f"Scores on {view.size}", columns, lines, text)


def _without_empty(columns: Sequence[str], lines: list[Line]) -> tuple[Sequence[str], list[Line]]:
    """Without the last column, retention, where no line has it."""
    if any(line.cells[-1] != (ABSENT,) for line in lines):
        return columns, lines
    return columns[:-1], [Line(line.name, line.cells[:-1], line.group, line.score) for line in lines]


def write_selection(record: Record | SelectionRecord, folder: Path) -> list[str]:
    """Write the table as `selection.md` and the maps of the ranges as .png and .svg; returns the names of the maps."""
    parts = ["# Selection"]
    for view in read_selection(record):
        parts += [selection_table(view, most=None).markdown(), *view.sentences]
    write_text(folder / "selection.md", "\n\n".join(parts) + "\n")
    maps = heat_maps(record)
    for name, draw in maps.items():
        for suffix in ("png", "svg"):
            draw(folder / f"{name}.{suffix}")
    return list(maps)


def heat_maps(record: Record | SelectionRecord | None) -> dict[str, Draw]:
    """{file name without suffix: draws it}: of variants whose labels differ in the range alone, where there are two or more."""
    drawings: dict[str, Draw] = {}
    for view in read_selection(record):
        alike: dict[str, dict[tuple[float, float], ScoredVariant]] = {}
        for one in view.variants:
            if one.range:
                alike.setdefault(" ".join(RANGE.sub("", one.label).split()), {})[one.range] = one
        for kind, cells in alike.items():
            if view.adapter and len(cells) > 1:
                suffix = "_".join(re.findall(r"[\w.]+", kind)) if len(alike) > 1 else ""
                drawings["_".join(filter(None, ("heatmap", suffix)))] = partial(heat_map, view, cells, kind)
    return drawings


def heat_map(view: SelectionView, cells: Mapping[tuple[float, float], ScoredVariant], kind: str, to: Target) -> None:
    """Draw the scores by range; `kind` is what the labels have in common."""
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    assert view.adapter is not None
    columns, rows, places = layout_of(list(cells))
    own = view.adapter.score
    differences = np.full((len(rows), len(columns)), np.nan)
    for cell, place in zip(cells.values(), places, strict=True):
        differences[place] = cell.score["mean"] - own["mean"]
    reach = 1.3 * max(LEAST_REACH, float(np.nanmax(np.abs(differences))))  # the darkest shades hide frames
    # inches; a line of the caption has 13.5 characters an inch, the title 9
    width = max(1.3 + 1.02 * len(columns), 5.6)
    labels = [one.label for one in cells.values()]
    parts = [f"Score on {view.size}, %, and half of its 95 % interval over questions."]
    parts += ["Dot: the interval of the paired difference to the adapter contains 0."]
    parts += ["Frame: recommended; the mean of the best is optimistic."] * (view.label in labels)
    parts += ["Dashed: best on the test (oracle, not used to choose)."] * (view.oracle[0] in labels)
    caption = textwrap.fill(" ".join(parts), int(width * 13.5))
    height = 1.5 + 0.72 * len(rows) + 0.17 * (caption.count("\n") + 1)
    with drawn(to, width, height, {"axes.spines.left": False, "axes.spines.bottom": False}) as figure:
        axes = figure.subplots()
        axes.patch.set(facecolor="white", hatch="////", edgecolor="#DDDDDD")  # seen where a range was not tried
        image = axes.imshow(100 * differences, cmap=COLOURS, norm=Normalize(-100 * reach, 100 * reach), aspect="auto")
        for cell, (row, column) in zip(cells.values(), places, strict=True):
            ink = "white" if abs(differences[row, column]) > 0.6 * reach else "black"
            half = (cell.score["high"] - cell.score["low"]) / 2
            axes.text(column, row - 0.09, percent(cell.score["mean"]), ha="center", va="center", color=ink, fontsize=11)
            axes.text(column, row + 0.2, f"±{percent(half)}", ha="center", va="center", color=ink, fontsize=7.5)
            versus = cell.difference
            if versus is not None and versus["low"] <= 0 <= versus["high"]:
                axes.plot(column + (0.38 if len(columns) > 1 else 0.47), row - 0.35, "o", markersize=3.2, color=ink)
            for wanted, colour, dashes, inset, thick in (
                (view.label, CHOSEN, "-", 0.06, 2.4),
                (view.oracle[0], ORACLE, (0, (3, 1.6)), 0.13, 2.0),
            ):
                if cell.label == wanted:
                    across = inset * (1 if len(columns) > 1 else 0.2)  # a lone column is wide
                    corner = (column - 0.5 + across, row - 0.5 + inset)
                    frame = Rectangle(corner, 1 - 2 * across, 1 - 2 * inset, fill=False, edgecolor=colour)
                    frame.set(linestyle=dashes, linewidth=thick)
                    frame.set_path_effects([withStroke(linewidth=thick + 2.4, foreground="white")])
                    axes.add_patch(frame)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        if len(columns) > 1:
            axes.set_xlabel("lower bound L")
            axes.set_ylabel("upper bound U")
        axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="both", length=0)
        axes.set_title(
            textwrap.fill(
                f"Score by range{f' ({kind})' if kind else ''}; the adapter itself has {interval(own)} %",
                int(width * 9),
            )
        )
        bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=max(12, 4 * len(rows)))
        bar.set_label("points above the adapter")
        bar.outline.set_visible(False)
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8)


def layout_of(ranges: Sequence[tuple[float, float]]) -> tuple[list[str], list[str], list[tuple[int, int]]]:
    """Column labels, row labels and the (row, column) of each range: a grid where the ranges fill half of one."""

    def number(value: float) -> str:
        return f"{value:g}".replace("-", "−")

    lowers, uppers = sorted({lower for lower, _ in ranges}), sorted({upper for _, upper in ranges}, reverse=True)
    if len(ranges) > 3 and len(lowers) * len(uppers) <= 2 * len(ranges):
        places = [(uppers.index(upper), lowers.index(lower)) for lower, upper in ranges]  # up is up
        return [number(value) for value in lowers], [number(value) for value in uppers], places
    order = sorted(ranges)
    rows = [f"[{number(lower)}, {number(upper)}]" for lower, upper in order]
    return [""], rows, [(order.index(one), 0) for one in ranges]
