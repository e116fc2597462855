"""The gated module, its calculus and the bounded range as numbers, fp64; and what a range reaches that [0, 1] does not."""

import math

import pytest
import torch
from toy import SCALING, D, M, R, S, Toy, V, close, entropy, grad, jacobian, rand, support, topk_objective

import loragate as lg
from loragate.gates.operation import gated_delta, gated_delta_reference
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap
from tiny import tiny_adapter

K = 4


def test_gated_delta():
    """eq:rw-gated-delta: u = Wh + λΔWh; the package's operation gives exactly the second part."""
    toy, x = Toy(), rand(S, D, seed=8)
    w, bias = rand(D, seed=9, scale=0.5), rand(1, seed=10)
    settings = {"signed_map": SignedMap(Range(-2, 3), 0.8), "scaling": SCALING}
    delta = gated_delta_reference(x, toy.a[0], toy.b[0], w, bias, **settings)
    lam = lg.gate_coefficient(x @ w + bias, -2.0, 3.0, 0.8)
    close(delta, lam[:, None] * (x @ toy.delta_weight(0).T))
    close(gated_delta(x, toy.a[0], toy.b[0], w, bias, **settings), delta, 1e-9)


@pytest.mark.parametrize(("lower", "upper"), [(-6.0, 3.0), (-2.0, 1.5), (-0.5, 6.0)])
def test_transform(lower, upper):
    """eq:rw-transform, eq:rw-transform-branches: both forms of λ(v) agree, are continuous at 0 and rise from L to U."""
    g = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    v = torch.tanh(g / 1.3)
    lam = lg.gate_coefficient(g, lower, upper, 1.3)
    close(lam, 1 + (1 - lower) * v.clamp(max=0) + (upper - 1) * v.clamp(min=0))
    close(lam, torch.where(v < 0, 1 + (1 - lower) * v, 1 + (upper - 1) * v))
    assert (lam.diff() >= 0).all()
    assert lam.min() >= lower
    assert lam.max() <= upper
    close(lam[[0, -1]], torch.tensor([lower, upper], dtype=torch.float64), 1e-8)
    one_sided = [
        lg.gate_coefficient(torch.tensor(e, dtype=torch.float64), lower, upper, 1.0) for e in (-1e-7, 0.0, 1e-7)
    ]
    assert float(one_sided[1]) == 1.0
    slopes = float(one_sided[1] - one_sided[0]) / 1e-7, float(one_sided[2] - one_sided[1]) / 1e-7
    assert slopes == pytest.approx((1 - lower, upper - 1), rel=1e-6)


def test_zero_of_the_map():
    """(no label) λ = 0 at v = −1/(1 − L); more negative v reverses, every positive v extrapolates."""
    for lower in (-6.0, -1.0, -0.25):
        g = torch.atanh(torch.tensor(-1 / (1 - lower), dtype=torch.float64))
        close(lg.gate_coefficient(g, lower, 3.0), 0.0, 1e-12)
        assert lg.gate_coefficient(g - 0.1, lower, 3.0) < 0
        assert lg.gate_coefficient(torch.tensor(0.1, dtype=torch.float64), lower, 3.0) > 1


def test_parameter_count():
    """(no label) Σ(d_m + 1) gate parameters, against r(d + d') per module for the factors."""
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-2, 2))
    widths = [layer.lora_A["default"].weight.shape[1] for layer in model.modules() if hasattr(layer, "lora_gate")]
    assert sum(p.numel() for p in lg.gate_parameters(model).values()) == sum(width + 1 for width in widths)


def test_identities_of_lambda():
    """(no label) λ ≡ 1 is the Stage-I model and λ ≡ 0 the base, whatever the gates hold."""
    ids = torch.arange(4, 14)[None]
    model = tiny_adapter()
    with torch.no_grad():
        adapter = model(input_ids=ids).logits
        with model.disable_adapter():
            base = model(input_ids=ids).logits
        lg.attach_gates(model, lg.GateConfig(-2, 2))
        for parameter in lg.gate_parameters(model).values():
            parameter.normal_()
        with lg.gate_override(model, constant=1.0):
            assert torch.equal(model(input_ids=ids).logits, adapter)
        with lg.gate_override(model, constant=0.0):
            assert torch.equal(model(input_ids=ids).logits, base)


def test_module_bound():
    """eq:rw-module-bound: ‖u(h;λ) − u(h;1)‖ ≤ max(1 − L, U − 1)‖ΔWh‖, reached towards an end."""
    toy, x = Toy(), rand(200, D, seed=8)
    delta = x @ toy.delta_weight(0).T
    for lower, upper in ((-6.0, 3.0), (-1.0, 4.0)):
        g = rand(200, seed=12, scale=3)
        g[0] = -40 if 1 - lower > upper - 1 else 40
        lam = lg.gate_coefficient(g, lower, upper)
        moved = ((lam - 1)[:, None] * delta).norm(dim=-1)
        bound = max(1 - lower, upper - 1) * delta.norm(dim=-1)
        assert (moved <= bound + 1e-12).all()
        close(moved[0], bound[0], 1e-9)


def test_causal_jacobian():
    """eq:rw-causal-jacobian: J^ψ = J^λ B with B = ∂Λ/∂ψ; no column reaches back in time, first-order remainder o(‖δλ‖)."""
    toy = Toy()
    psi = toy.psi().detach()
    lam = toy.coefficients(psi)
    j_lam = jacobian(toy.logits_at, lam).reshape(S, V, M * S)
    b = jacobian(toy.coefficients, psi).reshape(M * S, -1)
    close(jacobian(toy.logits, psi), j_lam @ b)
    columns = j_lam.reshape(S, V, M, S)
    for t in range(S):
        assert (columns[t, :, :, t + 1 :] == 0).all(), "a later gate cannot act"
        assert columns[t, :, :, : t + 1].abs().amax((0, 1)).min() > 0, "every earlier gate acts"
    step = rand(M, S, seed=30)
    errors = [
        float((toy.logits_at(lam + e * step) - toy.logits_at(lam) - e * (j_lam @ step.reshape(-1))).abs().max()) / e
        for e in (1e-3, 1e-4)
    ]
    assert errors[1] < errors[0] / 5


def test_all_position_credit():
    """eq:rw-all-position-credit: ∂F_k/∂λ_i = (1/log k) mean ⟨∇_z H(q), d_i⟩ over all response positions, later ones included."""
    toy = Toy()
    lam = toy.coefficients(toy.psi()).detach().requires_grad_()
    z = toy.logits_at(lam)
    index = support(z, K)
    d = jacobian(toy.logits_at, lam.detach())
    slope = grad(entropy(z.gather(-1, index)).sum(), z)
    each = torch.einsum("tv,tvms->tms", slope, d) / math.log(K)
    close(grad(topk_objective(z, index), lam), each.mean(0))
    own = torch.stack([each[s, :, s] for s in range(S)], dim=-1) / S
    assert (own - each.mean(0))[:, :-1].abs().max() > 1e-3, "the gate's own position alone is not the credit"


def test_full_module_jacobian():
    """eq:rw-full-module-jacobian: ∂u/∂h = W + λΔW + (ΔWh)(∇_hλ)ᵀ; a stopped gate input drops the last term alone."""
    toy = Toy()
    psi, h = toy.psi().detach(), rand(D, seed=14)

    def module(x, detach):
        lam = toy.gate(psi, 0, x[None], detach)[0]
        return toy.w[0] @ x + lam * (toy.delta_weight(0) @ x)

    lam = toy.gate(psi, 0, h[None], False)[0]
    slope = jacobian(lambda x: toy.gate(psi, 0, x[None], False)[0], h)
    kept = toy.w[0] + lam * toy.delta_weight(0)
    last = torch.outer(toy.delta_weight(0) @ h, slope)
    close(jacobian(lambda x: module(x, False), h), kept + last)
    close(jacobian(lambda x: module(x, True), h), kept)
    assert last.abs().max() > 1e-2


def test_fused_operation_stops_the_same_term():
    """eq:rw-full-module-jacobian: the fused operation's gradient to h is that of the equation, complete and stopped."""
    toy, x = Toy(), rand(S, D, seed=15).requires_grad_()
    w, bias, out = rand(D, seed=9, scale=0.5), rand(1, seed=10), rand(S, D, seed=16)
    settings = {"signed_map": SignedMap(Range(-2, 3), 0.8), "scaling": SCALING}
    found = [
        grad((gated_delta(x, toy.a[0], toy.b[0], w, bias, **settings, detach_input=stop) * out).sum(), x)
        for stop in (True, False)
    ]
    delta = (x @ toy.delta_weight(0).T).detach()
    lam = lg.gate_coefficient(x @ w + bias, -2.0, 3.0, 0.8)
    slope = grad(lam.sum(), x)
    close(found[1] - found[0], (delta * out).sum(-1, keepdim=True) * slope, 1e-9)


def test_drift():
    """eq:rw-drift: with interleaved factor updates change is a gate and a delta part; the second has no fixed sign."""
    index = support(Toy().logits(Toy().psi()), K)

    def objective(shift, psi):
        toy, psi = Toy(), psi.detach()
        toy.b = [b + shift * rand(D, R, seed=60 + m) for m, b in enumerate(toy.b)]
        return float(topk_objective(toy.logits(psi), index))

    first, second = Toy().psi(5), Toy().psi(6)
    signs = set()
    for shift in (-0.3, -0.1, 0.1, 0.3):
        whole = objective(shift, second) - objective(0.0, first)
        gate, delta = objective(0.0, second) - objective(0.0, first), objective(shift, second) - objective(0.0, second)
        assert whole == pytest.approx(gate + delta, abs=1e-12)
        signs.add(delta > 0)
    assert objective(0.0, second) - objective(0.0, second) == 0, "frozen factors leave no second part"
    assert signs == {True, False}


def test_boundary_proof():
    """eq:rw-boundary-proof: at a minimum on [0, 1]^M with a gradient left, a step of −ε∇F into (L, U)^M has a smaller F."""
    a = torch.tensor([1.0, -0.8, 0.5, 0.3], dtype=torch.float64)

    def objective(lam):
        # two tokens of the margin model; the last feature helps one and harms the other, so that its optimum lies inside
        margins = torch.stack([1.2 + lam @ a, 0.4 + lam[:3] @ a[:3] - 1.1 * lam[3]])
        spread = 0.6 * (lam[3] - 0.45) ** 2
        return torch.nn.functional.binary_cross_entropy_with_logits(margins, torch.sigmoid(margins)) + spread

    lam = torch.full((4,), 0.5, dtype=torch.float64)
    for _ in range(3000):
        leaf = lam.clone().requires_grad_()
        lam = (lam - 0.5 * grad(objective(leaf), leaf)).clamp(0, 1)
    leaf = lam.clone().requires_grad_()
    smallest = objective(leaf)
    gradient = grad(smallest, leaf)
    assert lam.tolist()[:3] == [1.0, 0.0, 1.0]
    assert 0 < lam[3] < 1
    assert gradient[0] < 0, "blocked at 1: calls for extrapolation"
    assert gradient[1] > 0, "blocked at 0: calls for reversal"
    assert gradient[2] < 0
    assert abs(float(gradient[3])) < 1e-9, "inside the box the derivative is zero"
    near = (lam + 0.05 * rand(200, 4, seed=1)).clamp(0, 1)
    assert min(objective(point).item() for point in near) >= smallest.item() - 1e-12
    for epsilon in (1e-2, 1e-3):
        outside = lam - epsilon * gradient
        assert ((outside > -2) & (outside < 3)).all()
        assert ((outside < 0) | (outside > 1)).any()
        gained = objective(outside).item() - smallest.item()
        assert gained == pytest.approx(-epsilon * float(gradient @ gradient), rel=0.05)
