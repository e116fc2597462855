"""What was selected, from its record: a table of all variants; and maps of the ranges, also of an evaluation of a sweep's cells.

A square of a map says the mean of a range [L, U] and its 95 % interval, coloured by its distance from the adapter. A dot marks
an interval of the paired difference that contains 0; a frame marks the recommended variant. Ranges that form no grid stand in one
column.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loragate.display import format_points, percent, pluralize
from loragate.files import write_text
from loragate.report.figures import PHONE, SMALL, Draw, Target, open_figure
from loragate.report.scores import RANGE, compared_rows, own_range, row_name
from loragate.report.table import ABSENT, GROUP_OF, Cell, Line, Table, format_cell, format_optional, share_cell
from loragate.selection_record import SelectionRecord, VariantScore, is_selection, read_selection_record

Record = Mapping[str, Any]
COLUMNS = ("Variant", "Score %", "vs adapter, points", "Cut off %", "Retention %")
ROWS = 15  # of a table on a terminal
COLOURS = "PuOr"  # orange is worse than the adapter, purple better; told apart by all common kinds of colour vision
LEAST_REACH = 0.05


def read_selection(record: Record | None) -> SelectionRecord | None:
    """The selection that a record tells of, its own or an artifact's evidence; None for one without scores."""
    return read_selection_record(record) if record and is_selection(record) else None


def best_of(variants: Sequence[VariantScore], most: int | None) -> list[VariantScore]:
    """From the best down, the first `most` of them and the best of every kind: adapter, base, one λ and gates."""
    ordered = sorted(variants, key=lambda one: -one.mean)  # of equal ones as in the record
    if most is None:
        return ordered
    best = {one.weights: one for one in reversed(ordered)}
    kept = [*ordered[:most], *(one for one in best.values() if one not in ordered[:most])]
    return sorted(kept, key=ordered.index)


def selection_table(record: SelectionRecord, most: int | None = ROWS) -> Table:
    """The adapter, then the others from the best down, the first `most` of them."""
    own = [one for one in record.variants if one.label == record.baseline]
    others = [one for one in record.variants if one not in own]
    shown = best_of(others, most)
    columns = COLUMNS if any(one.retention for one in record.variants) else COLUMNS[:-1]
    lines = []
    for one in [*own, *shown]:
        versus: Cell = (ABSENT,)
        if (gap := one.difference) is not None:
            z = "" if gap.z is None else f"z = {gap.z:.1f}"
            versus = (format_points(gap.mean), f"{format_points(gap.low)} to {format_points(gap.high)}", z)
        name = f"{one.label} (recommended)" if one.label == record.recommendation.label else one.label
        retained = format_optional(one.retention, lambda kept: percent(kept.mean))
        score = {"mean": one.mean, "low": one.low, "high": one.high}
        cells = [share_cell(score), versus, (percent(one.truncated),), (retained,)][: len(columns) - 1]
        lines.append(Line(name, cells, GROUP_OF[one.weights], score))
    more = len(others) - len(shown)
    left = f"{more} more {'is' if more == 1 else 'are'} in the files." if more else ""
    caption = (
        "Ranges are 95 % intervals over questions; vs adapter is paired by question. Cut off: answers that met the length "
        "limit. The best of many is optimistic."
    )
    text = " ".join(filter(None, (caption, record.rule, left)))
    return Table(f"Scores on {_asked(record)}", columns, lines, text)


def _asked(record: SelectionRecord) -> str:
    return f"the dev set ({pluralize(record.dev.questions, 'question')})"


def write_selection(record: SelectionRecord, folder: Path) -> list[str]:
    """Write the table as `selection.md` and the maps of the ranges; returns the names of the maps."""
    parts = ["# Selection", selection_table(record, most=None).markdown(), *record.sentences()]
    write_text(folder / "selection.md", "\n\n".join(parts) + "\n")
    return write_maps(record.to_json(), folder)


def write_maps(record: Record, folder: Path) -> list[str]:
    """Write the maps of the ranges as .png and .svg; returns their names."""
    maps = heat_maps(record)
    for name, draw in maps.items():
        for suffix in ("png", "svg"):
            draw(folder / f"{name}.{suffix}")
    return list(maps)


def heat_maps(record: Record | None) -> dict[str, Draw]:
    """{file name without suffix: draws it}: of variants whose labels differ in the range alone, where there are two or more.

    Args:
        record: of a selection; or of an evaluation, whose variants at the tasks' own temperatures are compared on each suite.
    """
    groups: list[tuple[str, str, str, list[Record]]] = []  # file, where, label of the recommended, variants
    if record and "suites" in record:
        # averages have no temperature of their own
        elsewhere = {row_name(row) for row in record["results"] if row["temperature"] is not None}
        for where, rows, key in compared_rows(record):
            asked = [row for row in rows if row_name(row) not in elsewhere]
            labels = {"gated": f"gated {own_range(record)}".rstrip()}
            variants: list[Record] = [
                {**row[key], "label": labels.get(row_name(row), row_name(row)), "difference": row["comparison"]}
                for row in asked
            ]
            groups.append((rows[0].get("suite") or rows[0]["task"], where, "", variants))
    elif selection := read_selection(record):
        chosen = selection.recommendation.label
        groups.append(("", _asked(selection), chosen, [asdict(one) for one in selection.variants]))
    drawings: dict[str, Draw] = {}
    for file, where, chosen, variants in groups:
        adapter = next((one for one in variants if one["label"].startswith("adapter")), None)
        alike: dict[str, dict[tuple[float, float], Record]] = {}
        for one in variants:
            if found := RANGE.search(one["label"]):
                kind = " ".join(RANGE.sub("", one["label"]).replace(" ,", ",").split())
                alike.setdefault(kind, {})[float(found[1]), float(found[2])] = one
        for kind, cells in alike.items():
            if adapter and len(cells) > 1:
                named = re.findall(r"[\w.]+", f"{file} {kind if len(alike) > 1 else ''}")
                drawings["_".join(["heatmap", *named])] = partial(heat_map, where, adapter, cells, chosen, kind)
    return drawings


def heat_map(
    where: str, adapter: Record, cells: Mapping[tuple[float, float], Record], chosen: str, kind: str, to: Target
) -> None:
    """Draw the scores by range.

    Args:
        where: what they are of.
        adapter, cells: {label, mean, low, high, difference: {low, high} or None} of each, shares of 1.
        chosen: label of the recommended variant; empty for none.
        kind: what the labels have in common.
    """
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    columns, rows, places = layout_of(list(cells))
    differences = np.full((len(rows), len(columns)), np.nan)
    for cell, place in zip(cells.values(), places, strict=True):
        differences[place] = cell["mean"] - adapter["mean"]
    color_limit = 1.3 * max(LEAST_REACH, float(np.nanmax(np.abs(differences))))  # the darkest shades hide frames
    # inches; a line of the caption has 9.5 characters an inch, the title 9
    cell_width = min(1.2, max(0.6, (PHONE - 1.3) / len(columns)))
    width, between = max(1.3 + cell_width * len(columns), PHONE), "–" if cell_width > 0.85 else "–\n"
    parts = [f"Score on {where}, %, and its 95 % interval over questions."]
    parts += ["Dot: the interval of the paired difference to the adapter contains 0."]
    framed = "Frame: recommended. " * any(cell["label"] == chosen for cell in cells.values())
    parts += [f"{framed}The mean of the best of many is optimistic."]
    caption = textwrap.fill(" ".join(parts), int(width * 9.5))
    row_height = 0.72 if between == "–" else 0.9
    height = 1.5 + row_height * len(rows) + 0.24 * (caption.count("\n") + 1)
    with open_figure(
        to, width, height, {"axes.spines.left": False, "axes.spines.bottom": False, "font.size": SMALL}
    ) as figure:
        axes = figure.subplots()
        axes.patch.set(facecolor="white", hatch="////", edgecolor="#DDDDDD")  # seen where a range was not tried
        image = axes.imshow(
            100 * differences, cmap=COLOURS, norm=Normalize(-100 * color_limit, 100 * color_limit), aspect="auto"
        )
        for cell, (row, column) in zip(cells.values(), places, strict=True):
            ink = "white" if abs(differences[row, column]) > 0.6 * color_limit else "black"
            axes.text(column, row - 0.09, percent(cell["mean"]), ha="center", va="center", color=ink, fontsize=13)
            ends = share_cell(cell)[1].replace("–", between)
            axes.text(column, row + 0.2, ends, ha="center", va="center", color=ink, fontsize=SMALL)
            versus = cell["difference"]
            if versus is not None and versus["low"] <= 0 <= versus["high"]:
                axes.plot(column + (0.38 if len(columns) > 1 else 0.47), row - 0.35, "o", markersize=3.2, color=ink)
            if cell["label"] == chosen:
                inset = 0.06
                across = inset * (1 if len(columns) > 1 else 0.2)  # a lone column is wide
                corner = (column - 0.5 + across, row - 0.5 + inset)
                frame = Rectangle(corner, 1 - 2 * across, 1 - 2 * inset, fill=False, edgecolor="black", linewidth=2.4)
                frame.set_path_effects([withStroke(linewidth=4.8, foreground="white")])
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
        title = (
            f"Score by range{f' ({kind})' if kind else ''}; the adapter itself has {format_cell(share_cell(adapter))} %"
        )
        axes.set_title(textwrap.fill(title, int(width * 9)))
        bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=max(12, 4 * len(rows)))
        bar.set_label("points above the adapter")
        bar.outline.set_visible(False)
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=SMALL)


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
