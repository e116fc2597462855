"""The traced footprint against the allocator's own record of a real training step, and its straight lines."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loragate.analysis.plan_trace import Footprint, Tracer, Workload, trace_step
from tiny import tiny_base

MORE = pytest.mark.slow("products")
PLAIN = Workload("calibrate", 64, dtype=torch.float32, autocast="", device="cpu", k=20)


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "benchmarks" / "plan_memory.py"
    spec = importlib.util.spec_from_file_location("plan_memory_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


SMALL = (("vocab_size", 1024), ("hidden_size", 64), ("intermediate_size", 160), ("num_hidden_layers", 3))


@pytest.mark.parametrize(
    ("family", "stage", "changes"),
    [
        pytest.param("qwen2", "sft", {}, marks=MORE),
        ("llama", "calibrate", {"checkpointing": True}),
        ("mistral", "calibrate", {"padded": True, "passes": 2}),
        pytest.param("qwen3", "sft", {"precision": "bf16", "dtype": "bfloat16"}, marks=MORE),
    ],
    ids=["sft", "recompute", "padded and accumulated", "bf16"],
)
def test_the_plan_meets_the_measured_peak(script, family, stage, changes):
    case = script.Case("one", family, stage, sequence=128, rows=2, shape=SMALL, **changes)
    found = script.compare(case)
    assert found["ratio"] == pytest.approx(1, abs=0.15)
    assert found["activations_ratio"] == pytest.approx(1, abs=0.15)
    assert found["held_ratio"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=MORE), True])
def test_four_small_traces_give_the_large_one(checkpointing):
    config = tiny_base(num_hidden_layers=5).config
    workload = replace(PLAIN, checkpointing=checkpointing, padded=True)
    line = Tracer(config).footprint(replace(workload, rows=6))
    whole = trace_step(config, replace(workload, rows=6), 5)
    for name in Footprint._fields:
        assert getattr(line, name) == pytest.approx(getattr(whole, name), rel=0.03), name


def test_checkpointing_keeps_less_and_a_mask_keeps_more():
    config = tiny_base(num_hidden_layers=4, hidden_size=64).config

    def saved(**changes):
        return trace_step(config, replace(PLAIN, rows=2, **changes), 4).saved

    assert saved(checkpointing=True) < saved() / 2
    padded = saved(device="cuda", padded=True)
    # the mask in the scores' dtype, in each layer, and keys and values repeated for all heads
    assert padded - saved(device="cuda") >= 4 * 2 * 64 * 64 * 4


def test_accumulated_gradients_are_not_counted_again():
    config = tiny_base().config
    first = trace_step(config, replace(PLAIN, stage="sft", rank=64), 2)
    later = trace_step(config, replace(PLAIN, stage="sft", rank=64, accumulating=True), 2)
    assert later.backward <= first.backward
    assert later.saved == first.saved
