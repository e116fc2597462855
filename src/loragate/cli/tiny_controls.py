"""The quickstart's trained controls: what else, given the same rows and steps, might have done what the gates do.

Each answers one doubt about a gated row: a single strength per module would do; any gate of that size would do; the
responses' cross-entropy would have trained the gates as well; more training of the LoRA would have helped as much; the
entropy put on the LoRA itself would have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from loragate.cli.tiny_study import BATCH_ROWS, GATE_ROWS, GATE_STEPS, STAGE_ONE_RATE, OnStep, Study
from loragate.data import load_rows
from loragate.gates import GateConfig, draw_gates, sizes_of
from loragate.training import StageOneSettings, train_adapter
from loragate.training.settings import GateObjective

PER_MODULE = "one λ per module, trained"
RANDOM = "random gates"
CE = "gates trained with CE"
AGAIN = "LoRA, same rows again"
ENTROPY = "LoRA trained with entropy"
NAMES = (PER_MODULE, RANDOM, CE, AGAIN, ENTROPY)


@dataclass
class TrainedControls:
    """The controls of one study, for the range that was picked.

    Attributes:
        study: with its base, SFT adapter and the picked range's gates.
        picked: name of that range.
        adapter: folder of the SFT adapter.
        gates: by control, the gates' configuration and values.
        models: by control, a model of its own.
        records: what was trained, for results.json.
    """

    study: Study
    picked: str
    adapter: Path
    gates: dict[str, tuple[GateConfig, dict[str, torch.Tensor]]] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)

    def train(self, name: str, on_step: OnStep) -> str:
        """Make one control; returns a remark for the progress line."""
        config = self.study.calibrations[self.picked].config
        if name == PER_MODULE:
            return self._train_gates(name, replace(config, granularity="module"), "entropy", on_step)
        if name == CE:
            return self._train_gates(name, config, "ce", on_step)
        if name == RANDOM:
            return self._draw(config)
        if name == AGAIN:
            return self._go_on(name, StageOneSettings(objective="sft", learning_rate=STAGE_ONE_RATE), on_step)
        return self._go_on(name, StageOneSettings(objective="entropy", learning_rate=5e-4, weight_decay=0.0), on_step)

    def score(self, name: str, score: Callable[..., None]) -> None:
        """Sample the test questions with a control."""
        if name in self.models:
            score(name, "control", model=self.models[name])
            return
        with self.study.wearing(*self.gates[name]):
            score(name, "control")

    def reading(self) -> list[str]:
        """One sentence per control: is the gated row above, below or not told apart from it?"""
        gated, said = f"SCALE {self.picked}", []
        for row in self.study.table:
            gap = row.get("versus_gated")
            if row["name"] not in NAMES or row["not_run"] or gap is None:
                continue
            size = f"{-100 * gap['mean']:+.1f} points ({-100 * gap['high']:+.1f} to {-100 * gap['low']:+.1f})"
            if gap["high"] < 0:
                said.append(f"{gated} is above the control “{row['name']}” by {size}.")
            elif gap["low"] > 0:
                said.append(f"{gated} is below the control “{row['name']}”: {size}.")
            else:
                said.append(f"{gated} is not told apart from the control “{row['name']}”: {size}.")
        return said

    def _train_gates(self, name: str, config: GateConfig, objective: GateObjective, on_step: OnStep) -> str:
        result, values = self.study.train_gates(config, objective, on_step)
        self.gates[name] = (config, values)
        self.records[name] = result.evidence()["training"]
        return f"top-100 entropy {result.entropy_before:.3f} → {result.entropy_after:.3f}"

    def _draw(self, config: GateConfig) -> str:
        sizes = sizes_of(self.study.gates[self.picked])
        with self.study.wearing(config, self.study.gates[self.picked]):
            self.gates[RANDOM] = (config, draw_gates(self.study.model, self.study.seed, sizes))
        self.records[RANDOM] = {
            "objective": "random",
            "seed": self.study.seed,
            "size": f"of the gates of {self.picked}",
        }
        return f"as large as those of {self.picked}, module by module"

    def _go_on(self, name: str, settings: StageOneSettings, on_step: OnStep) -> str:
        settings = replace(
            settings,
            adapter=str(self.adapter),
            warmup=0.0,
            batch_size=BATCH_ROWS,
            micro_batch_size=BATCH_ROWS,
            max_steps=GATE_STEPS,
            max_length=128,
            seed=self.study.seed,
            logging_steps=16,
        )
        rows = load_rows(self.study.rows).shuffled(self.study.seed).take(GATE_ROWS)
        result = train_adapter(copy.deepcopy(self.study.base), self.study.tokenizer, rows, settings, on_step=on_step)
        self.models[name] = result.model.eval().requires_grad_(False)
        self.records[name] = {
            "objective": settings.objective,
            "learning_rate": settings.learning_rate,
            "steps": result.steps,
            "rows": result.rows,
            "seconds": round(result.seconds, 1),
            "history": result.history,
        }
        return f"{result.steps} more steps"
