"""What stands beside scores: verdicts in words, the evidence for a range, and the maps of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loragate.display import percent, points
from loragate.report.cells import choice_sentence
from loragate.report.heatmap import LEAST_REACH, layout_of, map_data, map_groups
from loragate.report.page.build import Block, text
from loragate.report.page.charts import difference_colour
from loragate.report.scores import row_name, rows_of
from loragate.report.table import Line, Sheet, share_cell

Record = Mapping[str, Any]


def evaluation_statements(record: Record) -> list[str]:
    """What the record's own verdicts say of the gated model, task by task, and what the controls say to it."""
    statements = []
    for task in record["tasks"]:
        rows = rows_of(record, task["name"])
        adapters = {row["control"]: row for row in rows if row["variant"] == "adapter"}
        for row in rows:
            # at a lower temperature gates are compared with the adapter there; random gates are a control
            cooler = row.get("temperature") is not None
            if row["variant"] != "gated" or (row["control"] is not None and not cooler):
                continue
            where = f"On {task['name']}" + (f", {row['control']}" if cooler else "")
            versus, adapter = row["comparison"], adapters.get(row["control"])
            if versus is None or adapter is None:
                statements.append(f"{where}, the adapter was not run, so no verdict on the gates is given.")
                continue
            size = (
                f"{percent(row['avg_at_k']['mean'])} % against {percent(adapter['avg_at_k']['mean'])} % of the adapter "
                f"({points(versus['mean'])} points, 95 % interval {points(versus['low'])} to {points(versus['high'])})"
            )
            statements.append(f"{where}, gated is {_verdict_words(row['verdict'])}: {size}.")
            if cooler:
                continue
            controls = [other for other in rows if other["control"] is not None and other["variant"] != "gated"]
            best = max(controls, key=lambda other: other["avg_at_k"]["mean"], default=None)
            if best is None:
                statements.append(f"On {task['name']}, no cheap control was run (lower temperature, one λ).")
            elif best["avg_at_k"]["mean"] >= row["avg_at_k"]["mean"]:
                statements.append(
                    f"On {task['name']}, {row_name(best)} needs no training and scores {percent(best['avg_at_k']['mean'])} %."
                )
    return statements


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


def sweep_blocks(record: Record) -> list[Block]:
    """Heat maps of a sweep's record and what was chosen."""
    blocks = []
    for adapter, objective, choice in map_groups(record):
        data = map_data(record, choice, adapter, objective)
        columns, names, places = layout_of(data["cells"])
        reach = max([LEAST_REACH, *(abs(cell["mean"] - data["adapter"]) for cell in data["cells"])])
        grid: list[list[dict[str, str] | None]] = [[None] * len(columns) for _ in names]
        for cell, (row, column) in zip(data["cells"], places, strict=True):
            background, ink = difference_colour(cell["mean"] - data["adapter"], reach)
            half = (cell["high"] - cell["low"]) / 2
            grid[row][column] = {
                "text": percent(cell["mean"]),
                "note": f"±{percent(half)}" + ("" if cell["differs"] else " ·"),
                "background": background,
                "ink": ink,
                "mark": "chosen" if cell["chosen"] else "oracle" if cell["oracle"] else "",
            }
        rows = [{"name": name, "cells": cells} for name, cells in zip(names, grid, strict=True)]
        block = {"columns": columns, "rows": rows, "caption": data["caption"], "corner": "U ↓ · L →"}
        blocks.append(Block("map", block, data["title"]))
        blocks.append(text(choice_sentence(record, choice)))
    return blocks


def _verdict_words(verdict: str | None) -> str:
    words = {"better": "better than the adapter", "worse": "worse than the adapter"}
    return words.get(verdict or "", "not told apart from the adapter")
