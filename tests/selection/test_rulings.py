"""What follows from scores: gates worth training on, own answers that could teach, a clear loss on the retention probe."""

import numpy as np

from loragate.gates.range import Range
from loragate.selection import Candidate
from loragate.selection.rulings import HOPEFUL, own_answers, prospects, vetoes

ONE, TWO = Candidate(Range(-3, 1), seed=3), Candidate(Range(0, 1), seed=3)


def scores(*right):
    """Two samples of each question, right (1) or not."""
    return np.repeat(np.array([[float(value)] for value in right]), 2, axis=1)


def test_gates_that_answer_as_the_adapter_does_are_trained_on():
    adapter = {1.0: np.eye(2)[[0, 1, 1, 0] * 6], 0.0: np.ones((96, 1))}
    adapter[0.0][::3] = 0
    better, worse = ({heat: rows.copy() for heat, rows in adapter.items()} for _ in range(2))
    better[0.0][::6], worse[0.0][1::6] = 1, 0
    found = prospects({ONE: adapter, TWO: better, Candidate(Range(0, 2), seed=3): worse}, adapter)
    same, more, less = (row["chance"] for row in found.values())
    assert less < HOPEFUL <= same < more


def test_own_answers_teach_nothing_where_that_is_shown_and_not_contradicted():
    greedy, never = np.zeros((60, 1)), np.zeros((60, 4))
    once = np.zeros((4, 4))
    once[0, 2] = 1
    assert own_answers({0.0: greedy, 0.3: never})["nothing_to_learn"]
    assert not own_answers({0.0: greedy, 0.3: never[:30]})["nothing_to_learn"], "0 of 30 may be 12 %"
    found = own_answers({0.0: greedy, 0.3: never, 1.0: once})
    assert [row["questions"] for row in found["sampled"]] == [60, 4]
    assert found["sampled"][1]["mean"] == 0.25
    assert not found["nothing_to_learn"], "hotter, one of four has a right answer"
    assert own_answers({0.0: greedy + 1, 1.0: never}) == {"sampled": [], "nothing_to_learn": False}


def test_the_veto_needs_a_loss_of_more_than_two_points_and_an_interval_below_zero():
    adapter = scores(*[1] * 40)
    few, many = scores(*[1] * 38, 0, 0), scores(*[1] * 30, *[0] * 10)
    small = adapter - 0.01
    found = vetoes({"adapter": adapter, "few": few, "many": many, "small": small, "same": adapter}, "adapter")
    assert set(found) == {"many"}, "few: the interval holds 0; small: certain, but one point only"
    assert vetoes({"adapter": scores(*[0] * 40), "better": adapter}, "adapter") == {}
