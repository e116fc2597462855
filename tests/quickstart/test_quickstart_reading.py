"""What a quickstart says of its controls, and which range its interventions take; without any training."""

from types import SimpleNamespace

import pytest

from loragate.gates import GateConfig
from loragate.quickstart.run import AGAIN, DFT, RANDOM, control_statements, rows_of


def test_the_gates_are_compared_with_every_control():
    """Paired by question; a range or an intervention is no control."""
    gated = SimpleNamespace(question_scores=[0.5] * 10)
    scores = {
        DFT: [0.85, 0.95] * 5,
        RANDOM: [0.05, 0.15] * 5,
        AGAIN: [0.1, 0.9] * 5,
        "[0,1]": [0.0] * 10,
        None: [0.5] * 10,
    }
    rows = [SimpleNamespace(task="t", control=name, name=name, question_scores=each) for name, each in scores.items()]
    said = control_statements(SimpleNamespace(results=rows, find=lambda task: gated))
    stands = ("below", "above", "not told apart from")
    assert [line.split(" (")[0] for line in said] == [
        f"On t, gated is {how} the control {name}" for how, name in zip(stands, (DFT, RANDOM, AGAIN), strict=True)
    ]
    assert "-40.0 points" in said[0]


@pytest.mark.parametrize(
    ("picked", "taken"),
    [("[0,8]", "[-3,3]"), ("[-2,2]", "[-2,2]")],
    ids=["one that reverses and extrapolates", "the picked one if it does"],
)
def test_interventions_take_a_range_that_they_change(picked, taken):
    ranges = {"[0,8]": (0, 8), "[-3,3]": (-3, 3), "[-2,2]": (-2, 2)}
    made = SimpleNamespace(
        models=dict.fromkeys(("adapter", DFT, *ranges)),
        calibrations={name: SimpleNamespace(config=GateConfig(*ends)) for name, ends in ranges.items()},
        seed=0,
    )
    rows = rows_of(made, list(ranges), picked, 0.5, [])
    assert [row.control for row in rows if row.override] == [
        f"{taken} {name}" for name in ("noreverse", "noextrapolate", "unit")
    ]
