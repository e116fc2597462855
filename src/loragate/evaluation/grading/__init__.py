"""Judging mathematical answers: `grade_math` for one, `GradingPool` for many.

Importing this package is light: math-verify is imported by worker processes only, torch by none of them.
"""

from loragate.evaluation.answers import Grade, last_boxed
from loragate.evaluation.grading.pool import MATH_GRADERS, GradingPool, Job, MathGrader, grade_math

__all__ = ["MATH_GRADERS", "Grade", "GradingPool", "Job", "MathGrader", "grade_math", "last_boxed"]
