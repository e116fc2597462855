"""The top-k objective and its policy credit as numbers: the package's fast paths against the equations, fp64."""

import math

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

from loragate.analysis.directions import entropy_logit_gradient, value_logit_gradient
from loragate.losses import topk_entropy

K = 4


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


def test_topk_policy():
    """eq:rw-topk-policy: ∇H(q) = −E_q[A ∇log q] = −E_q[A ∇log π]: the support's mass drops out."""
    _toy, psi, z, index = point()
    log_q = torch.log_softmax(z.gather(-1, index), -1)
    log_pi = torch.log_softmax(z, -1).gather(-1, index)
    q = log_q.exp().detach()
    advantage = (log_q + entropy(z.gather(-1, index))[:, None]).detach()
    direct = grad(entropy(z.gather(-1, index)).sum(), psi)
    close((q * advantage).sum(-1), torch.zeros(S))
    close(-grad((q * advantage * log_q).sum(), psi), direct)
    close(-grad((q * advantage * log_pi).sum(), psi), direct)


def test_entropy_tail():
    """eq:rw-entropy-tail: H(π) = h_b(m) + m H(q) + (1 − m) H(tail); H(q) may fall while H(π) rises."""
    _, _, z, index = point()
    p = torch.softmax(z, -1).detach()
    m = p.gather(-1, index).sum(-1)
    tail = p.scatter(-1, index, 0.0) / (1 - m)[:, None]
    tail_entropy = -torch.where(tail > 0, tail * tail.clamp(min=1e-300).log(), 0.0).sum(-1)
    binary = -(m * m.log() + (1 - m) * (1 - m).log())
    close(entropy(z), binary + m * entropy(z.gather(-1, index)) + (1 - m) * tail_entropy)
    wide = torch.log(torch.tensor([0.45, 0.45, 0.05, 0.03, 0.02], dtype=torch.float64))
    other = torch.log(torch.tensor([0.32, 0.28, 0.15, 0.13, 0.12], dtype=torch.float64))
    two = torch.tensor([0, 1])
    assert entropy(other[two]) < entropy(wide[two])
    assert entropy(other) > entropy(wide)


def test_centered_score():
    """eq:rw-centered-score: ∂log q(a)/∂λ_i = d_i(a) − E_q d_i at a fixed support."""
    toy, psi, _, _ = point()
    lam = toy.coefficients(psi).detach()
    index = support(toy.logits_at(lam), K)
    d = jacobian(toy.logits_at, lam)  # [S, V, M, S]
    score = jacobian(lambda x: torch.log_softmax(toy.logits_at(x).gather(-1, index), -1), lam)
    on_support = d.gather(1, index[:, :, None, None].expand(-1, -1, M, S))
    q = conditional(toy.logits_at(lam), index)
    close(score, on_support - torch.einsum("ta,tams->tms", q, on_support)[:, None])


def test_gate_credit():
    """eq:rw-gate-credit: −∂F_k/∂λ_i = (1/log k) mean E_q[A ∂log q/∂λ_i] = (1/log k) mean Cov_q(z, d_i)."""
    toy, psi, _, _ = point()
    lam = toy.coefficients(psi).detach().requires_grad_()
    z = toy.logits_at(lam)
    index = support(z, K)
    direct = -grad(topk_objective(z, index), lam)
    d = jacobian(toy.logits_at, lam.detach()).gather(1, index[:, :, None, None].expand(-1, -1, M, S))
    q, zs = conditional(z, index).detach(), z.gather(-1, index).detach()
    cov = covariance(q[:, None, None], zs[:, None, None].expand(S, M, S, K), d.permute(0, 2, 3, 1))
    close(direct, cov.mean(0) / math.log(K))
    score = jacobian(lambda x: torch.log_softmax(toy.logits_at(x).gather(-1, index), -1), lam.detach())
    advantage = q.log() - (q * q.log()).sum(-1, keepdim=True)
    close(direct, torch.einsum("ta,tams->ms", q * advantage, score) / S / math.log(K))


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
