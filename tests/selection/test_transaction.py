"""The transaction on a tiny model: what wins, what is attached, what a resumed selection does again, what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from selection_kit import FakeEngine, acting, probe

import loragate as lg
from loragate.data import load_rows
from loragate.errors import ConfigError, DataError, DivergenceError
from loragate.gates.range import Range
from loragate.selection import Candidate, choose, transaction
from loragate.selection.outcome import unread
from loragate.selection.retention import vetoes
from loragate.selection.transaction import Transaction, settings_of
from loragate.training import CalibrationSettings, calibration_rows
from loragate.training.guards import GuardLimits
from tiny import tiny_adapter, tiny_rows, tiny_tokenizer

SETTINGS = CalibrationSettings(
    batch_size=4, micro_batch_size=4, max_steps=2, learning_rate=5e-2, k=10, max_length=64, seed=3
)
ONE, TWO = Candidate(Range(-3, 1)), Candidate(Range(0, 1))
ROWS = tiny_rows(8)


def begin(
    folder,
    right,
    *,
    settings=SETTINGS,
    questions=None,
    retention=None,
    options=None,
    tau=1.0,
    rows=ROWS,
    references=False,
    **engine,
):
    model, tokenizer = tiny_adapter(), tiny_tokenizer()
    source, encoded = calibration_rows(load_rows(rows), tokenizer, settings)
    return Transaction(
        model,
        tokenizer,
        source,
        encoded,
        settings,
        lambda one: lg.GateConfig(one.lower, one.upper, tau=tau),
        questions or probe(),
        FakeEngine(model, right, **engine),
        folder,
        retention,
        options,
        references,
    )


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25).reshape(2, 10)).logits


@pytest.fixture
def trainings(monkeypatch):
    """The ranges that were trained, in order."""
    done, real = [], transaction.calibrate

    def counted(model, tokenizer, rows, config, *args, **options):
        done.append((config.lower, config.upper))
        return real(model, tokenizer, rows, config, *args, **options)

    monkeypatch.setattr(transaction, "calibrate", counted)
    return done


def test_the_adapter_wins_ties_and_answers_bit_for_bit(tmp_path):
    one = begin(tmp_path, {None: 20, (-3, 1): 20, (0, 1): 19})
    before = logits(one.model)
    selection = one.run([ONE, TWO])
    assert (selection.candidate, selection.choice.name, selection.choice.accepted) == (None, "adapter", False)
    assert acting(one.model) is None, "left ungated"
    assert torch.equal(logits(one.model), before)
    one.put_on(selection, ONE)
    assert acting(one.model) == (-3, 1)
    assert all(not bool(value.any()) for value in lg.gate_parameters(one.model).values())
    assert torch.equal(logits(one.model), before)
    with lg.record_gates(one.model) as recording:
        logits(one.model)
    total = recording.total()
    assert total["zero_to_one"] == 1


def test_the_picked_gates_are_attached_exactly_as_trained(tmp_path):
    one = begin(tmp_path, {None: 10, (-3, 1): 11, (0, 1): 12})
    events = []
    selection = one.run([ONE, TWO], lambda *event: events.append(event))
    assert selection.candidate == TWO
    one.put_on(selection, ONE)
    stored = load_file(tmp_path / TWO.slug / "gates.safetensors")
    attached = lg.gate_parameters(one.model)
    assert set(stored) == set(attached)
    assert all(torch.equal(stored[name], value) for name, value in attached.items())
    assert any(bool(value.abs().max() > 1e-3) for value in stored.values()), "they were trained"
    assert not any(value.requires_grad for value in attached.values())
    assert acting(one.model) == (0, 1)
    assert [event[:2] for event in events if event[1] == "probing"] == [
        (name, "probing") for name in ("adapter", "[-3,1]", "[0,1]")
    ]
    record = json.loads(json.dumps(selection.as_record()))
    assert record["picked"] == "[0,1]"
    assert record["evidence"]["adapter"]["mean"] == pytest.approx(10 / 32)
    assert record["cost"]["trainings"] == 2
    assert record["vetoed"] == record["warnings"] == {}
    assert "retention" not in record


@pytest.fixture
def diverging(monkeypatch):
    """A set of ranges whose training meets a gradient that is not finite; the real loop, with a hook on a gate."""
    ranges, real = set(), transaction.calibrate

    def calibrate(model, tokenizer, rows, config, *args, on_step, **options):
        def spoil(report):
            on_step(report)
            if (config.lower, config.upper) in ranges:
                gate = next(iter(lg.gate_parameters(model).values()))
                gate.register_hook(lambda gradient: gradient * float("nan"))

        return real(model, tokenizer, rows, config, *args, on_step=spoil, **options)

    monkeypatch.setattr(transaction, "calibrate", calibrate)
    return ranges


def test_a_range_that_diverges_drops_out(tmp_path, trainings, diverging):
    diverging.add((-3, 1))
    right = {None: 10, (-3, 1): 20, (0, 1): 12}
    one = begin(tmp_path, right)
    selection = one.run([ONE, TWO])
    assert trainings == [(-3, 1), (0, 1)]
    assert selection.candidate == TWO
    record = json.loads(json.dumps(selection.as_record()))
    assert set(record["evidence"]) == {"adapter", "[0,1]"}
    assert set(record["failed"]) == {"[-3,1]"}
    assert record["failed"]["[-3,1]"].startswith("the gradient is not finite at step 2")
    one.put_on(selection, ONE)
    assert acting(one.model) == (0, 1)
    again = begin(tmp_path, right).run([ONE, TWO], resume=True)
    assert trainings == [(-3, 1), (0, 1)], "neither is trained again"
    assert again.as_record() == selection.as_record()
    other = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    with pytest.raises(DataError, match="made with another"):
        begin(tmp_path, right, settings=other).run([ONE, TWO], resume=True)


def test_where_all_ranges_diverge_the_error_says_why(tmp_path, diverging):
    diverging.update({(-3, 1), (0, 1)})
    one = begin(tmp_path, {None: 10, (-3, 1): 20, (0, 1): 12})
    before = logits(one.model)
    with pytest.raises(DivergenceError, match="the gradient is not finite at step 2"):
        one.run([ONE, TWO])
    assert acting(one.model) is None
    assert torch.equal(logits(one.model), before)


def test_nothing_finished_is_done_again(tmp_path, trainings):
    right = {None: 10, (-3, 1): 11, (0, 1): 12}
    first = begin(tmp_path, right).run([ONE, TWO])
    assert trainings == [(-3, 1), (0, 1)]
    again = begin(tmp_path, right)
    second = again.run([ONE, TWO], resume=True)
    assert trainings == [(-3, 1), (0, 1)]
    assert again.engine.asked == []
    assert second.as_record() == first.as_record()
    again.put_on(second, ONE)
    assert acting(again.model) == (0, 1)


def test_a_run_killed_between_candidates_goes_on(tmp_path, trainings):
    right = {None: 10, (-3, 1): 11, (0, 1): 12}
    whole = begin(tmp_path / "whole", right).run([ONE, TWO])
    trainings.clear()
    killed = begin(tmp_path / "killed", right)

    def kill(name, stage, *_):
        if (name, stage) == (TWO.name, "training"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.run([ONE, TWO], kill)
    assert acting(killed.model) is None, "gates are taken off"
    resumed = begin(tmp_path / "killed", right)
    selection = resumed.run([ONE, TWO], resume=True)
    assert trainings == [(-3, 1), (0, 1), (0, 1)]
    assert resumed.engine.asked == [(0, 1)]
    assert selection.choice == whole.choice
    for name, value in whole.outcomes[TWO.name].gates.items():
        assert torch.equal(selection.outcomes[TWO.name].gates[name], value)


def test_a_candidate_killed_while_it_was_probed_is_not_trained_again(tmp_path, trainings):
    right = {None: 10, (-3, 1): 11}
    killed = begin(tmp_path, right)

    def kill(name, stage, *_):
        if (name, stage) == (ONE.name, "probing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.run([ONE], kill)
    assert acting(killed.model) is None
    resumed = begin(tmp_path, right)
    selection = resumed.run([ONE], resume=True)
    assert trainings == [(-3, 1)]
    assert resumed.engine.asked == [(-3, 1)], "the kept gates were probed"
    assert selection.candidate == ONE


def test_another_transaction_is_not_resumed(tmp_path):
    right = {None: 10, (-3, 1): 11}
    begin(tmp_path, right).run([ONE])
    faster = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    others = {
        "another probe": begin(tmp_path, right, questions=probe(33)),
        "another settings": begin(tmp_path, right, settings=faster),
        "another gates": begin(tmp_path, right, tau=2.0),
        "another data": begin(tmp_path, right, rows=tiny_rows(8, seed=1)),
        "another retention": begin(tmp_path, right, retention=probe(seed=9)),
    }
    for words, other in others.items():
        with pytest.raises(DataError, match=words):
            other.run([ONE], resume=True)
    another = begin(tmp_path, right)
    another.model = tiny_adapter(seed=7)
    with pytest.raises(DataError, match="another adapter"):
        Transaction(
            *(another.model, another.tokenizer, another.rows, another.encoded, SETTINGS, another.gate_config),
            *(another.probe, another.engine, tmp_path),
        ).run([ONE], resume=True)
    with pytest.raises(ConfigError, match=r"go on with --resume"):
        begin(tmp_path, right).run([ONE])
    (tmp_path / ONE.slug / "result.json").write_text('{"name": 1}')
    with pytest.raises(DataError, match="not what this version writes"):
        begin(tmp_path, right).run([ONE], resume=True)


def test_candidates_must_differ(tmp_path):
    one = begin(tmp_path, {None: 1})
    for bad in ([], [ONE, Candidate(Range(-3.0, 1.0))]):
        with pytest.raises(ConfigError, match="each once"):
            one.run(bad)
    assert not any(tmp_path.iterdir())


def test_several_processes_are_refused(tmp_path, monkeypatch):
    one = begin(tmp_path, {None: 1})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process"):
        one.run([ONE])


def test_each_objective_gets_the_settings_it_reads(tmp_path):
    anchored = dataclasses.replace(SETTINGS, objective="anchored", beta=0.5, refresh=7, temperature=0.8)
    assert settings_of(anchored, "entropy") == SETTINGS
    reward = settings_of(dataclasses.replace(anchored, batch_size=8), "reward")
    assert (reward.objective, reward.refresh, reward.beta, reward.temperature) == ("reward", 7, 1.0, 1.0)
    one = begin(tmp_path, {None: 1}, settings=dataclasses.replace(SETTINGS, batch_size=4))
    with pytest.raises(ConfigError, match="samples_per_prompt"):
        one.run([ONE, Candidate(Range(0, 1), "reward")])
    assert not any(tmp_path.iterdir()), "refused before anything is trained"


def test_options_follow_the_objective(tmp_path, monkeypatch):
    seen = []

    def stop(*_, **options):
        seen.append((options.get("guard"), options["resume"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(transaction, "calibrate", stop)
    one = begin(tmp_path, {None: 1}, options=lambda settings: {"guard": GuardLimits()} if settings.on_policy else {})
    for candidate in (ONE, Candidate(Range(-3, 1), "anchored")):
        with pytest.raises(KeyboardInterrupt):
            one.run([candidate], resume=True)
    assert seen == [(None, False), (GuardLimits(), False)]


def test_answers_that_look_worse_are_reported(tmp_path):
    one = begin(
        *(tmp_path, {None: 10, (-3, 1): 20, (0, 1): 5}),
        ended={None: 0, (-3, 1): 5},
        tokens={None: 4, (-3, 1): 9},
    )
    selection = one.run([ONE, TWO])
    phrases = selection.as_record()["warnings"]
    assert set(phrases) == {"[-3,1]"}
    assert "84% of the answers come to an end" in phrases["[-3,1]"][0]
    assert "9.0 tokens on average, 4.0" in phrases["[-3,1]"][1]
    assert selection.candidate == ONE, "a sign warns, the probe decides"


def test_a_clear_loss_on_the_retention_probe_rules_a_candidate_out(tmp_path):
    retention = probe(40, seed=9)
    one = begin(tmp_path, {None: 20, (-3, 1): 32, (0, 1): 21}, retention=retention)
    one.retention = Scored({None: 36, (-3, 1): 20, (0, 1): 36}, one.model, retention)
    selection = one.run([ONE, TWO])
    assert selection.candidate == TWO
    record = json.loads(json.dumps(selection.as_record()))
    assert record["vetoed"] == {"[-3,1]": record["vetoed"]["[-3,1]"]}
    assert record["vetoed"]["[-3,1]"].startswith("loses 40.0 points on the retention probe")
    assert record["retention"]["evidence"]["adapter"]["mean"] == pytest.approx(0.9)
    assert record["retention"]["against_adapter"]["[0,1]"]["mean"] == 0
    assert record["retention"]["probe"]["questions"] == 40


class Scored:
    """A retention probe whose scores the test decides."""

    def __init__(self, right, model, real):
        self.right, self.model, self.real = right, model, real
        self.fingerprint = real.fingerprint

    def score(self, engine, on_progress=None):
        return self.real.score(FakeEngine(self.model, self.right))

    def as_dict(self):
        return self.real.as_dict()


def scores(*right):
    return np.repeat(np.array([[float(value)] for value in right]), 2, axis=1)


def test_the_veto_needs_a_loss_of_more_than_two_points_and_an_interval_below_zero():
    adapter = scores(*[1] * 40)
    few, many = scores(*[1] * 38, 0, 0), scores(*[1] * 30, *[0] * 10)
    small = adapter - 0.01
    found = vetoes({"adapter": adapter, "few": few, "many": many, "small": small, "same": adapter}, "adapter")
    assert set(found) == {"many"}, "few: the interval holds 0; small: certain, but one point only"
    assert vetoes({"adapter": scores(*[0] * 40), "better": adapter}, "adapter") == {}


def test_the_choice():
    table = {"adapter": scores(1, 0), "a": scores(1, 1), "b": scores(1, 1), "c": scores(0, 0)}
    assert choose(table, "adapter").name == "a", "of equal candidates the earlier"
    assert choose({"c": scores(0, 0), "a": scores(1, 0), "adapter": scores(0, 1)}, "adapter").name == "adapter"
    vetoed = choose(table, "adapter", {"a": "why"})
    assert (vetoed.name, vetoed.vetoed) == ("b", {"a": "why"})
    assert choose(table, "adapter", {"a": "", "b": ""}).accepted is False
    for bad in ({"adapter": "x"}, {"z": "x"}):
        with pytest.raises(ConfigError, match="cannot be vetoed"):
            choose(table, "adapter", bad)
    with pytest.raises(ConfigError, match="must be among"):
        choose(table, "base")
    with pytest.raises(ConfigError, match="same questions"):
        choose({"adapter": scores(1, 0), "a": scores(1)}, "adapter")


def test_rounding_breaks_no_tie():
    """Means over 12 samples and over 4 are rounded differently; as many right answers of both are a tie."""
    few, many = np.zeros((3, 4)), np.zeros((3, 12))
    few[0, :1] = few[1, :1] = 1  # 2 of 12
    many[0, :1] = many[1, :1] = many[2, :4] = 1  # 6 of 36
    one, other = (table.mean(axis=1, keepdims=True) for table in (few, many))
    assert abs(one.mean() - other.mean()) < 1e-15
    up = np.nextafter(one, 1)
    assert up.mean() > one.mean()
    for name in ("a", "b"):
        assert choose({"adapter": one, name: other}, "adapter").accepted is False
        assert choose({"adapter": one, name: up}, "adapter").accepted is False


def test_a_grader_that_reads_no_answer_is_reported():
    assert unread(0.5, "default") == []
    (phrase,) = unread(0.2, "default")
    assert "only 20 %" in phrase
    assert "--probe-grader" in phrase
