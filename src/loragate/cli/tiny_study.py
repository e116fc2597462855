"""The quickstart's study on the tiny world, step by step: base, adapters, gates, scores.

Everything is measured on the spot; nothing here knows how a result is shown. Four disjoint splits are used: "train" for
the demonstrations, "dev" to pick the range and the constant λ, "test" for the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from loragate.data import encode_rows, load_rows, render_prompt
from loragate.evaluation import SuiteScores, compare, run_suite
from loragate.gates import (
    GateConfig,
    attach_gates,
    constant_gate,
    detach_gates,
    gate_parameters,
    record_gates,
)
from loragate.gates.range import Range
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.selection import Choice, choose
from loragate.training import CalibrationResult, CalibrationSettings, StageOneSettings, calibrate, train_adapter
from loragate.training.callbacks import StepReport
from loragate.training.settings import GateObjective, StageOneObjective
from loragate.world.base import TinyBaseRecipe, load_base, train_base
from loragate.world.demonstrations import demonstrations
from loragate.world.problems import Problem, problems, retention_items, verify

OnStep = Callable[[StepReport], None]
MAX_NEW_TOKENS = 72
BATCH = 480
CONSTANTS = (-0.5, 0.5, 1.5)
BATCH_ROWS, GATE_ROWS, GATE_STEPS = 32, 2048, 157
HELDOUT_ROWS, OTHER_ROWS = (
    64,
    1_000_003,
)  # measured only; the seed that they are drawn with lies so far from the study's
STAGE_ONE_RATE = 1e-3


@dataclass
class Question:
    """A list of questions with rendered prompts and a verdict."""

    items: list[Problem]
    prompts: list[str]

    def is_right(self, index: int, sample: Sample) -> bool:
        return verify(self.items[index], sample.text, sample.finish_reason == "stop")


@dataclass
class Study:
    """The state of one study: what was trained and what was measured so far."""

    seed: int
    questions: int = 120
    samples: int = 16
    model: Any = None
    dft: Any = None
    base: Any = None
    tokenizer: Any = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    calibrations: dict[str, CalibrationResult] = field(default_factory=dict)
    gates: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    dev_scores: dict[str, SuiteScores] = field(default_factory=dict)
    table: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, SuiteScores] = field(default_factory=dict)

    def take_base(self, base_seed: int | None, on_step: Callable[[int, int, float], None] | None = None) -> None:
        """The shipped base, or a fresh one trained from `base_seed`."""
        if base_seed is None:
            self.base, self.tokenizer = load_base()
        else:
            self.base, self.tokenizer = train_base(TinyBaseRecipe(), base_seed, on_step)
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
        result.model.eval()
        for parameter in result.model.parameters():
            parameter.requires_grad_(False)
        if objective == "sft":
            self.model = result.model
        else:
            self.dft = result.model

    def calibrate_range(self, name: str, bounds: Range, on_step: OnStep) -> None:
        """Gates for one range on the frozen SFT adapter; kept, then taken off."""
        config = GateConfig(bounds.lower, bounds.upper, seed=self.seed)
        self.calibrations[name], self.gates[name] = self.train_gates(config, "entropy", on_step)

    def train_gates(
        self, config: GateConfig, objective: GateObjective, on_step: OnStep
    ) -> tuple[CalibrationResult, dict[str, torch.Tensor]]:
        """Gates on the frozen SFT adapter, taken off again; returns the record and the values.

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
        detach_gates(self.model)
        return result, values

    @contextmanager
    def wearing(self, config: GateConfig, values: dict[str, torch.Tensor]) -> Iterator[None]:
        """Given gates inside the context."""
        attach_gates(self.model, config)
        try:
            with torch.no_grad():
                for key, parameter in gate_parameters(self.model).items():
                    parameter.copy_(values[key])
                    parameter.requires_grad_(False)
            yield
        finally:
            detach_gates(self.model)

    @contextmanager
    def gated(self, name: str) -> Iterator[None]:
        """The gates of a range inside the context."""
        with self.wearing(self.calibrations[name].config, self.gates[name]):
            yield

    def scaled(self, constant: float) -> AbstractContextManager[None]:
        """The adapter at one constant λ inside the context (0 is the base)."""
        return constant_gate(self.model, constant)

    def score_dev(self, name: str) -> None:
        """Avg@4 on the development questions, of a range, of "adapter", or of a constant λ ("λ=0.5")."""
        if name == "adapter":
            context: Any = nullcontext()
        elif name.startswith("λ="):
            context = self.scaled(float(name[2:]))
        else:
            context = self.gated(name)
        with context:
            config = SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, samples=4, seed=self.seed + 1)
            engine = TransformersEngine(self.model, self.tokenizer, batch_size=BATCH)
            self.dev_scores[name] = run_suite(engine, self.dev.prompts, self.dev.is_right, config)

    def choose_range(self) -> Choice:
        """The best range on the development questions, the untouched adapter among the candidates."""
        names = ["adapter", *self.calibrations]
        return choose({name: self.dev_scores[name].scores for name in names}, "adapter")

    def best_constant(self) -> float:
        """The best constant λ on the development questions."""
        return max(CONSTANTS, key=lambda value: float(self.dev_scores[f"λ={value:g}"].scores.mean()))

    def score_test(self, name: str, group: str, *, temperature: float = 1.0, model: Any = None) -> None:
        """One line of the table: Avg@k on the test questions and retention, at one temperature."""
        model = self.model if model is None else model
        engine = TransformersEngine(model, self.tokenizer, batch_size=BATCH)
        samples = 1 if temperature == 0 else self.samples
        config = SamplingConfig(
            temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, samples=samples, seed=self.seed + 2
        )
        suite = run_suite(engine, self.test.prompts, self.test.is_right, config)
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
                "not_run": False,
            }
        )

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
                part = samples[at : at + 128]
                prompts = [
                    self.tokenizer(self.test.prompts[s.question], add_special_tokens=False)["input_ids"] for s in part
                ]
                width = max(len(p) + len(s.token_ids) for p, s in zip(prompts, part, strict=True))
                ids = torch.full((len(part), width), self.tokenizer.pad_token_id)
                generated = torch.zeros((len(part), width), dtype=torch.bool)
                for row, (prompt, sample) in enumerate(zip(prompts, part, strict=True)):
                    tokens = [*prompt, *sample.token_ids]
                    ids[row, : len(tokens)] = torch.tensor(tokens)
                    generated[row, len(prompt) : len(tokens)] = True
                recording.token_mask = generated
                # padding stands right of causal attention and is masked out of the statistics
                self.model(input_ids=ids, use_cache=False)
        return recording.statistics()
