"""Trials trained, variants evaluated on the dev set, and one of them chosen: what `calibrate` and `sweep` share.

    <folder>/run.json       what is being done; a resumed run must be the same
    <folder>/trials/        the trainings (`trials.py`)
    <folder>/dev/           an evaluation of all variants on the dev set
    <folder>/retention/     one of what would be chosen on the retention set
    <folder>/selection.json what was chosen, and on what evidence

Nothing here prints, and no training loss is looked at.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loragate.data import describe_form
from loragate.display import Job, format_points, temperature_label
from loragate.errors import DataError, DivergenceError, GateError
from loragate.evaluation.engines import make_in_memory_engine
from loragate.evaluation.evaluate import Evaluation, evaluate
from loragate.evaluation.evaluate import OnEvent as AnswersDone
from loragate.evaluation.prepared import PreparedTask
from loragate.evaluation.results import TaskResult
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.statistics import average_at_k, compare
from loragate.evaluation.variants import ModelVariant
from loragate.files import RunFolder, read_json, write_json
from loragate.gates import adapter_fingerprint
from loragate.gates.attach import active_adapter, is_gated
from loragate.gates.control import zero_unavailable_reason
from loragate.gates.eligibility import examine_adapter, require_gateable, require_trainable
from loragate.gates.identity import base_weight_samples
from loragate.gates.schema import CONFIG
from loragate.gates.strength import layer_bands, lora_paths
from loragate.selection.dev import RETENTION_TOKENS, DevSet, estimate_max_new_tokens
from loragate.selection.select import RULE, TEMPERATURES, Selection, paired_z, select
from loragate.selection.settings import require_one_process
from loragate.selection.trials import FAILED, GATED, OnStep, Trial, TrialContext
from loragate.selection_record import (
    FILE,
    DevInfo,
    Kind,
    Recommendation,
    RetentionInfo,
    RetentionScore,
    Score,
    ScoreDifference,
    SelectionRecord,
    VariantScore,
    count_unparsed_answers,
    format_choice_reason,
)
from loragate.training.checkpoints import template_hints
from loragate.training.rows import encoded_fingerprint

SCALES = (0.25, 0.5, 0.75, 1.25, 1.5)
"""One λ for all modules, which needs no training."""
BAND_SCALES = (0.5, 0.0)
"""One λ for a third of the layers, the others as they are."""
TRIALS = "trials"

OnEvent = Callable[[str, str, int, int, str], None]
"""Called with (stage, what, done, total, note): steps of all trainings, or answers of all variants to the questions.

The stages are the keys of `UNITS`; `what` is the trial or variant that is at work, empty when a run begins.
"""
UNITS = {"training": "step", "evaluating": "answer"}


def no_event(stage: str, what: str, done: int, total: int, note: str) -> None:
    """An `OnEvent` for nobody."""


def progress_callback(job: Job) -> OnEvent:
    """An `OnEvent` that draws one bar over trainings and answers."""

    def on_event(stage: str, what: str, done: int, total: int, note: str) -> None:
        doing = f"{stage} {what}" if what else ""
        job(done, total, " · ".join(filter(None, (doing, note))), UNITS[stage])

    return on_event


@dataclass(frozen=True)
class VariantGroup:
    """What is compared as one: a variant, or the variants of a cell's seeds.

    Attributes:
        label: as in tables.
        variants: whose scores are averaged within each question.
        trials: whose gates they are; empty where nothing was trained.
    """

    label: str
    variants: tuple[ModelVariant, ...]
    trials: tuple[Trial, ...] = ()

    def with_temperature(self, temperature: float) -> VariantGroup:
        """The same at a temperature, 0 for greedy."""
        label = f"{self.label} {temperature_label(temperature)}"
        return VariantGroup(label, tuple(one.with_temperature(temperature) for one in self.variants), self.trials)

    @property
    def kind(self) -> Kind:
        """What acts."""
        one = self.variants[0]
        if one.scale is not None:
            return "scale"
        return "gates" if one.weights == "gated" else one.weights

    def scores(self, rows: Mapping[str, TaskResult]) -> np.ndarray:
        """Scores [questions, 1]: the mean over samples and seeds of each question."""
        return np.mean([rows[one.label].question_scores for one in self.variants], axis=0)[:, None]


ADAPTER = VariantGroup("adapter", (ModelVariant("adapter"),))
BASE = VariantGroup("base", (ModelVariant("base"),))
BASELINE = ADAPTER.with_temperature(0)


def constant_scale_variants(paths: Sequence[str]) -> list[ModelVariant]:
    """The adapter under one λ, for all modules or a third of the layers; with one layer there are no thirds."""
    bands = layer_bands(paths)
    found = [ModelVariant.scaled(scale) for scale in SCALES]
    return found + [ModelVariant.scaled(scale, band) for band in bands for scale in BAND_SCALES if len(bands) > 1]


def count_gateable_modules(context: TrialContext, trials: Sequence[Trial]) -> int:
    """How many modules can be gated; raises GateError for an adapter that cannot be, and ConfigError for trials that cannot."""
    name = active_adapter(context.model)
    if is_gated(context.model, name):
        raise GateError("the model carries gates already; take them off first, with loragate.detach_gates(model)")
    verdicts = examine_adapter(context.model, name, context.config.target_modules)
    count = len(require_gateable(verdicts))
    require_trainable(verdicts)
    for trial in trials:
        trial.config(context.config)
    return count


def describe_written_seed(trials: Sequence[Trial]) -> str:
    """Which seed's gates are written where a cell has several, the first as no score may choose; empty where it has one."""
    if len(trials) < 2:
        return ""
    seeds = ", ".join(str(one.seed) for one in trials)
    return f"Scores are means over the seeds {seeds}; the gates written are those of seed {trials[0].seed}."


@dataclass
class SelectionRun:
    """Trials trained, variants evaluated on the dev set, one chosen; all in one folder, resumable at any moment.

    Attributes:
        context: model, examples and settings.
        trials: gates to train.
        folder: of the run.
        dev, retention: questions; a sweep without a dev set chooses nothing.
        on_event: progress.
    """

    context: TrialContext
    trials: tuple[Trial, ...]
    folder: Path
    dev: DevSet | None
    retention: DevSet | None = None
    on_event: OnEvent = no_event

    def __post_init__(self) -> None:
        require_one_process()
        context = self.context
        count_gateable_modules(context, self.trials)
        self.why_no_base_variant = zero_unavailable_reason(context.model)
        self.scales = constant_scale_variants(lora_paths(context.model))
        self.gated: dict[Trial, Path] = {}
        self.diverged: dict[str, str] = {}
        self._asked: dict[str, dict[ModelVariant, None]] = {"dev": {}, "retention": {}}  # ordered sets
        self._done: dict[str, dict[str, int]] = {stage: {} for stage in UNITS}
        _, encoded = context.encoded(context.settings.seed)
        self.steps = context.settings.fitted(len(encoded)).steps(len(encoded))
        how: dict[str, Any] = {"system": context.system, "raw": encoded.summary.all_plain}
        self.tasks: dict[str, PreparedTask] = {}
        for name, questions, tokens in (
            ("dev", self.dev, estimate_max_new_tokens(encoded)),
            ("retention", self.retention, RETENTION_TOKENS),
        ):
            if questions is not None:
                seed = context.settings.seed + 1
                self.tasks[name] = questions.prepare_task(
                    context.tokenizer, context.positions, seed, answer_tokens=tokens, **how
                )
        self.identity = self._identity(encoded_fingerprint(encoded))

    def _identity(self, tokens: str) -> dict[str, Any]:
        context, model = self.context, self.context.model
        gates, training = asdict(context.config), context.settings.as_record()
        return {
            "kind": "selection",
            "trials": [one.as_record() for one in self.trials],
            "data": {**context.examples.as_record(), "tokens": tokens, "system": context.system},
            "heldout": None if context.heldout is None else encoded_fingerprint(context.heldout),
            "adapter": adapter_fingerprint(model, active_adapter(model)),
            "base": hashlib.sha256(json.dumps(base_weight_samples(model)).encode()).hexdigest(),
            # objective and seed are the trials'
            "training": {name: value for name, value in training.items() if name not in ("objective", "seed")},
            "gates": {name: value for name, value in gates.items() if name not in ("lower", "upper", "seed")},
            "questions": {name: task.info().prompt_sha256 for name, task in self.tasks.items()},
            "asked": None if self.dev is None else asdict(self.dev.settings),
        }

    @contextmanager
    def hold_folder(self, resume: bool) -> Iterator[None]:
        """Hold the folder, with what is being done written down."""
        run = RunFolder(self.folder)
        with run.locked():
            run.begin(self.identity, resume=resume, hints=template_hints(self.context.tokenizer))
            # how much there is to do in all, and how much of it is done
            self.report_progress("training", "")
            if self.dev is not None:
                self.report_progress("evaluating", "")
            yield

    def report_progress(self, stage: str, what: str, done: int = 0, note: str = "") -> None:
        """Report that `done` steps or answers of a trial or variant are done."""
        through = self._done[stage]
        if what:
            through[what] = done
        total = len(self.trials) * self.steps if stage == "training" else self.total_answers()
        self.on_event(stage, what, sum(through.values()), total, note)

    def check_grader_reads_answers(self) -> None:
        """Evaluate the adapter first, and refuse a dev or retention set of whose answers the grader reads none: all would score 0.

        What was begun is taken back, so that the same folder serves another grader.
        """
        for name, task in self.tasks.items():
            reasons = self.evaluate_groups([BASELINE], name)[BASELINE.label].reasons
            if count_unparsed_answers(reasons, task.task.grader) < sum(reasons.values()):
                continue
            for begun in self.tasks:
                shutil.rmtree(self.folder / begun, ignore_errors=True)
            RunFolder(self.folder).record_path.unlink()
            other = "--dev-grader" if name == "dev" else "retention_task (of a --config file) with a grader of its own"
            raise DataError(
                f"the grader {task.task.grader!r} reads an answer in none of the adapter's {len(task.questions)} responses to "
                f"the {name} set {task.source} ({', '.join(reasons)}): does the prompt ask for the form that it reads, or does "
                f"another {other} fit?"
            )

    def train(self) -> None:
        """Train what is not trained yet; gates whose training diverges drop out, and are a DivergenceError where all do."""

        for trial in self.trials:
            with suppress(DivergenceError):
                self.context.train(trial, self.folder / TRIALS, self.make_step_callback(trial))
        self.find_pending_trials()
        if not self.gated:
            raise DivergenceError(
                f"no range's training stayed finite ({next(iter(self.diverged.values()))}); lower --learning-rate or train in fp32"
            )

    def make_step_callback(self, trial: Trial) -> OnStep:
        """Reports the steps of a trial's training."""
        what = self.trial_label(trial)
        return lambda done, total, note: self.report_progress("training", what, done, note)

    def run_trial(self, trial: Trial) -> None:
        """Train a trial, and draw its greedy answers to the dev set; what is on file is only looked up.

        The answers are judged by whoever evaluates all variants afterwards, so that several processes can do this at once.
        """
        self.context.train(trial, self.folder / TRIALS, self.make_step_callback(trial))
        if self.dev is not None:
            variant, task = self.variant_of(trial).with_temperature(0), self.tasks["dev"]
            engines = make_in_memory_engine(
                self.context.model, self.context.tokenizer, "adapter", self.dev.settings.dev_batch_size
            )
            seed = task.sampling.seed
            one = Evaluation(self.folder / "dev", [task], [variant], {}, {}, seed, engine_for=engines)
            one.sample(variant, self._make_answer_callback("dev"))

    def find_pending_trials(self) -> list[Trial]:
        """Look up the trials that are trained or diverged; returns the others."""
        self.gated, self.diverged = (
            find_trained_folders(self.folder, self.trials),
            find_failures(self.folder, self.trials, diverged=True),
        )
        ended = [one for one in self.trials if one in self.gated or one.name in self.diverged]
        self._done["training"] |= {self.trial_label(one): self.steps for one in ended}
        return [one for one in self.trials if one not in self.gated and one.name not in self.diverged]

    def trial_label(self, trial: Trial) -> str:
        """As its variant is called: the cell, with the seed where there are several."""
        return trial.cell if len({one.seed for one in self.trials}) == 1 else trial.name

    def variant_of(self, trial: Trial) -> ModelVariant:
        """A trained trial as a variant."""
        return ModelVariant("gated", self.trial_label(trial), gates=str(self.folder / TRIALS / trial.slug / GATED))

    def variant_groups(self) -> list[VariantGroup]:
        """Everything that is compared, the simpler first; a cell that lacks a seed is not."""
        found = [ADAPTER] if self.why_no_base_variant else [ADAPTER, BASE]
        found += [VariantGroup(one.label, (one,)) for one in self.scales]
        cells: dict[str, list[Trial]] = {}
        for trial in self.trials:
            cells.setdefault(trial.cell, []).append(trial)
        for cell, trials in cells.items():
            if all(one in self.gated for one in trials):
                found.append(VariantGroup(f"gated {cell}", tuple(map(self.variant_of, trials)), tuple(trials)))
        return found

    def total_answers(self) -> int:
        """How many answers the dev set takes in all, should no training diverge, and those to the retention set so far."""
        task = self.tasks["dev"]
        models = (2 if self.why_no_base_variant else 3) - 1 + len(self.scales) + len(self.trials)
        sampled = len(TEMPERATURES) * (1 + len({one.seed for one in self.trials})) * task.sampling.samples
        kept = sum(self._answers_of("retention", one) for one in self._asked["retention"])
        return len(task.questions) * (models + sampled) + kept

    def _answers_of(self, name: str, variant: ModelVariant) -> int:
        task = self.tasks[name]
        return len(task.questions) * variant.sampling(task.sampling).samples

    def _make_answer_callback(self, name: str) -> AnswersDone:
        """Reports the answers to the dev or retention set."""

        def on_event(stage: str, variant: ModelVariant, _: str, done: int, total: int) -> None:
            if stage == "sampling":
                what = variant.label if name == "dev" else f"{variant.label} on the {name} set"
                self.report_progress("evaluating", what, done)

        return on_event

    def evaluate_groups(self, asked: Sequence[VariantGroup], name: str = "dev") -> dict[str, TaskResult]:
        """{label of a variant: result} on the dev or retention set; what is on file is not drawn again."""
        assert self.dev is not None, "there is a dev set"
        folder, task, variants = self.folder / name, self.tasks[name], self._asked[name]
        variants.update(dict.fromkeys(variant for one in asked for variant in one.variants))

        record = evaluate(
            self.context.model,
            self.context.tokenizer,
            [task],
            list(variants),  # the record there holds everything that was asked
            folder,
            seed=task.sampling.seed,
            facts={key: self.identity[key] for key in ("adapter", "base")},
            grading=GradingSettings(sandbox=self.dev.settings.sandbox),
            batch_size=self.dev.settings.dev_batch_size,
            resume=RunFolder(folder).record_path.is_file(),
            on_event=self._make_answer_callback(name),
        )
        return {row.label: row for row in record.results}

    def choose(self) -> SelectionRecord:
        """Evaluate in the two steps of the rule, choose, and return the record, which is also in `selection.json`."""
        greedy = [one.with_temperature(0) for one in self.variant_groups()]
        rows = self.evaluate_groups(greedy)
        means = [one.scores(rows).mean() for one in greedy]
        best = self.variant_groups()[int(np.argmax(means))]  # of equal ones the simpler
        sampled = [
            one.with_temperature(temperature) for temperature in TEMPERATURES for one in dict.fromkeys([ADAPTER, best])
        ]
        asked = [*greedy, *sampled]
        rows = self.evaluate_groups(asked)
        scores = {one.label: one.scores(rows) for one in asked}
        chosen, vetoed, retained = self._select_keeping_retention(scores, {one.label: one for one in asked})
        record = self._record(chosen, asked, rows, scores, vetoed, retained)
        write_json(self.folder / FILE, record.to_json())
        return record

    def _select_keeping_retention(
        self, scores: Mapping[str, np.ndarray], asked: Mapping[str, VariantGroup]
    ) -> tuple[Selection, dict[str, str], dict[str, np.ndarray]]:
        """The choice among what does not clearly lose on the retention set; what does, and why; and the scores there."""
        vetoed, retained = dict[str, str](), dict[str, np.ndarray]()
        while True:
            chosen = select(scores, BASELINE.label, excluded=list(vetoed))
            if not chosen.accepted or "retention" not in self.tasks:
                return chosen, vetoed, retained
            both = (BASELINE, asked[chosen.label])
            rows = self.evaluate_groups(both, "retention")
            retained |= {one.label: one.scores(rows) for one in both}
            lost = compare(retained[chosen.label], retained[BASELINE.label])
            if lost.high >= 0:
                return chosen, vetoed, retained
            vetoed[chosen.label] = (
                f"loses {format_points(-lost.mean).lstrip('+')} points on the retention set (95 % interval "
                f"{format_points(lost.low)} to {format_points(lost.high)})"
            )

    def _record(
        self,
        chosen: Selection,
        asked: Sequence[VariantGroup],
        rows: Mapping[str, TaskResult],
        scores: Mapping[str, np.ndarray],
        vetoed: Mapping[str, str],
        retained: Mapping[str, np.ndarray],
    ) -> SelectionRecord:
        assert self.dev is not None, "there is a dev set"
        task, own = self.tasks["dev"], scores[BASELINE.label]
        variants: dict[str, VariantScore] = {}
        for one in asked:
            found, estimate = [rows[variant.label] for variant in one.variants], average_at_k(scores[one.label])
            kept = retained.get(one.label)
            variants[one.label] = VariantScore(
                estimate.mean,
                estimate.low,
                estimate.high,
                label=one.label,
                weights=one.kind,
                temperature=one.variants[0].temperature or 0.0,
                samples=sum(row.avg_at_k.samples for row in found),
                difference=None if one.label == BASELINE.label else _gap(scores[one.label], own),
                truncated=float(np.mean([row.truncated for row in found])),
                no_eos=float(np.mean([row.no_eos for row in found])),
                tokens=float(np.mean([row.tokens for row in found])),
                retention=None if kept is None else RetentionScore(**asdict(average_at_k(kept))),
            )
        picked, row = next(one for one in asked if one.label == chosen.label), variants[chosen.label]
        trial = picked.trials[0] if picked.trials else None
        reasons = rows[BASELINE.label].reasons
        kept_info = None
        if self.retention is not None:
            asked_too = self.tasks["retention"]
            own_row = self.evaluate_groups([BASELINE], "retention")[BASELINE.label]
            unread = count_unparsed_answers(own_row.reasons, asked_too.task.grader) / sum(own_row.reasons.values())
            kept_info = RetentionInfo(
                asked_too.source,
                dict(vetoed),
                self.retention.dropped,
                asked_too.warnings,
                asked_too.task.grader,
                unread,
                own_row.avg_at_k.mean,
            )
        difference = variants[chosen.best].difference
        reason = format_choice_reason(chosen.best, BASELINE.label, difference, chosen.accepted, bool(vetoed))
        return SelectionRecord(
            RULE,
            Recommendation(
                chosen.label,
                picked.kind,
                row.temperature,
                scale=picked.variants[0].scale,
                range=None if trial is None else (trial.range.lower, trial.range.upper),
                trial=None if trial is None else trial.slug,
                score=Score(row.mean, row.low, row.high),
                reason=f"{reason} {describe_written_seed(picked.trials)}".rstrip(),
                part=picked.variants[0].part,
            ),
            BASELINE.label,
            tuple(variants.values()),
            DevInfo(
                task.source,
                len(task.questions),
                self.dev.settings.dev_samples,
                task.sampling.max_new_tokens,
                f"{task.task.name} v{task.task.version}",
                task.task.grader,
                count_unparsed_answers(reasons, task.task.grader) / len(task.questions),
                self.dev.dropped,
                task.warnings,
                describe_form(task.task.raw, task.task.system, self.context.system),
            ),
            kept_info,
            {"base": self.why_no_base_variant} if self.why_no_base_variant else {},
            self.diverged,
        )


def _gap(scores: np.ndarray, own: np.ndarray) -> ScoreDifference:
    """The paired difference a - b of scores [Q, K]; its z is None where it is infinite, which JSON cannot say."""
    z = paired_z(scores, own)
    return ScoreDifference(**{**asdict(compare(scores, own)), "z": z if math.isfinite(z) else None})


def find_trained_folders(folder: Path, trials: Sequence[Trial]) -> dict[Trial, Path]:
    """{trial: its gated adapter} of those that are finished in a run's folder."""
    places = {one: folder / TRIALS / one.slug / GATED for one in trials}
    return {one: place for one, place in places.items() if (place / CONFIG).is_file()}


def find_failures(folder: Path, trials: Sequence[Trial], *, diverged: bool) -> dict[str, str]:
    """{name: why} of the trials whose training diverged, or of those whose last attempt failed for another reason."""
    notes = {one.name: read_json(folder / TRIALS / one.slug / FAILED) for one in trials}
    return {name: str(note["error"]) for name, note in notes.items() if note and note["diverged"] is diverged}


Open = Callable[[Trial], SelectionRun]
"""Opens a run, for a first trial, in a process of its own; it can be sent there."""
OnTrial = Callable[[Trial, str], None]
"""Called with (trial, "finished" or "failed") when a trial has ended."""


def no_trial(trial: Trial, ended: str) -> None:
    """An `OnTrial` for nobody."""
