"""A model on the meta device, counted, and the peak of a step: against real models and a real training step."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import loragate as lg
from loragate.analysis.counts import base_dtype, build_on_meta, count_parameters
from loragate.analysis.plan_step import Step, layer_period, with_layers
from loragate.analysis.settings import Request
from loragate.errors import ConfigError, LoragateError
from loragate.models import read_config
from loragate.training import model_state
from tiny import scripts_of, tiny_adapter, tiny_base

LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


def counted(config, **options):
    return count_parameters(build_on_meta(config, **options), config)


@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_the_real_model(tied):
    real = tiny_adapter(base=tiny_base(tie_word_embeddings=tied))
    own = sum(p.numel() for name, p in real.named_parameters() if "lora_" not in name)
    lora = sum(p.numel() for name, p in real.named_parameters() if "lora_" in name)
    linears = [module.base_layer.weight for name, module in real.named_modules() if hasattr(module, "base_layer")]
    lg.attach_gates(real, lg.GateConfig(-1, 2))
    found = counted(real.config, stage="calibrate", rank=4)
    assert (found.base, found.lora) == (own, lora)
    assert found.gates == sum(p.numel() for p in lg.gate_parameters(real).values())
    assert found.linear == found.active == sum(weight.numel() for weight in linears)
    assert found.head == 160 * 32
    assert found.root + 2 * found.block == own
    assert counted(real.config, stage="sft", rank=4).gates == 0


def test_blocks_are_those_that_the_trainer_shards():
    config = tiny_base().config
    model = build_on_meta(config, stage="sft", rank=4)
    before = count_parameters(model, config)
    model.get_base_model().model.layers[0].experts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(9))
    assert count_parameters(model, config) == before
    model.get_base_model().model.layers = torch.nn.Sequential()
    found = count_parameters(model, config)
    assert (found.block, found.root) == (0, found.base)


def test_experts_are_counted_once_and_used_in_part():
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    found = counted(AutoConfig.for_model("mixtral", vocab_size=64, **shape, **heads), stage="sft", rank=2)
    experts = 2 * 8 * 3 * 16 * 24
    assert found.linear - found.active == experts - experts * 2 // 8


def test_a_70b_model_from_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    for name in (str(path), str(tmp_path)):
        config = read_config(name)
        assert base_dtype(config) == torch.bfloat16
    assert base_dtype(config, "float32") == torch.float32
    found = counted(config, stage="calibrate")
    assert found.base == 70_553_706_496
    assert found.gates == 80 * (6 * (8192 + 1) + 28672 + 1)
    assert found.lora == 80 * 16 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{]", r"a\.json cannot be read"),
        ("a.json", '{"model_type": "lama"}', r"a\.json cannot be read: .*lama"),
        ("", "", r"cannot be read: .*config\.json"),
        ("nothing.json", "", "does not exist"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, name, content, words):
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_config(str(tmp_path / name))


def test_what_cannot_be_fetched_or_planned_is_refused():
    with pytest.raises(LoragateError, match="owner/name@v1 cannot be read: We could"):
        read_config("owner/name@v1")
    with pytest.raises(ConfigError, match="cannot be planned"):
        build_on_meta(tiny_base().config, stage="sft", targets="nothing_of_the_kind")


def test_layers_can_be_cut_in_whole_periods():
    config = tiny_base().config
    assert layer_period(config) == 1
    config.layer_types = ["sliding_attention", "full_attention"] * 3
    config.num_hidden_layers = 6
    assert layer_period(config) == 2
    cut = with_layers(config, 4)
    assert (cut.num_hidden_layers, len(cut.layer_types), len(config.layer_types)) == (4, 4, 6)


MORE = pytest.mark.slow("products")
SMALL = (("vocab_size", 1024), ("hidden_size", 64), ("intermediate_size", 160), ("num_hidden_layers", 3))


@pytest.fixture(scope="module")
def script():
    with scripts_of(Path(__file__).parents[2] / "benchmarks") as load:
        yield load("plan_memory")


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
def test_the_plan_meets_the_measured_peak(script, family, stage, changes, monkeypatch):
    # the plan is of a GPU; short rows in bf16 on a CPU take plain attention, which keeps more
    monkeypatch.setattr(model_state, "SHORT_ROW", 0)
    case = script.Case("one", family, stage, sequence=128, rows=2, shape=SMALL, **changes)
    found = script.compare(case)
    assert found["ratio"] == pytest.approx(1, abs=0.15)
    assert found["activations_ratio"] == pytest.approx(1, abs=0.15)
    assert found["held_ratio"] == pytest.approx(1, abs=0.05)


PLAIN = Request("", seq=64, micro_batch=2, k=20, dtype="float32", precision="fp32", gradient_checkpointing="no")


@pytest.mark.parametrize(("stage", "checkpointing"), [("sft", "no"), ("calibrate", "yes")])
def test_two_small_traces_give_the_large_one(stage, checkpointing):
    """Of wide layers, whose own peak is above the head's; the first layer of a model has a lower one."""
    config = AutoConfig.for_model(**{**LLAMA_70B, "num_hidden_layers": 6})
    way = replace(
        PLAIN, stage=stage, seq=1024, dtype="bfloat16", precision="bf16", gradient_checkpointing=checkpointing
    )
    step = Step(config, replace(way, micro_batch=1), padded=False)
    assert step.peak() == pytest.approx(step.trace(6), rel=0.005)


def test_checkpointing_keeps_less_and_a_mask_keeps_more():
    config = tiny_base(num_hidden_layers=4, hidden_size=64).config

    def per_layer(padded=False, **changes):
        step = Step(config, replace(PLAIN, **changes), padded)
        return (step.trace(4) - step.trace(2)) / 2

    plain = per_layer()
    assert per_layer(gradient_checkpointing="yes") < plain / 2
    # the mask in the scores' dtype, and keys and values repeated for all heads
    assert per_layer(padded=True) - plain >= 2 * 64 * 64 * 4
