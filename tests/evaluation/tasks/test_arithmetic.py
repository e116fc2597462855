"""The generated suite against an independent reading of its own words."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

import pytest

from loragate.errors import DataError
from loragate.evaluation.tasks import load_questions, load_task
from loragate.evaluation.tasks.arithmetic import KINDS, LEVELS, rows

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
ROWS = rows(420, seed=11)


def value_of(text):
    def walk(node):
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        return Fraction(OPERATORS[type(node.op)](walk(node.left), walk(node.right)))

    return walk(ast.parse(text, mode="eval").body)


def fractions_value(text):
    # a fraction is one number here, so its slash binds tighter than any operator
    return value_of(re.sub(r"(\d+/\d+)", r"(\1)", text))


def in_base(text, base):
    assert all(int(char) < base for char in text)
    return int(text, base)


def remainder(base, exponent, c, d, modulus):
    power = 1
    for _ in range(exponent):
        power = power * base
    return (power + c * d) % modulus


def numbers(text):
    return [int(number) for number in re.findall(r"-?\d+", text)]


def solve_ages(question, level):
    found = []
    for young in range(300):
        for past in (0,) if level < 3 else (numbers(question)[0],):
            if level == 1:
                gap, total = numbers(question)
                if young + young + gap == total:
                    found.append(young)
            elif level == 2:
                times, years, total = numbers(question)
                if (times + 1) * young + 2 * years == total:
                    found.append(times * young)
            else:
                _, times, later, years = numbers(question)
                if times * young + years == later * (young + years):
                    found.append(times * young + past + young + past)
    return found


def check(row):
    kind, level, question, answer = row["kind"], row["level"], row["question"], row["answer"]
    if kind == "expression":
        (text,) = re.findall(r"Compute (.*?)\.(?: Here|$)", question)
        assert value_of(text) == int(answer)
    elif kind == "modular":
        assert remainder(*numbers(question)) == int(answer)
    elif kind == "fractions":
        (text,) = re.findall(r"Compute (.*?)\. Give", question)
        assert fractions_value(text) == Fraction(answer)
    elif kind == "comparison":
        listed = re.findall(r"\d+/\d+", question)
        assert len(listed) == level + 1
        assert answer in listed
        for other in listed:
            a, b, c, d = *numbers(answer), *numbers(other)
            assert other == answer or a * d > c * b
    elif kind == "base":
        given, *rest = numbers(question)
        if level == 1:
            assert in_base(answer, rest[0]) == given
        elif level == 2:
            assert in_base(str(given), rest[0]) == int(answer)
        else:
            assert in_base(str(given), rest[0]) == in_base(answer, rest[1])
    elif kind == "linear" and level < 3:
        a, b, c, d = re.fullmatch(r"Solve for x: (\d+)x ([+-] \d+) = (\d+)x ([+-] \d+)\.", question).groups()
        b, d = (int(text.replace(" ", "")) for text in (b, d))
        assert int(a) * Fraction(answer) + b == int(c) * Fraction(answer) + d
    elif kind == "linear":
        a, b, e, c, d, f = numbers(question.split(" satisfy ")[1].split(". ")[0])
        pairs = [(x, y) for x in range(-15, 16) for y in range(-15, 16) if a * x + b * y == e and c * x + d * y == f]
        assert [10 * x + y for x, y in pairs] == [int(answer)]
    else:
        assert kind == "ages"
        assert solve_ages(question, level) == [int(answer)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_answers_hold_when_worked_out_another_way(kind):
    mine = [row for row in ROWS if row["kind"] == kind]
    assert len(mine) == 60
    for row in mine:
        check(row)


def test_a_wrong_answer_is_noticed():
    for row in ROWS[:21]:
        wrong = {**row, "answer": str(Fraction(row["answer"]) + 1)}
        with pytest.raises((AssertionError, ValueError)):
            check(wrong)


def test_questions_are_unique_and_balanced():
    assert len({row["question"] for row in ROWS}) == len({row["id"] for row in ROWS}) == 420
    cells = [(row["kind"], row["level"]) for row in ROWS[:21]]
    assert sorted(cells) == sorted((kind, level) for kind in KINDS for level in LEVELS)
    assert all(re.fullmatch(r"-?\d+(/\d+)?", row["answer"]) for row in ROWS)
    assert all(Fraction(row["answer"]).denominator != 1 or "/" not in row["answer"] for row in ROWS)


def test_the_seed_decides_and_nothing_else():
    task = load_task("arithmetic")
    first, again, other = (load_questions(task, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.fingerprint != other.fingerprint
    assert first.source == "generated: arithmetic, seed 5"
    assert len(first.questions) == task.dataset.rows == 210
    shared = {question.prompt for question in first.questions} & {question.prompt for question in other.questions}
    assert len(shared) < 20
    assert load_questions(task, limit=21, seed=5).questions == first.questions[:21]
    assert rows(21, 5) == rows(210, 5)[:21]


def test_a_kind_that_is_used_up_says_so(monkeypatch):
    monkeypatch.setattr("loragate.evaluation.tasks.arithmetic.KINDS", {"one": lambda rng, level: ("same", 1)})
    with pytest.raises(DataError, match=r"no new 'one' question of level 2 after 1; ask for fewer than 2"):
        rows(2, 0)
