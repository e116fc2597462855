"""Build the tiny base that ships with the package: train candidates, measure them, keep one by a fixed rule.

    python scripts/build_tiny_base.py --out src/loragate/world/assets/tiny-base
    python scripts/build_tiny_base.py --seed 7 --out runs/base-7          # one seed, no selection
    python scripts/build_tiny_base.py --seed 7 --set layers=6 hidden_size=128 --out runs/larger   # another shape

The rule was written down before any candidate was measured, and it does not look at adapters or gates: a base that is
almost always right, or almost never, leaves nothing to see. All candidates' figures go into recipe.json and BASE.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # which holds worlds/

from loragate.errors import ConfigError, LoragateError, nearest
from loragate.world.problems import Problem, draw_problems, draw_retention_items, is_correct_response
from worlds.tiny_base import TinyBaseRecipe, train_base

TARGET = 0.36
GREEDY_FLOOR = 0.95
RULE = (
    "Of the candidates whose greedy accuracy is at least 95 %, the one whose sampled accuracy at temperature 1 is "
    "closest to 36 % (lowest seed on a tie); both on 4-operation problems of the dev split, before any adapter exists."
)
MEASUREMENT = {"dev_problems": 120, "samples": 16, "retention_items": 180, "retention_samples": 4, "sampling_seed": 0}


@torch.inference_mode()
def accuracy(model: Any, tokenizer: Any, asked: list[Problem], samples: int, temperature: float) -> float:
    """Share of right responses over all problems and samples; temperature 0 is greedy."""
    torch.manual_seed(MEASUREMENT["sampling_seed"])
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt}], tokenize=False, add_generation_prompt=True
        )
        for problem in asked
    ]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True)
    generated = model.generate(
        **encoded, max_new_tokens=64, num_return_sequences=samples, **(sampling or {"do_sample": False})
    )
    responses = generated[:, encoded["input_ids"].shape[1] :]
    finished = (responses == tokenizer.eos_token_id).any(dim=1).tolist()
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    verdicts = [
        is_correct_response(asked[index // samples], text, done)
        for index, (text, done) in enumerate(zip(texts, finished))
    ]
    return sum(verdicts) / len(verdicts)


def measure(model: Any, tokenizer: Any) -> dict[str, float]:
    """The figures that are recorded for every candidate."""
    asked = draw_problems("dev", MEASUREMENT["dev_problems"])
    retained = draw_retention_items("dev", MEASUREMENT["retention_items"])
    return {
        "sampled_accuracy_t1": accuracy(model, tokenizer, asked, MEASUREMENT["samples"], 1.0),
        "sampled_accuracy_t03": accuracy(model, tokenizer, asked, MEASUREMENT["samples"], 0.3),
        "greedy_accuracy": accuracy(model, tokenizer, asked, 1, 0.0),
        "retention_t1": accuracy(model, tokenizer, retained, MEASUREMENT["retention_samples"], 1.0),
    }


def choose(candidates: list[dict[str, Any]]) -> dict[str, Any]:
    """Apply RULE to the measured candidates."""
    able = [figures for figures in candidates if figures["greedy_accuracy"] >= GREEDY_FLOOR]
    if not able:
        found = ", ".join(f"seed {c['seed']}: {c['greedy_accuracy']:.1%}" for c in candidates)
        raise ConfigError(f"found greedy accuracies {found}; expected one of at least 95 %: train for more steps")
    return min(able, key=lambda figures: (abs(figures["sampled_accuracy_t1"] - TARGET), figures["seed"]))


def describe(record: dict[str, Any]) -> str:
    """BASE.md: the record for readers."""
    lines = [
        "# The tiny base",
        "",
        f"A Qwen2-shaped model of {record['parameters']:,} parameters, trained from nothing on the synthetic world of",
        f"`loragate.world`. Made by `{record['script']}`; this is the model of seed {record['seed']}, trained for",
        f"{record['recipe']['steps']:,} steps. It is a selected one: a base from another seed can behave differently.",
        "",
        f"Rule: {record['selection']['rule']}",
        "",
        "| seed | sampled, T=1 | sampled, T=0.3 | greedy | retention, T=1 | training |",
        "|---|---|---|---|---|---|",
    ]
    for c in record["selection"]["candidates"]:
        mark = " (kept)" if c["seed"] == record["seed"] else ""
        lines.append(
            f"| {c['seed']}{mark} | {c['sampled_accuracy_t1']:.1%} | {c['sampled_accuracy_t03']:.1%} "
            f"| {c['greedy_accuracy']:.1%} | {c['retention_t1']:.1%} | {c['training_seconds']:.0f} s |"
        )
    m = record["measurement"]
    lines += [
        "",
        f"Measured on {m['dev_problems']} four-operation problems of the dev split with {m['samples']} samples each, and",
        f"on {m['retention_items']} retention items with {m['retention_samples']} samples each. Training on one CPU thread",
        f"with torch {record['torch']} and transformers {record['transformers']}; every number of the recipe is in",
        "`recipe.json`. The recipe itself was settled beforehand on a pilot seed that is no candidate, with a plain LoRA and",
        "without gates; `TinyBaseRecipe` says what was looked at. Weights are licensed like the package.",
        "",
    ]
    return "\n".join(lines)


def build(seeds: list[int], recipe: TinyBaseRecipe, out: Path) -> None:
    """Train and measure every seed, choose, and write the folder."""
    trained, candidates = {}, []
    for seed in seeds:
        started = time.perf_counter()

        def report(step: int, total: int, loss: float, seed: int = seed, started: float = started) -> None:
            if step % 100 == 0 or step == total:
                elapsed = time.perf_counter() - started
                print(f"seed {seed}  step {step}/{total}  loss {loss:.3f}  {elapsed:.0f} s", flush=True)

        model, tokenizer = train_base(recipe, seed, report)
        seconds = round(time.perf_counter() - started, 1)
        trained[seed] = (model, tokenizer)
        candidates.append({"seed": seed, **measure(model, tokenizer), "training_seconds": seconds})
        print(json.dumps(candidates[-1]), flush=True)
    chosen = choose(candidates) if len(seeds) > 1 else candidates[0]
    model, tokenizer = trained[chosen["seed"]]
    record = {
        "script": "scripts/build_tiny_base.py",
        "seed": chosen["seed"],
        "parameters": model.num_parameters(),
        "recipe": recipe.as_dict(),
        "selection": {
            "rule": RULE if len(seeds) > 1 else "none: this seed was asked for.",
            "candidates": candidates,
        },
        "measurement": MEASUREMENT,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "recipe.json").write_text(json.dumps(record, indent=2) + "\n")
    (out / "BASE.md").write_text(describe(record))
    print(f"kept seed {chosen['seed']}; wrote {out}")


def changed(recipe: TinyBaseRecipe, settings: list[str]) -> TinyBaseRecipe:
    """The recipe with numbers given as NAME=VALUE.

    Raises:
        ConfigError: a name that the recipe has not, or a value that is no number of its kind.
    """
    numbers = {name: value for name, value in asdict(recipe).items() if isinstance(value, int | float)}
    changes = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in numbers:
            raise ConfigError(f"found --set {setting}; expected one of {', '.join(numbers)}{nearest(name, numbers)}")
        kind = type(numbers[name])
        try:
            changes[name] = kind(value)
        except ValueError:
            raise ConfigError(f"found --set {setting}; expected {name}=NUMBER, as {name}={numbers[name]}") from None
    return replace(recipe, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2, 3], help="candidates (default: 0 1 2 3)")
    parser.add_argument(
        "--steps", type=int, default=TinyBaseRecipe.steps, help="optimiser steps (default: %(default)s)"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="other numbers of the recipe, such as layers=6"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write the base into")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        recipe = changed(TinyBaseRecipe(), [f"steps={arguments.steps}", *arguments.set])
        build(arguments.seed, recipe, arguments.out)
    except LoragateError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
