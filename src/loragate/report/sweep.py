"""The results of a sweep, or of its evaluation on a suite, from their records (plain data): tables, sentences and heat maps.

A square of a heat map says the mean of a range [L, U] and half the width of its 95 % interval, coloured by its distance from the
adapter. A dot marks what is not told apart from the adapter after Holm's adjustment; a frame marks the cell that was chosen on the
probe, a dashed one the best on the test set. Ranges that form no grid stand in one column.
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
COLUMNS = ("Cell", "Probe %", "vs adapter, points", "Seeds %", "Entropy", "Ended %", "λ < 0 / > 1 %")
ROWS = 15
COLOURS = "PuOr"  # orange is worse than the adapter, purple better; told apart by all common kinds of colour vision
CHOSEN, ORACLE = "#000000", "#009E73"
LEAST_REACH = 0.05


def sweep_tables(record: Record, most: int | None = ROWS) -> list[Table]:
    """The adapter, then the cells from the best down, the first `most` of them; nothing before the adapter was scored."""
    tables = []
    for choice in record["choices"]:
        mine = [cell for cell in record["cells"] if cell["difference"] is not None]  # scored, as is the adapter
        mine.sort(key=lambda cell: -cell["probe"]["mean"])
        ended = (or_absent(choice["adapter_signs"].get("finished"), percent),)
        own = [share_cell(choice["adapter_probe"]), *[(ABSENT,)] * 3, ended, (ABSENT,)]
        lines = [Line("adapter", own), *(_line(cell, choice) for cell in mine[:most])]
        title = f"{choice['adapter']}: Avg@{record['samples']} on {record['questions']} probe questions"
        left = f" {len(mine) - most} cells below are in the files." if most and len(mine) > most else ""
        tables.append(Table(title, COLUMNS, lines, _caption(record) + left, wide=(3, 6)))
    return tables


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
    parts = ["# Sweep"]
    for choice, table in zip(record["choices"], sweep_tables(record, most=None), strict=True):
        parts += [table.markdown(), choice_sentence(record, choice)]
    for title, key in (("Diverged, and out of the comparison:", "diverged"), ("Not finished:", "failures")):
        reasons = record.get(key) or {}
        if reasons:
            parts.append(f"{title}\n\n" + "\n".join(f"- `{slug}`: {error}" for slug, error in reasons.items()))
    return "\n\n".join(parts) + "\n"


def suite_table(record: Record) -> Table:
    """The cells of one adapter on a suite, from the best down; from the record of `selection.outcome`."""
    (choice,) = record["choices"]
    title = f"{choice['adapter']}: {record['suite']}, mean over {len(record['tasks'])} tasks, Avg@{record['samples']}"
    lines = [Line("adapter", [share_cell(choice["adapter_score"]), (ABSENT,)])]
    for cell in sorted(record["cells"], key=lambda cell: -cell["score"]["mean"]):
        lines.append(Line(_name(cell), [share_cell(cell["score"]), _versus(cell)], _group(cell, choice)))
    return Table(title, ("Cell", "Score %", "vs adapter, points"), lines, choice_sentence(record, choice))


def _suite_sentence(record: Record, choice: Record) -> str:
    """What a suite says of the cells: the best one, read as an oracle, and the one that a probe had chosen."""
    oracle = choice["oracle"]
    if oracle["name"] == "adapter":
        text = f"none of {choice['candidates']} cells is above the adapter's {interval(oracle['score'])} % on {record['suite']}."
    else:
        text = (
            f"highest on {record['suite']}: {oracle['name']} with {interval(oracle['score'])} %. It was found on these "
            "questions themselves, so its mean is optimistic (an oracle)."
        )
    if oracle["regret"]:
        regret = oracle["regret"]
        text += (
            f" The probe had chosen {choice['picked']}, {points(regret['mean']).lstrip('+')} points below "
            f"({points(regret['low'])} to {points(regret['high'])})."
        )
    return text + f" p after Holm's adjustment over {record['comparisons']} cells."


def choice_sentence(record: Record, choice: Record) -> str:
    """What was chosen and what stands behind it, the oracle apart from it; or what a suite says of the cells."""
    if "suite" in record:
        return _suite_sentence(record, choice)
    own = choice["adapter_probe"]
    size = f"{record['questions']} questions × {record['samples']} samples × {len(record['seeds'])} seeds"
    if choice["accepted"]:
        cell = next(cell for cell in record["cells"] if cell["name"] == choice["picked"])
        difference = cell["difference"]
        text = (
            f"chosen: {choice['picked']}, {interval(cell['probe'])} % on the probe ({size}) against {interval(own)} % of the "
            f"adapter: {points(difference['mean'])} points, p{p_value(difference['p'])}, "
            f"{p_value(difference['p_holm']).lstrip('=')} after Holm's adjustment over {record['comparisons']} cells. "
        )
        text += (
            "The mean is optimistic, because the cell was picked for it."
            if cell["differs"]
            else "That is not told apart from the adapter: the gain may be luck."
        )
    elif not choice["candidates"]:
        text = "the adapter remains: no cell's training stayed finite in all its seeds."
    else:
        text = f"the adapter remains: none of {choice['candidates']} cells is above its {interval(own)} % on the probe ({size})."
    oracle = choice.get("oracle")
    if oracle is not None:
        regret = oracle["regret"]
        text += (
            f" Oracle on the test set, not used to choose: {oracle['name']} with {interval(oracle['test'])} %; the choice has "
            f"{interval(oracle['chosen_test'])} % there, a regret of {points(regret['mean']).lstrip('+')} points "
            f"({points(regret['low'])} to {points(regret['high'])}), and {points(oracle['chosen_minus_adapter']['mean'])} points "
            "from the adapter."
        )
    return text


def _line(cell: Record, choice: Record) -> Line:
    gates, after = cell["gates"], cell["entropy_after"]
    seeds = ", ".join(percent(mean) for mean in cell["by_seed"]) if len(cell["by_seed"]) > 1 else ABSENT
    entropy = ABSENT if after is None else f"{cell['entropy_before']:.3f} → {after:.3f}"
    ended = or_absent(cell["signs"].get("finished"), percent)
    shares = f"{percent(gates['below_zero'])} / {percent(gates['above_one'])}" if "below_zero" in gates else ABSENT
    cells = [share_cell(cell["probe"]), _versus(cell), (seeds,), (entropy,), (ended,), (shares,)]
    return Line(_name(cell), cells, _group(cell, choice))


def _group(cell: Record, choice: Record) -> str:
    return "scale" if cell["name"] == choice["picked"] else ""


def _name(cell: Record) -> str:
    return str(cell["name"]) + ("" if cell["complete"] else " (incomplete)")


def _versus(cell: Record) -> Cell:
    """The difference to the adapter, with p where all seeds are there."""
    versus = cell["difference"]
    return points(versus["mean"]), f"p{p_value(versus['p_holm'])}" if cell["complete"] else ""


def _caption(record: Record) -> str:
    return (
        "Ranges are 95 % intervals over questions, seeds averaged within each; they say nothing about other adapters. vs "
        f"adapter: paired by question, p after Holm's adjustment over {record['comparisons']} comparisons. Entropy: the training "
        "objective, no evidence of better answers. Ended: answers that the model ended itself."
    )


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
    # inches; a line of the caption has 13.5 characters an inch, the title 9
    width = max(1.3 + 1.02 * len(columns), 5.6)
    caption = textwrap.fill(_map_caption(record, choice, of, {cell["name"] for cell in cells}), int(width * 13.5))
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


def _map_caption(record: Record, choice: Record, of: str, names: set[str]) -> str:
    """What a square says, and what its marks mean where there are any; `choice_sentence` says what follows."""
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
