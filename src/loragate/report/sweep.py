"""The results of a sweep, or of its evaluation on a suite, from their records (plain data): tables, sentences and heat maps.

A square of a heat map says the mean of a range [L, U] and half the width of its 95 % interval, coloured by its distance from the
adapter. A dot marks what is not shown to differ from the adapter after Holm's adjustment; a frame marks the cell that was chosen on
the dev set, a dashed one the best on the test set. Ranges that form no grid stand in one column.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loragate.display import percent, points
from loragate.files import write_text
from loragate.report.figures import Draw, Target, drawn
from loragate.report.table import ABSENT, Cell, Line, Table, interval, or_absent, p_value, share_cell

Record = Mapping[str, Any]
COLUMNS = ("Cell", "Dev %, greedy", "vs adapter, points", "Seeds %", "Entropy", "Ended %", "λ < 0 / > 1 %")
ROWS = 15
COLOURS = "PuOr"  # orange is worse than the adapter, purple better; told apart by all common kinds of colour vision
CHOSEN, ORACLE = "#000000", "#009E73"
LEAST_REACH = 0.05


def sweep_tables(record: Record, most: int | None = ROWS) -> list[Table]:
    """The adapter, then the cells from the best down, the first `most` of them."""
    cells = sorted(record["cells"], key=lambda cell: -cell["score"]["mean"])
    own = Line("adapter", [share_cell(record["adapter_score"]), *[(ABSENT,)] * 5])
    lines = [own, *(_line(cell, record) for cell in cells[:most])]
    title = f"{record['adapter']}: decoded greedily on {record['questions']} dev questions"
    left = f" {len(cells) - most} cells below are in the files." if most and len(cells) > most else ""
    return [Table(title, COLUMNS, lines, _caption(record) + left, wide=(3, 6))]


def write_sweep(record: Record, folder: Path) -> list[str]:
    """Write `sweep_results.md` and the heat maps, .png and .svg; returns the names of the maps."""
    write_text(folder / "sweep_results.md", sweep_markdown(record))
    maps = heat_maps(record)
    for name, draw in maps.items():
        for suffix in ("png", "svg"):
            draw(folder / f"{name}.{suffix}")
    return list(maps)


def sweep_markdown(record: Record) -> str:
    """All cells as Markdown, ending in a line end."""
    parts = ["# Sweep", *(table.markdown() for table in sweep_tables(record, most=None)), selection_sentence(record)]
    if record["diverged"]:
        reasons = "\n".join(f"- {name}: {why}" for name, why in record["diverged"].items())
        parts.append(f"Diverged, and out of the comparison:\n\n{reasons}")
    return "\n\n".join(parts) + "\n"


def selection_sentence(record: Record) -> str:
    """What a sweep recommends, and why; of an evaluation on a suite, what the best cell there says about that."""
    if "suite" in record:
        return _suite_sentence(record)
    found, dev = record["selection"]["recommendation"], record["selection"]["dev"]
    return (
        f"recommended: {found['label']}, {interval(found['score'])} % on {dev['questions']} dev questions; {found['reason']}. "
        "Ranges and temperatures were compared by one rule; the score of what was chosen is flattered by the choice."
    )


def suite_table(record: Record) -> Table:
    """The cells of one adapter on a suite, from the best down."""
    title = f"{record['adapter']}: {record['suite']}, mean over {len(record['tasks'])} tasks, Avg@{record['samples']}"
    lines = [Line("adapter", [share_cell(record["adapter_score"]), (ABSENT,)])]
    for cell in sorted(record["cells"], key=lambda cell: -cell["score"]["mean"]):
        lines.append(Line(cell["name"], [share_cell(cell["score"]), _versus(cell)], _group(cell, record)))
    return Table(title, ("Cell", "Score %", "vs adapter, points"), lines, selection_sentence(record))


def _suite_sentence(record: Record) -> str:
    """The best cell on a suite, read as an oracle, and the one that a dev set had chosen."""
    oracle, regret = record["oracle"], record["oracle"]["regret"]
    if oracle["name"] == "adapter":
        own = interval(oracle["score"])
        text = f"none of {len(record['cells'])} cells is above the adapter's {own} % on {record['suite']}."
    else:
        text = (
            f"highest on {record['suite']}: {oracle['name']} with {interval(oracle['score'])} %. It was found on these "
            "questions themselves, so its mean is optimistic (an oracle)."
        )
    if regret:
        text += (
            f" The dev set had chosen {record['picked']}, {points(regret['mean']).lstrip('+')} points below "
            f"({points(regret['low'])} to {points(regret['high'])})."
        )
    return text + f" p after Holm's adjustment over {record['comparisons']} cells."


def _line(cell: Record, record: Record) -> Line:
    gates, after = cell["gates"], cell["entropy_after"]
    seeds = ", ".join(percent(mean) for mean in cell["by_seed"]) if len(cell["by_seed"]) > 1 else ABSENT
    entropy = ABSENT if after is None else f"{cell['entropy_before']:.3f} → {after:.3f}"
    shares = f"{percent(gates['below_zero'])} / {percent(gates['above_one'])}" if "below_zero" in gates else ABSENT
    ended = or_absent(cell["ended"], percent)
    cells = [share_cell(cell["score"]), _versus(cell), (seeds,), (entropy,), (ended,), (shares,)]
    return Line(cell["name"], cells, _group(cell, record))


def _group(cell: Record, record: Record) -> str:
    return "scale" if cell["name"] == record["picked"] else ""


def _versus(cell: Record) -> Cell:
    """The difference to the adapter, with p."""
    versus = cell["difference"]
    return points(versus["mean"]), f"p{p_value(versus['p_holm'])}"


def _caption(record: Record) -> str:
    return (
        "Ranges are 95 % intervals over questions, seeds averaged within each; they say nothing about other adapters. vs "
        f"adapter: paired by question, p after Holm's adjustment over {record['comparisons']} comparisons. Entropy: the training "
        "objective, no evidence of better answers. Ended: answers that the model ended itself."
    )


def heat_maps(record: Record) -> dict[str, Draw]:
    """{file name without suffix: draws it}, one per objective of a record."""
    objectives = list(dict.fromkeys(cell["objective"] for cell in record["cells"]))
    return {
        f"heatmap_{objective}" if len(objectives) > 1 else "heatmap": partial(heat_map, record, objective)
        for objective in objectives
    }


def heat_map(record: Record, objective: str, to: Target) -> None:
    """Draw the cells of one objective."""
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    cells = [cell for cell in record["cells"] if cell["objective"] == objective]
    marked = {"chosen": record["picked"], "oracle": (record.get("oracle") or {}).get("name")}
    columns, rows, places = layout_of(cells)
    own = record["adapter_score"]
    differences = np.full((len(rows), len(columns)), np.nan)
    for cell, (row, column) in zip(cells, places, strict=True):
        differences[row, column] = cell["score"]["mean"] - own["mean"]
    reach = 1.3 * max(LEAST_REACH, float(np.nanmax(np.abs(differences))))  # the darkest shades hide frames
    # inches; a line of the caption has 13.5 characters an inch, the title 9
    width = max(1.3 + 1.02 * len(columns), 5.6)
    caption = textwrap.fill(_map_caption(record, {cell["name"] for cell in cells}), int(width * 13.5))
    title = record["suite"].capitalize() if "suite" in record else "Dev set"
    title += " score by range" + ("" if objective == "entropy" else f", {objective}")
    height = 1.5 + 0.72 * len(rows) + 0.17 * (caption.count("\n") + 1)
    with drawn(to, width, height, {"axes.spines.left": False, "axes.spines.bottom": False}) as figure:
        axes = figure.subplots()
        axes.patch.set(facecolor="white", hatch="////", edgecolor="#DDDDDD")  # seen where a range was not tried
        image = axes.imshow(100 * differences, cmap=COLOURS, norm=Normalize(-100 * reach, 100 * reach), aspect="auto")
        for cell, (row, column) in zip(cells, places, strict=True):
            ink = "white" if abs(differences[row, column]) > 0.6 * reach else "black"
            half = (cell["score"]["high"] - cell["score"]["low"]) / 2
            axes.text(
                column, row - 0.09, percent(cell["score"]["mean"]), ha="center", va="center", color=ink, fontsize=11
            )
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


def _map_caption(record: Record, names: set[str]) -> str:
    """What a square says, and what its marks mean where there are any."""
    seeds, questions, samples = len(record["seeds"]), record["questions"], record["samples"]
    size = f"{questions} questions × {samples} samples" + (f" × {seeds} seeds" if seeds > 1 else "")
    what = (
        f"{record['suite'].capitalize()}, mean over {', '.join(record['tasks'])}:" if "suite" in record else "Dev set"
    )
    parts = [
        f"{what} Avg@{samples}, %, and half of its 95 % interval over questions; n = {questions * samples * seeds:,} answers "
        f"per cell ({size}).",
        "Dot: no difference from the adapter shown (paired by question, Holm's adjustment over "
        f"{record['comparisons']} cells).",
    ]
    if record["picked"] in names:
        parts.append("Frame: chosen on the dev set; its own mean is optimistic.")
    if (record.get("oracle") or {}).get("name") in names:
        parts.append(
            "Dashed: best on these questions themselves, so its own mean is optimistic (oracle, not used to choose)."
        )
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
