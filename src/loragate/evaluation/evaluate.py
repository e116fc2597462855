"""An evaluation: every variant on every task, resumable at any moment, ending in one record; and judged again from its folder.

    folder/
      eval.json                         what is being run; a resumed run must be the same
      tasks/<task>.yaml                 the task's file
      questions/<task>.jsonl            id, prompt, gold and row of every question
      samples/<variant>/<task>.jsonl    answers, appended as they are drawn
      grades/<grader>/<variant>/<task>.jsonl
      harness/<variant>/<suite>.json    what lm-evaluation-harness measured
      results.json                      the record (`results.py`)

Engines arrive as a callable, so this file neither loads models nor knows which program generates. Judging again needs neither the
model nor the data set: questions, prompts, task files and samples lie in the folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from loragate.errors import ConfigError, DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.harness import HarnessScores
from loragate.evaluation.judging import (
    CODE,
    JudgeSettings,
    answers_hash,
    grader_for,
    grader_version,
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
    mean_entropy,
    read_record,
    task_result,
)
from loragate.evaluation.retention import retention_averages, retention_info, retention_result
from loragate.evaluation.statistics import compare_suites, suite_average
from loragate.evaluation.tasks import Questions, load_task
from loragate.evaluation.variants import Kind, Variant
from loragate.files import require_same, write_json, write_text
from loragate.generation import SamplingConfig, ScoringEngine
from loragate.generation.samples import draw_samples, read_samples
from loragate.models import folder_sha256
from loragate.records import package_versions, read, read_object, to_json
from loragate.validate import STRICT

EngineFor = Callable[[Variant], AbstractContextManager[ScoringEngine]]
Harness = Callable[[ScoringEngine, str, Callable[[int, int], None]], HarnessScores]
OnEvent = Callable[[str, Variant, str, int, int], None]
"""Called with (stage, variant, task, done, total); stages are "sampling", "grading" and "retention"."""


def unheard(stage: str, variant: Variant, task: str, done: int, total: int) -> None:
    """An `OnEvent` for nobody."""


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
        judging: how answers are judged.
        grader: in place of the math tasks' own.
        suites: retention suites that the harness asks; scored for every row that is no control.
        harness: asks an engine one suite; None where all suites are measured and on file.
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
    judging: JudgeSettings = field(default_factory=JudgeSettings)
    grader: str = ""
    suites: list[str] = field(default_factory=list)
    harness: Harness | None = None
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def begin(self, resume: bool) -> None:
        """Write down what is being run, or check that a resumed run is the same.

        Raises:
            ConfigError: naming the first difference.
        """
        path = self.folder / "eval.json"
        places = {*self.models.values(), *(one.gates for one in self.variants if one.gates is not None)}
        identity = to_json(
            {
                "models": self.models,
                "seed": self.seed,
                **self.facts,
                "variants": self.variants,
                "tasks": [prepared.as_dict() for prepared in self.tasks],
                "suites": self.suites,
                "weights": {place: folder_sha256(place) for place in sorted(places) if Path(place).exists()},
            }
        )
        if not resume:
            # first of all: with it the folder can be resumed
            write_json(path, {**identity, "notes": self.notes, "left_out": self.left_out})
        else:
            before = read_object(path, "choose another --out")
            kept = {key: value for key, value in before.items() if key not in ("notes", "left_out")}
            remedy = "repeat the command with the same settings, weights and questions, or choose another --out"
            require_same(path, kept, identity, remedy)
        for prepared in self.tasks:
            write_questions(self.folder, prepared)
            write_text(
                self.folder / "tasks" / f"{prepared.task.name}.yaml", prepared.task.path.read_text(encoding="utf-8")
            )

    def run(self, engine_for: EngineFor, on_event: OnEvent = unheard) -> EvaluationRecord:
        """Sample and judge everything that is not on file yet; returns the record, which the caller writes."""
        # rows with the same weights follow one another, as changing them can mean loading them
        for variant in sorted(self.variants, key=lambda variant: variant.acts):
            self._sample(engine_for, variant, on_event)
        infos = [
            TaskInfo(
                name=prepared.task.name,
                version=str(prepared.task.version),
                fingerprint=prepared.questions.fingerprint,
                prompt_sha256=prepared.prompts_sha256,
                dataset=prepared.questions.source,
                dataset_revision=prepared.questions.revision,
                grader=self._grader(prepared),
                grader_version=grader_version(self._grader(prepared)),
                sampling=prepared.sampling,
            )
            for prepared in self.tasks
        ]
        scores: dict[tuple[str, str], np.ndarray] = {}
        results = [
            self._judge(variant, prepared, scores, on_event) for prepared in self.tasks for variant in self.variants
        ]
        averages, warnings = self._averages(scores), self.warnings
        plain = [variant for variant in self.variants if variant.control is None]
        measured: dict[str, dict[Kind, HarnessScores]] = {
            name: {
                one.acts: read(HarnessScores, self._harness_path(one, name), "delete it and resume") for one in plain
            }
            for name in self.suites
        }
        for name, rows in measured.items():
            infos.append(retention_info(next(iter(rows.values())), self.seed))
            results += [retention_result(name, row, one, rows.get("adapter")) for row, one in rows.items()]
            warnings += [warning for one in rows.values() for warning in one.warnings]
        averages += retention_averages(measured)
        return (
            EvaluationRecord(
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                models=self.models,
                tasks=tuple(infos),
                results=tuple(results),
                suites=tuple(averages),
                seed=self.seed,
                sandbox=self.judging.sandbox if any(self._grader(p) in CODE for p in self.tasks) else None,
                versions=package_versions(),
                seconds=sum(self.seconds.values()),
                canary=self.canary,
                warnings=tuple(dict.fromkeys(warnings)),
                left_out=self.left_out,
            )
            .with_adjusted_p()
            .with_best_temperatures()
        )

    def judge_again(
        self, again: bool = False, on_event: OnEvent = unheard
    ) -> tuple[EvaluationRecord, list[dict[str, Any]] | None]:
        """The record under this evaluation's grader, and the answers that it judges differently than results.json has them.

        Nothing is generated. The second is None where there is no earlier record of these answers.

        Args:
            again: judge again even if this grader's verdicts are on file.

        Raises:
            ConfigError: for a grader that does not work here, and for an evaluation that is not finished.
        """

        def no_engine(variant: Variant) -> AbstractContextManager[ScoringEngine]:
            raise ConfigError(
                f"the answers of {variant.name} are not complete; finish the evaluation first with --resume"
            )

        require_graders([prepared.task for prepared in self.tasks], self.grader, self.judging)
        earlier = self.folder / "results.json"
        known = {info.name: info.grader for info in read_record(earlier).tasks} if earlier.is_file() else {}
        cells = [(prepared, variant) for prepared in self.tasks for variant in self.variants]
        before: dict[tuple[str, str], list[Grade]] = {}
        for prepared, variant in cells:
            name = prepared.task.name
            old = self._read_grades(variant, name, known[name]) if name in known else None
            if old is not None:
                before[name, variant.name] = old
            if again:
                self.grades_path(variant, name, self._grader(prepared)).unlink(missing_ok=True)
        record = self.run(no_engine, on_event)
        changes: list[dict[str, Any]] = []
        for prepared, variant in cells:
            name, grader = prepared.task.name, self._grader(prepared)
            samples = read_samples(self.samples_path(variant, name))
            now = self._read_grades(variant, name, grader)
            assert now is not None, "they were judged above"
            for sample, was, new in zip(samples, before.get((name, variant.name), now), now, strict=True):
                if was.correct != new.correct:
                    question = prepared.questions.questions[sample.question]
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
        """Answers to sample in all, those of the harness aside."""
        return sum(self._count(variant, prepared) for prepared in self.tasks for variant in self.variants)

    def samples_path(self, variant: Variant, task: str) -> Path:
        """Where the answers of a row to a task are kept."""
        return self.folder / "samples" / variant.slug / f"{task}.jsonl"

    def grades_path(self, variant: Variant, task: str, grader: str) -> Path:
        """Where a grader's verdicts on them are kept."""
        return self.folder / "grades" / grader / variant.slug / f"{task}.jsonl"

    def _count(self, variant: Variant, prepared: Prepared) -> int:
        return len(prepared.prompts) * variant.sampling(prepared.sampling).samples

    def _grader(self, prepared: Prepared) -> str:
        return grader_for(prepared.task, self.grader)

    def _read_grades(self, variant: Variant, task: str, grader: str) -> list[Grade] | None:
        return read_grades(self.grades_path(variant, task, grader), read_samples(self.samples_path(variant, task)))

    def _sample(self, engine_for: EngineFor, variant: Variant, on_event: OnEvent) -> None:
        """What is missing of one row's answers and, unless it is a control, of its retention suites."""
        # what is on file was measured by this run: `facts` describe the suites
        paths = {name: self._harness_path(variant, name) for name in self.suites if variant.control is None}
        suites = {name: path for name, path in paths.items() if not path.is_file()}
        missing = []
        for prepared in self.tasks:
            path, count = self.samples_path(variant, prepared.task.name), self._count(variant, prepared)
            if path.exists() and path.read_bytes().count(b"\n") >= count:
                on_event("sampling", variant, prepared.task.name, count, count)
            else:
                missing.append(prepared)
        if not suites and not missing:
            return
        with engine_for(variant) as engine:
            for prepared in missing:
                began, name = time.monotonic(), prepared.task.name
                path, sampling = self.samples_path(variant, name), variant.sampling(prepared.sampling)
                draw_samples(engine, prepared.prompts, sampling, path, partial(on_event, "sampling", variant, name))
                self.seconds[variant.name, name] = time.monotonic() - began
            for name, path in suites.items():
                assert self.harness is not None, "suites that are not measured need a harness"
                write_json(path, to_json(self.harness(engine, name, partial(on_event, "retention", variant, name))))

    def _harness_path(self, variant: Variant, suite: str) -> Path:
        return self.folder / "harness" / variant.slug / f"{suite}.json"

    def _judge(
        self, variant: Variant, prepared: Prepared, scores: dict[tuple[str, str], np.ndarray], on_event: OnEvent
    ) -> TaskResult:
        began = time.monotonic()
        name, grader, questions = prepared.task.name, self._grader(prepared), prepared.questions.questions
        samples = read_samples(self.samples_path(variant, name))
        if len(samples) != self._count(variant, prepared):
            raise DataError(f"samples of {variant.name} on {name} are missing; run again with --resume")
        path = self.grades_path(variant, name, grader)
        judge_now = judged_by(grader, self.judging) | {"answers": answers_hash(samples)}
        grades = read_grades(path, samples, judge_now)
        if grades is None:
            report = partial(on_event, "grading", variant, name)
            grades = judge(prepared.task, questions, samples, grader, self.judging, report)
            write_grades(path, samples, grades, judge_now)
        array = np.zeros((len(questions), len(samples) // len(questions)))
        # extracted answers for the vote; right answers count as one, however they are written
        answers: list[list[str | None]] = [[] for _ in questions]
        for sample, grade in zip(samples, grades, strict=True):
            array[sample.question, sample.sample] = float(grade.correct)
            answers[sample.question].append("✓" if grade.correct else grade.extracted)
        scores[variant.name, name] = array
        return task_result(
            name,
            variant.acts,
            array,
            question_ids=[question.id for question in questions],
            reasons=[grade.reason for grade in grades],
            finish_reasons=[sample.finish_reason for sample in samples],
            tokens=[len(sample.token_ids) for sample in samples],
            answers=None if grader in CODE else answers,
            adapter_scores=scores.get((variant.compared_with, name)) if variant.name != "adapter" else None,
            control=variant.control,
            temperature=variant.temperature,
            constant=variant.constant,
            entropy=mean_entropy(samples),
            seconds=self.seconds.get((variant.name, name), 0.0) + time.monotonic() - began,
        )

    def _averages(self, scores: dict[tuple[str, str], np.ndarray]) -> list[SuiteResult]:
        """One row per variant for every suite of which several tasks were asked; a mean over unlike tasks would say nothing."""
        suites: dict[str, list[str]] = {}
        for prepared in self.tasks:
            suites.setdefault(prepared.task.suite, []).append(prepared.task.name)
        rows = []
        for suite, names in suites.items():
            for variant in self.variants if len(names) > 1 else ():
                ours = [scores[variant.name, name] for name in names]
                comparison = None
                if (variant.compared_with, names[0]) in scores and variant.name != "adapter":
                    comparison = compare_suites(ours, [scores[variant.compared_with, name] for name in names])
                rows.append(SuiteResult(variant.acts, suite_average(ours), suite, variant.control, comparison))
        return rows


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
    evaluation = Evaluation(
        folder,
        prepared,
        list(begun.variants),
        models=begun.models,
        # a record holds the canary; a run that was stopped before its end has none yet
        canary=read_record(kept).canary if kept.is_file() else {},
        seed=begun.seed,
        judging=judging or JudgeSettings(),
        grader=grader,
        notes=list(begun.notes),
        left_out=begun.left_out,
    )
    plain = [variant for variant in begun.variants if variant.control is None]
    evaluation.suites = [
        name for name in begun.suites if all(evaluation._harness_path(one, name).is_file() for one in plain)
    ]
    return evaluation
