"""Sections 2 and 3 of the paper as numbers: entropy and weighted cross-entropy as policy losses. fp64, by autograd.

The first words of a test's docstring are the labels of the equations it stands for; `test_equations.py` holds the list.
"""

import torch
from toy import V, close, entropy, grad, rand

import loragate as lg
from loragate.losses import TokenStatistics

Y = torch.tensor([3, 0, 7, 2])


def logits(seed=1, rows=4):
    return rand(rows, V, seed=seed, scale=1.3).requires_grad_()


def network(seed=2):
    """Parameters θ [P] and a map θ -> z [4, V], so that ∇_θ is not only a logit gradient."""
    theta = rand(12, seed=seed).requires_grad_()
    first, second = rand(20, 12, seed=3), rand(4 * V, 20, seed=4)
    return theta, lambda t: (second @ torch.tanh(first @ t)).reshape(4, V)


def log_p(z):
    return torch.log_softmax(z, -1)


def surrogate(z, mu, advantage):
    """eq:rw-policy with its coefficients stopped."""
    return -((mu * advantage).detach() * log_p(z)).sum(-1).mean()


def test_sft():
    """eq:rw-sft: ∇_z ℓ = π − e_y, and the package's sft objective is ℓ."""
    z = logits()
    loss = -log_p(z)[range(4), Y]
    unit = torch.nn.functional.one_hot(Y, V).double()
    close(grad(loss.sum(), z), log_p(z).exp().detach() - unit)
    stats = TokenStatistics(-loss, entropy(z), entropy(z), torch.ones(4, dtype=torch.bool), V)
    close(lg.objectives["sft"].loss(stats), loss)


def test_policy_surrogate():
    """eq:rw-policy: μ = δ_y, A = 1 has SFT's gradient; the value of the surrogate may differ from what it stands for."""
    theta, z = network()
    unit = torch.nn.functional.one_hot(Y, V).double()
    direct = grad(-log_p(z(theta))[range(4), Y].mean(), theta)
    close(grad(surrogate(z(theta), unit, torch.ones(4, V, dtype=torch.float64)), theta), direct)
    p = log_p(z(theta)).exp()
    advantage = log_p(z(theta)) + entropy(z(theta))[:, None]
    assert abs(float(surrogate(z(theta), p, advantage) - entropy(z(theta)).mean())) > 1e-3
    close(grad(surrogate(z(theta), p, advantage), theta), grad(entropy(z(theta)).mean(), theta))


def test_entropy_advantage():
    """eq:rw-entropy-advantage: ∇H = −E_π[A^ent ∇log π] through any parametrisation; A^ent is centred, its sign threshold e^−H."""
    theta, z = network()
    p, h = log_p(z(theta)).exp().detach(), entropy(z(theta)).detach()
    advantage = p.log() + h[:, None]
    expected = -grad((p * advantage * log_p(z(theta))).sum(), theta)
    close(grad(entropy(z(theta)).sum(), theta), expected)
    close((p * advantage).sum(-1), torch.zeros(4))
    assert torch.equal(advantage > 0, p > torch.exp(-h)[:, None])


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


def test_importance_sampling_form_and_baselines():
    """eq:rw-is-sft: the weighted CE gradient is E_π[w 1[a=y]/π ∇log π], and an action-independent baseline keeps it."""
    theta, z = network()
    w = torch.tensor([0.2, 1.0, 0.7, 1.4], dtype=torch.float64)
    unit = torch.nn.functional.one_hot(Y, V).double()
    p = log_p(z(theta)).exp().detach()
    direct = grad(-(w * log_p(z(theta))[range(4), Y]).mean(), theta)
    coefficient = w[:, None] * unit / p
    close(grad(surrogate(z(theta), p, coefficient), theta), direct)
    close(grad(surrogate(z(theta), p, coefficient - w[:, None]), theta), direct)
    assert (coefficient - w[:, None]).min() < 0, "the sign of a coefficient is no invariant"


def test_mixture_path():
    """eq:rw-mixture-path: along (1−ε)p + ε e_y entropy starts with slope −log p_y − H = −A^ent(y)."""
    p = torch.softmax(logits(), -1).detach()
    unit = torch.nn.functional.one_hot(Y, V).double()
    epsilon = torch.zeros((), dtype=torch.float64, requires_grad=True)
    mixed = (1 - epsilon) * p + epsilon * unit
    h = -(mixed * mixed.log()).sum(-1)
    slopes = torch.stack([grad(value, epsilon) for value in h])
    expected = -p[range(4), Y].log() - h.detach()
    close(slopes, expected)
    assert torch.equal(slopes < 0, p[range(4), Y] > torch.exp(-h.detach()))


def test_ce_probability_path():
    """eq:rw-ce-probability-path: a CE step in logits moves p by C(p)(e_y − p), which is not e_y − p."""
    z = logits().detach()
    p = torch.softmax(z, -1)
    unit = torch.nn.functional.one_hot(Y, V).double()
    step = torch.zeros((), dtype=torch.float64)
    moved = torch.autograd.functional.jacobian(lambda eta: torch.softmax(z + eta * (unit - p), -1), step)
    centering = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    close(moved, (centering @ (unit - p)[..., None]).squeeze(-1))
    assert (moved - (unit - p)).abs().max() > 0.1


def test_differentiated_weights():
    """eq:rw-weight-derivative: ∇(wℓ) = w∇ℓ + ℓ∇w, so a weight that is not stopped leaves the ray."""
    theta, z = network()

    def loss(t):
        return -log_p(z(t))[1, Y[1]]

    def weight(t):
        return torch.exp(-loss(t))

    product = weight(theta) * loss(theta)
    parts = weight(theta).detach() * grad(loss(theta), theta) + loss(theta).detach() * grad(weight(theta), theta)
    close(grad(product, theta), parts)
    assert (grad(product, theta) - weight(theta).detach() * grad(loss(theta), theta)).abs().max() > 1e-3


def test_entropy_proof_steps():
    """eq:rw-proof-entropy: −Σp(log p + 1)∇log p = −Σp(log p + H)∇log p, because Σp∇log p = 0; ∂H/∂z_b = −p_b(log p_b + H)."""
    theta, z = network()
    p, h = log_p(z(theta)).exp().detach(), entropy(z(theta)).detach()[:, None]
    first = -grad((p * (p.log() + 1) * log_p(z(theta))).sum(), theta)
    second = -grad((p * (p.log() + h) * log_p(z(theta))).sum(), theta)
    close(first, second)
    close(first, grad(entropy(z(theta)).sum(), theta))
    close(grad((p * log_p(z(theta))).sum(), theta), torch.zeros(12))
    free = logits()
    q = torch.softmax(free, -1).detach()
    close(grad(entropy(free).sum(), free), -q * (q.log() + entropy(free).detach()[:, None]))


def test_shared_parameters_mix_tokens():
    """eq:rw-shared-ce: one step on several tokens moves z_t by (η/|T|) Σ w_s K_t K_sᵀ(e_y − π) + o(η); signs may flip."""
    theta, z = network()
    w = torch.tensor([0.2, 1.0, 0.7, 1.4], dtype=torch.float64)
    unit = torch.nn.functional.one_hot(Y, V).double()
    p = log_p(z(theta)).exp().detach()
    jac = torch.autograd.functional.jacobian(z, theta.detach())  # [4, V, P]
    pull = torch.einsum("svp,sv->p", jac, w[:, None] * (unit - p)) / 4
    predicted = torch.einsum("tvp,p->tv", jac, pull)
    gradient = grad(-(w * log_p(z(theta))[range(4), Y]).mean(), theta)
    close(-gradient, pull)
    errors = []
    for eta in (1e-4, 1e-5):
        moved = (z(theta.detach() - eta * gradient) - z(theta.detach())) / eta
        errors.append(float((moved - predicted).abs().max()))
    assert errors[1] < errors[0] / 5
    own = torch.stack([predicted[t, Y[t]] for t in range(4)])
    direct = torch.stack([w[t] * (1 - p[t, Y[t]]) for t in range(4)])
    assert (torch.sign(own) != torch.sign(direct)).any(), "a shared step may lower a demonstrated logit"
