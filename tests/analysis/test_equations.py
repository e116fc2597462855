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
