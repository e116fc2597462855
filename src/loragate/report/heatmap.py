"""Scores over a grid of ranges, as a figure: one square per range [L, U], coloured by its distance from the adapter.

A square says its mean and half the width of its 95 % interval. A dot marks what is not told apart from the adapter after
Holm's adjustment; a frame marks the cell that was chosen on the probe, a dashed one the best on the test set. Ranges that
form no grid stand in one column. Plain data comes in (the record of `loragate sweep`); nothing is computed but the drawing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loragate.display import percent, points
from loragate.report.figures import drawn

COLOURS = "PuOr"  # orange is worse than the adapter, purple better; told apart by all common kinds of colour vision
CHOSEN, ORACLE = "#000000", "#009E73"
LEAST_REACH = 0.05


def heat_maps(record: Mapping[str, Any]) -> dict[str, Callable[[str | Path], None]]:
    """{file name without suffix: draws it to a path}, one per adapter and objective of a sweep's record."""
    drawings: dict[str, Callable[[str | Path], None]] = {}
    adapters = {cell["adapter"] for cell in record["cells"]}
    objectives = {cell["objective"] for cell in record["cells"]}
    for adapter, objective, choice in map_groups(record):
        parts = [adapter if len(adapters) > 1 else "", objective if len(objectives) > 1 else ""]
        name = "_".join(["heatmap", *filter(None, parts)])
        drawings[name] = partial(heat_map, map_data(record, choice, adapter, objective))
    return drawings


def map_groups(record: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(adapter, objective, choice) of every map of a sweep's record; without adapters that were not scored yet."""
    choices = {choice["adapter"]: choice for choice in record["choices"]}
    groups = dict.fromkeys((cell["adapter"], cell["objective"]) for cell in record["cells"] if cell["complete"])
    return [(adapter, objective, choices[adapter]) for adapter, objective in groups if adapter in choices]


def heat_map(data: Mapping[str, Any], path: str | Path) -> None:
    """Draw one map.

    `data` is {"title", "caption", "adapter": mean, "cells": [{"lower", "upper", "mean", "low", "high", "differs", "chosen",
    "oracle"}]}; means and bounds are shares of 1.
    Raises `ConfigError` for a file name of another kind than png, svg or pdf.
    """
    cells = list(data["cells"])
    columns, rows, places = layout_of(cells)
    differences = np.full((len(rows), len(columns)), np.nan)
    for cell, (row, column) in zip(cells, places, strict=True):
        differences[row, column] = cell["mean"] - data["adapter"]
    reach = 1.3 * max(LEAST_REACH, float(np.nanmax(np.abs(differences))))  # the darkest shades hide frames
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    width = max(1.3 + 1.02 * len(columns), 5.6)
    caption = textwrap.fill(data["caption"], int(width * 13.5))
    height = 1.5 + 0.72 * len(rows) + 0.17 * (caption.count("\n") + 1)
    with drawn(path, width, height, {"axes.spines.left": False, "axes.spines.bottom": False}) as figure:
        axes = figure.subplots()
        axes.patch.set(facecolor="white", hatch="////", edgecolor="#DDDDDD")  # seen where a range was not tried
        image = axes.imshow(100 * differences, cmap=COLOURS, norm=Normalize(-100 * reach, 100 * reach), aspect="auto")
        for cell, (row, column) in zip(cells, places, strict=True):
            ink = "white" if abs(differences[row, column]) > 0.6 * reach else "black"
            half = (cell["high"] - cell["low"]) / 2
            axes.text(column, row - 0.09, percent(cell["mean"]), ha="center", va="center", color=ink, fontsize=11)
            axes.text(column, row + 0.2, f"±{percent(half)}", ha="center", va="center", color=ink, fontsize=7.5)
            if not cell["differs"]:
                axes.plot(column + (0.38 if len(columns) > 1 else 0.47), row - 0.35, "o", markersize=3.2, color=ink)
            for wanted, colour, dashes, inset, thick in (
                ("chosen", CHOSEN, "-", 0.06, 2.4),
                ("oracle", ORACLE, (0, (3, 1.6)), 0.13, 2.0),
            ):
                if cell[wanted]:
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
        axes.set_title(textwrap.fill(data["title"], int(width * 9)))
        bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=max(12, 4 * len(rows)))
        bar.set_label("points above the adapter")
        bar.outline.set_visible(False)
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color="#333333")


def map_data(record: Mapping[str, Any], choice: Mapping[str, Any], adapter: str, objective: str) -> dict[str, Any]:
    """What `heat_map` draws, out of the record of a sweep (probe scores) or of its evaluation on a suite."""
    of = "score" if "suite" in record else "probe"
    oracle = choice.get("oracle")
    wanted = (adapter, objective, True)  # a cell that lacks a seed is not compared
    mine = [cell for cell in record["cells"] if (cell["adapter"], cell["objective"], cell["complete"]) == wanted]
    cells = [
        {
            "lower": cell["lower"],
            "upper": cell["upper"],
            **{key: cell[of][key] for key in ("mean", "low", "high")},
            "differs": cell["differs"],
            "chosen": choice["accepted"] and cell["name"] == choice["picked"],
            "oracle": oracle is not None and cell["name"] == oracle["name"],
        }
        for cell in mine
    ]
    own = choice[f"adapter_{of}"]
    seeds = len(record["seeds"])
    questions, samples = record["questions"], record["samples"]
    size = f"{questions} questions × {samples} samples" + (f" × {seeds} seeds" if seeds > 1 else "")
    what = "Probe" if of == "probe" else f"{record['suite'].capitalize()}, mean over {', '.join(record['tasks'])}:"
    parts = [
        f"{what} Avg@{samples}, %, and half of its 95 % interval over questions; n = {questions * samples * seeds:,} answers "
        f"per cell ({size}).",
        "Dot: no difference from the adapter shown (paired by question, Holm's adjustment over "
        f"{record['comparisons']} cells).",
    ]
    if any(cell["chosen"] for cell in cells):
        parts.append("Frame: chosen on the probe; its own mean is optimistic.")
    elif of == "probe" and not choice["accepted"]:
        parts.append("No cell is above the adapter, which remains.")
    test = "the test set" if of == "probe" else "these questions themselves"
    if oracle is not None and any(cell["oracle"] for cell in cells):
        regret = oracle["regret"]
        parts.append(
            f"Dashed: best on {test} (oracle, not used to choose)"
            + (
                f"; regret {points(regret['mean']).lstrip('+')} points ({points(regret['low'])} to {points(regret['high'])})."
                if regret
                else "; its own mean is optimistic."
            )
        )
    elif oracle is not None and oracle["name"] == "adapter":
        parts.append(f"On {test} no cell is above the adapter (oracle).")
    several = len({cell["adapter"] for cell in record["cells"]}) > 1
    scored = "probe" if of == "probe" else record["suite"]
    title = f"{adapter}: {scored} score by range" if several else f"{scored.capitalize()} score by range"
    title += "" if objective == "entropy" else f", {objective}"
    interval = f"{percent(own['mean'])} % ({percent(own['low'])} to {percent(own['high'])})"
    return {
        "title": f"{title}; the adapter itself has {interval}",
        "caption": " ".join(parts),
        "adapter": own["mean"],
        "cells": cells,
    }


def layout_of(cells: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str], list[tuple[int, int]]]:
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
