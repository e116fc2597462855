"""What a diagnosis reads and tries, as command lines offer it. Light: `--help` reads this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from loragate.validate import PositiveInt


@dataclass(frozen=True)
class DiagnoseSettings:
    """What a diagnosis reads and tries; in brackets those that read a setting.

    Attributes:
        rows: (entropy, alignment) prompts and responses to read, in the formats of calibrate's --data.
        max_rows: (entropy, alignment) first rows, or answers, to read; 256 for entropy, 48 for alignment.
        max_length: (entropy, alignment, tokens) tokens of a row, or of a prompt with its answer, that are read; for `tokens` of an
            answer alone, at most 512.
        run: (gates, alignment, tokens) folder of `loragate eval` whose stored answers are read: all tasks, or those of --tasks.
        of: (gates, alignment) model whose answers are read; by default gated for gates,
            adapter for alignment.
        answers: (gates, alignment) answers to read per question.
        suppress: (entropy) signs of ΔH at which the delta is switched off: negative and/or positive.
        interventions: (interventions) overrides of λ, separated by commas: noreverse, noextrapolate, unit, off,
            constant=0.5, clip=-1:2; the first four if empty.
        value: (alignment) source of the task value.
        reference: (alignment) with --value reference: base, adapter, or a model with the same vocabulary.
        k: (alignment) support of the entropy objective, 0 for the whole vocabulary; by default the one that the gates were trained
            with.
    """

    rows: str = ""
    max_rows: Annotated[int, Ge(2)] | None = None  # intervals are over rows
    max_length: PositiveInt = 4096
    run: str = ""
    of: Literal["gated", "adapter", "base"] | None = None
    answers: PositiveInt = 4
    suppress: str = "negative,positive"
    interventions: str = ""
    value: Literal["reference", "reward"] = "reference"
    reference: str = "base"
    k: int | None = None
