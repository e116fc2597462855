"""The anchored loss against a dense model, and anchors taken from the gated model itself."""

import pytest
import torch

import loragate as lg
from loragate.data import Collator, encode_rows
from loragate.losses import verify_head
from loragate.losses.causal_head import ResponseScorer
from loragate.training import CalibrationSettings
from loragate.training.rollouts import AnchoredEntropy, anchors, sampled_request
from tiny import tiny_adapter, tiny_base, tiny_rows

V = 50


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


def gated(base=None, **lora):
    model = lg.attach_gates(tiny_adapter(base=base, **lora), lg.GateConfig(-3, 2, init_scale=0.05))
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
    scorer = ResponseScorer(model)
    assert scorer.fused
    at_zero, at_one = anchors["mixture"].reference(scorer, batch, "default").states
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
    scorer = ResponseScorer(model)
    scorer.fused = not slow
    loss = AnchoredEntropy(CalibrationSettings(objective="anchored", anchor=name, beta=0.6), "default")
    found_T, sums = loss.terms(scorer, batch, [], None)
    assert found_T.sum().item() == pytest.approx(sums["entropy"] + 0.6 * sums["kl"])
    found_T.sum().backward()
    fast = {key: value.grad.clone() for key, value in lg.gate_parameters(model).items()}
    model.zero_grad()

    dense = [
        response_logits(tiny_base().double(), batch),
        response_logits(tiny_adapter(base=tiny_base().double()), batch),
    ]
    passes = [dense[int(strength)] for strength in anchors[name].strengths]
    log_p = torch.log_softmax(response_logits(model, batch), -1)
    log_r = anchors[name].combine([torch.log_softmax(logits, -1) for logits in passes]).detach()
    dense_loss = (log_p.exp() * (-log_p + 0.6 * (log_p - log_r))).sum()
    dense_loss.backward()
    assert found_T.sum().item() == pytest.approx(dense_loss.item(), rel=1e-5)
    moved = 0
    for key, value in lg.gate_parameters(model).items():
        torch.testing.assert_close(fast[key], value.grad, rtol=2e-4, atol=1e-6, msg=key)
        moved += int(torch.count_nonzero(value.grad))
    assert moved > 100


def test_a_head_with_an_adapter_is_scored_from_full_logits(tokenizer):
    batch = batch_of(tokenizer)
    model = gated(base=tiny_base(tie_word_embeddings=False), target_modules=["q_proj", "lm_head"])
    scorer = ResponseScorer(model)
    assert not scorer.fused
    assert not verify_head(model.get_base_model())
    states = scorer.states(batch)
    assert states.shape[-1] == 160
    found = scorer.statistics(states, batch, sampled_request(20))
    labels = batch["labels"][:, 1:]
    expected = torch.log_softmax(states, -1).gather(-1, labels[labels != -100].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.log_prob, expected)


def test_statistics_are_those_of_the_model(tokenizer):
    batch = batch_of(tokenizer)
    model = gated()
    scorer = ResponseScorer(model)
    found = scorer.statistics(scorer.states(batch), batch, sampled_request(20))
    labels = batch["labels"][:, 1:]
    logits = response_logits(model, batch)
    expected = torch.log_softmax(logits, -1).gather(-1, labels[labels != -100].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found.log_prob, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.topk_entropy, lg.topk_entropy(logits, 20), rtol=1e-5, atol=1e-5)
