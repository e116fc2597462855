"""Overrides and recording."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import loragate as lg
from loragate.errors import ConfigError, GateError
from loragate.gates import constant_gate, trace_gates
from loragate.gates.attach import gate_modules
from loragate.gates.control import Recorder
from loragate.gates.override import Override
from loragate.gates.range import Range
from tiny import logits, shake


@pytest.fixture
def gated(adapter):
    return shake(lg.attach_gates(adapter, lg.GateConfig(-6, 3)), 1.0, 0)


@pytest.mark.parametrize("override", [{}, {"minimum": 0.0}, {"maximum": 1.0}, {"minimum": 0.0, "maximum": 1.0}])
def test_override_clips_what_is_applied(gated, token_ids, override):
    with lg.gate_override(gated, **override) if override else nullcontext(), lg.record_gates(gated) as recording:
        logits(gated, token_ids)
    total = recording.total()
    assert (total["below_zero"] > 0.05) is ("minimum" not in override)
    assert (total["above_one"] > 0.05) is ("maximum" not in override)


@pytest.mark.parametrize("constant", [-4.0, 0.0, 2.5])
def test_one_constant_for_a_plain_and_for_a_gated_adapter(adapter, token_ids, constant):
    with torch.no_grad():
        restore_state = adapter(token_ids).logits
        with constant_gate(adapter, constant):
            strength = adapter(token_ids).logits
        assert not any(".lora_gate." in name for name, _ in adapter.named_parameters()), "gates are gone again"
        assert torch.equal(adapter(token_ids).logits, restore_state)
        lg.attach_gates(adapter, lg.GateConfig(-6, 3))
        with constant_gate(adapter, constant):
            torch.testing.assert_close(adapter(token_ids).logits, strength)
        assert lg.gate_parameters(adapter), "gates that were there stay"
        assert not torch.equal(strength, restore_state)


def test_a_constant_leaves_what_trains_as_it_was(adapter):
    adapter.add_adapter("plain", adapter.peft_config["default"])
    lg.attach_gates(adapter, lg.GateConfig(-3, 2), "default")
    for name in ("plain", "default"):
        before = {key: parameter.requires_grad for key, parameter in adapter.named_parameters()}
        assert any(before.values())
        with pytest.raises(RuntimeError, match="inside"), constant_gate(adapter, 0.5, name):
            raise RuntimeError("inside")
        assert {key: parameter.requires_grad for key, parameter in adapter.named_parameters()} == before


def test_overrides_nest_and_are_restored_after_an_error(gated, token_ids):
    with torch.no_grad():
        free = gated(token_ids).logits
        with lg.gate_override(gated, constant=1.0):
            outer = gated(token_ids).logits
            with lg.gate_override(gated, constant=0.0):
                inner = gated(token_ids).logits
            assert torch.equal(gated(token_ids).logits, outer)
        assert not torch.equal(inner, outer)
        with pytest.raises(RuntimeError, match="inside"), lg.gate_override(gated, constant=0.0):
            raise RuntimeError("inside")
        assert torch.equal(gated(token_ids).logits, free)


def test_override_refuses_what_would_have_no_effect(gated, adapter):
    with pytest.raises(GateError, match="takes numbers by name"), lg.gate_override(gated, Override()):
        pass
    for arguments, words in [
        ({}, "no effect"),
        ({"constant": 1.0, "minimum": 0.0}, "not both"),
        ({"override": "unit", "minimum": 0.0}, "not both"),
        ({"override": 0.5}, "numbers by name, as in constant=0.5"),
    ]:
        with pytest.raises(GateError, match=words), lg.gate_override(gated, **arguments):
            pass
    with pytest.raises(ConfigError, match="@untit is no known override of λ; did you mean 'unit'"):
        lg.gate_override(gated, "untit").__enter__()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("unit", {"minimum": 0, "maximum": 1}),
        ("@clip=-1:2", {"minimum": -1, "maximum": 2}),
        ("q_proj=0.5", {"constant": 0.5, "part": "q_proj"}),
    ],
)
def test_an_override_may_be_given_as_it_stands_in_a_name(gated, token_ids, text, numbers):
    with torch.no_grad():
        free = gated(token_ids).logits
        with lg.gate_override(gated, text):
            named = gated(token_ids).logits
        with lg.gate_override(gated, **numbers):
            assert torch.equal(gated(token_ids).logits, named)
    assert not torch.equal(named, free)


def test_recorded_statistics_equal_a_direct_computation(gated, token_ids):
    layer = gated.base_model.model.model.layers[0].self_attn.q_proj
    seen = []
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    mask = torch.zeros_like(token_ids, dtype=torch.bool)
    mask[:, 4:9] = True
    with lg.record_gates(gated) as recording, torch.no_grad():
        recording.token_mask = mask
        gated(token_ids)
    handle.remove()
    gate = layer.lora_gate["default"]
    lam = lg.gate_coefficient(seen[0] @ gate.weight + gate.bias, -6, 3, 1.0)[mask].double()
    statistics = recording.statistics()["model.layers.0.self_attn.q_proj"]
    assert statistics["tokens"] == 15
    assert statistics["mean"] == pytest.approx(lam.mean().item(), rel=1e-5)
    assert statistics["std"] == pytest.approx(lam.std(correction=0).item(), rel=1e-4)
    assert statistics["below_zero"] == pytest.approx((lam < 0).double().mean().item())
    assert statistics["above_one"] == pytest.approx((lam > 1).double().mean().item())
    assert statistics["below_zero"] + statistics["zero_to_one"] + statistics["above_one"] == pytest.approx(1)
    with torch.no_grad():
        gated(token_ids)
    assert recording.statistics()["model.layers.0.self_attn.q_proj"]["tokens"] == 15, "nothing is recorded outside"


def test_the_total_counts_tokens_once_and_averages_over_modules(gated, token_ids):
    mask = torch.zeros_like(token_ids, dtype=torch.bool)
    mask[:, 4:9] = True
    with lg.record_gates(gated) as recording, torch.no_grad():
        recording.token_mask = mask
        gated(token_ids)
        gated(token_ids)
    total, modules = recording.total(), recording.statistics().values()
    assert (total["tokens"], total["modules"]) == (30, 14) == (2 * mask.sum(), len(modules))
    for name in ("mean", "below_zero", "zero_to_one", "above_one", "saturated"):
        assert total[name] == pytest.approx(sum(one[name] for one in modules) / 14)


@pytest.mark.parametrize("shape", [(2, 6), (3, 7), (1, 14), (7, 2)])
def test_a_mask_of_another_shape_is_refused(gated, shape):
    ids = torch.arange(5, 19).reshape(2, 7)
    with lg.record_gates(gated) as recording, torch.no_grad():
        recording.token_mask = torch.ones(shape, dtype=torch.bool)
        with pytest.raises(GateError, match=rf"token_mask has shape \[{shape[0]}, {shape[1]}\].*\[2, 7\] tokens"):
            gated(ids)
        recording.token_mask = None
        gated(ids)
    assert (recording.total()["tokens"], recording.total()["modules"]) == (14, 14)


def test_what_is_no_mask_is_refused(gated, token_ids):
    with lg.record_gates(gated) as recording, torch.no_grad():
        for dtype in (torch.float32, torch.long):
            recording.token_mask = torch.ones_like(token_ids, dtype=dtype)
            with pytest.raises(GateError, match=f"bool tensor .* found {dtype}"):
                gated(token_ids)
        with pytest.raises(AttributeError, match="token_msk"):
            recording.token_msk = torch.ones(2, 7, dtype=torch.bool)
        recording.token_mask = torch.zeros_like(token_ids, dtype=torch.bool)
        gated(token_ids)
    assert recording.total() == {"tokens": 0.0, "modules": 0.0}


def test_recordings_nest_and_each_counts_under_its_own_mask(gated, token_ids):
    """A callback's, around a training step in which the trainer records for its own log."""
    first = torch.zeros_like(token_ids, dtype=torch.bool)
    first[:, 0] = True
    with torch.no_grad(), lg.record_gates(gated) as outer:
        with lg.record_gates(gated) as inner:
            inner.token_mask = first
            with trace_gates(gated) as traced:
                gated(token_ids)
        gated(token_ids)
    tokens, modules = token_ids.numel(), len(traced)
    assert [one.total()["tokens"] for one in (outer, inner)] == [2 * tokens, len(token_ids)]
    lam = torch.stack([one for (one,) in traced.values()])
    assert outer.total()["modules"] == inner.total()["modules"] == modules
    assert outer.total()["mean"] == pytest.approx(float(lam.double().mean()), rel=1e-6)
    assert inner.total()["mean"] == pytest.approx(float(lam[:, :, 0].double().mean()), rel=1e-6)
    assert all(gate.recorder is None for gate in gate_modules(gated).values())


class NoDoubles(TorchDispatchMode):
    """Refuses fp64 on Apple's GPUs, as these do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, torch.Tensor) and made.device.type == "mps" and made.dtype == torch.float64:
                raise TypeError("the MPS framework doesn't support float64")
        return result


def test_a_mask_outside_that_is_of_other_passes_counts_none_of_them(gated, token_ids):
    with lg.record_gates(gated) as outer:
        outer.token_mask = torch.ones(1, 3, dtype=torch.bool)
        with lg.record_gates(gated) as inner, torch.no_grad():
            gated(token_ids)
    assert outer.total() == {}
    assert inner.total()["tokens"] == token_ids.numel()


def test_recording_asks_an_apple_gpu_for_no_doubles():
    with FakeTensorMode(), NoDoubles():
        lam = torch.empty(2, 3, device="mps")
        with pytest.raises(TypeError):
            lam.double()
        recorder = Recorder(Range(-6, 3))
        recorder.update(lam)
        assert recorder.sums.device.type == "cpu"
