"""The whole method on the tiny world: a study of minutes on two cores, offline, with its controls and an honest reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from loragate.validate import PositiveInt


@dataclass(frozen=True)
class QuickstartSettings:
    """Settings of a quickstart.

    Attributes:
        out: run folder; a number is appended if it exists.
        seed: seed of data, training and sampling.
        ranges: ranges to calibrate, separated by semicolons.
        questions: test questions.
        samples: samples per test question.
        threads: CPU threads; models this small are fastest with one.
    """

    out: str = "runs/quickstart"
    seed: int = 0
    ranges: str = "-3,1;0,1;-6,3"
    questions: Annotated[int, Ge(2)] = 200
    samples: PositiveInt = 16
    threads: PositiveInt = 1
