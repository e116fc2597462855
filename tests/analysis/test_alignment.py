"""Directions, task values, coordinates and terms on a gated transformer, against autograd on full logits."""

import math
from dataclasses import replace

import pytest
import torch

import loragate as lg
from loragate.analysis.alignment import terms
from loragate.analysis.directions import (
    GROUPS,
    NAMES,
    PROMPT,
    Case,
    agreements,
    by_group,
    coordinate_sums,
    gate_input_gradient,
    leave_one_out,
    parameter_slices,
    reference_values,
    reward_values,
    row_directions,
)
from loragate.analysis.rows import CLASSES, Reader, TokenClasses, answer_rows
from loragate.data import encode_rows
from loragate.generation import SamplingConfig, TransformersEngine
from tiny import tiny_gated, tiny_rows, tiny_tokenizer

K = 20


def gated_reader():
    peft, tokenizer = tiny_gated(-2, 3, seed=4), tiny_tokenizer()
    return Reader(peft, tokenizer), tokenizer


def case_of(row, values, group=0):
    return Case(row, values, group)


def material(count, groups=None):
    """A reader of gates, and rows whose values are the base's log-probabilities."""
    reader, tokenizer = gated_reader()
    rows = list(encode_rows(tiny_rows(count), tokenizer, max_length=64))
    with reader.model.disable_adapter():
        values = [reference_values(reader, row) for row in rows]
    return reader, list(map(case_of, rows, values, groups or range(count)))


def logits_of(model, row):
    """At the counted positions, [T, V]."""
    kept = torch.tensor(row["labels"])[1:] >= 0
    return model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1][kept]


def gradient(model, scalar):
    """Of all gate parameters, flat."""
    return torch.cat(
        [part.reshape(-1) for part in torch.autograd.grad(scalar, list(lg.gate_parameters(model).values()))]
    )


def direction(found, name):
    return found.vectors[NAMES.index(name)]


def test_directions_are_the_gradients():
    """The four of them, from full logits by autograd."""
    reader, cases = material(2)
    assert reader.fused
    for case in cases:
        found = row_directions(reader, case, K)
        for name in NAMES:
            with gate_input_gradient(reader.model, detached=name == "entropy_semi"):
                z = logits_of(reader.model, case.row)
            top, r = z.detach().topk(K, -1).indices, case.values(slice(0, len(z)), z)
            scalar = {
                "value_topk": lambda z=z, r=r, top=top: (
                    torch.softmax(z.gather(-1, top), -1) * r.gather(-1, top)
                ).sum(),
                "value": lambda z=z, r=r: (torch.softmax(z, -1) * r).sum(),
            }.get(name, lambda z=z: -math.log(K) * lg.topk_entropy(z, K).sum())()
            expected = gradient(reader.model, scalar)
            assert torch.allclose(direction(found, name), expected, rtol=2e-3, atol=2e-5), name
        assert found.tokens == sum(label >= 0 for label in case.row["labels"])
    assert not torch.allclose(direction(found, "entropy"), direction(found, "entropy_semi"), rtol=1e-3)


def test_reference_values_are_log_probabilities_of_the_model_that_acts():
    reader, (case,) = material(1)
    with torch.no_grad(), reader.model.disable_adapter():
        z = logits_of(reader.model, case.row)
    assert torch.allclose(case.values(slice(0, len(z)), z), torch.log_softmax(z, -1), atol=1e-5)
    assert torch.allclose(case.values(slice(1, 2), z), case.values(slice(0, len(z)), z)[1:2])


def test_terms_and_coordinates():
    reader, cases = material(5)
    rows = by_group(cases, lambda case: row_directions(reader, case, K))
    assert max(place.stop for place in parameter_slices(reader.model).values()) == rows[0].vectors.shape[1]
    overall = terms("all", rows)
    means = sum(row.vectors.double() for row in rows) / sum(row.tokens for row in rows)
    v, g = means[NAMES.index("value")], means[NAMES.index("entropy_semi")]
    assert overall.total.cosine.mean == pytest.approx(float(v @ g / (v.norm() * g.norm())), rel=1e-5)
    assert overall.gain.mean == pytest.approx(float(v @ g), rel=1e-5)
    assert overall.total.cosine.low <= overall.total.cosine.mean <= overall.total.cosine.high
    classes = TokenClasses(tiny_tokenizer(), {tiny_tokenizer().eos_token_id})
    agreement = agreements([coordinate_sums(reader, case, K, classes) for case in cases])
    assert agreement[0].name == "all"
    assert {"prompt", "end"} <= {row.name for row in agreement}


def test_a_value_that_is_the_logits_agrees_everywhere():
    """eq:rw-signal-decomposition with ε = 0: r = z/β makes both directions one, and every coordinate's sign right."""
    reader, (case,) = material(1)
    with torch.no_grad():
        table = reader.logits(reader.states(reader.batch(case.row))) / 2.5
    case = replace(case, values=lambda at, _: table[at])
    found = row_directions(reader, case, K)
    assert torch.allclose(direction(found, "entropy"), 2.5 * direction(found, "value_topk"), rtol=1e-3, atol=1e-5)
    sums = coordinate_sums(reader, case, K, TokenClasses(tiny_tokenizer(), {1}))
    assert agreements([sums])[0].weighted.mean > 0.999


def test_rows_of_one_question_are_merged():
    reader, cases = material(3, groups=[7, 2, 7])
    apart = [row_directions(reader, case, K) for case in cases]
    together = by_group(cases, lambda case: apart[cases.index(case)])
    assert [row.tokens for row in together] == [apart[0].tokens + apart[2].tokens, apart[1].tokens]
    assert torch.equal(together[0].vectors, apart[0].vectors + apart[2].vectors)


def test_reward_values_give_the_policy_gradient():
    """eq:rw-is-sft: at the policy that wrote the answer, ∇V is (R − b)∇ log μ(y)."""
    reader, tokenizer = gated_reader()
    prompts = ["w1 w2"]
    sample = TransformersEngine(reader.model, tokenizer).generate(prompts, SamplingConfig(max_new_tokens=5, seed=2))[0]
    (row,) = answer_rows(tokenizer(prompts, add_special_tokens=False)["input_ids"], [sample])
    found = row_directions(reader, case_of(row, reward_values(reader, row, 1.0, 0.25)), K)
    with gate_input_gradient(reader.model, detached=False):
        log_p = torch.log_softmax(logits_of(reader.model, row), -1)
    expected = gradient(reader.model, 0.75 * log_p.gather(-1, torch.tensor(sample.token_ids)[:, None]).sum())
    assert torch.allclose(direction(found, "value"), expected, rtol=5e-3, atol=5e-5)
    assert leave_one_out([0, 0, 0, 1], [1.0, 0.0, 0.0, 1.0]) == [0.0, 0.5, 0.5, 0.5]


def test_what_lies_between_two_answers_is_prompt():
    reader, tokenizer = gated_reader()
    said = [("user", "w1 w2"), ("assistant", "w3 w4"), ("user", "w5 w6 w7"), ("assistant", "w8")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in said]}]
    (row,) = encode_rows(rows, tokenizer, max_length=64)
    with reader.model.disable_adapter():
        case = case_of(row, reference_values(reader, row))
    counts = coordinate_sums(reader, case, K, TokenClasses(tokenizer, {tokenizer.eos_token_id}))[:, 0]
    learned = sum(label >= 0 for label in row["labels"][1:])
    # at most one λ of each module at every position
    assert counts[GROUPS.index(PROMPT)] > 0
    assert counts[: len(CLASSES)].sum() <= len(parameter_slices(reader.model)) * learned
