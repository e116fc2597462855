"""The forms of answers, and when it is told that a model has come to prefer others."""

import math
import random
from collections import Counter

import pytest

from loragate.selection.forms import (
    CHANCE,
    FEWER,
    SHIFTED,
    form_of,
    missing_kinds,
    other_forms,
    said_of,
    said_of_kinds,
    spread,
)


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
    found = Counter(map(form_of, ["1 + 1", "2 + 30", "1 - 1", "4 * 4", "5 * 6"]))
    assert found == {"n + n": 2, "n * n": 2, "n - n": 1}
    assert spread({"a": 5, "b": 5, "c": 5}) == pytest.approx(3)
    assert spread({"a": 7}) == 1
    assert spread(found) == pytest.approx(math.exp(-0.8 * math.log(0.4) - 0.2 * math.log(0.2)))


def answers(**counts):
    return [form for form, count in counts.items() for _ in range(count)]


def test_what_has_gone_to_other_forms_is_counted_once():
    own, now = answers(plus=80, minus=40, times=40), answers(plus=32, minus=124, divided=4)
    found = other_forms(now, own)
    assert (found["answers"], found["told"]) == (160, True)
    assert found["shifted"] == pytest.approx(88 / 160)
    assert found["gained"] == ["minus", 124 / 160, 40 / 160]
    assert found["lost"] == ["plus", 32 / 160, 80 / 160]
    said = said_of(found)
    assert said.startswith("55 % of the answers have another form than the adapter's")
    assert '"plus" falls from 50 to 20 % of all, "minus" rises from 25 to 78 %' in said
    assert f"they spread over {found['spread']:.1f} forms, {found['adapter_spread']:.1f} (the adapter)" in said


def test_chance_shifts_as_much_as_is_said():
    draw, forms = random.Random(0), ["a", "b", "c", "d"]
    found = [other_forms(*(draw.choices(forms, (6, 2, 1, 1), k=100) for _ in range(2))) for _ in range(2000)]
    shifted, by_chance = (sum(one[key] for one in found) / len(found) for key in ("shifted", "by_chance"))
    assert shifted == pytest.approx(by_chance, rel=0.05)


def test_it_is_told_from_a_quarter_on_or_where_forms_become_few():
    own, few = answers(a=400, b=400, c=200), int(1000 * SHIFTED)
    assert other_forms(answers(a=400 + few, b=400 - few, c=200), own)["told"]
    assert not other_forms(answers(a=399 + few, b=401 - few, c=200), own)["told"]
    assert not other_forms(own, own)["told"]
    many = answers(**{f"rare{i}": 20 for i in range(10)}, a=800)
    gone = other_forms(answers(a=1000), many)
    assert gone["shifted"] < SHIFTED
    assert gone["spread"] < FEWER * gone["adapter_spread"]
    assert gone["told"]


def test_few_answers_must_shift_more_than_chance_would():
    own, now = answers(a=10, b=10, c=6, d=6), answers(a=18, b=4, c=5, d=5)
    found = other_forms(now, own)
    assert SHIFTED <= found["shifted"] < CHANCE * found["by_chance"]
    assert not found["told"]
    assert other_forms(10 * now, 10 * own)["told"]


def test_other_labels_are_no_other_form_but_few_different_ones_tell():
    own, mended, stuck = answers(A=280, B=80, C=80, D=80), answers(A=130, B=130, C=130, D=130), answers(A=520)
    assert other_forms(mended, own)["told"]
    assert not other_forms(mended, own, labels=True)["told"]
    assert other_forms(stuck, own, labels=True)["told"]


def test_nothing_is_said_of_answers_in_prose_or_of_missing_ones():
    assert other_forms(answers(a=4), [f"one of many {i}" for i in range(4)]) == {}
    assert other_forms([], answers(a=4)) == {}
    assert other_forms(answers(a=4), []) == {}
    assert other_forms(answers(a=4), answers(a=5)) == {}


def test_a_probe_without_one_of_four_kinds_is_told_only_where_it_is_missing_enough():
    rows = answers(a=100, b=100, c=100, d=100)
    narrow = missing_kinds(answers(a=32, b=32), rows)
    assert (narrow["answers"], narrow["spread"], narrow["told"]) == (64, pytest.approx(2), True)
    assert narrow["rows_spread"] == pytest.approx(4, rel=0.03), "of 64 of them; all 400 have 4"
    assert narrow["missing"] in (["c", 0.0, 0.25], ["d", 0.0, 0.25])
    said = said_of_kinds(narrow)
    assert said.startswith(
        "the adapter's answers to the probe spread over 2.0 forms, numbers aside, and as many responses"
    )
    assert '": 0 % of the answers, 25 % of the responses): the probe seems to lack kinds of questions' in said
    three = missing_kinds(answers(a=22, b=21, c=21), rows)
    assert not three["told"], "3.0 of 3.9 forms are more than 0.6 times as many"
    assert not missing_kinds(answers(a=20, b=14, c=16, d=14), rows)["told"]


def test_questions_of_the_rows_own_kinds_are_hardly_ever_taken_for_others():
    draw, shares = random.Random(1), (40, 20, 10, 10, 5, 5, 4, 3, 2, 1)
    forms = [f"form {chr(97 + at)}" for at in range(len(shares))]
    rows = draw.choices(forms, shares, k=480)
    for count in (32, 128):
        told = [missing_kinds(draw.choices(forms, shares, k=count), rows)["told"] for _ in range(200)]
        assert sum(told) <= 4, "none of a hundred sets is as narrow: one in a hundred"


def test_nothing_is_said_of_a_probe_where_rows_are_prose_or_missing():
    assert missing_kinds(answers(a=4), [f"one of many {chr(97 + i)}" for i in range(20)]) == {}
    assert missing_kinds([], answers(a=4)) == {}
    assert missing_kinds(answers(a=4), []) == {}
    few = missing_kinds(answers(a=20), answers(a=4, b=4))
    assert (few["answers"], few["rows_spread"]) == (8, pytest.approx(2)), "as many are compared as there are"
