"""A training that will not fit is told before its first step, with what helps."""

import json
import logging
import re

import numpy as np
import pytest
import torch

import loragate as lg
from loragate.losses.objectives import objectives
from loragate.training import FineTuningSettings, GateTrainingSettings
from loragate.training.memory import free_memory
from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

STEP = {"batch_size": 8, "per_device_train_batch_size": 4, "max_steps": 1, "max_length": 64}


def warned(caplog, monkeypatch, free: int, stage: str, **more) -> str:
    """The warning of a step on a machine with so many bytes; empty for none."""
    monkeypatch.setattr("loragate.training.memory.free_memory", lambda device: free)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "loragate"):
        if stage == "sft":
            lg.train_adapter(tiny_base(), tiny_tokenizer(), tiny_rows(8), FineTuningSettings(**STEP, rank=2, **more))
        else:
            settings = GateTrainingSettings(**STEP, k=8, **more)
            lg.train_gates(tiny_adapter(), tiny_tokenizer(), tiny_rows(8), lg.GateConfig(-1, 2), settings)
    return "".join(record.getMessage() for record in caplog.records if "free" in record.getMessage())


@pytest.mark.parametrize("stage", ["sft", "calibrate"])
def test_a_pass_that_does_not_fit_is_told_with_what_helps(caplog, monkeypatch, stage):
    assert warned(caplog, monkeypatch, 2**34, stage) == ""
    text = warned(caplog, monkeypatch, 0, stage)
    longest = re.search(r"a pass of 4 rows of (\d+) tokens, the longest, needs about .* GiB beside the model", text)
    assert longest
    assert 8 < int(longest[1]) <= 64
    assert "What helps: gradient checkpointing (0.0 GiB), fewer rows in a pass (per_device_train_batch_size)" in text
    recomputed = warned(caplog, monkeypatch, 0, stage, gradient_checkpointing=True)
    assert "What helps: fewer rows in a pass" in recomputed  # what is on already is not advised


def test_the_need_is_that_of_the_formula_beside_the_base(monkeypatch):
    from loragate.training import memory

    told = []
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    monkeypatch.setattr(memory.logger, "warning", lambda text, *values: told.append(values))
    tokens = {}
    for rows in (1, 8):
        settings = FineTuningSettings(**{**STEP, "batch_size": 8, "per_device_train_batch_size": rows}, rank=2)
        lg.train_adapter(tiny_base(hidden_size=64), tiny_tokenizer(), tiny_rows(8), settings)
        tokens[rows] = told[-1][2]
    assert tokens[8] > 2 * tokens[1] > 0


def test_a_reference_of_gates_is_counted():
    """An objective with a KL to the base, given to the training of gates as it is to that of an adapter."""
    from loragate.training import memory

    base, how = tiny_adapter().get_base_model(), {"autocast": False, "checkpointing": False, "k": 8}
    own, kl = (memory.pass_memory(base, 4, 64, one, gates=True, **how) for one in (None, objectives["eksft"]))
    states = 4 * 64 * 0.75 * 4 * base.config.hidden_size  # of the reference, at the responses
    assert kl - own > states


def test_what_is_free_is_read_off_the_machine():
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50


def test_a_model_that_tells_too_little_is_trained_without_an_estimate(caplog, monkeypatch):
    def nothing(*given, **named):
        raise AttributeError("no hidden_size")

    monkeypatch.setattr("loragate.training.memory.estimate", nothing)
    assert warned(caplog, monkeypatch, 0, "sft") == ""


def trained(folder, stage, free, monkeypatch, caplog, resume=False, **more):
    """Where so many bytes are free: rows of a pass on record, losses of the steps, and what was said of memory."""
    from loragate.training import memory

    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    settings = {"batch_size": 8, "max_length": 64, "logging_steps": 1, "save_steps": 1, "seed": 0, **more}
    caplog.clear()
    given = tiny_tokenizer(), tiny_rows(16)
    with caplog.at_level(logging.WARNING, "loragate"):
        if stage == "sft":
            asked = FineTuningSettings(**settings, rank=2)
            found = lg.train_adapter(tiny_base(), *given, asked, run_folder=folder, resume=resume)
        else:
            asked = GateTrainingSettings(**settings, k=8)
            found = lg.train_gates(
                tiny_adapter(), *given, lg.GateConfig(-1, 2), asked, run_folder=folder, resume=resume
            )
    said = [record.getMessage() for record in caplog.records if "are free" in record.getMessage()]
    rows = json.loads((folder / "run.json").read_text())["notes"]["per_device_train_batch_size"]
    return rows, [record["loss"] for record in found.history if "loss" in record], said


@pytest.mark.parametrize("stage", ["sft", "calibrate"])
def test_passes_are_made_to_fit_and_change_no_step(tmp_path, monkeypatch, caplog, stage):
    rows, losses, said = trained(tmp_path / "ample", stage, 2**40, monkeypatch, caplog)
    assert (rows, said) == (8, [])
    asked = {"per_device_train_batch_size": 4}
    rows, _, (text,) = trained(tmp_path / "asked", stage, 0, monkeypatch, caplog, **asked)
    assert (rows, "a pass of 4 rows" in text) == (4, True)  # who sets it gets it, and is told
    rows, short_of, said = trained(tmp_path / "short", stage, 0, monkeypatch, caplog)
    assert rows == 1
    assert "passes of 1 of the 8 rows of a step in place of 8" in said[0]
    assert "a pass of 1 rows" in said[1]  # and even that may not fit
    assert "fewer rows" not in said[1]
    assert short_of == pytest.approx(losses, abs=1e-5)
    # a run that goes on keeps its passes, whatever is free now
    rows, again, said = trained(tmp_path / "short", stage, 2**40, monkeypatch, caplog, resume=True)
    assert (rows, said) == (1, [])
    assert again[-1:] == short_of[-1:]


def test_where_nothing_is_known_of_memory_passes_stay(monkeypatch):
    from loragate.training import memory

    def unknown(device):
        raise AssertionError("of a device that tells nothing")

    monkeypatch.setattr(memory, "free_memory", unknown)
    asked = GateTrainingSettings(batch_size=24)
    fitted, lengths, base = asked.fitted(100), np.full(100, 64), tiny_adapter().get_base_model().to("meta")
    assert memory.fit_passes(asked, lengths, base, None, 8) == fitted
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # the model is sharded later
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert memory.fit_passes(asked, lengths, tiny_adapter().get_base_model(), None, 8) == fitted


def test_the_largest_pass_that_fits_is_taken(monkeypatch):
    from loragate.training import memory

    model = tiny_adapter()
    need = {
        rows: memory.pass_memory(
            model.get_base_model(),
            rows,
            64,
            None,
            gates=True,
            autocast=False,
            checkpointing=False,
            k=8,
            passes=24 // rows,
        )
        for rows in (8, 6, 4, 3)
    }
    monkeypatch.setattr(memory, "free_memory", lambda device: (need[6] + need[4]) / 2)
    asked = GateTrainingSettings(batch_size=24)
    assert asked.fitted(100).per_device_train_batch_size == 8
    given = np.full(100, 64), model.get_base_model(), None, 8
    assert memory.fit_passes(asked, *given).per_device_train_batch_size == 4
    assert memory.fit_passes(asked, *given, recorded=8).per_device_train_batch_size == 8
    asked = GateTrainingSettings(batch_size=24, per_device_train_batch_size=8)
    assert memory.fit_passes(asked, *given).per_device_train_batch_size == 8
