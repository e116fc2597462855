"""Dev sets: what is read, what is refused with file and line, and how they are put to a model."""

import json

import pytest
from selection_kit import write_jsonl

from loragate.data import describe_form, load_rows
from loragate.errors import ConfigError, DataError
from loragate.evaluation.tasks import load_task
from loragate.selection.dev import (
    collect_excluded_prompts,
    estimate_max_new_tokens,
    plain_task,
    read_dev,
)
from loragate.selection.overlap import prompts_with_location
from loragate.selection.settings import DevSettings
from tiny import tiny_tokenizer

EXACT = DevSettings(dev_grader="exact")
OTHER = load_rows([{"prompt": "something else", "completion": "w"}])


def rows(count=32, **more):
    return [{"prompt": f"What is {i}?", "answer": i, **more} for i in range(count)]


def test_questions_keep_their_order_and_place(tmp_path):
    found = read_dev(write_jsonl(tmp_path / "dev.jsonl", rows()), EXACT).questions
    assert [(q.prompt, q.gold) for q in found.questions] == [(f"What is {i}?", str(i)) for i in range(32)]
    assert found.questions[4].place.endswith("dev.jsonl:5")
    assert found.source.endswith("dev.jsonl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"prompt": "w1", "gold": "1"}, {"prompt": "w2"}], ":2: no answer, though other questions have one"),
        ([{"instruction": "Sort", "input": "3 1", "answer": "1 3"}], ":1: the column 'input' would be left out"),
        ([{"question": "Who?", "context": "Ann did.", "answer": "Ann"}], ":1: the column 'context' would be left out"),
        ([{"question": "2 + 2?", "choices": ["3", "4"], "answer": "4"}], ":1: the column 'choices' would be left out"),
        (
            [*rows(32, system="S"), {"prompt": "w", "answer": 1}],
            ":33: the system message is None, in .*:1 'S'; a dev set has one",
        ),
        ([{"prompt": "w", "answer": True}], ":1: column 'answer' holds true, expected text or number"),
        ([{"messages": [{"role": "user", "content": "2+2?"}]}], ":1: a conversation is no dev question; write"),
        (rows(31), "has 31 different questions; fewer than 32"),
        (rows(31) * 2, "has 31 different questions"),
        (rows(1), "has 1 different question;"),
        ([*rows(), {"prompt": "What is 3?", "answer": 5}], ":33: the question of .*:4 again, with another answer"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_file_and_line(given, message, tmp_path):
    with pytest.raises(DataError, match=rf"dev\.jsonl.*{message}"):
        read_dev(write_jsonl(tmp_path / "dev.jsonl", given), EXACT)


def test_without_answers_the_advice_is_the_adapter_greedily(tmp_path):
    bare = write_jsonl(tmp_path / "bare.jsonl", [{"prompt": f"w{i}"} for i in range(40)])
    with pytest.raises(ConfigError, match=r"bare\.jsonl has no answers.*use the adapter as it is, decoded greedily"):
        read_dev(bare, EXACT)


def test_what_there_is_not_is_named(tmp_path):
    path = write_jsonl(tmp_path / "dev.jsonl", rows())
    with pytest.raises(DataError, match=r"found no file .*dve\.jsonl.*dev\.jsonl"):
        read_dev(tmp_path / "dve.jsonl", EXACT)
    with pytest.raises(DataError, match=r"dev.jsonl:1: the grader tiny reads the column 'kind'"):
        read_dev(path, DevSettings(dev_grader="tiny"))
    with pytest.raises(ConfigError, match=r"--dev-grader exat: .*did you mean 'exact'"):
        plain_task("dev", "exat")
    with pytest.raises(ConfigError, match="--dev-grader mbpp"):
        plain_task("dev", "mbpp")


def test_a_question_that_repeats_another_counts_once(tmp_path):
    found = read_dev(write_jsonl(tmp_path / "p.jsonl", [*rows(40), *rows(20)]), EXACT).questions
    assert len(found.questions) == 40
    near = [
        ("Compute 2⁵.", "32"),
        ("Compute 25.", "25"),
        ("What is US?", "x"),
        ("What is us?", "y"),
        ("what is us", "y"),
    ]
    kept = read_dev([*rows(40), *({"prompt": prompt, "answer": answer} for prompt, answer in near)], EXACT)
    assert [question.gold for question in kept.questions.questions[40:]] == ["32", "25", "x", "y"]
    assert kept.dropped == {"the dev questions before them": 1}


@pytest.mark.parametrize(
    ("grader", "gold", "why"),
    [
        ("choice", "(B)", ""),
        ("choice", "Paris", "the right answer is 'Paris', and the grader choice compares letters"),
        ("default", "6 * 12 = 72\n#### 72", r'the right answer holds "####"'),
        ("exact", "#### 72", ""),
    ],
)
def test_a_right_answer_that_nobody_could_give_is_refused(grader, gold, why, tmp_path):
    given = [{"prompt": f"w{i}", "answer": "B" if grader == "choice" else "1"} for i in range(31)]
    path = write_jsonl(tmp_path / "p.jsonl", [*given, {"prompt": "w31", "answer": gold}])
    if why:
        with pytest.raises(DataError, match=rf"p\.jsonl:32: {why}"):
            read_dev(path, DevSettings(dev_grader=grader))
    else:
        assert len(read_dev(path, DevSettings(dev_grader=grader)).questions.questions) == 32


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": "What is 3?"}],
        [{"role": "user", "content": [{"type": "text", "text": "what is 3"}]}],
        [{"role": None, "content": None, "from": "human", "value": "What is 3?"}],
    ],
)
def test_a_question_among_the_examples_is_found_in_every_form_of_theirs(turns, tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", rows())
    whole, last = [*turns, {"role": "assistant", "content": "3"}], [{"role": "assistant", "content": "3"}]
    as_text = [{"messages": json.dumps(whole)}, {"prompt": json.dumps(turns), "completion": json.dumps(last)}]
    as_text += [{"query": "What is 3?", "response": "3"}, {"input": "what is 3", "output": "3"}]
    for row in ({"messages": whole}, *as_text):
        taken = prompts_with_location(load_rows([row]))
        with pytest.raises(DataError, match=r"p\.jsonl:4: 1 of 32 dev questions are also among the examples"):
            read_dev(path, EXACT, "dev", [(taken, "the examples")])


def test_what_is_reported_on_is_excluded(tmp_path):
    test = write_jsonl(tmp_path / "test.jsonl", [{"question": " What is 5 ?"}])
    taken = collect_excluded_prompts(OTHER, DevSettings(exclude=str(test)))
    with pytest.raises(DataError, match="1 of 32 retention questions are also among the questions of"):
        read_dev(write_jsonl(tmp_path / "p.jsonl", rows()), EXACT, "retention", taken)
    nothing = write_jsonl(tmp_path / "nothing.jsonl", [{"text": "w5"}])
    with pytest.raises(DataError, match="no prompts were found in"):
        collect_excluded_prompts(OTHER, DevSettings(exclude=str(nothing)))


def test_a_task_brings_its_own_columns_and_prompt(tmp_path):
    given = [{"problem": f"{i}+1?", "answer": "2", "solution": "x"} for i in range(32)]
    path = write_jsonl(tmp_path / "m.jsonl", given)
    found = read_dev(path, DevSettings(dev_task="math500"))
    assert found.task.name == "math500"
    assert "boxed" in found.questions.questions[0].prompt
    assert not found.questions.warnings, "that the data set is larger says nothing about a dev set"


def test_it_is_put_to_a_model_as_the_examples_are_and_is_a_task_file_again(tmp_path):
    dev = read_dev(write_jsonl(tmp_path / "dev.jsonl", rows()), EXACT)
    for raw, first in ((True, "What is 0?"), (False, "<user> What is 0? <assistant> ")):
        one = dev.prepare_task(tiny_tokenizer(), None, 3, system="none", answer_tokens=9, raw=raw)
        assert one.prompts[0] == first
        assert describe_form(one.task.raw, one.task.system).startswith(
            "as plain text" if raw else "through the chat template, without"
        )
        assert (one.task.raw, one.sampling.max_new_tokens, one.sampling.seed) == (raw, 9, 3)
        (tmp_path / "task.yaml").write_text(one.task.as_yaml())
        again = load_task(tmp_path / "task.yaml")
        assert again.fingerprint == one.task.fingerprint


def test_a_system_message_of_all_rows_is_asked_with_and_what_nothing_reads_is_named():
    given = [{**row, "options": ["What", i], "level": "easy"} for i, row in enumerate(rows(system="Be short."))]
    found = read_dev(given, EXACT)
    assert found.questions.warnings == ("columns that are not used: level",), "the options stand in the question"
    asked = found.prepare_task(tiny_tokenizer(), None, 3, system="none", answer_tokens=9)
    assert "Be short." in asked.prompts[0]
    with pytest.raises(
        DataError, match=r"have a system message \('Be short.'\), and the training examples are plain text"
    ):
        found.prepare_task(tiny_tokenizer(), None, 3, system="none", answer_tokens=9, raw=True)


def test_an_input_that_says_that_there_is_none_is_none():
    given = [{"instruction": f"What is {i}?", "input": "<noinput>", "answer": i} for i in range(32)]
    found = read_dev(given, EXACT)
    assert found.questions.questions[3].prompt == "What is 3?"
    assert not found.questions.warnings


def test_an_answer_may_take_what_training_answers_take():
    def lengths(*given):
        return [{"labels": [-100] * 7 + [1] * length} for length in given]

    assert estimate_max_new_tokens(lengths(*[14] * 500)) == 48, "14 and half as many again, 16 to spare, in steps of 16"
    assert estimate_max_new_tokens(lengths(*[14] * 500, 4000)) == 48, "one example of its own kind"
    assert estimate_max_new_tokens(lengths(1000, 1000)) == 1520


def test_right_answers_that_stand_for_a_missing_one_are_named(tmp_path):
    given = [
        {**row, "answer": gold} for row, gold in zip(rows(36), [*["1"] * 30, "?", "N/A", "None", "-", "null", "TODO"])
    ]
    path = write_jsonl(tmp_path / "p.jsonl", given)
    (said,) = read_dev(path, EXACT).questions.warnings
    assert said.startswith("6 of 36 right answers look like placeholders ('?', 'N/A', 'None')")
    assert f"{path}:31, {path}:32, {path}:33, …" in said
    none = write_jsonl(tmp_path / "none.jsonl", [{**row, "answer": "TBD"} for row in rows()])
    with pytest.raises(DataError, match=r"none\.jsonl:1, .*all answers of the dev set .* are placeholders \('TBD'\)"):
        read_dev(none, EXACT)
