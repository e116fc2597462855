"""Programs written by a model, run where they can do no harm and judged where they cannot cheat."""

from loragate.evaluation.sandbox.code import (
    extract_code,
    grade_code,
    grade_codes,
    humaneval_program,
    mbpp_program,
)
from loragate.evaluation.sandbox.programs import Checks, available_tiers, probe, run_program, run_tests
from loragate.evaluation.sandbox.tiers import TIERS, Limits, ProgramResult, SandboxError

__all__ = [
    "TIERS",
    "Checks",
    "Limits",
    "ProgramResult",
    "SandboxError",
    "available_tiers",
    "extract_code",
    "grade_code",
    "grade_codes",
    "humaneval_program",
    "mbpp_program",
    "probe",
    "run_program",
    "run_tests",
]
