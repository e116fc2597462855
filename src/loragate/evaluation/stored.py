"""An evaluation read back from its folder: to judge it again with another grader.

Neither the model nor the data set is needed: questions, prompts, task files and samples lie in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from loragate.errors import ConfigError, DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.evaluate import Evaluation, OnEvent, unheard
from loragate.evaluation.judging import JudgeSettings, grader_for, read_grades, require_graders
from loragate.evaluation.prepared import Prepared, read_questions
from loragate.evaluation.results import EvaluationRecord, read_record
from loragate.evaluation.retention import all_measured
from loragate.evaluation.tasks import Questions, load_task
from loragate.evaluation.variants import Variant
from loragate.generation import SamplingConfig, ScoringEngine, read_samples
from loragate.records import read
from loragate.validate import STRICT


@dataclass(frozen=True)
class StoredTask:
    """What eval.json says of a task; its file and its questions lie beside it."""

    task: str
    questions: str
    source: str
    revision: str | None
    sampling: SamplingConfig
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class StoredEvaluation:
    """eval.json, as far as answers are judged again from it."""

    __pydantic_config__: ClassVar = {**STRICT, "extra": "ignore"}
    models: dict[str, str]
    seed: int
    variants: tuple[Variant, ...]
    tasks: tuple[StoredTask, ...]
    suites: tuple[str, ...]
    notes: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)


def open_evaluation(folder: Path, grader: str = "", judging: JudgeSettings | None = None) -> Evaluation:
    """The evaluation of a folder, ready to be judged again.

    Raises:
        DataError: if the folder holds none, or what it holds cannot be read.
    """
    path = folder / "eval.json"
    if not path.is_file():
        raise DataError(f"{folder} is not the folder of an evaluation: it has no eval.json")
    begun = read(StoredEvaluation, path, "run the evaluation again")
    # verdicts are written into a folder of that name
    if any(set(one.slug) & set("/\\\0") or not one.slug.strip(".") for one in begun.variants):
        raise DataError(f"{path}: the name of a row is a path")
    prepared = []
    for row in begun.tasks:
        questions = read_questions(folder, row.task)
        prepared.append(
            Prepared(
                load_task(folder / "tasks" / f"{row.task}.yaml"),
                Questions(questions, row.source, row.revision, row.questions),
                tuple(question.prompt for question in questions),
                row.sampling,
                row.warnings,
            )
        )
    kept = folder / "results.json"
    return Evaluation(
        folder,
        prepared,
        begun.variants,
        models=begun.models,
        # a record holds the canary; a run that was stopped before its end has none yet
        canary=read_record(kept).canary if kept.is_file() else {},
        seed=begun.seed,
        judging=judging,
        grader=grader,
        suites=[name for name in begun.suites if all_measured(folder, name, begun.variants)],
        notes=begun.notes,
        left_out=begun.left_out,
    )


def judge_again(
    evaluation: Evaluation, again: bool = False, on_event: OnEvent = unheard
) -> tuple[EvaluationRecord, list[dict[str, Any]] | None]:
    """The record under the evaluation's grader, and the answers that it judges differently than results.json has them.

    Nothing is generated. The second is None where there is no earlier record of these answers.

    Args:
        again: judge again even if this grader's verdicts are on file.

    Raises:
        ConfigError: for a grader that does not work here, and for an evaluation that is not finished.
    """

    def no_engine(variant: Variant) -> AbstractContextManager[ScoringEngine]:
        raise ConfigError(f"the answers of {variant.name} are not complete; finish the evaluation first with --resume")

    require_graders([prepared.task for prepared in evaluation.tasks], evaluation.grader, evaluation.judging)
    earlier = evaluation.folder / "results.json"
    known = {info.name: info.grader for info in read_record(earlier).tasks} if earlier.is_file() else {}
    before = stored_verdicts(evaluation, known)
    if again:
        evaluation.forget_grades()
    record = evaluation.run(no_engine, on_event)
    return record, changed_verdicts(evaluation, before) if before else None


def describe_change(change: Mapping[str, Any]) -> str:
    """One line on an answer that is judged differently."""
    said = "; ".join(
        f"{found['grader']}: {'right' if found['correct'] else found['reason']} ({found['extracted']!r:.60})"
        for found in (change["before"], change["now"])
    )
    return f"{change['task']} {change['question']} [{change['variant']}], gold {change['gold']!r:.60}: {said}"


Verdicts = dict[tuple[str, str], tuple[str, list[Grade]]]
"""(task, variant) to the grader's name and its grades, in the order of the samples."""


def stored_verdicts(evaluation: Evaluation, graders: Mapping[str, str]) -> Verdicts:
    """The verdicts on file by the grader named for each task; tasks and rows that it has not judged are left out."""
    found: Verdicts = {}
    for prepared in evaluation.tasks:
        name = prepared.task.name
        for variant in evaluation.variants:
            if name not in graders or not (path := evaluation.grades_path(variant, name, graders[name])).is_file():
                continue
            grades = read_grades(path, read_samples(evaluation.samples_path(variant, name)))
            if grades is not None:
                found[name, variant.name] = graders[name], grades
    return found


def changed_verdicts(evaluation: Evaluation, before: Verdicts) -> list[dict[str, Any]]:
    """Answers that the evaluation's grader judges differently than `before`, which was read before it judged."""
    now = stored_verdicts(evaluation, {p.task.name: grader_for(p.task, evaluation.grader) for p in evaluation.tasks})
    changes: list[dict[str, Any]] = []
    for prepared in evaluation.tasks:
        name, questions = prepared.task.name, prepared.questions.questions
        for variant in evaluation.variants:
            if not {(name, variant.name)} <= before.keys() & now.keys():
                continue
            samples = read_samples(evaluation.samples_path(variant, name))
            (old_grader, earlier), (new_grader, later) = before[name, variant.name], now[name, variant.name]
            for sample, old, new in zip(samples, earlier, later, strict=True):
                if old.correct != new.correct:
                    question = questions[sample.question]
                    changes.append(
                        {
                            "task": name,
                            "variant": variant.name,
                            "question": question.id,
                            "sample": sample.sample,
                            "gold": question.gold,
                            "before": {"grader": old_grader, **asdict(old)},
                            "now": {"grader": new_grader, **asdict(new)},
                        }
                    )
    return changes
