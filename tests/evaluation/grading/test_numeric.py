"""Numbers that responses give: every notation of one value is right, and nothing that is another value."""

from __future__ import annotations

import time

import pytest

from loragate.errors import ConfigError
from loragate.evaluation.answers import Grade
from loragate.evaluation.grading import GradingPool
from loragate.evaluation.grading.numeric import compile_pattern, grade_last_number, regex_grader

SAME = [
    ("so 9 * 2 = 18\n#### 18", "18"), ("#### 18", "It is 9 * 2 = <<9*2=18>>18.\n#### 18"), ("####18", "18"),
    ("#### $18", "18"),
    ("#### 18 dollars", "18"), ("#### 18.", "18"), ("#### **18**", "18"), ("#### \\boxed{18}", "18"), ("#### -18", "-18"),
    ("#### 18\n\nQuestion: 3 + 5?\n#### 8", "18"), ("#### Step 1: 3 apples\n3 * 6 = 18", "18"),
    ("#### 2. Add\nIt is 18.", "18"),
    ("It is 18.", "18"), ("It costs $1,234.50!", "1234.5"), ("That is \\$1{,}234.", "1234"),
    ("The total is 1\u202f234 euros", "1234"),
    ("It is 18.00", "18"), ("It is 18", "18.0"), ("He has -5 left", "-5"), ("x = - 5", "-5"), ("minus 5 degrees", "-5"),
    ("that is −5", "-5"), ("a loss of -$5", "-5"), ("a third: 1/3", "1/3"), ("it is \\frac{1}{2}", "0.5"),
    ("3 1/2 hours", "3.5"),
    ("$3\\frac{1}{2}$", "7/2"), ("50%", "50"), ("9 million", "9,000,000"), ("it is 5k", "5000"), ("3 dozen eggs", "36"),
    ("two hundred is 2 hundred", "200"), ("4.5e3", "4500"), ("4.5 \\times 10^{3}", "4500"), ("4.5 x 10^3 m", "4500"),
    ("the area is 12 m^2", "12"), ("12 cm^{2}", "12"), ("12 m2", "12"), ("$5/hour", "5"), ("In 2019 they made 7.", "7"),
    ("Step 1: 5 apples", "5"), ("Items:\n- 5 apples", "5"), ("Total 12\n- 5 go", "5"), ("**Answer:** $\\boxed{42}$", "42"),
    ("\\boxed{\\text{18 dollars}}", "18"), (".5", "0.5"), ("5 *apples*", "5"), ("5th", "5"), ("The answer - 5", "5"),
    ("USD 18", "18"), ("18 (eighteen)", "18"), ("007", "7"), ("Rs 1,00,000", "100000"), ("1,234,567.5", "1234567.5"),
    ("1.5e-3", "0.0015"), ("#### 5 apples", "5 apples"),
    ("**Final Answer**\n18", "18"), ("Alice has 20 marbles.\nFinal answer\n18", "18"), ("So the total is\n**18**", "18"),
    ("Total for part 2:\n18", "18"), ("The answer\n$18", "18"),
]  # fmt: skip
OTHER = [
    ("#### 18", "19"), ("#### 1.8", "18"), ("#### 1800", "18"), ("#### -18", "18"), ("9 million", "9"), ("5k", "5"),
    ("3 dozen", "3"),
    ("3,5", "5"), ("3,5", "35"), ("1,00", "100"), ("1,0000", "10000"), ("1e9999999", "1"),
    ("3/0", "3"), ("1.000.000", "1"), ("3.5.2", "2"), ("3:30", "30"),
    ("3/4", "4"), ("3/4", "3"), ("\\frac{3}{4}", "4"), ("\\frac{\\sqrt{3}}{2}", "2"), ("\\frac{x}{2}", "2"), ("10^6", "6"),
    ("10^6", "10"), ("2^{3}", "3"), ("\\sqrt{2}", "2"), ("\\sqrt2", "2"), ("2\\sqrt{3}", "2"), ("12 - 5", "5"),
    ("12-5", "5"),
    ("12 + 5", "5"), ("12 * 5", "5"), ("12 \\times 5", "5"), ("3 x 5", "5"), ("12 × 5", "5"), ("2 ½", "2"), ("2½", "2"),
    ("5 and a half", "5"), ("5x", "5"), ("x-1", "1"), ("x - 1", "-1"), ("x - 1", "1"), ("0.5", "50"),
    ("50%", "0.5"), ("3.33", "3.333"),
    ("0.333", "1/3"), ("5/12/2020", "2020"), ("5M", "5"), ("7 = 3 + 4", "4"), ("a gain of 5", "-5"), ("negative 5", "5"),
    ("4.5 x 10^3", "4.5"), ("4.5e3", "3"), ("3 1/2", "3"), ("it is 18\n####", "18"), ("2\\pi", "2"),
    ("18 hundred thousand", "18"),
    ("It is 99999999999999999999.", "99999999999999999998"), ("0.1", "0.10000000000000001"),
]  # fmt: skip


@pytest.mark.parametrize(("response", "gold"), SAME)
def test_one_number_in_every_notation(response: str, gold: str) -> None:
    assert grade_last_number(response, gold).correct, grade_last_number(response, gold)


@pytest.mark.parametrize(("response", "gold"), OTHER)
def test_another_number_is_wrong(response: str, gold: str) -> None:
    assert not grade_last_number(response, gold).correct


def test_no_number() -> None:
    assert grade_last_number("I do not know.", "3") == Grade(False, None, "no_answer")
    assert grade_last_number("x1 and cm^2", "1") == Grade(False, None, "no_answer")


def test_long_responses_are_quick() -> None:
    for text in (
        "12 + " * 20_000,
        "1" * 50_000,
        "####" * 20_000,
        "1," * 40_000,
        "\\boxed{" * 10_000,
        "1 " * 40_000,
        "5 hundred" * 9_000,
    ):
        before = time.process_time()
        grade_last_number(text, "3")
        assert time.process_time() - before < 2, text[:10]


PATTERNS = [
    (r"answer is (.+)", "The answer is 7.0", "7", True, "7.0"),
    (r"answer is (\S+)", "The answer is 3. No, the answer is $1,000", "1000", True, "$1,000"),
    (r"answer is (.+)", "The answer is blue", "blue", True, "blue"),
    (r"answer is (.+)", "The answer is Blue", "blue", False, "Blue"),
    (r"answer is (.+)", "The answer is 7 apples", "7 pears", False, "7 apples"),
    (r"answer is (.+)", "The answer is 8", "7", False, "8"),
    (r"answer is (.+)", "I do not know", "7", False, None),
    (r"(?:A: (\d+)|B)", "A: 5 B", "5", True, "5"),
]


def test_patterns() -> None:
    for pattern, response, gold, right, found in PATTERNS:
        with GradingPool(regex_grader(pattern), workers=1) as pool:
            (grade,) = pool.grade([(response, gold)])
        assert (grade.correct, grade.extracted) == (right, found), (pattern, response)


def test_a_pattern_that_never_ends_costs_one_answer() -> None:
    with GradingPool(regex_grader(r"^((?:a+)+)$"), workers=1, timeout_s=0.5) as pool:
        grades = pool.grade([("a" * 60 + "b", "a"), ("aa", "aa")])
    assert [grade.reason for grade in grades] == ["timeout", "ok"]


def test_a_pattern_has_one_group() -> None:
    for pattern, found in (("answer", "0 groups"), ("(a)(b)", "2 groups"), ("(", "no regular expression")):
        with pytest.raises(ConfigError, match=found):
            compile_pattern(pattern, "--pattern")
