"""The sets that are made on the spot, and the tiny world: arithmetic of four steps, what should be kept, the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from loragate.evaluation.answers import Grade
from loragate.evaluation.tasks import arithmetic
from loragate.world.problems import Problem, problems, retention_items, verify
from loragate.world.tokenizer import EOS

SPLIT = "test"
OPERATIONS = (4, 4)


def arithmetic_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows {prompt, answer, kind, operations} of the tiny world's test split."""
    return [dataclasses.asdict(problem) for problem in problems(SPLIT, count, OPERATIONS, seed)]


def retention_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """The same for reversing, sorting and facts."""
    return [dataclasses.asdict(item) for item in retention_items(SPLIT, count, seed)]


GENERATORS: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {
    "arithmetic": arithmetic.rows,
    "tiny": arithmetic_rows,
    "tiny_retention": retention_rows,
}
"""Rows from (count, seed), by name."""


def grade_tiny(row: Mapping[str, Any], response: str, finished: bool) -> Grade:
    """The tiny world's strict verdict on one response.

    Args:
        row: the question's row.
        response: decoded text.
        finished: whether the model ended the response itself.
    """
    problem = Problem(row["prompt"], row["answer"], row["kind"], row["operations"])
    words = response.split(EOS)[0].split()
    extracted = (words[-1] if words[-2:-1] == ["answer"] else None) if problem.kind == "arithmetic" else " ".join(words)
    if not finished:
        return Grade(False, extracted or None, "unfinished")
    correct = verify(problem, response, finished)
    reason = "ok" if correct else ("wrong" if extracted else "no_answer")
    return Grade(correct, extracted or None, reason)
