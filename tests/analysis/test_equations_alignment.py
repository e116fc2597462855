"""When entropy descent helps the task: the alignment identity, its error terms, the step bound and the margin models. fp64."""

import math

import numpy as np
import pytest
import torch
from toy import (
    M,
    S,
    Toy,
    V,
    close,
    conditional,
    covariance,
    entropy,
    grad,
    jacobian,
    rand,
    support,
    topk_objective,
    value,
)

from loragate.analysis.directions import RowDirections
from loragate.analysis.theorem import FULL, SEMI, TOPK, VALUE, InnerProducts, smallest_rho, terms

K = 4


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


def entropy_error(toy, psi, index, r, beta):
    """e_ψ from the scores, and not from the gradients that it is to explain."""
    q = conditional(toy.logits(psi), index).detach()
    score = jacobian(lambda x: torch.log_softmax(toy.logits(x).gather(-1, index), -1), psi.detach())
    rs = r.gather(-1, index)
    a_task, a_entropy = rs - (q * rs).sum(-1, keepdim=True), q.log() - (q * q.log()).sum(-1, keepdim=True)
    return torch.einsum("ta,tap->p", q * (a_entropy - beta * a_task), score) / S


def test_alignment_identity():
    """eq:rw-alignment-identity: −log k ∇F_k = β∇V_k + e_ψ with e_ψ = mean E_q[(A^ent − βA^r)s], for any β."""
    v, _, complete, _, toy, psi, index, r = directions()
    for beta in (0.1, 1.0, 7.0):
        close(complete, beta * v + entropy_error(toy, psi, index, r, beta))


def test_value_improvement():
    """eq:rw-value-improvement: V_k(ψ − η∇F) − V_k(ψ) ≥ ηβ(1 − ρ)/log k ‖∇V_k‖² + o(η) where the assumption holds."""
    v, _, complete, _, toy, psi, index, r = directions(noise=0.2)
    assert float(v @ complete) > 0
    beta = float(complete @ complete / (v @ complete))
    rho = float((complete - beta * v).norm() / (beta * v.norm()))
    assert rho < 1
    slacks = []
    for eta in (1e-3, 1e-4):
        moved = psi.detach() + eta * complete / math.log(K)
        gained = (value(toy.logits(moved), r, index) - value(toy.logits(psi), r, index)).item()
        bound = eta * beta * (1 - rho) / math.log(K) * float(v @ v)
        slacks.append((gained - bound) / eta)
    assert slacks[-1] >= -1e-6


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


def stopped_error(toy, psi, index):
    """b_sg = (∂Λ − dΛ)ᵀ · (−log k ∂F/∂Λ): what of dΛ/dψ goes through the gates' inputs, taken away."""
    inputs = []
    toy.run(lambda m, c: inputs.append(c.detach()) or toy.gate(psi.detach(), m, c, False))
    lam = toy.coefficients(psi).detach().requires_grad_()
    signal = -math.log(K) * grad(topk_objective(toy.logits_at(lam), index), lam)
    whole = jacobian(toy.coefficients, psi.detach())
    direct = jacobian(lambda x: torch.stack([toy.gate(x, m, c, False) for m, c in enumerate(inputs)]), psi.detach())
    return torch.einsum("ms,msp->p", signal, direct - whole)


def test_stopped_alignment():
    """eq:rw-stopped-alignment: Ĝ = β∇V_k + e_ψ + b_sg, and the condition on e_ψ + b_sg makes the stopped step a gain."""
    v, _, _, stopped, toy, psi, index, r = directions(noise=0.2)
    for beta in (0.5, 2.0):
        close(stopped, beta * v + entropy_error(toy, psi, index, r, beta) + stopped_error(toy, psi, index))
    best = float(stopped @ stopped / (v @ stopped))
    assert float((stopped - best * v).norm()) < best * float(v.norm())
    gained = value(toy.logits(psi.detach() + 1e-4 * stopped), r, index) - value(toy.logits(psi), r, index)
    assert float(gained) > 0


def test_total_error():
    """eq:rw-total-error: Ĝ = β∇V + e_ψ + b_sg + b_tail with b_tail = β(∇V_k − ∇V)."""
    _, w, _, stopped, toy, psi, index, r = directions(noise=0.2)
    z = toy.logits(psi).detach()
    p, q = torch.softmax(z, -1), conditional(z, index)
    # the policy gradients of both values, as expectations over their actions
    score = jacobian(lambda x: torch.log_softmax(toy.logits(x), -1), psi.detach())
    centred = r - (p * r).sum(-1, keepdim=True)
    rs = r.gather(-1, index)
    inside = torch.zeros_like(p).scatter(-1, index, q * (rs - (q * rs).sum(-1, keepdim=True)))
    difference = torch.einsum("ta,tap->p", inside - p * centred, score) / S
    assert difference.norm() > 1e-3 * w.norm()
    for beta in (0.3, 3.0):
        e_psi, b_sg = entropy_error(toy, psi, index, r, beta), stopped_error(toy, psi, index)
        close(stopped, beta * w + e_psi + b_sg + beta * difference)
    close(grad(value(toy.logits(psi), r, support(toy.logits(psi), V)), psi), w)


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
    assert (SEMI, FULL, TOPK, VALUE) == (0, 1, 2, 3)
    assert smallest_rho(-0.2) == 1.0


def test_signal_decomposition():
    """eq:rw-signal-decomposition: z = βr + b + ε; b is free, as advantages are centred, and ε is what they differ by."""
    _, _, _, _, toy, psi, index, r = directions()
    z = toy.logits(psi).detach()
    q = conditional(z, index)
    advantages = []
    for b in (0.0, rand(S, 1, seed=4)):
        epsilon = (z - 1.7 * r - b).gather(-1, index)
        signal = 1.7 * r.gather(-1, index) + epsilon
        advantages.append(signal - (q * signal).sum(-1, keepdim=True))
    entropic = q.log() - (q * q.log()).sum(-1, keepdim=True)
    for advantage in advantages:
        close(advantage, entropic)


def test_projected_delta():
    """eq:rw-projected-delta: A^ent − βA^r = ε − E_q ε, e_ψ = mean Jᵀ C(q) ε; errors that JᵀC annihilates do no harm."""
    v, _, complete, _, toy, psi, index, r = directions()
    z = toy.logits(psi).detach()
    beta = 1.7
    q, epsilon = conditional(z, index), (z - beta * r).gather(-1, index)
    jac = jacobian(lambda x: toy.logits(x).gather(-1, index), psi.detach())
    centering = torch.diag_embed(q) - q[:, :, None] * q[:, None]
    e_psi = torch.einsum("tap,tab,tb->p", jac, centering, epsilon) / S
    close(complete - beta * v, e_psi)
    reach = torch.einsum("tap,tab->ptb", jac, centering).reshape(jac.shape[-1], -1)
    # C(q) leaves constants per position out of reach, so the last right singular vector is annihilated
    harmless = epsilon + 100 * torch.linalg.svd(reach)[2][-1].reshape(S, K)
    close(torch.einsum("tap,tab,tb->p", jac, centering, harmless) / S, e_psi, 1e-8)
    close(torch.einsum("tap,tab,tb->p", jac, centering, epsilon + 100.0) / S, e_psi, 1e-9)


def test_coordinate_signal():
    """eq:rw-coordinate-signal: −log k ∂F/∂λ_i = βh_i + b_i; with |b_i| < β|h_i| the sign is the task's."""
    _, _, _, _, toy, psi, _, r = directions(noise=0.3)
    lam = toy.coefficients(psi).detach().requires_grad_()
    z = toy.logits_at(lam)
    index = support(z, K)
    d = (
        jacobian(toy.logits_at, lam.detach())
        .gather(1, index[:, :, None, None].expand(-1, -1, M, S))
        .permute(0, 2, 3, 1)
    )
    q, rs = conditional(z, index).detach(), r.gather(-1, index)
    beta = 1.9
    epsilon = (z.detach() - beta * r).gather(-1, index)
    h, b = (covariance(q[:, None, None], x[:, None, None].expand_as(d), d).mean(0) for x in (rs, epsilon))
    signal = -math.log(K) * grad(topk_objective(z, index), lam)
    close(signal, beta * h + b)
    close(h, grad(value(toy.logits_at(lam), r, index), lam))
    sure = b.abs() < beta * h.abs()
    assert sure.any()
    assert (torch.sign(signal)[sure] == torch.sign(h)[sure]).all()


def test_positive_inner_product():
    """eq:rw-positive-inner-product: ⟨v, G⟩ ≥ β‖v‖² − ‖v‖‖e‖ ≥ β(1 − ρ)‖v‖², for every β and the ρ that goes with it."""
    for seed in range(5):
        v, g = rand(12, seed=seed), rand(12, seed=seed + 100) + rand(12, seed=seed)
        for beta in (0.2, 1.0, 5.0):
            error = g - beta * v
            rho = float(error.norm() / (beta * v.norm()))
            first = beta * float(v @ v) - float(v.norm() * error.norm())
            assert float(v @ g) >= first - 1e-12
            assert first == pytest.approx(beta * (1 - rho) * float(v @ v), abs=1e-9)


def test_finite_value_bound():
    """eq:rw-finite-value-bound: on a quadratic with Lipschitz gradient the bound holds, is positive inside its interval for η, and
    zero at its end."""
    a = rand(6, 6, seed=1)
    hessian = -(a @ a.T) / 6
    lipschitz = float(torch.linalg.eigvalsh(-hessian).max())
    psi, top = rand(6, seed=2), rand(6, seed=3)

    def task(x):
        return float(0.5 * (x - top) @ hessian @ (x - top))

    v = hessian @ (psi - top)
    beta, k = 1.3, 100
    error = rand(6, seed=4)
    for rho in (0.1, 0.5, 0.9):
        g = beta * v + error / error.norm() * rho * beta * v.norm()
        end = 2 * (1 - rho) * math.log(k) / (lipschitz * beta * (1 + rho) ** 2)

        def bound(eta, rho=rho):
            first = eta * beta * (1 - rho) / math.log(k)
            return (first - lipschitz * eta**2 * beta**2 * (1 + rho) ** 2 / (2 * math.log(k) ** 2)) * float(v @ v)

        for share in (0.01, 0.5, 0.99):
            eta = share * end
            assert bound(eta) > 0
            assert task(psi + eta * g / math.log(k)) - task(psi) >= bound(eta) - 1e-12
        assert bound(end) == pytest.approx(0, abs=1e-12)


def test_margin_model():
    """eq:rw-margin, eq:rw-binary-components: ∂H/∂λ_i = −m ∂p/∂λ_i: right for m > 0, nothing at 0, wrong for m < 0."""
    a, lam = rand(5, seed=1), rand(5, seed=2)
    for offset in (2.0, 0.0, -2.0):
        m0 = offset - float(lam @ a)
        leaf = lam.clone().requires_grad_()
        m = m0 + leaf @ a
        p = torch.sigmoid(m)
        h = -(p * p.log() + (1 - p) * (1 - p).log())
        dh, dp = grad(h, leaf), grad(p, leaf)
        close(dh, -m.detach() * p.detach() * (1 - p.detach()) * a)
        close(dh, -m.detach() * dp)
        close(dp, p.detach() * (1 - p.detach()) * a)
        if offset:
            agree = torch.sign(-dh) == torch.sign(dp)
            assert agree.all() if offset > 0 else not agree.any()
        else:
            close(dh, torch.zeros(5))
    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    close(grad(-(x * x.log() + (1 - x) * (1 - x).log()), x), -torch.log(x / (1 - x)))


def test_multiclass_margin():
    """eq:rw-multiclass-margin: d = a e_y + b·1: ∂H = −a p_y Σ p_b(z_y − z_b), ∂p_y = a p_y(1 − p_y)."""
    z0 = rand(V, seed=5, scale=1.5)
    seen = set()
    for y in range(V):
        for a, b in ((0.7, 0.2), (-1.1, 3.0)):
            tangent = torch.full((V,), b, dtype=torch.float64)
            tangent[y] += a
            lam = torch.zeros((), dtype=torch.float64, requires_grad=True)
            z = z0 + lam * tangent
            p = torch.softmax(z, -1)
            dh, dp = grad(entropy(z), lam), grad(p[y], lam)
            p = p.detach()
            others = torch.arange(V) != y
            close(dh, -a * p[y] * (p[others] * (z0[y] - z0[others])).sum())
            close(dp, a * p[y] * (1 - p[y]))
            above = float(z0[y]) > float((p[others] * z0[others]).sum() / (1 - p[y]))
            assert (torch.sign(-dh) == torch.sign(dp)) == above
            seen.add(above)
            if y == int(z0.argmax()):
                assert above, "a strictly highest correct logit suffices"
    assert seen == {True, False}
