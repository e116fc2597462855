from __future__ import annotations

import time

import pytest

from loragate.evaluation.answers import Grade, extract_choice_letter, grade_text, strip_reasoning
from loragate.evaluation.judging import grade_samples, grade_tiny
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import Question
from loragate.generation import Sample
from loragate.selection.dev import plain_task
from loragate.world.problems import draw_problems, draw_retention_items

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
    "The answer is A or B. No: the answer is B": "B",
    "The answer is C, I think": "C",
    "B. Vitamin C": "B",
    "B) World War I": "B",
    "(D) Both A and B": "D",
    " D: Both A and B": "D",
    "B) Mitochondria\n\nThe other options (A, C, D) are wrong.": "B",
    "B. It is C. elegans": "B",
    "A. It is wrong. B. It floats, so I take B": "B",
    "A) too short\nB) too long\nSo it must be C": "C",
    "(A) is a plant, (B) a stone. My choice: B": "B",
    "B. Vitamin C, but the answer is D": "D",
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
    "The answer is A or B",
    "The answer is **A** and **C**.",
]


@pytest.mark.parametrize(("response", "letter"), list(CHOICES.items()), ids=[str(i) for i in range(len(CHOICES))])
def test_letters(response, letter):
    assert extract_choice_letter(response) == letter


@pytest.mark.parametrize("response", NOTHING, ids=[str(i) for i in range(len(NOTHING))])
def test_no_letter(response):
    assert extract_choice_letter(response) is None
    assert grade_text(response, "A", "choice") == Grade(False, None, "no_answer")


@pytest.mark.parametrize("filler", ["\n", " ", "*", "_", "(", "$", "answer is ", "** "])
def test_a_response_stuck_on_filler_costs_no_time(filler):
    """What a model that never stops writes: read in the caller's process, where no limit holds."""
    began = time.process_time()
    for beginning in ("The answer is", "answer: option", "**", "\\boxed{"):
        assert extract_choice_letter(f"{beginning}{filler * 8000}7") is None
    assert time.process_time() - began < 2


def test_exact():
    assert grade_text(" yes\n", "yes ", "exact") == Grade(True, "yes", "ok")
    assert grade_text("yes.", "yes", "exact") == Grade(False, "yes.", "wrong")
    assert grade_text(" \n", "yes", "exact") == Grade(False, None, "no_answer")
    assert grade_text(r"so \boxed{yes} it is", "yes", "boxed") == Grade(True, "yes", "ok")
    assert grade_text("yes", "yes", "boxed") == Grade(False, None, "no_box")


THOUGHTS = {
    "choice": ("At first the answer is B. But C fits better.", "C", "C", "B"),
    "boxed": (r"perhaps \boxed{no}", r"\boxed{yes}", "yes", "no"),
    "default": (r"perhaps \boxed{7}, so", r"\boxed{8}", "8", "7,8"),
    "gsm8k": ("#### 7", "The answer is 8.", "8", "7"),
    "exact": ("no", "yes", "yes", "no"),
    "regex": ("the answer is 7.", "the answer is 8.", "8", "7"),
}


@pytest.mark.parametrize("grader", THOUGHTS)
def test_a_draft_among_thoughts_is_no_answer(grader):
    draft, end, gold, drafted = THOUGHTS[grader]
    asked = [Question(str(place), "", text, {}) for place, text in enumerate((gold, drafted, gold))]
    closed, end = f"<think>{draft}</think>\n\n{end}", f"{end}\n"
    answers = [closed, closed, end]
    samples = [Sample(place, 0, text, (1,), "stop", None) for place, text in enumerate(answers)]
    settings = GradingSettings(workers=1, grader=grader, pattern=r"answer is (\d)" if grader == "regex" else "")
    grades = grade_samples(plain_task("dev", "exact"), asked, samples, grader, settings)
    assert [grade.correct for grade in grades] == [True, False, True]


def test_thoughts_that_were_never_closed_stay():
    assert strip_reasoning("<think>the answer is B") == "<think>the answer is B"


def test_tiny():
    (problem,) = draw_problems("test", 1)
    row = vars(problem)
    wrong = str((int(problem.answer) + 1) % 10)
    assert grade_tiny(row, f"hmm answer {problem.answer}", True) == Grade(True, problem.answer, "ok")
    assert grade_tiny(row, f"answer {problem.answer} <eos> junk", True).correct
    assert grade_tiny(row, f"answer {wrong}", True) == Grade(False, wrong, "wrong")
    assert grade_tiny(row, f"answer {problem.answer}", False) == Grade(False, problem.answer, "unfinished")
    assert grade_tiny(row, "no idea", True) == Grade(False, None, "no_answer")
    item = draw_retention_items("test", 1)[0]
    assert grade_tiny(vars(item), item.answer, True) == Grade(True, item.answer, "ok")
    assert grade_tiny(vars(item), "", True) == Grade(False, None, "no_answer")
