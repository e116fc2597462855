"""Strength by module, band and kind."""

import pytest
import torch

import loragate as lg
from loragate.errors import GateError
from loragate.gates import constant_gate
from loragate.gates.strength import BANDS, kind_of, layer_bands, layer_of, lora_paths, scaled, scales_exactly
from tiny import logits, tiny_adapter, tiny_gated


def close(left, right):
    # logits of several units, computed in another order
    torch.testing.assert_close(left, right, atol=3e-3, rtol=0)


def test_bands_are_thirds_of_the_layers_that_are_touched():
    paths = [f"model.layers.{layer}.mlp.up_proj" for layer in range(2, 9)] + ["model.embed_tokens"]
    bands = layer_bands(paths)
    assert tuple(bands) == BANDS
    assert [[layer_of(path) for path in bands[name]] for name in BANDS] == [[2, 3, 4], [5, 6], [7, 8]]
    assert list(layer_bands(["transformer.h.0.attn.c_attn"])) == ["lower"]
    assert kind_of(paths[0]) == "up_proj"


@pytest.mark.parametrize("constant", [-1.5, 0.0, 0.5, 2.0])
def test_a_scale_is_a_constant_gate(adapter, token_ids, constant):
    before = logits(adapter, token_ids)
    with scaled(adapter, constant):
        plain = logits(adapter, token_ids)
    with constant_gate(adapter, constant):
        close(plain, logits(adapter, token_ids))
    lg.attach_gates(adapter, lg.GateConfig(-6, 3))
    with scaled(adapter, constant):  # zero gates: λ = 1
        close(plain, logits(adapter, token_ids))
    lg.detach_gates(adapter)
    assert torch.equal(logits(adapter, token_ids), before)


def test_modules_can_be_scaled_one_by_one(adapter, token_ids):
    paths = lora_paths(adapter)
    with scaled(adapter, dict.fromkeys(paths, 0.0)), adapter.disable_adapter():
        base = logits(adapter, token_ids)
    with scaled(adapter, dict.fromkeys(paths, 0.0)):
        close(logits(adapter, token_ids), base)
    with scaled(adapter, {paths[0]: 0.0}), scaled(adapter, dict.fromkeys(paths[1:], 0.0)):
        close(logits(adapter, token_ids), base)
    with pytest.raises(GateError, match=r"no module nowhere"), scaled(adapter, {"nowhere": 0.0}):
        pass


def test_dora_is_switched_off_exactly_and_scaled_only_in_part(token_ids):
    dora = tiny_adapter(use_dora=True)
    for module in dora.modules():  # magnitudes as after training
        if magnitude := getattr(module, "lora_magnitude_vector", None):
            magnitude["default"].weight.data.mul_(1.3)
    with dora.disable_adapter():
        base = logits(dora, token_ids)
    before = logits(dora, token_ids)
    with scaled(dora, 0.0):
        close(logits(dora, token_ids), base)
    with scaled(dora, 1.0):
        assert torch.equal(logits(dora, token_ids), before)
    assert torch.equal(logits(dora, token_ids), before)
    assert scales_exactly(tiny_adapter())
    assert scales_exactly(tiny_gated(-6, 3))
    assert not scales_exactly(dora)
