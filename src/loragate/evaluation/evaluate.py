"""An evaluation: every variant on every task, resumable at any moment, ending in one record; and judged again from its folder.

    folder/
      run.json                          what is being run (`RunFolder`); a resumed run must be the same
      variants.json                     the variants with a fingerprint of their gates; a resumed run may add more
      tasks/<task>.yaml                 the task
      questions/<task>.jsonl            id, prompt, gold and row of every question
      samples/<variant>/<task>.jsonl    answers, appended as they are drawn
      grades/<grader>/<variant>/<task>.jsonl
      agreement/<variant>.json          log-probs that vLLM gave to a few answers (`agreement.py`)
      results.json                      the record (`results.py`)

This is the only scorer of the package: `loragate eval`, the dev set of `calibrate` and `sweep`, `quickstart` and the diagnostics
all run an `Evaluation`. `evaluate` makes one of a model in memory; `Evaluation.from_request` makes one of a request:

    request = Request("gated", Path("runs/math"), TaskSettings(suite="math"))
    tasks = request.check()                                # refuses what could not be judged, before anything is loaded
    loaded = load("gated")
    variants, left_out = find_available_variants(loaded, "cheap")
    evaluation = Evaluation.from_request(request, request.prepare(tasks, loaded), loaded, variants, left_out=left_out)
    evaluation.begin()
    record = evaluation.run()

Judging again (`open_evaluation`) needs neither the model nor the data set: questions, prompts, tasks and samples lie in the
folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loragate.data import template_hash
from loragate.display import Job
from loragate.errors import ConfigError, DataError
from loragate.evaluation.agreement import EngineCheck, require_logprob_agreement
from loragate.evaluation.answers import Grade
from loragate.evaluation.engines import EngineContext, EngineProvider, make_in_memory_engine
from loragate.evaluation.grader_checks import check_references
from loragate.evaluation.judging import (
    CODE_GRADERS,
    GRADERS,
    grade_samples,
    grading_fingerprint,
    pattern_of,
    read_grades,
    require_graders,
    resolve_grader,
    write_grades,
)
from loragate.evaluation.lm_eval_tasks import write_option_likelihoods
from loragate.evaluation.prepared import (
    PreparedTask,
    Request,
    number_distinct_questions,
    read_questions,
    write_questions,
)
from loragate.evaluation.results import (
    EvaluationRecord,
    SuiteResult,
    TaskInfo,
    TaskResult,
    VariantAgreement,
    read_record,
    task_result,
    write_record,
)
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.statistics import compare_suites, suite_average
from loragate.evaluation.tasks import load_task
from loragate.evaluation.variants import ModelVariant, canary
from loragate.files import RunFolder, file_sha256, folder_sha256, require_same_identity, write_json, write_text
from loragate.gates.attach import active_adapter, is_gated
from loragate.gates.schema import GATES
from loragate.generation import Sample
from loragate.generation.engine import draw_samples, read_samples
from loragate.models import Loaded
from loragate.models.folder_gates import unreached_note
from loragate.models.source import Kind
from loragate.records import package_versions, read_object, to_json
from loragate.validate import validate

OnEvent = Callable[[str, ModelVariant, str, int, int], None]
"""Called with (stage, variant, task, done, total); stages are "sampling" and "grading"."""
Results = dict[tuple[str, str], TaskResult]
"""By (variant, task)."""
KIND, VARIANTS = "evaluation", "variants.json"


def no_progress(stage: str, variant: ModelVariant, task: str, done: int, total: int) -> None:
    """An `OnEvent` for nobody."""


def make_progress_reporter(job: Job, answers: int) -> OnEvent:
    """An `OnEvent` that draws one bar over all variants and tasks: which of `answers` are sampled, and which are graded."""
    units = {"sampling": "answer", "grading": "graded"}
    through: dict[str, dict[tuple[str, str], int]] = {stage: {} for stage in units}

    def on_event(stage: str, variant: ModelVariant, task: str, done: int, total: int) -> None:
        through[stage][variant.label, task] = done
        job(sum(through[stage].values()), answers, f"{stage} {variant.label} on {task}", units[stage])

    return on_event


@dataclass
class Evaluation:
    """One evaluation in one folder.

    Attributes:
        folder: run folder.
        tasks: prepared tasks.
        variants: what is scored; the plain adapter first where there is one.
        models: {"base": …, "adapter": …, "gated": …} for the record.
        canary: figures of `canary`.
        seed: of sampling.
        identity: what a resumed run must share beside models, tasks and variants (engine, dtype, …).
        grading: how answers are judged.
        notes: what a reader of all scores should know; kept in the folder, and no part of what a resumed run must share.
        left_out: {label of a variant: why the model cannot be it}; shown in its place, and kept like the notes.
        range: of the variant "gated", for the record.
        engine_for: answers as a variant; None for an evaluation that is only judged.
        agreement: of the record; known at the end.
        seconds: {(variant, task): seconds of sampling}, of this run.
    """

    folder: Path
    tasks: list[PreparedTask]
    variants: list[ModelVariant]
    models: dict[str, str]
    canary: dict[str, float]
    seed: int
    identity: dict[str, Any] = field(default_factory=dict)
    grading: GradingSettings = field(default_factory=GradingSettings)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    engine_for: EngineContext | None = None
    agreement: dict[str, VariantAgreement] = field(default_factory=dict)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    @classmethod
    def from_request(
        cls,
        request: Request,
        tasks: Sequence[PreparedTask],
        loaded: Loaded,
        variants: Sequence[ModelVariant],
        *,
        notes: Sequence[str] = (),
        left_out: dict[str, str] | None = None,
        **identity: Any,
    ) -> Evaluation:
        """The evaluation of variants of a loaded model, after the canary has shown that adapter and gates act.

        Args:
            tasks: what `request.prepare` gave.
            identity: what a resumed run must share beside the model, the tasks and how they are answered.

        Raises:
            GateError: where adapter or gates do not act.
        """
        with_strength = any(variant.scale is not None or variant.weights == "gated" for variant in variants)
        figures: dict[str, float] = {}
        if loaded.model is not None:  # vLLM has the weights elsewhere
            with_base = any(variant.weights == "base" for variant in variants)
            figures = canary(loaded.model, loaded.tokenizer, tasks[0].prompts, loaded.kind, base=with_base)
        return cls(
            request.out,
            list(tasks),
            list(variants),
            models=loaded.sources,
            canary=figures,
            seed=request.tasks.seed,
            identity={
                "loaded": loaded.kind,
                "engine": request.engine.engine,
                "dtype": loaded.dtype,
                "limit": request.tasks.limit,
                "max_new_tokens": request.tasks.max_new_tokens,
                "system": request.system,
                "chat_template": template_hash(loaded.tokenizer),
                **identity,
                # nothing where the chat template adds no end to those that are declared
                **({"end_of_turn": added} if (added := loaded.endings.added) else {}),
            },
            grading=request.grading,
            notes=[
                *notes,
                *request.form_notes(tasks, loaded),
                *filter(None, [unreached_note(loaded.model_source) if with_strength else ""]),
            ],
            left_out=left_out or {},
            range=loaded.model_source.range,
            engine_for=EngineProvider(request.engine, request.model, request.base, loaded, request.out),
        )

    def begin(self, resume: bool = False) -> None:
        """Write down what is being run, or check that a resumed run is the same; it may have more variants.

        Raises:
            ConfigError: naming the first difference.
        """
        identity = {
            **self.identity,
            "kind": KIND,
            "models": self.models,
            "seed": self.seed,
            "tasks": to_json([one.info() for one in self.tasks]),
            "task_files": {one.task.name: one.task.fingerprint for one in self.tasks},
            # folders by what they hold, hub ids (which do not exist here) by their name alone
            "weights": {
                place: folder_sha256(place) for place in sorted({*self.models.values()}) if Path(place).exists()
            },
        }
        notes = {"warnings": self.warnings, "left_out": self.left_out}
        RunFolder(self.folder).begin(identity, resume=resume, notes=notes)
        self._begin_variants()
        # also by a resumed run: it may have been killed right after run.json, and the same is written again
        for prepared in self.tasks:
            write_questions(self.folder, prepared)
            write_text(self.folder / "tasks" / f"{prepared.task.name}.yaml", prepared.task.as_yaml())

    def _begin_variants(self) -> None:
        """Add the variants to those of the folder; one that is known must have the gates that it had."""
        path = self.folder / VARIANTS
        known = read_object(path, "choose another --out") if path.is_file() else {}
        wanted = {one.label: {**to_json(one), "gates_sha256": _gates_sha256(one.gates)} for one in self.variants}
        # gates are known by what they hold, so that folders can be moved
        before, now = (
            {label: {**found[label], "gates": None} for label in wanted if label in known} for found in (known, wanted)
        )
        require_same_identity(path, before, now, "repeat the command with the same gates, or choose another --out")
        write_json(path, {**known, **wanted})

    def run(self, on_event: OnEvent = no_progress) -> EvaluationRecord:
        """Sample and judge everything that is not on file yet; writes the record to results.json and returns it.

        Raises:
            LoragateError: if another process is at it in the same folder; or if vLLM did not compute what transformers computes,
                after the record with the figures was written.
        """
        engines = self.engine_for
        with (
            RunFolder(self.folder).locked(),
            closing(engines) if isinstance(engines, EngineProvider) else nullcontext(),
        ):
            # variants with the same weights follow one another, as changing them can mean loading them
            for variant in sorted(self.variants, key=lambda variant: variant.weights):
                self.sample(variant, on_event)
            self.agreement = self._engine_check.compare_with_transformers()
            record = self.judge(on_event)
        write_record(record, self.folder / "results.json")
        require_logprob_agreement(self.agreement, self.folder)
        return record

    @property
    def _engine_check(self) -> EngineCheck:
        return EngineCheck(self.engine_for, self.folder, self.variants)

    def judge(self, on_event: OnEvent = no_progress) -> EvaluationRecord:
        """The record of the answers on file, judged where they were not yet."""
        found: Results = {}
        # an evaluation that went on may have the adapter behind variants that refer to it
        referred = {variant.reference_label for variant in self.variants}
        for variant, prepared in sorted(
            self._cells(), key=lambda cell: (cell[0].label not in referred, cell[0].reference_label != "")
        ):
            adapter = found.get((variant.reference_label, prepared.task.name))
            found[variant.label, prepared.task.name] = self._judge(variant, prepared, adapter, on_event)
        return (
            EvaluationRecord(
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                models=self.models,
                tasks=tuple(
                    prepared.info(grader, pattern_of(prepared.task, self.grading) if grader == "regex" else "")
                    for prepared in self.tasks
                    for grader in [self._grader(prepared)]
                ),
                results=tuple(found[variant.label, prepared.task.name] for variant, prepared in self._cells()),
                suites=tuple(self._averages(found)),
                seed=self.seed,
                sandbox=self.grading.sandbox if any(self._grader(p) in CODE_GRADERS for p in self.tasks) else None,
                versions=package_versions(),
                seconds=sum(self.seconds.values()),
                canary=self.canary,
                agreement=self.agreement,
                warnings=tuple(self.warnings),
                left_out=self.left_out,
                range=self.range,
            )
            .with_adjusted_p()
            .with_best_temperatures()
        )

    def regrade(self, again: bool = False, on_event: OnEvent = no_progress) -> EvaluationRecord:
        """The record under this evaluation's grader; nothing is generated.

        Args:
            again: judge again even if this grader's verdicts are on file.

        Raises:
            ConfigError: for a grader that does not work here, and for an evaluation that is not finished.
            DataError: for a grader that does not accept the questions' own right answers.
        """
        require_graders([prepared.task for prepared in self.tasks], self.grading)
        for prepared in self.tasks:
            check_references(prepared.task, prepared.questions, self._grader(prepared), self.grading)
        if again:  # `grade_samples` judges what has no grades on file
            for variant, prepared in self._cells():
                self._grades_path(variant, prepared.task.name, self._grader(prepared)).unlink(missing_ok=True)
        return self.judge(on_event)

    @property
    def warnings(self) -> list[str]:
        """What a reader of the scores should know before any is measured."""
        return list(dict.fromkeys([*self.notes, *(warning for one in self.tasks for warning in one.warnings)]))

    @property
    def sample_count(self) -> int:
        """Answers to sample in all."""
        return sum(prepared.count_samples(variant) for variant, prepared in self._cells())

    def answers(self, variant: ModelVariant, task: str, grader: str) -> tuple[list[Sample], list[Grade] | None]:
        """The stored answers of a variant to a task, and a grader's verdicts on them where there are any."""
        samples = read_samples(self._samples_path(variant, task))
        return samples, read_grades(self._grades_path(variant, task, grader), samples)

    def _cells(self) -> list[tuple[ModelVariant, PreparedTask]]:
        return [
            (variant, prepared)
            for prepared in self.tasks
            for variant in self.variants
            if prepared.count_samples(variant)
        ]

    def _samples_path(self, variant: ModelVariant, task: str) -> Path:
        return self.folder / "samples" / variant.slug / f"{task}.jsonl"

    def _grades_path(self, variant: ModelVariant, task: str, grader: str) -> Path:
        return self.folder / "grades" / grader / variant.slug / f"{task}.jsonl"

    def _grader(self, prepared: PreparedTask) -> str:
        return resolve_grader(prepared.task, self.grading.grader)

    def sample(self, variant: ModelVariant, on_event: OnEvent = no_progress) -> None:
        """Draw what is missing of one variant's answers."""
        missing = []
        for prepared in self.tasks:
            path, count = self._samples_path(variant, prepared.task.name), prepared.count_samples(variant)
            # lines are counted, not read: an evaluation that goes on may have thousands of whole ones
            if path.exists() and path.read_bytes().count(b"\n") >= count:
                on_event("sampling", variant, prepared.task.name, count, count)
            elif count:
                missing.append(prepared)
        check = self._engine_check
        if not missing and not check.is_pending(variant):
            return
        assert self.engine_for is not None, "an evaluation that is only judged draws no answers"
        with self.engine_for(variant) as engine:
            for prepared in missing:
                began, name = time.monotonic(), prepared.task.name
                path, report = self._samples_path(variant, name), partial(on_event, "sampling", variant, name)
                if prepared.option_pairs:
                    write_option_likelihoods(engine, prepared.option_pairs, path, report)
                else:
                    draw_samples(engine, prepared.prompts, variant.sampling(prepared.sampling), path, report)
                self.seconds[variant.label, name] = time.monotonic() - began
            if check.is_pending(variant):
                asked = [one for one in self.tasks if one.count_samples(variant)]
                check.record_logprobs(
                    engine, variant, {self._samples_path(variant, one.task.name): one for one in asked}
                )

    def _judge(
        self, variant: ModelVariant, prepared: PreparedTask, adapter: TaskResult | None, on_event: OnEvent
    ) -> TaskResult:
        """One variant's result on one task, compared with the adapter's."""
        began = time.monotonic()
        name, grader, questions = prepared.task.name, self._grader(prepared), prepared.questions
        samples = read_samples(self._samples_path(variant, name))
        if len(samples) != prepared.count_samples(variant):
            raise ConfigError(
                f"the answers of {variant.label} to {name} are not complete; finish the evaluation first with --resume"
            )
        path = self._grades_path(variant, name, grader)
        judge_now = grading_fingerprint(prepared.task, questions, grader, self.grading, samples)
        grades = read_grades(path, samples, judge_now)
        if grades is None:
            report = partial(on_event, "grading", variant, name)
            grades = grade_samples(prepared.task, questions, samples, grader, self.grading, report)
            write_grades(path, samples, grades, judge_now)
        return task_result(
            name,
            variant.weights,
            [question.id for question in questions],
            samples,
            grades,
            # no two programs are the same text; the harness draws one answer
            votes=grader not in (*CODE_GRADERS, "lm-eval"),
            adapter=adapter,
            control=variant.control,
            temperature=variant.temperature,
            scale=variant.scale,
            part=variant.part,
            seconds=self.seconds.get((variant.label, name), 0.0) + time.monotonic() - began,
        )

    def _averages(self, found: Results) -> list[SuiteResult]:
        """The averages of each variant: over the subsets of a task that counts by them, and over the tasks of a suite.

        A mean over unlike tasks would say nothing. In a suite every task counts the same, by its questions or its subsets. Tasks
        that ask the same questions, as HumanEval and HumanEval+, are no independent strata.
        """
        strata = {one.task.name: one.strata() for one in self.tasks}
        numbers = {one.task.name: np.array(own) for one, own in zip(self.tasks, number_distinct_questions(self.tasks))}
        suites: dict[str, list[str]] = {}
        for prepared in self.tasks:
            suites.setdefault(prepared.task.suite, []).append(prepared.task.name)
        averaged = {f"{name}/subsets": [name] for name, parts in strata.items() if len(parts) > 1}
        averaged |= {suite: names for suite, names in suites.items() if len(names) > 1}
        averages = []
        for title, names in averaged.items():
            # every task has the same share, and within it every stratum; without subsets a task is one stratum
            weights = [1 / len(names) / len(strata[name]) for name in names for _ in strata[name]]
            count = len(names) if len(names) > 1 else len(weights)  # tasks, or the subsets of the one task
            asked = [numbers[name][places].tolist() for name in names for places in strata[name]]
            # of each variant that answered all these tasks: no suite of the harness asks for controls
            tables = {
                one.label: [found[one.label, name].means_Q1[places] for name in names for places in strata[name]]
                for one in self.variants
                if all((one.label, name) in found for name in names)
            }
            for variant in self.variants:
                if variant.label not in tables:
                    continue
                ours, adapter = tables[variant.label], tables.get(variant.reference_label)
                comparison = None if adapter is None else compare_suites(ours, adapter, weights=weights, names=asked)
                average = replace(suite_average(ours, weights=weights, names=asked), tasks=count)
                own = SuiteResult(variant.weights, average, title, variant.control, comparison, tasks=tuple(names))
                averages.append(own)
        return averages


def _gates_sha256(folder: str | None) -> str | None:
    """Of the gates in a gated folder; None for a hub id, and where there are none."""
    file = None if folder is None else Path(folder) / GATES
    return None if file is None or not file.is_file() else file_sha256(file)


def open_evaluation(folder: Path, grading: GradingSettings | None = None) -> Evaluation:
    """The evaluation of a folder with all its variants, ready to be judged again.

    Raises:
        DataError: if the folder holds none, or what it holds cannot be read.
    """
    path, remedy = folder / RunFolder.RECORD, "if an earlier version wrote it, run the evaluation again"
    if not path.is_file():
        raise DataError(f"{folder} is not the folder of an evaluation: it has no {path.name}")
    stored = read_object(path, remedy)
    if stored.get("kind") != KIND:  # sweeps and selections have a run.json, too
        raise DataError(f"{path}: it is not an evaluation's; give the --out of `loragate eval`")

    def known(kind: Any, key: str, where: dict[str, Any] = stored) -> Any:
        return validate(kind, where.get(key), f"{path}: {key}", DataError, remedy)

    notes = {"warnings": [], "left_out": {}, **known(dict[str, Any], "notes")}
    names = {one.name for one in fields(ModelVariant)}
    records = read_object(folder / VARIANTS, remedy).values()
    variants = [
        validate(ModelVariant, {k: v for k, v in one.items() if k in names}, str(folder / VARIANTS), DataError, remedy)
        for one in records
    ]
    # verdicts are written into a folder of that name
    if any(set(one.slug) & set("/\\\0") or not one.slug.strip(".") for one in variants):
        raise DataError(f"{folder / VARIANTS}: the label of a variant is a path")
    prepared = []
    for info in known(tuple[TaskInfo, ...], "tasks"):
        # an earlier version named none
        if info.grader and info.grader not in (*GRADERS, "lm-eval"):
            raise ConfigError(
                f"{folder}: {info.name} is judged by the Python function {info.grader}, which no folder holds; judge it again "
                "with the evaluate(..., resume=True) that began it"
            )
        task = load_task(folder / "tasks" / f"{info.name}.yaml")
        questions, revision = read_questions(folder, info.name), info.dataset_revision
        prepared.append(
            PreparedTask(questions, info.dataset, revision, info.fingerprint, task=task, sampling=info.sampling)
        )
    kept = folder / "results.json"
    record = read_record(kept) if kept.is_file() else None  # a run that was stopped before its end has none yet
    return Evaluation(
        folder,
        prepared,
        variants,
        models=known(dict[str, str], "models"),
        canary={} if record is None else record.canary,
        agreement={} if record is None else record.agreement,
        seed=known(int, "seed"),
        grading=grading or GradingSettings(),
        notes=known(list[str], "warnings", notes),
        left_out=known(dict[str, str], "left_out", notes),
        range=None if record is None else record.range,
    )


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[PreparedTask],
    variants: Sequence[ModelVariant],
    out: str | Path,
    *,
    seed: int = 0,
    facts: dict[str, Any] | None = None,
    grading: GradingSettings | None = None,
    batch_size: int = 64,
    resume: bool = False,
    on_event: OnEvent = no_progress,
) -> EvaluationRecord:
    """Score variants of a model in memory on tasks, side by side; resumable, and variants may be added to the same folder.

    Args:
        model: a base, a PeftModel with a plain adapter, or one with gates.
        tokenizer: of the base.
        tasks: questions made ready for this model (`prepared.prepare`).
        variants: what is scored; others are compared with the variant "adapter" at the same temperature, where it is one of
            them.
        out: folder of the evaluation, new or empty, or begun with the same tasks and weights where `resume` is given.
        seed: of the record; sampling has its own in each task's settings.
        facts: JSON-able; what else the scores depend on.
        resume: go on with what the folder holds; nothing on file is drawn again.
        on_event: called after every batch of answers.

    Returns:
        The record, which is also in `out`/results.json. Scores are shares of 1.

    Raises:
        ConfigError: for a folder that holds another evaluation, or a variant that the model cannot be.
        GateError: where the adapter or the gates do not act.
    """
    kind: Kind = "base"
    if hasattr(model, "peft_config"):
        kind = "gated" if is_gated(model, active_adapter(model)) else "adapter"
    evaluation = Evaluation(
        Path(out),
        list(tasks),
        list(variants),
        models={},
        canary=canary(model, tokenizer, tasks[0].prompts, kind, base=any(v.weights == "base" for v in variants)),
        seed=seed,
        identity=facts or {},
        grading=grading or GradingSettings(),
        engine_for=make_in_memory_engine(model, tokenizer, kind, batch_size),
    )
    evaluation.begin(resume)
    return evaluation.run(on_event)
