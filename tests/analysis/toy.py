"""A small exact model for the equations: fp64, causal, gated LoRA modules in sequence, every derivative by autograd.

Embedding → for each module m: h ← tanh(u_m), u_m = W_m c + λ_m (α/r) B_m A_m c with c the causal mean of h → logits. So a
gate at an early position changes all later predictions, as in a transformer. The gated delta is the package's own
reference operation.
"""

from __future__ import annotations

import torch

from loragate.gates.operation import gate_coefficient_of_input
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap

V, D, R, M, S = 9, 6, 2, 3, 5
SCALING = 1.5


def rand(*shape, seed, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


class Toy:
    """The frozen parts and one token sequence."""

    def __init__(self, seed=0, lower=-2.0, upper=3.0, tau=0.8):
        self.lower, self.upper, self.tau = lower, upper, tau
        self.embedding = rand(V, D, seed=seed + 1)
        self.w = [rand(D, D, seed=seed + 10 + m, scale=0.7) for m in range(M)]
        self.a = [rand(R, D, seed=seed + 20 + m) for m in range(M)]
        self.b = [rand(D, R, seed=seed + 30 + m) for m in range(M)]
        self.head = rand(V, D, seed=seed + 40, scale=1.5)
        self.tokens = torch.randint(0, V, (S,), generator=torch.Generator().manual_seed(seed + 50))

    def psi(self, seed=5, scale=0.6):
        """Gate parameters, one flat vector [M (D + 1)]."""
        return rand(M * (D + 1), seed=seed, scale=scale).requires_grad_()

    def delta_weight(self, m):
        return SCALING * self.b[m] @ self.a[m]

    def run(self, coefficient):
        """Logits [S, V] with λ_m,s = coefficient(m, input [S, D]) -> [S]."""
        h = self.embedding[self.tokens]
        mix = torch.tril(torch.ones(S, S, dtype=torch.float64))
        mix = mix / mix.sum(1, keepdim=True)
        for m in range(M):
            c = mix @ h
            lam = coefficient(m, c)
            h = torch.tanh(c @ self.w[m].T + lam[:, None] * (c @ self.delta_weight(m).T))
        return h @ self.head.T

    def gate(self, psi, m, c, detach):
        part = psi[m * (D + 1) : (m + 1) * (D + 1)]
        return gate_coefficient_of_input(
            c, part[:D], part[D:], SignedMap(Range(self.lower, self.upper), self.tau), detach
        )

    def logits(self, psi, detach=False):
        """G_t(Λ(ψ)); `detach` stops the gradient at gate inputs (the paper's sg)."""
        return self.run(lambda m, c: self.gate(psi, m, c, detach))


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
    k = index.shape[-1]
    return entropy(z.gather(-1, index)).mean() / torch.log(torch.tensor(float(k), dtype=torch.float64))


def value(z, r, index=None):
    """V_k = mean E_q r, or V over the full vocabulary without a support; r [S, V] fixed."""
    if index is None:
        return (torch.softmax(z, -1) * r).sum(-1).mean()
    return (conditional(z, index) * r.gather(-1, index)).sum(-1).mean()


def grad(scalar, at):
    return torch.autograd.grad(scalar, at, retain_graph=True)[0]


def jacobian(function, at):
    return torch.autograd.functional.jacobian(function, at)


def close(a, b, tolerance=1e-10):
    a, b = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (a, b))
    assert a.shape == b.shape, (a.shape, b.shape)
    assert float((a - b).abs().max()) <= tolerance, float((a - b).abs().max())
