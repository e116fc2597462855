"""The math graders by name: what each decides at once, and which function decides the rest in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loragate.errors import ConfigError, nearest
from loragate.evaluation.answers import Grade, last_boxed
from loragate.evaluation.grading import dft
from loragate.evaluation.grading.default import UnjudgedError, decide


@dataclass(frozen=True)
class Job:
    """A comparison for a worker; equal jobs have equal verdicts and are graded once."""

    gold: str
    text: str
    tolerance: float | None = None


@dataclass(frozen=True)
class MathGrader:
    """A way to judge answers.

    Attributes:
        name: its name in `MATH_GRADERS`.
        begin: (response, gold, tolerance) to a grade, or to the job that a worker must do for it.
        judge: `module:function` that the worker calls.
    """

    name: str
    begin: Callable[[str, str, float | None], Grade | Job]
    judge: str


def math_grader(name: str) -> MathGrader:
    """Return the grader called `name`, or raise `ConfigError`."""
    if name not in MATH_GRADERS:
        raise ConfigError(
            f"unknown math grader {name!r}{nearest(name, MATH_GRADERS)}; known: {', '.join(MATH_GRADERS)}"
        )
    return MATH_GRADERS[name]


def _begin_default(response: str, gold: str, tolerance: float | None) -> Grade | Job:
    answer = last_boxed(response)
    if answer is None:
        return Grade(False, None, "no_box")
    try:
        verdict = decide(gold, answer, tolerance, lambda *_: None)
    except (UnjudgedError, RecursionError):
        return Grade(False, answer, "unparsed")
    return Job(gold, answer, tolerance) if verdict is None else Grade(verdict, answer, "ok" if verdict else "wrong")


def _begin_dft(response: str, gold: str, tolerance: float | None) -> Grade | Job:
    answer, stripped = dft.extract(response), dft.strip_string(gold)
    if answer.strip().lower() == stripped.strip().lower():
        return Grade(True, answer, "ok")
    return Job(stripped, answer) if answer else Grade(False, None, "no_box")


def _begin_math_verify(response: str, gold: str, tolerance: float | None) -> Grade | Job:
    return Job(gold, response)


_JUDGES = "loragate.evaluation.grading.judges"
MATH_GRADERS: dict[str, MathGrader] = {
    grader.name: grader
    for grader in (
        MathGrader("default", _begin_default, f"{_JUDGES}:default"),
        MathGrader("math_verify", _begin_math_verify, f"{_JUDGES}:math_verify"),
        MathGrader("dft", _begin_dft, f"{_JUDGES}:dft"),
    )
}
