"""Target against retention over strengths, bands of layers, kinds of modules and gates."""

from __future__ import annotations

from loragate.doctor.exam import Exam
from loragate.doctor.record import Strength
from loragate.gates.adapter_rules import Finding


def examine_strength(exam: Exam) -> tuple[Strength | None, list[Finding]]:
    """See `Strength`; None where there is nothing to go by."""
    return None, []
