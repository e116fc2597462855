"""Exports hold the record's numbers in the layout of other tools, and those tools read them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from records import IDS, make_record, make_samples

from loragate.errors import DataError
from loragate.evaluation.export import SAMPLE_KEYS, to_inspect, to_lm_eval
from loragate.files import write_json

RECORD = make_record()
GATED = RECORD.find("sums", "gated")


def test_lm_eval_layout() -> None:
    exported = to_lm_eval(RECORD)
    scores = exported["results"]["sums"]
    assert scores["avg_at_k,none"] == pytest.approx(5 / 9)
    assert scores["avg_at_k_stderr,none"] == GATED.avg_at_k.stderr
    assert scores["pass_at_3,none"] == pytest.approx(2 / 3)
    assert scores["dft_rounded_stderr,none"] == "N/A"
    assert exported["higher_is_better"]["sums"] == {
        name.removesuffix(",none"): name != "truncated,none" for name in scores if "," in name and "_stderr" not in name
    }
    assert exported["n-shot"] == {"sums": 0}
    assert exported["versions"] == {"sums": "1"}
    assert exported["n-samples"] == {"sums": {"original": 3, "effective": 3}}
    assert exported["configs"]["sums"]["repeats"] == 3
    assert exported["configs"]["sums"]["generation_kwargs"]["temperature"] == 1.0
    assert exported["date"] == 1738324800
    assert "samples" not in exported
    json.dumps(exported, allow_nan=False)


def test_a_control_is_exported_with_its_own_temperature() -> None:
    exported = to_lm_eval(RECORD, variant="adapter", control="T=0.6")
    assert exported["configs"]["sums"]["generation_kwargs"]["temperature"] == 0.6
    assert exported["config"]["variant"] == "adapter T=0.6"
    assert exported["model_name"] == "loragate/runs/adapter"
    assert "majority_at_k,none" not in exported["results"]["sums"]


def test_lm_eval_samples_are_grouped_by_question() -> None:
    entries = to_lm_eval(RECORD, {"sums": make_samples()})["samples"]["sums"]
    assert [entry["doc"]["id"] for entry in entries] == list(IDS)
    assert [entry["avg_at_k"] for entry in entries] == pytest.approx([1, 2 / 3, 0])
    assert entries[1]["filtered_resps"] == ["6", "6", "7"]
    assert entries[2]["finish_reasons"] == ["stop", "stop", "length"]
    assert entries[2]["target"] == "9"
    assert len({entry["doc_hash"] for entry in entries}) == 3
    assert to_lm_eval(RECORD, {})["samples"] == {}


def test_inspect_layout() -> None:
    log = to_inspect(RECORD, make_samples(), "sums")
    assert (log["version"], log["status"]) == (2, "success")
    assert [(sample["id"], sample["epoch"]) for sample in log["samples"]] == [(id, k) for id in IDS for k in (1, 2, 3)]
    assert log["samples"][-1]["output"]["choices"][0]["stop_reason"] == "max_tokens"
    assert log["samples"][-1]["scores"]["correct"] == {"value": 0.0, "answer": None, "explanation": "no_box"}
    assert log["eval"]["config"] == {"epochs": 3, "epochs_reducer": ["mean"]}
    (score,) = log["results"]["scores"]
    assert score["metrics"]["stderr"]["value"] == GATED.avg_at_k.stderr
    assert log["eval"]["metadata"]["canary"] == {"adapter_from_base": 0.3}
    assert to_inspect(RECORD, make_samples()[::-1], "sums") == log
    other = to_inspect(RECORD, make_samples(), "sums", variant="base")
    assert other["eval"]["run_id"] != log["eval"]["run_id"]


@pytest.mark.parametrize("key", SAMPLE_KEYS)
def test_a_sample_without_a_key_is_refused(key: str) -> None:
    samples = make_samples()
    del samples[4][key]
    with pytest.raises(DataError, match=f"entry 4 lacks the key '{key}'"):
        to_inspect(RECORD, samples, "sums")


def test_samples_of_another_run_are_refused() -> None:
    samples = make_samples()
    with pytest.raises(DataError, match=r"question 'sum-3' has the samples \[0, 1\], expected 0 to 2"):
        to_inspect(RECORD, samples[1:], "sums")
    with pytest.raises(DataError, match=r"'sum-3' has the samples \[0, 1, 2, 2\]"):
        to_inspect(RECORD, [*samples, samples[0]], "sums")
    with pytest.raises(DataError, match="question 'other' is not in the record"):
        to_inspect(RECORD, [samples[0] | {"question_id": "other"}], "sums")
    with pytest.raises(DataError, match=r"'sum-3' scores 0\.333333 by its samples and 0 in the record"):
        to_lm_eval(RECORD, {"sums": [samples[0] | {"correct": True}, *samples[1:]]})
    with pytest.raises(DataError, match="task 'summs' are not of this record; did you mean 'sums'"):
        to_lm_eval(RECORD, {"summs": samples})


def test_what_the_record_lacks_is_refused() -> None:
    with pytest.raises(DataError, match="no result of gated λ=2 on sums"):
        to_lm_eval(RECORD, control="λ=2")
    with pytest.raises(DataError, match="no result of gated on products"):
        to_inspect(RECORD, make_samples(), "products")
    for created in ("yesterday", "2025-01-31T12:00:00"):
        with pytest.raises(DataError, match="expected ISO 8601 with a time zone"):
            to_lm_eval(dataclasses.replace(RECORD, created=created))


@pytest.mark.slow("processes")
def test_neither_library_is_imported() -> None:
    code = "import sys, loragate.evaluation.export; print([m for m in ('lm_eval', 'inspect_ai') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.contract
def test_inspect_reads_the_log(tmp_path: Path) -> None:
    log_module = pytest.importorskip("inspect_ai.log", reason="inspect_ai is not installed")
    path = tmp_path / "2025-01-31T12-00-00_sums_gated.json"
    write_json(path, to_inspect(RECORD, make_samples(), "sums"))
    log = log_module.read_eval_log(str(path))
    assert (log.status, log.eval.task, log.eval.model) == ("success", "sums", "loragate/runs/gated")
    assert log.results.scores[0].metrics["mean"].value == pytest.approx(5 / 9)
    assert len(log.samples) == 9
    assert log.samples[4].scores["correct"].value == 1
    assert log.samples[8].output.choices[0].stop_reason == "max_tokens"
    assert log.samples[0].output.completion.startswith("It is")
    header = log_module.read_eval_log(str(path), header_only=True)
    assert header.eval.dataset.sample_ids == list(IDS)
    assert [info.task for info in log_module.list_eval_logs(str(tmp_path))] == ["sums"]
    written = tmp_path / "again.eval"
    log_module.write_eval_log(log, str(written))
    assert len(log_module.read_eval_log(str(written)).samples) == 9


@pytest.mark.contract
def test_lm_eval_prints_the_results() -> None:
    utilities = pytest.importorskip("lm_eval.utils", reason="lm-eval is not installed")
    table = utilities.make_table(to_lm_eval(RECORD))
    (line,) = [line for line in table.splitlines() if "avg_at_k" in line]
    cells = [cell.strip() for cell in line.split("|")]
    assert "0.5556" in cells
    assert f"{GATED.avg_at_k.stderr:.4f}" in cells
