"""The anchored loss: dense autograd, finite pieces of algebra, and anchors taken from the gated model itself."""

import copy

import pytest
import torch
from torch import nn

import loragate as lg
from loragate.data import Collator, encode_rows
from loragate.losses import verify_head
from loragate.losses.causal_head import Head
from loragate.training.on_policy_loss import (
    anchor_states,
    anchored,
    anchored_loss,
    anchored_loss_of_logits,
    anchors,
)
from loragate.training.scoring import ResponseScorer
from tiny import tiny_adapter, tiny_base, tiny_rows

T, D, V = 37, 12, 50
WEIGHTS = [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1.0, 0.3), (0.0, 0.05), (1.0, 3.0)]


def tensors(dtype, scale=1.0, softcap=None, bias=False):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    head = Head(draw(V, D), draw(V) if bias else None, scale, softcap)
    return draw(T, D), [draw(T, D), draw(T, D)], head


def logits_of(hidden, head):
    logits = nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


@pytest.mark.parametrize("name", list(anchors))
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_values_and_gradients_equal_dense_autograd(name, weights, dtype, tolerance):
    hidden, others, head = tensors(dtype)
    anchor = anchors[name]
    others = others[: len(anchor.strengths)]
    upstream = torch.randn(T, generator=torch.Generator().manual_seed(9), dtype=dtype)
    results = []
    for dense in (False, True):
        leaf = hidden.clone().requires_grad_()
        options = {"entropy_weight": weights[0], "kl_weight": weights[1]}
        if dense:
            references = [logits_of(other, head) for other in others]
            found = anchored_loss_of_logits(logits_of(leaf, head), references, anchor, **options)
        else:
            found = anchored_loss(leaf, others, head, anchor, chunk_tokens=8, **options)
        (found.loss * upstream).sum().backward()
        results.append((found.loss.detach(), found.kl, found.entropy, leaf.grad))
    for fast, dense in zip(*results, strict=True):
        torch.testing.assert_close(fast, dense, rtol=tolerance, atol=tolerance)
        assert not fast.requires_grad


@pytest.mark.parametrize(("scale", "softcap", "bias"), [(0.25, None, True), (1.0, 3.0, False), (0.5, 2.0, True)])
def test_scale_softcap_and_bias(scale, softcap, bias):
    hidden, others, head = tensors(torch.float64, scale, softcap, bias)
    leaf = hidden.requires_grad_()
    fast = anchored_loss(leaf, others, head, anchors["mixture"], kl_weight=0.7)
    (fast_grad,) = torch.autograd.grad(fast.loss.sum(), leaf)
    dense = anchored_loss_of_logits(
        logits_of(leaf, head), [logits_of(other, head) for other in others], anchors["mixture"], kl_weight=0.7
    )
    (dense_grad,) = torch.autograd.grad(dense.loss.sum(), leaf)
    torch.testing.assert_close(fast.loss, dense.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fast_grad, dense_grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", list(anchors))
def test_equal_weights_are_the_cross_entropy_to_the_anchor(name):
    hidden, others, head = tensors(torch.float64)
    anchor = anchors[name]
    others = others[: len(anchor.strengths)]
    leaf = hidden.requires_grad_()
    found = anchored_loss(leaf, others, head, anchor)
    log_r = anchor.combine([torch.log_softmax(logits_of(other, head), -1) for other in others])
    cross = -(torch.softmax(logits_of(leaf, head), -1) * log_r).sum(-1)
    torch.testing.assert_close(found.loss, cross, rtol=1e-12, atol=1e-12)
    expected = torch.autograd.grad(cross.sum(), leaf)[0]
    torch.testing.assert_close(torch.autograd.grad(found.loss.sum(), leaf)[0], expected, rtol=1e-11, atol=1e-12)


def test_anchors_are_distributions_of_their_names():
    logs = [torch.log_softmax(torch.randn(5, V, dtype=torch.float64), -1) for _ in range(2)]
    for name, anchor in anchors.items():
        log_r = anchor.combine(logs[: len(anchor.strengths)])
        torch.testing.assert_close(log_r.exp().sum(-1), torch.ones(5, dtype=torch.float64), msg=name)
    mixture = (logs[0].exp() + logs[1].exp()) / 2
    torch.testing.assert_close(anchors["mixture"].combine(logs).exp(), mixture)
    product = (logs[0].exp() * logs[1].exp()).sqrt()
    torch.testing.assert_close(anchors["product"].combine(logs).exp(), product / product.sum(-1, keepdim=True))
    assert anchors["base"].strengths == (0.0,)
    assert anchors["adapter"].strengths == (1.0,)


def test_no_positions_keep_the_graph():
    _, others, head = tensors(torch.float32)
    leaf = torch.zeros(0, D, requires_grad=True)
    found = anchored_loss(leaf, [other[:0] for other in others], head, anchors["mixture"])
    found.loss.sum().backward()
    assert leaf.grad.shape == (0, D)


def gated(base=None, **lora):
    model = tiny_adapter(base=base, **lora)
    lg.attach_gates(model, lg.GateConfig(-3, 2, init_scale=0.05))
    model.requires_grad_(False)
    for parameter in lg.gate_parameters(model).values():
        parameter.requires_grad_(True)
    return model


def batch_of(tokenizer, count=5):
    return Collator(0)(list(encode_rows(tiny_rows(count), tokenizer, max_length=64)))


def response_logits(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[:, :-1][batch["labels"][:, 1:] != -100]


def test_held_at_zero_and_one_the_model_is_base_and_adapter(tokenizer):
    batch = batch_of(tokenizer)
    model = gated()
    base, plain = tiny_base(), tiny_adapter()
    scorer = ResponseScorer(model, "default")
    assert scorer.fused
    at_zero, at_one = anchor_states(scorer, batch, anchors["mixture"])
    assert not at_zero.requires_grad
    weight = base.get_output_embeddings().weight
    with torch.no_grad():
        torch.testing.assert_close(at_zero @ weight.T, response_logits(base, batch), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(at_one @ weight.T, response_logits(plain, batch), rtol=1e-5, atol=1e-5)
        assert (at_zero - at_one).abs().max() > 0.1
    gates = next(iter(lg.gates.attach.gate_modules(model).values()))
    assert gates.override is None


@pytest.mark.parametrize("name", list(anchors))
@pytest.mark.parametrize("slow", [False, True])
def test_gate_gradients_equal_a_dense_model(tokenizer, name, slow):
    batch = batch_of(tokenizer)
    model = gated(base=tiny_base().double())
    scorer = ResponseScorer(model, "default")
    scorer.fused = not slow
    references = anchor_states(scorer, batch, anchors[name])
    found = anchored(scorer, scorer.states(batch), references, anchors[name], 1.0, 0.6)
    found.loss.sum().backward()
    fast = {key: value.grad.clone() for key, value in lg.gate_parameters(model).items()}
    model.zero_grad()

    dense = [
        response_logits(tiny_base().double(), batch),
        response_logits(tiny_adapter(base=tiny_base().double()), batch),
    ]
    passes = [dense[int(strength)] for strength in anchors[name].strengths]
    log_p = torch.log_softmax(response_logits(model, batch), -1)
    log_r = anchors[name].combine([torch.log_softmax(logits, -1) for logits in passes]).detach()
    loss = (log_p.exp() * (-log_p + 0.6 * (log_p - log_r))).sum()
    loss.backward()
    assert found.loss.sum().item() == pytest.approx(loss.item(), rel=1e-5)
    moved = 0
    for key, value in lg.gate_parameters(model).items():
        torch.testing.assert_close(fast[key], value.grad, rtol=2e-4, atol=1e-6, msg=key)
        moved += int(torch.count_nonzero(value.grad))
    assert moved > 100


def test_a_head_with_an_adapter_is_scored_from_full_logits(tokenizer):
    batch = batch_of(tokenizer)
    model = gated(base=tiny_base(tie_word_embeddings=False), target_modules=["q_proj", "lm_head"])
    scorer = ResponseScorer(model, "default")
    assert not scorer.fused
    assert not verify_head(model.get_base_model())
    states = scorer.states(batch)
    assert states.shape[-1] == 160
    found = scorer.statistics(states, batch, 20)
    labels = batch["labels"][:, 1:]
    expected = torch.log_softmax(states, -1).gather(-1, labels[labels != -100].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.log_prob, expected)


def test_statistics_are_those_of_the_model(tokenizer):
    batch = batch_of(tokenizer)
    model = gated()
    scorer = ResponseScorer(model, "default")
    found = scorer.statistics(scorer.states(batch), batch, 20)
    labels = batch["labels"][:, 1:]
    logits = response_logits(copy.deepcopy(model), batch)
    expected = torch.log_softmax(logits, -1).gather(-1, labels[labels != -100].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.log_prob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.topk_entropy, lg.topk_entropy(logits, 20), rtol=1e-5, atol=1e-5)
