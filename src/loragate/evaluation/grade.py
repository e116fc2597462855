"""The verdict on one answer, as every grader gives it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grade:
    """A verdict and why.

    Attributes:
        correct: whether the answer counts.
        extracted: what was taken from the response as its answer; None where nothing was found.
        reason: "ok", "wrong", or why nothing could be judged ("no_box", "unparsed", "timeout", "crashed", …).
    """

    correct: bool
    extracted: str | None
    reason: str
