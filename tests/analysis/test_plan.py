"""Memory by strategy, time, the choice, and what is said when nothing fits."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loragate.analysis.counts import build_on_meta, count_parameters
from loragate.analysis.plan import gpu_memory, launch_command, make_plan
from loragate.analysis.settings import GPUS, Request, find_gpu
from loragate.errors import ConfigError
from tiny import tiny_adapter, tiny_base

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)


@pytest.fixture(scope="module")
def parameters():
    config = tiny_base().config
    return count_parameters(build_on_meta(config, stage="sft", rank=4), config)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    config = tiny_base(hidden_size=64, num_hidden_layers=4, max_position_embeddings=4096).config
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps({**config.to_dict(), "torch_dtype": "bfloat16"}, default=str))
    return str(path)


@pytest.fixture
def by_formula(monkeypatch):
    """The peak of a pass without tracing it, which takes seconds: MiB a token, half of it where activations are recomputed."""

    def peak(step):
        return step.way.seq * step.way.micro_batch * 2**20 / (1 + step.way.recomputes)

    monkeypatch.setattr("loragate.analysis.plan_step.Step.peak", peak)


def memory(parameters, strategy="single", gpus=1, stage="sft", **options):
    way = Request("", stage, gpus, seq=64, batch=gpus, micro_batch=1, strategy=strategy, **options)
    return gpu_memory(parameters, 0.0, way, itemsize=2)


def test_sharding_divides_the_base_and_ddp_keeps_it_whole(parameters):
    alone, ddp = memory(parameters), memory(parameters, "ddp", 4)
    assert alone["weights"] == ddp["weights"] == 2 * parameters.base
    assert ddp["gradients"] - alone["gradients"] == 4 * parameters.lora, "DDP's buckets"
    fsdp = memory(parameters, "fsdp2", 4)
    assert fsdp["weights"] == alone["weights"] / 4
    assert fsdp["gathered"] == 2 * (parameters.root + 2 * parameters.block)
    assert fsdp["optimizer"] == alone["optimizer"] / 4 == 8 * parameters.lora / 4
    assert memory(parameters, "zero3", 4)["gathered"] == 2 * parameters.base, "all of it below the live limit"


def test_gates_stay_whole_where_the_base_is_sharded():
    config = tiny_base().config
    counts = count_parameters(build_on_meta(config, stage="calibrate", rank=4), config)
    fsdp = memory(counts, "fsdp2", 4, stage="calibrate")
    assert fsdp["optimizer"] == 8 * counts.gates
    assert fsdp["adapter"] == 4 * (counts.lora / 4 + counts.gates)


@pytest.mark.parametrize(("quantization", "per_weight"), [("none", 2), ("8bit", 1), ("4bit", NF4)])
def test_bytes_of_quantised_weights(parameters, quantization, per_weight):
    found = memory(parameters, quantization=quantization)
    assert found["weights"] == pytest.approx(2 * (parameters.base - parameters.linear) + per_weight * parameters.linear)
    assert (found["activations"] > 0) == (quantization != "none"), "a weight is widened to be multiplied"


def test_quantised_weights_are_those_that_bitsandbytes_makes():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = torch.randn(256, 512)
    packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    sizes = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert sizes == pytest.approx(weight.numel() * NF4, rel=0.01)


def test_flops_are_those_that_are_run(parameters):
    adapter = tiny_adapter().train()
    ids = torch.randint(3, 100, (1, 64))
    with FlopCounterMode(display=False) as counter:
        adapter(input_ids=ids, labels=ids).loss.backward()
    planned = parameters.flops("sft", 64, response_share=1.0)
    # attention's own kernel on the CPU is not counted by torch; the head's projection is
    attention = 4 * parameters.attention * 64
    assert counter.get_total_flops() / 64 == pytest.approx(planned - 3 * attention, rel=0.12)
    forward = 2 * parameters.active + attention + 2 * parameters.lora
    assert parameters.flops("sft", 64, response_share=1.0, recompute=True) - planned == forward
    # no gradient of the factors, and a sparse backward of the head; there are no gates here
    lighter = 2 * parameters.lora + 2 * parameters.head - 2 * 100 * parameters.hidden
    assert planned - parameters.flops("calibrate", 64, response_share=1.0) == lighter


@pytest.mark.usefixtures("by_formula")
def test_time_follows_flops_gpus_and_the_link(model_file):
    request = Request(model_file, stage="sft", seq=64, batch=16, micro_batch=2, rows=100, gpu_memory="h100")
    request = replace(request, quantization="none", gradient_checkpointing="no")

    def planned(**changes):
        plan = make_plan(replace(request, **changes))
        return plan, plan.options[0]

    plan, alone = planned()
    flops = plan.parameters.flops("sft", 64) * 16 * 64
    assert alone.step == pytest.approx(flops / (989e12 * 0.4))
    assert alone.seconds == pytest.approx(7 * alone.step)
    assert planned(gradient_checkpointing="yes")[1].step > alone.step
    plan, slow = planned(gpus=4, gpu_memory="l4", strategy="fsdp2")
    moved = 2 * 3 / 4 * (2 * 2 * plan.parameters.base + 4 * plan.parameters.lora) / 32e9
    assert slow.step == pytest.approx(moved), "a small model moves more than it computes: two passes, one update"


def test_gpus_by_name_and_by_size():
    assert find_gpu("H100").memory == GPUS["h100"].memory
    assert find_gpu("A100-80GB").name == find_gpu("a100").name == "a100-80"
    assert find_gpu("NVIDIA H100 80GB").name == "h100"
    assert find_gpu("h100-pcie").name == "h100-pcie"
    assert find_gpu("24").memory == find_gpu("24GiB").memory == 24
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        find_gpu("h10")
    with pytest.raises(ConfigError, match="a number of GiB"):
        find_gpu("-3")


@pytest.mark.usefixtures("by_formula")
def test_the_fastest_that_fits_is_chosen(model_file):
    plan = make_plan(Request(model_file, stage="sft", gpus=2, gpu_memory="h100", seq=512, batch=8))
    assert {option.way.strategy for option in plan.options} == {"single", "ddp", "fsdp2", "zero3"}
    assert {option.way.quantization for option in plan.options if option.way.strategy == "fsdp2"} == {"none"}
    way = plan.chosen.way
    assert (way.strategy, way.quantization, way.recomputes) == ("ddp", "none", False)
    assert all(option.fits for option in plan.options)
    command = plan.command
    assert "--num_processes 2 -m loragate sft --model MODEL --rank 16" in command
    assert "ddp.yaml" in command
    assert "--max-length 512 --batch-size 8 --per-device-train-batch-size 4" in command
    assert "--num-train-epochs" not in command
    longer = replace(plan.chosen.way, rows=5000, num_train_epochs=2.5)
    assert "--max-rows 5000 --num-train-epochs 2.5" in launch_command(longer, "bfloat16"), (
        "what the time was planned for"
    )
    zero = next(option for option in plan.options if option.way.strategy == "zero3" and option.way.recomputes)
    assert "--dtype bfloat16 --precision fp32 --gradient-checkpointing" in launch_command(zero.way, "bfloat16")


@pytest.mark.usefixtures("by_formula")
def test_what_does_not_fit_says_what_to_change(model_file):
    request = Request(model_file, seq=2048, batch=4, micro_batch=1, quantization="none", precision="fp32")
    kept, recomputed = (option.gib for option in make_plan(request).options)
    between = replace(request, gpu_memory=f"{(kept + recomputed) / 2}")
    assert make_plan(between).chosen.way.recomputes
    refused = make_plan(replace(between, gradient_checkpointing="no"))
    assert refused.chosen is None
    assert [option.fits for option in refused.options] == [False]
    words = "\n".join(refused.changes)
    assert "allow single + gradient checkpointing, micro-batch 1" in words
    assert "rows of at most" in words
    assert f"GPUs of at least {math.ceil(kept)} GiB, such as t4" in words


@pytest.mark.usefixtures("by_formula")
def test_more_gpus_are_proposed_where_they_would_do(tmp_path):
    values = {"model_type": "qwen2", "vocab_size": 160, "hidden_size": 2048, "intermediate_size": 8192}
    values |= {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    request = Request(str(path), gpu_memory="3", seq=64, batch=64, micro_batch=1, dtype="float32", precision="fp32")
    plan = make_plan(replace(request, gradient_checkpointing="yes", quantization="none"))
    assert plan.chosen is None
    assert "4 such GPUs with fsdp2 + gradient checkpointing, micro-batch 1" in plan.changes
    assert make_plan(replace(request, gpus=4, strategy="fsdp2")).chosen.way.strategy == "fsdp2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": "stf"}, "did you mean 'sft'"),
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"strategy": "fsdp2"}, "there is one: raise gpus"),
        ({"batch": 8, "micro_batch": 3}, "not a multiple of micro_batch 3"),
        ({"batch": 9, "gpus": 2}, "not a multiple of 2 GPUs"),
        ({"quantization": "2bit"}, "quantization must be one of"),
    ],
)
def test_settings_are_checked(changes, words):
    with pytest.raises(ConfigError, match=words):
        make_plan(Request("model", **changes))


def test_combinations_that_cannot_work_are_refused(model_file, monkeypatch):
    """At once: tracing takes seconds."""
    monkeypatch.setattr("loragate.analysis.plan_step.Step.trace", lambda *_: pytest.fail("traced"))
    with pytest.raises(ConfigError, match="4bit base cannot be sharded with fsdp2"):
        make_plan(Request(model_file, gpus=2, strategy="fsdp2", quantization="4bit", seq=128, batch=4))
    with pytest.raises(ConfigError, match="has no bf16"):
        make_plan(Request(model_file, gpu_memory="t4"))
    with pytest.raises(ConfigError, match="4096 positions, fewer than seq 8192"):
        make_plan(Request(model_file, seq=8192))
