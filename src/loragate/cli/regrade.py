"""`loragate regrade`: judge stored samples with another grader, without generating again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from loragate.cli.arguments import Command
from loragate.display import Display, console
from loragate.evaluation.settings import GradingSettings
from loragate.files import write_text


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
    from loragate.cli.evaluating import next_line, show
    from loragate.evaluation.evaluate import counted, open_evaluation
    from loragate.evaluation.results import write_record

    folder, out = Path(options.run), console()
    evaluation = open_evaluation(folder, options)
    count = evaluation.sample_count
    with Display().job("grading") as job:
        record, changes = evaluation.judge_again(options.again, counted(job, count))
    place = folder / (f"results-{options.grader}" if options.grader else "results-regraded")
    if changes is not None:  # None where no earlier verdicts are there to compare with
        path = place.with_name(f"{place.name}-changes.jsonl")
        write_text(path, "".join(json.dumps(change, ensure_ascii=False) + "\n" for change in changes))
        out.print(f"{len(changes)} of {count} verdicts differ from {folder / 'results.json'}")
        for change in changes[:5]:
            said = "; ".join(
                f"{found['grader']}: {'right' if found['correct'] else found['reason']} ({found['extracted']!r:.60})"
                for found in (change["before"], change["now"])
            )
            where = f"{change['task']} {change['question']} [{change['variant']}], gold {change['gold']!r:.60}"
            out.print(f"  {where}: {said}")
        if changes:
            out.print(f"all of them: {path}")
    write_record(record, place.with_name(f"{place.name}.json"))
    show(out, place, record)
    out.print(next_line(folder, record))
    return 0


COMMAND = Command(
    name="regrade",
    options=RegradeOptions,
    run=run,
    examples=("loragate regrade runs/math --grader dft", "loragate regrade runs/math --grader math_verify"),
    positional="run",
)
