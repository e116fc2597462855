"""Sampled answers and what is learned from them: prompts, the sample stream, anchors, losses and gradients by enumeration."""

from dataclasses import replace

import pytest
import torch

import loragate as lg
from loragate.data import Collator, encode_rows, load_rows
from loragate.errors import DataError
from loragate.generation import TransformersEngine
from loragate.losses.causal_head import ResponseScorer
from loragate.training import GateTrainingSettings, training_rows
from loragate.training.rollouts import (
    AnchoredEntropy,
    Answer,
    anchors,
    as_training_row,
    draw_answers,
    group_advantages,
    policy_loss,
    stream_seed,
    training_prompts,
)
from tiny import tiny_adapter, tiny_base, tiny_rows, tiny_tokenizer

V = 50
CONFIG = lg.GateConfig(-3, 2)
ANCHORED = GateTrainingSettings(
    objective="anchored", batch_size=4, per_device_train_batch_size=4, max_length=64, max_new_tokens=6, max_steps=6
)
REWARD = replace(ANCHORED, objective="reward", samples_per_prompt=4)


def prompts_of(rows, settings, positions=None):
    tokenizer = tiny_tokenizer()
    source, encoded = training_rows(load_rows(rows), tokenizer, settings)
    return training_prompts(encoded, source, tokenizer, settings.max_new_tokens, positions)


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
    loss = AnchoredEntropy(GateTrainingSettings(objective="anchored", anchor=name, beta=0.6), "default")
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


def test_answers_follow_from_seed_refresh_and_gates(tokenizer, rows):
    prompts = prompts_of(rows, REWARD)
    model = lg.attach_gates(tiny_adapter(), CONFIG)
    engines = {batch: TransformersEngine(model, tokenizer, batch_size=batch) for batch in (3, 64)}
    draws = {
        (refresh, batch): draw_answers(prompts, [0, 1, 2, 1], engines[batch].generate, REWARD, refresh)
        for refresh in (0, 1)
        for batch in engines
    }
    assert draws[0, 3] == draws[0, 64] != draws[1, 3]
    first = draws[0, 3]
    assert [answer.prompt for answer in first] == [0] * 4 + [1] * 4 + [2] * 4 + [1] * 4
    assert first[4:8] != first[12:16], "the same prompt drawn twice gets answers of its own"
    assert stream_seed(1, 2) != stream_seed(2, 1)


def test_prompts_are_what_the_rows_train_after(tokenizer):
    rows = tiny_rows(5)
    rows.append({"messages": rows[0]["messages"] + tiny_rows(1, seed=8)[0]["messages"]})
    prompts = prompts_of(rows, ANCHORED)
    source = load_rows(rows).shuffled(ANCHORED.seed)
    assert len(prompts) == 6
    for prompt in prompts:
        messages = source[prompt.row]["messages"]
        rendered = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert list(prompt.ids) == tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert tokenizer(prompt.text, add_special_tokens=False)["input_ids"] == list(prompt.ids)
    row = as_training_row(Answer(2, (9, 8, 1), "", True), prompts)
    assert row["labels"] == [-100] * len(prompts[2].ids) + [9, 8, 1]
    assert row["input_ids"] == [*prompts[2].ids, 9, 8, 1]
    longest = max(len(prompt.ids) for prompt in prompts)
    assert 0 < len(prompts_of(rows, ANCHORED, positions=longest + 5)) < 6
    with pytest.raises(DataError, match="6 of 6 prompts leave no room for 6 new tokens"):
        prompts_of(rows, ANCHORED, positions=6)


def test_the_policy_gradient_is_that_of_the_expected_reward(tokenizer):
    """All answers of two tokens are enumerated, each weighted with its probability in place of being sampled."""
    model = tiny_adapter(base=tiny_base(vocab_size=8, pad_token_id=0))
    lg.attach_gates(model, lg.GateConfig(-3, 2, init_scale=0.05))
    parameters = list(lg.gate_parameters(model).values())
    prompt = [3, 5, 7]
    pairs = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    ids = torch.cat((torch.tensor(prompt).expand(64, 3), pairs), 1)
    rewards = torch.randn(64, generator=torch.Generator().manual_seed(2))
    log_p = torch.log_softmax(model(input_ids=ids).logits[:, 2:4], -1).gather(-1, pairs.unsqueeze(-1)).squeeze(-1)
    probability = log_p.sum(-1).exp()
    assert float(probability.sum()) == pytest.approx(1, abs=1e-5)
    exact = torch.autograd.grad((probability * rewards).sum(), parameters, retain_graph=True)
    for baseline in (0.0, 0.7):
        advantage = (probability.detach() * (rewards - baseline)).repeat_interleave(2)
        loss, clipped = policy_loss(log_p.flatten(), advantage, None, 0.2)
        assert not clipped.any()
        found = torch.autograd.grad(loss.sum(), parameters, retain_graph=True)
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, -other, rtol=1e-3, atol=1e-6)


def test_clipping_takes_the_gradient_away_on_the_far_side_only():
    before = torch.zeros(4)
    log_p = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, clipped = policy_loss(log_p, advantage, before, 0.2)
    assert clipped.tolist() == [True, False, False, True]
    ratio = log_p.detach().exp()
    assert loss.tolist() == pytest.approx([-1.2, float(ratio[1]), -float(ratio[2]), 0.8])
    loss.sum().backward()
    assert log_p.grad.tolist() == pytest.approx([0.0, float(ratio[1]), -float(ratio[2]), 0.0])


def test_advantages_are_relative_to_the_group():
    assert group_advantages([1, 0, 0, 1], "mean") == [0.5, -0.5, -0.5, 0.5]
    assert group_advantages([3, 0, 0, 3], "std") == pytest.approx([1, -1, -1, 1])
    assert group_advantages([0.3] * 3, "std") == [0.0] * 3
