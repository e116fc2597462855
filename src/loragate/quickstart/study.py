"""The quickstart's study on the tiny world, step by step: base, adapters, gates, trained controls, scores.

Everything is measured on the spot; nothing here knows how a result is shown. Disjoint splits are used: "train" for the
demonstrations, "dev" to pick the range and the constant λ, "test" for the table.

Each trained control answers one doubt about a gated row: a single strength per module would do; any gate of that size would
do; the responses' cross-entropy would have trained the gates as well; more training of the LoRA would have helped as much; the
entropy put on the LoRA itself would have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loragate.data import Collator, encode_rows, load_rows, render_prompt
from loragate.data.rendering import IGNORED
from loragate.evaluation import SuiteScores, average_at_k, compare, run_suite
from loragate.evaluation.results import AtBest
from loragate.evaluation.statistics import out_of_fold
from loragate.gates import (
    GateConfig,
    attach_gates,
    constant_gate,
    detach_gates,
    draw_gates,
    gate_parameters,
    record_gates,
    sizes_of,
)
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.training import CalibrationResult, CalibrationSettings, StageOneSettings, calibrate, train_adapter
from loragate.training.callbacks import StepReport
from loragate.training.settings import GateObjective, StageOneObjective
from loragate.world.base import load_base
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import Problem, problems, retention_items, verify

OnStep = Callable[[StepReport], None]
MAX_NEW_TOKENS = 72
BATCH = 480
CONSTANTS = (-0.5, 0.5, 1.5)
HEATS = (1.0, 0.6, 0.3, 0.0)
BATCH_ROWS, GATE_ROWS, GATE_STEPS = 32, 2048, 157
HELDOUT_ROWS = 64
OTHER_ROWS = 1_000_003  # rows that are measured only are drawn with a seed so far from the study's
STAGE_ONE_RATE = 1e-3
PER_MODULE, RANDOM, CE = "one λ per module, trained", "random gates", "gates trained with CE"
AGAIN, ENTROPY = "LoRA, same rows again", "LoRA trained with entropy"
CONTROLS = (PER_MODULE, RANDOM, CE, AGAIN, ENTROPY)


@dataclass
class Question:
    """A list of questions with rendered prompts and a verdict."""

    items: list[Problem]
    prompts: list[str]

    def is_right(self, index: int, sample: Sample) -> bool:
        return verify(self.items[index], sample.text, sample.finish_reason == "stop")


@dataclass
class Study:
    """The state of one study: what was trained and what was measured so far.

    Attributes:
        seed: of data, training and sampling.
        questions, samples: of the test.
        base, model, dft: the base, the SFT adapter on it, and the DFT adapter on a copy of it.
        rows: the demonstrations.
        calibrations: by range.
        gates: by range or control: the configuration and the values of gates that were taken off again.
        models: by control, a model of its own.
        controls: what was trained for each control, for results.json.
        dev_scores: on the development questions, by range, "adapter" or constant ("λ=0.5").
        table: rows as `report.table` describes them.
        scores: on the test questions, by row.
    """

    seed: int
    questions: int = 120
    samples: int = 16
    base: Any = None
    model: Any = None
    dft: Any = None
    tokenizer: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    calibrations: dict[str, CalibrationResult] = field(default_factory=dict)
    gates: dict[str, tuple[GateConfig, dict[str, torch.Tensor]]] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    controls: dict[str, Any] = field(default_factory=dict)
    dev_scores: dict[str, SuiteScores] = field(default_factory=dict)
    table: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, SuiteScores] = field(default_factory=dict)

    def take_base(self) -> None:
        """The shipped base, with the questions and demonstrations of the study's seed."""
        self.base, self.tokenizer = load_base()
        self.test = self._questions(problems("test", self.questions, (4, 4), seed=self.seed))
        self.dev = self._questions(problems("dev", 64, (4, 4), seed=self.seed))
        self.kept = self._questions(retention_items("test", 90, seed=self.seed))
        self.rows = demonstrations(4096, seed=self.seed)

    def _questions(self, items: list[Problem]) -> Question:
        prompts = [render_prompt([{"role": "user", "content": item.prompt}], self.tokenizer) for item in items]
        return Question(items, prompts)

    def train_stage_one(self, objective: StageOneObjective, folder: Path, on_step: OnStep) -> None:
        """An adapter on the noisy demonstrations (4096 rows, 128 steps of 32)."""
        settings = StageOneSettings(
            objective=objective,
            learning_rate=STAGE_ONE_RATE,
            batch_size=BATCH_ROWS,
            micro_batch_size=BATCH_ROWS,
            max_length=128,
            seed=self.seed,
            logging_steps=16,
        )
        result = train_adapter(
            copy.deepcopy(self.base),
            self.tokenizer,
            load_rows(self.rows),
            settings,
            run_folder=folder / "run",
            on_step=on_step,
        )
        result.model.save_pretrained(str(folder))
        model = result.model.eval().requires_grad_(False)
        if objective == "sft":
            self.model = model
        else:
            self.dft = model

    def train_control(self, name: str, picked: str, adapter: Path, on_step: OnStep) -> str:
        """Make one of `CONTROLS` for the range that was picked; returns a remark for the progress line.

        Args:
            adapter: folder of the SFT adapter.
        """
        config, values = self.gates[picked]
        if name == RANDOM:
            with self.gated(picked):
                self.gates[name] = (config, draw_gates(self.model, self.seed, sizes_of(values)))
            self.controls[name] = {"objective": "random", "seed": self.seed, "size": f"of the gates of {picked}"}
            return f"as large as those of {picked}, module by module"
        if name in (PER_MODULE, CE):
            config = replace(config, granularity="module") if name == PER_MODULE else config
            result = self.train_gates(name, config, "ce" if name == CE else "entropy", on_step)
            self.controls[name] = result.evidence()["training"]
            return f"top-100 entropy {result.entropy_before:.3f} → {result.entropy_after:.3f}"
        own: dict[str, Any] = {"objective": "sft", "learning_rate": STAGE_ONE_RATE}
        if name == ENTROPY:
            own = {"objective": "entropy", "learning_rate": 5e-4, "weight_decay": 0.0}
        settings = StageOneSettings(
            **own,
            adapter=str(adapter),
            warmup=0.0,
            batch_size=BATCH_ROWS,
            micro_batch_size=BATCH_ROWS,
            max_steps=GATE_STEPS,
            max_length=128,
            seed=self.seed,
            logging_steps=16,
        )
        rows = load_rows(self.rows).shuffled(self.seed).take(GATE_ROWS)
        trained = train_adapter(copy.deepcopy(self.base), self.tokenizer, rows, settings, on_step=on_step)
        self.models[name] = trained.model.eval().requires_grad_(False)
        self.controls[name] = {
            "objective": settings.objective,
            "learning_rate": settings.learning_rate,
            "steps": trained.steps,
            "rows": trained.rows,
            "seconds": round(trained.seconds, 1),
            "history": trained.history,
        }
        return f"{trained.steps} more steps"

    def train_gates(
        self, name: str, config: GateConfig, objective: GateObjective, on_step: OnStep
    ) -> CalibrationResult:
        """Gates on the frozen SFT adapter, kept under their name and taken off again.

        157 steps at 5e-4 as in the paper, with a batch of 32 on 2048 of the adapter's own rows.
        """
        settings = CalibrationSettings(
            objective=objective,
            learning_rate=5e-4,
            batch_size=BATCH_ROWS,
            micro_batch_size=BATCH_ROWS,
            max_steps=GATE_STEPS,
            max_length=128,
            max_rows=GATE_ROWS,
            seed=self.seed,
            logging_steps=4,
        )
        trained_on = {str(row) for row in self.rows}
        others = [
            row for row in demonstrations(4 * HELDOUT_ROWS, seed=self.seed + OTHER_ROWS) if str(row) not in trained_on
        ]
        heldout = encode_rows(load_rows(others[:HELDOUT_ROWS]), self.tokenizer, max_length=settings.max_length)
        result = calibrate(
            self.model, self.tokenizer, load_rows(self.rows), config, settings, on_step=on_step, heldout=heldout
        )
        values = {key: value.detach().clone() for key, value in gate_parameters(self.model).items()}
        self.gates[name] = (config, values)
        detach_gates(self.model)
        return result

    @contextmanager
    def gated(self, name: str) -> Iterator[None]:
        """The gates of a range or control inside the context."""
        config, values = self.gates[name]
        attach_gates(self.model, config)
        try:
            with torch.no_grad():
                for key, parameter in gate_parameters(self.model).items():
                    parameter.copy_(values[key])
                    parameter.requires_grad_(False)
            yield
        finally:
            detach_gates(self.model)

    def score_dev(self, name: str) -> None:
        """Avg@4 on the development questions, of a range, of "adapter", or of a constant λ ("λ=0.5")."""
        if name == "adapter":
            context: Any = nullcontext()
        elif name.startswith("λ="):
            context = constant_gate(self.model, float(name[2:]))
        else:
            context = self.gated(name)
        with context:
            config = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, samples=4, seed=self.seed + 1)
            engine = TransformersEngine(self.model, self.tokenizer, batch_size=BATCH)
            self.dev_scores[name] = run_suite(engine, self.dev.prompts, self.dev.is_right, config)

    def score_test(self, name: str, group: str, *, temperature: float = 1.0, model: Any = None) -> None:
        """One line of the table: Avg@k on the test questions and retention, at one temperature."""
        model = self.model if model is None else model
        engine = TransformersEngine(model, self.tokenizer, batch_size=BATCH)
        suite = self.ask_test(engine, temperature)
        few = SamplingConfig(
            temperature=temperature, max_new_tokens=24, samples=1 if temperature == 0 else 4, seed=self.seed + 3
        )
        kept = run_suite(engine, self.kept.prompts, self.kept.is_right, few)
        self.scores[name] = suite
        self.table.append(
            {
                "name": name,
                "group": group,
                "temperature": temperature,
                "accuracy": asdict(suite.accuracy),
                "retention": asdict(kept.accuracy),
                "truncated": suite.truncated,
                "entropy": suite.entropy,
                "tokens": suite.tokens,
                "versus_lora": None,
                "at_best": None,
                "not_run": False,
            }
        )

    def ask_test(self, engine: TransformersEngine, temperature: float) -> SuiteScores:
        """The test questions at one temperature."""
        samples = 1 if temperature == 0 else self.samples
        config = SamplingConfig(
            temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, samples=samples, seed=self.seed + 2
        )
        return run_suite(engine, self.test.prompts, self.test.is_right, config)

    def at_best(self, name: str, rows: Mapping[float, str]) -> None:
        """Fill in a row's score at the best of `HEATS`, out of fold, with the model as it stands.

        Args:
            rows: {temperature: the row that has its scores}; the others are asked now.
        """
        engine = TransformersEngine(self.model, self.tokenizer, batch_size=BATCH)
        asked = {heat: self.scores[rows[heat]] if heat in rows else self.ask_test(engine, heat) for heat in HEATS}
        means_QS = np.stack([suite.scores.mean(1) for suite in asked.values()], axis=1)
        best = HEATS[int(np.argmax(means_QS.mean(axis=0)))]
        score = average_at_k(out_of_fold(means_QS)[:, None])
        next(row for row in self.table if row["name"] == name)["at_best"] = asdict(AtBest(best, score))

    def compare_with(self, adapter: str, gated: str) -> None:
        """Fill in every row's paired differences to the adapter's row and to the gated one."""
        for row in self.table:
            for key, reference in (("versus_lora", adapter), ("versus_gated", gated)):
                row[key] = None
                if row["name"] != reference and not row["not_run"]:
                    # a greedy answer is one sample per question; pairing is by question means
                    pair = [self.scores[name].scores.mean(1, keepdims=True) for name in (row["name"], reference)]
                    row[key] = asdict(compare(*pair))

    def realised_gates(self, reference: str) -> dict[str, dict[str, float]]:
        """λ statistics on the answers that were sampled for a row, re-read teacher-forced; gates must be on."""
        samples = [sample for sample in self.scores[reference].samples if sample.sample < 4]
        with record_gates(self.model) as recording, torch.no_grad():
            for at in range(0, len(samples), 128):
                rows = []
                for sample in samples[at : at + 128]:
                    prompt = self.tokenizer(self.test.prompts[sample.question], add_special_tokens=False)["input_ids"]
                    ids, labels = [*prompt, *sample.token_ids], [IGNORED] * len(prompt) + [*sample.token_ids]
                    rows.append({"input_ids": ids, "labels": labels, "row": sample.question})
                batch = Collator(self.tokenizer.pad_token_id)(rows)
                recording.token_mask = batch["labels"] != IGNORED
                # padding stands right of causal attention and is masked out of the statistics
                self.model(input_ids=batch["input_ids"], use_cache=False)
        return recording.statistics()


def control_statements(table: Sequence[Mapping[str, Any]], gated: str) -> list[str]:
    """One sentence per trained control: is the gated row above, below or not told apart from it?"""
    said = []
    for row in table:
        gap = row.get("versus_gated")
        if row["name"] not in CONTROLS or row["not_run"] or gap is None:
            continue
        size = f"{-100 * gap['mean']:+.1f} points ({-100 * gap['high']:+.1f} to {-100 * gap['low']:+.1f})"
        if gap["high"] < 0:
            said.append(f"{gated} is above the control “{row['name']}” by {size}.")
        elif gap["low"] > 0:
            said.append(f"{gated} is below the control “{row['name']}”: {size}.")
        else:
            said.append(f"{gated} is not told apart from the control “{row['name']}”: {size}.")
    return said
