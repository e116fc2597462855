"""Where and how far the adapter moves the predictions, module by module."""

from __future__ import annotations

from loragate.doctor.exam import Exam
from loragate.doctor.record import Effect
from loragate.gates.adapter_rules import Finding


def examine_effect(exam: Exam) -> tuple[Effect | None, list[Finding]]:
    """See `Effect`; None where there is nothing to go by."""
    return None, []
