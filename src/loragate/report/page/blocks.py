"""Trainings, and how a range was chosen, as blocks of a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from loragate.report.cells import choice_sentence, suite_table, sweep_tables
from loragate.report.figures import Curve, History, curve_of, line_chart, thinned
from loragate.report.heatmap import heat_maps
from loragate.report.page.build import Block, chart, text
from loragate.report.table import ABSENT, Line, Sheet, share_cell

Record = Mapping[str, Any]
ROWS = 24  # of the table below a curve
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
        curves = {name: curve_of(history, key) for name, history in histories.items()}
        blocks += _curves(curves, label, label[:1].upper() + label[1:])
    for name, history in histories.items():
        shares = {label: curve_of(history, key) for key, label in SHARES.items()}
        shares = {label: points for label, points in shares.items() if any(value for _, value in points)}
        blocks += _curves(shares, "share of tokens", f"Where λ lies, {name}")
    return blocks


def _curves(curves: Mapping[str, Curve], label: str, title: str) -> list[Block | Sheet]:
    """A chart of those that have points, and its numbers; nothing where none has."""
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return []
    values = {name: dict(points) for name, points in curves.items()}
    lines = [
        Line(f"{step:g}", [(f"{found[step]:.4g}" if step in found else ABSENT,) for found in values.values()])
        for step in thinned(sorted(set().union(*values.values())), ROWS)
    ]
    numbers = Sheet("", ("step", *curves), lines, folded="The numbers")
    return [chart(partial(line_chart, curves, label), title), numbers]


def selection_blocks(selection: Record | None) -> list[Block | Sheet]:
    """The evidence on which a range was chosen, as the artifact's record keeps it: scores of candidates, or a sentence."""
    if not selection:
        return []
    evidence = selection.get("evidence") or {}
    sentences = [f"Method: {selection.get('method', 'not recorded')}."]
    if isinstance(evidence, str):
        sentences.append(f"Evidence: {evidence}.")
        evidence = {}
    # of a sweep and of earlier records the name, else the setting with its temperature
    chosen = (selection.get("recommendation") or {}).get("setting", selection.get("picked"))
    lines = []
    for name, value in evidence.items():
        if isinstance(value, Mapping) and {"mean", "low", "high"} <= set(value):
            group = "baseline" if name.startswith("adapter") else "scale"
            lines.append(Line(name + (" (chosen)" if name == chosen else ""), [share_cell(value)], group, value))
    scored = [Sheet("", ("Setting", "Score %"), lines, "On the probe; the chosen one is optimistic.")] if lines else []
    return [text(*sentences), *scored]


def sweep_blocks(record: Record) -> list[Block | Sheet]:
    """What was chosen of a sweep's cells, heat maps of them, and their numbers."""
    blocks: list[Block | Sheet] = [text(*(choice_sentence(record, choice) for choice in record["choices"]))]
    for name, draw in heat_maps(record).items():
        of = name.removeprefix("heatmap").replace("_", ", ")
        blocks.append(chart(draw, f"Scores by range{of}"))
    tables = [suite_table(record)] if "suite" in record else sweep_tables(record, None)
    return [*blocks, *(replace(table, folded="The numbers") for table in tables)]
