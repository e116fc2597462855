"""Programs written by a model, run where they can do no harm and judged where they cannot cheat."""

from loragate.evaluation.sandbox.bubblewrap import SandboxError
from loragate.evaluation.sandbox.code import KINDS, grade_code, grade_codes
from loragate.evaluation.sandbox.extract import extract_code
from loragate.evaluation.sandbox.run import (
    TIERS,
    Checks,
    Limits,
    ProgramResult,
    probe,
    require_sandbox,
    run_program,
)

__all__ = [
    "KINDS",
    "TIERS",
    "Checks",
    "Limits",
    "ProgramResult",
    "SandboxError",
    "extract_code",
    "grade_code",
    "grade_codes",
    "probe",
    "require_sandbox",
    "run_program",
]
