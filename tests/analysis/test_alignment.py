"""Directions, task values, coordinates and terms on a gated transformer, against autograd on full logits."""

import math

import numpy as np
import pytest
import torch

import loragate as lg
from loragate.analysis.alignment import mean_direction, update_between
from loragate.analysis.directions import (
    NAMES,
    agreements,
    by_group,
    coordinate_sums,
    differentiable_gates,
    gate_input_gradient,
    parameter_slices,
    row_directions,
)
from loragate.analysis.rows import Reader, TokenClasses, answer_rows
from loragate.analysis.task_values import (
    Branch,
    branches,
    leave_one_out,
    reference_values,
    reward_values,
    rollout_values,
    some_positions,
)
from loragate.analysis.theorem import terms
from loragate.data import encode_rows
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from tiny import tiny_gated, tiny_rows, tiny_tokenizer

K = 20


def material(count=4):
    tokenizer = tiny_tokenizer()
    rows = list(encode_rows(tiny_rows(count), tokenizer, max_length=64))
    return tokenizer, rows


def autograd_directions(peft, row, values):
    """The four directions from full logits by autograd."""
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
    kept = labels[1:] >= 0
    found = {}
    for name in NAMES:
        with gate_input_gradient(peft, detached=name == "entropy_semi"):
            z = peft(input_ids=ids, use_cache=False).logits[0, :-1][kept]
        top, r = z.detach().topk(K, -1).indices, values(slice(0, len(z)), z)
        if name.startswith("entropy"):
            scalar = -math.log(K) * lg.topk_entropy(z, K).sum()
        elif name == "value_topk":
            scalar = (torch.softmax(z.gather(-1, top), -1) * r.gather(-1, top)).sum()
        else:
            scalar = (torch.softmax(z, -1) * r).sum()
        gradients = torch.autograd.grad(scalar, list(lg.gate_parameters(peft).values()))
        found[name] = torch.cat([gradient.reshape(-1) for gradient in gradients])
    return found


def measured(peft, rows, tokenizer):
    reader = Reader(peft, tokenizer)
    with peft.disable_adapter():
        values = [reference_values(reader, row) for row in rows]
    with differentiable_gates(peft):
        return [row_directions(reader, row, value, K) for row, value in zip(rows, values, strict=True)], values


def prompt_of(row):
    return next(at for at, label in enumerate(row["labels"]) if label >= 0)


def test_directions_are_the_gradients():
    peft, (tokenizer, rows) = tiny_gated(-2, 3, seed=4), material(2)
    found, values = measured(peft, rows, tokenizer)
    assert Reader(peft, tokenizer).fused
    for row, value, direction in zip(rows, values, found, strict=True):
        with differentiable_gates(peft):
            expected = autograd_directions(peft, row, value)
        for name in NAMES:
            assert torch.allclose(direction.vectors[name], expected[name], rtol=2e-3, atol=2e-5), name
        assert direction.tokens == sum(label >= 0 for label in row["labels"])
    assert not torch.allclose(found[0].vectors["entropy"], found[0].vectors["entropy_semi"], rtol=1e-3)


def test_reference_values_are_log_probabilities_of_the_model_that_acts():
    peft, (tokenizer, rows) = tiny_gated(-2, 3, seed=4), material(1)
    _, (values,) = measured(peft, rows, tokenizer)
    labels = torch.tensor(rows[0]["labels"])
    with torch.no_grad(), peft.disable_adapter():
        z = peft(input_ids=torch.tensor([rows[0]["input_ids"]])).logits[0, :-1][labels[1:] >= 0]
    assert torch.allclose(values(slice(0, len(z)), z), torch.log_softmax(z, -1), atol=1e-5)
    assert torch.allclose(values(slice(1, 2), z), values(slice(0, len(z)), z)[1:2])


def test_terms_coordinates_and_updates():
    peft, (tokenizer, rows) = tiny_gated(-2, 3, seed=4), material(5)
    found, values = measured(peft, rows, tokenizer)
    slices = parameter_slices(peft)
    assert max(place.stop for place in slices.values()) == len(found[0].vectors["value"])
    overall = terms("all", found)
    v, g = (mean_direction(found, name) for name in ("value", "entropy_semi"))
    assert overall.total.cosine.mean == pytest.approx(float(v @ g / (v.norm() * g.norm())), rel=1e-5)
    assert overall.gain.mean == pytest.approx(float(v @ g), rel=1e-5)
    assert overall.total.cosine.low <= overall.total.cosine.mean <= overall.total.cosine.high
    reader, sums = Reader(peft, tokenizer), []
    classes = TokenClasses(tokenizer, {tokenizer.eos_token_id})
    with differentiable_gates(peft):
        for row, value in zip(rows, values, strict=True):
            sums.append(coordinate_sums(reader, row, value, K, classes, prompt_of(row)))
    agreement = agreements(sums)
    assert agreement[0].name == "all"
    assert {"prompt", "end"} <= {row.name for row in agreement}
    update = update_between("a", "b", v, value=v, entropy=g)
    assert update.gain == pytest.approx(float(v @ v), rel=1e-5)
    assert update.cosine == pytest.approx(1.0)


def test_a_value_that_is_the_logits_agrees_everywhere():
    """eq:rw-signal-decomposition with ε = 0: r = z/β makes both directions one, and every coordinate's sign right."""
    peft, (tokenizer, rows) = tiny_gated(-2, 3, seed=4), material(1)
    reader, (row,) = Reader(peft, tokenizer), rows
    with torch.no_grad():
        table = reader.logits(reader.states(reader.batch(row))) / 2.5
    with differentiable_gates(peft):
        found = row_directions(reader, row, lambda at, _: table[at], K)
        sums = coordinate_sums(reader, row, lambda at, _: table[at], K, TokenClasses(tokenizer, {1}), prompt_of(row))
    assert torch.allclose(found.vectors["entropy"], 2.5 * found.vectors["value_topk"], rtol=1e-3, atol=1e-5)
    assert agreements([sums])[0].weighted.mean > 0.999


def test_the_answer_is_no_prompt_where_only_its_end_is_counted():
    """Rollouts count a few positions of an answer; a λ before the first of them still belongs to its own class."""
    peft, (tokenizer, rows) = tiny_gated(-2, 3, seed=4), material(1)
    prompt, length = prompt_of(rows[0]), len(rows[0]["labels"])
    late = {**rows[0], "labels": [*[-100] * (length - 1), rows[0]["labels"][-1]]}
    reader = Reader(peft, tokenizer)
    with differentiable_gates(peft):
        sums = coordinate_sums(reader, late, reference_values(reader, late), K, TokenClasses(tokenizer, {1}), prompt)
    found = {row.name: row.coordinates for row in agreements([sums])}
    modules = len(lg.gate_parameters(peft)) // 2
    assert length - prompt > 2
    assert 0 < found["prompt"] <= modules * (prompt - 1) < found["all"]


def test_rows_of_one_question_are_merged():
    peft, (tokenizer, rows) = tiny_gated(-2, 3, seed=4), material(3)
    found, _ = measured(peft, rows, tokenizer)
    together = by_group(found, [7, 2, 7])
    assert [row.tokens for row in together] == [found[0].tokens + found[2].tokens, found[1].tokens]
    assert torch.equal(together[0].vectors["value"], found[0].vectors["value"] + found[2].vectors["value"])


def test_reward_values_give_the_policy_gradient():
    """eq:rw-is-sft: at the policy that wrote the answer, ∇V is (R − b)∇ log μ(y)."""
    peft, tokenizer = tiny_gated(-2, 3, seed=4), tiny_tokenizer()
    prompts = ["w1 w2"]
    sample = TransformersEngine(peft, tokenizer).generate(prompts, SamplingConfig(max_new_tokens=5, seed=2))[0]
    (row,) = answer_rows(tokenizer, prompts, [sample])
    reader = Reader(peft, tokenizer)
    values = reward_values(reader, row, 1.0, 0.25)
    with differentiable_gates(peft):
        found = row_directions(reader, row, values, K)
        with gate_input_gradient(peft, detached=False):
            z = peft(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, :-1]
        kept = torch.tensor(row["labels"])[1:] >= 0
        log_prob = torch.log_softmax(z[kept], -1).gather(-1, torch.tensor(sample.token_ids)[:, None]).sum()
        gradients = torch.autograd.grad(0.75 * log_prob, list(lg.gate_parameters(peft).values()))
    expected = torch.cat([gradient.reshape(-1) for gradient in gradients])
    assert torch.allclose(found.vectors["value"], expected, rtol=5e-3, atol=5e-5)
    assert leave_one_out([0, 0, 0, 1], [1.0, 0.0, 0.0, 1.0]) == [0.0, 0.5, 0.5, 0.5]


def test_rollouts_complete_and_grade_every_branch():
    peft, tokenizer = tiny_gated(-2, 3, seed=4), tiny_tokenizer()
    prompts = ["w1 w2", "w5 w6 w7"]
    engine = TransformersEngine(peft, tokenizer)
    samples = engine.generate(prompts, SamplingConfig(max_new_tokens=5, seed=2))
    rows = answer_rows(tokenizer, prompts, samples)
    lengths = [len(row["input_ids"]) - len(sample.token_ids) for row, sample in zip(rows, samples, strict=True)]
    rows = [some_positions(row, 2, np.random.default_rng(0)) for row in rows]
    assert all(sum(label >= 0 for label in row["labels"]) == 2 for row in rows)
    tried = branches(Reader(peft, tokenizer), rows, lengths, 3)
    assert len(tried) == 2 * 2 * 3
    seen = []

    def grade(answers):
        seen.extend(answers)
        # right where the answer's first token has an even id
        return [answer.token_ids[0] % 2 == 0 for _, answer in answers]

    sampling = SamplingConfig(max_new_tokens=6, samples=2, seed=1)
    values = rollout_values(engine, tried, grade, sampling, {tokenizer.eos_token_id}, positions=64)
    finished = sum(branch.action == tokenizer.eos_token_id for branch in tried)
    assert len(seen) == 2 * (len(tried) - finished) + finished, "an answer that is complete needs no completion"
    assert all(isinstance(answer, Sample) and 1 <= len(answer.token_ids) <= 6 for _, answer in seen)
    for index, table in values.items():
        dense = table(slice(0, 2), torch.zeros(2, 160))
        mine = [branch for branch in tried if branch.row == index]
        assert len(mine) == 2 * 3
        for branch in mine:
            first = branch.token_ids[branch.prompt_length]
            assert float(dense[branch.position, branch.action]) == float(first % 2 == 0)
        for position in (0, 1):
            actions = [branch.action for branch in mine if branch.position == position]
            elsewhere = dense[position, [token for token in range(160) if token not in actions]]
            assert bool((elsewhere == dense[position, actions].mean()).all())
    ended = Branch(0, 0, tokenizer.eos_token_id, 2, (3, 4, tokenizer.eos_token_id))
    stopped = rollout_values(
        engine, [ended], lambda found: [a.finish_reason == "stop" for _, a in found], sampling, {tokenizer.eos_token_id}
    )
    assert float(stopped[0](slice(0, 1), torch.zeros(1, 160)).max()) == 1.0


def test_a_late_branch_takes_no_room_from_an_early_one():
    """Each answer may grow to its own limit, whatever the longest branch leaves of the model's positions."""
    positions, limit = 64, 60
    early = Branch(0, 0, 7, 2, (3, 4, 7))
    late = Branch(1, 0, 8, 2, (3, 4, *[5] * (limit - 2), 8))
    last = Branch(2, 0, 9, 6, (3, 4, 5, 6, 7, 8, *[5] * 57, 9))
    assert [len(branch.token_ids) for branch in (late, last)] == [61, positions]

    class NeverEnds:
        tokenizer = tiny_tokenizer()

        def generate(self, prompts, config, on_progress):
            rooms = [min(config.max_new_tokens, positions - len(ids)) for ids in prompts]
            return [Sample(at, 0, "", (7,) * room, "length", None) for at, room in enumerate(rooms)]

    seen = {}

    def grade(answers):
        seen.update({row: len(answer.token_ids) for row, answer in answers})
        return [True] * len(answers)

    config = SamplingConfig(max_new_tokens=limit)
    values = rollout_values(NeverEnds(), [early, late, last], grade, config, {1}, positions)
    assert seen == {0: limit, 1: limit, 2: positions - 6}
    assert sorted(values) == [0, 1, 2]
