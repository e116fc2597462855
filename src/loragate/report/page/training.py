"""Training and gates as blocks: curves over the steps, λ by layer and kind of module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loragate.display import percent
from loragate.report.figures import by_place
from loragate.report.page.build import Block, text
from loragate.report.page.charts import lambda_colour, line_chart
from loragate.report.table import ABSENT, Line, Sheet

History = Sequence[Mapping[str, Any]]
Points = Sequence[tuple[float, float]]
POINTS, ROWS = 200, 24  # of a curve, of the table below it
CURVES = {
    "topk_entropy": "top-k entropy / log k",
    "nll": "negative log-likelihood per token, nats",
    "gate_mean": "mean λ",
}
SHARES = {"gate_below_zero": "λ < 0", "gate_above_one": "λ > 1", "gate_saturated": "at a bound"}


def training_blocks(histories: Mapping[str, History]) -> list[Block | Sheet]:
    """Curves of one or several trainings, {label: log records}."""
    note = "The training loss says that the objective was met. It does not say that answers improved."
    blocks: list[Block | Sheet] = [text(note)]
    for key, label in CURVES.items():
        curves = {name: _points(history, key) for name, history in histories.items()}
        blocks += _curves(curves, label, label[:1].upper() + label[1:])
    for name, history in histories.items():
        shares = {label: _points(history, key) for key, label in SHARES.items()}
        shares = {label: points for label, points in shares.items() if any(value for _, value in points)}
        blocks += _curves(shares, "share of tokens", f"Where λ lies, {name}")
    return blocks


def gates_blocks(stats: Mapping[str, Mapping[str, float]], lower: float, upper: float) -> list[Block]:
    """Mean λ by layer and kind, and the shares below 0, between, above 1, of {module path: statistics}."""
    layers, kinds, cells = by_place(stats)
    note = (
        f"Range [{lower:g}, {upper:g}]. λ = 1 leaves the adapter as it is, 0 to 1 suppresses it, below 0 reverses it, above 1 "
        "extrapolates it."
    )
    blocks = [text(note)]
    for key, name in (
        ("mean", "Mean λ"),
        ("below_zero", "Share of tokens with λ < 0, %"),
        ("above_one", "Share of tokens with λ > 1, %"),
    ):
        if key != "mean" and not any(values[key] for values in stats.values()):
            continue
        rows = []
        for layer in layers:
            groups = [cells.get((layer, kind)) for kind in kinds]
            means = [None if group is None else sum(values[key] for values in group) / len(group) for group in groups]
            row = [None if mean is None else _cell(key, mean, lower, upper) for mean in means]
            rows.append({"name": ABSENT if layer is None else str(layer), "cells": row})
        blocks.append(Block("map", {"columns": kinds, "rows": rows, "caption": "", "corner": "layer"}, name))
    return blocks


def _cell(key: str, value: float, lower: float, upper: float) -> dict[str, str]:
    if key == "mean":
        background, ink = lambda_colour(value, lower, upper)
        shown = f"{value:.2f}".replace("-", "−")
    else:  # a share takes the colour of the end it counts
        background, ink = lambda_colour(1 - value if key == "below_zero" else 1 + value, 0.0, 2.0)
        shown = percent(value)
    mark = "negative" if key == "mean" and value < 0 else ""
    return {"text": shown, "note": "", "background": background, "ink": ink, "mark": mark}


def _curves(curves: Mapping[str, Points], label: str, title: str) -> list[Block | Sheet]:
    """A chart of those that have points, and its numbers; nothing where none has."""
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return []
    values = {name: dict(points) for name, points in curves.items()}
    lines = [
        Line(f"{step:g}", [(f"{found[step]:.4g}" if step in found else ABSENT,) for found in values.values()])
        for step in _thinned(sorted(set().union(*values.values())), ROWS)
    ]
    chart = Block("chart", line_chart(curves, x_label="step", y_label=label), title)
    return [chart, Sheet("", ("step", *curves), lines, folded="The numbers")]


def _points(history: History, key: str) -> Points:
    """(step, value)."""
    steps = {record["step"]: record[key] for record in history if "step" in record and key in record}
    return _thinned(sorted(steps.items()), POINTS)


def _thinned(values: Sequence[Any], most: int) -> Sequence[Any]:
    """At most so many of them, evenly; the last one always stays."""
    if len(values) <= most:
        return values
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]
