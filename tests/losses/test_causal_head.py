"""Statistics through a model's own forward equal statistics of its own logits, whatever its head looks like."""

import copy
import types

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from loragate.analysis.rows import Reader
from loragate.losses import (
    StatisticsRequest,
    TokenStatistics,
    add_statistics_forward,
    statistics_of_logits,
    verify_head,
)
from loragate.losses.causal_head import causal_model, response_mask, statistics_of_states
from packed import packed
from tiny import logits, tiny_adapter, tiny_base


@pytest.fixture
def batch(token_ids):
    labels = token_ids.clone()
    labels[:, :4] = -100
    return {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids), "labels": labels}


def expected(model, batch, k):
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits
    return statistics_of_logits(logits[:, :-1], batch["labels"][:, 1:], k)


def assert_same(actual, wanted):
    for name in ("log_prob", "entropy", "topk_entropy"):
        torch.testing.assert_close(getattr(actual, name), getattr(wanted, name), rtol=2e-5, atol=2e-5)


def untied(**lora):
    base = tiny_base(tie_word_embeddings=False).requires_grad_(False)
    return tiny_adapter(base=base, **lora) if lora else base


def without_a_body():
    """Llama4ForCausalLM says that its base_model is itself."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Llama4ForCausalLM(
        Llama4TextConfig(**sizes, **heads, num_hidden_layers=1, num_local_experts=2, pad_token_id=0)
    )
    assert model.base_model is model
    return model.eval().requires_grad_(False)


MODELS = {
    "base": (lambda: tiny_base().requires_grad_(False), True),
    "wrapped": (tiny_adapter, True),
    "adapted head": (lambda: untied(target_modules=["q_proj", "lm_head"]), False),
    "no body of its own": (without_a_body, False),
    "packed head": (lambda: packed(untied(), "lm_head").requires_grad_(False), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_plain_and_wrapped_models_and_heads_that_take_the_slow_path(batch, name):
    make, fused = MODELS[name]
    model = make()
    wanted = expected(model, batch, 20)
    inner = causal_model(model)
    scorer = Reader(model, types.SimpleNamespace(pad_token_id=0))
    states, mask = scorer.states(batch), response_mask(batch)
    assert (scorer.fused, states.shape) == (fused, (int(mask.sum()), 32 if fused else 160))
    labels_T = batch["labels"][:, 1:][mask]
    found = statistics_of_states(states, scorer.head() if fused else None, labels_T, StatisticsRequest(20))
    assert_same(found, TokenStatistics(*(value[mask] for value in wanted[:3]), mask[mask], 20))
    assert add_statistics_forward(inner) is fused
    assert add_statistics_forward(inner) is fused, "twice is as good as once"
    assert_same(model(**batch, statistics=StatisticsRequest(20)), wanted)
    assert model(**batch).loss is not None, "without the keyword the forward is the model's own"


def test_a_saved_copy_of_the_head_is_used(batch):
    model = untied(target_modules=["q_proj"], modules_to_save=["lm_head"])
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(1.3)
    model.requires_grad_(False)
    wanted = expected(model, batch, 20)
    assert add_statistics_forward(model.get_base_model())
    assert_same(model(**batch, statistics=StatisticsRequest(20)), wanted)
    with model.disable_adapter():
        assert_same(model(**batch, statistics=StatisticsRequest(20)), expected(model, batch, 20))


def test_a_trainable_head_takes_the_slow_path_and_gets_its_gradient(batch):
    model = untied()
    model.lm_head.weight.requires_grad_(True)
    assert not add_statistics_forward(model)
    model(**batch, statistics=StatisticsRequest(20)).log_prob.sum().backward()
    assert model.lm_head.weight.grad.abs().max() > 0


def test_an_unknown_head_is_noticed(batch):
    model = tiny_base().requires_grad_(False)
    assert verify_head(model)
    original = model.forward

    def odd(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = odd
    assert not verify_head(model)
    wanted = expected(model, batch, 20)
    assert not add_statistics_forward(model)
    assert_same(model(**batch, statistics=StatisticsRequest(20)), wanted)


@pytest.mark.parametrize("part", ["model", "lm_head"])
def test_a_head_in_a_precision_of_its_own_is_read(part):
    model = tiny_base(tie_word_embeddings=False).requires_grad_(False)
    getattr(model, part).to(torch.bfloat16)
    assert verify_head(model)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    assert not verify_head(model)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_a_copy_runs_its_own_weights(batch, slow, replaced):
    model = tiny_base().requires_grad_(False)
    if replaced:  # by another library, on the instance
        model.forward = types.MethodType(type(model).forward, model)
    add_statistics_forward(model, verified=not slow)
    wanted = logits(model, batch["input_ids"])
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.zero_()
    assert logits(copied, batch["input_ids"]).eq(0).all()
    entropy = copied(**batch, statistics=StatisticsRequest(0)).topk_entropy
    torch.testing.assert_close(entropy, (batch["labels"][:, 1:] != -100).float())
    assert torch.equal(logits(model, batch["input_ids"]), wanted)


@pytest.mark.parametrize("slow", [False, True])
def test_an_empty_batch_keeps_the_graph_alive(batch, slow):
    model = untied()
    model.model.norm.weight.requires_grad_(True)
    model.lm_head.weight.requires_grad_(slow)
    add_statistics_forward(model)
    empty = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    model(**empty, statistics=StatisticsRequest(20)).topk_entropy.sum().backward()
    assert model.model.norm.weight.grad.eq(0).all()
