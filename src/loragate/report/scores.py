"""The tables of an evaluation, from the record's JSON.

One table per task, with what must stand beside a score: its interval, the paired difference to the adapter and what may be
said of it, how many answers were cut off and how many could not be judged. Last tables average over the tasks of a suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loragate.display import percent
from loragate.report.table import ABSENT, GROUP_OF, Cell, Line, Sheet, at_best_line, difference_cell, share_cell

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
    if record["sandbox"]:
        text += f" Programs ran in the tier {record['sandbox']}."
    return "\n".join([text, *(f"warning: {warning}" for warning in record["warnings"])])


def score_tables(record: Record) -> list[Sheet]:
    """One table per task and, for several tasks of a suite, their average; rows that were left out come last."""
    tables = []
    for task in record["tasks"]:
        rows = rows_of(record, task["name"])
        lines = [_line(row, row["avg_at_k"], *_judged_cells(row)) for row in rows]
        if not task["grader"].startswith("lm-eval"):  # the harness is asked for no controls
            left_out = record.get("left_out", {}).items()
            lines += [Line(f"{row}, not applicable: {why}", [(ABSENT,)] * (len(COLUMNS) - 1)) for row, why in left_out]
        sampling, questions = task["sampling"], rows[0]["avg_at_k"]["questions"]
        title = f"{task['name']} v{task['version']} · Avg@{sampling['samples']}, {questions} questions, "
        title += f"T = {sampling['temperature']:g}, grader {task['grader']}"
        tables.append(Sheet(title, COLUMNS, lines, _at_best(rows)))
    for title, rows in suites_of(record):
        lines = [_line(row, row["average"]) for row in rows]
        tables.append(Sheet(title, SUITE_COLUMNS, lines, _at_best(rows)))
    return tables


def score_markdown(record: Record) -> str:
    """All of them as Markdown, ending in a line end."""
    return "\n\n".join([*(table.markdown() for table in score_tables(record)), *caption(record).split("\n")]) + "\n"


def _line(row: Record, score: Record, *more: Cell) -> Line:
    group = GROUP_OF[row["variant"]] if row["control"] is None else "control"
    cells = [share_cell(score), difference_cell(row["comparison"], row["verdict"]), *more]
    return Line(row_name(row), cells, group, score)


def _judged_cells(row: Record) -> list[Cell]:
    """What follows score and difference in the row of a task."""
    majority, total = row["majority_at_k"], sum(row["reasons"].values())
    silent = sum(count for reason, count in row["reasons"].items() if reason not in JUDGED)
    return [
        (ABSENT if majority is None or row["avg_at_k"]["samples"] == 1 else percent(majority["mean"]),),
        (percent(row["truncated"]), percent(row["no_eos"]) if row["no_eos"] != row["truncated"] else ""),
        (percent(silent / total),),
        (f"{row['tokens']:.0f}",),
    ]


def _at_best(rows: list[Record]) -> str:
    return at_best_line((row_name(row), row.get("at_best")) for row in rows)


def row_name(row: Record) -> str:
    """ "gated", "adapter T=0.6"."""
    return row["variant"] if row["control"] is None else f"{row['variant']} {row['control']}"


def suites_of(record: Record) -> list[tuple[str, list[Record]]]:
    """[(title, rows)]: the averages of each suite, as "average of the 5 math tasks", and of suites with subsets over those."""
    found: dict[str, list[Record]] = {}
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


def rows_of(record: Record, task: str) -> list[Record]:
    """The results of one task, in the record's order."""
    return [row for row in record["results"] if row["task"] == task]
