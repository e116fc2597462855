"""Token traces against plain forward passes."""

import base64

import numpy as np
import pytest
import torch

from loragate.analysis.token_traces import Answer, Question, trace_answers
from loragate.evaluation.answers import Grade
from loragate.gates import gates_disabled
from loragate.generation import Sample
from tiny import tiny_gated


@pytest.fixture
def gated():
    return tiny_gated(-6, 3)


def make(tokenizer, ids, variant="gated"):
    sample = Sample(0, 0, "", tuple(ids), "stop", None)
    return Question("q", tokenizer.decode([5, 6, 7]), "gold", [Answer(variant, sample, Grade(True, None, "ok"))])


def logits(model, ids):
    return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1)


@pytest.mark.parametrize("variant", ["base", "adapter", "gated"])
def test_numbers_are_those_of_plain_forward_passes(gated, tokenizer, variant):
    ids = [9, 12, 20, 11]
    question = make(tokenizer, ids, variant)
    prompt = tokenizer(question.prompt, add_special_tokens=False)["input_ids"]
    answer = trace_answers(gated, tokenizer, [question])["questions"][0]["answers"][0]
    places = range(len(prompt) - 1, len(prompt) + len(ids) - 1)
    whole = [*prompt, *ids]
    with torch.no_grad():
        with gated.disable_adapter():
            base = logits(gated, whole)
        with gates_disabled(gated):
            adapter = logits(gated, whole)
        own = {"base": base, "adapter": adapter, "gated": logits(gated, whole)}[variant]

    def entropy(log_p):
        return [-(log_p[at].exp() * log_p[at]).sum().item() for at in places]

    assert answer["log_prob"] == pytest.approx(
        [own[at, token].item() for at, token in zip(places, ids, strict=True)], abs=1e-4
    )
    assert answer["entropy"] == pytest.approx(entropy(own), abs=1e-4)
    differences = [a - b for a, b in zip(entropy(adapter), entropy(base), strict=True)]
    assert answer["delta_entropy"] == pytest.approx(differences, abs=1e-4)
    for at, top in zip(places, answer["top"], strict=True):
        assert [value for _, value in top] == pytest.approx(own[at].exp().topk(5).values.tolist(), abs=1e-4)


def test_lambda_stands_at_the_position_that_chose_the_token(gated, tokenizer):
    ids = [9, 12, 20]
    question = make(tokenizer, ids)
    record = trace_answers(gated, tokenizer, [question])
    prompt = tokenizer(question.prompt, add_special_tokens=False)["input_ids"]
    path = record["modules"][2]
    seen = {}
    layer = gated.get_base_model().get_submodule(path)
    hook = layer.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0].detach()))
    gated(input_ids=torch.tensor([[*prompt, *ids]]))
    hook.remove()
    expected = layer.lora_gate["default"].coefficients(seen["x"])[0, len(prompt) - 1 : -1].detach().numpy()
    found = np.frombuffer(base64.b64decode(record["questions"][0]["answers"][0]["gates"]), dtype=np.uint8)
    found = found.reshape(len(record["modules"]), len(ids))[2] / 255 * 9 - 6
    assert len(set(np.round(expected, 2))) > 1
    assert found == pytest.approx(expected, abs=9 / 255)


def test_long_answers_are_cut_and_empty_ones_stay_without_tokens(gated, tokenizer):
    long, empty = make(tokenizer, [9] * 10), make(tokenizer, [])
    record = trace_answers(gated, tokenizer, [long, empty], max_tokens=4)
    answer = record["questions"][0]["answers"][0]
    assert len(answer["tokens"]) == len(answer["log_prob"]) == 4
    assert answer["cut"] == 6
    (nothing,) = record["questions"][1]["answers"]
    assert (nothing["tokens"], nothing["entropy"], nothing["top"], nothing["gates"]) == ([], [], [], "")
    assert nothing["verdict"]["correct"], "the grader's word on it is shown"
