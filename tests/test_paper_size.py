"""The study at the paper's size: the order of its units, its rows, and the whole of it on a tiny random model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from loragate.generation import Sample
from tiny import scripts_of, write_base

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
METHODS = "base;LoRA;gates [-6,3];λ=0.5;lower λ=0;random gates [-6,3];gates [-6,3] unit"


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    with scripts_of(BENCHMARKS / "paper_size", BENCHMARKS) as load:
        yield load("measure")


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    with scripts_of(BENCHMARKS / "paper_size", BENCHMARKS) as load:
        yield load("report")


@pytest.fixture(scope="module")
def cells(study: ModuleType) -> ModuleType:
    return sys.modules["cells"]


@pytest.fixture(scope="module")
def design(study: ModuleType) -> dict[str, Any]:
    return study.read_design(study.DESIGN)


def test_an_early_stop_has_the_main_comparison(study: ModuleType, design: dict[str, Any]) -> None:
    counts = study.counts_of(design)
    units = study.units_of(design, counts)
    first = [(unit.cell, unit.method, unit.asked.what) for unit in units[:6]]
    asked = ("gsm8k T=0 0-100", "gsm8k T=1 0-100")
    assert first == [("terse-0", who, what) for what in asked for who in ("base", "LoRA", "gates [-6,3]")]
    files = [unit.file(Path()) for unit in units]
    assert len(set(files)) == len(files)  # a unit is a file of its own, and the base is asked once for all cells
    for unit in units:
        assert unit.method in design["methods"]
        assert unit.asked.part[1] <= counts[unit.asked.split]
    assert {who for methods in design["families"].values() for who in methods} <= set(design["methods"])
    few = study.chosen(units, "terse-0", "LoRA;λ=0.5", "gsm8k", "0.3,1", 200)
    assert {(unit.cell, unit.method, unit.asked.what) for unit in few} == {
        ("terse-0", who, f"gsm8k {heat} {part}")
        for who in ("LoRA", "λ=0.5")
        for heat in ("T=0.3", "T=1")
        for part in ("0-100", "100-200")
    }


def test_every_question_is_asked_and_its_answer_read(
    study: ModuleType, cells: ModuleType, design: dict[str, Any], tmp_path: Path
) -> None:
    cell, counts = a_cell(study, design, tmp_path), study.counts_of(design)
    for test in ("gsm8k", "svamp", "mmlu_stem", "math500", "humaneval"):
        task, questions = cell.task(test), cell.questions(test)
        assert len(questions) == counts[test]
        if test not in ("humaneval", "math500"):  # whose golds the graders' own tests read
            samples = [
                Sample(place, 0, f"It is \\boxed{{{question.gold}}}.", (0,), "stop", None)
                for place, question in enumerate(questions[:20])
            ]
            assert set(cells.judged(task, questions, samples)["correct"]) == {"1"}
    trained, tested = ({question.prompt for question in cell.questions(test)} for test in ("pool", "gsm8k"))
    assert not trained & tested


def test_the_own_style_takes_right_and_complete_answers_alone(
    study: ModuleType, design: dict[str, Any], tmp_path: Path
) -> None:
    cell = a_cell(study, design, tmp_path, "own")
    with pytest.raises(study.NotYet, match="0 right answers of the base to the pool, of 256"):
        cell.rows_file("own")
    ids = [question.id for question in cell.questions("pool")[:4]]
    record = study.Record(cell.records / "base" / "pool_T0_0-4.jsonl.gz")
    answers = {
        "questions": ids,
        "samples": 1,
        "texts": [["a"], ["b"], ["c"], [" d "]],
        "correct": "1011",
        "cut_off": "0010",
    }
    record.add({"method": "base", "what": "pool T=0 0-4", **answers})
    cell.settings = {"rows": 2}
    rows = [json.loads(line) for line in cell.rows_file("own").read_text(encoding="utf-8").splitlines()]
    assert [(row["id"], row["response"]) for row in rows] == [(ids[0], "a"), (ids[3], "d")]


def test_an_hour_is_kept_by_what_is_on_record(study: ModuleType, cells: ModuleType, tmp_path: Path) -> None:
    line = {"method": "LoRA", "what": "gsm8k T=0 0-100", "seconds": 120.0}
    study.Record(tmp_path / "terse-0" / "LoRA" / "one.jsonl.gz").add(line)
    budget = study.Budget(1)
    study.prime(budget, tmp_path)
    assert not budget.fits(study.Asked("gsm8k", 0.0, part=(100, 200)).kind)  # two minutes do not fit into one
    assert budget.fits(study.Asked("gsm8k", 1.0, part=(0, 100)).kind)


def test_a_majority_needs_the_most_frequent_answer(report: ModuleType) -> None:
    line = {
        "correct": "110" + "001" + "000",
        "samples": 3,
        "extracted": ["7", "7", "3", "2", None, "5", None, None, None],
    }
    assert report.votes(line).tolist() == [1.0, 0.0, 0.0]


def test_the_best_setting_is_picked_on_the_other_half(report: ModuleType) -> None:
    names = [f"q{place}" for place in range(8)]

    def scored(text: str) -> dict[str, float]:
        return dict(zip(names, map(float, text)))

    answers = {
        ("LoRA", "gsm8k", 0.0): scored("11000001"),
        ("LoRA", "gsm8k", 1.0): scored("00010111"),
        ("gates", "gsm8k", 0.0): {"q0": 1.0},  # not all questions yet: no setting of its family
    }
    (found,) = report.family([answers], ["LoRA"])
    # of the half that did not pick, and so below either setting
    assert report.best_by_halves(found).tolist() == [0, 0, 0, 1, 0, 0, 0, 1]
    assert report.family([answers], ["gates"]) == []
    # a setting that one seed lacks is none of any seed's
    both = report.family([answers, {("LoRA", "gsm8k", 0.0): scored("11110000")}], ["LoRA"])
    assert [one.shape for one in both] == [(1, 8), (1, 8)]


def test_the_interval_of_best_against_best_holds_the_truth(report: ModuleType) -> None:
    generator = np.random.default_rng(0)
    misses = narrow = 0
    for _ in range(400):
        one, other = ([(generator.random((size, 100)) < 0.5).astype(float)] for size in (6, 4))  # no setting is better
        gap = report.gap_of_best(one, other)
        misses += gap.low > 0 or gap.high < 0
        plain = report.compare(*(report.best_by_halves(side[0])[:, None] for side in (one, other)))
        narrow += plain.low > 0 or plain.high < 0
    assert misses <= 24 < narrow  # 5 % are 20; a plain paired interval misses more, as the halves hang together


def test_seeds_are_averaged_by_question(report: ModuleType, design: dict[str, Any]) -> None:
    names = [f"q{place}" for place in range(500)]

    def cell(right: int) -> dict[tuple[str, str, float], dict[str, float]]:
        gates = {name: float(place < right) for place, name in enumerate(names)}
        nothing = dict.fromkeys(names, 0.0)
        asked = report.settings_of_all(design, "terse")
        return {(who, "gsm8k", heat): gates if who == "gates [0,1]" else nothing for who, heat in asked}

    cells = {"terse-0": cell(375), "terse-1": cell(125), "own-0": cell(0)}
    found = report.over_seeds(cells, design)
    assert "| 2 of 3 |" in found
    assert {row.split("|")[7].strip() for row in found.splitlines() if "terse" in row} == {"", "open"}
    cells |= {"terse-2": cell(250)}
    found = report.over_seeds(cells, design)
    rows = {line.split("|")[2].strip(): line.split("|") for line in found.splitlines() if "terse" in line}
    assert "+50.0 (" in rows["gates [0,1]"][4]  # the mean of 75, 25 and 50 %
    assert "| own |" not in found  # one seed is no mean
    verdicts = {name: row[7].strip() for name, row in rows.items() if row[7].strip()}  # a single method has none
    against = "entropy gates against all but entropy gates"
    assert verdicts == dict.fromkeys(("entropy gates", against), "helps") | dict.fromkeys(
        ("base", "one λ", "cross-entropy gates"), "not shown"
    )
    # open where a temperature that every seed runs is missing in one of them
    del cells["terse-2"]["gates [0,1]", "gsm8k", 0.3]
    found = report.over_seeds(cells, design)
    rows = {line.split("|")[2].strip(): line.split("|") for line in found.splitlines() if "terse" in line}
    assert [rows[name][7].strip() for name in ("entropy gates", against, "base")] == ["open", "open", "not shown"]


def test_a_verdict_wants_every_seed_on_one_side(report: ModuleType) -> None:
    def pair(right: int) -> tuple[dict[str, float], dict[str, float]]:
        names = [f"q{place}" for place in range(100)]
        return {name: float(place < right) for place, name in enumerate(names)}, dict.fromkeys(names, 0.1)

    assert report.verdict(report.over([pair(60), pair(40), pair(9)]), True) == "not shown"
    assert report.verdict(report.over([pair(60), pair(40), pair(11)]), True) == "helps"
    assert report.verdict(report.over([pair(60), pair(40), pair(11)]), False) == "open"
    assert report.verdict(report.over([pair(0), pair(2), pair(1)]), True) == "harms"
    assert report.verdict(None, True) == ""


def test_records_of_nothing_and_of_two_slices_give_no_verdict(
    study: ModuleType, report: ModuleType, design: dict[str, Any], tmp_path: Path
) -> None:
    assert "Nothing was run yet." in report.page(tmp_path / "none", design)
    assert report.RESULTS.read_text(encoding="utf-8") == report.page(report.RECORDS, design)
    units = [
        unit
        for unit in study.units_of(design, study.counts_of(design))
        if unit.cell == "terse-0" and unit.asked.split == "gsm8k" and unit.asked.part[1] <= 200
    ]
    for unit in units[:7]:  # the seventh is the base's greedy answers to the second slice
        first, last = unit.asked.part
        study.Record(unit.file(tmp_path / "model")).add(
            {"method": unit.method, "what": unit.asked.what} | drawn(first, last)
        )
        page = report.page(tmp_path, design)
        assert not any(word in page for word in ("helps", "harms", "not shown", "open"))
    assert "| LoRA | 2 | 50.0 |  |" in page  # settings
    assert "| +0.0 (-2.8 to +2.8; 100) |" in page
    assert "| LoRA | 25 | 25 |" in page  # cut off
    assert "No two seeds of a situation yet." in page
    assert "Nothing was trained yet." in page
    trained = {"what": "training"}
    for method, took in (("LoRA", {"train_runtime": 200.0}), ("gates [-6,3]", {"training_seconds": 150.0})):
        study.Record(tmp_path / "model" / "terse-0" / report.file_name(method) / "training.jsonl.gz").add(
            {"method": method} | trained | took
        )
    assert "| terse-0 | 200 | 150 | 0.75 | 30 | 30 | 30 | 30 |" in report.page(tmp_path, design)


def test_limited_gates_are_compared_with_the_same_gates(report: ModuleType, design: dict[str, Any]) -> None:
    ask = {f"q{place}": float(place % 2) for place in range(40)}
    answers = {("LoRA", "gsm8k", 1.0): ask, ("gates [-6,3]", "gsm8k", 1.0): dict.fromkeys(ask, 1.0)}
    assert report.intervention_table(answers, design) == ""
    answers["gates [-6,3] unit", "gsm8k", 1.0] = ask
    *_, row = report.intervention_table(answers, design).splitlines()
    assert row.startswith("| gates [-6,3] unit | 50.0 (")
    assert "| -50.0 (-68.1 to -31.9; 40) | not run |" in row
    assert report.limited(design).keys() & {who for own in design["families"].values() for who in own} == set()
    assert report.by_temperature(answers, design) == {}
    answers["gates [-6,3] unit", "gsm8k", 0.0] = answers["LoRA", "gsm8k", 0.0] = ask
    assert report.by_temperature(answers, design) == {"LoRA": [1.0, 0.0]}


def test_another_training_is_refused_whichever_method_it_answers_as(
    study: ModuleType, design: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = a_cell(study, design, tmp_path)
    digests = {"adapter": "a", "gates": "g"}
    monkeypatch.setattr(cell, "digests", lambda method: digests)
    record = study.Record(cell.records / "terse-0" / "gates" / "one.jsonl.gz")
    record.add({"method": "gates [-6,3]", "what": "one", "by": digests})
    cell.same_training("gates [-6,3]")
    digests = {"adapter": "a", "gates": "other"}  # on the same adapter
    cell.same_training("gates [0,1]")
    for method in ("gates [-6,3]", "random gates [-6,3]"):
        with pytest.raises(SystemExit, match=r"gates g, but .* holds other"):
            cell.same_training(method)
    digests = {"adapter": "other"}
    cell.same_training("DFT")
    for method in ("LoRA", "λ=0.5"):
        with pytest.raises(SystemExit, match=r"adapter a, but .* holds other, another training of terse-0"):
            cell.same_training(method)


def test_answers_of_another_token_limit_are_refused(study: ModuleType, design: dict[str, Any], tmp_path: Path) -> None:
    unit = study.units_of(design, study.counts_of(design))[0]
    assert not study.is_answered(unit, tmp_path, 512)
    line = {"method": unit.method, "what": unit.asked.what, "max_new_tokens": 320}
    study.Record(unit.file(tmp_path)).add(line)
    assert study.is_answered(unit, tmp_path, 320)
    with pytest.raises(SystemExit, match=r"at most 320 tokens, but design\.yaml says 512; remove the file"):
        study.is_answered(unit, tmp_path, 512)


@pytest.mark.slow("training")
def test_the_whole_study_on_a_tiny_model(
    study: ModuleType,
    report: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    write_base(tmp_path / "base", num_hidden_layers=3, max_position_embeddings=2048)
    small = study.read_design(study.DESIGN)
    small["waves"] = {
        "main": {"test": "gsm8k", "temperatures": [0, 1], "methods": METHODS.split(";")},
        "majority": {"test": "gsm8k_of_8", "temperatures": [0.6], "methods": ["LoRA"]},
    }
    small["plan"] = [{"situation": "terse", "seed": seed, "waves": ["main", "majority"]} for seed in (0, 1)]
    small["asked"] = {**small["asked"], "slice": 2}
    monkeypatch.setattr(study, "read_design", lambda path: small)

    def measure(*more: str) -> str:
        argv = ["measure", "--base", str(tmp_path / "base"), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", [*argv, "--records", str(tmp_path / "records"), "--smoke", *more])
        study.main()
        return capsys.readouterr().out

    assert "the next step would not fit" in measure("--hours", "0", "--cells", "terse-0")
    assert "0 of 30 units are on record" in measure("--list", "--cells", "terse-0")
    measure("--cells", "terse-0")
    assert "30 of 30 units are on record" in measure("--list", "--cells", "terse-0")
    records = tmp_path / "records" / "qwen2.5-coder-0.5b"
    # slices that are drawn together have the answers of slices that are drawn one by one
    measure("--cells", "terse-0", "--methods", "base", "--slices", "2", "--records", str(tmp_path / "together"))
    for alone in (records / "base").glob("*.jsonl.gz"):
        (one,) = study.Record(alone).lines.values()
        (other,) = study.Record(tmp_path / "together" / records.name / "base" / alone.name).lines.values()
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    answers, _, trainings = report.read(records, "terse-0")
    assert {method for method, _, _ in answers} == set(METHODS.split(";"))
    assert set(trainings) == {"LoRA", "gates [-6,3]"}
    page = report.page(tmp_path / "records", small)
    assert "LoRA, majority of 8" in page
    assert page.count("0.0 (0.0–") >= 12  # random words hold no box
    # another training of the cell is not mixed into it
    (records / "terse-0" / "LoRA" / "gsm8k_T1_0-2.jsonl.gz").unlink()
    adapter = tmp_path / "out" / "qwen2.5-coder-0.5b" / "terse-0" / "LoRA" / "adapter_model.safetensors"
    adapter.write_bytes(changed(adapter.read_bytes()))
    with pytest.raises(SystemExit, match="another training of terse-0"):
        measure("--cells", "terse-0", "--methods", "LoRA")
    monkeypatch.setattr(sys, "argv", ["measure", "--smoke", "--records", str(tmp_path / "records")])
    with pytest.raises(SystemExit):  # its adapters and rows would be taken for those of the study
        study.main()


def drawn(first: int, last: int) -> dict[str, Any]:
    """Answers to these questions, every second right and every fourth cut off."""
    count = last - first
    questions = [f"q{place:03}" for place in range(first, last)]
    verdicts = {"correct": "10" * (count // 2), "cut_off": "0001" * (count // 4)}
    return {"questions": questions, "samples": 1, "seconds": 30.0 * count / 100} | verdicts


def changed(tensors: bytes) -> bytes:
    """The file with another last number."""
    return tensors[:-1] + bytes([tensors[-1] ^ 1])


def a_cell(study: ModuleType, design: dict[str, Any], place: Path, situation: str = "terse") -> Any:
    cell = study.PaperCell(design, situation, 0, place / "base", place / "out", "fp32", False)
    cell.records = place / "records"
    return cell
