"""λ supplied from outside: the gates' own numbers and derivatives, and hard suppression by ΔH in generation.

Suppression is compared with re-forwarding whole sequences without a cache, one row at a time.
"""

import pytest
import torch

import loragate as lg
from loragate.analysis.delta_entropy import measure_token_entropies
from loragate.analysis.rows import Reader, answer_rows
from loragate.analysis.supplied import supplied_coefficients, suppress_by_delta_entropy, suppression_mask
from loragate.gates.attach import gate_modules
from loragate.generation import SamplingConfig, TransformersEngine
from loragate.generation.sampling import sample_tokens, uniform
from tiny import tiny_adapter, tiny_gated, tiny_tokenizer

IDS = torch.arange(4, 14)[None]


def test_supplying_the_gates_own_values_changes_nothing():
    peft = tiny_gated(-2, 3, seed=3)
    gates = gate_modules(peft)
    with torch.no_grad():
        own = peft(input_ids=IDS).logits
        with supplied_coefficients(peft, lambda path, _layer, x: gates[path].coefficients(x)) as paths:
            assert set(paths) == set(gates)
            assert torch.allclose(peft(input_ids=IDS).logits, own, atol=1e-6)
        with supplied_coefficients(peft, lambda *_: None):
            full = peft(input_ids=IDS).logits
        with lg.gate_override(peft, constant=1.0):
            assert torch.equal(peft(input_ids=IDS).logits, full)
        assert torch.equal(peft(input_ids=IDS).logits, own)


def test_leaves_carry_the_semi_gradient():
    """eq:rw-causal-jacobian with sg: ∂F/∂w_m = Σ_s ∂F/∂λ_m,s · ∂λ_m,s/∂w_m at inputs held fixed."""
    peft = tiny_gated(-2, 3, seed=3)
    gates, leaves, inputs = gate_modules(peft), {}, {}

    def leaf(path, _layer, x):
        inputs[path] = x.detach()
        leaves[path] = gates[path].coefficients(x).detach().requires_grad_()
        return leaves[path]

    with supplied_coefficients(peft, leaf):
        lg.topk_entropy(peft(input_ids=IDS).logits, 20).mean().backward()
    with_gates = lg.topk_entropy(peft(input_ids=IDS).logits, 20).mean()
    expected = torch.autograd.grad(with_gates, [gate.weight for gate in gates.values()])
    for (path, gate), gradient in zip(gates.items(), expected, strict=True):
        lam = gate.coefficients(inputs[path])
        (found,) = torch.autograd.grad(lam, gate.weight, leaves[path].grad)
        assert torch.allclose(found, gradient, atol=1e-6, rtol=1e-3), path


PROMPTS = ["w1 w2 w3 w4", "w9", "w30 w31"]
CONFIG = SamplingConfig(samples=2, max_new_tokens=7, seed=3)


def model():
    """An adapter that raises the entropy at some positions and lowers it at others."""
    peft = tiny_adapter()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.6)
    return peft


def entropy(logits):
    return torch.special.entr(logits.float().softmax(-1)).sum(-1)


@torch.no_grad()
def naive(peft, tokenizer, sign, question, sample):
    """One answer: every step reads the whole sequence anew, with all decisions taken so far laid over it."""
    ids = tokenizer(PROMPTS[question], add_special_tokens=False)["input_ids"]
    start = len(ids)
    switched, deltas = [False] * (start - 1), []
    for position in range(CONFIG.max_new_tokens):
        tokens = torch.tensor([ids])
        with peft.disable_adapter():
            base = entropy(peft(input_ids=tokens, use_cache=False).logits[0])
        delta = entropy(peft(input_ids=tokens, use_cache=False).logits[0]) - base
        switched.append(bool(suppression_mask(sign, delta[-1])))
        deltas.append(float(delta[-1]))
        lam = 1.0 - torch.tensor([switched]).float()
        with supplied_coefficients(peft, lambda _path, _layer, _x, lam=lam: lam):
            logits = peft(input_ids=tokens, use_cache=False).logits[:, -1]
        at = uniform(CONFIG.seed, torch.tensor([question]), torch.tensor([sample]), position)
        token = int(sample_tokens(logits, at, 1.0, 1.0))
        ids.append(token)
        if token == tokenizer.eos_token_id:
            break
    return ids[start:], deltas


@pytest.mark.parametrize("sign", ["negative", "positive"])
def test_batched_generation_is_the_naive_one(sign):
    peft, tokenizer = model(), tiny_tokenizer()
    with suppress_by_delta_entropy(peft, sign):
        found = TransformersEngine(peft, tokenizer, batch_size=4).generate(PROMPTS, CONFIG)
    rows = answer_rows(tokenizer(PROMPTS, add_special_tokens=False)["input_ids"], found)
    # eq:rw-delta-entropy: the decisions can be read off the answers
    again = measure_token_entropies(Reader(peft, tokenizer), "adapter", rows)
    switched = set()
    for index, sample in enumerate(found):
        expected, deltas = naive(peft, tokenizer, sign, sample.question, sample.sample)
        assert list(sample.token_ids) == expected
        assert again.delta[again.rows == index] == pytest.approx(deltas, abs=1e-4)
        switched |= {bool(suppression_mask(sign, torch.tensor(delta))) for delta in deltas}
    assert switched == {True, False}, "the case must exercise both"
    plain = TransformersEngine(peft, tokenizer, batch_size=4).generate(PROMPTS, CONFIG)
    assert [s.token_ids for s in plain] != [s.token_ids for s in found]


def test_suppressing_everything_is_the_base_and_nothing_is_the_adapter(monkeypatch):
    prompts = ["w9", "w30"]  # of one token, as earlier ones of a prompt are read with the adapter
    peft = model()
    engine = TransformersEngine(peft, tiny_tokenizer(), batch_size=8)
    with peft.disable_adapter():
        base = engine.generate(prompts, CONFIG)
    adapter = engine.generate(prompts, CONFIG)
    for expected, choice in ((base, torch.ones_like), (adapter, torch.zeros_like)):
        monkeypatch.setattr(
            "loragate.analysis.supplied.suppression_mask",
            lambda _, delta, choice=choice: choice(delta, dtype=torch.bool),
        )
        with suppress_by_delta_entropy(peft, "negative"):
            assert [s.token_ids for s in engine.generate(prompts, CONFIG)] == [s.token_ids for s in expected]
    assert [s.token_ids for s in base] != [s.token_ids for s in adapter]
