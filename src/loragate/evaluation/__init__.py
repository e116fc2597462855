"""Evaluation: scores and what may be concluded from them.

The names are imported on first use: grading processes live in this package and must not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loragate.evaluation.grade import Grade
    from loragate.evaluation.grading import MATH_GRADERS, GradingPool, grade_math
    from loragate.evaluation.run import SuiteScores, run_suite
    from loragate.evaluation.sandbox import ProgramResult, run_program
    from loragate.evaluation.statistics import Difference, Estimate, average_at_k, compare, holm

__all__ = [
    "MATH_GRADERS",
    "Difference",
    "Estimate",
    "Grade",
    "GradingPool",
    "ProgramResult",
    "SuiteScores",
    "average_at_k",
    "compare",
    "grade_math",
    "holm",
    "run_program",
    "run_suite",
]

_EXPORTS = {
    "Difference": "statistics",
    "Estimate": "statistics",
    "Grade": "grade",
    "GradingPool": "grading",
    "MATH_GRADERS": "grading",
    "ProgramResult": "sandbox",
    "SuiteScores": "run",
    "average_at_k": "statistics",
    "compare": "statistics",
    "grade_math": "grading",
    "holm": "statistics",
    "run_program": "sandbox",
    "run_suite": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'loragate.evaluation' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"loragate.evaluation.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value
