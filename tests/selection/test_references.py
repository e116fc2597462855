"""The base and the cooler adapter on the same probe: asked as they are, never picked, said where they do better."""

import dataclasses
import json

import numpy as np
import pytest
from selection_kit import acting, probe
from test_transaction import ONE, TWO, begin

from loragate.gates.card import render_card
from loragate.gates.eligibility import trains_biases
from loragate.generation import SamplingConfig
from loragate.selection.references import BASE, COOLER, better, references_of


def test_they_are_asked_last_and_cannot_be_picked(tmp_path):
    one = begin(tmp_path, {None: 10, (-3, 1): 12, (0, 1): 11, "base": 20, "cooler": 5}, references=True)
    events = []
    selection = one.run([ONE, TWO], lambda *event: events.append(event))
    assert one.engine.asked == [None, (-3, 1), (0, 1), "base", "cooler"]
    assert [event[0] for event in events if event[1] == "probing"][-2:] == [BASE, COOLER]
    assert selection.candidate == ONE
    assert acting(one.model) is None, "the adapter is on again"
    record = json.loads(json.dumps(selection.as_record()))
    assert set(record["evidence"]) == {"adapter", "[-3,1]", "[0,1]"}
    assert record["references"][BASE]["mean"] == pytest.approx(20 / 32)
    assert record["references"][BASE]["against_picked"]["mean"] == pytest.approx(8 / 32)
    assert record["references"][COOLER]["against_picked"]["mean"] == pytest.approx(-7 / 32)
    (phrase,) = record["warnings"][BASE]
    assert phrase.startswith(
        "the base without the adapter scores 62.5 % on the same questions, 25.0 points more than [-3,1]"
    )
    assert COOLER not in record["warnings"]
    assert set(record["signs"]) == {*record["evidence"], BASE, COOLER}


def test_a_resumed_selection_asks_them_no_second_time(tmp_path):
    right = {None: 10, (-3, 1): 12, "base": 20, "cooler": 5}
    first = begin(tmp_path, right, references=True).run([ONE])
    again = begin(tmp_path, right, references=True)
    second = again.run([ONE], resume=True)
    assert again.engine.asked == []
    assert second.as_record() == first.as_record()


def test_they_are_left_out_when_not_wanted(tmp_path):
    selection = begin(tmp_path, {None: 10, (-3, 1): 12}).run([ONE])
    assert "references" not in selection.as_record()
    assert not (tmp_path / "base").exists()


def test_the_retention_probe_is_not_asked_of_them(tmp_path):
    right = {None: 10, (-3, 1): 12, "base": 20, "cooler": 5}
    one = begin(tmp_path, right, references=True, retention=probe(count=33, seed=2))
    selection = one.run([ONE])
    assert one.engine.asked == [None, None, (-3, 1), (-3, 1), "base", "cooler"]
    assert set(selection.as_record()["retention"]["evidence"]) == {"adapter", "[-3,1]"}


def test_what_can_be_compared_depends_on_the_probe():
    labelled = probe()
    assert [one.name for one in references_of(labelled)] == [BASE, COOLER]
    assert references_of(labelled)[1].probe.sampling.temperature == 0.3
    cold = dataclasses.replace(labelled, sampling=SamplingConfig(temperature=0.0))
    assert [one.name for one in references_of(cold)] == [BASE]
    assert references_of(dataclasses.replace(labelled, kind="agreement")) == ()
    assert [one.name for one in references_of(labelled, can_be_off=False)] == [COOLER]


def test_an_adapter_that_trained_biases_cannot_show_its_base(tmp_path):
    one = begin(tmp_path, {None: 10})
    assert not trains_biases(one.model, "default")
    one.model.peft_config["default"].bias = "lora_only"
    assert trains_biases(one.model, "default")


def test_a_sentence_only_where_one_does_better():
    low, high = np.zeros((40, 2)), np.zeros((40, 2))
    high[:10] = 1
    assert better(BASE, low, high, "[0,1]") is None
    assert better(BASE, high, high, "[0,1]") is None
    said = better(COOLER, high, low, "adapter")
    assert said is not None
    assert said.startswith(
        "the plain adapter at temperature 0.3 scores 25.0 % on the same questions, 25.0 points more than adapter"
    )
    assert said.endswith("lower it first")
    slightly = np.zeros((40, 2))
    slightly[0] = 1
    close = better(BASE, slightly, low, "adapter")
    assert close is not None
    assert close.endswith("cannot tell the two apart")


def test_the_card_has_them_apart(tmp_path):
    selection = begin(tmp_path, {None: 10, (-3, 1): 12, "base": 20, "cooler": 5}, references=True).run([ONE])
    record = {
        "base": {"id": "a/b"},
        "adapter": {"sha256": "0" * 64},
        "gate": {"lower": -3.0, "upper": 1.0, "tau": 1.0, "granularity": "token"},
        "modules": ["m"],
        "k": 10,
        "selection": selection.as_record(),
    }
    card = render_card("gated", record)
    assert "| base (for comparison) | 62.5 |" in card
    assert "| [-3,1] | 37.5 |" in card
    assert "- For comparison: the base without the adapter scores 62.5 %" in card
