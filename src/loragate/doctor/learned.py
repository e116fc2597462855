"""Losses on the examples: is it the right base, the right strength, learnt or memorised."""

from __future__ import annotations

from loragate.doctor.exam import Exam
from loragate.doctor.record import Learned
from loragate.gates.adapter_rules import Finding


def examine_learned(exam: Exam) -> tuple[Learned | None, list[Finding]]:
    """See `Learned`; None where there is nothing to go by."""
    return None, []
