"""Runs that must agree (fp32): how a batch is cut, padded or chunked changes nothing; processes: training/test_distributed.py."""

import random
import shutil

import pytest
import torch

import loragate as lg
from loragate.data import Collator, encode_rows
from loragate.losses import StatisticsRequest, projection
from loragate.training import FineTuningSettings, GateTrainingSettings
from loragate.training.model_state import statistics_forward
from loragate.training.settings import OBJECTIVES
from tiny import gate_values, same, tiny_adapter, tiny_base, tiny_rows

GATES = lg.GateConfig(-3, 2)


SETTINGS = {"batch_size": 8, "learning_rate": 1e-2, "logging_steps": 1, "k": 20, "max_length": 64}


def calibration(tokenizer, micro, device="cpu", run=None, **changes):
    """(losses, gates) of a calibration in three steps; `run` are arguments of `lg.train_gates`."""
    settings = GateTrainingSettings(**SETTINGS, per_device_train_batch_size=micro, **changes)
    model = tiny_adapter().to(device)
    result = lg.train_gates(model, tokenizer, tiny_rows(20), GATES, settings, **(run or {}))
    return [record["loss"] for record in result.history if "loss" in record], gate_values(model)


def assert_same(left, right):
    assert left[0] == pytest.approx(right[0], rel=2e-6)
    torch.testing.assert_close(left[1], right[1], rtol=1e-3, atol=2e-6)


def test_calibration_does_not_depend_on_the_micro_batch(tokenizer):
    whole = calibration(tokenizer, 8)
    assert len(whole[0]) == 3, "the last batch is smaller than the others"
    for micro in (4, 1):
        assert_same(calibration(tokenizer, micro), whole)


def test_gradient_checkpointing_changes_nothing(tokenizer):
    assert_same(calibration(tokenizer, 4, gradient_checkpointing=True), calibration(tokenizer, 4))


@pytest.mark.parametrize("how", [{"packing": True}, {"group_by_length": True}], ids=["packed", "grouped"])
def test_packing_and_grouping_change_nothing(tokenizer, how):
    whole = calibration(tokenizer, 8)
    assert_same(calibration(tokenizer, 8, **how), whole)
    assert_same(calibration(tokenizer, 2, gradient_checkpointing=True, **how), whole)


@pytest.mark.parametrize("how", [{"packing": True}, {"group_by_length": True}], ids=["packed", "grouped"])
def test_a_packed_or_grouped_run_resumes_bit_for_bit(tokenizer, how, tmp_path):
    values = []
    for resume in (False, True):
        run = {"run_folder": tmp_path, "resume": resume}
        values.append(calibration(tokenizer, 4, run=run, save_steps=2, **how)[1])
        shutil.rmtree(tmp_path / "checkpoint-3")
    assert same(*values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="loss scaling needs CUDA")
def test_fp16_follows_fp32(tokenizer):
    whole, half = (calibration(tokenizer, 4, "cuda", precision=precision) for precision in ("fp32", "fp16"))
    assert half[0] == pytest.approx(whole[0], rel=2e-2)
    assert {value.dtype for value in half[1].values()} == {torch.float32}


def stage_one(tokenizer, objective, micro, **changes):
    """(losses, trained values) of two steps, the last of which has fewer rows."""
    settings = FineTuningSettings(
        objective=objective, batch_size=8, per_device_train_batch_size=micro, learning_rate=5e-3,
        logging_steps=1, max_length=64, rank=4, **changes,
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
    options = (
        {"objective_options": {"threshold": 1e-3}} if objective == "profit" else {}
    )  # an untrained base is never sure
    whole = stage_one(tokenizer, objective, 8, **options)
    assert len(whole[0]) == 2
    reads_the_batch = objective in ("talr", "eksft", "forgetting")
    for micro in (1, 2) if reads_the_batch else (2,):
        assert_same(stage_one(tokenizer, objective, micro, **options), whole)
    assert_same(stage_one(tokenizer, objective, 4, packing=True, **options), whole)


@pytest.mark.parametrize(
    ("objective", "micro", "dropout", "passes"),
    [
        ("talr", 8, 0.0, 1),
        ("talr", 8, 0.1, 2),
        ("talr", 4, 0.0, 4),
        ("eksft", 8, 0.0, 2),
        ("eksft", 8, 0.1, 3),
        ("eksft", 4, 0.0, 6),
    ],
)
def test_no_forward_pass_is_made_that_another_one_has_made(tokenizer, objective, micro, dropout, passes):
    """Of a step: the training's; what the batch says, where one pass is not all of it or drops; the reference once."""
    counts = []
    for steps in (1, 3):  # the passes that verify a model come on top
        base, made = tiny_base(), []
        base.model.register_forward_pre_hook(lambda *_, made=made: made.append(1))
        settings = FineTuningSettings(
            objective=objective,
            batch_size=8,
            per_device_train_batch_size=micro,
            max_steps=steps,
            max_length=64,
            dropout=dropout,
        )
        lg.train_adapter(base, tokenizer, tiny_rows(24), settings)
        counts.append(len(made))
    assert counts[1] - counts[0] == 2 * passes


def test_padding_changes_nothing(tokenizer):
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
    monkeypatch.setattr(projection, "TILE_BYTES", 1)
    assert_same(calibration(tokenizer, 8), whole)
