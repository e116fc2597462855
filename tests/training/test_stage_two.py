"""Stage II through the trainer: the plain loop's trajectory, guards, logs, resume, interruption."""

import json
import os
import signal

import pytest
import torch

import loragate as lg
from loragate.data import load_rows
from loragate.errors import ConfigError, GateError, TrainingError
from loragate.gates import weights_checksum
from loragate.training import CalibrationSettings, calibration_rows
from loragate.training.reference import reference_loop
from tiny import tiny_adapter, tiny_rows

CONFIG = lg.GateConfig(-3, 2)
SETTINGS = CalibrationSettings(
    batch_size=8, micro_batch_size=4, learning_rate=1e-2, logging_steps=1, k=20, max_length=64, max_rows=0
)


def losses(result):
    return [record["loss"] for record in result.history if "loss" in record]


def gates(model):
    return {name: parameter.detach().clone() for name, parameter in lg.gate_parameters(model).items()}


@pytest.mark.parametrize("granularity", ["token", "global"])
def test_the_trainer_follows_the_plain_loop(tokenizer, rows, granularity):
    config = lg.GateConfig(-3, 2, granularity=granularity)
    trained = tiny_adapter()
    result = lg.calibrate(trained, tokenizer, rows, config, SETTINGS)
    plain = tiny_adapter()
    lg.attach_gates(plain, config)
    _, encoded = calibration_rows(load_rows(rows), tokenizer, SETTINGS)
    expected = reference_loop(plain, list(encoded), SETTINGS, tokenizer.pad_token_id)
    assert len(expected) == 3
    assert losses(result) == pytest.approx(expected, rel=1e-6)
    for name, parameter in gates(trained).items():
        torch.testing.assert_close(parameter, gates(plain)[name], rtol=1e-4, atol=1e-7)
    assert gates(plain).keys() == gates(trained).keys()


def test_entropy_falls_and_only_gates_change(tokenizer):
    model = tiny_adapter()
    before = weights_checksum(model.named_parameters())
    settings = CalibrationSettings(
        batch_size=16, micro_batch_size=16, learning_rate=0.05, max_steps=25, logging_steps=5, k=20, max_length=64
    )
    result = lg.calibrate(model, tokenizer, tiny_rows(16), CONFIG, settings)
    assert result.entropy_after < result.entropy_before - 0.005
    lg.detach_gates(model)
    assert weights_checksum(model.named_parameters()) == before
    assert result.steps == 25
    assert result.parameters == 14 * 33 + 2 * 16
    record = result.history[-2]
    for key in (
        "loss",
        "topk_entropy",
        "grad_norm",
        "gate_below_zero",
        "gate_zero_to_one",
        "gate_above_one",
        "gate_saturated",
    ):
        assert key in record, key
    assert record["loss"] == pytest.approx(record["topk_entropy"], rel=1e-4)
    shares = sum(result.gates_total[key] for key in ("below_zero", "zero_to_one", "above_one"))
    assert shares == pytest.approx(1)
    assert result.parity.at_one == 0
    assert result.parity.at_zero == 0
    assert 0 < result.parity.initial < 1e-3


def test_checksum_sees_a_single_bit():
    tensor = torch.randn(1000)
    before = weights_checksum([("a", tensor)])
    changed = tensor.clone()
    changed.view(torch.int32)[777] ^= 1
    assert weights_checksum([("a", changed)]) != before
    swapped = tensor.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert weights_checksum([("a", swapped)]) != before
    assert weights_checksum([("a", tensor.clone())]) == before


def test_a_changed_frozen_weight_is_noticed(tokenizer, rows):
    model = tiny_adapter()

    def sabotage(report):
        with torch.no_grad():
            model.base_model.model.model.norm.weight[0] += 1e-3

    with pytest.raises(TrainingError, match="frozen weight"):
        lg.calibrate(model, tokenizer, rows, CONFIG, SETTINGS, on_step=sabotage)
    with pytest.raises(GateError, match="carries no gates"):
        lg.gate_parameters(model)


def test_parity_failure_stops_before_training(tokenizer, rows):
    steps = []
    with pytest.raises(TrainingError, match="does not start at the adapter"):
        lg.calibrate(
            tiny_adapter(), tokenizer, rows, lg.GateConfig(-6, 3, init_scale=0.5), SETTINGS, on_step=steps.append
        )
    assert steps == []


def test_an_untrained_adapter_is_refused(tokenizer, rows):
    with pytest.raises(GateError, match="nothing to gate"):
        lg.calibrate(tiny_adapter(init_lora_weights=True), tokenizer, rows, CONFIG, SETTINGS)


def test_a_dead_first_gradient_is_refused(tokenizer, rows, monkeypatch):
    from loragate.training import stage_two

    monkeypatch.setattr(stage_two, "entropy_loss", lambda stats, context=None: stats.topk_entropy * 0.0)
    with pytest.raises(TrainingError, match="exactly zero"):
        lg.calibrate(tiny_adapter(), tokenizer, rows, CONFIG, SETTINGS)


def test_a_loss_that_is_not_finite_names_the_row(tokenizer, rows, monkeypatch):
    from loragate.training import stage_two

    seen = []

    def poisoned(stats, context=None):
        seen.append(1)
        factor = torch.ones_like(stats.topk_entropy)
        if len(seen) == 4:
            factor[2] = float("nan")
        return stats.topk_entropy * factor

    monkeypatch.setattr(stage_two, "entropy_loss", poisoned)
    model = tiny_adapter()
    with pytest.raises(TrainingError, match=r"not finite at step 2: row \d+\. Nothing was updated"):
        lg.calibrate(model, tokenizer, rows, CONFIG, SETTINGS)


def test_resume_continues_bit_for_bit(tokenizer, rows, tmp_path):
    settings = CalibrationSettings(
        batch_size=4, micro_batch_size=2, learning_rate=1e-2, logging_steps=1, save_steps=2, k=20, max_length=64
    )
    whole = tiny_adapter()
    complete = lg.calibrate(whole, tokenizer, rows, CONFIG, settings, run_folder=tmp_path / "whole")

    class Killed(Exception):
        pass

    def kill(report):
        if report.step == 5:
            raise Killed

    model = tiny_adapter()
    with pytest.raises(Killed):
        lg.calibrate(model, tokenizer, rows, CONFIG, settings, run_folder=tmp_path / "run", on_step=kill)
    checkpoints = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-2", "checkpoint-4"]
    assert not list((tmp_path / "run").rglob("model.safetensors")), "a checkpoint does not hold the model"
    with pytest.raises(TrainingError, match="continue it with --resume"):
        lg.calibrate(model, tokenizer, rows, CONFIG, settings, run_folder=tmp_path / "run")
    with pytest.raises(TrainingError, match=r"another run: 'gate' was"):
        lg.calibrate(model, tokenizer, rows, lg.GateConfig(-1, 2), settings, run_folder=tmp_path / "run", resume=True)
    resumed = lg.calibrate(model, tokenizer, rows, CONFIG, settings, run_folder=tmp_path / "run", resume=True)
    assert resumed.steps == complete.steps == 6
    for name, parameter in gates(model).items():
        assert torch.equal(parameter, gates(whole)[name]), name
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in logged if "loss" in record] == [1, 2, 3, 4, 5, 6]


def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tokenizer, rows, tmp_path):
    def interrupt(report):
        if report.step == 2 and not report.values:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    model = tiny_adapter()
    settings = CalibrationSettings(batch_size=4, micro_batch_size=4, learning_rate=1e-2, k=20, max_length=64)
    with pytest.raises(TrainingError, match=r"stopped by Ctrl-C at step [23] of 6; .*--resume"):
        lg.calibrate(model, tokenizer, rows, CONFIG, settings, run_folder=tmp_path / "run", on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    result = lg.calibrate(model, tokenizer, rows, CONFIG, settings, run_folder=tmp_path / "run", resume=True)
    assert result.steps == 6


def test_tensorboard_gets_the_same_record(tokenizer, rows, tmp_path):
    settings = CalibrationSettings(
        batch_size=8, micro_batch_size=8, logging_steps=1, k=20, max_length=64, report_to="tensorboard"
    )
    lg.calibrate(tiny_adapter(), tokenizer, rows, CONFIG, settings, run_folder=tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = next((tmp_path / "run").rglob("events.out.tfevents*"))
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    assert {"train/topk_entropy", "train/gate_below_zero", "train/loss"} <= set(accumulator.Tags()["scalars"])


def test_settings_are_checked():
    for options, words in [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"learning_rate": -1.0}, "learning_rate must be a positive number"),
        ({"schedule": "cosinus"}, "schedule must be one of"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"k": 1}, "k must be at least 2"),
        ({"warmup": 1.0}, "share of the steps"),
    ]:
        with pytest.raises(ConfigError, match=words):
            CalibrationSettings(**options)
    with pytest.raises(ConfigError, match="not a multiple of micro_batch_size"):
        CalibrationSettings(batch_size=10, micro_batch_size=4).accumulation(1)


def test_the_model_answers_as_before_after_calibration(tokenizer, rows, token_ids):
    model = tiny_adapter()
    forward = model.get_base_model().__dict__.get("forward")
    lg.calibrate(model, tokenizer, rows, CONFIG, SETTINGS)
    assert model.get_base_model().__dict__.get("forward") is forward
    assert model(token_ids).logits.shape == (3, 11, 160)


def test_bf16_autocast_keeps_gates_in_fp32(tokenizer, rows):
    settings = CalibrationSettings(
        batch_size=8, micro_batch_size=8, learning_rate=1e-2, k=20, max_length=64, precision="bf16", logging_steps=1
    )
    model = tiny_adapter()
    low = lg.calibrate(model, tokenizer, rows, CONFIG, settings)
    assert {parameter.dtype for parameter in lg.gate_parameters(model).values()} == {torch.float32}
    exact = lg.calibrate(
        tiny_adapter(),
        tokenizer,
        rows,
        CONFIG,
        CalibrationSettings(batch_size=8, micro_batch_size=8, learning_rate=1e-2, k=20, max_length=64, logging_steps=1),
    )
    assert losses(low) == pytest.approx(losses(exact), rel=0.02)
