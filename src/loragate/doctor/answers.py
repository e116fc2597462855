"""Answers of base and adapter to the same prompts: stopping, repetition, language, thinking, forgetting."""

from __future__ import annotations

from loragate.doctor.exam import Exam
from loragate.doctor.record import Answers
from loragate.gates.adapter_rules import Finding


def examine_answers(exam: Exam) -> tuple[Answers | None, list[Finding]]:
    """See `Answers`; None where there is nothing to go by."""
    return None, []
