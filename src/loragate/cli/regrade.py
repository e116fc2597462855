"""`loragate regrade`: judge stored samples with another grader, without generating again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loragate.cli.arguments import Command
from loragate.display import Display, console
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
    """Judge, and tabulate beside the earlier record."""
    from loragate.cli.evaluation_runs import next_line, print_results
    from loragate.evaluation.evaluate import make_progress_reporter, open_evaluation
    from loragate.evaluation.results import write_record

    folder, out = Path(options.run), console()
    evaluation = open_evaluation(folder, options)
    count = evaluation.sample_count
    with Display().job("grading") as job:
        record = evaluation.regrade(options.again, make_progress_reporter(job, count))
    place = folder / (f"results-{options.grader}" if options.grader else "results-regraded")
    write_record(record, place.with_name(f"{place.name}.json"))
    print_results(out, place, record)
    out.print(next_line(folder, record))
    return 0


COMMAND = Command(
    name="regrade",
    options=RegradeOptions,
    run=run,
    examples=("loragate regrade runs/math", "loragate regrade runs/math --grader math_verify"),
    positional="run",
)
