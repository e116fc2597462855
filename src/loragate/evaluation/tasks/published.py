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
from loragate.evaluation.evalplus import INPUTS, MBPP_RELEASE, is_release, release_test

Row = dict[str, Any]


def _math(row: Row) -> Row:
    """MATH's own rows (problem, level, type, solution): the answer is in the last box of the solution."""
    if "answer" in row or not row.keys() >= {"problem", "level", "type", "solution"}:
        return row
    answer = last_boxed(str(row["solution"]))
    if not answer:
        raise DataError(r"a row of MATH without an answer: there is no \boxed{…} in its 'solution'; mend or remove it")
    level = re.search(r"\d+", str(row["level"]))
    hub = {"answer": answer, "subject": row["type"], "level": int(level[0]) if level else None}
    return {**row, **hub}


def _has_plus_tests(row: Row) -> bool:
    # every test of HumanEval+ and MBPP+ compares with numpy, none of HumanEval's does
    return is_release(row) or "numpy" in str(row.get("test") or "")


def _humaneval(row: Row) -> Row:
    if _has_plus_tests(row):
        raise DataError(
            "it has the tests of HumanEval+, so the score would not be HumanEval's; use --tasks humaneval_plus"
        )
    return row


def _humaneval_plus(row: Row) -> Row:
    if is_release(row):  # the inputs are in the test now
        return {name: value for name, value in row.items() if name not in INPUTS} | {"test": release_test(row)}
    if isinstance(row.get("test"), str) and not _has_plus_tests(row):
        raise DataError(
            "it has HumanEval's own tests alone, so the score would not be HumanEval+'s; use --tasks humaneval, or give the rows "
            "of evalplus/humanevalplus on the hub or EvalPlus's HumanEvalPlus.jsonl"
        )
    return row


def _mbpp(row: Row) -> Row:
    if _has_plus_tests(row):
        raise DataError("it is a row of MBPP+, which has other questions and tests; use --tasks mbpp_plus")
    if "prompt" in row and "text" not in row:
        raise DataError("it is a row of the sanitized MBPP, which has other questions; use --tasks mbpp_sanitized")
    return row


def _mbpp_sanitized(row: Row) -> Row:
    if _has_plus_tests(row):
        raise DataError("it is a row of MBPP+, which has other questions and tests; use --tasks mbpp_plus")
    if "text" in row and "prompt" not in row:
        raise DataError("it is a row of the full MBPP; use --tasks mbpp")
    return row


def _mbpp_plus(row: Row) -> Row:
    if is_release(row):
        raise DataError(MBPP_RELEASE)
    if not row.get("test"):
        raise DataError(
            "it has no 'test', so only MBPP's base tests would run and the score would not be MBPP+'s; give the rows of "
            "evalplus/mbppplus on the hub"
        )
    return row


FORMS: dict[str, Callable[[Row], Row]] = {
    "math500": _math,
    "humaneval": _humaneval,
    "humaneval_raw": _humaneval,
    "humaneval_plus": _humaneval_plus,
    "mbpp": _mbpp,
    "mbpp_sanitized": _mbpp_sanitized,
    "mbpp_plus": _mbpp_plus,
}
"""The row as the hub has it, from the row as it was read, by task; a DataError says what belongs elsewhere."""
