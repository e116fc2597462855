"""A training that will not fit is told before its first step, with what helps."""

import logging
import re

import pytest
import torch

import loragate as lg
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


def test_what_is_free_is_read_off_the_machine():
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50


def test_a_model_that_tells_too_little_is_trained_without_an_estimate(caplog, monkeypatch):
    def nothing(*given, **named):
        raise AttributeError("no hidden_size")

    monkeypatch.setattr("loragate.training.memory.estimate", nothing)
    assert warned(caplog, monkeypatch, 0, "sft") == ""
