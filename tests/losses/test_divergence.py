"""The fused KL to a reference against plain autograd over full logits, in fp64 and fp32."""

import math

import pytest
import torch

from loragate.errors import ConfigError
from loragate.losses import add_statistics_forward, statistics_of_logits
from loragate.losses.causal_head import Reference, ReferenceRequest, StatisticsRequest, reference_statistics
from loragate.losses.projection import Head
from tiny import tiny_base

V, D, OTHER = 50, 12, 7


def case(dtype=torch.float64, softcap=None, scale=1.0, shared=False):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 6, D, generator=draw, dtype=dtype, requires_grad=True)
    head = Head(
        torch.randn(V, D, generator=draw, dtype=dtype), torch.randn(V, generator=draw, dtype=dtype), scale, softcap
    )
    labels = torch.randint(0, V, (3, 6), generator=draw)
    labels[0, :2] = -100
    labels[2] = -100
    width = D if shared else OTHER
    other = head if shared else Head(torch.randn(V, width, generator=draw, dtype=dtype), None, 1.0, None)
    states = torch.randn(int((labels != -100).sum()), width, generator=draw, dtype=dtype)
    return hidden, head, labels, Reference(states, other)


def logits_of(states, head):
    logits = torch.nn.functional.linear(states, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 1.0), (None, 0.5)])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_values_and_gradients_equal_autograd(shared, softcap, scale, chunk):
    hidden, head, labels, reference = case(softcap=softcap, scale=scale, shared=shared)
    mask = labels != -100
    stats = reference_statistics(hidden, head, labels, reference, chunk_tokens=chunk)
    plain = hidden.detach().clone().requires_grad_(True)
    expected = statistics_of_logits(
        logits_of(plain[mask], head), labels[mask], 0, logits_of(reference.states, reference.head)
    )
    weights = torch.rand(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    total = oracle = 0.0
    for at, name in enumerate(("log_prob", "entropy", "topk_entropy", "kl")):
        torch.testing.assert_close(getattr(stats, name)[mask], getattr(expected, name), rtol=1e-9, atol=1e-9)
        assert getattr(stats, name)[~mask].eq(0).all()
        weight = weights.reshape(-1)[at] + torch.arange(int(mask.sum()), dtype=torch.float64)
        total = total + (getattr(stats, name)[mask] * weight).sum()
        oracle = oracle + (getattr(expected, name) * weight).sum()
    total.backward()
    oracle.backward()
    torch.testing.assert_close(hidden.grad, plain.grad, rtol=1e-8, atol=1e-9)
    assert stats.k == V
    assert stats.topk_entropy.max() <= 1 + 1e-9


def test_kl_by_its_definition():
    hidden, head, labels, reference = case()
    mask = labels != -100
    p = torch.softmax(logits_of(hidden[mask], head), -1)
    r = torch.softmax(logits_of(reference.states, reference.head), -1)
    stats = reference_statistics(hidden, head, labels, reference)
    torch.testing.assert_close(stats.kl[mask], (p * (p / r).log()).sum(-1))
    assert (stats.kl[mask] > 0).all()
    itself = reference_statistics(hidden, head, labels, Reference(hidden.detach()[mask], head))
    assert itself.kl.abs().max() < 1e-9
    torch.testing.assert_close(stats.topk_entropy[mask], stats.entropy[mask] / math.log(V))


def test_no_label_keeps_the_graph_alive():
    hidden, head, labels, reference = case()
    nothing = Reference(reference.states[:0], reference.head)
    stats = reference_statistics(hidden, head, torch.full_like(labels, -100), nothing)
    (stats.kl.sum() + stats.log_prob.sum()).backward()
    assert hidden.grad.eq(0).all()


def test_what_does_not_fit_is_refused():
    hidden, head, labels, reference = case()
    with pytest.raises(ConfigError, match="vocabulary of 7 and the model one of 50"):
        reference_statistics(hidden, head, labels, Reference(reference.states, None))
    with pytest.raises(ConfigError, match="holds 3 positions, the batch has 10 labels"):
        reference_statistics(hidden, head, labels, Reference(reference.states[:3], reference.head))


@pytest.mark.parametrize("fused", [True, False])
def test_a_models_own_forward_gives_reference_and_statistics(fused):
    model, other = tiny_base(0), tiny_base(1)
    add_statistics_forward(model)
    add_statistics_forward(other)
    model._loragate_statistics = fused
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (2, 8), generator=draw)
    labels = ids.clone()
    labels[:, :3] = -100
    reference = other(input_ids=ids, labels=labels, statistics=ReferenceRequest())
    assert not reference.states.requires_grad
    stats = model(
        input_ids=ids, labels=labels, statistics=StatisticsRequest(0, ("log_prob", "entropy"), None, reference)
    )
    with torch.no_grad():
        expected = statistics_of_logits(
            tiny_base(0)(input_ids=ids).logits[:, :-1], labels[:, 1:], 0, tiny_base(1)(input_ids=ids).logits[:, :-1]
        )
    for name in ("log_prob", "entropy", "kl"):
        torch.testing.assert_close(getattr(stats, name).detach(), getattr(expected, name), rtol=1e-4, atol=1e-5)
    assert stats.kl.requires_grad


def test_every_path_keeps_the_support_and_the_gradients_that_are_asked_for():
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (2, 8), generator=draw)
    batch = {"input_ids": ids, "labels": torch.where(torch.arange(8) < 3, -100, ids)}
    other = tiny_base(1)
    add_statistics_forward(other)
    reference = other(**batch, statistics=ReferenceRequest())

    def outcome(fused, reference):
        model = tiny_base(0, tie_word_embeddings=False).requires_grad_(False)
        trained = model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
        add_statistics_forward(model, verified=fused)
        request = StatisticsRequest(20, ("log_prob", "topk_entropy"), ("log_prob",), reference)
        stats = model(**batch, statistics=request)
        (-stats.log_prob * stats.topk_entropy).sum().backward()
        assert (stats.k, stats.topk_entropy.requires_grad, stats.log_prob.requires_grad) == (20, False, True)
        return stats.log_prob.detach(), stats.topk_entropy, trained.grad

    wanted = outcome(True, None)
    for fused, compared in ((False, None), (True, reference), (False, reference)):
        for found, value in zip(outcome(fused, compared), wanted, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
