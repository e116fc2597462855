"""The forms of answers, and when it is told that a model has come to prefer others."""

import math

import pytest

from loragate.selection.forms import FEWER, SHIFTED, form_of, forms_of, other_forms, said_of, spread


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("The answer is \\boxed{700 + (250 * 3)}.", "The answer is \\boxed{n + (n * n)}."),
        ("it is 1,250.75.\n\nDone", "it is n. Done"),
        ("B", "B"),
        ("", ""),
    ],
)
def test_a_form_has_no_numbers(text, form):
    assert form_of(text) == form


def test_a_long_answer_is_cut_off():
    assert form_of("1" + "x" * 200) == "n" + "x" * 78 + "…"
    assert len(form_of("y" * 80)) == len(form_of("y" * 81)) == 80


def test_answers_spread_over_as_many_forms_as_they_have_when_all_are_alike_frequent():
    found = forms_of(["1 + 1", "2 + 30", "1 - 1", "4 * 4", "5 * 6"])
    assert found == {"n + n": 2, "n * n": 2, "n - n": 1}
    assert spread({"a": 5, "b": 5, "c": 5}) == pytest.approx(3)
    assert spread({"a": 7}) == 1
    assert spread(found) == pytest.approx(math.exp(-0.8 * math.log(0.4) - 0.2 * math.log(0.2)))


def test_what_has_gone_to_other_forms_is_counted_once():
    own, now = {"n + n": 20, "n - n": 10, "n * n": 10}, {"n + n": 8, "n - n": 31, "n / n": 1}
    found = other_forms(now, own)
    assert found["shifted"] == pytest.approx(22 / 40)
    assert (found["form"], found["share"], found["adapter_share"]) == ("n - n", 31 / 40, 10 / 40)
    assert (found["answers"], found["told"]) == (40, True)
    assert "greedily 55 % of the answers have gone to other forms" in said_of(found)
    assert "'n - n' has 78 % of them, 25 % (the adapter)" in said_of(found)
    assert other_forms({one: 2 * count for one, count in now.items()}, own) == found, "asked twice as many, alike"


def test_it_is_told_from_a_quarter_on_or_where_forms_become_few():
    own = {"a": 40, "b": 40, "c": 20}
    few = 100 * SHIFTED
    assert other_forms({"a": 40 + few, "b": 40 - few, "c": 20}, own)["told"]
    assert not other_forms({"a": 39 + few, "b": 41 - few, "c": 20}, own)["told"]
    assert not other_forms(own, own)["told"]
    many = {**{f"rare {i}": 2 for i in range(10)}, "a": 80}
    gone = other_forms({"a": 100}, many)
    assert gone["shifted"] < SHIFTED
    assert gone["spread"] < FEWER * gone["adapter_spread"]
    assert gone["told"]


def test_answers_in_prose_have_no_forms():
    assert other_forms({"a": 4}, {f"one of many {i}": 1 for i in range(4)}) == {}
    assert other_forms({}, {"a": 4}) == {}
    assert other_forms({"a": 4}, {}) == {}, "an earlier version kept none"
