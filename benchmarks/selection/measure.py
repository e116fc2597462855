"""Measure every candidate on every situation, so that selectors can be compared afterwards without a model.

    python benchmarks/selection/measure.py --cache CACHE [--situations a,b] [--candidates …]

For each situation (`benchmarks/worlds/situations.py`) the adapter is trained, then each candidate: gates for a range, anchored
gates, gates of one training clipped to a narrower range, one λ for all modules, lower temperatures, DFT in place of SFT,
and the gate-free ensemble of base and adapter. Every candidate answers a pool of development questions (from which
probes are drawn) and a set of test questions. Answers and verdicts go to CACHE/answers/<situation>/<candidate>.json, one
file each, so a stopped run goes on where it was. Costs are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, which holds worlds/

import numpy as np
import torch
from peft import PeftModel
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from loragate.data import load_rows, render_prompt
from loragate.files import write_json
from loragate.gates import GateConfig, attach_gates, detach_gates, gate_override, record_gates
from loragate.generation import SamplingConfig, SeededSampler, TransformersEngine
from loragate.training import FineTuningSettings, GateTrainingSettings, train_adapter, train_gates
from loragate.world.problems import Problem, apply_operator, expression, verify
from loragate.world.tokenizer import DIGITS
from worlds.commands import apply_command, programme
from worlds.situations import SITUATIONS, Situation, base_for, demonstration_rows, questions

DEV, DEV_SAMPLES = 192, 4
TEST, TEST_SAMPLES = 160, 8
MAX_NEW_TOKENS = 72
BATCH = 512
STEPS, ROWS, GATE_RATE = 157, 2048, 5e-4
RANGES = ((-3, 1), (0, 1), (-6, 3), (-1, 2), (0, 3), (0, 6), (-4, 4))
ANCHORED = (((-6, 3), "base"), ((-6, 3), "product"))
# with --extra: the objectives on sampled answers, varied one setting at a time
EXTRA: dict[str, tuple[tuple[float, float], dict[str, Any]]] = {
    "[-6,3] anchored adapter": ((-6, 3), {"objective": "anchored", "anchor": "adapter"}),
    "[-6,3] anchored mixture": ((-6, 3), {"objective": "anchored", "anchor": "mixture"}),
    "[-6,3] anchored product beta 0.3": ((-6, 3), {"objective": "anchored", "anchor": "product", "beta": 0.3}),
    "[-6,3] anchored product beta 3": ((-6, 3), {"objective": "anchored", "anchor": "product", "beta": 3.0}),
    "[0,6] anchored product": ((0, 6), {"objective": "anchored", "anchor": "product"}),
    "[-6,3] reward": ((-6, 3), {"objective": "reward"}),
    "[-6,3] anchored product refresh 5": ((-6, 3), {"objective": "anchored", "anchor": "product", "refresh": 5}),
    "[-6,3] anchored product refresh 80": ((-6, 3), {"objective": "anchored", "anchor": "product", "refresh": 80}),
}
CLIPS = {"no reversal": (0.0, None), "no extrapolation": (None, 1.0), "unit": (0.0, 1.0)}
CONSTANTS = (-0.5, 0.5, 1.5, 2.0)


class Bench:
    """One situation with its trained adapter."""

    def __init__(self, situation: Situation, cache: Path) -> None:
        self.situation, self.cache = situation, cache
        self.folder = cache / "answers" / situation.name
        self.base, self.tokenizer = base_for(situation, cache / "bases")
        self.rows = demonstration_rows(situation)
        self.dev, self.test = questions(situation, "dev", DEV), questions(situation, "test", TEST)
        self.model: Any = self.adapter("sft")

    def adapter(self, objective: str) -> Any:
        """The adapter trained with an objective, from the cache or now."""
        place = self.cache / "adapters" / f"{self.situation.name}-{objective}"
        if not (place / "adapter_config.json").is_file():
            s = self.situation
            settings = FineTuningSettings(
                objective=objective,
                learning_rate=s.learning_rate,
                batch_size=32,
                per_device_train_batch_size=32,
                max_length=128,
                seed=s.sft_seed,
                logging_steps=64,
            )
            began = time.process_time()
            result = train_adapter(copy.deepcopy(self.base), self.tokenizer, load_rows(self.rows), settings)
            result.model.save_pretrained(str(place))
            write_json(place / "cost.json", {"cpu_seconds": time.process_time() - began})
        model = PeftModel.from_pretrained(copy.deepcopy(self.base), str(place))
        return model.eval()

    def ask(self, model: Any, *, temperature: float = 1.0, ensemble: bool = False) -> dict[str, Any]:
        """Answers and verdicts on both sets, with what they cost."""
        record: dict[str, Any] = {}
        for name, asked, samples, seed in (
            ("dev", self.dev, DEV_SAMPLES, 1),
            ("test", self.test, TEST_SAMPLES, 2),
        ):
            began = time.process_time()
            prompts = [render_prompt(prompt, self.tokenizer) for prompt in asked.prompts]
            config = SamplingConfig(temperature=temperature, max_new_tokens=MAX_NEW_TOKENS, samples=samples, seed=seed)
            if ensemble:
                drawn = ensemble_answers(model, self.tokenizer, prompts, config)
            else:
                drawn = [
                    (s.question, s.sample, s.text, s.finish_reason == "stop", len(s.token_ids))
                    for s in TransformersEngine(model, self.tokenizer, batch_size=BATCH).generate(prompts, config)
                ]
            correct = np.zeros((len(prompts), samples), dtype=int)
            answers: list[list[str | None]] = [[None] * samples for _ in prompts]
            for question, sample, text, finished, _ in drawn:
                correct[question, sample] = asked.verify(question, text, finished)
                words = text.split()
                answers[question][sample] = words[-1] if finished and words[-2:-1] == ["answer"] else None
            record[name] = {
                "correct": correct.tolist(),
                "answers": answers,
                "ended": float(np.mean([row[3] for row in drawn])),
                "tokens": float(np.mean([row[4] for row in drawn])),
                "cpu_seconds": time.process_time() - began,
            }
        return record

    def keep(self, name: str, record: dict[str, Any], **more: Any) -> None:
        """Write a candidate's answers and say so."""
        write_json(self.folder / f"{name}.json", {"candidate": name, **more, **record})
        score = 100 * np.mean(record["test"]["correct"])
        print(f"{self.situation.name:16} {name:28} test {score:5.1f}", flush=True)

    def done(self, name: str) -> bool:
        return (self.folder / f"{name}.json").is_file()

    def settings(self, **more: Any) -> GateTrainingSettings:
        return GateTrainingSettings(
            learning_rate=GATE_RATE,
            batch_size=32,
            per_device_train_batch_size=32,
            max_steps=STEPS,
            max_length=128,
            max_rows=ROWS,
            seed=self.situation.sft_seed,
            logging_steps=40,
            **more,
        )

    @contextmanager
    def gated(self, lower: float, upper: float, settings: GateTrainingSettings, **options: Any) -> Any:
        """The adapter with gates trained now; yields what the training says of itself."""
        began = time.process_time()
        config = GateConfig(lower, upper, seed=self.situation.sft_seed)
        result = train_gates(self.model, self.tokenizer, load_rows(self.rows), config, settings, **options)
        try:
            yield {
                "training_cpu_seconds": time.process_time() - began,
                "entropy": [result.entropy_before, result.entropy_after],
                "gates": result.gates_total,
                "stopped": result.stopped,
            }
        finally:
            detach_gates(self.model)

    def run_extra(self, only: str = "") -> None:
        """The varied objectives; the reward is the world's own verdict on training problems."""

        def reward(row: Any, text: str, finished: bool) -> float:
            return float(verify(solved(row["messages"][0]["content"]), text, finished))

        for name, ((lower, upper), more) in EXTRA.items():
            if (not only or any(part in name for part in only.split(","))) and not self.done(name):
                settings = self.settings(max_new_tokens=MAX_NEW_TOKENS, sampling_batch_size=BATCH, **more)
                options = {"reward": reward} if settings.objective == "reward" else {}
                with self.gated(lower, upper, settings, **options) as training:
                    self.keep(name, self.ask(self.model), training=training)

    def run(self, only: str = "") -> None:
        """Everything that is not on file yet."""

        def wanted(name: str) -> bool:
            return (not only or any(part in name for part in only.split(","))) and not self.done(name)

        if wanted("adapter"):
            self.keep("adapter", self.ask(self.model))
        for heat in (0.6, 0.3):
            if wanted(f"adapter T={heat:g}"):
                self.keep(f"adapter T={heat:g}", self.ask(self.model, temperature=heat))
        if wanted("base"):
            self.keep("base", self.ask(self.base))
        for lower, upper in RANGES:
            name = f"[{lower:g},{upper:g}]"
            clips = {f"{name} {kind}": limits for kind, limits in CLIPS.items()} if (lower, upper) == (-6, 3) else {}
            if wanted(name) or any(wanted(clip) for clip in clips):
                with self.gated(lower, upper, self.settings()) as training:
                    with record_gates(self.model) as recording:
                        record = self.ask(self.model)
                    self.keep(name, record, training=training, realised=recording.total())
                    for clip, (minimum, maximum) in clips.items():
                        with gate_override(self.model, minimum, maximum):
                            self.keep(clip, self.ask(self.model), training={**training, "shared_with": name})
        for (lower, upper), anchor in ANCHORED:
            name = f"[{lower:g},{upper:g}] anchored {anchor}"
            if wanted(name):
                settings = self.settings(objective="anchored", anchor=anchor, max_new_tokens=MAX_NEW_TOKENS)
                with self.gated(lower, upper, replace(settings, sampling_batch_size=BATCH)) as training:
                    self.keep(name, self.ask(self.model), training=training)
        for value in CONSTANTS:
            name = f"λ={value:g}"
            if wanted(name):
                attach_gates(self.model, GateConfig(min(value, -1.0), max(value, 2.0)))
                try:
                    with gate_override(self.model, constant=value):
                        self.keep(name, self.ask(self.model))
                finally:
                    detach_gates(self.model)
        if wanted("ensemble"):
            self.keep("ensemble", self.ask(self.model, ensemble=True))
        for who in ("adapter", "base"):
            if wanted(f"{who} majority"):
                self.keep_majority(who)
        if wanted("dft"):
            self.keep("dft", self.ask(self.adapter("dft")))

    def keep_majority(self, who: str) -> None:
        """The cool answers of adapter or base to the development pool, for selection without labels."""
        model = self.model if who == "adapter" else self.base
        prompts = [render_prompt(prompt, self.tokenizer) for prompt in self.dev.prompts]
        config = SamplingConfig(temperature=0.3, max_new_tokens=MAX_NEW_TOKENS, samples=8, seed=3)
        answers: list[list[str | None]] = [[None] * 8 for _ in prompts]
        for s in TransformersEngine(model, self.tokenizer, batch_size=BATCH).generate(prompts, config):
            words = s.text.split()
            ended = s.finish_reason == "stop" and words[-2:-1] == ["answer"]
            answers[s.question][s.sample] = words[-1] if ended else None
        gold = [item.answer for item in self.dev.items]
        write_json(self.folder / f"{who} majority.json", {"answers": answers, "gold": gold})


def solved(prompt: str) -> Problem:
    """The problem of a training prompt, worked out again, as demonstrations keep no clean answer."""
    if prompt.startswith("solve"):
        value, steps = expression(prompt)
        for operator, operand in steps:
            value = apply_operator(value, operator, operand)
        return Problem(prompt, DIGITS[value], "arithmetic", len(steps))
    letter, commands = programme(prompt)
    for command in commands:
        letter = apply_command(letter, command)
    return Problem(prompt, letter, "commands", len(commands))


class _Mixed(LogitsProcessor):
    """p_adapter^w · p_base^(1 − w), normalised where it is drawn from: first half adapter rows, second half base rows."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        adapter, base = scores.float().log_softmax(dim=-1).chunk(2)
        return (self.weight * adapter + (1 - self.weight) * base).repeat(2, 1)


@torch.no_grad()
def ensemble_answers(
    model: Any, tokenizer: Any, prompts: list[str], config: SamplingConfig, weight: float = 0.5
) -> list[tuple[Any, ...]]:
    """Answers of a product of base and adapter, or with weight > 1 of their contrast: both in one batch, on the same tokens."""
    stop = {tokenizer.eos_token_id}
    pairs = [(question, sample) for question in range(len(prompts)) for sample in range(config.samples)]
    drawn = []
    for at in range(0, len(pairs), BATCH // 2):
        part = pairs[at : at + BATCH // 2]
        ids = [tokenizer(prompts[question], add_special_tokens=False)["input_ids"] for question, _ in part]
        width = max(map(len, ids))
        rows = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in ids]).repeat(2, 1)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]).repeat(2, 1)
        counters = torch.tensor(part).repeat(2, 1)
        sampler = SeededSampler(config, counters[:, 0], counters[:, 1], width, stop)
        output = model.generate(
            input_ids=rows,
            attention_mask=mask,
            adapter_names=["default"] * len(part) + ["__base__"] * len(part),
            logits_processor=LogitsProcessorList([_Mixed(weight), sampler]),
            generation_config=GenerationConfig(
                do_sample=False,
                max_new_tokens=config.max_new_tokens,
                eos_token_id=sorted(stop),
                pad_token_id=tokenizer.pad_token_id,
            ),
        )
        assert torch.equal(output[: len(part), width:], output[len(part) :, width:]), "the two halves went apart"
        counts, stopped = sampler.tokens_B.tolist(), sampler.stopped_B.tolist()
        new = [row[:count] for row, count in zip(output[: len(part), width:].tolist(), counts)]
        for pair, row, ended in zip(part, new, stopped):
            text = tokenizer.decode(row[:-1] if ended else row, skip_special_tokens=True)
            drawn.append((*pair, text, ended, len(row)))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--situations", default="", help="names separated by commas; all otherwise")
    parser.add_argument("--extra", action="store_true", help="the objectives on sampled answers, varied")
    parser.add_argument("--candidates", default="", help="only candidates whose name holds one of these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for situation in SITUATIONS:
        if not options.situations or situation.name in options.situations.split(","):
            bench = Bench(situation, options.cache)
            write_json(bench.folder / "situation.json", asdict(situation))
            if options.extra:
                bench.run_extra(options.candidates)
            else:
                bench.run(options.candidates)


if __name__ == "__main__":
    main()
