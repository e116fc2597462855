"""One table of settings that act only beside others."""

from __future__ import annotations

import dataclasses
import importlib

import pytest

from loragate.effects import TABLE, Acts, acting, require_effect
from loragate.errors import ConfigError

CLASSES = {
    "calibration": ("loragate.training.settings", "GateTrainingSettings"),
    "task": ("loragate.evaluation.tasks.task", "Task"),
    "dataset": ("loragate.evaluation.tasks.task", "Dataset"),
    "rows": ("loragate.cli.sft", "SftOptions"),
    "calibrate": ("loragate.cli.calibrate", "CalibrateOptions"),
    "probe grader": ("loragate.cli.calibrate", "CalibrateOptions"),
    "sweep": ("loragate.cli.sweep", "SweepOptions"),
    "eval": ("loragate.cli.evaluate", "EvalOptions"),
    "diagnose": ("loragate.cli.diagnose", "DiagnoseOptions"),
}


@dataclasses.dataclass(frozen=True)
class Options:
    engine: str = "plain"
    probe: str = ""
    memory: float = 0.0
    probe_samples: int = 4
    shown: bool = True
    range: str = "auto"
    shared: int = 1


@pytest.fixture(autouse=True)
def table(monkeypatch):
    rows = (
        Acts(("memory",), "engine", ("vllm", "both")),
        Acts(("probe_samples",), "probe"),
        Acts(("shown",), "probe", (None,)),
        Acts(("shared",), "engine", ("vllm",), refused=False),
    )
    monkeypatch.setitem(TABLE, "test", rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(memory=0.5), "memory has no effect with engine plain, only with vllm and both"),
        (Options(probe_samples=2), "probe_samples has no effect without probe"),
        (Options(probe="f", shown=False), "shown has no effect with probe f; leave it out"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        require_effect("test", options)


def test_flags_are_named_as_typed():
    with pytest.raises(ConfigError, match="--dev-samples has no effect without --dev-data"):
        require_effect("test", Options(probe_samples=2), flags=True)


def test_what_acts_and_what_is_at_its_default_passes():
    require_effect("test", Options(shared=3))
    require_effect("test", Options(engine="vllm", memory=0.5, probe="f", probe_samples=2))
    require_effect("test", Options(memory=0.5), engine="both")


def test_the_settings_that_act():
    names = ("memory", "shared", "range", "probe_samples")
    assert acting("test", names, engine="plain", probe="f") == ("range", "probe_samples")
    assert acting("test", names, engine="vllm", probe="") == ("memory", "shared", "range")


@pytest.mark.parametrize("subject", sorted(CLASSES))
def test_every_row_names_settings_that_exist(subject):
    module, name = CLASSES[subject]
    fields = {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}
    assert {setting for row in TABLE[subject] for setting in row.settings} <= fields


def test_every_subject_is_tied_to_its_class():
    assert set(TABLE) - {"test"} == set(CLASSES)
