"""The tables of an evaluation, for the terminal and for Markdown, from the record's JSON.

One table per task, with what must stand beside a score: its interval, the paired difference to the adapter and what may be
said of it, how many answers were cut off and how many could not be judged. Last tables average over the tasks of a suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from loragate.report.table import ABSENT, AT_BEST, HOW, at_best_cell, at_best_line, p_value, percent, points

Record = Mapping[str, Any]
COLUMNS = ("Model", "Score %", "vs adapter, points", "Majority %", "Cut off\nno EOS %", "No\nanswer %", "Tokens")
SUITE_COLUMNS = ("Model", "Mean over tasks %", "vs adapter, points")
JUDGED = ("ok", "wrong")


def caption(record: Record) -> str:
    """What the columns mean, and what was done."""
    text = (
        "Ranges are 95 % intervals over questions; vs adapter is paired by question, gates at a lower "
        "temperature against the adapter there, and what is shown takes Holm's "
        "adjustment over all comparisons into account. Cut off: answers that met the length limit; below it, where it "
        "differs, no EOS: answers without an end of sequence. No answer: nothing that could be judged was found, for "
        "whatever reason."
    )
    if any(row.get("at_best") for row in record["results"]):
        text += f" {AT_BEST}: {HOW}."
    if record["sandbox"]:
        text += f" Programs ran in the tier {record['sandbox']}."
    return "\n".join([text, *(f"warning: {warning}" for warning in record["warnings"])])


def score_tables(record: Record) -> list[Table]:
    """One table per task and, for several tasks of a suite, their average."""
    tables = []
    for task in record["tasks"]:
        table = _table(f"{task['name']} v{task['version']} · {metric(record, task)}", COLUMNS)
        for row in rows_of(record, task["name"]):
            cells = [_stacked(cell) for cell in _cells(row)]
            table.add_row(Text(row_name(row)), *cells, style="bold" if row["variant"] == "gated" else None)
        best = at_best_line([(row_name(row), row.get("at_best")) for row in rows_of(record, task["name"])])
        table.caption, table.caption_justify = Text(best) if best else None, "left"
        for name in left_out(record, task):
            table.add_row(Text(name.replace(", ", "\n")), *[ABSENT] * (len(COLUMNS) - 1))
        tables.append(table)
    for title, rows in suites_of(record):
        table = _table(title, SUITE_COLUMNS)
        for row in rows:
            cells = [_stacked(cell) for cell in _suite_cells(row)]
            table.add_row(Text(row_name(row)), *cells, style="bold" if row["variant"] == "gated" else None)
        tables.append(table)
    return tables


def score_markdown(record: Record) -> str:
    """The same as Markdown, ending in a line end."""
    parts = []
    for task in record["tasks"]:
        rows = rows_of(record, task["name"])
        columns = [*COLUMNS, f"{AT_BEST} %"] if any(row.get("at_best") for row in rows) else COLUMNS
        lines = [
            [row_name(row), *_joined([*_cells(row), at_best_cell(row.get("at_best"))])][: len(columns)] for row in rows
        ]
        lines += [[name, *[ABSENT] * (len(columns) - 1)] for name in left_out(record, task)]
        parts.append(f"### {task['name']} v{task['version']} · {metric(record, task)}\n\n{_markdown(columns, lines)}")
    for title, rows in suites_of(record):
        lines = [[row_name(row), *_joined(_suite_cells(row))] for row in rows]
        parts.append(f"### {title}\n\n{_markdown(SUITE_COLUMNS, lines)}")
    return "\n\n".join([*parts, *caption(record).split("\n")]) + "\n"


def row_name(row: Mapping[str, Any]) -> str:
    """ "gated", "adapter T=0.6"."""
    return row["variant"] if row["control"] is None else f"{row['variant']} {row['control']}"


def left_out(record: Record, task: Mapping[str, Any]) -> list[str]:
    """Rows that the model cannot be, as "adapter λ=0.5, not applicable: DoRA"; the harness is asked for no controls."""
    if task["grader"].startswith("lm-eval"):
        return []
    return [f"{row}, not applicable: {why}" for row, why in record.get("left_out", {}).items()]


def suites_of(record: Record) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """[(title, rows)]: the averages of each suite, as "average of the 5 math tasks", and of suites with subsets over those."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in record["suites"]:
        found.setdefault(row["suite"], []).append(row)
    by_subset = [suite.removesuffix("/subsets") for suite in found if suite.endswith("/subsets")]
    titles = []
    for suite, rows in found.items():
        count, (name, *subsets) = rows[0]["average"]["tasks"], suite.split("/")
        title = f"{name}: average of its {count} subsets" if subsets else f"average of the {count} {suite} tasks"
        if suite == "retention" and by_subset:
            title += f" ({', '.join(by_subset)} by its subsets)"
        titles.append((title, rows))
    return titles


def rows_of(record: Record, task: str) -> list[Mapping[str, Any]]:
    """The results of one task, in the record's order."""
    return [row for row in record["results"] if row["task"] == task]


def metric(record: Record, task: Mapping[str, Any]) -> str:
    """ "Avg@16, 500 questions, T = 1, grader default"."""
    samples = task["sampling"]["samples"]
    questions = rows_of(record, task["name"])[0]["avg_at_k"]["questions"]
    heat = task["sampling"]["temperature"]
    return f"Avg@{samples}, {questions} questions, T = {heat:g}, grader {task['grader']}"


def score_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a row behind its name, as text."""
    return _joined(_cells(row))


def _cells(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    score = row["avg_at_k"]
    total = sum(row["reasons"].values())
    silent = sum(count for reason, count in row["reasons"].items() if reason not in JUDGED)
    majority = row["majority_at_k"]
    return [
        (percent(score["mean"]), f"{percent(score['low'])}–{percent(score['high'])}"),
        _difference(row),
        (ABSENT if majority is None or score["samples"] == 1 else percent(majority["mean"]), ""),
        (percent(row["truncated"]), percent(row["no_eos"]) if row["no_eos"] != row["truncated"] else ""),
        (percent(silent / total), ""),
        (f"{row['tokens']:.0f}", ""),
    ]


def _suite_cells(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    average = row["average"]
    return [
        (percent(average["mean"]), f"{percent(average['low'])}–{percent(average['high'])}"),
        _difference(row),
    ]


def _difference(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Difference, interval and the record's verdict on it."""
    versus = row["comparison"]
    if versus is None:
        return (ABSENT,)
    interval = f"{points(versus['low'])} to {points(versus['high'])}"
    return f"{points(versus['mean'])}, p{p_value(versus['p'])}", interval, row["verdict"] or ""


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True, show_edge=False)
    table.title_justify = "left"
    table.add_column(columns[0], min_width=12, overflow="fold")
    for column in columns[1:]:
        heading = column if "\n" in column else "\n".join(column.rsplit(" ", 1))
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _stacked(cell: Sequence[str]) -> Text:
    """The parts of a cell under one another; the longest verdict takes two lines, or 80 columns would not hold the table."""
    return Text("\n".join(filter(None, cell)).replace("difference shown", "difference\nshown"))


def _joined(cells: Sequence[tuple[str, ...]]) -> list[str]:
    return [f"{first} ({'; '.join(filter(None, rest))})" if any(rest) else first for first, *rest in cells]


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [
        [column.replace("\n", ", " if "EOS" in column else " ") for column in columns],
        ["---", *("---:" for _ in columns[1:])],
        *lines,
    ]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)
