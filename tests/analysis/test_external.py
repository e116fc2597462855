"""λ supplied from outside: the same numbers as the gates, the same derivatives, nothing left behind."""

import pytest
import torch

import loragate as lg
from loragate.analysis.external import supplied_coefficients
from loragate.errors import GateError
from loragate.gates.attach import gate_modules
from tiny import tiny_adapter

IDS = torch.arange(4, 14)[None]


def gated(seed=3):
    peft = lg.attach_gates(tiny_adapter(), lg.GateConfig(-2, 3))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in lg.gate_parameters(peft).values():
            parameter.normal_(0, 0.3)
    return peft


def test_supplying_the_gates_own_values_changes_nothing():
    peft = gated()
    gates = gate_modules(peft)
    with torch.no_grad():
        own = peft(input_ids=IDS).logits
        with supplied_coefficients(peft, lambda path, _layer, x: gates[path].coefficients(x)) as paths:
            assert set(paths) == set(gates)
            assert torch.allclose(peft(input_ids=IDS).logits, own, atol=1e-6)
        with supplied_coefficients(peft, lambda *_: None):
            full = peft(input_ids=IDS).logits
        with lg.gate_override(peft, constant=1.0):
            assert torch.equal(peft(input_ids=IDS).logits, full)
        assert torch.equal(peft(input_ids=IDS).logits, own)


def test_leaves_carry_the_semi_gradient():
    """eq:rw-causal-jacobian with sg: ∂F/∂w_m = Σ_s ∂F/∂λ_m,s · ∂λ_m,s/∂w_m at inputs held fixed."""
    peft = gated()
    gates, leaves, inputs = gate_modules(peft), {}, {}

    def leaf(path, _layer, x):
        inputs[path] = x.detach()
        leaves[path] = gates[path].coefficients(x).detach().requires_grad_()
        return leaves[path]

    with supplied_coefficients(peft, leaf):
        lg.topk_entropy(peft(input_ids=IDS).logits, 20).mean().backward()
    with_gates = lg.topk_entropy(peft(input_ids=IDS).logits, 20).mean()
    expected = torch.autograd.grad(with_gates, [gate.weight for gate in gates.values()])
    for (path, gate), gradient in zip(gates.items(), expected, strict=True):
        lam = gate.coefficients(inputs[path])
        (found,) = torch.autograd.grad(lam, gate.weight, leaves[path].grad)
        assert torch.allclose(found, gradient, atol=1e-6, rtol=1e-3), path


def test_a_wrong_shape_is_refused():
    peft = tiny_adapter()
    with supplied_coefficients(peft, lambda *_: torch.ones(2, 3)), pytest.raises(GateError, match="routed tokens"):
        peft(input_ids=IDS)
