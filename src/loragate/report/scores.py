"""The tables of an evaluation, for the terminal and for Markdown, from the record's JSON.

One table per task, with what must stand beside a score: its interval, the paired difference to the adapter and what may be
said of it, how many answers were cut off and how many could not be judged. Last tables average over the tasks of a suite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from loragate.report.table import (
    ABSENT,
    AT_BEST,
    HOW,
    Cell,
    at_best_cell,
    at_best_line,
    difference_cell,
    markdown_table,
    percent,
    share_cell,
    stacked,
    terminal_table,
)

Record = Mapping[str, Any]
COLUMNS = ("Model", "Score %", "vs adapter, points", "Majority %", "Cut off, no EOS %", "No answer %", "Tokens")
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
    for title, columns, rows, of_record in _tables(record):
        best = at_best_line([(row_name(row), row.get("at_best")) for row in of_record])
        table = terminal_table(title, columns, best)
        for name, cells, bold in rows:
            table.add_row(*stacked([(name.replace(", ", "\n"),), *cells]), style="bold" if bold else None)
        tables.append(table)
    return tables


def score_markdown(record: Record) -> str:
    """The same as Markdown, ending in a line end; scores at the best temperature are a column of their own."""
    parts = []
    for title, columns, rows, of_record in _tables(record):
        lines = [(name, cells) for name, cells, _ in rows]
        if any(row.get("at_best") for row in of_record):
            columns = [*columns, f"{AT_BEST} %"]
            best = [at_best_cell(row.get("at_best")) for row in of_record]
            best += [(ABSENT,)] * (len(lines) - len(best))
            lines = [(name, [*cells, cell]) for (name, cells), cell in zip(lines, best, strict=True)]
        parts.append(f"### {title}\n\n{markdown_table(columns, lines)}")
    return "\n\n".join([*parts, *caption(record).split("\n")]) + "\n"


Line = tuple[str, list[Cell], bool]


def _tables(record: Record) -> Iterator[tuple[str, Sequence[str], list[Line], list[Mapping[str, Any]]]]:
    """(title, columns, lines, rows of the record) of each task, then of each average.

    A line is (name, cells, whether it is the gated model). Lines of what was left out come last and have no row.
    """
    for task in record["tasks"]:
        found = rows_of(record, task["name"])
        lines = [(row_name(row), cells_of(row), row["variant"] == "gated") for row in found]
        absent: list[Cell] = [(ABSENT,) for _ in COLUMNS[1:]]
        lines += [(name, absent, False) for name in left_out(record, task)]
        yield f"{task['name']} v{task['version']} · {metric(record, task)}", COLUMNS, lines, found
    for title, averages in suites_of(record):
        lines = [(row_name(row), suite_cells(row), row["variant"] == "gated") for row in averages]
        yield title, SUITE_COLUMNS, lines, averages


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


def cells_of(row: Mapping[str, Any]) -> list[Cell]:
    """The cells of a row of a task, behind its name."""
    score, majority = row["avg_at_k"], row["majority_at_k"]
    total = sum(row["reasons"].values())
    silent = sum(count for reason, count in row["reasons"].items() if reason not in JUDGED)
    return [
        share_cell(score),
        difference_cell(row["comparison"], row["verdict"]),
        (ABSENT if majority is None or score["samples"] == 1 else percent(majority["mean"]),),
        (percent(row["truncated"]), percent(row["no_eos"]) if row["no_eos"] != row["truncated"] else ""),
        (percent(silent / total),),
        (f"{row['tokens']:.0f}",),
    ]


def suite_cells(row: Mapping[str, Any]) -> list[Cell]:
    """The cells of an average over tasks, behind its name."""
    return [share_cell(row["average"]), difference_cell(row["comparison"], row["verdict"])]
