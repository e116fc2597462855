"""The quickstart step by step: what is trained, chosen and scored, by the calls of every other command.

The run folder is what `sft`, `calibrate`, `eval` and `diagnose gates` would leave of the same work, so that `report`, `regrade`
and `diagnose` read it. Disjoint splits are used: "train" for the demonstrations, "dev" to choose, "test" for the scores.

DFT is the one control that is trained: would another loss of the LoRA have helped as much, without gates?
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loragate.analysis.context import DiagnosticContext
from loragate.analysis.gates import diagnose_gates
from loragate.analysis.settings import DiagnoseSettings
from loragate.data import load_rows
from loragate.display import Display, Job, configure_logging, console, format_points
from loragate.errors import ConfigError
from loragate.evaluation.evaluate import Evaluation, make_progress_reporter
from loragate.evaluation.prepared import PreparedTask, Request, prepare
from loragate.evaluation.results import EvaluationRecord, verdict
from loragate.evaluation.settings import TaskSettings
from loragate.evaluation.statistics import compare
from loragate.evaluation.tasks import load_questions, load_task
from loragate.evaluation.variants import LOWER_TEMPERATURES, ModelVariant, activate_variant, at_temperatures, canary
from loragate.files import write_text
from loragate.gates.range import Range, parse_ranges
from loragate.gates.strength import lora_paths
from loragate.generation import TransformersEngine
from loragate.models.source import resolve
from loragate.quickstart import QuickstartSettings
from loragate.report.page import page
from loragate.report.scores import caption, evaluation_statements, score_markdown, score_tables
from loragate.report.sources import all_sources
from loragate.selection.calibrate import Calibrated, calibrate
from loragate.selection.selection_run import TRIALS, constant_scale_variants
from loragate.selection.selection_run import progress_callback as selection_counted
from loragate.selection.settings import DevSettings
from loragate.selection.trials import GATED, Trial
from loragate.training import FineTuningSettings, GateTrainingSettings, train_adapter
from loragate.training.callbacks import StepReport
from loragate.world.base import load_base
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import draw_problems

INTERVENTIONS = ("noreverse", "noextrapolate", "unit")
DFT = "DFT"
JOBS = 5  # two adapters, the calibration, the test, the report
MAX_NEW_TOKENS = 72
BATCH = 480
DEV_QUESTIONS = 128
HELDOUT_ROWS = 64
HELDOUT_SEED_OFFSET = 1_000_003  # rows that are measured only are drawn with a seed so far from the run's
LORA = FineTuningSettings(
    learning_rate=1e-3, batch_size=32, per_device_train_batch_size=32, max_length=128, logging_steps=16
)
# steps and learning rate of the gates are the paper's
GATES = GateTrainingSettings(
    learning_rate=5e-4,
    batch_size=32,
    per_device_train_batch_size=32,
    max_steps=157,
    max_length=128,
    max_rows=2048,
    logging_steps=4,
)
CAVEAT = "one base and one training seed: nothing follows for other bases, adapters or seeds"


def run_quickstart(settings: QuickstartSettings) -> Path:
    """Run all of it; returns its folder, which no run before has used."""
    configure_logging()
    torch.set_num_threads(settings.threads)
    ranges = parse_ranges(settings.ranges)
    folder = _new_folder(Path(settings.out))
    made = QuickstartRun(folder, settings.seed)
    made.train_lora("adapter", "sft")
    made.train_lora(DFT, "dft", objective="dft")
    calibrated = made.calibrate(ranges)
    best = best_trial(calibrated, made.trials)
    tasks = made.tasks(settings)
    record = evaluate_variants(made, build_variants(made, calibrated, best), tasks)
    with made.job("reading the gates and drawing"):
        asked = Request(str(made.gated_folder(best)), folder / "diagnosis", TaskSettings(tasks="tiny"))
        diagnose_gates(DiagnosticContext(asked), DiagnoseSettings(run=str(folder)))
        plain = record.to_json()
        chosen, controls = calibrated.sentences(), control_statements(record)
        reading = [*chosen, *evaluation_statements(plain), *controls]
        write_text(folder / "results.md", score_markdown(plain) + "\n" + "".join(f"- {line}\n" for line in reading))
        write_text(
            folder / "report.html",
            page(all_sources([str(folder)]), f"loragate quickstart: {folder.name}", [*chosen, *controls]),
        )
    out = console()
    for line in chosen[:2]:  # what to do, and what the alternatives score
        out.print(line, markup=False)
    out.print()
    for table in score_tables(plain):
        out.print(table)
        out.print()
    for line in (*(f"• {line}" for line in reading), caption(plain)):
        out.print(line, markup=False)
    out.print(f"the rows called gated have the range {best.range}, the best on the dev questions", markup=False)
    out.print(f"everything is in {folder}, shown by its report.html", markup=False)
    question = tasks[0].questions[0].row["prompt"]
    out.print(f'next: loragate generate --model {folder / "gated"} --prompt "{question}"', markup=False)
    return folder


class QuickstartRun:
    """The models of a run in memory, by name, and the folder that they are written to.

    Attributes:
        models: "adapter" is the LoRA that is gated, `DFT` the control.
        trials: gates that `calibrate` trained.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.display = folder, seed, Display()
        self.jobs_started = 0
        self.models: dict[str, Any] = {}
        self.trials: list[Trial] = []
        self.base, self.tokenizer = load_base()
        # the base and the demonstrations, so that every command can be tried on them
        for one in (self.base, self.tokenizer):
            one.save_pretrained(folder / "base")
        # what is trained on it names this folder as its base, so that the other commands find it
        self.base.name_or_path = self.base.config._name_or_path = str((folder / "base").resolve())
        rows = demonstrations(4096, seed=seed)
        write_text(folder / "data" / "demonstrations.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.rows, known = load_rows(rows), {str(row) for row in rows}
        # the world is small, so that other draws hit rows of the training again: four times as many leave enough
        others = [
            row for row in demonstrations(4 * HELDOUT_ROWS, seed=seed + HELDOUT_SEED_OFFSET) if str(row) not in known
        ]
        self.heldout = others[:HELDOUT_ROWS]
        self.dev = [asdict(one) for one in draw_problems("dev", DEV_QUESTIONS, (4, 4), seed=seed)]
        write_text(folder / "data" / "dev.jsonl", "".join(json.dumps(row) + "\n" for row in self.dev))

    def job(self, name: str, unit: str = "") -> AbstractContextManager[Job]:
        """The next part of the run, shown with its number."""
        self.jobs_started += 1
        return self.display.job(f"{self.jobs_started} of {JOBS}: {name}", unit=unit)

    def train_lora(self, name: str, slug: str, **changes: Any) -> None:
        """An adapter on the noisy demonstrations, in adapters/."""
        folder, settings = self.folder / "adapters" / slug, replace(LORA, seed=self.seed, **changes)
        with self.job(f"training LoRA ({slug})", "step") as job:

            def on_step(report: StepReport) -> None:
                value = report.values.get("nll")
                job(report.step, report.total, "" if value is None else f"nll {value:.3f}")

            result = train_adapter(
                copy.deepcopy(self.base),
                self.tokenizer,
                self.rows,
                settings,
                run_folder=folder / "run",
                on_step=on_step,
            )
        result.model.save_pretrained(str(folder))
        self.models[name] = result.model.eval().requires_grad_(False)

    def calibrate(self, ranges: Sequence[Range]) -> Calibrated:
        """Gates in each range, and what is recommended of all variants, in gated/."""
        settings = replace(GATES, seed=self.seed)
        self.trials = [Trial(one, "entropy", self.seed) for one in ranges]
        with self.job("calibrating") as job:
            return calibrate(
                copy.deepcopy(self.models["adapter"]),
                self.tokenizer,
                self.rows,
                self.dev,
                self.folder / "gated",
                ranges=self.trials,
                settings=settings,
                dev=DevSettings(dev_grader="tiny", dev_max_new_tokens=MAX_NEW_TOKENS, dev_batch_size=BATCH),
                eval_dataset=self.heldout,
                on_event=selection_counted(job),
                adapter_source=self.folder / "adapters" / "sft",
            )

    def gated_folder(self, trial: Trial) -> Path:
        """The gated adapter of a trial."""
        return self.folder / "gated" / "run" / TRIALS / trial.slug / GATED

    def tasks(self, settings: QuickstartSettings) -> list[PreparedTask]:
        """The test questions, and what should not be forgotten."""
        tasks = []
        for name, rows, samples, limit, seed in (
            ("tiny", settings.questions, settings.samples, MAX_NEW_TOKENS, self.seed + 2),
            ("tiny_retention", 90, 4, 24, self.seed + 3),
        ):
            task, task_settings = load_task(name), TaskSettings(samples=samples, max_new_tokens=limit, seed=seed)
            task = replace(task, dataset=replace(task.dataset, rows=rows))
            tasks.append(prepare(task, load_questions(task, seed=self.seed), self.tokenizer, task_settings))
        return tasks


def best_trial(calibrated: Calibrated, trials: Sequence[Trial]) -> Trial:
    """The trial whose gates scored best on the dev set, decoded greedily, whatever was recommended."""
    rows = {row["label"]: row["mean"] for row in calibrated.evidence["selection"]["variants"]}
    return max(trials, key=lambda trial: rows.get(f"gated {trial.cell} greedy", -1.0))


def build_variants(made: QuickstartRun, calibrated: Calibrated, best: Trial) -> dict[ModelVariant, Any]:
    """{variant: the model that it acts on}, the adapter first, as others refer to it."""
    adapter, gates = made.models["adapter"], str(made.gated_folder(best))
    rows = calibrated.evidence["selection"]["variants"]
    scales = {variant.label: variant for variant in constant_scale_variants(lora_paths(adapter))}
    best_scale = max((row for row in rows if row["weights"] == "scale"), key=lambda row: row["mean"])
    plain = [ModelVariant("adapter"), ModelVariant("base"), ModelVariant("gated", gates=gates)]
    models_by_variant = dict.fromkeys(at_temperatures(plain, LOWER_TEMPERATURES), adapter)
    models_by_variant[scales[best_scale["label"].rpartition(" ")[0]]] = adapter  # without " greedy" or " T=0.3"
    models_by_variant[ModelVariant("adapter", DFT)] = made.models[DFT]
    others = [trial for trial in made.trials if trial != best]
    models_by_variant |= {
        ModelVariant("gated", trial.cell, gates=str(made.gated_folder(trial))): adapter for trial in others
    }
    widest = choose_intervention_trial(made.trials, best)
    for name in INTERVENTIONS:
        models_by_variant[
            ModelVariant("gated", f"{widest.cell} {name}", override=name, gates=str(made.gated_folder(widest)))
        ] = adapter
    return models_by_variant


def choose_intervention_trial(trials: Sequence[Trial], best: Trial) -> Trial:
    """The trial for the interventions: one that can reverse and extrapolate, the best one if it can, else the widest."""

    def reach(trial: Trial) -> tuple[bool, bool, float]:
        both = trial.range.lower < 0 and trial.range.upper > 1
        return both, both and trial == best, trial.range.upper - trial.range.lower

    return max(trials, key=reach)


def evaluate_variants(
    run: QuickstartRun, variants: dict[ModelVariant, Any], tasks: list[PreparedTask]
) -> EvaluationRecord:
    """The evaluation of these variants, in the run folder; its record is in results.json."""
    folder = run.folder
    gated = next(one for one in variants if one.label == "gated")
    models = {"base": "base", "adapter": "adapters/sft"}
    with activate_variant(run.models["adapter"], gated, "adapter"):
        canary_logit_diffs = canary(run.models["adapter"], run.tokenizer, tasks[0].prompts, "gated")

    @contextmanager
    def engine_for(variant: ModelVariant) -> Iterator[TransformersEngine]:
        with activate_variant(variants[variant], variant, "adapter"):
            yield TransformersEngine(variants[variant], run.tokenizer, batch_size=BATCH)

    evaluation = Evaluation(
        folder,
        tasks,
        list(variants),
        models={**{name: str(folder / place) for name, place in models.items()}, "gated": str(gated.gates)},
        canary=canary_logit_diffs,
        seed=run.seed,
        range=resolve(str(gated.gates)).range,
        notes=[CAVEAT],
        engine_for=engine_for,
    )
    with run.job("sampling the test questions") as job:
        evaluation.begin()
        return evaluation.run(make_progress_reporter(job, evaluation.sample_count))


def control_statements(record: EvaluationRecord) -> list[str]:
    """Are the gates above, below or not significantly different from DFT? One sentence a task, paired by question."""
    statements = []
    for row in record.results:
        if row.control != DFT:
            continue
        gated = record.find(row.task)
        gap = compare(*(np.array(one.question_scores)[:, None] for one in (gated, row)))
        stands = {"better": "above", "worse": "below"}.get(verdict(gap), "not significantly different from")
        size = f"{format_points(gap.mean)} points, 95 % interval {format_points(gap.low)} to {format_points(gap.high)}"
        statements.append(f"On {row.task}, gated is {stands} the control {row.label} ({size}).")
    return statements


def _new_folder(wanted: Path) -> Path:
    """The folder, with a number behind its name where it exists."""
    if wanted.is_file():
        raise ConfigError(f"--out {wanted} is a file; give a folder")
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 10_000))
    folder = next(one for one in (wanted, *numbered) if not one.exists())
    folder.mkdir(parents=True)
    return folder
