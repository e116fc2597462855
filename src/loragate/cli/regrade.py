"""`loragate regrade`: judge stored samples with another grader, without generating again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command
from loragate.cli.display import Display, console
from loragate.cli.evaluate import finish
from loragate.cli.options import GradingOptions
from loragate.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RegradeOptions(GradingOptions):
    """Settings of `loragate regrade`.

    Attributes:
        run: folder of an evaluation.
        again: judge again even if this grader's verdicts are stored.
    """

    run: str
    again: bool = False


def run(options: RegradeOptions) -> int:
    """Judge, tabulate beside the earlier record, list what changed."""
    folder = Path(options.run)
    from loragate.evaluation.judging import JudgeSettings, require_graders
    from loragate.evaluation.results import read_record
    from loragate.evaluation.stored import changed_verdicts, open_evaluation, stored_verdicts
    from loragate.files import write_text

    settings = JudgeSettings(workers=options.workers, timeout_s=options.timeout, sandbox=options.sandbox)
    evaluation = open_evaluation(folder, options.grader, settings)
    require_graders([prepared.task for prepared in evaluation.tasks], options.grader, settings)
    out = console()
    earlier = folder / "results.json"
    known = {info.name: info.grader for info in read_record(earlier).tasks} if earlier.is_file() else {}
    before = stored_verdicts(evaluation, known)
    if options.again:
        evaluation.forget_grades()
    with Display().job("grading", evaluation.sample_count, "answer") as job:
        done: dict[tuple[str, str], int] = {}

        def on_event(stage: str, variant: Any, task: str, count: int, total: int) -> None:
            done[variant.name, task] = count
            job.advance_to(sum(done.values()), evaluation.sample_count, f"{variant.name} on {task}")

        record = evaluation.run(_no_engine, on_event)
    name = f"results-{options.grader}" if options.grader else "results-regraded"
    if before:
        changes = changed_verdicts(evaluation, before)
        write_text(folder / f"{name}-changes.jsonl", _lines(changes))
        out.print(f"{len(changes)} of {evaluation.sample_count} verdicts differ from {earlier}", markup=False)
        for change in changes[:5]:
            out.print(_describe(change), markup=False)
        if changes:
            out.print(f"all of them: {folder / f'{name}-changes.jsonl'}", markup=False)
    finish(out, folder, record, name)
    return 0


def _no_engine(variant: Any) -> Any:
    raise ConfigError(f"the answers of {variant.name} are not complete; finish the evaluation first with --resume")


def _lines(rows: list[dict[str, Any]]) -> str:
    import json

    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _describe(change: dict[str, Any]) -> str:
    said = "; ".join(
        f"{found['grader']}: {'right' if found['correct'] else found['reason']} ({found['extracted']!r:.60})"
        for found in (change["before"], change["now"])
    )
    return f"  {change['task']} {change['question']} [{change['variant']}], gold {change['gold']!r:.60}: {said}"


COMMAND = Command(
    name="regrade",
    summary="Judge the stored answers of an evaluation with another grader; nothing is generated again.",
    options=RegradeOptions,
    run=run,
    examples=("loragate regrade runs/math --grader dft", "loragate regrade runs/math --grader math_verify"),
    positional="run",
)
