"""Guard rails: readings of hand-made answers, limits, and the share of λ at a bound."""

import pytest
import torch

import loragate as lg
from loragate.errors import ConfigError
from loragate.gates.control import Recorder, regions
from loragate.gates.range import Range
from loragate.training.guards import (
    MARGIN,
    Guard,
    GuardLimits,
    Reading,
    exceeded,
    generation_stats,
    repeats,
    saturation,
)
from loragate.training.rollouts import Answer
from tiny import tiny_adapter

START = Reading(0, 100, repetition=0.1, length=20.0, terminated=0.9, distinct=0.8, saturated=0.0)


def answer(*tokens, finished=True):
    return Answer(0, tuple(tokens), "", finished)


def changed(**values):
    return Reading(**{**START.__dict__, "step": 40, **values})


def test_a_run_of_tokens_that_comes_back_twice_counts():
    loop = [1, 2, 3, 4]
    assert repeats(loop * 10)
    assert not repeats(list(range(100)))
    # 6 tokens at three places: 0, 4 and 8 of a loop of 4 need 14 tokens
    assert repeats((loop * 4)[:14])
    assert not repeats((loop * 4)[:13])
    assert repeats([1, 2] * 2, n=2, times=2)
    assert not repeats([])
    assert not repeats([5] * 5)


def test_a_reading_counts_what_it_says():
    answers = [answer(1, 2, 3), answer(1, 2, 3), answer(*[7] * 30, finished=False), answer(4)]
    reading = generation_stats(answers, 12, 0.25)
    assert reading == Reading(12, 4, repetition=0.25, length=37 / 4, terminated=0.75, distinct=0.75, saturated=0.25)
    with pytest.raises(ConfigError, match="at least one answer"):
        generation_stats([], 0)


def test_each_limit_speaks_for_itself():
    limits = GuardLimits(saturated=0.5)
    assert exceeded(START, START, limits) == []
    cases = {
        "repetition": (0.29, 0.31, "31% of the answers repeat themselves, 10% at the start"),
        "terminated": (0.71, 0.69, "69% of the answers come to an end, 90% at the start"),
        "distinct": (0.41, 0.39, "39% of the answers are different ones, 80% at the start"),
        "saturated": (0.5, 0.51, "51% of the λ are at a bound (limit 50%)"),
        "length": (59.0, 61.0, "an answer has 61.0 tokens on average, 20.0 at the start"),
    }
    for name, (fine, bad, words) in cases.items():
        assert exceeded(START, changed(**{name: fine}), limits) == []
        assert exceeded(START, changed(**{name: bad}), limits) == [words]
    assert exceeded(START, changed(length=6.0), limits) == ["an answer has 6.0 tokens on average, 20.0 at the start"]
    assert len(exceeded(START, changed(length=1.0, terminated=0.0), limits)) == 2
    assert exceeded(START, changed(saturated=None), limits) == []


def test_a_guard_waits_for_enough_answers_and_keeps_its_verdict():
    guard = Guard(GuardLimits(answers=4))
    good = [answer(1, 2, 3), answer(2, 3, 4)]
    assert guard.observe(0, good) is None
    assert guard.readings == []
    guard.observe(1, good)
    assert [reading.step for reading in guard.readings] == [1]
    assert guard.readings[0].distinct == 0.5
    bad = [answer(9, 9, 9, finished=False)] * 2
    assert guard.observe(2, bad) is None
    verdict = guard.observe(3, bad, lambda: 0.125)
    assert verdict.startswith("stopped by the guard at step 3: 0% of the answers come to an end, 100% at the start")
    assert guard.verdict == verdict
    assert guard.as_records()[-1]["saturated"] == 0.125


def test_at_a_bound_means_within_one_per_cent_of_the_way():
    lam = torch.tensor([-6.0, -5.94, -5.92, 0.0, 1.0, 2.97, 2.985, 3.0])
    at_lower, at_upper = regions(lam, Range(-6, 3), MARGIN)[3:5]
    assert at_lower.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert at_upper.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    # an upper bound of 1 has no way to go: λ = 1 is where gates start
    at_lower, at_upper = regions(torch.tensor([1.0, 0.5, 0.0]), Range(0, 1), MARGIN)[3:5]
    assert at_lower.tolist() == [0, 0, 1]
    assert not at_upper.any()


def test_saturation_counts_response_tokens_and_restores_recorders():
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 2))
    ids = torch.randint(3, 60, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    assert saturation(model, [batch], "default") == 0.0
    with torch.no_grad():
        for name, parameter in lg.gate_parameters(model).items():
            if "q_proj" in name and name.endswith("bias"):
                parameter.fill_(50.0)
    assert saturation(model, [batch], "default") == pytest.approx(1 / 7)
    with lg.record_gates(model) as recording:
        model(input_ids=ids)
    assert recording.total()["tokens"] == 14 * 12


def test_saturation_that_no_module_could_count_is_not_zero(monkeypatch):
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 2))
    monkeypatch.setattr(Recorder, "update", lambda self, lam_T: None)
    ids = torch.randint(3, 60, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    assert saturation(model, [batch], "default") is None


def test_saturation_makes_no_logits():
    """At 16 rows of 4096 tokens and 152k words they would take 20 GB in bf16."""
    model = lg.attach_gates(tiny_adapter(), lg.GateConfig(-3, 2))
    called = []
    model.get_base_model().lm_head.register_forward_hook(lambda *_: called.append(1))
    ids = torch.randint(3, 60, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    assert saturation(model, [batch], "default") == 0.0
    assert not called
