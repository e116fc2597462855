"""The grader is tried on right answers, and system messages are compared, before anything is sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.data import load_rows
from loragate.errors import DataError
from loragate.evaluation.grader_checks import check_references, check_system_message
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import Question, load_task
from loragate.selection.dev import plain_task

SETTINGS = GradingSettings(sandbox="rlimits")


def questions(golds, prompt="What is it?"):
    return [Question(str(place), prompt, gold, {}, f"dev.jsonl:{place + 1}") for place, gold in enumerate(golds)]


GOOD = [
    ("default", ["18", r"\frac{1}{2}", "(1,2)"]),
    ("gsm8k", ["18", "1,234", "$5", "9 * 2 = <<9*2=18>>18\n#### 18"]),
    ("boxed", ["yes", "no"]),
    ("exact", ["the whole answer", "#### 18"]),
    ("choice", ["B", "(C)"]),
]


@pytest.mark.parametrize(("grader", "golds"), GOOD)
def test_right_answers_are_accepted(grader, golds):
    assert check_references(plain_task("dev", grader), questions(golds), grader, SETTINGS) == []


BAD = [
    ("default", ["18", "9 * 2 = 18\n#### 18"], 'dev.jsonl:2: the right answer holds "####".*the grader gsm8k reads it'),
    ("gsm8k", ["18", "blue"], "dev.jsonl:2: the right answer is 'blue', and the grader gsm8k compares numbers"),
    ("gsm8k", ["3 apples and 4 pears"], "compares numbers"),
    ("choice", ["Paris"], "compares letters"),
    ("default", ["x" * 2000] * 3, "default accepts 0 of 3 right answers that were tried"),
]


@pytest.mark.parametrize(("grader", "golds", "why"), BAD)
def test_right_answers_that_none_can_give_are_refused(grader, golds, why):
    with pytest.raises(DataError, match=why):
        check_references(plain_task("dev", grader), questions(golds), grader, SETTINGS)


SENTENCES = [
    "First we add. So the answer is 14.",
    "He has 14 apples left.",
    "The answer is east",
    "x = 2, so the answer is 4",
]
SHORT = [
    r"\text{even}",
    "no solution",
    "x=2 or x=3",
    "3 hours 20 minutes",
    "all real numbers except 2",
    "There are no real solutions",
]


def test_right_answers_that_are_sentences_are_named():
    task = plain_task("dev", "default")
    with pytest.raises(
        DataError, match=r"dev.jsonl:1, .*: 4 of 4 right answers are sentences .*\\boxed\{14\} would be wrong"
    ):
        check_references(task, questions(SENTENCES), "default", SETTINGS)
    (said,) = check_references(task, questions([*SHORT, *SENTENCES]), "default", SETTINGS)
    assert said.startswith("dev.jsonl:7, dev.jsonl:8, dev.jsonl:9, …: 4 of 10 right answers are sentences")
    assert check_references(task, questions(SHORT), "default", SETTINGS) == []


def test_some_that_are_not_accepted_are_said():
    (said,) = check_references(plain_task("dev", "default"), questions(["1", "y" * 2000, "3"]), "default", SETTINGS)
    assert "accepts 2 of 3 right answers" in said
    assert "dev.jsonl:2" in said


def test_reference_solutions_run():
    task = load_task("mbpp")
    row = {"task_id": 1, "code": "def f(x):\n    return x", "test_list": ["assert f(1) == 1"], "test_setup_code": ""}
    wrong = row | {"code": "def f(x):\n    return 2 * x"}
    given = [Question("1", "p", one["code"], one, "mbpp.jsonl:1") for one in (row, wrong)]
    assert check_references(task, given[:1], "mbpp", SETTINGS) == []
    with pytest.raises(DataError, match=r"accepts 0 of 1 reference solutions.*found wrong"):
        check_references(task, given[1:], "mbpp", SETTINGS)


def test_questions_without_the_system_message_of_the_examples_are_named():
    task, pair = plain_task("dev", "exact"), {"prompt": "q", "response": "a"}
    taught, bare = load_rows([{**pair, "system": "Be brief."}] * 8), load_rows([pair] * 8)
    (said,) = check_system_message(task, taught)
    assert said.startswith(
        "8 of 8 training examples that were looked at have a system message ('Be brief.'), and the questions"
    )
    assert check_system_message(replace(task, system="Be brief."), taught) == check_system_message(task, bare) == []
    (said,) = check_system_message(replace(task, system="Be long."), bare)
    assert said.startswith(
        "0 of 8 training examples that were looked at have a system message, and the questions have 'Be long.'"
    )
    plain = load_rows([{"prompt": f"q{place}", "completion": "a"} for place in range(20)])
    assert check_system_message(task, plain) == [], "a plain text has none"
    (said,) = check_system_message(task, bare, "<system> You help.")
    assert said.startswith(
        "the chat template's own system message ('<system> You help.') is left out; --system keep keeps it"
    )
    assert check_system_message(replace(task, system="Be brief."), taught, "<system> You help.") == []
    assert check_system_message(task, plain, "<system> You help.") == [], "a plain text has none"
