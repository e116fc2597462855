"""An evaluation: every variant on every task, resumable at any moment, ending in one record; and judged again from its folder.

    folder/
      eval.json                         what is being run; a resumed run must be the same
      tasks/<task>.yaml                 the task's file
      questions/<task>.jsonl            id, prompt, gold and row of every question
      samples/<variant>/<task>.jsonl    answers, appended as they are drawn
      grades/<grader>/<variant>/<task>.jsonl
      results.json                      the record (`results.py`)

Engines arrive as a callable, so this file neither loads models nor knows which program generates. Judging again needs neither the
model nor the data set: questions, prompts, task files and samples lie in the folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from loragate.display import Job
from loragate.errors import ConfigError, DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.harness import draw_likelihoods
from loragate.evaluation.judging import (
    CODE,
    grader_for,
    judge,
    judged_by,
    read_grades,
    require_graders,
    write_grades,
)
from loragate.evaluation.prepared import Prepared, read_questions, write_questions
from loragate.evaluation.results import (
    EvaluationRecord,
    SuiteResult,
    TaskInfo,
    TaskResult,
    read_record,
    task_result,
)
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.statistics import compare_suites, suite_average
from loragate.evaluation.tasks import load_task
from loragate.evaluation.variants import Variant
from loragate.files import folder_sha256, require_same, write_json, write_text
from loragate.generation import Engine, Sample
from loragate.generation.samples import draw_samples, read_samples
from loragate.records import package_versions, read, read_object, to_json
from loragate.validate import STRICT

EngineFor = Callable[[Variant], AbstractContextManager[Engine]]
OnEvent = Callable[[str, Variant, str, int, int], None]
"""Called with (stage, variant, task, done, total); stages are "sampling" and "grading"."""
Results = dict[tuple[str, str], TaskResult]
"""By (row, task)."""
SAID = ("notes", "left_out")
"""What eval.json tells readers, and a resumed run need not share."""


def no_progress(stage: str, variant: Variant, task: str, done: int, total: int) -> None:
    """An `OnEvent` for nobody."""


def counted(job: Job, *stages: str) -> OnEvent:
    """An `OnEvent` that draws one bar over all rows and tasks: the answers that are through the latest of `stages`."""
    through: dict[tuple[str, str], int] = {}

    def on_event(stage: str, variant: Variant, task: str, done: int, total: int) -> None:
        if stage in stages:
            through[variant.name, task] = done
        doing = "" if len(stages) > 1 else f"{stage} "  # where answers are judged again, nothing is sampled
        job.advance_to(sum(through.values()), note=f"{doing}{variant.name} on {task}")

    return on_event


@dataclass
class Evaluation:
    """One evaluation in one folder.

    Attributes:
        folder: run folder.
        tasks: prepared tasks.
        variants: rows; the plain adapter first where there is one.
        models: {"base": …, "adapter": …, "gated": …} for the record.
        canary: figures of `canary`.
        seed: of sampling.
        facts: what a resumed run must share beside models, tasks and rows (engine, dtype, …).
        grading: how answers are judged.
        notes: what a reader of all scores should know; kept in the folder, and no part of what a resumed run must share.
        left_out: {name of a row: why the model cannot be it}; shown in its place, and kept like the notes.
    """

    folder: Path
    tasks: list[Prepared]
    variants: list[Variant]
    models: dict[str, str]
    canary: dict[str, float]
    seed: int
    facts: dict[str, Any] = field(default_factory=dict)
    grading: GradingSettings = field(default_factory=GradingSettings)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def begin(self, resume: bool) -> None:
        """Write down what is being run, or check that a resumed run is the same.

        Raises:
            ConfigError: naming the first difference.
        """
        path = self.folder / "eval.json"
        # folders by what they hold, hub ids (which do not exist here) by their name alone
        places = {*self.models.values(), *(one.gates for one in self.variants if one.gates is not None)}
        identity = to_json(
            {
                "models": self.models,
                "seed": self.seed,
                **self.facts,
                "variants": self.variants,
                "tasks": [one.info() for one in self.tasks],
                "task_files": {one.task.name: one.task.fingerprint for one in self.tasks},
                "weights": {place: folder_sha256(place) for place in sorted(places) if Path(place).exists()},
            }
        )
        if not resume:
            # first of all: with it the folder can be resumed
            write_json(path, {**identity, "notes": self.warnings, "left_out": self.left_out})
        else:
            before = read_object(path, "choose another --out")
            kept = {key: value for key, value in before.items() if key not in SAID}
            remedy = "repeat the command with the same settings, weights and questions, or choose another --out"
            require_same(path, kept, identity, remedy)
        # also by a resumed run: it may have been killed right after eval.json, and the same is written again
        for prepared in self.tasks:
            write_questions(self.folder, prepared)
            write_text(
                self.folder / "tasks" / f"{prepared.task.name}.yaml", prepared.task.path.read_text(encoding="utf-8")
            )

    def run(self, engine_for: EngineFor, on_event: OnEvent = no_progress) -> EvaluationRecord:
        """Sample and judge everything that is not on file yet; returns the record, which the caller writes."""
        # rows with the same weights follow one another, as changing them can mean loading them
        for variant in sorted(self.variants, key=lambda variant: variant.acts):
            self._sample(engine_for, variant, on_event)
        found: Results = {}
        for variant, prepared in self._cells():
            name = prepared.task.name
            adapter = found.get((variant.compared_with, name))  # judged before the rows that refer to it
            found[variant.name, name] = self._judge(variant, prepared, adapter, on_event)
        return (
            EvaluationRecord(
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                models=self.models,
                tasks=tuple(prepared.info(self._grader(prepared)) for prepared in self.tasks),
                results=tuple(found.values()),
                suites=tuple(self._averages(found)),
                seed=self.seed,
                sandbox=self.grading.sandbox if any(self._grader(p) in CODE for p in self.tasks) else None,
                versions=package_versions(),
                seconds=sum(self.seconds.values()),
                canary=self.canary,
                warnings=tuple(self.warnings),
                left_out=self.left_out,
            )
            .with_adjusted_p()
            .with_best_temperatures()
        )

    def judge_again(
        self, again: bool = False, on_event: OnEvent = no_progress
    ) -> tuple[EvaluationRecord, list[dict[str, Any]] | None]:
        """The record under this evaluation's grader, and the answers that it judges differently than results.json has them.

        Nothing is generated. The second is None where there is no earlier record of these answers.

        Args:
            again: judge again even if this grader's verdicts are on file.

        Raises:
            ConfigError: for a grader that does not work here, and for an evaluation that is not finished.
        """

        def no_engine(variant: Variant) -> AbstractContextManager[Engine]:
            raise ConfigError(
                f"the answers of {variant.name} are not complete; finish the evaluation first with --resume"
            )

        require_graders([prepared.task for prepared in self.tasks], self.grading)
        earlier = self.folder / "results.json"
        judged = read_record(earlier).tasks if earlier.is_file() else ()
        # of "lm-eval acc,none" the metric is no part of the folder
        known = {info.name: info.grader.split()[0] for info in judged}
        before: list[tuple[Variant, Prepared, list[Grade]]] = []
        for variant, prepared in self._cells():
            name = prepared.task.name
            if name in known and (old := self.answers(variant, name, known[name])[1]) is not None:
                before.append((variant, prepared, old))
            if again:  # `run` judges what has no grades on file
                self._grades_path(variant, name, self._grader(prepared)).unlink(missing_ok=True)
        record = self.run(no_engine, on_event)
        changes: list[dict[str, Any]] = []
        for variant, prepared, old in before:
            name, grader = prepared.task.name, self._grader(prepared)
            samples, now = self.answers(variant, name, grader)
            assert now is not None, "they were judged above"
            for sample, was, new in zip(samples, old, now, strict=True):
                if was.correct == new.correct:
                    continue
                question = prepared.questions[sample.question]
                changes.append(
                    {
                        "task": name,
                        "variant": variant.name,
                        "question": question.id,
                        "sample": sample.sample,
                        "gold": question.gold,
                        "before": {"grader": known[name], **asdict(was)},
                        "now": {"grader": grader, **asdict(new)},
                    }
                )
        return record, changes if before else None

    @property
    def warnings(self) -> list[str]:
        """What a reader of the scores should know before any is measured."""
        return list(dict.fromkeys([*self.notes, *(warning for one in self.tasks for warning in one.warnings)]))

    @property
    def sample_count(self) -> int:
        """Answers to sample in all."""
        return sum(prepared.samples(variant) for variant, prepared in self._cells())

    def answers(self, variant: Variant, task: str, grader: str) -> tuple[list[Sample], list[Grade] | None]:
        """The stored answers of a row to a task, and a grader's verdicts on them where there are any."""
        samples = read_samples(self._samples_path(variant, task))
        return samples, read_grades(self._grades_path(variant, task, grader), samples)

    def _cells(self) -> list[tuple[Variant, Prepared]]:
        return [
            (variant, prepared) for prepared in self.tasks for variant in self.variants if prepared.samples(variant)
        ]

    def _samples_path(self, variant: Variant, task: str) -> Path:
        return self.folder / "samples" / variant.slug / f"{task}.jsonl"

    def _grades_path(self, variant: Variant, task: str, grader: str) -> Path:
        return self.folder / "grades" / grader / variant.slug / f"{task}.jsonl"

    def _grader(self, prepared: Prepared) -> str:
        return grader_for(prepared.task, self.grading.grader)

    def _sample(self, engine_for: EngineFor, variant: Variant, on_event: OnEvent) -> None:
        """What is missing of one row's answers."""
        missing = []
        for prepared in self.tasks:
            path, count = self._samples_path(variant, prepared.task.name), prepared.samples(variant)
            # lines are counted, not read: an evaluation that goes on may have thousands of whole ones
            if path.exists() and path.read_bytes().count(b"\n") >= count:
                on_event("sampling", variant, prepared.task.name, count, count)
            elif count:
                missing.append(prepared)
        if not missing:
            return
        with engine_for(variant) as engine:
            for prepared in missing:
                began, name = time.monotonic(), prepared.task.name
                path, report = self._samples_path(variant, name), partial(on_event, "sampling", variant, name)
                if prepared.compared:
                    draw_likelihoods(engine, prepared.compared, path, report)
                else:
                    draw_samples(engine, prepared.prompts, variant.sampling(prepared.sampling), path, report)
                self.seconds[variant.name, name] = time.monotonic() - began

    def _judge(self, variant: Variant, prepared: Prepared, adapter: TaskResult | None, on_event: OnEvent) -> TaskResult:
        """One row's result on one task, compared with the adapter's."""
        began = time.monotonic()
        name, grader, questions = prepared.task.name, self._grader(prepared), prepared.questions
        samples = read_samples(self._samples_path(variant, name))
        if len(samples) != prepared.samples(variant):
            raise DataError(f"samples of {variant.name} on {name} are missing; run again with --resume")
        path = self._grades_path(variant, name, grader)
        judge_now = judged_by(grader, self.grading, samples)
        grades = read_grades(path, samples, judge_now)
        if grades is None:
            report = partial(on_event, "grading", variant, name)
            grades = judge(prepared.task, questions, samples, grader, self.grading, report)
            write_grades(path, samples, grades, judge_now)
        return task_result(
            name,
            variant.acts,
            [question.id for question in questions],
            samples,
            grades,
            votes=grader not in (*CODE, "lm-eval"),  # no two programs are the same text; the harness draws one answer
            adapter=adapter,
            control=variant.control,
            temperature=variant.temperature,
            constant=variant.constant,
            seconds=self.seconds.get((variant.name, name), 0.0) + time.monotonic() - began,
        )

    def _averages(self, found: Results) -> list[SuiteResult]:
        """The averages of each row: over the subsets of a task that counts by them, and over the tasks of a suite.

        A mean over unlike tasks would say nothing. In a suite every task counts the same, by its questions or its subsets.
        """
        strata = {one.task.name: one.strata() for one in self.tasks}
        suites: dict[str, list[str]] = {}
        for prepared in self.tasks:
            suites.setdefault(prepared.task.suite, []).append(prepared.task.name)
        averaged = {f"{name}/subsets": [name] for name, parts in strata.items() if len(parts) > 1}
        averaged |= {suite: names for suite, names in suites.items() if len(names) > 1}
        rows = []
        for title, names in averaged.items():
            # every task has the same share, and within it every stratum; without subsets a task is one stratum
            weights = [1 / len(names) / len(strata[name]) for name in names for _ in strata[name]]
            count = len(names) if len(names) > 1 else len(weights)  # tasks, or the subsets of the one task
            # of each row that answered all these tasks: no suite of the harness asks for controls
            tables = {
                one.name: [found[one.name, name].means_Q1[places] for name in names for places in strata[name]]
                for one in self.variants
                if all((one.name, name) in found for name in names)
            }
            for variant in self.variants:
                if variant.name not in tables:
                    continue
                ours, adapter = tables[variant.name], tables.get(variant.compared_with)
                comparison = None if adapter is None else compare_suites(ours, adapter, weights=weights)
                average = replace(suite_average(ours, weights=weights), tasks=count)
                rows.append(SuiteResult(variant.acts, average, title, variant.control, comparison))
        return rows


@dataclass(frozen=True)
class StoredEvaluation:
    """eval.json, as far as answers are judged again from it."""

    __pydantic_config__: ClassVar = {**STRICT, "extra": "ignore"}
    models: dict[str, str]
    seed: int
    variants: tuple[Variant, ...]
    tasks: tuple[TaskInfo, ...]
    notes: tuple[str, ...]
    left_out: dict[str, str]


def open_evaluation(folder: Path, grading: GradingSettings | None = None) -> Evaluation:
    """The evaluation of a folder, ready to be judged again.

    Raises:
        DataError: if the folder holds none, or what it holds cannot be read.
    """
    path = folder / "eval.json"
    if not path.is_file():
        raise DataError(f"{folder} is not the folder of an evaluation: it has no eval.json")
    begun = read(StoredEvaluation, path, "if an earlier version wrote it, run the evaluation again")
    # verdicts are written into a folder of that name
    if any(set(one.slug) & set("/\\\0") or not one.slug.strip(".") for one in begun.variants):
        raise DataError(f"{path}: the name of a row is a path")
    prepared = []
    for info in begun.tasks:
        task = load_task(folder / "tasks" / f"{info.name}.yaml")
        asked, revision = read_questions(folder, info.name), info.dataset_revision
        prepared.append(Prepared(asked, info.dataset, revision, info.fingerprint, task=task, sampling=info.sampling))
    kept = folder / "results.json"
    return Evaluation(
        folder,
        prepared,
        list(begun.variants),
        models=begun.models,
        # a record holds the canary; a run that was stopped before its end has none yet
        canary=read_record(kept).canary if kept.is_file() else {},
        seed=begun.seed,
        grading=grading or GradingSettings(),
        notes=list(begun.notes),
        left_out=begun.left_out,
    )
