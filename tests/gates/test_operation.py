"""The fused gated-LoRA operation against the plain one: values, every gradient, what it keeps for the backward."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from loragate.gates.operation import gate_logits, gated_delta, gated_delta_reference
from loragate.gates.override import Override
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap, gate_coefficient

MAP = SignedMap(Range(-6, 3), 0.8)
SETTINGS = {"signed_map": MAP, "scaling": 2.0}


def operands(dtype=torch.float64, tokens=7, d_in=6, rank=3, d_out=5, gate_dtype=None, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def make(*shape, kind=dtype):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(kind).requires_grad_()

    gate = gate_dtype or dtype
    return make(2, tokens, d_in), make(rank, d_in), make(d_out, rank), make(d_in, kind=gate), make(1, kind=gate)


@pytest.mark.parametrize("detach_input", [True, False])
@pytest.mark.parametrize("with_weight", [True, False])
def test_gradcheck_fp64(detach_input, with_weight):
    x, a, b, weight, bias = operands()
    if not with_weight:
        weight = None

    def run(x, a, b, bias, *rest):
        return gated_delta(x, a, b, rest[0] if rest else None, bias, detach_input=detach_input, **SETTINGS)

    inputs = (x, a, b, bias) if weight is None else (x, a, b, bias, weight)
    if detach_input and with_weight:
        # the semi-gradient is not the derivative of the function in x, so x is held against the plain form below
        inputs = (x.detach(), a, b, bias, weight)
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("detach_input", [True, False])
@pytest.mark.parametrize("needed", [(0,), (3, 4), (0, 3, 4), (1, 2), (0, 1, 2, 3, 4)])
def test_equals_the_plain_form_for_all_inputs_that_need_gradients(detach_input, needed):
    results = []
    for operation in (gated_delta, gated_delta_reference):
        inputs = [tensor.detach().requires_grad_(i in needed) for i, tensor in enumerate(operands())]
        out = operation(*inputs, detach_input=detach_input, **SETTINGS)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * weights).sum().backward()
        results.append((out.detach(), [tensor.grad for tensor in inputs]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    for index, (fused, plain) in enumerate(zip(results[0][1], results[1][1], strict=True)):
        assert (fused is None) == (plain is None) == (index not in needed)
        if fused is not None:
            torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("tokens", [1, 16, 77])
def test_without_gradients_the_values_are_bit_for_bit_those_of_training(dtype, with_weight, tokens):
    x, a, b, weight, bias = operands(dtype, tokens, 48, 8, 40, gate_dtype=torch.float32)
    arguments = (x, a, b, weight if with_weight else None, bias)
    trained = gated_delta(*arguments, **SETTINGS)
    assert trained.requires_grad
    with torch.no_grad():
        assert torch.equal(gated_delta(*arguments, **SETTINGS), trained)
    frozen = gated_delta(*(None if value is None else value.detach() for value in arguments), **SETTINGS)
    assert torch.equal(frozen, trained)
    assert not frozen.requires_grad
    assert torch.equal(gated_delta_reference(*arguments, **SETTINGS), trained)


def test_gating_in_rank_space_equals_gating_the_output():
    x, a, b, weight, bias = (tensor.detach() for tensor in operands())
    lam = gate_coefficient(x @ weight + bias, -6.0, 3.0, 0.8)
    expected = lam.unsqueeze(-1) * (x @ a.t() @ b.t()) * SETTINGS["scaling"]
    torch.testing.assert_close(gated_delta(x, a, b, weight, bias, **SETTINGS), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_only_the_input_and_rank_space(dtype):
    tokens, d_in, rank, d_out = 64, 32, 4, 256
    x, a, b, weight, bias = operands(dtype, tokens, d_in, rank, d_out, gate_dtype=torch.float32)
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = gated_delta(x, a.detach(), b.detach(), weight, bias, **SETTINGS)
    shapes = sorted(tuple(tensor.shape) for tensor in saved)
    assert shapes == sorted(
        [(2, tokens, d_in), (2, tokens, rank), (2, tokens), (2, tokens), (rank, d_in), (d_out, rank), (d_in,)]
    )
    assert out.shape == (2, tokens, d_out)
    assert out.dtype == dtype


@pytest.mark.parametrize("detach_input", [True, False])
@pytest.mark.parametrize(("of_x", "of_factors"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_an_uncast_input_gives_the_bits_of_a_cast_one(of_x, of_factors, detach_input):
    """Values and gradients as with PEFT's cast before the operation; what is kept is x as it came."""
    _, a, b, weight, bias = operands(of_factors, tokens=30, d_in=24, rank=4, d_out=20, gate_dtype=torch.float32)
    x = torch.randn(2, 30, 24, generator=torch.Generator().manual_seed(7)).to(of_x)
    settings = {**SETTINGS, "detach_input": detach_input}
    found = []
    for cast in (True, False):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, a, b, weight, bias)]
        given = leaves[0].to(of_factors) if cast else leaves[0]
        saved: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor):
            out = gated_delta(given, *leaves[1:], **settings)
        assert [tensor.dtype for tensor in saved if tensor.shape == x.shape] == [of_factors if cast else of_x]
        out.float().square().sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
        with torch.no_grad():
            assert torch.equal(gated_delta_reference(given, *leaves[1:], **settings), out)
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_gate_arithmetic_stays_fp32_under_autocast():
    x, a, b, weight, bias = operands(torch.float32, tokens=40, d_in=64, gate_dtype=torch.float32)
    x, weight = x.detach(), (weight.detach() / 8)
    exact = x.double() @ weight.double() + bias.detach().double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = gate_logits(x, weight, bias.detach())
        out = gated_delta(x, a.detach(), b.detach(), weight.requires_grad_(), bias, **SETTINGS)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-5
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    assert torch.isfinite(weight.grad).all()


def test_second_derivatives_are_refused():
    x, a, b, weight, bias = operands()
    (gradient,) = torch.autograd.grad(
        gated_delta(x, a, b, weight, bias, **SETTINGS).square().sum(), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (Override(constant=0.0), torch.zeros_like),
        (Override(constant=-1.0), lambda lam: torch.full_like(lam, -1.0)),
        (Override(0.0, 1.0), lambda lam: lam.clamp(0, 1)),
        (Override(maximum=0.5), lambda lam: lam.clamp(max=0.5)),
    ],
)
def test_overrides(override, expected):
    x, a, b, weight, bias = (tensor.detach() for tensor in operands())
    lam = gate_coefficient(x @ weight + bias, -6, 3, 0.8)
    assert (lam < 0).any()
    assert (lam > 1).any()
    out = gated_delta_reference(x, a, b, weight, bias, **SETTINGS, override=override)
    plain = x @ a.t() @ b.t() * SETTINGS["scaling"]
    torch.testing.assert_close(out, expected(lam).unsqueeze(-1) * plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaling", [1.0, 2.0, 0.25, 0.7, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaling_is_bit_for_bit_pefts(scaling, dtype):
    x, a, b, _, bias = (
        tensor.detach() for tensor in operands(dtype, d_in=48, rank=8, d_out=40, gate_dtype=torch.float32)
    )
    out = gated_delta(x, a, b, None, torch.zeros_like(bias), SignedMap(Range(-3, 2)), scaling)
    linear = torch.nn.functional.linear
    assert torch.equal(out, linear(linear(x, a), b) * scaling)
