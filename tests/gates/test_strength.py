"""Strength by module, band and kind."""

import pytest
import torch

import loragate as lg
from loragate.errors import GateError
from loragate.gates import constant_gate
from loragate.gates.attach import is_gated
from loragate.gates.override import BANDS, Override
from loragate.gates.strength import (
    family_of,
    kind_of,
    layer_bands,
    layer_of,
    lora_paths,
    modules_of_part,
    overrides_by_module,
    scale_adapter,
    scales_exactly,
)
from tiny import logits, shake, tiny_adapter, tiny_gated


def close(left, right):
    # logits of several units, computed in another order
    torch.testing.assert_close(left, right, atol=3e-3, rtol=0)


def test_bands_are_thirds_of_the_layers_that_are_touched():
    paths = [f"model.layers.{layer}.mlp.up_proj" for layer in range(2, 9)] + [
        "model.embed_tokens",
        "visual.merger.mlp.0",
    ]
    bands = layer_bands(paths)
    assert tuple(bands) == BANDS
    assert [[layer_of(path) for path in bands[name]] for name in BANDS] == [[2, 3, 4], [5, 6], [7, 8]]
    assert list(layer_bands(["transformer.h.0.attn.c_attn"])) == ["lower"]
    assert kind_of(paths[0]) == "up_proj"


@pytest.mark.parametrize("constant", [-1.5, 0.0, 0.5, 2.0])
def test_a_scale_is_a_constant_gate(adapter, token_ids, constant):
    before = logits(adapter, token_ids)
    with scale_adapter(adapter, constant):
        plain = logits(adapter, token_ids)
    with constant_gate(adapter, constant):
        close(plain, logits(adapter, token_ids))
    lg.attach_gates(adapter, lg.GateConfig(-6, 3))
    with scale_adapter(adapter, constant):  # zero gates: λ = 1
        close(plain, logits(adapter, token_ids))
    lg.detach_gates(adapter)
    assert torch.equal(logits(adapter, token_ids), before)


def test_modules_can_be_scaled_one_by_one(adapter, token_ids):
    paths = lora_paths(adapter)
    with scale_adapter(adapter, dict.fromkeys(paths, 0.0)), adapter.disable_adapter():
        base = logits(adapter, token_ids)
    with scale_adapter(adapter, dict.fromkeys(paths, 0.0)):
        close(logits(adapter, token_ids), base)
    with scale_adapter(adapter, {paths[0]: 0.0}), scale_adapter(adapter, dict.fromkeys(paths[1:], 0.0)):
        close(logits(adapter, token_ids), base)
    with pytest.raises(GateError, match=r"no module nowhere"), scale_adapter(adapter, {"nowhere": 0.0}):
        pass


def test_dora_is_switched_off_exactly_and_scaled_only_in_part(token_ids):
    dora = tiny_adapter(use_dora=True)
    for module in dora.modules():  # magnitudes as after training
        if magnitude := getattr(module, "lora_magnitude_vector", None):
            magnitude["default"].weight.data.mul_(1.3)
    with dora.disable_adapter():
        base = logits(dora, token_ids)
    before = logits(dora, token_ids)
    with scale_adapter(dora, 0.0):
        close(logits(dora, token_ids), base)
    with scale_adapter(dora, 1.0):
        assert torch.equal(logits(dora, token_ids), before)
    assert torch.equal(logits(dora, token_ids), before)
    assert scales_exactly(tiny_adapter())
    assert scales_exactly(tiny_gated(-6, 3))
    assert not scales_exactly(dora)


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("model.layers.0.self_attn.q_proj", "attention"),
        ("transformer.h.0.attn.c_attn", "attention"),
        ("gpt_neox.layers.3.attention.query_key_value", "attention"),
        ("model.layers.0.mlp.down_proj", "mlp"),
        ("model.layers.1.block_sparse_moe.experts.2.w1", "mlp"),
        ("model.decoder.layers.0.fc1", "mlp"),
        ("backbone.layers.0.mixer.in_proj", None),
        ("model.embed_tokens", None),
    ],
)
def test_families(path, family):
    assert family_of(path) == family


@pytest.mark.parametrize("part", ["lower", "middle", "attention", "mlp", "q_proj"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_constant_for_a_part_is_a_scale_of_its_modules(adapter, token_ids, part, gated):
    inside = modules_of_part(part, lora_paths(adapter))
    assert 0 < len(inside) < len(lora_paths(adapter))
    with scale_adapter(adapter, dict.fromkeys(inside, 0.5)):
        expected = logits(adapter, token_ids)
    if gated:  # with gates that act: outside of the part the plain adapter acts, not they
        shake(lg.attach_gates(adapter, lg.GateConfig(-3, 2)), 0.7)
    with constant_gate(adapter, 0.5, part=part):
        close(logits(adapter, token_ids), expected)
    if gated:
        with lg.gate_override(adapter, constant=0.5, part=part):
            close(logits(adapter, token_ids), expected)


def test_a_part_that_is_not_there_is_refused(adapter):
    with (
        pytest.raises(
            GateError, match=r"λ for k_prj would have no effect.*did you mean 'k_proj'.*lower, middle, attention"
        ),
        constant_gate(adapter, 0.5, part="k_prj"),
    ):
        pass
    assert not is_gated(adapter, "default")
    paths = lora_paths(adapter)
    found = overrides_by_module(Override(constant=0.0, part="middle"), paths)
    assert [path for path in paths if found[path] == Override(constant=1.0)] == modules_of_part("lower", paths)
