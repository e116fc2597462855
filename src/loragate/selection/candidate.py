"""A range to try; torch-free, so that a command line can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass

from loragate.gates.range import Range


@dataclass(frozen=True)
class Candidate:
    """A range and an objective to try.

    Attributes:
        range: of λ.
        objective: of the training; "entropy" is the paper's.
    """

    range: Range
    objective: str = "entropy"

    @property
    def name(self) -> str:
        """As printed: "[-3,1]", "[-3,1] anchored"."""
        return str(self.range) if self.objective == "entropy" else f"{self.range} {self.objective}"

    @property
    def slug(self) -> str:
        """Name of the candidate's folder."""
        return f"{self.objective}_{self.range.slug}"
