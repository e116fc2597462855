"""Choosing by agreement on the real model's answers: how answers are read and compared, and that the page shows the record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from loragate.selection.candidate import Candidate

from loragate.gates.range import Range
from tiny import scripts_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with scripts_of(ROOT / "benchmarks" / "real", ROOT / "benchmarks" / "selection") as load:
        yield load("without_labels")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{12 + 3} it is.", 15.0),
        (r"\boxed{1} or \boxed{(1,200 - 200) / 4}", 250.0),
        (r"\boxed{-3 * 0.5}", -1.5),
        (r"\boxed{1 / 0}", "1 / 0"),
        (r"\boxed{2 ** 9}", "2 ** 9"),
        (r"\boxed{two}", "two"),
        ("15", None),
    ],
)
def test_an_answer_is_the_value_of_its_formula(script, text, answer):
    assert script.read_answer(text) == answer


def test_no_answer_agrees_with_nothing(script):
    said = [[15.0, 3.0], [None, None], ["two", 2.0]]
    assert np.array_equal(script.agreement(said, [15.0, None, "two"]), [[1, 0], [0, 0], [1, 0]])


def test_a_made_cell_is_judged_by_hand(script, monkeypatch):
    """Gates agree at T = 1 where the adapter does not, and are worse than the cool adapter."""
    gates = Candidate(Range(0, 1), seed=42)
    agree = {1.0: (0.2, 0.9), 0.6: (0.5, 0.9), 0.3: (0.9, 0.9)}  # of adapter and gates
    right = {1.0: (0.1, 0.3), 0.6: (0.3, 0.3), 0.3: (0.5, 0.3)}

    def table(share):
        return np.repeat((np.arange(428) * 37 % 428 < share * 428).astype(float)[:, None], 2, axis=1)

    cell = {
        replace(model, temperature=heat): (table(agree[heat][index]), table(right[heat][index]))
        for index, model in enumerate((script.ALONE, gates))
        for heat in agree
    }
    monkeypatch.setattr(script, "cells", lambda: {"made": cell})
    found = script.judged(1)
    assert [found[heat]["gates_taken_percent"] for heat in ("T=1", "T=0.6", "T=0.3")] == [100, 100, 0]
    assert found["T=1"]["points_then_cool"] == pytest.approx(-20, abs=0.2)
    assert found["T=1"]["harmful_then_cool_percent"] == 100
    assert (found["T=0.3"]["points_then_cool"], found["T=0.3"]["harmful_then_cool_percent"]) == (0, 0)
    assert found["T=1"]["adapter_alone_points"] == pytest.approx(-40, abs=0.2)


def test_the_page_shows_the_record():
    record = json.loads((ROOT / "benchmarks" / "results" / "selection_without_labels.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    names = ("gates_taken_percent", "points_then_cool", "worst_then_cool", "harmful_then_cool_percent", "points")
    for heat in ("1", "0.6", "0.3"):
        row = record[f"T={heat}"]
        cells = " | ".join(f"{row[name]:.1f}".replace("-", "−") for name in names)
        mark = " (`calibrate`)" if heat == "0.3" else ""
        assert f"| T = {heat}{mark} | {cells} |" in page
