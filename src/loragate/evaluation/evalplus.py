"""EvalPlus's release form of HumanEval+: inputs in place of tests, turned into a test like those of the other data sets.

A row of the release (`HumanEvalPlus.jsonl`) holds `base_input` and `plus_input`, lists of arguments, and the solution that says
what is right for each. The same rows on the hub have all of it in `test`. The rules of comparison are EvalPlus's: equal, or
within `atol` (1e-6 for floats that state none) where numbers are floats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from loragate.errors import DataError

INPUTS = ("base_input", "plus_input")
MBPP_RELEASE = (
    "it has the inputs of EvalPlus's MbppPlus.jsonl, some of which JSON cannot write (tuples, sets); give the rows of "
    "evalplus/mbppplus on the hub, which hold the tests in `test`, to --tasks mbpp_plus"
)

# It runs where the tests run, which the program under test cannot reach; the solution sees names of its own alone.
TEST = """
import builtins, copy, json, math

SOLUTION = {solution!r}
INPUTS = json.loads({inputs!r})
TOLERANCE = {tolerance!r}


def floats(value):
    return isinstance(value, float) or (
        isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(item, float) for item in value)
    )


def close(found, expected, tolerance):
    if type(found) is not type(expected):
        return False
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(close(*pair, tolerance) for pair in zip(found, expected))
    if isinstance(expected, float):
        return abs(found - expected) <= tolerance + 1e-7 * abs(expected)
    return found == expected


def check(candidate):
    names = {{"__builtins__": builtins, "__name__": "solution"}}
    exec(SOLUTION, names)
    for arguments in INPUTS:
        found = candidate(*copy.deepcopy(arguments))
        if {root!r}:  # any root is right, so that it is the polynomial's value that counts
            assert math.fabs(names["poly"](*copy.deepcopy(arguments), found)) <= max(TOLERANCE, 1e-4), arguments
            continue
        expected = names[{entry!r}](*copy.deepcopy(arguments))
        tolerance = TOLERANCE or (1e-6 if floats(expected) else 0)
        assert found == expected or (tolerance and close(found, expected, tolerance)), arguments
"""


def is_release(row: Mapping[str, Any]) -> bool:
    """Whether a row has EvalPlus's inputs."""
    return any(row.get(name) is not None for name in INPUTS)


def release_test(row: Mapping[str, Any]) -> str:
    """The `test` of a row of the release: `check(candidate)` over all of its inputs.

    Raises:
        DataError: for a row without lists of arguments or without its solution.
    """
    for name in INPUTS:
        value = row.get(name)
        if not isinstance(value, list) or not all(isinstance(arguments, list) for arguments in value):
            raise DataError(
                f"row {row.get('task_id')!r}: `{name}` is {value!r:.80}; expected a list of lists of arguments"
            )
    if not row["plus_input"]:
        raise DataError(f"row {row.get('task_id')!r}: `plus_input` is empty, so that only the base tests would run")
    for name in ("prompt", "canonical_solution", "entry_point"):
        if not isinstance(row.get(name), str):
            raise DataError(f"row {row.get('task_id')!r}: `{name}` is {row.get(name)!r:.80}; expected text")
    return TEST.format(
        solution=row["prompt"] + row["canonical_solution"],
        inputs=json.dumps([*row["base_input"], *row["plus_input"]]),
        tolerance=float(row.get("atol") or 0),
        entry=row["entry_point"],
        root=row["entry_point"] == "find_zero",
    )
