"""Interventions: which are run, what they do to λ, and how they are compared."""

import pytest
import torch

import loragate as lg
from loragate.analysis.context import About
from loragate.analysis.gates import (
    InterventionRow,
    InterventionsRecord,
    conclude_interventions,
    parse_interventions,
    without_effect,
)
from loragate.errors import ConfigError
from loragate.evaluation.statistics import Difference, Estimate
from loragate.evaluation.variants import ModelVariant, activate_variant
from loragate.gates import trace_gates
from loragate.gates.override import parse_override
from tiny import tiny_gated


def test_the_papers_four_by_default_and_no_row_without_effect():
    chosen, left_out = parse_interventions("", lg.GateConfig(-6, 3))
    assert chosen == ["noreverse", "noextrapolate", "unit", "off"]
    assert left_out == []
    chosen, left_out = parse_interventions("", lg.GateConfig(0, 1))
    assert chosen == ["off"]
    assert len(left_out) == 3
    chosen, left_out = parse_interventions("", lg.GateConfig(-3, 1))
    assert chosen == ["noreverse", "unit", "off"]
    assert "λ never leaves [-3, 1]" in left_out[0]
    assert without_effect(parse_override("constant=0.5"), lg.GateConfig(0, 1)) == ""
    assert without_effect(parse_override("clip=-1:2"), lg.GateConfig(0, 1))


def test_what_is_asked_for_by_name_must_have_an_effect():
    with pytest.raises(ConfigError, match="would repeat the gates as they are"):
        parse_interventions("noreverse", lg.GateConfig(0, 3))
    assert parse_interventions("unit,off,unit", lg.GateConfig(-1, 3)) == (["unit", "off"], [])
    with pytest.raises(ConfigError, match="unit"):
        parse_interventions("unti", lg.GateConfig(-1, 3))


def test_rows_act_as_they_say():
    peft = tiny_gated(-6, 3, 0.5)
    chosen, _ = parse_interventions("noreverse,noextrapolate,unit,constant=0.5", lg.GateConfig(-6, 3))
    ids, seen = torch.arange(4, 14)[None], {}
    for variant in (ModelVariant("gated"), *[ModelVariant("gated", name, override=name) for name in chosen]):
        with torch.no_grad(), activate_variant(peft, variant, "gated"), trace_gates(peft) as traced:
            peft(input_ids=ids)
        seen[variant.label] = torch.cat([values[0].reshape(-1) for values in traced.values()])
    assert seen["gated"].min() < 0
    assert seen["gated"].max() > 1
    assert seen["gated noreverse"].min() == 0
    assert seen["gated noreverse"].max() > 1
    assert seen["gated noextrapolate"].max() == 1
    assert (seen["gated unit"].min(), seen["gated unit"].max()) == (0, 1)
    assert (seen["gated constant=0.5"] == 0.5).all()


def row(name, mean, difference=None, verdict=None):
    score = Estimate(mean, 0.0, mean, mean, 9, 2)
    versus = None if difference is None else Difference(difference, difference - 0.01, difference + 0.01, 0.01)
    return InterventionRow(name, "t", score, versus, None, verdict)


def test_conclusions_say_what_taking_away_shows():
    rows = [row("gated", 0.4), row("noreverse", 0.2, -0.2, "worse"), row("noextrapolate", 0.5, 0.1, "better")]
    rows += [row("unit", 0.4, 0.0, "no difference shown")]
    about = About("now", {}, "tasks t", 0, {}, {}, 1.0)
    text = " ".join(conclude_interventions(InterventionsRecord(about=about, rows=tuple(rows), left_out=("off: why",))))
    assert "reversal helps: without it the score is 20.0 %" in text
    assert "extrapolation hurts" in text
    assert "leaving [0, 1] makes no difference that can be shown" in text
    assert "the highest score is 50.0 %, of noextrapolate" in text
    assert "off: why" in text
