"""Objectives that would change the answer, on a cell of the study on the real model (`benchmarks/real`).

    python benchmarks/objectives/real.py --study runs/real-study --out runs/real-objectives [--cell clean-0]
        [--contenders 'gates, c margin;gates, a flips'] [--rest] [--minutes 30]

First the diagnostic on prompts that the cell's adapter never saw; then gates and the LoRA itself learn from the very answers
that it drew, or from the references of the unseen rows, for as many steps and rows as the study's gates. Each answers the
study's test questions as the study asks them, so that answers are paired with those in benchmarks/real/records. A contender's
answers go to records/CELL.jsonl.gz beside this file, in the study's form; OUT holds the diagnostic's answers and what was
trained. The same command goes on where it was stopped. `report.py` makes the tables.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, which holds objectives/
sys.path.insert(0, str(Path(__file__).parents[1] / "real"))  # which holds measure.py

import measure
import torch
from safetensors.torch import load_file, save_file

from loragate.data import encode_rows, load_rows, render_prompt
from loragate.files import write_json
from loragate.gates import GateConfig, attach_gates, gate_parameters, record_gates
from loragate.generation import Sample, TransformersEngine
from loragate.generation.samples import read_samples
from loragate.losses.head import IGNORED
from loragate.models import Loaded
from objectives.diagnostic import boxed, diagnose
from objectives.learning import LIMITS, OBJECTIVES, RANGE, Learner, evolved, fit, set_constants, with_samples

RECORDS = Path(__file__).parent / "records"
PROMPTS = 240  # unseen prompts that are practised on, half of them: answers and likelihoods cost more than training
HEATS = (0.0, 0.3, 1.0)  # of the study's temperatures
# what is trained and by which objective, in the order of running, so that a stop leaves the first ones whole
CONTENDERS = (
    "gates, a flips",
    "LoRA, a flips",
    "gates, a shuffled",
    "gates, c margin",
    "gates, e entropy T=0.3",
    "gates, b reward",
    "gates, b random",
    "gates, d votes",
    "f a dozen λ",
    "LoRA, b reward",
    "gates, b reward x3",  # three times as many steps
    "LoRA, b reward /10",  # at a tenth of the rate
)
EVOLUTION = {"generations": 8, "members": 12, "asked": 96}


class RealCell(Learner):
    """A cell's adapter, its unseen rows and its own answers to their prompts.

    Args:
        study: the cell.
        loaded: its LoRA.
        out: where answers and trained weights are kept.
    """

    def __init__(self, study: measure.Cell, loaded: Loaded, out: Path) -> None:
        gates = study.design["gates"]
        self.study, self.loaded, self.folder = study, loaded, out / f"real {study.name}"
        self.tokenizer, self.frozen = loaded.tokenizer, loaded.model
        self.seed, self.precision = study.seed, study.precision
        self.sequences, self.rate = gates["batch_size"], gates["learning_rate"]
        self.steps = 2 if study.smoke else gates["max_steps"]
        self.max_new_tokens, self.answers_at_once = study.settings["max_new_tokens"], measure.BATCH
        lines = study.rows_file("unseen").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines][: 8 if study.smoke else PROMPTS]
        asked = [[{"role": "user", "content": row["prompt"]}] for row in rows]
        self.practice = [render_prompt(prompt, self.tokenizer) for prompt in asked]
        self._judge = boxed(rows)

    def judge(self, sample: Sample, question: int) -> tuple[bool, str | None]:
        """By the formula in the box."""
        return self._judge(sample, question)

    @cached_property
    def references(self) -> list[dict[str, Any]]:  # all unseen rows, as the study's gates read them
        encoded = encode_rows(load_rows(str(self.study.rows_file("unseen"))), self.tokenizer, max_length=512)
        return [encoded[index] for index in range(len(encoded))]

    @cached_property
    def practised(self) -> list[tuple[Sample, list[Sample]]]:  # those of the diagnostic
        self.diagnosed()
        return with_samples(*(read_samples(self.folder / f"{kind}.jsonl") for kind in ("greedy", "sampled")))

    def diagnosed(self) -> dict[str, Any]:
        """The diagnostic, drawn now unless it is there."""
        place = self.folder / "summary.json"
        if place.is_file():
            return json.loads(place.read_text(encoding="utf-8"))
        engine: TransformersEngine = measure.engine(self.loaded, self.answers_at_once)
        return diagnose(engine, self.practice, self.judge, self.max_new_tokens, self.folder)

    def trained(self, name: str) -> tuple[Any, dict[str, Any]]:
        """A contender's model, and how its training went; trained now unless its weights are there."""
        model = copy.deepcopy(self.frozen)
        if name.startswith("f "):
            return model, self.a_dozen(name, model)
        if name.startswith("gates"):
            attach_gates(model, GateConfig(*RANGE, seed=self.seed))
            parameters = gate_parameters(model)
        else:
            parameters = {path: one for path, one in model.named_parameters() if "lora_" in path}
        for one in parameters.values():
            one.requires_grad_(True)
        stem = re.sub(r"[^\w-]+", "_", name)
        weights, told = self.folder / f"{stem}.safetensors", self.folder / f"{stem}.json"
        if weights.is_file() and told.is_file():
            with torch.no_grad():
                for path, value in load_file(weights).items():
                    parameters[path].copy_(value)
            return model, json.loads(told.read_text(encoding="utf-8"))
        objective, _, slower = name.split(", ", 1)[1].partition(" /")
        objective, _, times = objective.partition(" x")
        steps, rate = self.steps * int(times or 1), self.rate / int(slower or 1)
        began = time.process_time()
        learning = OBJECTIVES[objective](self, self.scorer(model))
        prepared = time.process_time()
        found = fit(learning, list(parameters.values()), rate, steps, adam_beta2=0.95)  # as the study's
        training = {
            "steps": steps,
            "losses": [round(value, 5) for value in found],
            "preparing_cpu_seconds": round(prepared - began, 1),
            "training_cpu_seconds": round(time.process_time() - prepared, 1),
            **(self.acting(model) if name.startswith("gates") else {}),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        save_file({path: one.detach().contiguous() for path, one in parameters.items()}, weights)
        told.write_text(json.dumps(training), encoding="utf-8")
        return model, training

    def a_dozen(self, name: str, model: Any) -> dict[str, Any]:
        """A dozen λ, set on the model: found now unless they are on file."""
        place = self.folder / f"{name}.json"
        if place.is_file():
            told = json.loads(place.read_text(encoding="utf-8"))
        else:
            began, size = time.process_time(), dict.fromkeys(EVOLUTION, 2) if self.study.smoke else EVOLUTION
            lora = copy.deepcopy(self.frozen).float()  # merged in bf16, a small change of λ would be rounded away
            told = evolved(self, lora, **size, kept=self.folder / f"{name}, rounds.json")
            told["training_cpu_seconds"] = round(time.process_time() - began, 1)
            write_json(place, told)
        attach_gates(model, GateConfig(*LIMITS, seed=self.seed))
        set_constants(model, told["constants"])
        return told

    def acting(self, model: Any) -> dict[str, Any]:
        """λ on the response tokens of a few unseen rows."""
        scorer, batch = self.scorer(model), self.collate(self.references[: 4 * self.sequences])
        with record_gates(model) as recording, torch.no_grad():
            recording.token_mask = batch["labels"].ne(IGNORED)
            scorer.states(batch)
        return {"gates": {key: round(float(value), 4) for key, value in recording.total().items()}}


def run_cell(
    cell: RealCell,
    record: measure.Record,
    budget: measure.Budget,
    contenders: Sequence[str] = CONTENDERS,
    rest: bool = False,
) -> None:
    """The diagnostic, if one of them learns from its answers, then all that the contenders lack, one after the other.

    With `rest` they are asked the rest of the pool, greedily, in place of the test.

    Raises:
        OutOfTime: before a step that would not fit.
    """
    if any(name.endswith(("flips", "shuffled", "votes")) for name in contenders):
        print(json.dumps(cell.diagnosed()), flush=True)
    test = [one for one in measure.asked_of(cell.study.design) if one.split == "test" and one.temperature in HEATS]
    wanted = measure.REST if rest else test
    for name in contenders:
        if all((name, one.what) in record.lines for one in wanted):
            continue
        if not budget.fits("training"):
            raise measure.OutOfTime
        with budget.spent("training"):
            model, training = cell.trained(name)
        if (name, "training") not in record.lines:  # who is trained again keeps the first's
            record.add({"method": name, "what": "training", **training})
        cell.study.fill(record, name, replace(cell.loaded, model=model), wanted, budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--study", type=Path, required=True, help="the folder that benchmarks/real/measure.py was given"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cell", default="clean-0")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--contenders", default=";".join(CONTENDERS), help="separated by semicolons; all otherwise")
    parser.add_argument("--rest", action="store_true", help="ask the rest of the pool greedily, in place of the test")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing that would not fit")
    parser.add_argument("--smoke", action="store_true", help="two steps, eight prompts, four questions")
    given = parser.parse_args()
    if given.smoke and given.records == RECORDS:
        parser.error("--smoke needs --records of its own")
    contenders = given.contenders.split(";")
    if unknown := [name for name in contenders if name not in CONTENDERS]:
        parser.error(f"--contenders: no {unknown[0]!r}; there are: {'; '.join(CONTENDERS)}")
    torch.set_num_threads(1)
    situation, seed = given.cell.rsplit("-", 1)
    design, budget = measure.read_design(), measure.Budget(given.minutes)
    base = measure.fetched_base(given.study, measure.situation_of(given.cell, design).get("base"))
    precision = "bf16" if measure.real_model.has_bf16() else "fp32"
    study = measure.Cell(design, situation, int(seed), base, given.study, precision, given.smoke)
    try:
        with study.acting("LoRA", budget) as loaded:
            record = measure.Record(given.records / f"{study.name}.jsonl.gz")
            run_cell(RealCell(study, loaded, given.out), record, budget, contenders, given.rest)
    except measure.OutOfTime:
        print("the next step would not fit; the same command goes on from here", flush=True)


if __name__ == "__main__":
    main()
