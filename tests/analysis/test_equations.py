"""The paper's equations as numbers, where the package computes them: its fast paths against autograd on a small model, fp64.

The first words of a docstring are the labels of the equations that a test stands for.
"""

import math

import numpy as np
import pytest
import torch
from toy import (
    SCALING,
    D,
    M,
    S,
    Toy,
    V,
    close,
    conditional,
    entropy,
    grad,
    jacobian,
    rand,
    support,
    topk_objective,
    value,
)

import loragate as lg
from loragate.analysis.directions import RowDirections, entropy_logit_gradient, value_logit_gradient
from loragate.analysis.theorem import InnerProducts, smallest_rho, terms
from loragate.gates.operation import gated_delta, gated_delta_reference
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap
from loragate.losses import TokenStatistics, topk_entropy
from tiny import tiny_adapter

K = 4
Y = torch.tensor([3, 0, 7, 2])


def point(seed=0):
    toy = Toy(seed)
    psi = toy.psi()
    z = toy.logits(psi)
    return toy, psi, z, support(z, K)


def logits(seed=1, rows=4):
    return rand(rows, V, seed=seed, scale=1.3).requires_grad_()


def log_p(z):
    return torch.log_softmax(z, -1)


def test_sft():
    """eq:rw-sft: ∇_z ℓ = π − e_y, and the package's sft objective is ℓ."""
    z = logits()
    loss = -log_p(z)[range(4), Y]
    unit = torch.nn.functional.one_hot(Y, V).double()
    close(grad(loss.sum(), z), log_p(z).exp().detach() - unit)
    stats = TokenStatistics(-loss, entropy(z), entropy(z), torch.ones(4, dtype=torch.bool), V)
    close(lg.objectives["sft"].loss(stats), loss)


def test_weighted_ce_is_a_ray():
    """eq:rw-ray: −∇_z(wℓ) = w (e_y − π): the demonstrated logit never falls, no competitor rises, no margin shrinks."""
    z, w = logits(), torch.tensor([0.0, 0.3, 1.0, 4.0], dtype=torch.float64)
    direction = -grad(-(w * log_p(z)[range(4), Y]).sum(), z)
    p = log_p(z).exp().detach()
    unit = torch.nn.functional.one_hot(Y, V).double()
    close(direction, w[:, None] * (unit - p))
    assert (direction[range(4), Y] >= 0).all()
    assert (direction * (1 - unit) <= 0).all()
    assert (direction[range(4), Y][:, None] - direction >= 0).all()
    for name in ("sft", "dft", "profit", "eaft", "talr"):
        k = 20 if name == "eaft" else V
        stats = TokenStatistics(log_p(z)[range(4), Y], entropy(z), entropy(z) / 3, torch.ones(4, dtype=torch.bool), k)
        assert (lg.objectives[name].weights(stats) >= 0).all(), name


def test_topk_objective():
    """eq:rw-topk: q renormalises the k largest logits; k = |V| is the full normalised entropy."""
    _, _, z, index = point()
    q = conditional(z, index)
    p = torch.softmax(z, -1)
    close(q, p.gather(-1, index) / p.gather(-1, index).sum(-1, keepdim=True))
    close(topk_entropy(z, K).mean(), topk_objective(z, index))
    close(topk_entropy(z, 100).mean(), entropy(z).mean() / math.log(V))


def test_topk_logit_gradient():
    """eq:rw-topk-logit-gradient: −q(log q + H) on the support and 0 elsewhere, as `entropy_logit_gradient` has it."""
    z = rand(S, V, seed=3, scale=2).requires_grad_()
    index = support(z, K)
    autograd = grad(entropy(z.gather(-1, index)).sum(), z)
    q = conditional(z, index).detach()
    closed = torch.zeros(S, V, dtype=torch.float64)
    closed = closed.scatter(-1, index, -q * (q.log() - (q * q.log()).sum(-1, keepdim=True)))
    close(autograd, closed)
    close(-entropy_logit_gradient(z.detach(), K), closed)
    outside = torch.ones(S, V, dtype=torch.bool).scatter(-1, index, False)
    assert (autograd[outside] == 0).all()


def test_two_policy_gradients():
    """eq:rw-two-policy-gradients: ∇V_k = mean E_q[A^r s] and −log k ∇F_k = mean E_q[A^ent s] (ours)."""
    toy, psi, z, index = point()
    r = rand(S, V, seed=9)
    q = conditional(z, index).detach()
    score = jacobian(lambda x: torch.log_softmax(toy.logits(x).gather(-1, index), -1), psi.detach())
    rs = r.gather(-1, index)
    a_task, a_entropy = rs - (q * rs).sum(-1, keepdim=True), q.log() - (q * q.log()).sum(-1, keepdim=True)
    task = grad(value(z, r, index), psi)
    descent = -math.log(K) * grad(topk_objective(z, index), psi)
    close(task, torch.einsum("ta,tap->p", q * a_task, score) / S)
    close(descent, torch.einsum("ta,tap->p", q * a_entropy, score) / S)
    fixed = z.detach()
    close(torch.autograd.grad(z, psi, value_logit_gradient(fixed, r, K) / S, retain_graph=True)[0], task)
    close(torch.autograd.grad(z, psi, entropy_logit_gradient(fixed, K) / S, retain_graph=True)[0], descent)
    full = grad(value(z, r), psi)
    close(torch.autograd.grad(z, psi, value_logit_gradient(fixed, r, None) / S, retain_graph=True)[0], full)


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


def directions(seed=0, noise=1.0):
    """(v = ∇V_k, w = ∇V, G complete, Ĝ stopped, F, V_k, ψ) of the toy with values r = z0/2 + noise, so that they are related."""
    toy = Toy(seed)
    psi = toy.psi()
    z = toy.logits(psi)
    index = support(z, K)
    r = 0.5 * z.detach() + noise * rand(S, V, seed=77)
    stopped = -math.log(K) * grad(topk_objective(toy.logits(psi, detach=True), index), psi)
    complete = -math.log(K) * grad(topk_objective(z, index), psi)
    return grad(value(z, r, index), psi), grad(value(z, r), psi), complete, stopped, toy, psi, index, r


def test_stopped_directions():
    """eq:rw-stopped-directions: b_sg = Ĝ − G is what the detached gate inputs drop; zero at zero gate weights, not otherwise."""
    _, _, complete, stopped, toy, _, _, _ = directions()
    assert (stopped - complete).norm() > 1e-3 * complete.norm()
    zero = torch.zeros(M * 7, dtype=torch.float64)
    zero[6::7] = 0.3  # biases only: λ does not depend on h
    zero.requires_grad_()
    index = support(toy.logits(zero), K)
    pair = [grad(topk_objective(toy.logits(zero, detach=stop), index), zero) for stop in (True, False)]
    close(*pair)
    # the forward is one function
    psi = toy.psi()
    close(toy.logits(psi, detach=True), toy.logits(psi))


@pytest.mark.parametrize("seed", range(4))
def test_the_packages_terms_are_these(seed):
    """eq:rw-stopped-directions, eq:rw-total-error: `alignment.terms` on inner products equals the vectors' own figures."""
    v, w, complete, stopped, *_ = directions(seed, noise=0.5)
    vectors = {"entropy_semi": stopped, "entropy": complete, "value_topk": v, "value": w}
    found = terms("all", InnerProducts([RowDirections(vectors, 1, 0)]))
    assert found.stopped_error == pytest.approx(float((stopped - complete).norm() / complete.norm()), rel=1e-6)
    assert found.tail_error == pytest.approx(float((v - w).norm() / w.norm()), rel=1e-6)
    assert found.gain.mean == pytest.approx(float(w @ stopped), rel=1e-9)
    for condition, g, task in ((found.complete, complete, v), (found.stopped, stopped, v), (found.total, stopped, w)):
        cosine = float(g @ task / (g.norm() * task.norm()))
        assert condition.cosine.mean == pytest.approx(cosine, rel=1e-9)
        betas = np.geomspace(1e-3, 1e4, 4001)
        rhos = [float((g - b * task).norm() / (b * task.norm())) for b in betas]
        if cosine > 0:
            assert condition.rho.mean == pytest.approx(min(rhos), abs=1e-4)
            assert condition.rho.mean == pytest.approx(math.sin(math.acos(cosine)), rel=1e-9)
            assert condition.mismatch == pytest.approx(
                condition.rho.mean * condition.beta * float(task.norm()), rel=1e-6
            )
        else:
            assert min(rhos) >= 1
            assert condition.beta is None
    assert smallest_rho(-0.2) == 1.0
