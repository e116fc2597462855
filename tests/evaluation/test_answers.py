from __future__ import annotations

import time

import pytest

from loragate.evaluation.answers import Grade, choice_letter, grade_text
from loragate.evaluation.judging import grade_tiny
from loragate.world.problems import problems, retention_items

CHOICES = {
    "The answer is (C).": "C",
    "So the answer is C": "C",
    "the answer is **C**.": "C",
    "The correct answer is: D) because it is wet.": "D",
    "Answer: C": "C",
    "**Answer:** B": "B",
    "ANSWER = E": "E",
    "the answer is (c)": "C",
    "answer: d": "D",
    "The answer is option F.": "F",
    "The answer is $\\text{B}$.": "B",
    "The answer is \\(J\\).": "J",
    "We get \\boxed{C}.": "C",
    "We get \\boxed{\\text{(D)}}": "D",
    "We get $\\boxed{\\textbf{(E) } 12}$": "E",
    "\\boxed{A} is tempting, but \\boxed{B}": "B",
    "First I thought the answer is A, but no: the answer is B.": "B",
    "I choose **C. gravity** here": "C",
    "**(G)**": "G",
    "B": "B",
    "(B)": "B",
    "Reasons follow.\nC.\n": "C",
    "It must be B, since C floats": "B",
    "A good question. I would go for D": "D",
    "The answer is a matter of taste. C": "C",
    "The answer is A because of friction": "A",
    "B is correct.": "B",
    "Option (D) is the right one": "D",
    "We get \\boxed{b}": "B",
    "We get \\boxed{\\text{(b)}}": "B",
    "We get \\boxed{B, a dog}": "B",
}
NOTHING = [
    "",
    "I do not know",
    "A cat sat.",
    "the answer is 42",
    "Answer: none",
    "The answer is Bob",
    "DNA and RNA",
    "The answer is (Z).",
    "\\boxed{A plant}",
    "\\boxed{A, C}",
    "\\boxed{A/C}",
    "\\boxed{\\text{(A) and (C)}}",
    "\\boxed{A \\text{ or } C}",
]


@pytest.mark.parametrize(("response", "letter"), list(CHOICES.items()), ids=[str(i) for i in range(len(CHOICES))])
def test_letters(response, letter):
    assert choice_letter(response) == letter


@pytest.mark.parametrize("response", NOTHING, ids=[str(i) for i in range(len(NOTHING))])
def test_no_letter(response):
    assert choice_letter(response) is None
    assert grade_text(response, "A", "choice") == Grade(False, None, "no_answer")


@pytest.mark.parametrize("filler", ["\n", " ", "*", "_", "(", "$", "answer is ", "** "])
def test_a_response_stuck_on_filler_costs_no_time(filler):
    """What a model that never stops writes: read in the caller's process, where no limit holds."""
    began = time.process_time()
    for beginning in ("The answer is", "answer: option", "**", "\\boxed{"):
        assert choice_letter(f"{beginning}{filler * 8000}7") is None
    assert time.process_time() - began < 2


def test_exact():
    assert grade_text(" yes\n", "yes ", "exact") == Grade(True, "yes", "ok")
    assert grade_text("yes.", "yes", "exact") == Grade(False, "yes.", "wrong")
    assert grade_text(" \n", "yes", "exact") == Grade(False, None, "no_answer")
    assert grade_text(r"so \boxed{yes} it is", "yes", "boxed") == Grade(True, "yes", "ok")
    assert grade_text("yes", "yes", "boxed") == Grade(False, None, "no_box")


def test_tiny():
    (problem,) = problems("test", 1)
    row = vars(problem)
    wrong = str((int(problem.answer) + 1) % 10)
    assert grade_tiny(row, f"hmm answer {problem.answer}", True) == Grade(True, problem.answer, "ok")
    assert grade_tiny(row, f"answer {problem.answer} <eos> junk", True).correct
    assert grade_tiny(row, f"answer {wrong}", True) == Grade(False, wrong, "wrong")
    assert grade_tiny(row, f"answer {problem.answer}", False) == Grade(False, problem.answer, "unfinished")
    assert grade_tiny(row, "no idea", True) == Grade(False, None, "no_answer")
    item = retention_items("test", 1)[0]
    assert grade_tiny(vars(item), item.answer, True) == Grade(True, item.answer, "ok")
    assert grade_tiny(vars(item), "", True) == Grade(False, None, "no_answer")
