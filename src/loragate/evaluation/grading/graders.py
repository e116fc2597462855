"""The math graders by name: what each decides at once, and which function decides the rest in a worker."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loragate.errors import ConfigError, nearest
from loragate.evaluation.answers import Grade, last_boxed
from loragate.evaluation.grading import dft
from loragate.evaluation.grading.default import UnjudgedError, decide

if TYPE_CHECKING:
    from loragate.evaluation.grading.pool import GradingPool


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

    def grade(self, response: str, gold: str, tolerance: float | None = None) -> Grade:
        """Grade one response; the algebra, where needed, runs in a killable process shared by all calls."""
        begun = self.begin(response, gold, tolerance)
        return begun if isinstance(begun, Grade) else _shared_pool(self).run([begun])[0]


def grade_math(response: str, gold: str, grader: str = "default", *, tolerance: float | None = None) -> Grade:
    """Judge the answer in `response` against the reference `gold`.

    Args:
        response: the whole response of a model; see `extraction.py` for where its answer is looked for.
        gold: the reference answer as the data set has it, LaTeX or plain, not boxed.
        grader: a name in `MATH_GRADERS`.
        tolerance: absolute error that the question allows (the `error` column of OlympiadBench); default grader only.

    Raises:
        ConfigError: for an unknown grader.
    """
    return math_grader(grader).grade(response, gold, tolerance)


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

_pools: dict[str, GradingPool] = {}
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a forked child must not end its parent's workers


def _shared_pool(grader: MathGrader) -> GradingPool:
    from loragate.evaluation.grading.pool import GradingPool

    with _lock:
        pool = _pools.get(grader.judge)
        if pool is None:
            pool = _pools[grader.judge] = GradingPool(grader, workers=1)
        return pool


@atexit.register
def close_shared_pools() -> None:
    """End the processes that `grade_math` started; the next call starts them again."""
    with _lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()
