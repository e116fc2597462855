"""The files in which built-in data sets are published beside the hub's: read as the hub's rows, or refused by name.

Sets of one name differ in what they test. A score with HumanEval+'s name must come from its tests and never from HumanEval's, so a
row that belongs to another set says which task is meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from loragate.errors import DataError
from loragate.evaluation.answers import last_boxed
from loragate.evaluation.sandbox.code import EVALPLUS_RELEASE_ERROR, is_evalplus_release

Row = dict[str, Any]


def _math(row: Row, where: str) -> Row:
    """MATH's own rows (problem, level, type, solution): the answer is in the last box of the solution."""
    if "answer" in row or not row.keys() >= {"problem", "level", "type", "solution"}:
        return row
    answer = last_boxed(str(row["solution"]))
    if not answer:
        raise DataError(
            rf"{where}: a row of MATH without an answer: there is no \boxed{{…}} in its 'solution'; mend or remove it"
        )
    level = re.search(r"\d+", str(row["level"]))
    hub = {"answer": answer, "subject": row["type"], "level": int(level[0]) if level else None}
    return {**row, **hub}


def _has_plus_tests(row: Row) -> bool:
    # every test of HumanEval+ and MBPP+ compares with numpy, none of HumanEval's does
    return is_evalplus_release(row) or "numpy" in str(row.get("test") or "")


Refusal = tuple[Callable[[Row], bool], str]
_NOT_HUMANEVAL: Refusal = (
    _has_plus_tests,
    "it has the tests of HumanEval+, so the score would not be HumanEval's; use --tasks humaneval_plus",
)
_NOT_MBPP_PLUS: Refusal = (
    _has_plus_tests,
    "it is a row of MBPP+, which has other questions and tests; use --tasks mbpp_plus",
)
REFUSED: dict[str, tuple[Refusal, ...]] = {
    "humaneval": (_NOT_HUMANEVAL,),
    "humaneval_raw": (_NOT_HUMANEVAL,),
    "humaneval_plus": (
        (is_evalplus_release, EVALPLUS_RELEASE_ERROR),
        (
            lambda row: isinstance(row.get("test"), str) and not _has_plus_tests(row),
            "it has HumanEval's own tests alone, so the score would not be HumanEval+'s; use --tasks humaneval, or give the rows "
            "of evalplus/humanevalplus on the hub",
        ),
    ),
    "mbpp": (
        _NOT_MBPP_PLUS,
        (
            lambda row: "prompt" in row and "text" not in row,
            "it is a row of the sanitized MBPP, which has other questions; use --tasks mbpp_sanitized",
        ),
    ),
    "mbpp_sanitized": (
        _NOT_MBPP_PLUS,
        (lambda row: "text" in row and "prompt" not in row, "it is a row of the full MBPP; use --tasks mbpp"),
    ),
    "mbpp_plus": (
        (is_evalplus_release, EVALPLUS_RELEASE_ERROR),
        (
            lambda row: not row.get("test"),
            "it has no 'test', so only MBPP's base tests would run and the score would not be MBPP+'s; give the rows of "
            "evalplus/mbppplus on the hub",
        ),
    ),
}
"""By task, the rows that belong elsewhere, and what to say of them."""


def convert_to_hub_row(task: str, row: Row, where: str) -> Row:
    """The row of a built-in task as the hub has it, from the row as it was read.

    Raises:
        DataError: beginning with `where`, for a row of another set.
    """
    for belongs_elsewhere, why in REFUSED.get(task, ()):
        if belongs_elsewhere(row):
            raise DataError(f"{where}: {why}")
    return _math(row, where) if task == "math500" else row
