"""Training and gates as blocks: curves over the steps, λ by layer and kind of module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loragate.report.page.charts import lambda_colour, line_chart
from loragate.report.page.content import Block, text
from loragate.report.table import percent, place_of

History = Sequence[Mapping[str, Any]]
POINTS = 200
CURVES = {
    "topk_entropy": "top-k entropy / log k",
    "nll": "negative log-likelihood per token, nats",
    "gate_mean": "mean λ",
}
SHARES = {"gate_below_zero": "λ < 0", "gate_above_one": "λ > 1", "gate_saturated": "at a bound"}


def training_blocks(histories: Mapping[str, History]) -> list[Block]:
    """Curves of one or several trainings, {label: log records}."""
    blocks = []
    for key, label in CURVES.items():
        curves = {name: _points(history, key) for name, history in histories.items()}
        curves = {name: points for name, points in curves.items() if points}
        if curves:
            blocks.append(_curves(curves, label))
    for name, history in histories.items():
        shares = {label: _points(history, key) for key, label in SHARES.items()}
        shares = {label: points for label, points in shares.items() if any(value for _, value in points)}
        if shares:
            blocks.append(_curves(shares, "share of tokens", f"Where λ lies, {name}"))
    note = "The training loss says that the objective was met. It does not say that answers improved."
    return [text(note), *blocks]


def gates_blocks(stats: Mapping[str, Mapping[str, float]], lower: float, upper: float) -> list[Block]:
    """Mean λ by layer and kind, and the shares below 0, between, above 1, of {module path: statistics}."""
    cells: dict[tuple[int | None, str], list[Mapping[str, float]]] = {}
    for path, values in stats.items():
        if values.get("tokens", 1):
            cells.setdefault(place_of(path), []).append(values)
    layers = list(dict.fromkeys(layer for layer, _ in cells))
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    blocks = []
    for key, name in (
        ("mean", "Mean λ"),
        ("below_zero", "Share of tokens with λ < 0, %"),
        ("above_one", "Share of tokens with λ > 1, %"),
    ):
        if key != "mean" and not any(values[key] for group in cells.values() for values in group):
            continue
        rows = []
        for layer in layers:
            row: list[dict[str, str] | None] = []
            for kind in kinds:
                group = cells.get((layer, kind))
                row.append(None if group is None else _cell(key, sum(v[key] for v in group) / len(group), lower, upper))
            rows.append({"name": "–" if layer is None else str(layer), "cells": row})
        blocks.append(Block("map", {"columns": kinds, "rows": rows, "caption": "", "corner": "layer"}, name))
    note = (
        f"Range [{lower:g}, {upper:g}]. λ = 1 leaves the adapter as it is, 0 to 1 suppresses it, below 0 reverses it, above 1 "
        "extrapolates it."
    )
    return [text(note), *blocks]


def _cell(key: str, value: float, lower: float, upper: float) -> dict[str, str]:
    if key == "mean":
        background, ink = lambda_colour(value, lower, upper)
        return {
            "text": f"{value:.2f}".replace("-", "−"),
            "note": "",
            "background": background,
            "ink": ink,
            "mark": "negative" if value < 0 else "",
        }
    # a share takes the colour of the end it counts
    background, ink = lambda_colour(1 - value if key == "below_zero" else 1 + value, 0.0, 2.0)
    return {"text": percent(value), "note": "", "background": background, "ink": ink, "mark": ""}


def _curves(curves: Mapping[str, Sequence[tuple[float, float]]], label: str, title: str = "") -> Block:
    steps = sorted({step for points in curves.values() for step, _ in points})
    if len(steps) > 24:
        steps = [steps[round(n * (len(steps) - 1) / 23)] for n in range(24)]
    by_name = {name: dict(points) for name, points in curves.items()}
    rows = [
        [f"{step:g}", *(f"{values[step]:.4g}" if step in values else "–" for values in by_name.values())]
        for step in dict.fromkeys(steps)
    ]
    data = {"chart": line_chart(curves, x_label="step", y_label=label), "columns": ["step", *curves], "rows": rows}
    return Block("curves", data, title or label[:1].upper() + label[1:])


def _points(history: History, key: str) -> list[tuple[float, float]]:
    """(step, value), thinned to at most `POINTS`; the last one always stays."""
    points = sorted({record["step"]: record[key] for record in history if "step" in record and key in record}.items())
    if len(points) > POINTS:
        points = [points[round(n * (len(points) - 1) / (POINTS - 1))] for n in range(POINTS)]
    return points
