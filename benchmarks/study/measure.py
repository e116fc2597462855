"""The study: every method and control on tiny worlds of many seeds.

    python benchmarks/study/measure.py --cache CACHE [--worlds arithmetic,commands] [--phases core,stage-one,controls]

Worlds: arithmetic, commands (both tiny, of 144 words), larger (arithmetic with a base of eight times the parameters) and
english (the generated arithmetic suite's first level, `english.py`).

A cell is a world, a base seed and a training seed. The base is trained from its seed; demonstrations, adapters and gates
follow the training seed. None of these seeds was used when a default was chosen. Each method is one training (or one
setting) per cell, and answers the same test questions, the same retention items (if the world has a skill to keep) and,
where a rule may choose it, the same development questions. All bases are measured with one training seed before the next
begins, so that a study that is stopped early is smaller, not lopsided. Every row is a file of its own under
CACHE/answers: a stopped run goes on.

`report.py` makes the tables from the answers. Costs are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, which holds worlds/

import english
import numpy as np
import torch
from peft import PeftModel

from loragate.data import encode_rows, load_rows, render_prompt
from loragate.files import write_json
from loragate.gates import (
    GateConfig,
    attach_gates,
    detach_gates,
    draw_gates,
    gate_override,
    gate_parameters,
    record_gates,
    sizes_of,
)
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.training import FineTuningSettings, GateTrainingSettings, train_adapter, train_gates
from loragate.training.token_mask import keep_masks, response_log_probs
from loragate.world.problems import retention_items
from worlds.situations import WORLDS as KINDS
from worlds.situations import Questions, Situation, base_for, demonstration_rows, questions

TEST, TEST_SAMPLES = 120, 4
DEV, DEV_SAMPLES = 64, 4
RETENTION, RETENTION_SAMPLES = 90, 1
BATCH = 512
STEPS, ROWS, GATE_RATE = 157, 2048, 5e-4
RANGES = ((0, 1), (-6, 3), (0, 6), (-3, 1))
CLIPS = {"no reversal": (0.0, None), "no extrapolation": (None, 1.0), "unit": (0.0, 1.0)}
CONSTANTS = (-0.5, 0.5, 1.5)
STAGE_ONE = ("dft", "profit", "eaft", "talr", "mask", "eksft", "forgetting", "dora")
TRAINING_SEEDS = (0, 1, 2)
WORLDS = {
    "arithmetic": (31, 32, 33, 34, 35),
    "commands": (41, 42, 43, 44, 45),
    "english": (51, 52, 53, 54, 55),
    "larger": (101, 102, 103, 104, 105),
}
LARGER = {
    "hidden_size": 128,
    "layers": 6,
    "heads": 8,
    "key_value_heads": 4,
    "intermediate_size": 384,
    "initializer_range": 0.07,
    "learning_rate": 3e-3,
}
KINDS["larger"] = replace(KINDS["arithmetic"], recipe=replace(KINDS["arithmetic"].recipe, **LARGER))
PHASES = ("core", "stage-one", "controls")


@dataclass(frozen=True)
class Numbers:
    """Stage I of one world: learning rate, noise of the demonstrations, their number; and lengths in tokens."""

    learning_rate: float
    noise: float
    rows: int
    max_length: int = 128
    max_new_tokens: int = 72


NUMBERS = {
    "arithmetic": Numbers(1e-3, 0.20, 4096),
    "commands": Numbers(5e-4, 0.0, 2048),
    "english": Numbers(1e-3, 0.20, 4096, max_length=192, max_new_tokens=112),
    "larger": Numbers(1e-3, 0.20, 4096),
}
KEPT: dict[str, Callable[[int], Questions]] = {
    **dict.fromkeys(("arithmetic", "larger"), lambda count: Questions(tuple(retention_items("test", count, seed=0)))),
    "english": lambda count: Questions(tuple(english.retention("test", count, seed=0)), english.verify),
}


def cells(world: str) -> list[Situation]:
    """Every cell of a world; the training seed changes slowest."""
    numbers = NUMBERS[world]
    return [
        Situation(
            f"{world}-{base}-{seed}",
            world,
            base,
            seed,
            numbers.learning_rate,
            numbers.noise,
            numbers.rows,
        )
        for seed in TRAINING_SEEDS
        for base in WORLDS[world]
    ]


class Cell:
    """One base with its adapters and gates, made when they are asked for."""

    def __init__(self, situation: Situation, cache: Path) -> None:
        self.situation, self.cache = situation, cache
        self.numbers = NUMBERS[situation.world]
        self.folder = cache / "answers" / situation.name
        self.base, self.tokenizer = base_for(situation, cache / "bases")
        self.rows: list[dict[str, Any]] = list(demonstration_rows(situation))
        self.asked = {
            "test": (questions(situation, "test", TEST), TEST_SAMPLES, 2),
            "dev": (questions(situation, "dev", DEV), DEV_SAMPLES, 1),
        }
        if situation.world in KEPT:
            self.asked["retention"] = (KEPT[situation.world](RETENTION), RETENTION_SAMPLES, 3)
        self._lora: Any = None

    @property
    def lora(self) -> Any:
        """The plain LoRA, that every gate is laid on."""
        if self._lora is None:
            self._lora = self.adapter("sft")
        return self._lora

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.json").is_file()

    def keep(self, name: str, model: Any, *, dev: bool = False, temperature: float = 1.0, **more: Any) -> None:
        """Ask a model everything, write verdicts and costs, and say so."""
        record = self.ask(model, dev=dev, temperature=temperature)
        write_json(self.folder / f"{name}.json", {"name": name, "temperature": temperature, **more, **record})
        print(f"{self.situation.name:18} {name:28} test {100 * np.mean(record['test']['correct']):5.1f}", flush=True)

    def ask(self, model: Any, *, dev: bool, temperature: float) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for split, (asked, samples, seed) in self.asked.items():
            if split == "dev" and not dev:
                continue
            count = 1 if temperature == 0 else samples
            prompts = [render_prompt(prompt, self.tokenizer) for prompt in asked.prompts]
            config = SamplingConfig(
                temperature=temperature, max_new_tokens=self.numbers.max_new_tokens, samples=count, seed=seed
            )
            correct = np.zeros((len(prompts), count), dtype=int)
            drawn = list(TransformersEngine(model, self.tokenizer, batch_size=BATCH).generate(prompts, config))
            for sample in drawn:
                ended = sample.finish_reason == "stop"
                correct[sample.question, sample.sample] = asked.verify(sample.question, sample.text, ended)
            record[split] = {
                "correct": correct.tolist(),
                "ended": float(np.mean([sample.finish_reason == "stop" for sample in drawn])),
                "tokens": float(np.mean([len(sample.token_ids) for sample in drawn])),
            }
        return record

    # Stage I

    def adapter(self, objective: str) -> Any:
        """The adapter trained with an objective, from the cache or now."""
        place = self.cache / "adapters" / f"{self.situation.name}-{objective}"
        if not (place / "cost.json").is_file():
            options: dict[str, Any] = {"dora": True} if objective == "dora" else {"objective": objective}
            if objective == "forgetting":  # as it ran; the released constants became the defaults later
                options["objective_options"] = {"t_max": 0.1, "t_min": 0.0}
            rows = self.masked_rows() if objective in ("mask", "forgetting") else self.rows
            began = time.process_time()
            result = self._train(FineTuningSettings(**options, learning_rate=self.situation.learning_rate), rows)
            result.model.save_pretrained(str(place))
            write_json(place / "cost.json", {"cpu_seconds": time.process_time() - began})
        return PeftModel.from_pretrained(copy.deepcopy(self.base), str(place)).eval()

    def _train(self, settings: FineTuningSettings, rows: list[dict[str, Any]]) -> Any:
        settings = replace(
            settings,
            batch_size=32,
            per_device_train_batch_size=32,
            max_length=self.numbers.max_length,
            seed=self.situation.sft_seed,
            logging_steps=64,
        )
        return train_adapter(copy.deepcopy(self.base), self.tokenizer, load_rows(rows), settings)

    def masked_rows(self) -> list[dict[str, Any]]:
        """The rows with a `keep_mask` by Token Cleaning; its reference is a LoRA of as many other demonstrations."""
        other = replace(self.situation, sft_seed=self.situation.sft_seed + 1000)
        settings = FineTuningSettings(learning_rate=self.situation.learning_rate)
        reference = self._train(settings, list(demonstration_rows(other))).model.eval()
        encoded = encode_rows(load_rows(self.rows), self.tokenizer, max_length=self.numbers.max_length)
        whole = [encoded[index] for index in range(len(encoded))]
        assert [row["row"] for row in whole] == list(range(len(self.rows))), "a row was left out"

        def scores(model: Any) -> list[np.ndarray]:
            windows = response_log_probs(model, whole, self.tokenizer.pad_token_id, per_device_train_batch_size=64)
            return [row for window in windows for row in window]

        gains = [after - before for before, after in zip(scores(self.base), scores(reference), strict=True)]
        masks = keep_masks(gains, 0.6)
        return [{**row, "keep_mask": mask.tolist()} for row, mask in zip(self.rows, masks, strict=True)]

    # Stage II

    def settings(self, **more: Any) -> GateTrainingSettings:
        return GateTrainingSettings(
            learning_rate=GATE_RATE,
            batch_size=32,
            per_device_train_batch_size=32,
            max_steps=STEPS,
            max_length=self.numbers.max_length,
            max_rows=ROWS,
            seed=self.situation.sft_seed,
            logging_steps=40,
            **more,
        )

    @contextmanager
    def gated(self, model: Any, config: GateConfig, settings: GateTrainingSettings) -> Iterator[dict[str, Any]]:
        """The adapter with gates trained now; yields what their training cost and did."""
        began = time.process_time()
        result = train_gates(model, self.tokenizer, load_rows(self.rows), config, settings)
        try:
            yield {
                "cpu_seconds": time.process_time() - began,
                "entropy": [result.entropy_before, result.entropy_after],
                "parameters": result.gates_total,
            }
        finally:
            detach_gates(model)

    def config(self, lower: float, upper: float, **more: Any) -> GateConfig:
        return GateConfig(lower, upper, seed=self.situation.sft_seed, **more)


def core(cell: Cell) -> None:
    """Base, LoRA, temperatures, constants, DFT, the ranges and what clipping [-6,3] does."""
    if not cell.has("base"):
        cell.keep("base", cell.base, dev=True)
    if not cell.has("LoRA"):
        cell.keep("LoRA", cell.lora, dev=True)
    for heat in (0.6, 0.3, 0.0):
        name = f"LoRA T={heat:g}" if heat else "LoRA greedy"
        if not cell.has(name):
            cell.keep(name, cell.lora, temperature=heat)
    for lower, upper in RANGES:
        name = f"SCALE [{lower},{upper}]"
        clips = CLIPS if (lower, upper) == (-6, 3) else {}
        if cell.has(name) and all(cell.has(f"{name} {clip}") for clip in clips):
            continue
        with cell.gated(cell.lora, cell.config(lower, upper), cell.settings()) as training:
            if (lower, upper) == (-6, 3):
                sizes = sizes_of(gate_parameters(cell.lora))
                write_json(cell.folder / "gates" / "sizes.json", sizes)
            with record_gates(cell.lora) as recording:
                cell.keep(name, cell.lora, dev=True, training=training)
            write_json(cell.folder / "gates" / f"{name}.json", recording.total())
            for clip, (minimum, maximum) in clips.items():
                with gate_override(cell.lora, minimum, maximum):
                    cell.keep(f"{name} {clip}", cell.lora)
    for value in CONSTANTS:
        name = f"λ={value:g}"
        if not cell.has(name):
            attach_gates(cell.lora, GateConfig(min(value, -1.0), max(value, 2.0)))
            try:
                with gate_override(cell.lora, constant=value):
                    cell.keep(name, cell.lora, dev=True)
            finally:
                detach_gates(cell.lora)
    if not cell.has("DFT"):
        cell.keep("DFT", cell.adapter("dft"))


def stage_one(cell: Cell) -> None:
    """The other Stage-I methods, and gates on the DFT adapter."""
    for objective in STAGE_ONE:
        name = {"dft": "DFT", "dora": "DoRA"}.get(objective, objective)
        if not cell.has(name):
            cell.keep(name, cell.adapter(objective))
    if not cell.has("SCALE [0,1] on DFT"):
        model = cell.adapter("dft")
        with cell.gated(model, cell.config(0, 1), cell.settings()) as training:
            cell.keep("SCALE [0,1] on DFT", model, training=training)


def controls(cell: Cell) -> None:
    """What else, given the same rows and steps, might have done what the gates do."""
    gates: dict[str, Callable[[], tuple[GateConfig, GateTrainingSettings]]] = {
        "one λ per module [0,1]": lambda: (cell.config(0, 1, granularity="module"), cell.settings()),
        "CE gates [-6,3]": lambda: (cell.config(-6, 3), cell.settings(objective="ce")),
    }
    for name, made in gates.items():
        if not cell.has(name):
            with cell.gated(cell.lora, *made()) as training:
                cell.keep(name, cell.lora, training=training)
    if not cell.has("random gates [-6,3]"):
        sizes = json.loads((cell.folder / "gates" / "sizes.json").read_text(encoding="utf-8"))
        attach_gates(cell.lora, cell.config(-6, 3))
        try:
            draw_gates(cell.lora, cell.situation.sft_seed, sizes)
            cell.keep("random gates [-6,3]", cell.lora)
        finally:
            detach_gates(cell.lora)
    again = {
        "LoRA continued": FineTuningSettings(learning_rate=cell.situation.learning_rate),
        "LoRA by entropy": FineTuningSettings(objective="entropy", learning_rate=GATE_RATE, weight_decay=0.0),
        "LoRA interleaved": FineTuningSettings(objective="interleaved", learning_rate=GATE_RATE),
    }
    for name, settings in again.items():
        if not cell.has(name):
            started = str(cell.cache / "adapters" / f"{cell.situation.name}-sft")
            rows = load_rows(cell.rows).shuffled(cell.situation.sft_seed).take(ROWS)
            settings = replace(settings, adapter=started, warmup_ratio=0.0, max_steps=STEPS)
            began = time.process_time()
            result = cell._train(settings, [rows[index] for index in range(len(rows))])
            cost = {"cpu_seconds": time.process_time() - began}
            cell.keep(name, result.model.eval(), training=cost)


RUN = {"core": core, "stage-one": stage_one, "controls": controls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--seeds", default=",".join(map(str, TRAINING_SEEDS)), help="training seeds")
    parser.add_argument("--bases", default="", help="base seeds; all otherwise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    chosen = [
        situation
        for world in options.worlds.split(",")
        for situation in cells(world)
        if not options.bases or str(situation.base_seed) in options.bases.split(",")
    ]
    for seed in seeds:
        for phase in options.phases.split(","):
            for situation in chosen:
                if situation.sft_seed == seed:
                    write_json(options.cache / "answers" / situation.name / "cell.json", asdict(situation))
                    RUN[phase](Cell(situation, options.cache))


if __name__ == "__main__":
    main()
