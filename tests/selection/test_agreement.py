"""The adapter's majority: ties, answers that never come twice, and when agreement cannot select."""

import pytest

from loragate.errors import DataError
from loragate.selection.probe import Majority, majority, why_unusable


def test_the_most_frequent_answer_stands_in_for_the_label():
    found = majority([["7", "7", "8", None], ["5", "5", "5", "5"]])
    assert found.answers == ["7", "5"]
    assert found.share == pytest.approx((2 / 4 + 4 / 4) / 2)
    assert found.extracted == pytest.approx(7 / 8)
    assert found.usable == [0, 1]


def test_of_equally_frequent_answers_the_first_seen_wins():
    assert majority([["b", "a", "a", "b"]]).answers == ["b"]
    assert majority([[None, "a", "b", "b", "a"]]).answers == ["a"]


def test_an_answer_given_once_is_no_majority():
    found = majority([["a", "b", "c"], [None, None, "a"], [None, None, None], ["x", "x", "y"]])
    assert found.answers == [None, None, None, "x"]
    assert found.usable == [3]
    assert found.share == pytest.approx(2 / 3), "only over questions that have a majority"


def test_nothing_to_count_is_refused():
    for empty in ([], [[]], [["a"], []]):
        with pytest.raises(DataError, match="at least one"):
            majority(empty)


@pytest.mark.parametrize(
    ("answers", "extracted", "words"),
    [
        (["1"] * 32, 0.5, None),
        (["1"] * 32, 0.49, "only 49 % of the adapter's samples"),
        (["1"] * 31 + [None] * 9, 1.0, "only 31 questions"),
        ([None] * 40, 0.0, "only 0 %"),
    ],
    ids=["enough", "few answers", "few questions", "none"],
)
def test_when_agreement_can_select(answers, extracted, words):
    why = why_unusable(Majority(answers, 0.9, extracted))
    assert why is None if words is None else words in why
