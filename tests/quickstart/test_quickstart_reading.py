"""What a quickstart says of its control, and which range its interventions take; without any training."""

from types import SimpleNamespace

import pytest

from loragate.gates.range import parse_ranges
from loragate.quickstart.run import DFT, choose_intervention_trial, control_statements
from loragate.selection import Trial


@pytest.mark.parametrize(
    ("scores", "stands", "points"),
    [
        ([0.85, 0.95], "below", "-40.0"),
        ([0.05, 0.15], "above", "+40.0"),
        ([0.1, 0.9], "not significantly different from", "0.0"),
    ],
)
def test_the_gates_are_compared_with_dft(scores, stands, points):
    """Paired by question; a range or an intervention is no control."""
    gated = SimpleNamespace(question_scores=[0.5] * 10)
    table = {DFT: scores * 5, "[0,1]": [0.0] * 10, None: [0.5] * 10}
    rows = [SimpleNamespace(task="t", control=name, label=name, question_scores=each) for name, each in table.items()]
    (said,) = control_statements(SimpleNamespace(results=rows, find=lambda task: gated))
    assert said.startswith(f"On t, gated is {stands} the control DFT ({points} points")


@pytest.mark.parametrize(
    ("best", "taken"),
    [("0,8", "-3,3"), ("-2,2", "-2,2")],
    ids=["one that reverses and extrapolates", "the best one if it does"],
)
def test_interventions_take_a_range_that_they_change(best, taken):
    trials = [Trial(one) for one in parse_ranges("0,8;-3,3;-2,2")]
    (found,) = [trial for trial in trials if trial.range == parse_ranges(best)[0]]
    assert choose_intervention_trial(trials, found).range == parse_ranges(taken)[0]
