"""Figures of results, training and gates, as PNG, SVG or PDF, or as SVG inside a page; no number that was not measured.

Each function draws plain data to one target; a file appears whole or not at all. Colours are those of Okabe and
Ito (qualitative) and ColorBrewer's PuOr (diverging), which colour-blind readers can tell apart. matplotlib is imported
when a figure is drawn, and its figures are used without pyplot: neither a display nor global state is touched.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loragate.display import percent
from loragate.errors import ConfigError
from loragate.files import write_atomically
from loragate.report.table import Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Target = str | Path | StringIO
"""A file .png, .svg or .pdf; or a text that takes the SVG for a page."""
Draw = Callable[[Target], None]
History = Sequence[Mapping[str, Any]]
Curve = Sequence[tuple[float, float]]
"""(step, value)."""

GROUPS = {
    "control": ("Control", "#999999"),
    "baseline": ("Baseline", "#56B4E9"),
    "scale": ("Gated", "#D55E00"),
    "intervention": ("Intervention", "#009E73"),
}
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
DASHES = ("-", "--", ":", "-.")
SHARES = {"below_zero": ("λ < 0", "#7B4DA0"), "zero_to_one": ("0 to 1", "#D9D9D9"), "above_one": ("λ > 1", "#E08214")}
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = ("png", "svg", "pdf")
POINTS = 200  # of a curve
KIND = 24  # characters of a kind of module below a map
SMALL = 11.2  # the smallest letters of a map; on a phone the page shows them at 0.9 of this, 10 px
PHONE = 5.5  # inches of a map that a phone shows whole, likewise
CELL = 0.53  # inches of a square with a figure of five characters
MAP: Any = {"axes.spines.top": True, "axes.spines.right": True, "font.size": SMALL}
INK = "#010203"  # stands for the page's own in a figure on it
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "loragate",  # equal data give equal files
    "text.parse_math": False,  # names are no formulas
}
INKS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
ON_PAGE: Any = {"svg.fonttype": "none", "savefig.transparent": True, **dict.fromkeys(INKS, INK)}


def accuracy_bars(lines: Sequence[Line], to: Target, *, narrow: bool = False) -> None:
    """Draw the score of every line of a table as a bar with its 95 % interval and value, coloured by group.

    `narrow` makes it as wide as a phone, so that its letters can be read there.
    """
    from matplotlib.patches import Patch

    lines = [line for line in lines if line.score is not None]
    width, row, letters = (4.4, 0.44, 11.5) if narrow else (7.4, 0.36, 10)
    with open_figure(to, width, 1.3 + row * len(lines), {"font.size": letters}) as figure:
        axes = figure.subplots()
        for place, line in enumerate(lines):
            assert line.score is not None
            mean, low, high = (100 * line.score[key] for key in ("mean", "low", "high"))
            axes.barh(place, mean, height=0.68, color=GROUPS[line.group][1])
            axes.errorbar(mean, place, xerr=[[mean - low], [high - mean]], color="black", capsize=3.5, linewidth=1.2)
            axes.annotate(
                percent(line.score["mean"]),
                (high, place),
                (7, 0),
                textcoords="offset points",
                va="center",
                fontsize=letters - 1,
                bbox=None if isinstance(to, StringIO) else {"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )
        names = [textwrap.fill(line.name, 16) if narrow else line.name for line in lines]
        axes.set_yticks(range(len(lines)), names, fontsize=letters - narrow)
        axes.set_ylim(len(lines) - 0.4, -0.6)  # the first line on top
        axes.set_xlim(0, 135 if narrow else 110)  # room for the value beside a full bar
        axes.set_xticks(range(0, 101, 50 if narrow else 20))
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("score, % (bars: mean; whiskers: 95 % interval over questions)" if not narrow else "score, %")
        grid(axes, "x")
        present = dict(GROUPS[group] for group in GROUPS if any(line.group == group for line in lines))
        patches = [Patch(color=colour, label=name) for name, colour in present.items()]
        figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False)


def curve_of(history: History, key: str) -> Curve:
    """A value of a training's log over the steps; records without it are other entries of the log."""
    steps = {record["step"]: float(record[key]) for record in history if "step" in record and key in record}
    return subsample(sorted(steps.items()), POINTS)


def subsample(values: Sequence[Any], most: int) -> Sequence[Any]:
    """At most so many of them, evenly; the last one always stays."""
    if len(values) <= most:
        return values
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]


def line_chart(curves: Mapping[str, Curve], label: str, to: Target) -> None:
    """Draw {name: curve} over the steps.

    The vertical axis starts at zero where all values are positive, so that a small change does not look large. Values that are
    not finite, as of a training that diverged, are left out.
    """
    curves = {name: [point for point in curve if math.isfinite(point[1])] for name, curve in curves.items()}
    with open_figure(to, 7.4, 3.6 + 0.24 * len(curves)) as figure:
        axes = figure.subplots()
        for number, (name, curve) in enumerate(curves.items()):
            axes.plot(
                [step for step, _ in curve],
                [value for _, value in curve],
                color=LINES[number % len(LINES)],
                linestyle=DASHES[number // len(LINES) % len(DASHES)],
                linewidth=1.8,
                marker="o" if len(curve) == 1 else None,
                label=name,
            )
        if all(value >= 0 for curve in curves.values() for _, value in curve):
            axes.set_ylim(bottom=0)
        axes.margins(x=0.02)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        grid(axes, "both")
        figure.legend(loc="outside lower left", frameon=False)


def column_chart(
    edges: Sequence[float], counts: Sequence[float], label: str, to: Target, *, open_ends: bool = False
) -> None:
    """Draw a histogram: one column per pair of neighbouring edges, the share of all counts as its height.

    With `open_ends` the first and the last column also count what lies beyond them; they are grey and say so.
    """
    with open_figure(to, 7.4, 3.4) as figure:
        axes = figure.subplots()
        heights = 100 * np.asarray(counts) / (sum(counts) or 1)
        bars = axes.bar(edges[:-1], heights, 0.97 * np.diff(edges), align="edge", color=LINES[0])
        if open_ends:
            ends = (bars[0], f"≤ {edges[1]:.3g}"), (bars[-1], f"≥ {edges[-2]:.3g}")
            for bar, beyond in ends:
                bar.set_color(LINES[-1])
                above = (bar.get_x() + bar.get_width() / 2, bar.get_height())
                said = beyond.replace("-", "−")
                axes.annotate(said, above, (0, 3), textcoords="offset points", ha="center", fontsize=9)
            axes.margins(x=0.06, y=0.1)  # room for what stands above the ends
        axes.set_xlabel(label)
        axes.set_ylabel("share, %")
        grid(axes, "y")


def lambda_map(modules: Sequence[Mapping[str, Any]], to: Target) -> None:
    """Draw the mean λ of every module, layer by kind, and beside it the shares of λ below 0, from 0 to 1 and above 1.

    `modules` are those of a record of `loragate diagnose gates`. Those that share layer and kind, such as experts, are averaged,
    and so are the shares over the modules of a layer; one that saw no token is left out. The colours are centred at 1, where a
    gate leaves the adapter as it was.
    """
    cells: dict[tuple[int | None, str], list[Mapping[str, float]]] = {}
    for item in modules:
        if item["all"]["count"]:
            cells.setdefault((item["layer"], item["type"]), []).append(item["all"])
    means = {cell: float(np.mean([one["mean"] for one in group])) for cell, group in cells.items()}
    layers, kinds = layers_and_kinds(means)
    reach = max(0.1, max(abs(mean - 1) for mean in means.values()))

    across = CELL * max(len(kinds), 2)
    with open_figure(to, max(1.75 + across, 3.6), 2.0 + 0.28 * max(len(layers), 3), MAP) as figure:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[across, 1.2])
        module_cells(left, means, "PuOr_r", (1 - reach, 1 + reach), lambda mean: abs(mean - 1) > 0.55 * reach, ".2f")
        left.set_title("Mean λ")

        of_layer = {
            layer: [one for (at, _), group in cells.items() if at == layer for one in group] for layer in layers
        }
        shares = [{key: np.mean([one[key] for one in group]) for key in SHARES} for group in of_layer.values()]
        reached = np.zeros(len(shares))
        for key, (name, colour) in SHARES.items():
            widths = np.array([100 * one[key] for one in shares])
            right.barh(range(len(shares)), widths, left=reached, height=0.72, color=colour, label=name)
            reached += widths
        right.set_xlim(0, 100)
        right.set_xlabel("% of tokens")
        right.set_title("Where λ lies")
        right.tick_params(axis="y", length=0, labelleft=False)
        right.spines[["top", "right", "left"]].set_visible(False)
        figure.legend(loc="outside lower right", ncols=3, frameon=False)


ByModule = Mapping[tuple[int | None, str], float]
"""{(layer, kind of module): a figure}; layer None for a module outside the layers."""
MeanInterval = tuple[float, float, float]
"""A mean, and the ends of its interval."""


def layers_and_kinds(cells: ByModule) -> tuple[list[int | None], list[str]]:
    """The layers from the first on, those without an index last, and the kinds of modules in the order of `MODULES`."""
    layers = sorted({layer for layer, _ in cells}, key=lambda layer: (layer is None, layer))
    order = {kind: place for place, kind in enumerate(MODULES)}
    kinds = sorted(dict.fromkeys(kind for _, kind in cells), key=lambda kind: order.get(kind, len(MODULES)))
    return layers, kinds


def module_cells(
    axes: Axes,
    cells: ByModule,
    colours: str,
    ends: tuple[float, float],
    dark: Callable[[float], bool],
    form: str,
    least: float = -math.inf,
) -> None:
    """A square for each layer and kind, with its figure from `least` up, white where the colour is `dark`."""
    layers, kinds = layers_and_kinds(cells)
    values = np.full((len(layers), len(kinds)), np.nan)  # NaN: no such module, the hatched ground shows
    for (layer, kind), value in cells.items():
        values[layers.index(layer), kinds.index(kind)] = value
    axes.patch.set(facecolor="white", hatch="////", edgecolor="#CCCCCC")
    axes.imshow(values, cmap=colours, vmin=ends[0], vmax=ends[1], aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if value >= least:  # no NaN is
            text = format_signed(float(value), form)
            ink = "white" if dark(value) else "black"
            axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=SMALL)
    names = [kind if len(kind) <= KIND else f"{kind[: KIND - 1]}…" for kind in kinds]
    axes.set_xticks(range(len(kinds)), names, rotation=35, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(layers)), ["–" if layer is None else str(layer) for layer in layers])
    axes.set_ylabel("layer")
    axes.tick_params(length=0)


def format_signed(value: float, form: str) -> str:
    """The figure with a minus sign; what rounds to zero has none."""
    text = f"{value:{form}}"
    return (text.removeprefix("-") if not float(text.rstrip("%")) else text).replace("-", "−")


def module_map(
    cells: ByModule,
    by_layer: Mapping[int, float],
    by_kind: Mapping[str, float],
    label: str,
    to: Target,
    *,
    form: str = "",
) -> None:
    """Draw a figure of every layer and kind of module as a square, the figures of whole kinds above and of whole layers beside.

    Args:
        cells: figures from 0 up; the largest has the darkest square.
        label: what the figures are, with their unit.
        form: of a figure as text, such as ".2f"; by default as many decimals as the largest needs.
    """
    layers, kinds = layers_and_kinds(cells)
    of_whole: Any = (by_kind, kinds), (by_layer, layers)
    most = max(*cells.values(), 0.0) or 1.0
    form = form or f".{min(4, max(2, 1 - math.floor(math.log10(most))))}f"
    rows = 0.25 if len(layers) <= 40 else 0.2  # inches
    across, down = len(kinds) * CELL * max(1, len(f"{most:{form}}") / 5), rows * max(len(layers), 3)
    with open_figure(to, max(1.75 + across, 3.4), 2.0 + down, MAP) as figure:
        grid_ = figure.add_gridspec(2, 2, width_ratios=[across, 1.0], height_ratios=[0.75, down])
        left = figure.add_subplot(grid_[1, 0])
        # a figure that the colour shows as good as nothing of, or that rounds to 0, is left out: many zeros hide the rest
        least = max(0.05 * most, 0.5 * 10.0 ** -int(form.strip(".f%") or 0))
        module_cells(left, cells, "Blues", (0, most), lambda value: value > 0.72 * most, form, least)
        above, beside = figure.add_subplot(grid_[0, 0], sharex=left), figure.add_subplot(grid_[1, 1], sharey=left)
        kinds_found, layers_found = ([values.get(key, 0.0) for key in keys] for values, keys in of_whole)
        for axes, bars, found in (
            (above, above.bar(range(len(kinds)), kinds_found, 0.72, color=LINES[0]), kinds_found),
            (beside, beside.barh(range(len(layers)), layers_found, 0.72, color=LINES[0]), layers_found),
        ):
            named = [format_signed(one, form) if one > 0.05 * max(found) else "" for one in found]
            axes.bar_label(bars, named, padding=2)
            axes.tick_params(length=0, labelbottom=False, labelleft=False)
            axes.spines[:].set_visible(False)
        above.margins(y=0.35)
        beside.margins(x=0.45)
        left.set_ylim(len(layers) - 0.5, -0.5)  # the first layer on top
        figure.suptitle(label, x=0.01, ha="left", fontsize=SMALL)


def strength_curve(
    curves: Sequence[tuple[str, Mapping[float, MeanInterval], str, str]], marks: Mapping[str, float], to: Target
) -> None:
    """Draw measures over the strength of an adapter one above the other, each with the band of its interval.

    A mean that lies far outside what the strengths up to 1 span is written at the edge.

    Args:
        curves: (heading, {strength: figure}, label of the axis, colour) of each.
        marks: {what a strength is: strength}, vertical lines with a legend.
    """
    with open_figure(to, 4.7, 1.0 + 1.9 * len(curves) + 0.2 * len(marks)) as figure:
        panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (heading, points, label, colour) in zip(panels, curves, strict=True):
            strengths = sorted(points)
            means, lows, highs = zip(*(points[one] for one in strengths), strict=True)
            axes.fill_between(strengths, lows, highs, color=colour, alpha=0.25, linewidth=0)
            axes.plot(strengths, means, color=colour, linewidth=1.8, marker="o", markersize=5)
            usual = [points[one] for one in strengths if one <= 1] or [points[strengths[0]]]
            floor, ceiling = min(low for _, low, _ in usual), max(high for *_, high in usual)
            spread = 2 * (ceiling - floor) or abs(ceiling) or 1.0
            bottom, top = max(min(lows), floor - spread), min(max(highs), ceiling + spread)
            room = 0.08 * (top - bottom or 1.0)
            axes.set_ylim(bottom - room, top + room)
            for strength, mean in zip(strengths, means, strict=True):
                if not bottom - room <= mean <= top + room:
                    place = (strength, top if mean > top else bottom)
                    axes.annotate(f"{'↑' if mean > top else '↓'} {mean:.3g}", place, ha="center", va="center")
            for (what, strength), dash, shade in zip(marks.items(), DASHES[1:], ("#777777", *LINES[2:]), strict=False):
                axes.axvline(strength, color=shade, linestyle=dash, linewidth=2, label=what, zorder=1)
            axes.set_title(heading)
            axes.set_ylabel(label)
            grid(axes, "y")
        panels[-1].set_xticks(strengths, ["0\n(base)" if one == 0 else f"{one:g}" for one in strengths])
        panels[-1].set_xlabel("strength: what the adapter adds, times this")
        if marks:
            handles, labels = panels[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=9)


def paired_dots(rows: Sequence[tuple[str, str, Sequence[MeanInterval]]], labels: Sequence[str], to: Target) -> None:
    """Draw rows of (name, colour, a (mean, low, high) for each panel) as dots with whiskers, panels side by side.

    The first row is what the others are compared with: a line goes through its means, in the band of its intervals.
    """
    with open_figure(to, 4.9, 1.0 + 0.27 * len(rows)) as figure:
        panels = figure.subplots(1, len(labels), sharey=True, squeeze=False)[0]
        for number, (axes, label) in enumerate(zip(panels, labels, strict=True)):
            mean, low, high = rows[0][2][number]
            axes.axvspan(low, high, color="#999999", alpha=0.2, linewidth=0)
            axes.axvline(mean, color="#777777", linestyle=DASHES[1], linewidth=1.2)
            for place, (_, colour, values) in enumerate(rows):
                mean, low, high = values[number]
                axes.plot([low, high], [place, place], color=colour, linewidth=1.8)
                axes.plot(mean, place, "o", color=colour, markersize=6)
            axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.tick_params(axis="y", length=0)
            axes.locator_params(axis="x", nbins=4)
            axes.set_xlabel(label)
            grid(axes, "x")


@contextmanager
def open_figure(to: Target, width: float, height: float, style: Any = None) -> Iterator[Figure]:
    """A figure to draw on, in inches; it is written when the body ends, a file in the format of its suffix.

    Raises:
        ConfigError: for another kind of file than png, svg or pdf.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = "svg" if isinstance(to, StringIO) else Path(to).suffix.lower().lstrip(".")
    if kind not in KINDS:
        raise ConfigError(f"A figure cannot be written to {to}: give a file name that ends in .png, .svg or .pdf.")
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)  # equal data give equal files
    with rc_context({**STYLE, **(ON_PAGE if isinstance(to, StringIO) else {}), **(style or {})}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        # still under the style: matplotlib reads it when it writes
        if isinstance(to, StringIO):
            figure.savefig(to, format=kind, metadata=metadata)
        else:
            write_atomically(Path(to), lambda file: figure.savefig(file, format=kind, dpi=160, metadata=metadata))


def grid(axes: Axes, axis: Any) -> None:
    axes.grid(axis=axis, color="#999999", alpha=0.35, linewidth=0.8)
    axes.set_axisbelow(True)
