"""The transaction on a tiny model: what wins, what is written and attached, what a resumed one does again, what is refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from selection_kit import RETAINED, FakeEngine, acting, probe, questions

import loragate as lg
from loragate.errors import ArtifactError, ConfigError, DataError, DivergenceError, GateError
from loragate.gates.range import Range
from loragate.gates.schema import read_gate_config
from loragate.generation import TransformersEngine
from loragate.models import resolve
from loragate.selection import Candidate, SelectionSettings, choose, trial
from loragate.selection.comparison import CONFIRMING, ELSEWHERE, LARGE, settings_on
from loragate.selection.probe import Majority, unread
from loragate.selection.transaction import Transaction, gates_all
from loragate.training import GateTrainingSettings
from loragate.training.guards import GuardLimits
from tiny import tiny_adapter, tiny_rows, tiny_tokenizer

SETTINGS = GateTrainingSettings(
    batch_size=4, per_device_train_batch_size=4, max_steps=2, learning_rate=5e-2, k=10, max_length=64, seed=3
)
ONE, TWO = Candidate(Range(-3, 1), seed=3), Candidate(Range(0, 1), seed=3)
ROWS = tiny_rows(8)


def asked(count=32):
    return [{"prompt": question.prompt, "answer": question.gold} for question in questions(count)]


def begin(
    folder,
    right,
    candidates=(ONE, TWO),
    *,
    settings=SETTINGS,
    count=32,
    retention=False,
    tau=1.0,
    rows=ROWS,
    seed=0,
    temperature=None,
    labelled=True,
    covers=False,
    grader="exact",
    **engine,
):
    asking = SelectionSettings(
        probe_grader=grader, probe_samples=2, probe_temperature=temperature, probe_covers_all=covers
    )
    kept = asked(RETAINED) if retention else None
    config = lg.GateConfig(0, 1, tau=tau)
    known = ("prompt", "answer") if labelled else ("prompt",)
    given = [{name: row[name] for name in known} for row in asked(count)]
    one = Transaction(
        tiny_tokenizer(), rows, given, folder, tuple(candidates), config, settings, asking, retention=kept
    )
    model = tiny_adapter(seed)
    one.take(model, FakeEngine(model, right, **engine))
    return one


def model_of(one):
    return one.bench.model


def record_of(chosen):
    return json.loads(json.dumps(chosen.evidence["selection"]))


def place_of(folder, candidate):
    return folder / "run" / "candidates" / "trials" / candidate.slug


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25).reshape(2, 10)).logits


@pytest.fixture
def trainings(monkeypatch):
    """The ranges that were trained, in order."""
    done, real = [], trial.calibrate

    def counted(model, tokenizer, rows, config, *args, **options):
        done.append((config.lower, config.upper))
        return real(model, tokenizer, rows, config, *args, **options)

    monkeypatch.setattr(trial, "calibrate", counted)
    return done


@pytest.mark.parametrize("asked_for", [None, 1.0])
def test_without_labels_gates_are_held_against_the_cool_adapter(tmp_path, asked_for):
    # at T = 1 the gates agree with the cool majority and the adapter does not; at T = 0.3 the adapter does too
    right = {(None, 1.0): 0, (None, 0.3): 32, (-3, 1): 32, (0, 1): 32}
    one = begin(tmp_path, right, labelled=False, temperature=asked_for)
    chosen = one.run()
    assert {heat for _, heat, _ in one.bench.engine.asked} == {0.3, asked_for or 0.3}
    assert (chosen.candidate is None) is (asked_for is None)
    assert record_of(chosen)["probe"]["temperature"] == (asked_for or 0.3)
    assert read_gate_config(tmp_path)["sampling"]["temperature"] == (asked_for or 0.3)
    warned = any("alone at T = 0.3" in line for line in chosen.sentences())
    assert warned is (asked_for == 1.0), "what the adapter alone would give there is not known"


def test_the_adapter_wins_ties_and_answers_bit_for_bit(tmp_path):
    one = begin(tmp_path, {None: 20, (-3, 1): 20, (0, 1): 19, (None, 0.3): 26})
    model = model_of(one)
    before = logits(model)
    chosen = one.run()
    assert chosen.candidate is None
    record = record_of(chosen)
    assert (record["picked"], record["accepted"], record["recommendation"]["temperature"]) == ("adapter", False, 0.3)
    assert acting(model) == (-3, 1)
    assert all(not bool(value.any()) for value in lg.gate_parameters(model).values())
    assert torch.equal(logits(model), before)
    with lg.record_gates(model) as recording:
        logits(model)
    assert recording.total()["zero_to_one"] == 1
    written = json.loads((tmp_path / "gate_config.json").read_text())
    assert (written["k"], written["selection"]["accepted"]) == (10, False)
    assert resolve(tmp_path, base_later=True).recommended_temperature == 0.3
    assert not any(bool(value.any()) for value in load_file(tmp_path / "gates.safetensors").values())


def test_gates_that_are_shown_to_help_are_written_exactly_as_trained(tmp_path):
    one = begin(tmp_path, {None: 10, (-3, 1): 11, (0, 1): 18, ((0, 1), 1.0): 24, ((0, 1), 0.0): 3})
    events = []
    chosen = one.run(on_event=lambda *event: events.append(event))
    assert chosen.candidate.model == TWO
    stored = load_file(place_of(tmp_path, TWO) / "gated" / "gates.safetensors")
    attached = lg.gate_parameters(model_of(one))
    assert set(stored) == set(attached)
    assert all(torch.equal(stored[name], value) for name, value in attached.items())
    assert any(bool(value.abs().max() > 1e-3) for value in stored.values()), "they were trained"
    assert not any(value.requires_grad for value in attached.values())
    assert acting(model_of(one)) == (0, 1)
    trained = list(dict.fromkeys(event[0].cell for event in events if event[1] == "training"))
    assert trained == ["[-3,1]", "[0,1]"]
    record = record_of(chosen)
    assert (record["picked"], record["recommendation"]["setting"]) == ("[0,1]", "[0,1] T=1")
    assert record["evidence"]["[0,1] T=1"]["mean"] == pytest.approx(24 / 32)
    assert record["cost"]["trainings"] == 1, "the weaker range stops after a quarter of its steps"
    assert record["stopped"]["[-3,1]"]["steps"] == 1
    assert record["stopped"]["[-3,1]"]["score"] < record["stopped"]["[-3,1]"]["weakest_kept"]
    assert not (place_of(tmp_path, ONE) / "gated").exists()
    assert record["vetoed"] == record["warnings"] == {}
    assert "retention" not in record
    written = json.loads((tmp_path / "gate_config.json").read_text())
    assert (written["selection"], written["training"]["steps"], written["gate"]["lower"]) == (record, 2, 0)
    assert (tmp_path / "gates.safetensors").read_bytes() == (
        place_of(tmp_path, TWO) / "gated" / "gates.safetensors"
    ).read_bytes()
    with pytest.raises(ArtifactError, match="already holds a gated adapter"):
        begin(tmp_path, {None: 10})


def test_harm_at_temperatures_that_are_not_recommended_is_asked_and_recorded(tmp_path):
    right = {None: 10, (None, 0.0): 12, (0, 1): 5, ((0, 1), 1.0): 24, ((0, 1), 0.0): 1}
    record = record_of(begin(tmp_path, right, [TWO], temperature=1.0).run())
    assert (record["picked"], record["recommendation"]["temperature"]) == ("[0,1]", 1.0)
    rows = {(row["name"], row["temperature"]): row for row in record["settings"]}
    assert rows["[0,1]", 0.0]["mean"] == pytest.approx(1 / 32)
    assert rows["[0,1]", 0.0]["against_adapter"]["high"] < 0
    assert rows["adapter", 0.3]["questions"] == rows["[0,1]", 0.3]["questions"] == 32 // ELSEWHERE
    assert ("[0,1]", 0.6) not in rows, "one temperature was asked for, and the two cool ones are always asked"
    assert resolve(tmp_path, base_later=True).recommended_temperature == 1.0


def test_all_settings_are_asked_the_same_questions_and_the_losers_few(tmp_path):
    one = begin(tmp_path, {None: 40, (-3, 1): 42, (0, 1): 110, (None, 0.3): 60}, count=128, other=20)
    planned = []
    record = record_of(one.run(on_event=lambda *event: planned.append(event[3]) if event[1] == "planned" else None))
    assert record["picked"] == "[0,1]"
    assert record["recommendation"]["tried"] == len(record["settings"]) == 4 * (1 + 1 + 5 + 1)
    whole = [row for row in record["settings"] if row["questions"] == 128]
    assert {row["kind"] for row in whole} == {"adapter", "gates"}
    assert min(row["questions"] for row in record["settings"]) == 4
    answers = record["cost"]["answers"]
    assert sum(count * (2 if heat else 1) for _, heat, count in one.bench.engine.asked) == answers, (
        "nothing is asked twice"
    )
    assert planned == [record["cost"]["answers_at_most"]]
    assert 0.1 * planned[0] < answers <= planned[0]
    assert answers < 7.5 * 128 * 2, "seven settings on everything, where 32 were tried"
    (step,) = [step for step in record["recommendation"]["steps"] if step["kind"] == "gates"]
    assert step["taken"]
    assert 0 < step["low"] < step["mean"]


@pytest.mark.parametrize(("untouched", "confirmed"), [(240, True), (0, False)])
def test_a_large_probe_confirms_the_gain_on_questions_that_chose_nothing(tmp_path, untouched, confirmed):
    one = begin(tmp_path, {None: 200, (0, 1): 400}, [TWO], count=LARGE)
    engine, generate = one.bench.engine, one.bench.engine.generate

    def two_faced(prompts, config, *args, pending, **more):
        last = {question for question, _ in pending if question >= LARGE - CONFIRMING}
        if acting(one.bench.model) == (0, 1) and last:
            engine.right = {(0, 1): 2 * untouched}
        return generate(prompts, config, *args, pending=pending, **more)

    engine.generate = two_faced
    record = record_of(one.run())
    found = record["confirmation"]
    assert (found["questions"], found["setting"].split()[0]) == (CONFIRMING, "[0,1]")
    assert found["confirmed"] is confirmed is (found["difference"]["mean"] > 0)
    assert record["picked"] == ("[0,1]" if confirmed else "adapter")


@pytest.mark.parametrize(("scale", "kind", "name"), [(0.0, "base", "base"), (0.75, "constant", "λ=0.75")])
def test_one_scale_for_all_is_written_as_gates_that_hold_it(tmp_path, scale, kind, name):
    acts = f"λ={scale:g}"
    one = begin(tmp_path, {None: 5, acts: 25, (acts, 0.0): 30, (0, 1): 26}, [TWO])
    chosen = one.run()
    record = record_of(chosen)
    assert (record["picked"], record["recommendation"]["kind"], record["accepted"]) == (name, kind, True)
    assert acting(model_of(one)) == acts
    folder = resolve(tmp_path, base_later=True)
    assert (folder.recommended_temperature, folder.gates_off) == (0.0, "")
    again = tiny_adapter()
    lg.load_gates(again, tmp_path)
    assert acting(again) == acts
    with lg.record_gates(again) as recording:
        logits(again)
    assert recording.total()["mean"] == pytest.approx(scale, abs=1e-6)


def test_the_artifact_cannot_be_told_from_one_of_the_same_training_alone(tmp_path):
    """Though the training paused after its first step, until the other range had been asked."""
    one = begin(tmp_path / "chosen", {None: 10, (0, 1): 22})
    assert "[-3,1]" in record_of(one.run())["stopped"]
    model = tiny_adapter()
    result = lg.train_gates(model, tiny_tokenizer(), ROWS, lg.GateConfig(0.0, 1.0, seed=3), SETTINGS)
    lg.save_gates(model, tmp_path / "alone", evidence=result.evidence())
    left, right = (tmp_path / name / "gates.safetensors" for name in ("chosen", "alone"))
    assert left.read_bytes() == right.read_bytes()
    place, told = place_of(tmp_path / "chosen", TWO), read_gate_config(tmp_path / "chosen")["training"]
    seconds = [json.loads((place / name).read_text())["seconds"] for name in ("part.json", "trained.json")]
    assert told["seconds"] == pytest.approx(sum(seconds), abs=0.11), "both parts of the training"


BEHIND = {None: 20, (-3, 1): 8, (0, 1): 10}


def test_gates_that_are_behind_the_adapter_are_not_trained_on(tmp_path, trainings):
    one = begin(tmp_path, BEHIND)
    chosen = one.run()
    assert trainings == [(-3, 1), (0, 1)], "a quarter of each"
    assert chosen.candidate is None
    record = record_of(chosen)
    assert {row["kind"] for row in record["settings"]} == {"adapter", "base", "constant"}
    assert (record["cost"]["trainings"], record["picked"]) == (0, "adapter")
    first, second = record["stopped"]["[-3,1]"], record["stopped"]["[0,1]"]
    assert (first["score"], first["weakest_kept"], "adapter" in first) == (0.25, pytest.approx(1 / 3), False)
    assert second["score"] == pytest.approx(1 / 3)
    assert 1 / 3 < second["expected"] < second["adapter"] < 2 / 3, "drawn towards each other"
    assert 0 < second["chance"] < 0.2
    said = " ".join(chosen.sentences())
    scores = [f"{100 * second[key]:.1f} %" for key in ("expected", "adapter", "chance")]
    assert (
        f"; the gates [0,1] after 1 steps had {scores[0]} expected where the adapter had {scores[1]}, and were not"
        in said
    )
    assert f"[0,1] was stopped after 1 steps: {scores[0]} expected then, the adapter {scores[1]}, better with" in said
    begun_again(tmp_path)
    assert record_of(begin(tmp_path, BEHIND).run(resume=True)) == record
    assert len(trainings) == 2


def test_a_range_that_diverged_beside_one_that_is_behind_leaves_the_adapter(tmp_path, diverging):
    diverging.add((-3, 1))
    record = record_of(begin(tmp_path, BEHIND, settings=dataclasses.replace(SETTINGS, max_steps=8)).run())
    assert set(record["failed"]) == {"[-3,1]"}
    assert set(record["stopped"]) == {"[0,1]"}
    assert record["picked"] == "adapter"


def test_ranges_that_take_over_must_not_be_behind_either(tmp_path, trainings, diverging):
    diverging.add((-3, 1))
    settings = dataclasses.replace(SETTINGS, max_steps=3)
    record = record_of(begin(tmp_path, {None: 20, (-3, 1): 30, (0, 1): 10}, settings=settings).run())
    assert trainings == [(-3, 1), (0, 1), (-3, 1)]
    assert (set(record["failed"]), set(record["stopped"])) == ({"[-3,1]"}, {"[0,1]"})


def test_untouched_questions_pick_no_range(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "PART_QUESTIONS", LARGE)
    begin(tmp_path, {None: 200, (-3, 1): 210, (0, 1): 400}, count=LARGE).run()
    for one in (ONE, TWO):
        part = json.loads((place_of(tmp_path, one) / "part.json").read_text())
        assert part["answers"] == 3 * (LARGE - CONFIRMING), "two samples at T = 1, and greedily"


@pytest.fixture
def diverging(monkeypatch):
    """A set of ranges whose training meets a gradient that is not finite; the real loop, with a hook on a gate."""
    ranges, real = set(), trial.calibrate

    def calibrate(model, tokenizer, rows, config, *args, on_step, **options):
        def spoil(report):
            if (config.lower, config.upper) in ranges:
                gate = next(iter(lg.gate_parameters(model).values()))
                gate.register_hook(lambda gradient: gradient * float("nan"))
            return on_step(report)

        return real(model, tokenizer, rows, config, *args, on_step=spoil, **options)

    monkeypatch.setattr(trial, "calibrate", calibrate)
    return ranges


def begun_again(folder):
    """The folder as a kill before the artifact was written leaves it."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()


def test_a_range_that_diverges_drops_out(tmp_path, trainings, diverging):
    diverging.add((-3, 1))
    right = {None: 10, (-3, 1): 24, (0, 1): 22}
    one = begin(tmp_path, right, settings=dataclasses.replace(SETTINGS, max_steps=3))
    chosen = one.run()
    assert trainings == [(-3, 1), (0, 1), (-3, 1), (0, 1)], "the one that had been stopped takes its place"
    assert chosen.candidate.model == TWO
    record = record_of(chosen)
    assert "[-3,1]" not in {row["name"] for row in record["settings"]}
    assert set(record["failed"]) == {"[-3,1]"}
    assert record["failed"]["[-3,1]"].startswith("the gradient is not finite at step 3")
    assert acting(model_of(one)) == (0, 1)
    begun_again(tmp_path)
    again = begin(tmp_path, right, settings=dataclasses.replace(SETTINGS, max_steps=3)).run(resume=True)
    assert len(trainings) == 4, "neither is trained again"
    assert record_of(again) == record
    begun_again(tmp_path)
    other = dataclasses.replace(SETTINGS, max_steps=3, learning_rate=1e-3)
    with pytest.raises(ConfigError, match=r"begun with training\.entropy\.learning_rate"):
        begin(tmp_path, right, settings=other).run(resume=True)


def test_a_choice_that_is_resumed_after_a_lost_range_is_the_same(tmp_path, trainings, diverging):
    """The range that went on is lost, so both that had been stopped take its place, and stay there."""
    diverging.add((-3, 1))
    right = {None: 10, (-3, 1): 26, (0, 1): 24, (-1, 2): 20}
    three = (ONE, TWO, Candidate(Range(-1, 2), seed=3))
    settings = dataclasses.replace(SETTINGS, max_steps=3)
    first = record_of(begin(tmp_path, right, three, settings=settings).run())
    assert set(first["failed"]) == {"[-3,1]"}
    assert {"[0,1]", "[-1,2]"} <= {row["name"] for row in first["settings"]}
    assert "stopped" not in first
    begun_again(tmp_path)
    count = len(trainings)
    assert record_of(begin(tmp_path, right, three, settings=settings).run(resume=True)) == first
    assert len(trainings) == count


def test_where_all_ranges_diverge_the_error_says_why(tmp_path, diverging):
    diverging.update({(-3, 1), (0, 1)})
    one = begin(tmp_path, {None: 10, (-3, 1): 20, (0, 1): 12}, settings=dataclasses.replace(SETTINGS, max_steps=3))
    before = logits(model_of(one))
    with pytest.raises(DivergenceError, match="the gradient is not finite at step 3"):
        one.run()
    assert acting(model_of(one)) is None
    assert torch.equal(logits(model_of(one)), before)


def test_nothing_finished_is_done_again(tmp_path, trainings):
    right = {None: 10, (-3, 1): 11, (0, 1): 22}
    first = begin(tmp_path, right).run()
    assert trainings == [(-3, 1), (0, 1), (0, 1)], "the weaker range stops early, the other one goes on"
    begun_again(tmp_path)
    again = begin(tmp_path, right)
    second = again.run(resume=True)
    assert len(trainings) == 3
    assert again.bench.engine.asked == []
    assert second.evidence == first.evidence
    assert acting(model_of(again)) == (0, 1)


def test_a_run_killed_between_candidates_goes_on(tmp_path, trainings):
    right = {None: 10, (-3, 1): 11, (0, 1): 22}
    whole = begin(tmp_path / "whole", right).run()
    trainings.clear()
    killed = begin(tmp_path / "killed", right)

    def kill(candidate, stage, *_):
        if (candidate, stage) == (TWO, "training"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.run(on_event=kill)
    assert acting(model_of(killed)) is None, "gates are taken off"
    resumed = begin(tmp_path / "killed", right)
    chosen = resumed.run(resume=True)
    assert trainings == [(-3, 1), (0, 1), (0, 1)]
    left, right = record_of(chosen), record_of(whole)
    assert {**left, "cost": 0} == {**right, "cost": 0}
    assert (tmp_path / "whole" / "gates.safetensors").read_bytes() == (
        tmp_path / "killed" / "gates.safetensors"
    ).read_bytes()


def test_a_comparison_killed_while_it_asks_goes_on_where_it_was(tmp_path, trainings):
    right = {None: 10, (-3, 1): 22}
    whole = begin(tmp_path / "whole", right, [ONE])
    record = record_of(whole.run())
    trainings.clear()
    killed = begin(tmp_path / "killed", right, [ONE])

    def kill(candidate, stage, *_):
        if (candidate.model, candidate.temperature, stage) == (ONE, 0.6, "probing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.run(on_event=kill)
    assert acting(model_of(killed)) is None
    resumed = begin(tmp_path / "killed", right, [ONE])
    chosen = resumed.run(resume=True)
    assert trainings == [(-3, 1)]
    both = [*killed.bench.engine.asked, *resumed.bench.engine.asked]
    assert sorted(both, key=str) == sorted(whole.bench.engine.asked, key=str), "no answer is drawn twice"
    assert {**record_of(chosen), "cost": 0} == {**record, "cost": 0}


def test_another_transaction_is_not_resumed(tmp_path):
    right = {None: 10, (-3, 1): 11}
    begin(tmp_path, right, [ONE]).run()
    begun_again(tmp_path)
    faster = dataclasses.replace(SETTINGS, learning_rate=1e-3)
    others = {
        "probe": begin(tmp_path, right, [ONE], count=33),
        "training": begin(tmp_path, right, [ONE], settings=faster),
        "gates.tau": begin(tmp_path, right, [ONE], tau=2.0),
        "data": begin(tmp_path, right, [ONE], rows=tiny_rows(8, seed=1)),
        "retention": begin(tmp_path, right, [ONE], retention=True),
        "adapter": begin(tmp_path, right, [ONE], seed=7),
    }
    for words, other in others.items():
        with pytest.raises(ConfigError, match=rf"begun with {words}"):
            other.run(resume=True)
    with pytest.raises(ConfigError, match=r"go on with --resume"):
        begin(tmp_path, right, [ONE]).run()
    (tmp_path / "run" / "candidates" / "sweep.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        begin(tmp_path, right, [ONE]).run(resume=True)


def test_a_result_that_was_torn_is_measured_again(tmp_path, trainings):
    right = {None: 10, (-3, 1): 11}
    first = begin(tmp_path, right, [ONE]).run()
    begun_again(tmp_path)
    greedy = dataclasses.replace(ONE, temperature=0.0)
    (place_of(tmp_path, greedy) / "result.json").write_text('{"name": 1}')
    again = begin(tmp_path, right, [ONE])
    assert record_of(again.run(resume=True))["evidence"] == record_of(first)["evidence"]
    assert {(key, heat) for key, heat, _ in again.bench.engine.asked} == {((-3, 1), 0.0)}
    assert trainings == [(-3, 1)]


def test_candidates_must_differ_and_be_ranges(tmp_path):
    for bad in ([], [ONE, Candidate(Range(-3.0, 1.0), seed=3)]):
        with pytest.raises(ConfigError, match="each once"):
            begin(tmp_path, {None: 1}, bad)
    for bad in (Candidate(None, "base"), dataclasses.replace(ONE, temperature=0.3)):
        with pytest.raises(ConfigError, match="no range to train gates in"):
            begin(tmp_path, {None: 1}, [ONE, bad])
    assert not any(tmp_path.iterdir())


def test_a_candidate_that_no_gradient_would_move_is_refused_at_once(tmp_path):
    config = lg.GateConfig(0, 1, init_scale=0)  # whose range is a placeholder
    assert trial.config_of(config, Candidate(Range(-3.0, 2.0))).init_scale == 0
    assert trial.config_of(config, Candidate(Range(-3.0, 1.0), "random")).init_scale == 0
    with pytest.raises(ConfigError, match="init_scale=0 with an upper bound of 1"):
        lg.calibrate(
            None, tiny_tokenizer(), ROWS, None, tmp_path / "out", ranges=(ONE,), config=config, unverified=True
        )


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process"):
        begin(tmp_path, {None: 1})


def test_what_would_be_ignored_or_spoil_the_comparison_is_refused(tmp_path):
    one = begin(tmp_path, {None: 10, (-3, 1): 24, (0, 1): 5})
    assert one.run().candidate.model == ONE
    again = begin(tmp_path / "again", {None: 10})
    with pytest.raises(GateError, match="detach_gates"):
        again.take(model_of(one))
    ignored = SelectionSettings(exclude="questions.jsonl")
    with pytest.raises(ConfigError, match="--exclude has no effect"):
        lg.calibrate(tiny_adapter(), tiny_tokenizer(), ROWS, None, tmp_path / "other", asking=ignored)


def test_each_objective_gets_the_settings_it_reads(tmp_path):
    anchored = dataclasses.replace(SETTINGS, objective="anchored", beta=0.5, refresh=7, temperature=0.8)
    two = (ONE, Candidate(Range(0, 1), "anchored", 4))
    plan = begin(tmp_path, {None: 1}, two, settings=anchored)
    assert plan.settings_of(two[0]) == SETTINGS
    assert plan.settings_of(two[1]) == dataclasses.replace(anchored, seed=4)
    with pytest.raises(ConfigError, match="has no effect with objective entropy, only with anchored"):
        begin(tmp_path, {None: 1}, [ONE], settings=anchored)
    with pytest.raises(ConfigError, match="samples_per_prompt"):
        begin(tmp_path, {None: 1}, [ONE, Candidate(Range(0, 1), "reward", 3)])
    assert not any(tmp_path.iterdir()), "refused before anything is trained"


@pytest.mark.parametrize(
    ("objective", "guard", "seen"),
    [("entropy", True, None), ("anchored", True, GuardLimits()), ("anchored", False, None)],
)
def test_the_guard_follows_the_objective(tmp_path, monkeypatch, objective, guard, seen):
    given = []

    def stop(*_, **options):
        given.append((options.get("guard"), options["resume"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "calibrate", stop)
    one = begin(tmp_path, {None: 1}, [Candidate(Range(-3, 1), objective, 3)])
    one.asking = dataclasses.replace(one.asking, guard=guard)
    with pytest.raises(KeyboardInterrupt):
        one.run(resume=True)
    assert given == [(seen, False)]


def test_answers_that_look_worse_are_reported(tmp_path):
    one = begin(
        *(tmp_path, {None: 10, (-3, 1): 24, (0, 1): 5}),
        ended={None: 0, (-3, 1): 5},
        tokens={None: 4, (-3, 1): 9},
    )
    chosen = one.run()
    phrases = record_of(chosen)["warnings"]
    assert set(phrases) == {"[-3,1]"}
    assert "84% of the answers come to an end" in phrases["[-3,1]"][0]
    assert "9.0 tokens on average, 4.0" in phrases["[-3,1]"][1]
    assert chosen.candidate.model == ONE, "a sign warns, the probe decides"


def test_a_clear_loss_on_the_retention_probe_rules_a_setting_out(tmp_path):
    right, retained = {None: 10, (-3, 1): 32, (0, 1): 26}, {None: 36, (-3, 1): 20, (0, 1): 36}
    four = (ONE, TWO, *(Candidate(Range(0, upper), seed=3) for upper in (2, 3)))
    chosen = begin(tmp_path, right, four, retention=True, retained=retained).run()
    record = record_of(chosen)
    assert chosen.candidate.model == TWO
    assert set(record["stopped"]) == {"[0,2]", "[0,3]"}
    assert {name.split()[0] for name in record["vetoed"]} == {"[-3,1]"}
    for reason in record["vetoed"].values():
        assert reason.startswith("loses 40.0 points on the retention probe")
    means = {name.split()[0]: row["mean"] for name, row in record["retention"]["evidence"].items()}
    assert (means["adapter"], means["[0,1]"]) == (pytest.approx(0.9), pytest.approx(0.9))
    assert record["retention"]["probe"]["questions"] == RETAINED
    assert "retention, %" in (tmp_path / "README.md").read_text()


def test_gates_of_two_seeds_are_two_settings(tmp_path):
    seeds = [dataclasses.replace(ONE, seed=seed) for seed in (3, 4)]
    chosen = begin(tmp_path, {None: 10, (-3, 1): 24}, seeds).run()
    record = record_of(chosen)
    assert {row["name"] for row in record["settings"] if row["kind"] == "gates"} == {"[-3,1] seed 3"}
    assert set(record["stopped"]) == {"[-3,1] seed 4"}, "of equals the earlier goes on"
    assert record["picked"] == "[-3,1] seed 3"


def test_without_labels_gates_and_adapter_are_compared_at_one_temperature():
    labelled = probe()
    kinds = [one.kind for one in settings_on(labelled, [ONE])]
    assert {kind: kinds.count(kind) for kind in kinds} == {"adapter": 4, "base": 4, "constant": 20, "gates": 4}
    assert "base" not in {one.kind for one in settings_on(labelled, [ONE], can_be_off=False)}
    bare = dataclasses.replace(labelled, majority=Majority([], 1.0, 1.0))
    assert [one.cell for one in settings_on(bare, [ONE])] == ["adapter T=1", "[-3,1] T=1"]


def test_lambda_zero_is_the_base_only_where_gates_reach_all_that_was_trained():
    model = tiny_adapter()
    assert gates_all(model)
    model.peft_config["default"].bias = "lora_only"
    assert not gates_all(model)
    model.peft_config["default"].bias, model.peft_config["default"].modules_to_save = "none", ["lm_head"]
    assert not gates_all(model)


def test_what_there_is_to_learn_from_own_answers_is_recorded(tmp_path):
    """54 of 64 greedy answers are wrong, and no sampled one is right: at most 7 % of such questions have a right sample."""
    anchored = dataclasses.replace(SETTINGS, objective="anchored", max_new_tokens=2)
    one = Candidate(Range(0, 1), "anchored", 3)
    more = {"settings": anchored, "count": 64, "temperature": 1.0}
    found = record_of(begin(tmp_path / "none", {None: 10, (0, 1): 12}, [one], **more).run())["own_answers"]
    (row,) = [row for row in found["sampled"] if row["temperature"] == 1.0]
    assert (row["mean"], row["questions"], row["samples"]) == (0.0, 54, 2)
    assert (found["nothing_to_learn"], row["high"]) == (True, pytest.approx(0.0693, abs=1e-4))
    right = {None: 30, (None, 0.0): 10, (0, 1): 12}
    found = record_of(begin(tmp_path / "some", right, [one], **more).run())["own_answers"]
    (row,) = [row for row in found["sampled"] if row["temperature"] == 1.0]
    assert (row["mean"], found["nothing_to_learn"]) == (pytest.approx(20 / 54), False)
    assert "own_answers" not in record_of(begin(tmp_path / "entropy", right, [TWO], count=32).run())


GIVEN_UP = {None: "either of two"}  # what the adapter says where it is wrong, and the gates do not


def test_a_row_without_a_response_does_not_bring_the_chat_template_to_plain_rows(tmp_path):
    plain = [{"prompt": f"w{i}", "completion": "w5"} for i in range(8)]
    for rows, raw in ((plain, True), ([*plain, {"prompt": "w9", "completion": ""}], True), (ROWS, False)):
        one = begin(tmp_path, {}, rows=rows)
        one.find_probe()
        assert (one.how.raw, one.probe.prompts[0].startswith("<user>")) == (raw, not raw)


def test_a_majority_is_that_of_its_adapter(tmp_path):
    first, again, other = (begin(tmp_path, {None: 32}, [TWO], labelled=False, seed=seed) for seed in (0, 0, 1))
    for one, asked in ((first, 1), (again, 0), (other, 1)):
        one.find_probe()
        assert len(one.bench.engine.asked) == asked


def test_gates_that_give_up_a_form_of_answers_are_told_of(tmp_path):
    """They are better by saying less; a probe of one kind of questions cannot show what that costs."""
    right = {None: 10, (0, 1): 30}
    found = record_of(begin(tmp_path / "given up", right, [TWO], wrong=GIVEN_UP).run())
    told = found["forms"]
    assert (told["answers"], told["temperature"], told["spread"]) == (32, 0.0, 1.0)
    assert told["gained"] == ["wn", 1.0, 10 / 32]
    assert told["lost"] == ["either of two", 0.0, 22 / 32]
    (phrase,) = found["warnings"]["[0,1]"]
    assert phrase.startswith("on the probe, greedily, 69 % of the answers have another form")
    both = {**GIVEN_UP, (0, 1): "either of two"}
    kept = record_of(begin(tmp_path / "kept", {None: 20, (0, 1): 26}, [TWO], wrong=both).run())
    assert (kept["picked"], kept["forms"]["told"], kept["warnings"]) == ("[0,1]", False, {})
    assert "forms" not in record_of(begin(tmp_path / "adapter", {None: 10, (0, 1): 2}, [TWO]).run())


def test_one_lambda_is_told_of_as_gates_are(tmp_path):
    right = {None: 10, "λ=1.5": 30}
    found = record_of(begin(tmp_path, right, [TWO], wrong=GIVEN_UP).run())
    assert found["picked"] == "λ=1.5"
    assert found["forms"]["told"]
    assert "another form" in found["warnings"]["λ=1.5"][-1]


def test_without_labels_forms_are_compared_at_the_probes_temperature(tmp_path):
    right = {(None, 1.0): 12, (None, 0.3): 32, (0, 1): 32}
    found = record_of(begin(tmp_path, right, [TWO], labelled=False, temperature=1.0, wrong=GIVEN_UP).run())
    assert found["picked"] == "[0,1]"
    told = found["forms"]
    assert (told["answers"], told["temperature"], told["told"]) == (64, 1.0, True)
    assert "on the probe, at T = 1, 62 %" in found["warnings"]["[0,1]"][-1]


def test_forms_are_compared_on_the_questions_that_chose(tmp_path):
    right = {None: 200, (0, 1): 440, ((0, 1), 0.0): 460}
    found = record_of(begin(tmp_path, right, [TWO], count=LARGE, wrong=GIVEN_UP).run())
    assert (found["picked"], found["forms"]["answers"]) == ("[0,1]", LARGE - CONFIRMING)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_probe_that_lacks_kinds_of_the_rows_is_told_of_whatever_is_recommended(tmp_path, labelled):
    """Responses are of one to four words, and all answers of one."""
    right = {None: 20, (None, 0.3): 32}
    narrow = record_of(begin(tmp_path / "narrow", right, [TWO], rows=KINDS, labelled=labelled).run())
    assert (narrow["picked"], narrow["kinds"]["told"], narrow["kinds"]["spread"]) == ("adapter", True, 1.0)
    (phrase,) = narrow["warnings"]["adapter"]
    assert f"over {narrow['kinds']['rows_spread']:.1f} (" in phrase
    assert narrow["kinds"]["rows_spread"] > 3.5
    assert narrow["kinds"]["answers"] == 32, "one to a question, however many samples there are"
    wide = [{**row, "completion": "w5"} for row in KINDS]
    found = record_of(begin(tmp_path / "alike", right, [TWO], rows=wide, labelled=labelled).run())
    assert (found["kinds"]["told"], found["kinds"]["rows_spread"], found["warnings"]) == (False, 1.0, {})


KINDS = [{"prompt": f"w{i} w{i + 1}", "completion": " ".join(["w5"] * (1 + i % 4))} for i in range(100, 140)]
"""Responses of one to four words, whose forms the answers to the probe do not have."""


def test_what_gives_up_forms_on_a_probe_that_lacks_kinds_gives_way_to_the_next(tmp_path):
    """λ = 0.75 keeps what the adapter says; a retention probe need not see the loss."""
    right = {None: 10, (0, 1): 30, "λ=0.75": 26}
    wrong = {**GIVEN_UP, "λ=0.75": "either of two"}
    chosen = begin(tmp_path / "narrow", right, [TWO], wrong=wrong, rows=KINDS, retention=True, retained={}).run()
    record = record_of(chosen)
    assert (record["picked"], record["vetoed"].keys()) == ("λ=0.75", {"[0,1]"})
    why = record["vetoed"]["[0,1]"]
    assert why.startswith("changes the form of answers, on a probe that seems to lack kinds of questions: 69 % of the")
    assert why.endswith("say so: --probe-covers-all (probe_covers_all=True)")
    assert record["kinds"]["told"]
    assert "[0,1]" not in " ".join(record["retention"]["evidence"]), "a veto comes first, at no cost"
    lines = chosen.sentences()
    assert any(line.startswith("[0,1] is not eligible: it changes the form") for line in lines)
    asked = [line for line in lines if line.startswith("  [0,1] ")]
    assert asked
    assert all(line.endswith("not eligible") for line in asked)
    plain = record_of(begin(tmp_path / "wide", right, [TWO], wrong=wrong).run())
    assert (plain["picked"], plain["vetoed"]) == ("[0,1]", {}), "its rows' responses have no forms to speak of"
    said = record_of(begin(tmp_path / "all", right, [TWO], wrong=wrong, rows=KINDS, covers=True).run())
    assert (said["picked"], said["vetoed"], len(said["warnings"]["[0,1]"])) == ("[0,1]", {}, 1)


def test_without_labels_too_what_gives_up_forms_is_not_recommended(tmp_path):
    right = {(None, 1.0): 12, (None, 0.3): 32, (0, 1): 32}
    how = {"labelled": False, "temperature": 1.0, "wrong": GIVEN_UP, "rows": KINDS}
    chosen = begin(tmp_path, right, [TWO], **how).run()
    record = record_of(chosen)
    assert (record["picked"], list(record["vetoed"])) == ("adapter", ["[0,1]"])
    assert "nothing eligible is probably better than the adapter" in " ".join(chosen.sentences())


def scores(*right):
    return np.repeat(np.array([[float(value)] for value in right]), 2, axis=1)


def test_the_choice():
    table = {"adapter": scores(1, 0), "a": scores(1, 1), "b": scores(1, 1), "c": scores(0, 0)}
    assert choose(table, "adapter").name == "a", "of equal candidates the earlier"
    assert choose({"c": scores(0, 0), "a": scores(1, 0), "adapter": scores(0, 1)}, "adapter").name == "adapter"
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


def test_a_probe_whose_answers_cannot_be_read_is_refused_before_anything_is_trained(tmp_path, trainings):
    one = begin(tmp_path, {}, [TWO], grader="boxed")
    with pytest.raises(
        DataError, match="'boxed' reads nothing in the adapter's first 24 answers to the probe, such as 'wn'"
    ):
        one.run()
    assert trainings == []


def test_a_grader_that_reads_no_answer_is_reported():
    assert unread(0.5, "default") == []
    (phrase,) = unread(0.2, "default")
    assert "only 20 %" in phrase
    assert "--probe-grader" in phrase


class Rereading(TransformersEngine):
    """Answers twice, the second time without what it has kept of the prompts, and says how often it could keep."""

    kept = 0

    def generate(self, *arguments, **keywords):
        found = super().generate(*arguments, **keywords)
        keeping, self._keeping = self._keeping, False
        assert [one.token_ids for one in super().generate(*arguments, **keywords)] == [one.token_ids for one in found]
        self._keeping, self.kept = keeping, self.kept + keeping
        return found


def test_kept_prompts_are_those_of_the_gates_that_act(tmp_path):
    one = begin(tmp_path, {}, settings=dataclasses.replace(SETTINGS, max_steps=8, learning_rate=0.3))
    model = tiny_adapter(0)
    one.bench = None
    one.take(model, engine := Rereading(model, tiny_tokenizer()))
    one.run()
    assert engine.kept > 20
