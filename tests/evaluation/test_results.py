"""The record of an evaluation: what it holds, that it survives the file, and what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from records import ADAPTER, GATED, IDS, answered, make_record, make_result
from rich.console import Console

from loragate.display import format_points
from loragate.errors import DataError
from loragate.evaluation.evaluate import open_evaluation
from loragate.evaluation.results import (
    SuiteResult,
    read_record,
    task_result,
    verdict,
    write_record,
)
from loragate.evaluation.statistics import (
    Difference,
    average_at_k,
    compare,
    compare_suites,
    suite_average,
)
from loragate.evaluation.variants import ModelVariant
from loragate.records import package_versions
from loragate.report.scores import caption, score_markdown, score_tables


def test_a_task_result_by_hand() -> None:
    result = make_result("gated")
    assert result.avg_at_k == average_at_k(GATED)
    assert set(result.pass_at_k) == {1, 2, 3}
    assert result.pass_at_k[3].mean == pytest.approx(2 / 3)
    assert result.majority_at_k is not None
    assert result.majority_at_k.mean == pytest.approx(2 / 3)
    assert result.reasons == {"no_box": 1, "ok": 5, "wrong": 3}
    assert (result.truncated, result.no_eos) == (pytest.approx(1 / 9), pytest.approx(1 / 9))
    assert result.tokens == 14
    assert result.question_scores == pytest.approx((1, 2 / 3, 0))
    assert result.comparison == compare(GATED, ADAPTER)
    assert make_result("adapter", control="T=0.6", temperature=0.6).label == "adapter T=0.6"


def test_a_result_is_found_under_the_name_that_is_printed() -> None:
    cooler = make_result("adapter", control="T=0.6", temperature=0.6)
    record = dataclasses.replace(make_record(), results=(make_result("gated"), make_result("adapter"), cooler))
    task = cooler.task
    assert record.find(task, "adapter T=0.6") is record.find(task, "adapter", "T=0.6") is cooler
    assert record.find(task, "adapter").control is None
    with pytest.raises(DataError, match=f"no result of base T=0.6 on {task}; it has: .*adapter T=0.6 on {task}"):
        record.find(task, "base T=0.6")


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    suite = SuiteResult("gated", suite_average([GATED, ADAPTER]), "math", None, compare_suites([GATED], [ADAPTER]))
    record = dataclasses.replace(make_record(), suites=(suite,), sandbox=None, canary={})
    path = tmp_path / "results.json"
    write_record(record, path)
    assert read_record(path) == record
    assert json.loads(path.read_text())["schema"] == 1


def test_p_values_are_adjusted_over_the_record() -> None:
    record = make_record().with_adjusted_p()
    raw = [result.comparison.p for result in record.results if result.comparison]
    adjusted = [result.adjusted_p for result in record.results if result.comparison]
    assert len(raw) == 3
    assert adjusted == [min(1.0, 3 * min(raw)) if p == min(raw) else pytest.approx(1) for p in raw]
    assert record.find("sums", "adapter").adjusted_p is None
    for result in record.results:
        expected = result.comparison and verdict(result.comparison, p=result.adjusted_p)
        assert result.verdict == expected


def test_no_verdict_contradicts_the_interval_beside_it() -> None:
    """Of many comparisons some have an interval of their own that leaves zero out, which the adjusted p does not bear out."""
    draw, ids = np.random.default_rng(0), tuple(map(str, range(40)))
    own = task_result("sums", "adapter", ids, *answered(draw.binomial(1, 0.4, (40, 1))))
    rows = [own]
    for number in range(12):
        scores = draw.binomial(1, 0.5 + 0.04 * number, (40, 1))
        rows.append(task_result("sums", "gated", ids, *answered(scores), adapter=own, control=f"λ={number}"))
    alone = [verdict(row.comparison) for row in rows if row.comparison]
    record = dataclasses.replace(make_record(), results=tuple(rows)).with_adjusted_p()
    compared = [row for row in record.results if row.comparison]
    assert alone.count("better") > [row.verdict for row in compared].count("better") > 0, "the adjustment matters"
    for row in compared:
        outside = row.comparison.low > 0 or row.comparison.high < 0
        assert outside == (row.verdict != "no difference shown") == (row.adjusted_p <= 0.05)
        assert (f"{format_points(row.comparison.low)} to {format_points(row.comparison.high)}") in score_markdown(
            record.to_json()
        )


def test_the_best_temperature_is_scored_where_it_was_not_picked() -> None:
    record = make_record().with_best_temperatures()
    assert [row.at_best is not None for row in record.results] == [False, True, False, False]
    # where one temperature is best on every half, nothing is lost by picking it
    warm = task_result("sums", "adapter", IDS, *answered(np.zeros((3, 1))))
    cool = task_result("sums", "adapter", IDS, *answered(np.ones((3, 1))), control="greedy", temperature=0.0)
    (best, _) = dataclasses.replace(record, results=(warm, cool)).with_best_temperatures().results
    assert best.at_best is not None
    assert (best.at_best.temperature, best.at_best.score.mean) == (0.0, pytest.approx(1.0))
    assert best.at_best.comparison is None, "the adapter's own"
    assert "At its best temperature" in score_markdown(record.to_json())


def test_what_is_said_of_the_best_temperatures_is_adjusted_for_all_of_them() -> None:
    draw, ids, rows = np.random.default_rng(0), tuple(map(str, range(40))), []
    for number in range(12):
        for kind, control in (("adapter", None), ("gated", None), ("adapter", "greedy"), ("gated", "greedy")):
            right = 0.4 if kind == "adapter" else 0.4 + 0.04 * number
            heat = {} if control is None else {"control": control, "temperature": 0.0}
            rows.append(task_result(f"t{number}", kind, ids, *answered(draw.binomial(1, right, (40, 1))), **heat))
    infos = tuple(dataclasses.replace(make_record().tasks[0], name=f"t{number}") for number in range(12))
    record = dataclasses.replace(make_record(), tasks=infos, results=tuple(rows)).with_best_temperatures()
    bests = [row.at_best for row in record.results if row.at_best and row.at_best.comparison]
    alone = [best.comparison.at(0.95).low > 0 for best in bests if best.comparison]
    assert sum(alone) > [best.verdict for best in bests].count("better") > 0, "the adjustment matters"
    for best in bests:
        assert best.comparison is not None
        assert (best.comparison.low > 0 or best.comparison.high < 0) == (best.verdict != "no difference shown")


def test_each_model_at_its_best_is_compared_with_the_adapter_at_its_own() -> None:
    """A base that is level with the adapter greedily, and far better at T = 1."""
    ids, results = tuple(map(str, range(40))), []
    for kind, warm in (("adapter", 4), ("base", 20)):
        for right, how in ((warm, {}), (36, {"control": "greedy", "temperature": 0.0})):
            results.append(task_result("sums", kind, ids, *answered(np.arange(40)[:, None] < right), **how))
    record = dataclasses.replace(make_record(), results=tuple(results)).with_best_temperatures()
    best = record.find("sums", "base").at_best
    assert best is not None
    assert best.temperature == 0.0
    assert best.comparison is not None
    assert best.comparison.mean == pytest.approx(0.0)
    assert best.comparison.low < 0 < best.comparison.high
    assert "vs adapter 0.0," in score_markdown(record.to_json())


@pytest.mark.parametrize(
    ("low", "high", "p", "expected"),
    [
        (0.01, 0.2, 0.01, "better"),
        (-0.2, -0.01, 0.05, "worse"),
        (-0.01, 0.2, 0.01, "no difference shown"),
        (0.01, 0.2, 0.06, "no difference shown"),
        (0.0, 0.0, 1.0, "no difference shown"),
    ],
)
def test_verdict(low: float, high: float, p: float, expected: str) -> None:
    assert verdict(Difference((low + high) / 2, low, high, p)) == expected


@pytest.mark.parametrize("control", ["/../../../../elsewhere/x", "\\..\\x", "T=0.6"])
def test_a_row_whose_name_is_a_path_is_refused(tmp_path: Path, control: str) -> None:
    """A folder that came from somebody else cannot lead a judge out of it."""
    identity = {"kind": "evaluation", "tasks": [], "models": {}, "seed": 0, "notes": {}}
    (tmp_path / "run.json").write_text(json.dumps(identity))
    (tmp_path / "variants.json").write_text(json.dumps({"one": {"weights": "adapter", "control": control}}))
    if control == "T=0.6":
        assert open_evaluation(tmp_path).variants == [ModelVariant("adapter", control)]
    else:
        with pytest.raises(DataError, match=r"variants\.json.*is a path"):
            open_evaluation(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(schema=2), "schema must be one of 1, found 2"),
        (lambda record: record.update(secnods=1.0), "unknown key 'secnods'; did you mean 'seconds'"),
        (lambda record: record.pop("seed"), "the key 'seed' is missing"),
        (lambda record: record["results"][0].update(variant="lora"), r"results\[0\].variant must be one of 'base'"),
        (
            lambda record: record["results"][0].update(pass_at_k={"one": 1}),
            "pass_at_k.one must be a whole number, found",
        ),
        (
            lambda record: record["tasks"][0]["sampling"].update(temperature=-1.0),
            r"tasks\[0\].sampling.temperature must be at least 0, found -1",
        ),
    ],
)
def test_a_record_is_read_strictly(tmp_path: Path, change: Callable[[dict], object], message: str) -> None:
    record, path = make_record().to_json(), tmp_path / "r.json"
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=f"r.json: .*{message}"):
        read_record(path)


def test_the_table_fits_80_columns() -> None:
    record = make_record().with_adjusted_p().to_json()
    record["warnings"] = ["the set is not whole"]
    wide = {"mean": -0.5, "low": -0.888, "high": 1.0, "p": 0.0001}
    for row in record["results"]:
        row["comparison"], row["verdict"], row["no_eos"], row["truncated"] = wide, "no difference shown", 1.0, 0.999
        row["avg_at_k"] |= {"mean": 1.0, "low": 0.888, "high": 1.0}
        row["tokens"] = 4096.0
    output = Console(file=io.StringIO(), width=80)
    for table in score_tables(record):
        output.print(table)
    lines = output.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert sum("4096" in line for line in lines) == len(record["results"]), "no column is left out"
    assert "warning: the set is not whole" in caption(record)
    assert "warning: the set is not whole" in score_markdown(record)


def test_versions_name_what_is_absent() -> None:
    versions = package_versions(("numpy", "no-such-package"))
    assert versions["numpy"] == np.__version__
    assert versions["no-such-package"] == "absent"
    assert set(versions) == {"python", "platform", "numpy", "no-such-package"}
    assert set(package_versions()) >= {"loragate", "torch", "transformers", "peft", "math-verify"}
