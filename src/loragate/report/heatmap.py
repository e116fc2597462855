"""Scores over a grid of ranges, as a figure: one square per range [L, U], coloured by its distance from the adapter.

A square says its mean and half the width of its 95 % interval. A dot marks what is not told apart from the adapter after
Holm's adjustment; a frame marks the cell that was chosen on the probe, a dashed one the best on the test set. Ranges that
form no grid stand in one column. Plain data comes in: the record of `loragate sweep` (probe scores), or that of its evaluation
on a suite. Nothing is computed but the drawing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from loragate.display import percent
from loragate.report.figures import Draw, Target, drawn
from loragate.report.table import interval

Record = Mapping[str, Any]
COLOURS = "PuOr"  # orange is worse than the adapter, purple better; told apart by all common kinds of colour vision
CHOSEN, ORACLE = "#000000", "#009E73"
LEAST_REACH = 0.05


def heat_maps(record: Record) -> dict[str, Draw]:
    """{file name without suffix: draws it}, one per objective of a sweep's record; none before the adapter was scored."""
    several = len({cell["objective"] for cell in record["cells"]}) > 1
    drawings: dict[str, Draw] = {}
    for choice in record["choices"]:
        for objective in dict.fromkeys(cell["objective"] for cell in record["cells"] if cell["complete"]):
            name = f"heatmap_{objective}" if several else "heatmap"
            drawings[name] = partial(heat_map, record, choice, objective)
    return drawings


def heat_map(record: Record, choice: Record, objective: str, to: Target) -> None:
    """Draw the cells of one objective; one that lacks a seed is not compared."""
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    of = "score" if "suite" in record else "probe"
    cells = [cell for cell in record["cells"] if cell["objective"] == objective and cell["complete"]]
    oracle = choice.get("oracle") or {}
    marked = {"chosen": choice["picked"] if choice["accepted"] else None, "oracle": oracle.get("name")}
    columns, rows, places = layout_of(cells)
    own = choice[f"adapter_{of}"]
    differences = np.full((len(rows), len(columns)), np.nan)
    for cell, (row, column) in zip(cells, places, strict=True):
        differences[row, column] = cell[of]["mean"] - own["mean"]
    reach = 1.3 * max(LEAST_REACH, float(np.nanmax(np.abs(differences))))  # the darkest shades hide frames
    width = max(1.3 + 1.02 * len(columns), 5.6)
    caption = textwrap.fill(_caption(record, choice, of, {cell["name"] for cell in cells}), int(width * 13.5))
    title = "Probe" if of == "probe" else record["suite"].capitalize()
    title += " score by range" + ("" if objective == "entropy" else f", {objective}")
    height = 1.5 + 0.72 * len(rows) + 0.17 * (caption.count("\n") + 1)
    with drawn(to, width, height, {"axes.spines.left": False, "axes.spines.bottom": False}) as figure:
        axes = figure.subplots()
        axes.patch.set(facecolor="white", hatch="////", edgecolor="#DDDDDD")  # seen where a range was not tried
        image = axes.imshow(100 * differences, cmap=COLOURS, norm=Normalize(-100 * reach, 100 * reach), aspect="auto")
        for cell, (row, column) in zip(cells, places, strict=True):
            ink = "white" if abs(differences[row, column]) > 0.6 * reach else "black"
            half = (cell[of]["high"] - cell[of]["low"]) / 2
            axes.text(column, row - 0.09, percent(cell[of]["mean"]), ha="center", va="center", color=ink, fontsize=11)
            axes.text(column, row + 0.2, f"±{percent(half)}", ha="center", va="center", color=ink, fontsize=7.5)
            if not cell["differs"]:
                axes.plot(column + (0.38 if len(columns) > 1 else 0.47), row - 0.35, "o", markersize=3.2, color=ink)
            for wanted, colour, dashes, inset, thick in (
                ("chosen", CHOSEN, "-", 0.06, 2.4),
                ("oracle", ORACLE, (0, (3, 1.6)), 0.13, 2.0),
            ):
                if cell["name"] == marked[wanted]:
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
        axes.set_title(textwrap.fill(f"{title}; the adapter itself has {interval(own)} %", int(width * 9)))
        bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=max(12, 4 * len(rows)))
        bar.set_label("points above the adapter")
        bar.outline.set_visible(False)
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8)


def _caption(record: Record, choice: Record, of: str, names: set[str]) -> str:
    """What a square says, and what its marks mean where there are any; `cells.choice_sentence` says what follows."""
    seeds, questions, samples = len(record["seeds"]), record["questions"], record["samples"]
    size = f"{questions} questions × {samples} samples" + (f" × {seeds} seeds" if seeds > 1 else "")
    what = "Probe" if of == "probe" else f"{record['suite'].capitalize()}, mean over {', '.join(record['tasks'])}:"
    parts = [
        f"{what} Avg@{samples}, %, and half of its 95 % interval over questions; n = {questions * samples * seeds:,} answers "
        f"per cell ({size}).",
        "Dot: no difference from the adapter shown (paired by question, Holm's adjustment over "
        f"{record['comparisons']} cells).",
    ]
    if choice["accepted"] and choice["picked"] in names:
        parts.append("Frame: chosen on the probe; its own mean is optimistic.")
    if (choice.get("oracle") or {}).get("name") in names:
        test = "the test set" if of == "probe" else "these questions themselves, so its own mean is optimistic"
        parts.append(f"Dashed: best on {test} (oracle, not used to choose).")
    return " ".join(parts)


def layout_of(cells: Sequence[Record]) -> tuple[list[str], list[str], list[tuple[int, int]]]:
    """Column labels, row labels and the (row, column) of each cell: a grid where the ranges fill half of one."""
    lowers = sorted({cell["lower"] for cell in cells})
    uppers = sorted({cell["upper"] for cell in cells})
    if len(cells) > 3 and len(lowers) * len(uppers) <= 2 * len(cells):
        uppers.reverse()  # up is up
        places = [(uppers.index(cell["upper"]), lowers.index(cell["lower"])) for cell in cells]
        return [_number(value) for value in lowers], [_number(value) for value in uppers], places
    order = sorted({(cell["lower"], cell["upper"]) for cell in cells})
    rows = [f"[{_number(lower)}, {_number(upper)}]" for lower, upper in order]
    return [""], rows, [(order.index((cell["lower"], cell["upper"])), 0) for cell in cells]


def _number(value: float) -> str:
    return f"{value:g}".replace("-", "−")
