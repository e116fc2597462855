"""The quickstart step by step: what is trained, chosen and scored, on the ordinary path of every other command.

The run folder is what `sft`, `calibrate`, `eval` and `diagnose gates` would leave of the same work, so that `report`, `regrade`
and `diagnose` read it. Disjoint splits are used: "train" for the demonstrations, "dev" to pick the range and the one λ, "test"
for the scores.

Each trained control answers one doubt about the gates: a single strength per module would do; any gate of that size would do;
the responses' cross-entropy would have trained the gates as well; more training of the LoRA would have helped as much; the
entropy put on the LoRA itself would have.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loragate.analysis.context import DiagnosticContext
from loragate.analysis.gates import diagnose_gates
from loragate.analysis.settings import DiagnoseSettings
from loragate.data import Rows, encode_rows, find_endings, load_rows, render_prompt
from loragate.display import Display, Job, console, duration, percent, points, quiet_logging
from loragate.errors import ConfigError
from loragate.evaluation import run_suite
from loragate.evaluation.evaluate import Evaluation, counted
from loragate.evaluation.prepared import Prepared, prepare
from loragate.evaluation.results import EvaluationRecord, verdict, write_record
from loragate.evaluation.session import Request
from loragate.evaluation.settings import TaskSettings
from loragate.evaluation.statistics import compare
from loragate.evaluation.tasks import load_questions, load_task
from loragate.evaluation.variants import COOLER, Variant, acting, canary, sampled
from loragate.files import write_text
from loragate.gates import GateConfig, save_gates
from loragate.gates.range import parse_ranges
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.models.place import Kind
from loragate.quickstart import QuickstartSettings
from loragate.report.page import page
from loragate.report.scores import caption, evaluation_statements, score_markdown, score_tables
from loragate.report.sources import all_sources
from loragate.selection import choose
from loragate.training import FineTuningSettings, GateTrainingResult, GateTrainingSettings, train_adapter, train_gates
from loragate.training.callbacks import StepReport
from loragate.world.base import load_base, save_base
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import problems, verify

CONSTANTS = (-0.5, 0.5, 1.5)
INTERVENTIONS = ("noreverse", "noextrapolate", "unit")
PER_MODULE, RANDOM, CE = "one λ per module, trained", "random gates", "gates trained with CE"
DFT, AGAIN, ENTROPY = "DFT", "same rows again", "trained with entropy"
CONTROLS: dict[str, Kind] = {PER_MODULE: "gated", RANDOM: "gated", CE: "gated", AGAIN: "adapter", ENTROPY: "adapter"}
"""{trained control: what acts}"""
MAX_NEW_TOKENS = 72
BATCH = 480
HELDOUT_ROWS = 64
OTHER_ROWS = 1_000_003  # rows that are measured only are drawn with a seed so far from the run's
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
    quiet_logging()
    torch.set_num_threads(settings.threads)
    ranges = {str(one): one for one in parse_ranges(settings.ranges)}
    wanted = list(CONTROLS) if settings.controls == "full" else []
    folder = _new_folder(Path(settings.out))
    made = Trained(folder, settings.seed)
    made.train_lora("adapter", "sft")
    made.train_lora(DFT, "dft", objective="dft")
    for name, bounds in ranges.items():
        made.train_gates(name, GateConfig(bounds.lower, bounds.upper, seed=settings.seed))
    picked, constant, chosen = made.choose(list(ranges))
    for name in wanted:
        made.train_control(name, picked)
    tasks = made.tasks(settings)
    record = score(made, rows_of(made, list(ranges), picked, constant, wanted), tasks)
    with made.display.job("reading the gates and drawing"):
        asked = Request(str(folder / "gated"), folder / "diagnosis", TaskSettings(tasks="tiny"))
        diagnose_gates(DiagnosticContext(asked), DiagnoseSettings(run=str(folder)))
        plain = record.to_json()
        controls = control_statements(record)
        reading = [*chosen, *evaluation_statements(plain), *controls]
        write_text(folder / "results.md", score_markdown(plain) + "\n" + "".join(f"- {line}\n" for line in reading))
        write_text(
            folder / "report.html",
            page(all_sources([str(folder)]), f"loragate quickstart: {folder.name}", [*chosen, *controls]),
        )
    out = console()
    for table in score_tables(plain):
        out.print(table)
        out.print()
    for line in (*(f"• {line}" for line in reading), caption(plain)):
        out.print(line, markup=False)
    seconds = sum(made.calibrations[name].seconds for name in ranges)
    runs = f"{len(ranges)} calibration{'s' if len(ranges) > 1 else ''}"
    out.print(f"gated has the range {picked}, the best of the ranges on the development questions", markup=False)
    out.print(f"{runs} took {duration(seconds)}; everything is in {folder}, shown by its report.html", markup=False)
    question = tasks[0].questions[0].row["prompt"]
    out.print(f'next: loragate generate --model {folder / "gated"} --prompt "{question}"', markup=False)
    return folder


class Trained:
    """The models of a run in memory, by name, and the folder that they are written to.

    Attributes:
        models: "adapter" is the LoRA that is gated; ranges and trained controls are copies of it with gates.
        calibrations: by range or control.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.display = folder, seed, Display()
        self.models: dict[str, Any] = {}
        self.calibrations: dict[str, GateTrainingResult] = {}
        self.base, self.tokenizer = load_base()
        # the base and the demonstrations, so that every command can be tried on them
        save_base(self.base, self.tokenizer, folder / "base")
        # what is trained on it names this folder as its base, so that the other commands find it
        self.base.name_or_path = self.base.config._name_or_path = str((folder / "base").resolve())
        rows = demonstrations(4096, seed=seed)
        write_text(folder / "data" / "demonstrations.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.rows, known = load_rows(rows), {str(row) for row in rows}
        # the world is small, so that other draws hit rows of the training again: four times as many leave enough
        others = [row for row in demonstrations(4 * HELDOUT_ROWS, seed=seed + OTHER_ROWS) if str(row) not in known]
        self.heldout = encode_rows(load_rows(others[:HELDOUT_ROWS]), self.tokenizer, max_length=GATES.max_length)

    def train_lora(self, name: str, slug: str, rows: Rows | None = None, **changes: Any) -> None:
        """An adapter on the noisy demonstrations, or on some of them, in adapters/."""
        folder, settings = self.folder / "adapters" / slug, replace(LORA, seed=self.seed, **changes)
        base, rows = copy.deepcopy(self.base), self.rows if rows is None else rows
        with self.display.job(f"training LoRA ({slug})", unit="step") as job:
            on_step = _steps(job, "nll")
            result = train_adapter(base, self.tokenizer, rows, settings, run_folder=folder / "run", on_step=on_step)
        result.model.save_pretrained(str(folder))
        self.models[name] = result.model.eval().requires_grad_(False)

    def train_gates(self, name: str, config: GateConfig, objective: Any = "entropy") -> None:
        """Gates on a copy of the adapter."""
        model, settings = copy.deepcopy(self.models["adapter"]), replace(GATES, objective=objective, seed=self.seed)
        with self.display.job(f"calibrating {name}", unit="step") as job:
            result = self.calibrations[name] = train_gates(
                model,
                self.tokenizer,
                self.rows,
                config,
                settings,
                run_folder=self._place(name) / "run",
                on_step=_steps(job, "topk_entropy"),
                heldout=self.heldout,
            )
            job.close_with(f"top-100 entropy {result.entropy_before:.3f} → {result.entropy_after:.3f}")
        self.models[name] = model.eval().requires_grad_(False)

    def choose(self, ranges: list[str]) -> tuple[str, float, list[str]]:
        """The range and the λ that are best on the development questions, and what these said in sentences.

        The artifacts are written, the picked one in gated/.
        """
        constants = {f"λ={value:g}": value for value in CONSTANTS}
        candidates = ["adapter", *ranges, *constants]
        scores = {}
        with self.display.job("choosing on the development questions") as job:
            for name in candidates:
                scores[name] = self._score_dev(name, constants.get(name))
                job.advance_to(len(scores), len(candidates), name)
            choice = choose({name: scores[name] for name in ("adapter", *ranges)}, "adapter")
            job.close_with(f"picked {choice.name if choice.accepted else 'the plain adapter'}")
        picked = choice.name if choice.accepted else max(ranges, key=lambda name: scores[name].mean())
        selection = {
            **asdict(choice),
            "method": "best of a few ranges on labelled development questions",
            "picked": picked,
        }
        del selection["name"]
        if not choice.accepted:  # which means zero gates in a folder; these are kept, to be looked at
            del selection["accepted"]
            selection["note"] = "The adapter scored as well or better on the development questions"
        self._place(picked).rename(self.folder / "gated")  # with the log of its training
        for name in ranges:
            if name == picked:
                self._save_gates(name, self.folder / "gated", selection=selection)
            else:
                self._save_gates(name, self._place(name))
        shares = ", ".join(f"{name} {percent(float(scores[name].mean()))} %" for name in candidates)
        said = [f"The range and the one λ were picked on the development questions: {shares}."]
        if not choice.accepted:
            said.insert(
                0, "On the development questions no range beat the adapter, so the choice is to keep the adapter."
            )
        return picked, max(CONSTANTS, key=lambda value: float(scores[f"λ={value:g}"].mean())), said

    def _score_dev(self, name: str, constant: float | None) -> np.ndarray:
        """Scores [64, 4] of the development questions, of a model or of the adapter under one λ."""
        items = problems("dev", 64, (4, 4), seed=self.seed)
        prompts = [render_prompt([{"role": "user", "content": item.prompt}], self.tokenizer) for item in items]
        how = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, samples=4, seed=self.seed + 1)

        def is_right(index: int, sample: Sample) -> bool:
            return verify(items[index], sample.text, sample.finish_reason == "stop")

        model = self.models[name if constant is None else "adapter"]
        with acting(model, Variant("adapter", constant=constant), "adapter"):
            return run_suite(self.engine(model), prompts, is_right, how).scores

    def train_control(self, name: str, picked: str) -> None:
        """One of `CONTROLS` for the range that was picked; random gates are drawn when they are scored."""
        config = self.calibrations[picked].config
        if name in (PER_MODULE, CE):
            config = replace(config, granularity="module") if name == PER_MODULE else config
            self.train_gates(name, config, "ce" if name == CE else "entropy")
            self._save_gates(name, self._place(name))
        elif name != RANDOM:
            own = {"objective": "entropy", "learning_rate": 5e-4, "weight_decay": 0.0} if name == ENTROPY else {}
            more = {
                "adapter": str(self.folder / "adapters" / "sft"),
                "warmup_ratio": 0.0,
                "max_steps": GATES.max_steps,
                **own,
            }
            rows = self.rows.shuffled(self.seed).take(GATES.max_rows)  # those that the gates were trained on
            self.train_lora(name, name.replace(" ", "-"), rows, **more)

    def _place(self, name: str) -> Path:
        return self.folder / "gates" / Variant("gated", name).slug.removeprefix("gated-")

    def _save_gates(self, name: str, place: Path, **more: Any) -> None:
        model = self.models[name]
        save_gates(
            model,
            place,
            adapter_source=self.folder / "adapters" / "sft",
            stop_token_ids=find_endings(self.tokenizer, model.generation_config).token_ids,
            evidence={**self.calibrations[name].evidence(), **more},
        )

    def engine(self, model: Any) -> TransformersEngine:
        return TransformersEngine(model, self.tokenizer, batch_size=BATCH)

    def tasks(self, settings: QuickstartSettings) -> list[Prepared]:
        """The test questions, and what should not be forgotten."""
        tasks = []
        for name, rows, samples, limit, seed in (
            ("tiny", settings.questions, settings.samples, MAX_NEW_TOKENS, self.seed + 2),
            ("tiny_retention", 90, 4, 24, self.seed + 3),
        ):
            task, how = load_task(name), TaskSettings(samples=samples, max_new_tokens=limit, seed=seed)
            task = replace(task, dataset=replace(task.dataset, rows=rows))
            tasks.append(prepare(task, load_questions(task, seed=self.seed), self.tokenizer, how))
        return tasks


def rows_of(
    made: Trained, ranges: Sequence[str], picked: str, constant: float, wanted: Sequence[str]
) -> dict[Variant, Any]:
    """{row of the tables: the model that it acts on} in order; the adapter first, as others refer to it."""
    adapter, gated = made.models["adapter"], made.models[picked]
    configs = {name: made.calibrations[name].config for name in ranges}

    def reach(name: str) -> tuple[bool, bool, float]:
        """Orders ranges for the interventions: one that can reverse and extrapolate, the picked one if it can, the widest."""
        both = configs[name].lower < 0 and configs[name].upper > 1
        return both, both and name == picked, configs[name].upper - configs[name].lower

    widest = max(ranges, key=reach)
    # the base is the adapter's model with it switched off
    rows = {Variant("adapter"): adapter, Variant("base"): adapter}
    rows |= {sampled("adapter", heat): adapter for heat in COOLER}
    rows[Variant("adapter", f"λ={constant:g}", constant=constant)] = adapter
    rows[Variant("adapter", DFT)] = made.models[DFT]
    for name in wanted:
        variant = Variant(CONTROLS[name], name, random=made.seed if name == RANDOM else None)
        rows[variant] = made.models.get(name, gated)
    rows |= {Variant("gated"): gated, **{sampled("gated", heat): gated for heat in COOLER}}
    rows |= {Variant("gated", name): made.models[name] for name in ranges if name != picked}
    rows |= {Variant("gated", f"{widest} {name}", override=name): made.models[widest] for name in INTERVENTIONS}
    return rows


def score(made: Trained, rows: dict[Variant, Any], tasks: list[Prepared]) -> EvaluationRecord:
    """The evaluation of these rows, in the run folder; its record is in results.json."""
    folder, controls = made.folder, {row.control for row in rows}
    absent = "; ".join(name for name in CONTROLS if name not in controls)
    models = {"base": "base", "adapter": "adapters/sft", "gated": "gated"}
    evaluation = Evaluation(
        folder,
        tasks,
        list(rows),
        models={name: str(folder / place) for name, place in models.items()},
        canary=canary(rows[Variant("gated")], made.tokenizer, tasks[0].prompts, "gated"),
        seed=made.seed,
        notes=[CAVEAT, *([f"not run: {absent}; --controls full trains and scores them"] if absent else [])],
    )

    @contextmanager
    def engine_for(variant: Variant) -> Iterator[TransformersEngine]:
        with acting(rows[variant], variant, "gated" if variant.acts == "gated" else "adapter"):
            yield made.engine(rows[variant])

    with made.display.job("sampling the test questions", evaluation.sample_count, "answer") as job:
        evaluation.begin(resume=False)
        record = evaluation.run(engine_for, counted(job, "sampling"))
    write_record(record, folder / "results.json")
    return record


def control_statements(record: EvaluationRecord) -> list[str]:
    """Are the gates above, below or not told apart from DFT and each trained control? Paired by question."""
    said = []
    for row in record.results:
        if row.control != DFT and row.control not in CONTROLS:
            continue
        gated = record.find(row.task)
        gap = compare(*(np.array(one.question_scores)[:, None] for one in (gated, row)))
        stands = {"better": "above", "worse": "below"}.get(verdict(gap), "not told apart from")
        size = f"{points(gap.mean)} points, 95 % interval {points(gap.low)} to {points(gap.high)}"
        said.append(f"On {row.task}, gated is {stands} the control {row.name} ({size}).")
    return said


def _new_folder(wanted: Path) -> Path:
    """The folder, with a number behind its name where it exists."""
    if wanted.is_file():
        raise ConfigError(f"--out {wanted} is a file; give a folder")
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in range(2, 10_000))
    folder = next(one for one in (wanted, *numbered) if not one.exists())
    folder.mkdir(parents=True)
    return folder


def _steps(job: Job, key: str) -> Callable[[StepReport], None]:
    def on_step(report: StepReport) -> None:
        value = report.values.get(key)
        job.advance_to(report.step, report.total, "" if value is None else f"{key.replace('_', ' ')} {value:.3f}")

    return on_step
