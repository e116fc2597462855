"""Objectives with which gates might change answers, on tiny worlds where greedy decoding is far from perfect.

    python benchmarks/objectives/trial.py --cache CACHE [--cells commands-weak/0,…] [--contenders …]

A cell is a committed situation (`benchmarks/worlds/situations.py`) and a training seed. Its adapter is trained first; gates,
and the LoRA itself as a control, then learn from rows that the adapter never saw. Every contender answers the same
development and test questions greedily and at T = 0.3, 0.6 and 1. Each is a file of its own under CACHE/answers, so that a
stopped run goes on; `report.py` packs them and makes the tables. Costs are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, which holds worlds/ and selection/

import torch
from peft import PeftModel

from loragate.data import encode_rows, load_rows, render_prompt
from loragate.files import write_json
from loragate.gates import GateConfig, attach_gates, detach_gates, gate_override, gate_parameters
from loragate.generation import Sample, SamplingConfig
from loragate.training import FineTuningSettings, train_adapter
from objectives.learning import LIMITS, OBJECTIVES, RANGE, Learner, evolved, fit, set_constants
from selection.measure import ensemble_answers, solved
from worlds.situations import Questions, Situation, base_for, demonstration_rows, questions, situation_named

SITUATIONS = ("commands-noisy", "commands-weak", "test-commands")
SEEDS = (0, 1, 2)
TEMPERATURES = (0.0, 0.3, 0.6, 1.0)
TEST, DEV, SAMPLES = 400, 128, 2
MAX_NEW_TOKENS = 72
BATCH = 512
UNSEEN = 1024  # rows for gates and controls
STEPS, SEQUENCES = 80, 32
GATE_RATE = 5e-3  # of gates; a LoRA that goes on takes the rate that it was trained with


class Cell(Learner):
    """One situation and training seed: its adapter, the rows that it never saw, and the answers on file."""

    sequences, max_new_tokens, answers_at_once = SEQUENCES, MAX_NEW_TOKENS, BATCH

    def __init__(self, name: str, cache: Path) -> None:
        situation, seed = name.rsplit("/", 1)
        self.name, self.seed, self.cache = name, int(seed), cache
        self.situation: Situation = replace(situation_named(situation), sft_seed=self.seed)
        self.folder = cache / "answers" / name
        self.base, self.tokenizer = base_for(self.situation, cache / "bases")
        seen = demonstration_rows(self.situation)
        self.model = self._adapter(seen)
        self.frozen = copy.deepcopy(self.model).requires_grad_(False)
        prompts = {row["messages"][0]["content"] for row in seen}
        fresh = demonstration_rows(replace(self.situation, sft_seed=self.seed + 1000, rows=8 * UNSEEN))
        self.unseen = [row for row in fresh if row["messages"][0]["content"] not in prompts][:UNSEEN]
        asked = [row["messages"][0]["content"] for row in self.unseen]
        self.unseen_questions = Questions(tuple(solved(prompt) for prompt in asked))
        self.practice = self.prompts(self.unseen_questions)
        self.asked = {
            "dev": questions(self.situation, "dev", DEV),
            "test": questions(self.situation, "test", TEST),
        }

    def _adapter(self, rows: Any) -> Any:
        place = self.cache / "adapters" / self.name
        if not (place / "adapter_config.json").is_file():
            settings = FineTuningSettings(
                learning_rate=self.situation.learning_rate,
                batch_size=32,
                per_device_train_batch_size=32,
                max_length=128,
                seed=self.seed,
                logging_steps=64,
            )
            trained = train_adapter(copy.deepcopy(self.base), self.tokenizer, load_rows(rows), settings)
            trained.model.save_pretrained(str(place))
        return PeftModel.from_pretrained(copy.deepcopy(self.base), str(place)).eval()

    # answers

    def prompts(self, asked: Questions) -> list[str]:
        """The questions as the model reads them."""
        return [render_prompt(prompt, self.tokenizer) for prompt in asked.prompts]

    def keep(self, name: str, model: Any, contrast: float | None = None, **more: Any) -> None:
        """Ask everything at every temperature and write the verdicts."""
        record: dict[str, Any] = {"cell": self.name, "contender": name, **more, "verdicts": {}}
        for seed, (split, asked) in enumerate(self.asked.items(), 1):
            prompts = self.prompts(asked)
            for heat in TEMPERATURES:
                if contrast is None:
                    drawn = [
                        (s.question, s.text, s.finish_reason == "stop")
                        for s in self.draw(model, prompts, heat, SAMPLES, seed)
                    ]
                else:
                    config = SamplingConfig(heat, 1.0, MAX_NEW_TOKENS, SAMPLES if heat else 1, seed)
                    found = ensemble_answers(model, self.tokenizer, prompts, config, contrast)
                    drawn = [(question, text, ended) for question, _, text, ended, _ in found]
                record["verdicts"][f"{split} T={heat:g}"] = "".join(str(int(asked.verify(*one))) for one in drawn)
        write_json(self.folder / f"{name}.json", record)
        shown = " ".join(f"{100 * share(bits):5.1f}" for bits in record["verdicts"].values())
        print(f"{self.name:18} {name:24} {shown}", flush=True)

    # what learners need

    @cached_property
    def references(self) -> list[dict[str, Any]]:
        """The unseen rows with their references, encoded."""
        encoded = encode_rows(load_rows(self.unseen), self.tokenizer, max_length=128)
        return [encoded[index] for index in range(len(encoded))]

    def judge(self, sample: Sample, question: int) -> tuple[bool, str | None]:
        """By the world, and the letter that a finished answer states."""
        return judged(self.unseen_questions, sample, question)


def share(bits: str) -> float:
    """Share of ones."""
    return bits.count("1") / len(bits)


def judged(asked: Questions, sample: Sample, question: int) -> tuple[bool, str | None]:
    """The verdict on an answer to one of these questions, and the letter that it states if it is finished."""
    ended, words = sample.finish_reason == "stop", sample.text.split()
    stated = words[-1] if ended and words[-2:-1] == ["answer"] else None
    return asked.verify(question, sample.text, ended), stated


ON_LORA = ("CE", "a flips", "b reward", "c margin")  # the LoRA itself on the same signal, rows and steps
CONSTANTS = (0.5, 1.5, 2.0, 3.0)
CONTRASTS = (1.5, 2.0)  # weight of the adapter; the base has one minus that


@contextmanager
def gated(cell: Cell, lower: float, upper: float) -> Iterator[Any]:
    """The adapter with fresh gates."""
    attach_gates(cell.model, GateConfig(lower, upper, seed=cell.seed))
    try:
        yield cell.model
    finally:
        detach_gates(cell.model)


def gates_by(cell: Cell, name: str) -> None:
    """Gates trained by one of the objectives."""
    with gated(cell, *RANGE) as model:
        began = time.process_time()
        last = fit(OBJECTIVES[name](cell, cell.scorer(model)), list(gate_parameters(model).values()), GATE_RATE, STEPS)[
            -1
        ]
        cell.keep(f"gates, {name}", model, cpu_seconds=time.process_time() - began, last_loss=last)


def lora_by(cell: Cell, name: str) -> None:
    """The control: the LoRA itself."""
    model = copy.deepcopy(cell.frozen)
    parameters = [parameter for path, parameter in model.named_parameters() if "lora_" in path]
    for parameter in parameters:
        parameter.requires_grad_(True)
    began = time.process_time()
    last = fit(OBJECTIVES[name](cell, cell.scorer(model)), parameters, cell.situation.learning_rate, STEPS)[-1]
    cell.keep(f"LoRA, {name}", model, cpu_seconds=time.process_time() - began, last_loss=last)


def a_dozen(cell: Cell) -> None:
    """f."""
    began = time.process_time()
    with gated(cell, *LIMITS) as model:
        found = evolved(cell, copy.deepcopy(cell.frozen))
        set_constants(model, found["constants"])
        cell.keep("f a dozen λ", model, cpu_seconds=time.process_time() - began, **found)


def constant(cell: Cell, value: float) -> None:
    """One λ for every module."""
    with gated(cell, min(value, -1.0), max(value, 2.0)) as model, gate_override(model, constant=value):
        cell.keep(f"λ={value:g}", model)


CONTENDERS: dict[str, Callable[[Cell], None]] = {
    "base": lambda cell: cell.keep("base", cell.base),
    "adapter": lambda cell: cell.keep("adapter", cell.frozen),
    **{f"λ={value:g}": partial(constant, value=value) for value in CONSTANTS},
    **{
        f"contrast {weight:g}": lambda cell, weight=weight: cell.keep(
            f"contrast {weight:g}", cell.frozen, contrast=weight
        )
        for weight in CONTRASTS
    },
    **{f"gates, {name}": partial(gates_by, name=name) for name in OBJECTIVES},
    "f a dozen λ": a_dozen,
    **{f"LoRA, {name}": partial(lora_by, name=name) for name in ON_LORA},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--cells", default=",".join(f"{name}/{seed}" for seed in SEEDS for name in SITUATIONS))
    parser.add_argument("--contenders", default="", help="only those whose name holds one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.cells.split(","):
        wanted = [one for one in CONTENDERS if any(part in one for part in options.contenders.split(","))]
        missing = [one for one in wanted if not (options.cache / "answers" / name / f"{one}.json").is_file()]
        cell = Cell(name, options.cache) if missing else None
        for one in missing:
            CONTENDERS[one](cell)


if __name__ == "__main__":
    main()
