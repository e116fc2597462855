"""Scores as blocks: of an evaluation, of a quickstart, of a sweep; and what stands beside a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loragate.report.cells import choice_sentence
from loragate.report.heatmap import LEAST_REACH, layout_of, map_data, map_groups
from loragate.report.page.charts import difference_colour
from loragate.report.page.content import Block, score, scores, text
from loragate.report.scores import COLUMNS as SCORE_COLUMNS
from loragate.report.scores import caption, cells_of, metric, row_name, rows_of, suite_cells, suites_of
from loragate.report.table import COLUMNS, Cell, joined, percent, points, result_cells

Record = Mapping[str, Any]


def evaluation_blocks(record: Record) -> list[Block]:
    """Scores per task of an evaluation's record, with intervals, controls, termination and how answers were judged."""
    blocks = []
    for task in record["tasks"]:
        rows = [_scored(row, row["avg_at_k"], cells_of(row)) for row in rows_of(record, task["name"])]
        blocks.append(scores(rows, SCORE_COLUMNS[2:], metric(record, task), task["name"]))
    for heading, averages in suites_of(record):
        rows = [_scored(row, row["average"], suite_cells(row)) for row in averages]
        blocks.append(scores(rows, SCORE_COLUMNS[2:3], title=heading[0].upper() + heading[1:]))
    return [*blocks, text(*caption(record).split("\n"))]


def _scored(row: Record, estimate: Record, cells: Sequence[Cell]) -> dict[str, Any]:
    control = row["control"] is not None or row["variant"] == "base"
    group = "control" if control else {"adapter": "baseline", "gated": "scale"}.get(row["variant"], "intervention")
    return score(row_name(row), group, estimate, map(joined, cells[1:]))


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


def quickstart_blocks(rows: Sequence[Record]) -> list[Block]:
    """The table of a quickstart (rows as `report/table.py` describes them)."""
    shown = [
        score(
            row["name"], row["group"], row.get("accuracy"), map(joined, result_cells(row)[1:]), bool(row.get("not_run"))
        )
        for row in rows
    ]
    return [scores(shown, COLUMNS[2:])]


def selection_blocks(selection: Record) -> list[Block]:
    """The evidence on which a range was chosen, as the artifact's record keeps it: scores of candidates, or a sentence."""
    if not selection:
        return []
    evidence = selection.get("evidence") or {}
    sentences = [f"Method: {selection.get('method', 'not recorded')}."]
    if isinstance(evidence, str):
        sentences.append(f"Evidence: {evidence}.")
        evidence = {}
    references = selection.get("references")
    references = references if isinstance(references, Mapping) else {}
    # of a sweep and of earlier records the name, else the setting with its temperature
    chosen = (selection.get("recommendation") or {}).get("setting", selection.get("picked"))
    rows = [
        score(
            name + (" (chosen)" if name == chosen else ""),
            "control" if name in references else "baseline" if name == "adapter" else "scale",
            value,
        )
        for name, value in {**evidence, **references}.items()
        if isinstance(value, Mapping) and {"mean", "low", "high"} <= set(value)
    ]
    caption = "On the probe; the chosen one is optimistic."
    return [text(*sentences), *([scores(rows, caption=caption)] if rows else [])]


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
