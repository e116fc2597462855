"""The study with many methods at a time: order, records of several processes, verdicts afterwards; figures over trainings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loragate.evaluation import grade_math
from tiny import scripts_of, write_base

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "real"


@pytest.fixture(scope="module")
def scripts():
    with scripts_of(FOLDER, ROOT / "scripts") as load:
        yield SimpleNamespace(**{name: load(name) for name in ("measure", "at_once", "report", "kinds")})


@pytest.fixture(scope="module")
def design(scripts):
    return scripts.measure.read_design()


def test_the_adapters_come_first_then_what_was_asked_for_then_cell_after_cell(scripts, design):
    methods = ["DFT", "LoRA", "base", "λ=0.5", "gates [0,1]"]
    todo = sorted(scripts.at_once.order(design, ["noisy-1", "clean-1"], methods, ["gates [0,1]"]))
    assert [(cell, method) for _, cell, method in todo] == [
        ("noisy-1", "LoRA"),
        ("clean-1", "LoRA"),
        ("noisy-1", "gates [0,1]"),
        ("clean-1", "gates [0,1]"),
        ("noisy-1", "DFT"),
        ("noisy-1", "base"),  # once, as it answers alike in both
        ("noisy-1", "λ=0.5"),
        ("clean-1", "DFT"),
        ("clean-1", "λ=0.5"),
    ]
    assert len({rank for rank, _, _ in todo}) == len(todo)


def test_every_method_waits_for_what_it_is_made_from(scripts, design):
    needed = {method: scripts.at_once.needed(method, design) for method in design["methods"]}
    assert needed["LoRA"] == needed["base"] == needed["DFT"] == ""
    assert needed["LoRA continued"] == needed["gates [0,1]"] == needed["λ=1.5"] == "LoRA"
    assert needed["random gates [-6,3]"] == "gates [-6,3]"
    assert set(needed.values()) <= {"", *design["methods"]}


def test_what_a_method_is_made_from_is_made_first(scripts, design):
    assert scripts.at_once.whole(["random gates [-6,3]", "DFT", "λ=0.5"], design) == [
        "LoRA",
        "gates [-6,3]",
        "random gates [-6,3]",
        "DFT",
        "λ=0.5",
    ]
    (base,) = (one for one in scripts.at_once.order(design, ["clean-0", "clean-1"], ["base"], ["base"]))
    assert base[1:] == ("clean-0", "base")


def test_greedy_answers_come_first_and_the_rest_of_the_pool_is_asked_twice(scripts, design):
    asked = [one.what for one in scripts.at_once.wanted(design, "LoRA")]
    assert asked[:3] == ["test T=0", "retention", "rest T=0"]
    assert sorted(asked) == sorted(
        ["retention", *(f"test T={heat}" for heat in ("0", "0.3", "0.6", "1")), "rest T=0", "rest T=1"]
    )
    assert not any(one.split == "rest" for one in scripts.at_once.wanted(design, "base"))


def test_two_processes_add_to_one_record(scripts, tmp_path):
    first, second = (scripts.measure.Record(tmp_path / "clean-1.jsonl.gz") for _ in range(2))
    first.add({"method": "LoRA", "what": "training"})
    second.add({"method": "DFT", "what": "training"})
    first.add({"method": "EAFT", "what": "training"})
    found = scripts.measure.Record(first.path).lines
    assert [method for method, _ in found] == ["LoRA", "DFT", "EAFT"]
    assert found == first.lines


def test_verdicts_are_added_once_and_equal_answers_are_judged_once(scripts, tmp_path, monkeypatch):
    judged = []

    def judge(task, questions, samples, grader):
        judged.extend((questions[one.question].id, one.text) for one in samples)
        return [grade_math(one.text, questions[one.question].gold) for one in samples]

    monkeypatch.setattr(scripts.measure, "judge", judge)
    questions = scripts.measure.load_questions(
        scripts.measure.load_task(str(FOLDER / "questions" / "task.yaml")), FOLDER / "questions" / "test.jsonl", None
    ).questions
    right, wrong = f"\\boxed{{{questions[0].gold}}}", "\\boxed{123456789}"
    lines = {"LoRA": [[right, wrong], [wrong, wrong]], "DFT": [[wrong, right], ["", wrong]]}
    record = scripts.measure.Record(tmp_path / "noisy-1.jsonl.gz")
    for method, texts in lines.items():
        record.add({"method": method, "what": "test T=1", "samples": 2, "texts": texts})
    given = SimpleNamespace(out=tmp_path, base=tmp_path, records=tmp_path, smoke=False)
    assert scripts.at_once.judge(given) == 0
    found = scripts.measure.Record(record.path).lines
    assert [found[method, "test T=1"]["correct"] for method in lines] == ["1000", "0100"]
    assert len(judged) == len(set(judged)) == 4
    assert scripts.at_once.judge(given) == 0
    assert len(judged) == 4


def greedy(method: str, what: str, right: list[int]) -> tuple[tuple[str, str], dict]:
    texts = [["\\boxed{2 + 3}"] for _ in right]
    return (method, what), {
        "method": method,
        "what": what,
        "samples": 1,
        "correct": "".join(map(str, right)),
        "texts": texts,
    }


def test_differences_are_averaged_over_seeds_with_an_interval_over_them(scripts, design):
    gains = {"clean-0": 5, "noisy-0": 3, "clean-1": 2, "clean-2": 0}
    records = {
        cell: dict(
            greedy(method, what, [int(place < 3 + more) for place in range(10)])
            for method, more in (("LoRA", 0), ("DFT", gain))
            for what in (scripts.kinds.GREEDY, scripts.kinds.REST)
        )
        for cell, gain in gains.items()
    }
    table = scripts.report.over_trainings({"CPU": records, "GPU": {}}, design)
    values = np.array([40.0, 20.0, 0.0])  # the cells of seed 0 count once
    half = 4.303 * values.std(ddof=1) / 3**0.5  # Student's t of two degrees of freedom
    assert f"| DFT | CPU | 3 | +20.0 ({20 - half:+.1f} to {20 + half:+.1f}) |" in table
    assert "clean-0 +50.0, noisy-0 +30.0, clean-1 +20.0, clean-2 +0.0" in table
    said = scripts.report.two_machines(records, records | {"clean-1": records["noisy-0"]})
    assert "of the test 8 scores differ by +1.2 points on average, standard deviation 3.5, at most 10.0" in said
    del records["clean-1"]
    assert "with three seeds yet" in scripts.report.over_trainings({"CPU": records}, design)


@pytest.mark.slow("whole commands")
def test_many_methods_are_drawn_beside_one_another(scripts, tmp_path):
    base, records = tmp_path / "tiny", tmp_path / "records"
    write_base(base)
    retention = scripts.measure.Record(scripts.measure.RECORDS / "base-48.jsonl.gz").lines["base", "retention"]
    scripts.measure.Record(records / "base-48.jsonl.gz").add(retention)
    words = ["draw", "--smoke", "--base", base, "--out", tmp_path / "out", "--records", records, "--workers", "2"]
    words += ["--cells", "noisy-1", "--methods", "LoRA;gates [-6,3];random gates [-6,3];λ=0.5;DFT"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "at_once.py"), *map(str, words)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "5 of 5 done, 0 failed" in done.stdout
    lines = scripts.measure.Record(records / "noisy-1.jsonl.gz").lines
    assert {method for method, _ in lines} == {"LoRA", "gates [-6,3]", "random gates [-6,3]", "λ=0.5", "DFT"}
    assert all(("LoRA", what) in lines for what in ("test T=0", "rest T=1", "retention", "training"))
    assert not any("correct" in line for line in lines.values())
    shutil.rmtree(tmp_path / "out")
