"""The base and the cooler adapter on the same probe: asked as they are, never picked, said where they do better."""

import dataclasses

import numpy as np
import pytest
from selection_kit import acting, probe
from test_transaction import ONE, begin, begun_again, model_of, record_of

from loragate.gates.card import render_card
from loragate.gates.eligibility import trains_biases
from loragate.generation import SamplingConfig
from loragate.selection.references import BASE, COOLER, better, references_of


def test_they_are_asked_last_and_cannot_be_picked(tmp_path):
    one = begin(tmp_path, {None: 10, (-3, 1): 12, (0, 1): 11, "base": 20, "cooler": 5}, references=True)
    chosen = one.run()
    assert one.bench.engine.asked == [None, (-3, 1), (0, 1), "base", "cooler"]
    assert chosen.candidate == ONE
    assert acting(model_of(one)) == (-3, 1), "the adapter is on again"
    record = record_of(chosen)
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
    first = begin(tmp_path, right, [ONE], references=True).run()
    begun_again(tmp_path)
    again = begin(tmp_path, right, [ONE], references=True)
    second = again.run(resume=True)
    assert again.bench.engine.asked == []
    assert record_of(second) == record_of(first)


def test_they_are_left_out_when_not_wanted(tmp_path):
    chosen = begin(tmp_path, {None: 10, (-3, 1): 12}, [ONE]).run()
    assert "references" not in record_of(chosen)
    assert not list(tmp_path.rglob("trials/base"))


def test_the_retention_probe_is_not_asked_of_them(tmp_path):
    right = {None: 10, (-3, 1): 12, "base": 20, "cooler": 5}
    one = begin(tmp_path, right, [ONE], references=True, retention=True)
    chosen = one.run()
    assert one.bench.engine.asked == [None, None, (-3, 1), (-3, 1), "base", "cooler"]
    assert set(record_of(chosen)["retention"]["evidence"]) == {"adapter", "[-3,1]"}


def test_what_can_be_compared_depends_on_the_probe():
    labelled = probe()
    assert [one.cell for one in references_of(labelled)] == [BASE, COOLER]
    assert labelled.at(references_of(labelled)[1].temperature).sampling.temperature == 0.3
    cold = dataclasses.replace(labelled, sampling=SamplingConfig(temperature=0.0))
    assert [one.cell for one in references_of(cold)] == [BASE]
    assert references_of(dataclasses.replace(labelled, kind="agreement")) == ()
    assert [one.cell for one in references_of(labelled, can_be_off=False)] == [COOLER]


def test_an_adapter_that_trained_biases_cannot_show_its_base(tmp_path):
    right = {None: 10, (-3, 1): 12, "base": 20, "cooler": 5}
    one = begin(tmp_path, right, [ONE], references=True)
    assert not trains_biases(model_of(one), "default")
    model_of(one).peft_config["default"].bias = "lora_only"
    assert trains_biases(model_of(one), "default")


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
    chosen = begin(tmp_path, {None: 10, (-3, 1): 12, "base": 20, "cooler": 5}, [ONE], references=True).run()
    record = {
        "base": {"id": "a/b"},
        "adapter": {"sha256": "0" * 64},
        "gate": {"lower": -3.0, "upper": 1.0, "tau": 1.0, "granularity": "token"},
        "modules": ["m"],
        "k": 10,
        "selection": record_of(chosen),
    }
    card = render_card("gated", record)
    assert "| base (for comparison) | 62.5 |" in card
    assert "| [-3,1] | 37.5 |" in card
    assert "- For comparison: the base without the adapter scores 62.5 %" in card
