"""Probe files: labelled or not, what is refused with file and line; and rows that are set aside."""

import json

import pytest
from selection_kit import write_jsonl

from loragate.data import load_rows
from loragate.errors import ConfigError, DataError
from loragate.evaluation.judging import JudgeSettings
from loragate.selection.evidence import read_asked
from loragate.selection.questions import Manner, held_out_prompts, probe_task, read_probe, set_aside
from loragate.selection.settings import ProbeSettings
from tiny import tiny_rows, tiny_tokenizer


def test_labels_are_recognised(tmp_path):
    labelled = write_jsonl(tmp_path / "a.jsonl", [{"question": "w1", "answer": 7}, {"question": "w2", "answer": 0}])
    task, questions, has_labels = read_probe(str(labelled), grader="exact")
    assert has_labels
    assert [(q.prompt, q.gold) for q in questions] == [("w1", "7"), ("w2", "0")]
    assert questions[1].place.endswith("a.jsonl:2")
    assert (task.grader, task.raw) == ("exact", False)
    bare = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "w1", "answer": None}, {"prompt": "w2"}])
    _, questions, has_labels = read_probe(str(bare))
    assert not has_labels
    assert [q.prompt for q in questions] == ["w1", "w2"]


def test_some_answers_are_refused_by_file_and_line(tmp_path):
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [{"prompt": "w1", "gold": "1"}, {"prompt": "w2"}, {"prompt": "w3"}])
    with pytest.raises(DataError, match=r"mixed.jsonl:2: no answer, though other rows have one"):
        read_probe(str(mixed))


def test_what_would_be_left_out_is_refused(tmp_path):
    alpaca = write_jsonl(tmp_path / "alpaca.jsonl", [{"instruction": "Sort", "input": "3 1", "answer": "1 3"}])
    with pytest.raises(DataError, match=r"alpaca.jsonl:1: the column 'input' would be left out"):
        read_probe(str(alpaca))
    with pytest.raises(DataError, match="found no file"):
        read_probe(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="found no file"):
        read_probe(str(tmp_path / "none.jsonl"), "mbpp")
    with pytest.raises(ConfigError, match=r"--probe-grader exat: .*did you mean 'exact'"):
        probe_task("exat")
    with pytest.raises(ConfigError, match="--probe-grader mbpp"):
        probe_task("mbpp")


def test_a_missing_file_and_conversations_are_told_what_to_be(tmp_path):
    file = tmp_path / "probe.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "2+2?"}]}) + "\n")
    with pytest.raises(
        DataError, match=r'probe.jsonl:1: a conversation is no probe question; write .*"answer": answer'
    ):
        read_probe(str(file))
    with pytest.raises(DataError, match=r"found no file .*prob.jsonl; did you mean 'probe.jsonl'\?"):
        read_probe(str(tmp_path / "prob.jsonl"))


def test_a_task_brings_its_own_columns_and_prompt(tmp_path):
    path = write_jsonl(tmp_path / "m.jsonl", [{"problem": "1+1?", "answer": "2", "solution": "x"}] * 2)
    task, questions, labelled = read_probe(str(path), "math500")
    assert labelled
    assert task.name == "math500"
    assert questions[0].prompt.startswith("1+1?")
    assert "boxed" in questions[0].prompt


def test_plain_text_probes_skip_the_chat_template(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w1 w2"}])
    asked = read_asked(str(path), "", ProbeSettings(), JudgeSettings())
    for raw, expected in ((True, "w1 w2"), (False, "<user> w1 w2 <assistant> ")):
        put = asked.put(Manner(tiny_tokenizer(), None, 0, answer=9, raw=raw))
        assert (put.task.raw, put.prompts, put.sampling.max_new_tokens) == (raw, (expected,), 9)


@pytest.mark.parametrize(("count", "aside"), [(1, 0), (9, 0), (10, 1), (99, 9), (640, 64), (2000, 64)])
def test_a_tenth_is_set_aside_but_never_more_than_64(count, aside):
    rows = load_rows([{"prompt": f"w{i} w{i % 7}", "completion": "w1"} for i in range(count)])
    kept, spare = set_aside(rows)
    assert (len(kept), len(spare)) == (count - aside, aside)
    assert [spare.where(i) for i in range(aside)] == [f"row {i}" for i in range(count - aside, count)]


def test_no_question_that_is_set_aside_was_trained_on():
    rows = load_rows([{"prompt": f"w{i % 50}", "completion": f"w{i}"} for i in range(200)]).shuffled(3)
    kept, spare = set_aside(rows)
    prompts = [row["prompt"] for row in spare]
    assert len(set(prompts)) == len(prompts) == 5, "four rows each: a fifth of a tenth"
    assert not set(prompts) & {row["prompt"] for row in kept}
    assert len(kept) == 200 - 4 * 5
    same = load_rows([{"prompt": "w1", "completion": f"w{i}"} for i in range(100)])
    kept, spare = set_aside(same)
    assert (len(kept), len(spare)) == (100, 0), "one prompt for all rows: nothing can be set aside"


def test_prompts_that_are_held_out_are_rendered_as_in_training():
    rows = load_rows(tiny_rows(12))
    questions, prompts = held_out_prompts(rows, Manner(tiny_tokenizer(), 64, 0, answer=8), 64)
    assert len(questions) == len(prompts) == 12
    text = rows[0]["messages"][0]["content"]
    assert prompts[0].split() == ["<user>", *text.split(), "<assistant>"]
    assert questions[0].row == rows[0]
    with pytest.raises(DataError, match="leave no room for 60 new tokens"):
        held_out_prompts(rows, Manner(tiny_tokenizer(), 61, 0, answer=60), 64)
