"""Stage II on sampled answers: gradients by enumeration, the sample stream, resume, guards, refusals."""

from dataclasses import replace

import pytest
import torch

import loragate as lg
from loragate.data import Collator, load_rows
from loragate.errors import ConfigError, TrainingError
from loragate.gates import weights_checksum
from loragate.generation import Sample, SamplingConfig, TransformersEngine
from loragate.losses.causal_head import ResponseScorer
from loragate.training import GateTrainingSettings, rollouts, training_rows
from loragate.training.guards import GuardLimits
from loragate.training.rollouts import (
    Answer,
    as_training_row,
    sampled_request,
    stream_seed,
    training_prompts,
)
from tiny import gate_values, same, tiny_adapter, tiny_rows, tiny_tokenizer

CONFIG = lg.GateConfig(-3, 2)
PLAIN = GateTrainingSettings(
    batch_size=8, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, k=20, max_length=64
)
ANCHORED = replace(PLAIN, objective="anchored", refresh=2, max_new_tokens=6, max_steps=6)
REWARD = replace(PLAIN, objective="reward", samples_per_prompt=4, max_new_tokens=6, max_steps=6)


def short(row, text, finished):
    return -float(len(text.split()))


def train(settings, model=None, rows=None, **more):
    return lg.train_gates(model or tiny_adapter(), tiny_tokenizer(), rows or tiny_rows(24), CONFIG, settings, **more)


def prompts_of(rows, settings, positions=None):
    tokenizer = tiny_tokenizer()
    source, encoded = training_rows(load_rows(rows), tokenizer, settings)
    return training_prompts(encoded, source, tokenizer, settings.max_new_tokens, positions)


@pytest.mark.parametrize("anchor", ["base", "adapter", "mixture", "product"])
def test_anchored_training_lowers_its_loss_and_changes_gates_only(anchor):
    model = tiny_adapter()
    before = weights_checksum(model.named_parameters())
    result = train(replace(ANCHORED, refresh=1, learning_rate=2e-3, anchor=anchor, max_steps=8), model)
    first, last = result.history[0], result.history[-1]
    assert first["loss"] == pytest.approx(first["entropy"] + first["kl"], rel=1e-4)
    if anchor == "adapter":
        # up to rounding the adapter is its own anchor at the start
        assert first["kl"] == pytest.approx(0, abs=1e-5)
    else:
        assert sum(record["loss"] for record in result.history[-3:]) / 3 < first["loss"]
    assert {"grad_norm", "learning_rate", "gate_below_zero", "answer_length", "finished"} <= set(last)
    training = result.evidence()["training"]
    assert (result.steps, training["sampled"]["answers"], training["settings"]["anchor"]) == (8, 64, anchor)
    assert model.training is False
    lg.detach_gates(model)
    assert weights_checksum(model.named_parameters()) == before


@pytest.mark.parametrize(("settings", "reward"), [(ANCHORED, None), (REWARD, short)], ids=["anchored", "reward"])
def test_micro_batches_do_not_matter(settings, reward):
    whole, single = tiny_adapter(), tiny_adapter()
    for model, micro in ((whole, 8), (single, 1)):
        train(replace(settings, per_device_train_batch_size=micro, max_steps=3), model, reward=reward)
    for name, value in gate_values(whole).items():
        torch.testing.assert_close(gate_values(single)[name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_a_torn_checkpoint_is_passed_over(tmp_path):
    settings = replace(ANCHORED, save_steps=1, max_steps=3)
    whole, model = tiny_adapter(), tiny_adapter()
    train(settings, whole, run_folder=tmp_path)
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    train(settings, model, run_folder=tmp_path, resume=True)
    assert same(gate_values(model), gate_values(whole))
    (tmp_path / "checkpoint-3" / "optimizer.safetensors").write_bytes(b"nothing")
    with pytest.raises(TrainingError, match="remove its folder and resume again"):
        train(settings, run_folder=tmp_path, resume=True)


GOOD, BAD = (20, 21, 22, 1), (90, 91, 92, 1)


def preference(model, rows):
    """Mean log p of the good answer's tokens minus that of the bad one's, over the prompts."""
    prompts = prompts_of(rows, REWARD)
    scorer = ResponseScorer(model)
    sums = []
    for ids in (GOOD, BAD):
        batch = Collator(0)([as_training_row(Answer(index, ids, "", True), prompts) for index in range(len(prompts))])
        with torch.no_grad():
            sums.append(float(scorer.statistics(scorer.states(batch), batch, sampled_request(20)).log_prob.mean()))
    return sums[0] - sums[1]


@pytest.mark.parametrize(
    "options", [{}, {"refresh": 2, "advantage": "std"}, {"reward_kl": 0.01, "anchor": "adapter"}], ids=str
)
@pytest.mark.parametrize("sign", [1, -1])
def test_rewarded_answers_become_likelier(rows, options, sign):
    def sampler(prompts, config):
        return [
            Sample(question, index, "", GOOD if index % 2 else BAD, "stop", 0.0)
            for question in range(len(prompts))
            for index in range(config.samples)
        ]

    answers, model, fresh = iter(range(10_000)), tiny_adapter(), lg.attach_gates(tiny_adapter(), CONFIG)
    settings = replace(REWARD, learning_rate=5e-3, max_steps=4, **options)
    result = train(settings, model, sampler=sampler, reward=lambda *_: sign * float(next(answers) % 2))
    assert sign * (preference(model, rows) - preference(fresh, rows)) > 0.05
    assert result.history[0]["reward"] == sign * 0.5
    assert ("kl" in result.history[-1]) == ("reward_kl" in options)


def test_equal_rewards_teach_nothing():
    model = tiny_adapter()
    result = train(REWARD, model, reward=lambda row, text, finished: 1.0)
    assert same(gate_values(model), gate_values(lg.attach_gates(tiny_adapter(), CONFIG)))
    assert {record["loss"] for record in result.history} == {0.0}


def test_rewards_see_the_whole_row():
    rows = [{**row, "gold": index} for index, row in enumerate(tiny_rows(8))]
    seen = []

    def reward(row, text, finished):
        seen.append((row["gold"], row["messages"][0]["content"], type(text), type(finished)))
        return 0.0

    train(REWARD, rows=rows, reward=reward)
    assert {gold for gold, *_ in seen} == set(range(8))
    assert all(rows[gold]["messages"][0]["content"] == content for gold, content, *_ in seen)
    assert {tuple(kinds) for _, _, *kinds in seen} == {(str, bool)}
    with pytest.raises(TrainingError, match=r"the reward of an answer to .* is nan"):
        train(REWARD, reward=lambda row, text, finished: float("nan"))


def test_a_sampler_from_outside_is_used_and_checked(tokenizer):
    model = tiny_adapter()
    engine = TransformersEngine(model, tokenizer, batch_size=16)
    calls = []

    def sampler(prompts, config):
        calls.append((len(prompts), config))
        return engine.generate(prompts, config)

    own, default = train(ANCHORED, model, sampler=sampler), train(ANCHORED)
    assert [count for count, _ in calls] == [16, 16, 16]
    assert calls[0][1] == SamplingConfig(max_new_tokens=6, seed=stream_seed(ANCHORED.seed, 0))
    assert [record["loss"] for record in own.history] == [record["loss"] for record in default.history]
    with pytest.raises(TrainingError, match="returned 15 answers for 16 prompts"):
        train(ANCHORED, sampler=lambda *given: engine.generate(*given)[1:])


def looping(count):
    return [Sample(index, 0, "", (7,) * 40, "length", 0.0) for index in range(count)]


def test_a_guard_stops_an_on_policy_run(tokenizer):
    model = tiny_adapter()
    engine = TransformersEngine(model, tokenizer)

    def sampler(prompts, config):
        first = config.seed == stream_seed(ANCHORED.seed, 0)
        return engine.generate(prompts, config) if first else looping(len(prompts))

    result = train(ANCHORED, model, sampler=sampler, guard=GuardLimits(answers=16))
    assert result.steps == 2
    assert result.stopped.startswith("stopped by the guard at step 2: 100% of the answers repeat themselves, 0% at")
    assert [reading["step"] for reading in result.guard] == [0, 2]
    assert result.evidence()["training"]["stopped"] == result.stopped
    assert lg.gate_parameters(model), "the caller decides what becomes of the gates"


def test_small_steps_are_watched_from_the_adapter_on():
    result = train(REWARD, reward=short, guard=GuardLimits(answers=20, distinct=0))
    assert result.stopped is None
    # 20 answers drawn before training, then windows of at least 20 out of steps of 8
    assert [(reading["step"], reading["answers"]) for reading in result.guard] == [(0, 20), (2, 24), (5, 24)]
    assert result.sampled["answers"] == 20 + 6 * 8


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        (PLAIN, {"reward": short}, "a reward has no effect on the objective 'entropy'"),
        (PLAIN, {"sampler": looping}, "a sampler has no effect"),
        (PLAIN, {"guard": GuardLimits()}, "a guard has no effect on the objective 'entropy'"),
        (ANCHORED, {"reward": short}, "a reward has no effect on the objective 'anchored'"),
        (REWARD, {}, "needs a reward"),
    ],
)
def test_callables_without_effect_or_answers_are_refused(settings, options, words):
    with pytest.raises(ConfigError, match=words):
        train(settings, **options)


@pytest.mark.parametrize(
    "steeper",
    [
        lambda losses: losses + (losses * 0).sqrt(),  # finite, with an infinite slope times 0
        lambda losses: losses + 1e22 * (losses - losses.detach()),  # finite slopes whose norm overflows
    ],
)
def test_a_gradient_that_is_not_finite_stops_the_run(monkeypatch, steeper):
    whole = rollouts.AnchoredEntropy.terms

    def steep(self, scorer, batch, answers, before_T):
        losses_T, sums = whole(self, scorer, batch, answers, before_T)
        return steeper(losses_T), sums

    monkeypatch.setattr(rollouts.AnchoredEntropy, "terms", steep)
    with pytest.raises(TrainingError, match="the gradient is not finite at step 1, though the loss is"):
        train(ANCHORED)


def test_checkpointing_and_bf16_change_little():
    expected = train(ANCHORED).history[0]["loss"]
    for options, tolerance in [({"gradient_checkpointing": True}, 1e-6), ({"precision": "bf16"}, 0.03)]:
        model = tiny_adapter()
        result = train(replace(ANCHORED, **options, max_steps=2), model)
        assert not model.is_gradient_checkpointing
        assert {parameter.dtype for parameter in lg.gate_parameters(model).values()} == {torch.float32}
        assert result.history[0]["loss"] == pytest.approx(expected, rel=tolerance)
