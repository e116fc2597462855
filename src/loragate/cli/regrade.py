"""`loragate regrade`: judge stored samples with another grader, without generating again."""

from __future__ import annotations

from dataclasses import dataclass

from loragate.cli.arguments import Command
from loragate.evaluation.settings import GradingSettings


@dataclass(frozen=True, kw_only=True)
class RegradeOptions(GradingSettings):
    """Settings of `loragate regrade`.

    Attributes:
        run: folder of an evaluation.
        again: judge again even if this grader's verdicts are stored.
    """

    run: str
    again: bool = False


def run(options: RegradeOptions) -> int:
    """Judge, tabulate beside the earlier record, list what changed."""
    from loragate.cli.evaluating import regrade

    return regrade(options)


COMMAND = Command(
    name="regrade",
    options=RegradeOptions,
    run=run,
    examples=("loragate regrade runs/math --grader dft", "loragate regrade runs/math --grader math_verify"),
    positional="run",
)
