"""Settings that act only beside others: what would mislead is refused, and the table names settings that exist."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from loragate.effects import SETTING_CONDITIONS, SettingCondition, active_settings, require_effect
from loragate.errors import ConfigError

CLASSES = {
    "rows": ("loragate.training.settings", "RowsSettings"),
    "training": ("loragate.training.settings", "FineTuningSettings"),
    "task": ("loragate.evaluation.tasks.task", "Task"),
    "dataset": ("loragate.evaluation.tasks.task", "Dataset"),
    "calibrate": ("loragate.cli.calibrate", "CalibrateOptions"),
    "sweep": ("loragate.cli.sweep", "SweepOptions"),
    "eval": ("loragate.cli.evaluate", "EvalOptions"),
    "diagnose": ("loragate.cli.diagnose", "DiagnoseOptions"),
    "doctor": ("loragate.cli.doctor", "DoctorOptions"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    engine: str = "plain"
    dev_data: str = ""
    memory: float = 0.0
    dev_samples: int = 4
    shown: bool = True


@pytest.fixture(autouse=True)
def table(monkeypatch):
    rows = (
        SettingCondition(("memory",), "engine", ("vllm", "both")),
        SettingCondition(("dev_samples",), "dev_data"),
        SettingCondition(("shown",), "dev_data", (None,)),
    )
    monkeypatch.setitem(SETTING_CONDITIONS, "test", rows)


@pytest.mark.parametrize(
    ("options", "flags", "words"),
    [
        (Options(memory=0.5), False, "memory has no effect with engine plain, only with vllm and both"),
        (Options(dev_samples=2), True, "--dev-samples has no effect without --dev-data"),
        (Options(dev_data="f", shown=False), False, "shown has no effect with dev_data f; leave it out"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(options, flags, words):
    with pytest.raises(ConfigError, match=words):
        require_effect("test", options, flags=flags)


def test_what_acts_and_what_is_at_its_default_passes():
    require_effect("test", Options(engine="vllm", memory=0.5, dev_data="f", dev_samples=2))
    require_effect("test", Options())
    assert active_settings("test", ("memory", "other", "dev_samples"), engine="plain", dev_data="f") == (
        "other",
        "dev_samples",
    )


def test_every_row_names_settings_that_exist():
    assert set(SETTING_CONDITIONS) - {"test"} == set(CLASSES)
    for subject, (module, name) in CLASSES.items():
        fields = {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}
        assert {setting for row in SETTING_CONDITIONS[subject] for setting in row.settings} <= fields
