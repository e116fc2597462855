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
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, which holds worlds/ and selection/

import torch
from peft import PeftModel

from loragate.data import Collator, encode_rows, load_rows, render_prompt
from loragate.files import write_json
from loragate.gates import GateConfig, attach_gates, detach_gates, gate_override, gate_parameters
from loragate.gates.attach import gate_modules
from loragate.gates.gate import Override
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.losses.head import IGNORED
from loragate.training import StageOneSettings, train_adapter
from objectives import losses
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
RANGE = (-6.0, 3.0)
GROUP = 8  # samples of a prompt
Loss = Callable[[float], torch.Tensor]
"""The loss of one step, from the share of the run that is done."""


@dataclass
class Scored:
    """What a model says at the response tokens of some rows: logits [T, V], labels [T] and the row of each token [T]."""

    logits: torch.Tensor
    labels: torch.Tensor
    owner: torch.Tensor

    def log_probs(self, temperature: float = 1.0) -> torch.Tensor:
        """log p of each label, [T]."""
        return (self.logits / temperature).log_softmax(-1).gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)

    def summed(self, values_T: torch.Tensor, rows: int) -> torch.Tensor:
        """Sums over the tokens of each row, [N]."""
        return values_T.new_zeros(rows).index_add(0, self.owner, values_T)


class Cell:
    """One situation and training seed: its adapter, the rows that it never saw, and the answers on file."""

    def __init__(self, name: str, cache: Path) -> None:
        situation, seed = name.rsplit("/", 1)
        self.name, self.seed, self.cache = name, int(seed), cache
        self.situation: Situation = replace(situation_named(situation), sft_seed=self.seed)
        self.folder = cache / "answers" / name
        self.base, self.tokenizer = base_for(self.situation, cache / "bases")
        self.collate = Collator(self.tokenizer.pad_token_id)
        seen = demonstration_rows(self.situation)
        self.model = self._adapter(seen)
        self.frozen = copy.deepcopy(self.model).requires_grad_(False)
        prompts = {row["messages"][0]["content"] for row in seen}
        fresh = demonstration_rows(replace(self.situation, sft_seed=self.seed + 1000, rows=8 * UNSEEN))
        self.unseen = [row for row in fresh if row["messages"][0]["content"] not in prompts][:UNSEEN]
        asked = [row["messages"][0]["content"] for row in self.unseen]
        self.practice = Questions(tuple(solved(prompt) for prompt in asked))
        self.asked = {
            "dev": questions(self.situation, "dev", DEV),
            "test": questions(self.situation, "test", TEST),
        }

    def _adapter(self, rows: Any) -> Any:
        place = self.cache / "adapters" / self.name
        if not (place / "adapter_config.json").is_file():
            settings = StageOneSettings(
                learning_rate=self.situation.learning_rate,
                batch_size=32,
                micro_batch_size=32,
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

    def draw(self, model: Any, prompts: list[str], temperature: float, samples: int, seed: int) -> list[Sample]:
        """Samples ordered by (question, sample)."""
        config = SamplingConfig(
            temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, samples=samples if temperature else 1, seed=seed
        )
        return TransformersEngine(model, self.tokenizer, batch_size=BATCH).generate(prompts, config)

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

    # rows to learn from

    @cached_property
    def references(self) -> list[dict[str, Any]]:
        """The unseen rows with their references, encoded."""
        encoded = encode_rows(load_rows(self.unseen), self.tokenizer, max_length=128)
        return [encoded[index] for index in range(len(encoded))]

    @cached_property
    def practised(self) -> list[tuple[Sample, list[Sample]]]:
        """Per unseen prompt the adapter's greedy answer and GROUP samples at T = 0.8."""
        prompts = self.prompts(self.practice)
        greedy = self.draw(self.frozen, prompts, 0.0, 1, 0)
        sampled = self.draw(self.frozen, prompts, 0.8, GROUP, self.seed)
        return [(one, sampled[GROUP * at : GROUP * (at + 1)]) for at, one in enumerate(greedy)]

    @cached_property
    def practice_ids(self) -> list[list[int]]:
        """Token ids of the unseen prompts."""
        return self.tokenizer(self.prompts(self.practice), add_special_tokens=False)["input_ids"]

    def row(self, question: int, sample: Sample) -> dict[str, Any]:
        """An answer to an unseen prompt, encoded."""
        prompt, answer = self.practice_ids[question], list(sample.token_ids)
        return {"input_ids": [*prompt, *answer], "labels": [IGNORED] * len(prompt) + answer, "row": question}

    def score(self, model: Any, rows: list[dict[str, Any]]) -> Scored:
        """One forward pass."""
        batch = self.collate(rows)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        counted = labels != IGNORED
        return Scored(logits[counted].float(), labels[counted], counted.nonzero()[:, 0])

    def scored_by_adapter(self, rows: list[dict[str, Any]]) -> Scored:
        """The same by the adapter that everything started from."""
        with torch.no_grad():
            return self.score(self.frozen, rows)

    def batches(self, rows: list[Any], size: int) -> Iterator[list[Any]]:
        """Endless batches, shuffled by the cell's seed."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            order = torch.randperm(len(rows), generator=generator).tolist()
            for at in range(0, len(order) - size + 1, size):
                yield [rows[index] for index in order[at : at + size]]


def share(bits: str) -> float:
    """Share of ones."""
    return bits.count("1") / len(bits)


def said(sample: Sample) -> str | None:
    """The letter that a finished answer states."""
    words = sample.text.split()
    return words[-1] if sample.finish_reason == "stop" and words[-2:-1] == ["answer"] else None


# the losses of a step


def cross_entropy(cell: Cell, model: Any) -> Loss:
    """On the references of unseen rows."""
    batches = cell.batches(cell.references, SEQUENCES)
    return lambda _: -cell.score(model, next(batches)).log_probs().mean()


def entropy(cell: Cell, model: Any, temperature: float) -> Loss:
    """The paper's, on softmax(z/T)."""
    batches = cell.batches(cell.references, SEQUENCES)
    return lambda _: losses.entropy_at(cell.score(model, next(batches)).logits, temperature).mean()


def margins(cell: Cell, model: Any, kappa: float = 0.02) -> Loss:
    """Margins of references, with a KL."""
    batches = cell.batches(cell.references, SEQUENCES)

    def loss(_: float) -> torch.Tensor:
        rows = next(batches)
        found, before = cell.score(model, rows), cell.scored_by_adapter(rows)
        hinge_T = losses.margin(found.logits, found.labels)
        return (hinge_T + kappa * losses.kl_from(before.logits, found.logits)).mean()

    return loss


def pairs(cell: Cell, labels: str) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """(better, worse, weight) of the unseen prompts, by "gold", by verdicts of another prompt ("shuffled") or by "votes"."""
    right = []
    for question, (greedy, sampled) in enumerate(cell.practised):
        if labels == "votes":
            winner, agreed = losses.vote([said(one) for one in sampled])
            right.append([said(one) == winner for one in (greedy, *sampled)] if 0.35 <= agreed <= 0.9 else [])
        else:
            ended = [(one.text, one.finish_reason == "stop") for one in (greedy, *sampled)]
            right.append([cell.practice.verify(question, *one) for one in ended])
    if labels == "shuffled":
        generator = torch.Generator().manual_seed(cell.seed)
        right = [right[index] for index in torch.randperm(len(right), generator=generator).tolist()]
    found = []
    for question, (greedy, sampled) in enumerate(cell.practised):
        if not right[question]:
            continue
        rows = [cell.row(question, one) for one in sampled]
        before = cell.scored_by_adapter(rows)
        log_probs = before.summed(before.log_probs(), len(rows)).tolist()
        pair = losses.flip_pair(right[question][0], right[question][1:], log_probs)
        if pair is not None:
            rows.append(cell.row(question, greedy))  # where GREEDY points
            found.append((rows[pair.better], rows[pair.worse], pair.weight))
    return found


def flips(cell: Cell, model: Any, labels: str, kappa: float = 0.02) -> Loss:
    """Greedy-flip preference over the adapter's own answers."""
    batches = cell.batches(pairs(cell, labels), SEQUENCES // 2)

    def loss(_: float) -> torch.Tensor:
        batch = next(batches)
        rows = [better for better, _, _ in batch] + [worse for _, worse, _ in batch]
        found, before = cell.score(model, rows), cell.scored_by_adapter(rows)
        now_N = found.summed(found.log_probs(), len(rows))
        better_P, worse_P = (now_N - before.summed(before.log_probs(), len(rows))).chunk(2)
        lengths_N = found.summed(torch.ones_like(found.labels, dtype=torch.float), len(rows))
        mean_P = (now_N / lengths_N)[: len(batch)]
        weight_P = torch.tensor([weight for _, _, weight in batch])
        kl = losses.kl_from(before.logits, found.logits).mean()
        return losses.preference(better_P, worse_P, mean_P, weight_P) + kappa * kl

    return loss


def reward(cell: Cell, model: Any, random: bool = False, kappa: float = 0.01) -> Loss:
    """Policy gradient on the verdict, sampled and differentiated at a temperature that falls from 1 to 0.5."""
    prompts = cell.prompts(cell.practice)
    batches = cell.batches(list(range(len(prompts))), SEQUENCES // 4)
    generator = torch.Generator().manual_seed(cell.seed)

    def loss(progress: float) -> torch.Tensor:
        heat, asked = 1.0 - 0.5 * progress, next(batches)
        drawn = cell.draw(model, [prompts[index] for index in asked], heat, GROUP, int(1e6 * progress) + cell.seed)
        verdicts = torch.tensor(
            [cell.practice.verify(asked[s.question], s.text, s.finish_reason == "stop") for s in drawn]
        )
        if random:
            verdicts = torch.rand(len(drawn), generator=generator) < 0.5
        advantages = torch.cat([losses.leave_one_out(group) for group in verdicts.float().split(GROUP)])
        used = advantages.nonzero()[:, 0].tolist()
        if not used:
            return sum(parameter.sum() * 0 for parameter in model.parameters() if parameter.requires_grad)  # type: ignore
        rows = [cell.row(asked[drawn[index].question], drawn[index]) for index in used]
        found, before = cell.score(model, rows), cell.scored_by_adapter(rows)
        log_prob_N = found.summed(found.log_probs(heat), len(rows))
        kl = losses.kl_from(before.logits, found.logits).mean()
        return losses.policy_gradient(log_prob_N, advantages[used]) + kappa * kl

    return loss


OBJECTIVES: dict[str, Callable[[Cell, Any], Loss]] = {
    "entropy": partial(entropy, temperature=1.0),
    "CE": cross_entropy,
    "a flips": partial(flips, labels="gold"),
    "a shuffled": partial(flips, labels="shuffled"),
    "b reward": reward,
    "b random": partial(reward, random=True),
    "c margin": margins,
    "d votes": partial(flips, labels="votes"),
    "e entropy T=0.3": partial(entropy, temperature=0.3),
}
ON_LORA = ("CE", "a flips", "b reward", "c margin")  # the LoRA itself on the same signal, rows and steps
CONSTANTS = (0.5, 1.5, 2.0, 3.0)
CONTRASTS = (1.5, 2.0)  # weight of the adapter; the base has one minus that


def fit(loss: Loss, parameters: list[torch.nn.Parameter], rate: float, steps: int = STEPS) -> float:
    """AdamW with a cosine and clipping at 1; returns the last loss."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    value = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        value = loss(step / steps)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return float(value.detach())


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
        last = fit(OBJECTIVES[name](cell, model), list(gate_parameters(model).values()), GATE_RATE)
        cell.keep(f"gates, {name}", model, cpu_seconds=time.process_time() - began, last_loss=last)


def lora_by(cell: Cell, name: str) -> None:
    """The control: the LoRA itself."""
    model = copy.deepcopy(cell.frozen)
    parameters = [parameter for path, parameter in model.named_parameters() if "lora_" in path]
    for parameter in parameters:
        parameter.requires_grad_(True)
    began = time.process_time()
    last = fit(OBJECTIVES[name](cell, model), parameters, cell.situation.learning_rate)
    cell.keep(f"LoRA, {name}", model, cpu_seconds=time.process_time() - began, last_loss=last)


def kind_of(path: str) -> str:
    """Depth and kind of a module, such as "layers.0 v o"; four kinds a layer."""
    layer, module = path.split("layers.")[1].split(".")[0], path.rsplit(".", 1)[-1]
    kinds = {"q": "q k", "k": "q k", "v": "v o", "o": "v o", "gate": "gate up", "up": "gate up", "down": "down"}
    return f"layers.{layer} {kinds[module.removesuffix('_proj')]}"


def set_constants(model: Any, values: dict[str, float]) -> None:
    """One λ for every module of a kind."""
    for path, gate in gate_modules(model).items():
        gate.override = Override(constant=values[kind_of(path)])


def evolved(cell: Cell, generations: int = 12, members: int = 12, asked: int = 128) -> None:
    """f: a dozen λ by an evolution strategy on greedy accuracy, in which every generation meets other unseen prompts."""
    began = time.process_time()
    prompts = cell.prompts(cell.practice)
    generator = torch.Generator().manual_seed(cell.seed)
    with gated(cell, -3.0, 6.0) as model:
        kinds = sorted({kind_of(path) for path in gate_modules(model)})
        centre_C = torch.ones(len(kinds))
        for generation in range(generations):
            chosen = torch.randperm(len(prompts), generator=generator)[:asked].tolist()
            sigma = 0.5 * (1 - generation / generations) + 0.1
            points_MC = centre_C + sigma * torch.randn(members, len(kinds), generator=generator)
            scores = []
            for point_C in points_MC.clamp(-3.0, 6.0).tolist():
                set_constants(model, dict(zip(kinds, point_C, strict=True)))
                drawn = cell.draw(model, [prompts[index] for index in chosen], 0.0, 1, 0)
                ended = [(chosen[s.question], s.text, s.finish_reason == "stop") for s in drawn]
                scores.append(sum(cell.practice.verify(*one) for one in ended) / len(ended))
            centre_C = losses.recombined(points_MC.clamp(-3.0, 6.0), torch.tensor(scores))
        found = dict(zip(kinds, centre_C.tolist(), strict=True))
        set_constants(model, found)
        cell.keep("f a dozen λ", model, cpu_seconds=time.process_time() - began, constants=found)


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
    "f a dozen λ": evolved,
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
