"""Two kinds of questions: the test's, and the rest of the pool; how long their formulas are, and scores weighed as the rows are.

The test's are SVAMP's and need one operation. The rest is GSM8K's, and nine in ten of its questions need two or more, as do about
60 % of the rows that adapters and gates learn from. Scores on one kind alone reward a model for the length that it prefers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from measure import REST as OF_REST
from measure import Asked, demonstrations, read_design, situation_of

from loragate.evaluation.statistics import Difference, compare, compare_suites
from loragate.selection.forms import form_of, missing_kinds, other_forms

Lines = Mapping[tuple[str, str], Mapping[str, Any]]
"""The lines of one cell's record: {(method, what): line}."""

ADAPTER = "LoRA"
GREEDY = Asked("test").what
REST = OF_REST[0].what
FORMULA, OPERATION = re.compile(r"\\boxed\{(.*?)\}"), re.compile(r"[-+*/]")


def scores(line: Mapping[str, Any]) -> np.ndarray:
    """The verdicts of a line, [questions, samples], 0 or 1."""
    return np.array([int(one) for one in line["correct"]], dtype=float).reshape(-1, line["samples"])


def is_longer(text: str) -> bool:
    """Whether the formula in the box has two operations or more; not, if there is none."""
    formula = FORMULA.search(text)
    return formula is not None and len(OPERATION.findall(formula[1])) > 1


def are_longer(line: Mapping[str, Any]) -> np.ndarray:
    """`is_longer` of the first answers, [Q]."""
    return np.array([is_longer(texts[0]) for texts in line["texts"]])


def longer_and_right(line: Mapping[str, Any]) -> str:
    """Share of the first answers whose formula has two operations or more, and of the others those that are right; percents."""
    long_Q = are_longer(line)
    others = scores(line)[~long_Q, 0]
    return f"{100 * long_Q.mean():.0f} / {100 * others.mean():.0f}" if len(others) else "100 / –"


def sign_of(lines: Lines, method: str, what: str = GREEDY) -> dict[str, Any]:
    """The sign that `calibrate` would print, read from these greedy answers: `loragate.selection.forms.other_forms`."""
    return other_forms(*([form_of(texts[0]) for texts in lines[who, what]["texts"]] for who in (method, ADAPTER)))


def lacking(cell: str, lines: Lines, what: str) -> dict[str, Any]:
    """Whether `calibrate` would say that a probe of these questions lacks kinds of the cell's rows: `forms.missing_kinds`."""
    rows = [form_of(row["response"]) for row in rows_of(cell)["own"]]
    return missing_kinds([form_of(texts[0]) for texts in lines[ADAPTER, what]["texts"]], rows)


@cache
def rows_of(cell: str) -> dict[str, list[dict[str, str]]]:
    """The rows that a cell deals to adapters and gates: `measure.demonstrations`."""
    return demonstrations(situation_of(cell, read_design()), int(cell.rsplit("-", 1)[1]))


def share_of_longer_rows(cell: str) -> float:
    """Of the rows that a cell deals to adapters and gates."""
    return float(np.mean([is_longer(row["response"]) for rows in rows_of(cell).values() for row in rows]))


def weighed(cells: Mapping[str, Lines], method: str) -> Difference:
    """A method's greedy answers against the adapter's, test and rest weighed as the cells' rows are.

    Several cells ask the same questions; of each question the mean over them.
    """
    share = float(np.mean([share_of_longer_rows(cell) for cell in cells]))
    own, other = (
        [np.mean([scores(lines[who, what]) for lines in cells.values()], axis=0) for what in (GREEDY, REST)]
        for who in (method, ADAPTER)
    )
    return compare_suites(own, other, weights=(1 - share, share))


def against_adapter(cell: str, lines: Lines, method: str) -> tuple[Difference, Difference, Difference]:
    """A method's greedy answers against the adapter's: on the test, on the rest, and weighed."""
    test, rest = (compare(*(scores(lines[who, what]) for who in (method, ADAPTER))) for what in (GREEDY, REST))
    return test, rest, weighed({cell: lines}, method)


def side_by_side(cell: str, lines: Lines, method: str) -> list[str]:
    """Right and longer on the test, the same on the rest, and what `against_adapter` says of the rest and weighed."""
    both = [lines[method, what] for what in (GREEDY, REST)]
    cells = [f"{100 * of(one).mean():.{digits}f}" for one in both for of, digits in ((scores, 1), (are_longer, 0))]
    return [*cells, *(["", ""] if method == ADAPTER else map(interval, against_adapter(cell, lines, method)[1:]))]


def points(value: float) -> str:
    return f"{100 * value:+.1f}"


def interval(gap: Difference) -> str:
    """A difference in points, with its interval."""
    return f"{points(gap.mean)} ({points(gap.low)} to {points(gap.high)})"
