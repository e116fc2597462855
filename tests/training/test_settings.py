"""Defaults of a training that follow the number of rows."""

from __future__ import annotations

import pytest

from loragate.errors import ConfigError
from loragate.training.settings import SMALLEST, STEPS, CalibrationSettings, StageOneSettings


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"),
    [
        (20_000, 128, 1),  # the paper's 157 steps
        (19_073, 128, 1),
        (10_000, 64, 1),
        (1_400, 8, 1),
        (600, 8, 2),
        (100, 8, 10),  # at most: 130 steps
    ],
)
def test_batch_and_epochs_follow_the_rows(rows, batch, epochs):
    asked = CalibrationSettings()
    fitted = asked.fitted(rows)
    assert (fitted.batch_size, fitted.epochs) == (batch, epochs)
    assert fitted.steps(rows) >= STEPS or epochs == CalibrationSettings.MOST_EPOCHS
    assert fitted.fitted(rows) == fitted
    assert StageOneSettings().fitted(rows).epochs == min(epochs, 3), "an adapter learns rows by heart"


def test_what_is_given_stays():
    assert StageOneSettings(batch_size=128).fitted(100) == StageOneSettings(batch_size=128, epochs=1)
    given = CalibrationSettings(epochs=2).fitted(700)
    assert (given.batch_size, given.epochs) == (8, 2), "88 steps a pass"
    assert StageOneSettings(max_steps=5).fitted(100) == StageOneSettings(batch_size=128, epochs=1, max_steps=5)
    assert CalibrationSettings(objective="reward").fitted(100).batch_size == 128
    with pytest.raises(ConfigError, match="128 is not a multiple of samples_per_prompt 5"):
        CalibrationSettings(objective="anchored", samples_per_prompt=5)


@pytest.mark.parametrize(("micro", "processes"), [(1, 1), (3, 1), (8, 4), (16, 16), (12, 2)])
def test_a_chosen_batch_can_be_dealt_out(micro, processes):
    for rows in (10, 500, 5_000, 30_000):
        fitted = StageOneSettings(micro_batch_size=micro).fitted(rows, processes)
        assert fitted.accumulation(processes) >= 1
        assert SMALLEST <= fitted.batch_size <= max(128, micro * processes)
