"""Programs written by a model, run where they can do no harm and judged where they cannot cheat."""

from loragate.evaluation.sandbox.code import grade_code
from loragate.evaluation.sandbox.programs import Checks, available_tiers, probe, run_program, run_tests
from loragate.evaluation.sandbox.tiers import Limits, ProgramResult

__all__ = ["Checks", "Limits", "ProgramResult", "available_tiers", "grade_code", "probe", "run_program", "run_tests"]
