"""A range to try; torch-free, so that a command line can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A range and an objective to try.

    Attributes:
        lower, upper: bounds of λ.
        objective: of the training; "entropy" is the paper's.
    """

    lower: float
    upper: float
    objective: str = "entropy"

    @property
    def name(self) -> str:
        """As printed: "[-3,1]", "[-3,1] anchored"."""
        kind = "" if self.objective == "entropy" else f" {self.objective}"
        return f"[{self.lower:g},{self.upper:g}]{kind}"

    @property
    def bounds(self) -> tuple[float, float]:
        """(L, U)."""
        return self.lower, self.upper

    @property
    def slug(self) -> str:
        """As part of a path."""
        return f"{self.objective}_{self.lower:g}_{self.upper:g}"
