"""The paper's equations as numbers, where the analysis computes them: its closed forms against autograd on a small model, fp64.

The first words of a docstring are the labels of the equations that a test stands for. The model is causal, with gated LoRA
modules in sequence: embedding → for each module m: h ← tanh(u_m), u_m = W_m c + λ_m (α/r) B_m A_m c with c the causal mean of
h → logits. So a gate at an early position changes all later predictions, as in a transformer.
"""

import math

import numpy as np
import pytest
import torch

from loragate.analysis.alignment import smallest_rho, terms
from loragate.analysis.directions import RowDirections, entropy_logit_gradient, value_logit_gradient
from loragate.gates.operation import gate_coefficient_of_input
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap
from loragate.losses import topk_entropy
from loragate.losses.head import statistics_of_logits
from loragate.losses.objectives import objectives
from loragate.losses.objectives.weighted import eaft

V, D, R, M, S, K = 9, 6, 2, 3, 5, 4
SCALING = 1.5


def rand(*shape, seed, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


class Toy:
    """The frozen parts and one token sequence."""

    def __init__(self, seed=0):
        self.embedding = rand(V, D, seed=seed + 1)
        self.w = [rand(D, D, seed=seed + 10 + m, scale=0.7) for m in range(M)]
        self.delta = [SCALING * rand(D, R, seed=seed + 30 + m) @ rand(R, D, seed=seed + 20 + m) for m in range(M)]
        self.head = rand(V, D, seed=seed + 40, scale=1.5)
        self.tokens = torch.randint(0, V, (S,), generator=torch.Generator().manual_seed(seed + 50))

    def psi(self):
        """Gate parameters, one flat vector [M (D + 1)]."""
        return rand(M * (D + 1), seed=5, scale=0.6).requires_grad_()

    def logits(self, psi, detach=False):
        """G_t(Λ(ψ)), [S, V]; `detach` stops the gradient at gate inputs (the paper's sg)."""
        h, mix = self.embedding[self.tokens], torch.tril(torch.ones(S, S, dtype=torch.float64))
        for m, part in enumerate(psi.split(D + 1)):
            c = mix / mix.sum(1, keepdim=True) @ h
            lam = gate_coefficient_of_input(c, part[:D], part[D:], SignedMap(Range(-2.0, 3.0), 0.8), detach)
            h = torch.tanh(c @ self.w[m].T + lam[:, None] * (c @ self.delta[m].T))
        return h @ self.head.T


def support(z, k):
    """Top-k indices [S, k]."""
    return z.detach().topk(k, -1).indices


def entropy(z):
    """H(softmax z) over the last dimension, nats."""
    log_p = torch.log_softmax(z, -1)
    return -(log_p.exp() * log_p).sum(-1)


def conditional(z, index):
    """q on a fixed support."""
    return torch.softmax(z.gather(-1, index), -1)


def topk_objective(z, index):
    """F_k = mean H(q) / log k on a fixed support."""
    return entropy(z.gather(-1, index)).mean() / math.log(index.shape[-1])


def value(z, r, index=None):
    """V_k = mean E_q r, or V over the full vocabulary without a support; r [S, V] fixed."""
    if index is None:
        return (torch.softmax(z, -1) * r).sum(-1).mean()
    return (conditional(z, index) * r.gather(-1, index)).sum(-1).mean()


def grad(scalar, at):
    return torch.autograd.grad(scalar, at, retain_graph=True)[0]


def close(a, b, tolerance=1e-10):
    a, b = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (a, b))
    assert a.shape == b.shape, (a.shape, b.shape)
    assert float((a - b).abs().max()) <= tolerance, float((a - b).abs().max())


def point(seed=0):
    toy = Toy(seed)
    psi = toy.psi()
    z = toy.logits(psi)
    return toy, psi, z, support(z, K)


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
    score = torch.autograd.functional.jacobian(
        lambda x: torch.log_softmax(toy.logits(x).gather(-1, index), -1), psi.detach()
    )
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
    close(torch.autograd.grad(z, psi, value_logit_gradient(fixed, r) / S, retain_graph=True)[0], full)


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
    found = terms("all", [RowDirections(torch.stack([stopped, complete, v, w]), 1, 0)])
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
        else:
            assert min(rhos) >= 1
    assert smallest_rho(-0.2) == 1.0


def softmax_case(seed=1, size=7):
    """(z, p, H, entropy advantage) of one distribution; z is a leaf."""
    z = rand(size, seed=seed, scale=2).requires_grad_()
    p = torch.softmax(z, -1).detach()
    h = -(p * p.log()).sum()
    return z, p, h, p.log() + h


def objective_gradient(name, z, label):
    """∇_z of the package's objective at one token, its statistics taken from these logits."""
    objective = eaft(k=len(z)) if name == "eaft" else objectives[name]
    stats = statistics_of_logits(z[None], torch.tensor([label]), k=len(z))
    return grad(objective.loss(stats).sum(), z)


def test_sft_and_the_ray_of_weighted_ce():
    """eq:rw-sft, eq:rw-weighted, eq:rw-ray: −∇_z(w ℓ) = w (e_y − π), with the weights of the package's objectives."""
    z, p, _, _ = softmax_case()
    top = torch.softmax(z.detach(), -1)
    h = float(-(top * top.log()).sum() / math.log(len(z)))
    for y in range(len(z)):
        unit = torch.eye(len(z), dtype=torch.float64)[y]
        weights = {"sft": 1.0, "dft": float(p[y]), "profit": float(p[y] > 0.1), "eaft": h}
        for name, weight in weights.items():
            close(-objective_gradient(name, z, y), weight * (unit - p), 1e-6)  # statistics are fp32


def test_policy_loss_and_entropy_advantage():
    """eq:rw-policy, eq:rw-entropy-advantage, eq:rw-proof-entropy.

    ∇H = −E_π[A ∇log π], E_π A = 0, ∂H/∂z = −π A, and A > 0 exactly where π > e^−H.
    """
    z, p, h, advantage = softmax_case()
    log_p = torch.log_softmax(z, -1)
    exact = grad(entropy(z), z)
    close(exact, -p * advantage)
    close(exact, grad((p * advantage * log_p).sum(), z) * -1)
    close(exact, -grad((p * (p.log() + 1) * log_p).sum(), z), 1e-10)
    close((p * advantage).sum(), 0.0)
    assert ((advantage > 0) == (p > (-h).exp())).all()
    close(grad(-(p * advantage * log_p).sum(), z), grad(entropy(z), z))  # the policy loss with μ = π and A as it is


def test_importance_form_of_sft_and_its_baseline():
    """eq:rw-is-sft and what follows it: E_π[w 1[a = y]/π(a) ∇log π(a)] is w ∇log π(y), and a constant less changes nothing."""
    z, p, _, _ = softmax_case()
    log_p, y, w = torch.log_softmax(z, -1), 3, 0.7
    ratio = torch.zeros_like(p)
    ratio[y] = w / p[y]
    close(-grad((p * ratio * log_p).sum(), z), grad(-w * log_p[y], z))
    close(-grad((p * (ratio - w) * log_p).sum(), z), grad(-w * log_p[y], z))
    assert ((ratio - w) < 0).sum() == len(z) - 1, "signs alone tell SFT and entropy not apart"


def test_paths_towards_the_reference_token():
    """eq:rw-mixture-path, eq:rw-ce-probability-path: dH along (1 − ε)p + εe_y is −A(y); a CE step moves p along C(p)(e_y − p)."""
    z, p, h, advantage = softmax_case()
    y, unit = 2, torch.eye(len(z), dtype=torch.float64)[2]

    def on_path(step):
        mixed = (1 - step) * p + step * unit
        return -(mixed * mixed.log()).sum()

    close(torch.autograd.functional.jacobian(on_path, torch.zeros((), dtype=torch.float64)), -advantage[y])
    close(-advantage[y], -p[y].log() - h)
    moved = torch.autograd.functional.jacobian(
        lambda step: torch.softmax(z.detach() + step * (unit - p), -1), torch.zeros((), dtype=torch.float64)
    )
    close(moved, (torch.diag(p) - torch.outer(p, p)) @ (unit - p))
    assert not torch.allclose(moved / moved.norm(), (unit - p) / (unit - p).norm(), atol=1e-2)


def test_a_weight_that_is_differentiated_adds_a_term():
    """eq:rw-weight-derivative: ∇(w ℓ) = w ∇ℓ + ℓ ∇w; the package's weights are detached, so that the second is absent."""
    z, _, _, _ = softmax_case()
    loss, weight, y = -torch.log_softmax(z, -1)[4], torch.softmax(z, -1)[4], 4
    close(grad(weight * loss, z), weight.detach() * grad(loss, z) + loss.detach() * grad(weight, z))
    close(objective_gradient("dft", z, y), weight.detach() * grad(loss, z), 1e-6)


def test_the_gated_module_and_its_jacobian():
    """eq:rw-lora, eq:rw-gated-delta, eq:rw-gate-logit, eq:rw-full-module-jacobian.

    ∂u/∂h = W + λΔW + (ΔWh)(∇λ)ᵀ; the last term is absent where the gate's input is detached.
    """
    w, a, b, h = rand(D, D, seed=1), rand(R, D, seed=2), rand(D, R, seed=3), rand(D, seed=4)
    gate, bias, signed = rand(D, seed=5), rand(1, seed=6), SignedMap(Range(-2.0, 3.0), 0.8)
    delta = SCALING * b @ a

    def lam(x, detach):
        return gate_coefficient_of_input(x[None], gate, bias, signed, detach)[0]

    def output(x, detach=False):
        return w @ x + lam(x, detach) * (delta @ x)

    jacobian = torch.autograd.functional.jacobian
    slope = jacobian(lambda x: lam(x, False), h)
    close(jacobian(output, h), w + lam(h, False) * delta + torch.outer(delta @ h, slope))
    close(jacobian(lambda x: output(x, True), h), w + lam(h, False) * delta)
    g = gate @ h + bias[0]
    v = torch.tanh(g / 0.8)
    close(lam(h, False), 1 + 3 * v.clamp(max=0) + 2 * v.clamp(min=0))


def supplied(toy, lam_MS):
    """G_t(λ), [S, V]: the logits with λ as controls from outside."""
    h, mix = toy.embedding[toy.tokens], torch.tril(torch.ones(S, S, dtype=torch.float64))
    for m in range(M):
        c = mix / mix.sum(1, keepdim=True) @ h
        h = torch.tanh(c @ toy.w[m].T + lam_MS[m][:, None] * (c @ toy.delta[m].T))
    return h @ toy.head.T


def test_credit_of_single_coefficients():
    """eq:rw-gate-credit, eq:rw-causal-jacobian, eq:rw-all-position-credit, eq:rw-topk-policy, eq:rw-centered-score.

    The surrogate is eq:rw-policy with μ = q and A/log k.
    """
    toy, lam = Toy(), rand(M, S, seed=3, scale=0.5).requires_grad_()
    z = supplied(toy, lam)
    index = support(z, K)
    exact = -grad(topk_objective(z, index), lam)
    d = torch.autograd.functional.jacobian(lambda x: supplied(toy, x), lam.detach())  # [S, V, M, S]
    assert (d[0, :, :, 1:] == 0).all(), "no gate behind a position takes part in its prediction"
    assert (d[-1, :, :, 0] != 0).any(), "an earlier one does"
    q, on = conditional(z, index).detach(), index[..., None, None].expand(-1, -1, M, S)
    d_on, z_on = d.gather(1, on), z.detach().gather(-1, index)
    mean_d = torch.einsum("ta,tams->tms", q, d_on)
    covariance = torch.einsum("ta,tams->tms", q * (z_on - (q * z_on).sum(-1, keepdim=True)), d_on - mean_d[:, None])
    close(exact, covariance.mean(0) / math.log(K))
    full = torch.einsum("tv,tvms->ms", -entropy_logit_gradient(z.detach(), K), d) / S / math.log(K)
    close(-exact, full)
    score = torch.autograd.functional.jacobian(lambda x: conditional(supplied(toy, x), index).log(), lam.detach())
    close(score, d_on - mean_d[:, None])
    advantage = q.log() - (q * q.log()).sum(-1, keepdim=True)
    close(exact, torch.einsum("ta,tams->ms", q * advantage, score) / S / math.log(K))
    # the score of π serves as well as that of q, as the advantage is centred
    whole = torch.autograd.functional.jacobian(lambda x: torch.log_softmax(supplied(toy, x), -1), lam.detach())
    close(exact, torch.einsum("ta,tams->ms", q * advantage, whole.gather(1, on)) / S / math.log(K))
    surrogate = -(q * advantage / math.log(K) * torch.log_softmax(z, -1).gather(-1, index)).sum(-1).mean()
    close(grad(surrogate, lam), -exact)
    # and the shared parameters: J^ψ = J^λ B
    psi = toy.psi()

    def coefficients(x):
        h, mix, found = toy.embedding[toy.tokens], torch.tril(torch.ones(S, S, dtype=torch.float64)), []
        for m, part in enumerate(x.split(D + 1)):
            c = mix / mix.sum(1, keepdim=True) @ h
            found.append(gate_coefficient_of_input(c, part[:D], part[D:], SignedMap(Range(-2.0, 3.0), 0.8), False))
            h = torch.tanh(c @ toy.w[m].T + found[-1][:, None] * (c @ toy.delta[m].T))
        return torch.stack(found)

    close(supplied(toy, coefficients(psi)), toy.logits(psi))
    b = torch.autograd.functional.jacobian(coefficients, psi.detach())  # [M, S, P]
    j_lam = torch.autograd.functional.jacobian(lambda x: supplied(toy, x), coefficients(psi).detach())
    close(torch.autograd.functional.jacobian(toy.logits, psi.detach()), torch.einsum("tvms,msp->tvp", j_lam, b))


def test_structure_of_the_mismatch():
    """eq:rw-alignment-identity, eq:rw-signal-decomposition, eq:rw-projected-delta, eq:rw-coordinate-signal, and its h_i, b_i."""
    toy, psi, z, index = point()
    beta, r = 0.7, rand(S, V, seed=9)
    q, jacobian = conditional(z, index).detach(), torch.autograd.functional.jacobian(toy.logits, psi.detach())
    on = index[..., None].expand(-1, -1, psi.numel())
    j, z_on, r_on = jacobian.gather(1, on), z.detach().gather(-1, index), r.gather(-1, index)
    error = z_on - beta * r_on - rand(S, 1, seed=12)  # any b_t
    centred = torch.diag_embed(q) - q[:, :, None] * q[:, None]
    e_psi = torch.einsum("tap,tab,tb->p", j, centred, error) / S
    descent, task = -math.log(K) * grad(topk_objective(z, index), psi), grad(value(z, r, index), psi)
    close(descent, beta * task + e_psi)
    advantage = q.log() - (q * q.log()).sum(-1, keepdim=True)
    close(advantage - beta * (r_on - (q * r_on).sum(-1, keepdim=True)), error - (q * error).sum(-1, keepdim=True))

    def covariance(x, d):  # Cov_q over the support, [T]
        mean = (q * x).sum(-1, keepdim=True), (q * d).sum(-1, keepdim=True)
        return (q * (x - mean[0]) * (d - mean[1])).sum(-1)

    for i in range(0, psi.numel(), 5):  # a parameter is a coordinate as good as any
        h_i, b_i = covariance(r_on, j[..., i]).mean(), covariance(error, j[..., i]).mean()
        close(descent[i], beta * h_i + b_i)
        if abs(b_i) < beta * abs(h_i):
            assert descent[i] * h_i > 0, "entropy then has the sign of the task"


def test_entropy_beyond_the_support():
    """eq:rw-entropy-tail: H(π) = h_b(m) + m H(q) + (1 − m) H(tail)."""
    _, p, h, _ = softmax_case()
    top = p.topk(4).indices
    mass = p[top].sum()
    inside, outside = p[top] / mass, p[[at for at in range(len(p)) if at not in top]] / (1 - mass)
    binary = -(mass * mass.log() + (1 - mass) * (1 - mass).log())
    parts = [-(x * x.log()).sum() for x in (inside, outside)]
    close(h, binary + mass * parts[0] + (1 - mass) * parts[1])


@pytest.mark.parametrize("seed", [0, 2])  # where all three directions are below 90°
def test_the_update_raises_the_value(seed):
    """eq:rw-stopped-alignment, eq:rw-total-error, eq:rw-positive-inner-product, eq:rw-value-improvement, eq:rw-finite-value-bound.

    The last with its interval for η. For each of the three forms ρ and β are as the condition has them, and the Lipschitz constant
    of ∇V comes from Hessians along the segment.
    """
    v, w, complete, stopped, toy, psi, index, r = directions(seed, noise=0.3)
    for g, task, on in ((complete, v, index), (stopped, v, index), (stopped, w, None)):
        cosine = float(g @ task / (g.norm() * task.norm()))
        assert cosine > 0, "or the case shows nothing"
        beta = float(g.norm() ** 2 / (g @ task))
        error = g - beta * task
        rho = float(error.norm() / (beta * task.norm()))
        assert rho == pytest.approx(smallest_rho(cosine), rel=1e-9)
        assert float(task @ g) >= beta * (1 - rho) * float(task @ task) - 1e-12 > 0

        def gained(eta, g=g, on=on):
            with torch.no_grad():
                after, before = (value(toy.logits(x), r, on) for x in (psi + eta * g / math.log(K), psi))
            return float(after - before)

        # the first order: what is left over the linear term falls faster than η
        linear = float(task @ g) / math.log(K)
        small = [abs(gained(eta) - eta * linear) / eta for eta in (1e-3, 1e-4)]
        assert small[1] < 0.2 * small[0] + 1e-9
        bound_to, lipschitz = 1.0, 0.0
        for step in np.linspace(0, bound_to, 9):
            at = (psi + step * g / math.log(K)).detach()
            hessian = torch.autograd.functional.hessian(lambda x, on=on: value(toy.logits(x), r, on), at)
            lipschitz = max(lipschitz, float(torch.linalg.matrix_norm(hessian, 2)))
        largest = 2 * (1 - rho) * math.log(K) / (lipschitz * beta * (1 + rho) ** 2)
        for share in (0.1, 0.5, 0.9):
            eta = share * min(largest, bound_to)
            first = eta * beta * (1 - rho) / math.log(K)
            second = lipschitz * (eta * beta * (1 + rho) / math.log(K)) ** 2 / 2
            assert gained(eta) >= (first - second) * float(task @ task) - 1e-12
            assert first - second > 0, "inside the interval the bound is positive"
        first, second = (
            largest * beta * (1 - rho) / math.log(K),
            lipschitz * (largest * beta * (1 + rho) / math.log(K)) ** 2 / 2,
        )
        assert first == pytest.approx(second), "and zero at its end"


def test_the_finite_bound_is_reached():
    """eq:rw-finite-value-bound: with V = a·ψ − L‖ψ‖²/2 and an error along v, ρ = 0, it is an equality."""
    a, lipschitz, beta, eta = rand(4, seed=1), 1.7, 0.9, 0.3
    gained = lambda x: a @ x - lipschitz * (x @ x) / 2  # noqa: E731
    step = eta * beta * a / math.log(K)  # v = a at ψ = 0
    bound = (eta * beta / math.log(K) - lipschitz * (eta * beta / math.log(K)) ** 2 / 2) * (a @ a)
    close(gained(step) - gained(torch.zeros_like(a)), bound)


def test_drift_of_interleaved_training():
    """eq:rw-drift: the change over a gate step and a delta step is the sum of both; without the second the first remains."""
    f = lambda phi, psi: torch.sin(phi * psi) + phi**2 - psi  # noqa: E731
    (phi, psi), (phi_next, psi_next) = (rand(2, seed=1), rand(2, seed=2))
    gate, delta = f(phi, psi_next) - f(phi, psi), f(phi_next, psi_next) - f(phi, psi_next)
    close(f(phi_next, psi_next) - f(phi, psi), gate + delta)


def test_one_update_on_shared_parameters():
    """eq:rw-shared-ce: Δz_t = η/|T| Σ_s w_s K_t K_sᵀ (e_{y_s} − π_s) + o(η), without the signs of one token's ray."""
    toy, theta = Toy(), Toy().psi().detach()
    labels, weights = torch.tensor([1, 2, 3, 4, 5]), torch.rand(S, dtype=torch.float64, generator=torch.manual_seed(0))
    k = torch.autograd.functional.jacobian(toy.logits, theta)  # [S, V, P]
    z = toy.logits(theta).detach()
    ray = torch.nn.functional.one_hot(labels, V).double() - torch.softmax(z, -1)
    first = torch.einsum("tvp,sup,su,s->tv", k, k, ray, weights) / S

    def moved(eta):
        x = theta.clone().requires_grad_()
        loss = (weights * torch.nn.functional.cross_entropy(toy.logits(x), labels, reduction="none")).mean()
        return (toy.logits(theta - eta * grad(loss, x)) - z) / eta

    far, near = (float((moved(eta) - first).norm()) for eta in (1e-3, 1e-5))
    assert near < 0.05 * far
    assert ((first > 0) != (ray > 0)).any()


def test_margins_of_helpful_and_harmful_features():
    """eq:rw-margin, eq:rw-binary-components: ∂H/∂λ_i = −m p(1 − p) a_i; right where m > 0, wrong where m < 0, nothing at m = 0."""
    a = torch.tensor([0.8, -0.5], dtype=torch.float64)
    for m0 in (1.2, -0.9, None):
        lam = torch.tensor([0.4, 0.6], dtype=torch.float64, requires_grad=True)
        m = (a @ lam).detach() * 0 + (m0 if m0 is not None else 0) + a @ lam - (a @ lam).detach()
        p = torch.sigmoid(m)
        h = -(p * p.log() + (1 - p) * (1 - p).log())
        close(grad(h, lam), -m * p * (1 - p) * a)
        close(grad(h, m), -m * p * (1 - p))  # dH/dp · dp/dm
        close(grad(h, lam), -m * grad(p, lam))
        sign = 0 if m0 is None else math.copysign(1, m0)
        assert (torch.sign(-grad(h, lam)) == sign * torch.sign(a)).all()


def test_multiclass_margin():
    """eq:rw-multiclass-margin: a feature d = a e_y + b 1; entropy has the task's sign iff z_y exceeds the others' mean under p."""
    a, b = 0.9, -1.3
    agreed = []
    for seed in range(12):
        z, y = rand(6, seed=seed, scale=1.5), seed % 6
        lam = torch.zeros((), dtype=torch.float64, requires_grad=True)
        moved = z + lam * (a * torch.eye(6, dtype=torch.float64)[y] + b)
        p = torch.softmax(moved, -1)
        slope, gain = grad(entropy(moved), lam), grad(p[y], lam)
        fixed = p.detach()
        others = [at for at in range(6) if at != y]
        close(slope, -a * fixed[y] * sum(fixed[at] * (z[y] - z[at]) for at in others))
        close(gain, a * fixed[y] * (1 - fixed[y]))
        above = z[y] > sum(fixed[at] * z[at] for at in others) / (1 - fixed[y])
        assert (-slope * gain > 0) == above
        if z.argmax() == y:
            assert above, "a strictly highest correct logit suffices"
        agreed.append(bool(above))
    assert 0 < sum(agreed) < len(agreed)


def test_branches_zero_and_reach_of_the_map():
    """eq:rw-transform-branches, eq:rw-module-bound, λ = 0 at v = −1/(1 − L), λ = 1 at g = 0, and Σ(d_m + 1) parameters."""
    lower, upper, tau = -6.0, 3.0, 0.7
    signed, one = SignedMap(Range(lower, upper), tau), torch.ones(1, dtype=torch.float64)

    def lam(g):
        return gate_coefficient_of_input(one[None], torch.zeros(1, dtype=torch.float64), g[None], signed, False)[0]

    g = torch.linspace(-4, 4, 401, dtype=torch.float64)
    v, found = torch.tanh(g / tau), torch.stack([lam(x) for x in g])
    close(found, torch.where(v < 0, 1 + (1 - lower) * v, 1 + (upper - 1) * v))
    assert ((found > lower) & (found < upper)).all()
    assert (found.diff() > 0).all(), "both slopes are positive"
    close(lam(torch.zeros((), dtype=torch.float64)), 1.0)
    off = tau * math.atanh(-1 / (1 - lower))
    close(lam(torch.tensor(off, dtype=torch.float64)), 0.0)
    assert lam(torch.tensor(off - 0.01, dtype=torch.float64)) < 0 < lam(torch.tensor(off + 0.01, dtype=torch.float64))
    delta = rand(D, seed=3)
    reach = max(1 - lower, upper - 1) * delta.norm()
    assert all(((x - 1) * delta).norm() <= reach for x in found)
    assert Toy().psi().numel() == sum(D + 1 for _ in range(M))


def test_all_ones_is_stage_one_and_all_zeros_the_base():
    """Without a label: λ ≡ 1 is the Stage-I model, λ ≡ 0 the base."""
    toy = Toy()
    one, zero = (supplied(toy, torch.full((M, S), x, dtype=torch.float64)) for x in (1.0, 0.0))
    close(toy.logits(torch.zeros(M * (D + 1), dtype=torch.float64)), one)
    bare = Toy()
    bare.delta = [torch.zeros_like(part) for part in bare.delta]
    close(zero, supplied(bare, torch.full((M, S), 5.0, dtype=torch.float64)))


def test_attenuation_is_left_where_the_gradient_does_not_vanish():
    """eq:rw-boundary-proof: from inside or the edge of [0, 1]^M a step outwards lowers F; a minimum of the box blocks some."""
    centre = torch.tensor([-0.7, 0.4, 1.9], dtype=torch.float64)
    f = lambda lam: ((lam - centre) ** 2).sum()  # noqa: E731
    best = centre.clamp(0, 1).requires_grad_()
    g = grad(f(best), best)
    assert (g[0] > 0, g[1] == 0, g[2] < 0) == (True, True, True), "0 is blocked downwards, 1 upwards, between nothing"
    for epsilon in (1e-2, 1e-4):
        step = best.detach() - epsilon * g
        left = f(step) - f(best.detach()) + epsilon * (g @ g)
        assert f(step) < f(best)
        assert abs(left) <= 1.1 * epsilon**2 * (g @ g)
    assert step[0] < 0 < 1 < step[2]
