"""Runs that must agree (fp32): how a batch is cut, padded, chunked or spread over processes changes nothing."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import loragate as lg
from loragate.data import Collator
from loragate.losses import StatisticsRequest, head
from loragate.training import CalibrationSettings, StageOneSettings
from loragate.training.model_state import statistics_forward
from loragate.training.settings import OBJECTIVES
from tiny import tiny_adapter, tiny_base, tiny_rows

GATES = lg.GateConfig(-3, 2)


def calibration(tokenizer, micro, rows=None, seed=42, **changes):
    settings = CalibrationSettings(
        batch_size=8,
        micro_batch_size=micro,
        learning_rate=1e-2,
        logging_steps=1,
        k=20,
        max_length=64,
        seed=seed,
        **changes,
    )
    model = tiny_adapter()
    result = lg.calibrate(model, tokenizer, rows or tiny_rows(20), GATES, settings)
    return (
        [record["loss"] for record in result.history if "loss" in record],
        {name: parameter.detach() for name, parameter in lg.gate_parameters(model).items()},
    )


def assert_same(left, right):
    assert left[0] == pytest.approx(right[0], rel=2e-6)
    for name, parameter in left[1].items():
        torch.testing.assert_close(parameter, right[1][name], rtol=1e-3, atol=2e-6)


def test_calibration_does_not_depend_on_the_micro_batch(tokenizer):
    whole = calibration(tokenizer, 8)
    assert len(whole[0]) == 3, "the last batch is smaller than the others"
    for micro in (4, 1):
        assert_same(calibration(tokenizer, micro), whole)


def test_gradient_checkpointing_changes_nothing(tokenizer):
    results = []
    for checkpointing in (False, True):
        settings = CalibrationSettings(
            batch_size=8,
            micro_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            k=20,
            max_length=64,
            gradient_checkpointing=checkpointing,
        )
        model = tiny_adapter()
        history = lg.calibrate(model, tokenizer, tiny_rows(20), GATES, settings).history
        results.append(([r["loss"] for r in history if "loss" in r], lg.gate_parameters(model)))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("how", [{"packing": True}, {"group_by_length": True}], ids=["packed", "grouped"])
def test_packing_and_grouping_change_nothing(tokenizer, how):
    whole = calibration(tokenizer, 8)
    assert_same(calibration(tokenizer, 8, **how), whole)
    assert_same(calibration(tokenizer, 2, gradient_checkpointing=True, **how), whole)


@pytest.mark.parametrize("how", [{"packing": True}, {"group_by_length": True}], ids=["packed", "grouped"])
def test_a_packed_or_grouped_run_resumes_bit_for_bit(tokenizer, how, tmp_path):
    settings = CalibrationSettings(
        batch_size=8, micro_batch_size=4, learning_rate=1e-2, logging_steps=1, k=20, max_length=64, save_steps=2, **how
    )
    values = []
    for resume in (False, True):
        model = tiny_adapter()
        lg.calibrate(model, tokenizer, tiny_rows(20), GATES, settings, run_folder=tmp_path, resume=resume)
        values.append({name: value.detach().clone() for name, value in lg.gate_parameters(model).items()})
        shutil.rmtree(tmp_path / "checkpoint-3")
    for name, value in values[0].items():
        assert torch.equal(value, values[1][name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="activations are offloaded from a GPU")
def test_activation_offload_changes_nothing(tokenizer):
    results = []
    for offload in (False, True):
        settings = CalibrationSettings(
            batch_size=8, micro_batch_size=4, learning_rate=1e-2, logging_steps=1, k=20, max_length=64,
            activation_offload=offload,
        )  # fmt: skip
        model = tiny_adapter().cuda()
        history = lg.calibrate(model, tokenizer, tiny_rows(20), GATES, settings).history
        results.append(([r["loss"] for r in history if "loss" in r], lg.gate_parameters(model)))
    assert_same(results[1], results[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="loss scaling needs CUDA")
def test_fp16_follows_fp32(tokenizer):
    losses = []
    for precision in ("fp32", "fp16"):
        settings = CalibrationSettings(
            batch_size=8, micro_batch_size=4, learning_rate=1e-2, logging_steps=1, k=20, max_length=64,
            precision=precision,
        )  # fmt: skip
        model = tiny_adapter().cuda()
        history = lg.calibrate(model, tokenizer, tiny_rows(20), GATES, settings).history
        losses.append([r["loss"] for r in history if "loss" in r])
        assert all(value.dtype == torch.float32 for value in lg.gate_parameters(model).values())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def stage_one(tokenizer, objective, micro, **changes):
    """(losses, trained values) of two steps, the last of which has fewer rows."""
    settings = StageOneSettings(
        objective=objective, batch_size=8, micro_batch_size=micro, learning_rate=5e-3, logging_steps=1, max_length=64, rank=4,
        **changes,
    )  # fmt: skip
    result = lg.train_adapter(tiny_base(), tokenizer, masked_rows(12), settings)
    trained = {name: value.detach() for name, value in result.model.named_parameters() if value.requires_grad}
    return [record["loss"] for record in result.history if "loss" in record], trained


def masked_rows(count):
    """Rows with a keep_mask over the response's words and its end of turn, which "mask" and "forgetting" read."""
    draw = random.Random(5)
    rows = tiny_rows(count)
    for row in rows:
        words = row["messages"][1]["content"].split()
        row["keep_mask"] = [int(draw.random() < 0.7) for _ in range(len(words) + 1)]
    return rows


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name not in ("entropy", "interleaved")])
def test_stage_one_does_not_depend_on_how_a_batch_is_cut(tokenizer, objective):
    whole = stage_one(tokenizer, objective, 8)
    assert len(whole[0]) == 2
    reads_the_batch = objective in ("talr", "eksft", "forgetting")
    for micro in (1, 2) if reads_the_batch else (2,):
        assert_same(stage_one(tokenizer, objective, micro), whole)
    assert_same(stage_one(tokenizer, objective, 4, packing=True), whole)


def test_padding_changes_nothing(tokenizer):
    from loragate.data import encode_rows

    encoded = list(encode_rows(tiny_rows(5), tokenizer, max_length=64))
    model = lg.attach_gates(tiny_adapter(), GATES)
    with statistics_forward(model), torch.no_grad():

        def entropies(rows):
            batch = Collator(0)(rows)
            stats = model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                labels=batch["labels"],
                statistics=StatisticsRequest(20),
            )
            return stats.topk_entropy[stats.mask]

        alone = torch.cat([entropies([row]) for row in encoded])
        together = entropies(encoded)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_chunk_size_changes_nothing(tokenizer, monkeypatch):
    whole = calibration(tokenizer, 8)
    monkeypatch.setattr(head, "_CHUNK_BYTES", 1)
    assert_same(calibration(tokenizer, 8), whole)


WORKER = """
import json, os, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
from tiny import tiny_adapter, tiny_rows, tiny_tokenizer
import loragate as lg
from loragate.training import CalibrationSettings
from accelerate import PartialState
settings = CalibrationSettings(
    batch_size=8, micro_batch_size=4, learning_rate=1e-2, logging_steps=1, k=20, max_length=64
)
model = tiny_adapter()
result = lg.calibrate(model, tiny_tokenizer(), tiny_rows(20), lg.GateConfig(-3, 2), settings)
state = PartialState()
assert state.num_processes == 2
if state.is_main_process:
    torch.save({{name: p.detach() for name, p in lg.gate_parameters(model).items()}}, {out!r} + "/gates.pt")
    json.dump([r for r in result.history], open({out!r} + "/history.json", "w"), default=float)
"""


@pytest.mark.slow("processes")
def test_two_processes_equal_one(tokenizer, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tests=str(Path(__file__).parents[1]), out=str(tmp_path)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script)]
    environment = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CI": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    history = json.loads((tmp_path / "history.json").read_text())
    losses = [record["loss"] for record in history if "loss" in record]
    one = calibration(tokenizer, 8)
    assert losses == pytest.approx(one[0], rel=1e-5)
    tokens = [record["response_tokens"] for record in history if "loss" in record]
    assert len(tokens) == 3
    both = torch.load(tmp_path / "gates.pt", weights_only=True)
    for name, parameter in one[1].items():
        torch.testing.assert_close(both[name], parameter, rtol=1e-3, atol=2e-6)
