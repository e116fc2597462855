"""How often a nominal 95 % interval holds the truth, and how often p <= 0.05 where nothing differs.

    python benchmarks/coverage.py [--repeats 3000] [--seed 0] [--out FILE]

Questions are drawn anew for every data set: a question's chance of a right answer comes from a beta distribution whose
mean is the task's true score, and its K = 16 answers are binomial. The shapes are those of common mathematics tasks; the
spread of difficulties (the sum of the beta's two parameters) is an assumption, stated in the result. A pair of models
shares the difficulties up to a shift on the log-odds scale that differs from question to question.

Coverage is a share of `--repeats` data sets (the five tasks as one suite: a fifth of them), so its own 95 % interval is about
+-0.8 points at 3,000 (the suite: +-1.8).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp

from loragate.evaluation.statistics import average_at_k, compare, compare_suites, pass_at_k, suite_average, t_interval

SAMPLES = 16


@dataclass(frozen=True)
class Shape:
    """A task's number of questions, true mean and spread of difficulties (beta parameters mean*spread, (1-mean)*spread)."""

    questions: int
    mean: float
    spread: float = 1.0

    def difficulties(self, generator: np.random.Generator) -> np.ndarray:
        return generator.beta(self.mean * self.spread, (1 - self.mean) * self.spread, self.questions)

    def scores(self, generator: np.random.Generator) -> np.ndarray:
        return draw(self.difficulties(generator), generator)


SHAPES = {
    "AIME-like": Shape(30, 0.08),
    "AMC-like": Shape(40, 0.42),
    "Minerva-like": Shape(272, 0.26),
    "OlympiadBench-like": Shape(674, 0.25),
    "Math500-like": Shape(500, 0.67),
}
HARD = {"very hard, few questions": Shape(30, 0.02), "nearly solved, few questions": Shape(40, 0.97)}
HARD_SUITES = {"three very hard tasks": [Shape(30, 0.02)] * 3, "three nearly solved tasks": [Shape(40, 0.97)] * 3}

SKEWED = {f"{rare:g} of {count}": (rare, count) for count in (30, 128) for rare in (0.02, 0.05, 0.1)}
"""Differences of 1 - rare with chance `rare`, else of -rare, on so many questions: nothing differs on average."""
FLIPS = 2000


def draw(difficulties: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Scores [Q, K] of answers that are right with the given chances."""
    return (generator.random((len(difficulties), SAMPLES)) < difficulties[:, None]).astype(float)


def pair(shape: Shape, generator: np.random.Generator, shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores of two models; log-odds of the second are moved by `shift` plus noise of standard deviation 0.5.

    Without a shift both sides get noise, so that neither is better on average.
    """
    chances = np.clip(shape.difficulties(generator), 1e-9, 1 - 1e-9)
    odds = np.log(chances / (1 - chances))
    moved = odds + shift + generator.normal(0, 0.5, len(odds))
    other = odds + generator.normal(0, 0.5, len(odds))
    return draw(1 / (1 + np.exp(-moved)), generator), draw(1 / (1 + np.exp(-other)), generator)


def true_difference(shape: Shape, shift: float) -> float:
    """The mean difference over all questions that `pair` draws from, from two million of them."""
    if shift == 0:
        return 0.0
    generator = np.random.default_rng(12345)
    chances = np.clip(Shape(2_000_000, shape.mean, shape.spread).difficulties(generator), 1e-9, 1 - 1e-9)
    odds, noise = np.log(chances / (1 - chances)), generator.normal(0, 0.5, len(chances))
    return float(np.mean(1 / (1 + np.exp(-odds - shift - noise)) - 1 / (1 + np.exp(-odds - noise))))


def coverage(interval: Callable[[int], tuple[float, float]], truth: float, repeats: int) -> dict[str, float]:
    """Share of `repeats` intervals that hold `truth`, share wholly below and above it, and mean width."""
    found = np.array([interval(index) for index in range(repeats)])
    below, above = found[:, 1] < truth, found[:, 0] > truth
    return {
        "coverage": float(np.mean(~below & ~above)),
        "below": float(below.mean()),
        "above": float(above.mean()),
        "width": float(np.mean(found[:, 1] - found[:, 0])),
    }


def naive(scores: np.ndarray) -> tuple[float, float]:
    """What a binomial over all Q*K answers would claim."""
    mean = float(scores.mean())
    half = 1.959964 * math.sqrt(mean * (1 - mean) / scores.size)
    return mean - half, mean + half


def of(estimate: Any) -> tuple[float, float]:
    return estimate.low, estimate.high


def averages(shape: Shape, repeats: int, seed: int) -> dict[str, dict[str, float]]:
    """Coverage of the naive, t and logit-t intervals on the same data sets."""
    methods: dict[str, Callable[[np.ndarray], tuple[float, float]]] = {
        "naive": naive,
        "t": lambda scores: t_interval(scores.mean(axis=1), 0.0, 1.0)[2:],
        "logit-t": lambda scores: of(average_at_k(scores)),
    }
    result = {}
    for name, method in methods.items():

        def interval(index: int, method: Callable[[np.ndarray], tuple[float, float]] = method) -> tuple[float, float]:
            return method(shape.scores(np.random.default_rng([seed, index])))

        result[name] = coverage(interval, shape.mean, repeats)
    return result


def pass_coverage(shape: Shape, k: int, repeats: int, seed: int) -> dict[str, float]:
    """Coverage of pass@k, whose truth is 1 - E[(1 - p)^k] of the beta distribution."""
    a, b = shape.mean * shape.spread, (1 - shape.mean) * shape.spread
    truth = 1 - math.prod((b + i) / (a + b + i) for i in range(k))
    return coverage(lambda index: of(pass_at_k(shape.scores(np.random.default_rng([seed, index])), k)), truth, repeats)


def paired(shape: Shape, shift: float, repeats: int, seed: int) -> dict[str, float]:
    """Coverage of the paired difference, and how often p <= 0.05."""
    p_values = []

    def interval(index: int) -> tuple[float, float]:
        difference = compare(*pair(shape, np.random.default_rng([seed, index]), shift))
        p_values.append(difference.p)
        return of(difference)

    result = coverage(interval, true_difference(shape, shift), repeats)
    return {**result, **p_summary(p_values)}


def suite_averages(shapes: Sequence[Shape], repeats: int, seed: int) -> dict[str, float]:
    """Coverage of the average over tasks of these shapes."""

    def average(index: int) -> tuple[float, float]:
        generator = np.random.default_rng([seed, index])
        return of(suite_average([shape.scores(generator) for shape in shapes]))

    return coverage(average, float(np.mean([shape.mean for shape in shapes])), repeats)


def suites(shift: float, repeats: int, seed: int) -> dict[str, dict[str, float]]:
    """Coverage of the suite average over all shapes and of the difference between two suites."""
    shapes = list(SHAPES.values())
    p_values = []

    def difference(index: int) -> tuple[float, float]:
        generator = np.random.default_rng([seed, index])
        tables = [pair(shape, generator, shift) for shape in shapes]
        found = compare_suites(*zip(*tables))
        p_values.append(found.p)
        return of(found)

    gain = float(np.mean([true_difference(shape, shift) for shape in shapes]))
    result = {"average": suite_averages(shapes, repeats, seed), "difference": coverage(difference, gain, repeats)}
    result["difference"] |= p_summary(p_values)
    return result


def skewed(rare: float, count: int, repeats: int, seed: int) -> dict[str, float]:
    """How often p <= 0.05, by `compare`, a plain t test and a sign-flip test, on differences of `SKEWED`."""
    generator = np.random.default_rng([seed, count, round(1000 * rare)])
    signs = generator.choice([-1.0, 1.0], (FLIPS, count))
    p_values: dict[str, list[float]] = {"compare": [], "t": [], "sign flip": []}
    for _ in range(repeats):
        differences = np.where(generator.random(count) < rare, 1 - rare, -rare)
        p_values["compare"].append(compare(differences[:, None], np.zeros((count, 1))).p)
        alike = np.ptp(differences) == 0  # certain of what it sees
        p_values["t"].append(0.0 if alike else float(ttest_1samp(differences, 0).pvalue))
        hits = np.sum(np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9)
        p_values["sign flip"].append(float((hits + 1) / (FLIPS + 1)))
    return {name: float(np.mean(np.array(values) <= 0.05)) for name, values in p_values.items()}


def p_summary(p_values: list[float]) -> dict[str, float]:
    """How often p falls at or below a level, and the greatest distance of its distribution from uniform."""
    ranks = np.sort(p_values)
    steps = np.arange(1, len(ranks) + 1) / len(ranks)
    return {
        "p_at_most_0.05": float(np.mean(ranks <= 0.05)),
        "p_at_most_0.5": float(np.mean(ranks <= 0.5)),
        "distance_from_uniform": float(np.max(np.maximum(steps - ranks, ranks - steps + 1 / len(ranks)))),
    }


def simulate(repeats: int, seed: int) -> dict[str, Any]:
    """All of the simulation, as it is written to the result file."""
    result: dict[str, Any] = {
        "repeats": repeats,
        "seed": seed,
        "samples": SAMPLES,
        "suite_repeats": repeats // 5,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "shapes": {name: vars(shape) for name, shape in (SHAPES | HARD).items()},
        "average_at_k": {},
        "pass_at_8": {},
        "paired_gain": {},
        "paired_null": {},
    }
    for name, shape in SHAPES.items():
        print(name, flush=True)
        result["average_at_k"][name] = averages(shape, repeats, seed)
        result["pass_at_8"][name] = pass_coverage(shape, 8, repeats, seed)
        result["paired_gain"][name] = paired(shape, 0.3, repeats // 2, seed)
        result["paired_null"][name] = paired(shape, 0.0, repeats // 2, seed)
    for name, shape in HARD.items():
        result["average_at_k"][name] = averages(shape, repeats, seed)
    result["skewed_null"] = {name: skewed(*shape, repeats, seed) for name, shape in SKEWED.items()}
    for name, shift in (("suite_gain", 0.3), ("suite_null", 0.0)):
        print(name, flush=True)
        result[name] = suites(shift, repeats // 5, seed)
    result["suite_hard"] = {name: suite_averages(shapes, repeats, seed) for name, shapes in HARD_SUITES.items()}
    return result


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "coverage.json")
    arguments = parser.parse_args()
    result = rounded(simulate(arguments.repeats, arguments.seed))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"Written to {arguments.out}")


if __name__ == "__main__":
    main()
