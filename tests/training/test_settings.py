"""Defaults of a training that follow the number of rows, and settings that cannot be."""

from __future__ import annotations

import pytest

from loragate.errors import ConfigError
from loragate.training.settings import MIN_BATCH_SIZE, TARGET_STEPS, FineTuningSettings, GateTrainingSettings


@pytest.mark.parametrize(
    ("rows", "batch", "num_train_epochs"),
    [
        (20_000, 128, 1),  # the paper's 157 steps
        (19_073, 128, 1),
        (10_000, 64, 1),
        (1_400, 8, 1),
        (600, 8, 2),
        (100, 8, 10),  # at most: 130 steps
    ],
)
def test_batch_and_epochs_follow_the_rows(rows, batch, num_train_epochs):
    asked = GateTrainingSettings()
    fitted = asked.fitted(rows)
    assert (fitted.batch_size, fitted.num_train_epochs) == (batch, num_train_epochs)
    assert fitted.steps(rows) >= TARGET_STEPS or num_train_epochs == GateTrainingSettings.MAX_EPOCHS
    assert fitted.fitted(rows) == fitted
    assert FineTuningSettings().fitted(rows).num_train_epochs == min(num_train_epochs, 3), (
        "an adapter learns rows by heart"
    )


def test_what_is_given_stays():
    whole = {"batch_size": 128, "per_device_train_batch_size": 8, "num_train_epochs": 1}
    assert FineTuningSettings(batch_size=128).fitted(100) == FineTuningSettings(**whole)
    given = GateTrainingSettings(num_train_epochs=2).fitted(700)
    assert (given.batch_size, given.num_train_epochs) == (8, 2), "88 steps a pass"
    assert FineTuningSettings(max_steps=5).fitted(100) == FineTuningSettings(**whole, max_steps=5)


@pytest.mark.parametrize(
    ("batch", "processes", "per_device"),
    [(4, 1, 4), (2, 1, 2), (1, 1, 1), (12, 1, 6), (20, 1, 5), (7, 1, 7), (128, 1, 8), (16, 2, 8), (8, 4, 2), (6, 2, 3)],
)
def test_a_forward_pass_follows_a_smaller_batch(batch, processes, per_device):
    fitted = GateTrainingSettings(batch_size=batch).fitted(100, processes)
    assert (fitted.batch_size, fitted.per_device_train_batch_size) == (batch, per_device)
    assert GateTrainingSettings(batch_size=batch).accumulation(processes) == batch // (per_device * processes)
    with pytest.raises(ConfigError, match="not a multiple of per_device_train_batch_size 8 × 1 process"):
        GateTrainingSettings(batch_size=12, per_device_train_batch_size=8).accumulation(1)  # what is asked for is kept
    with pytest.raises(
        ConfigError, match="batch_size 3 is not a multiple of per_device_train_batch_size 1 × 2 processes"
    ):
        GateTrainingSettings(batch_size=3).accumulation(2)


@pytest.mark.parametrize(("micro", "processes"), [(1, 1), (3, 1), (8, 4), (16, 16), (12, 2)])
def test_a_chosen_batch_can_be_dealt_out(micro, processes):
    for rows in (10, 500, 5_000, 30_000):
        fitted = FineTuningSettings(per_device_train_batch_size=micro).fitted(rows, processes)
        assert fitted.accumulation(processes) >= 1
        assert MIN_BATCH_SIZE <= fitted.batch_size <= max(128, micro * processes)


@pytest.mark.parametrize("kind", [FineTuningSettings, GateTrainingSettings])
def test_the_steps_do_not_depend_on_the_number_of_processes(kind):
    for rows in (10, 500, 1_000, 5_000, 30_000):
        alone = kind().fitted(rows)
        for processes in (2, 4, 8):
            fitted = kind().fitted(rows, processes)
            assert (fitted.batch_size, fitted.num_train_epochs) == (alone.batch_size, alone.num_train_epochs)
            assert fitted.batch_size % (processes * fitted.per_device_train_batch_size) == 0
    assert kind().fitted(500, 3).batch_size == -(-kind().fitted(500).batch_size // 3) * 3  # 9 of 8 rows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "entropi"}, "did you mean 'entropy'"),
        ({"batch_size": -1}, "batch_size must be at least 0"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0"),
        ({"lr_scheduler_type": "cosinus"}, "lr_scheduler_type must be one of"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"k": 1}, "k must be at least 2"),
        ({"adam_beta1": 1.5}, "adam_beta1 must be below 1"),
        ({"warmup_ratio": 1.0}, "warmup_ratio must be below 1"),
        ({"save_total_limit": -1}, "save_total_limit must be at least 0"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**32}, "seed must be below 4294967296"),
        (
            {"warmup_ratio": 0.1, "lr_scheduler_type": "constant"},
            "warmup_ratio has no effect with lr_scheduler_type constant, only with cosine and linear and constant_with_warmup",
        ),
    ],
)
def test_settings_of_gates_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        GateTrainingSettings(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "profti"}, "did you mean 'profit'"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"alpha": 0}, "alpha must be above 0"),
        ({"target_modules": []}, "target_modules"),
        ({"dropout": 1.0}, "dropout must be below 1"),
        ({"dropout": -0.1}, "dropout must be at least 0"),
        ({"warmup_ratio": 0.9, "lr_scheduler_type": "constant"}, "warmup_ratio has no effect"),
    ],
)
def test_settings_of_adapters_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        FineTuningSettings(**options)


def test_a_constant_schedule_has_no_warm_up_of_its_own():
    assert FineTuningSettings(lr_scheduler_type="constant").warmup_ratio == 0
    assert FineTuningSettings(lr_scheduler_type="constant", warmup_ratio=0.0).warmup_ratio == 0
    assert FineTuningSettings(lr_scheduler_type="constant_with_warmup").warmup_ratio == 0.1
