"""Intervals cover what they claim to: a shorter run of the simulation in benchmarks/coverage.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tiny import scripts_of

ROOT = Path(__file__).parents[2]
TASKS = ("AIME-like", "AMC-like", "Minerva-like", "OlympiadBench-like", "Math500-like")


@pytest.fixture(scope="module")
def simulation() -> Iterator[ModuleType]:
    with scripts_of(ROOT / "benchmarks") as load:
        yield load("coverage")


@pytest.mark.slow("statistics")
@pytest.mark.parametrize("task", TASKS)
def test_an_average_is_covered(simulation: ModuleType, task: str) -> None:
    found = simulation.averages(simulation.SHAPES[task], 1500, seed=1)
    assert found["logit-t"]["coverage"] >= 0.92
    assert found["logit-t"]["coverage"] <= 0.98


@pytest.mark.slow("statistics")
@pytest.mark.parametrize("task", ["AIME-like", "AMC-like", "Minerva-like", "Math500-like"])
def test_a_paired_difference_is_covered_and_p_keeps_its_level(simulation: ModuleType, task: str) -> None:
    repeats = 800
    assert simulation.paired(simulation.SHAPES[task], 0.3, repeats, seed=1)["coverage"] >= 0.92
    null = simulation.paired(simulation.SHAPES[task], 0.0, repeats, seed=2)
    assert null["coverage"] >= 0.92
    assert null["p_at_most_0.05"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)
    if task == "Math500-like":  # with few questions that differ, p takes few values and lies above uniform
        assert null["distance_from_uniform"] < 1.63 / math.sqrt(repeats)  # Kolmogorov-Smirnov at the 1 % level


@pytest.mark.slow("statistics")
def test_suites_are_covered(simulation: ModuleType) -> None:
    repeats = 300
    found = simulation.suites(0.0, repeats, seed=1)
    for part in ("average", "difference"):
        assert found[part]["coverage"] >= 0.92
    assert found["difference"]["p_at_most_0.05"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.mark.slow("statistics")
@pytest.mark.parametrize("tasks", ["three very hard tasks", "three nearly solved tasks"])
def test_suites_are_covered_near_0_and_1(simulation: ModuleType, tasks: str) -> None:
    found = simulation.suite_averages(simulation.HARD_SUITES[tasks], 1500, seed=1)
    assert found["coverage"] >= 0.92
    assert max(found["below"], found["above"]) <= 0.06, "the truth lies as often on either side"
