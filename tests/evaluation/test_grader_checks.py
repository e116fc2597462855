"""The grader is tried on right answers and on training responses before anything is sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loragate.data import load_rows
from loragate.errors import DataError
from loragate.evaluation.grader_checks import (
    FORMS,
    check_references,
    check_responses,
    check_system_message,
    form_of,
    responses_of,
)
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


RESPONSES = {
    "hash": "9 * 2 = 18\n#### 18",
    "box": r"It is 18, so the answer is $\boxed{18}$.",
    "phrase": "9 times 2 makes eighteen.\nThe answer is 18.",
    "letter": "(B)",
    "short": "eighteen apples",
    "": "Nine times two makes eighteen, and that is all there is to say.",
}
READ_BY = {"hash": "gsm8k", "box": "default", "phrase": "regex", "letter": "choice", "short": "exact"}


def rows(name, count=20):
    # two formats that training takes
    half = [{"prompt": f"q{i}", "completion": RESPONSES[name]} for i in range(count)]
    return load_rows(half)


@pytest.mark.parametrize("name", RESPONSES)
def test_forms(name):
    assert form_of(RESPONSES[name]) == name
    chat = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": RESPONSES[name]}]}]
    assert responses_of(load_rows(chat)) == [RESPONSES[name]]


@pytest.mark.parametrize("name", READ_BY)
def test_the_grader_of_a_form_reads_it(name):
    pattern = FORMS[name].flags.partition("--dev-pattern '")[2].rstrip("'")
    task = plain_task("dev", READ_BY[name], pattern)
    assert READ_BY[name] == FORMS[name].flags.split()[1]
    golds = ["B" if name == "letter" else "eighteen apples" if name == "short" else "18"] * 3
    assert check_responses(task, questions(golds), rows(name), SETTINGS) == []


@pytest.mark.parametrize(
    ("name", "grader"),
    [("hash", "default"), ("phrase", "default"), ("letter", "default"), ("box", "exact"), ("hash", "exact")],
)
def test_a_grader_that_reads_no_training_response_is_refused(name, grader):
    task, given = plain_task("dev", grader), questions(["18"] * 3)
    with pytest.raises(DataError, match="reads an answer in 0 of 20 training responses, of which 20 ") as refused:
        check_responses(task, given, rows(name), SETTINGS)
    assert FORMS[name].flags in str(refused.value)
    # questions that ask for a form themselves say more than the training does
    asking = questions(["18"] * 3, r"What is it? Put it into \boxed{}.")
    assert "training responses" in check_responses(task, asking, rows(name), SETTINGS)[0]


def test_prose_and_few_responses_refuse_nothing():
    task, given = plain_task("dev", "default"), questions(["18"] * 3)
    assert "reads an answer in 0 of 20" in check_responses(task, given, rows(""), SETTINGS)[0]
    assert check_responses(task, given, rows("hash", 5), SETTINGS) == []
    mixed = load_rows([*rows("hash", 12), *rows("box", 8)])
    assert "12 end in `#### N`" in check_responses(task, given, mixed, SETTINGS)[0]


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
    assert check_system_message(task, rows("box")) == [], "a plain text has none"
    (said,) = check_system_message(task, bare, "<system> You help.")
    assert said.startswith(
        "the chat template's own system message ('<system> You help.') is left out; --system keep keeps it"
    )
    assert check_system_message(replace(task, system="Be brief."), taught, "<system> You help.") == []
    assert check_system_message(task, rows("box"), "<system> You help.") == [], "a plain text has none"
