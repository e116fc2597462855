"""Intervals that cover what they claim to: the committed simulation, the page that quotes it, and a shorter run of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tiny import scripts_of

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "coverage.json"
TASKS = ("AIME-like", "AMC-like", "Minerva-like", "OlympiadBench-like", "Math500-like")


@pytest.fixture(scope="module")
def simulation() -> Iterator[ModuleType]:
    with scripts_of(ROOT / "benchmarks") as load:
        yield load("coverage")


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8"))


def test_the_committed_intervals_cover(result: dict[str, Any]) -> None:
    for task in TASKS:
        assert result["average_at_k"][task]["logit-t"]["coverage"] >= 0.92, task
        assert result["average_at_k"][task]["naive"]["coverage"] < 0.6, task
        for kind in ("pass_at_8", "paired_gain", "paired_null"):
            assert result[kind][task]["coverage"] >= 0.92, (kind, task)
        assert result["paired_null"][task]["p_at_most_0.05"] <= 0.055, task
    for name in ("suite_gain", "suite_null"):
        assert min(result[name][part]["coverage"] for part in ("average", "difference")) >= 0.92
    assert 0.03 <= result["suite_null"]["difference"]["p_at_most_0.05"] <= 0.06


def test_the_page_quotes_the_committed_figures(result: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")

    def row(name: str) -> list[str]:
        (line,) = re.findall(rf"^\| {re.escape(name)}[^|]*\|(.*)\|$", page, re.M)
        return [cell.strip() for cell in line.split("|")]

    def cell(found: dict[str, float]) -> str:
        return f"{100 * found['coverage']:.1f} ({100 * found['width']:.1f})"

    for name, found in result["average_at_k"].items():
        expected = [cell(found[method]) for method in ("naive", "t", "logit-t")]
        if name in TASKS:
            expected += [
                cell(result["paired_gain"][name]),
                f"{100 * result['paired_null'][name]['p_at_most_0.05']:.1f}",
            ]
        assert row(name)[: len(expected)] == expected
    suite = result["suite_gain"]
    level = f"{100 * result['suite_null']['difference']['p_at_most_0.05']:.1f}"
    assert row("average of the five tasks")[2:] == [cell(suite["average"]), cell(suite["difference"]), level]


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
    assert found["difference"]["distance_from_uniform"] < 1.63 / math.sqrt(repeats)
