"""An evaluation: every variant on every task, resumable at any moment, ending in one record.

    folder/
      eval.json                         what is being run; a resumed run must be the same
      tasks/<task>.yaml                 the task's file
      questions/<task>.jsonl            id, prompt, gold and row of every question
      samples/<variant>/<task>.jsonl    answers, appended as they are drawn
      grades/<grader>/<variant>/<task>.jsonl
      harness/<variant>/<suite>.json    what lm-evaluation-harness measured
      results.json                      the record (`results.py`)

Engines arrive as a callable, so this file neither loads models nor knows which program generates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import ConfigError, DataError
from loragate.evaluation.aggregates import compare_suites, suite_average
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
    write_grades,
)
from loragate.evaluation.prepared import Prepared, write_questions
from loragate.evaluation.results import (
    EvaluationRecord,
    SuiteResult,
    TaskInfo,
    TaskResult,
    task_result,
)
from loragate.evaluation.retention import Measured, all_measured, keep_measured, read_measured, retention_averages
from loragate.evaluation.run import mean_entropy
from loragate.evaluation.variants import Variant
from loragate.files import first_difference, write_json, write_text
from loragate.generation import Engine, Sample, ScoringEngine
from loragate.generation.samples import draw_samples, read_samples
from loragate.models import folder_sha256
from loragate.records import package_versions, read_value, to_json

EngineFor = Callable[[Variant], AbstractContextManager[ScoringEngine]]
Harness = Callable[[ScoringEngine, str, Callable[[int, int], None]], HarnessScores]
OnEvent = Callable[[str, Variant, str, int, int], None]
"""Called with (stage, variant, task, done, total); stages are "sampling", "grading" and "retention"."""


def unheard(stage: str, variant: Variant, task: str, done: int, total: int) -> None:
    """An `OnEvent` for nobody."""


class Evaluation:
    """One evaluation in one folder.

    Args:
        folder: run folder.
        tasks: prepared tasks.
        variants: rows; the plain adapter first where there is one.
        models: {"base": …, "adapter": …, "gated": …} for the record.
        canary: figures of `canary`.
        identity: further facts that a resumed run must share (engine, dtype, …).
        judging: how answers are judged.
        grader: in place of the math tasks' own.
        suites: retention suites that the harness asks; scored for every row that is no control.
        harness: asks an engine one suite; None where all suites are measured and on file.
        notes: what a reader of all scores should know; kept in the folder, and no part of what a resumed run must share.
        left_out: {name of a row: why the model cannot be it}; shown in its place, and kept like the notes.
    """

    def __init__(
        self,
        folder: Path,
        tasks: Sequence[Prepared],
        variants: Sequence[Variant],
        *,
        models: dict[str, str],
        canary: dict[str, float],
        seed: int,
        identity: dict[str, Any] | None = None,
        judging: JudgeSettings | None = None,
        grader: str = "",
        suites: Sequence[str] = (),
        harness: Harness | None = None,
        notes: Sequence[str] = (),
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.tasks, self.variants = folder, list(tasks), list(variants)
        self.models, self.canary, self.seed = models, canary, seed
        self.judging, self.grader = judging or JudgeSettings(), grader
        self.suites, self.harness, self.notes = list(suites), harness, list(notes)
        self.left_out = dict(left_out or {})
        self.identity = to_json(
            {
                "models": models,
                "seed": seed,
                **(identity or {}),
                "variants": variants,
                "tasks": [prepared.as_dict() for prepared in tasks],
                "suites": suites,
            }
        )
        self.seconds: dict[tuple[str, str], float] = {}

    def begin(self, resume: bool) -> None:
        """Write down what is being run, or check that a resumed run is the same.

        Raises:
            ConfigError: naming the first difference.
        """
        path = self.folder / "eval.json"
        places = {**self.models, **{v.slug: v.gates for v in self.variants if v.gates is not None}}
        weights = {kind: folder_sha256(place) for kind, place in places.items() if Path(place).exists()}
        identity = {**self.identity, "weights": weights}
        if not resume:
            # first of all: with it the folder can be resumed
            write_json(path, {**identity, "notes": self.notes, "left_out": self.left_out})
        else:
            before = read_value(path, "choose another --out")
            kept = {key: value for key, value in before.items() if key not in ("notes", "left_out")}
            if (found := first_difference(kept, identity)) is not None:
                key, old, new = found
                if key.startswith("weights"):
                    raise ConfigError(
                        f"--resume: the answers in {self.folder} came from other weights than are in "
                        f"{places[key.split('.', 1)[1]]} now ({key} in {path.name}); put those back, or choose another --out"
                    )
                raise ConfigError(
                    f"--resume: {path} was begun with {key} = {old!r:.80}, now it is {new!r:.80}; repeat the command with the "
                    "same settings, or choose another --out"
                )
        for prepared in self.tasks:
            write_questions(self.folder, prepared)
            write_text(
                self.folder / "tasks" / f"{prepared.task.name}.yaml", prepared.task.path.read_text(encoding="utf-8")
            )

    def run(self, engine_for: EngineFor, on_event: OnEvent = unheard) -> EvaluationRecord:
        """Sample and judge everything that is not on file yet; returns the record, which the caller writes."""
        # rows with the same weights follow one another, as changing them can mean loading them
        for variant in sorted(self.variants, key=lambda variant: variant.acts):
            suites = [] if variant.control is not None else self.suites
            kept = all(all_measured(self.folder, name, [variant]) for name in suites)
            if kept and all(self._complete(variant, prepared) for prepared in self.tasks):
                for prepared in self.tasks:
                    count = self._count(variant, prepared)
                    on_event("sampling", variant, prepared.task.name, count, count)
                continue
            with engine_for(variant) as engine:
                for prepared in self.tasks:
                    self._sample(engine, variant, prepared, on_event)
                for name in suites:
                    assert self.harness is not None, "suites that are not measured need a harness"
                    report = partial(on_event, "retention", variant, name)
                    keep_measured(self.folder, variant, name, partial(self.harness, engine, name, report))
        infos = [self._info(prepared) for prepared in self.tasks]
        results: list[TaskResult] = []
        scores: dict[tuple[str, str], np.ndarray] = {}
        for prepared in self.tasks:
            for variant in self.variants:
                results.append(self._judge(variant, prepared, scores, on_event))
        averages = list(self._averages(scores))
        warnings = self.warnings
        measured = {name: self._measured(name) for name in self.suites}
        for rows in measured.values():
            infos.append(next(iter(rows.values())).info)
            results += [one.row for one in rows.values()]
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

    def forget_grades(self) -> None:
        """Drop the verdicts of this evaluation's graders, so that `run` judges every answer again."""
        for prepared in self.tasks:
            for variant in self.variants:
                self.grades_path(variant, prepared.task.name, self._grader(prepared)).unlink(missing_ok=True)

    @property
    def warnings(self) -> list[str]:
        """What a reader of the scores should know before any is measured."""
        return list(dict.fromkeys([*self.notes, *(warning for one in self.tasks for warning in one.warnings)]))

    @property
    def sample_count(self) -> int:
        """Answers to sample in all, those of the harness aside."""
        return sum(self._count(variant, prepared) for prepared in self.tasks for variant in self.variants)

    def _count(self, variant: Variant, prepared: Prepared) -> int:
        return len(prepared.prompts) * variant.sampling(prepared.sampling).samples

    def _measured(self, name: str) -> dict[str, Measured]:
        """Every row that is no control on a suite, by the row's name; the adapter, which comes first, is compared with."""
        found: dict[str, Measured] = {}
        for variant in (variant for variant in self.variants if variant.control is None):
            found[variant.name] = read_measured(self.folder, variant, name, self.seed, found.get("adapter"))
        return found

    def samples_path(self, variant: Variant, task: str) -> Path:
        """Where the answers of a row to a task are kept."""
        return self.folder / "samples" / variant.slug / f"{task}.jsonl"

    def grades_path(self, variant: Variant, task: str, grader: str) -> Path:
        """Where a grader's verdicts on them are kept."""
        return self.folder / "grades" / grader / variant.slug / f"{task}.jsonl"

    def _complete(self, variant: Variant, prepared: Prepared) -> bool:
        path = self.samples_path(variant, prepared.task.name)
        return path.exists() and path.read_bytes().count(b"\n") >= self._count(variant, prepared)

    def _sample(self, engine: Engine, variant: Variant, prepared: Prepared, on_event: OnEvent) -> None:
        began, name = time.monotonic(), prepared.task.name
        path, sampling = self.samples_path(variant, prepared.task.name), variant.sampling(prepared.sampling)
        draw_samples(engine, prepared.prompts, sampling, path, partial(on_event, "sampling", variant, name))
        self.seconds[variant.name, name] = time.monotonic() - began

    def _grader(self, prepared: Prepared) -> str:
        return grader_for(prepared.task, self.grader)

    def _judge(
        self,
        variant: Variant,
        prepared: Prepared,
        scores: dict[tuple[str, str], np.ndarray],
        on_event: OnEvent,
    ) -> TaskResult:
        began = time.monotonic()
        name, grader = prepared.task.name, self._grader(prepared)
        samples = read_samples(self.samples_path(variant, prepared.task.name))
        if len(samples) != self._count(variant, prepared):
            raise DataError(f"samples of {variant.name} on {name} are missing; run again with --resume")
        path = self.grades_path(variant, prepared.task.name, self._grader(prepared))
        judge_now = judged_by(grader, self.judging) | {"answers": answers_hash(samples)}
        grades = read_grades(path, samples, judge_now)
        if grades is None:
            questions, report = prepared.questions.questions, partial(on_event, "grading", variant, name)
            grades = judge(prepared.task, questions, samples, grader, self.judging, report)
            write_grades(path, samples, grades, judge_now)
        scores[variant.name, name] = array = table_of(samples, grades, len(prepared.prompts))
        return task_result(
            name,
            variant.acts,
            array,
            question_ids=[question.id for question in prepared.questions.questions],
            reasons=[grade.reason for grade in grades],
            finish_reasons=[sample.finish_reason for sample in samples],
            tokens=[len(sample.token_ids) for sample in samples],
            answers=None if grader in CODE else _answers(samples, grades, len(prepared.prompts)),
            adapter_scores=scores.get((variant.compared_with, name)) if variant.name != "adapter" else None,
            control=variant.control,
            temperature=variant.temperature,
            constant=variant.constant,
            entropy=mean_entropy(samples),
            seconds=self.seconds.get((variant.name, name), 0.0) + time.monotonic() - began,
        )

    def _info(self, prepared: Prepared) -> TaskInfo:
        grader, questions = self._grader(prepared), prepared.questions
        return TaskInfo(
            name=prepared.task.name,
            version=str(prepared.task.version),
            fingerprint=questions.fingerprint,
            prompt_sha256=prepared.prompts_sha256,
            dataset=questions.source,
            dataset_revision=questions.revision,
            grader=grader,
            grader_version=grader_version(grader),
            sampling=prepared.sampling,
        )

    def _averages(self, scores: dict[tuple[str, str], np.ndarray]) -> tuple[SuiteResult, ...]:
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
        return tuple(rows)


def table_of(samples: Sequence[Sample], grades: Sequence[Grade], questions: int) -> np.ndarray:
    """Scores [questions, samples of each] of 0 and 1."""
    array = np.zeros((questions, len(samples) // questions))
    for sample, grade in zip(samples, grades, strict=True):
        array[sample.question, sample.sample] = float(grade.correct)
    return array


def _answers(samples: Sequence[Sample], grades: Sequence[Grade], questions: int) -> list[list[str | None]]:
    """Extracted answers for the vote; right answers count as one, however they are written."""
    answers: list[list[str | None]] = [[] for _ in range(questions)]
    for sample, grade in zip(samples, grades, strict=True):
        answers[sample.question].append("✓" if grade.correct else grade.extracted)
    return answers
