"""Probe files: labelled or not, what is refused with file and line; and rows that are set aside."""

import pytest
from selection_kit import write_jsonl

from loragate.data import load_rows
from loragate.errors import ConfigError, DataError
from loragate.selection.evidence import answer_tokens
from loragate.selection.questions import Manner, held_out_prompts, probe_task, prompts_of, read_probe, set_aside
from loragate.selection.settings import ProbeSettings
from tiny import tiny_rows, tiny_tokenizer

EXACT = ProbeSettings(probe_grader="exact")


def read(path, task="", settings=EXACT):
    return read_probe(str(path), task, settings)


def test_labels_are_recognised(tmp_path):
    found = read(write_jsonl(tmp_path / "a.jsonl", [{"question": f"w{i}", "answer": i} for i in range(32)]))
    assert found.labelled
    asked = [(q.prompt, q.gold, q.place.rsplit(":", 1)[1]) for q in found.questions]
    assert sorted(asked, key=lambda one: int(one[1])) == [(f"w{i}", str(i), str(i + 1)) for i in range(32)]
    assert (found.task.grader, found.task.raw) == ("exact", False)
    bare = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "w1", "answer": None}, {"prompt": "w2"}])
    found = read(bare)
    assert not found.labelled
    assert {q.prompt for q in found.questions} == {"w1", "w2"}
    with pytest.raises(ConfigError, match=r"b\.jsonl has no answers"):
        read_probe(bare, "", EXACT, need_answers=True)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "w1", "gold": "1"}, {"prompt": "w2"}], ":2: no answer, though other rows have one"),
        ([{"instruction": "Sort", "input": "3 1", "answer": "1 3"}], ":1: the column 'input' would be left out"),
        (
            [{"messages": [{"role": "user", "content": "2+2?"}]}],
            ':1: a conversation is no probe question; write .*"answer": answer',
        ),
        ([{"prompt": f"w{i}", "answer": "1"} for i in range(31)], "31 different questions;"),
        ([{"prompt": f"w{i % 31}", "answer": "1"} for i in range(36)], r"31 .* \(36 rows\)"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_file_and_line(rows, message, tmp_path):
    with pytest.raises(DataError, match=rf"probe\.jsonl.*{message}"):
        read(write_jsonl(tmp_path / "probe.jsonl", rows))


def test_what_there_is_not_is_named(tmp_path):
    path = write_jsonl(tmp_path / "probe.jsonl", [{"prompt": f"w{i}", "answer": "1"} for i in range(32)])
    for task in ("", "mbpp"):
        with pytest.raises(DataError, match=r"found no file .*prob\.jsonl.*probe\.jsonl"):
            read(tmp_path / "prob.jsonl", task)
    with pytest.raises(DataError, match=r"probe.jsonl:1: the grader tiny reads the column 'kind'"):
        read(path, settings=ProbeSettings(probe_grader="tiny"))
    with pytest.raises(ConfigError, match=r"--probe-grader exat: .*did you mean 'exact'"):
        probe_task("exat")
    with pytest.raises(ConfigError, match="--probe-grader mbpp"):
        probe_task("mbpp")


def test_a_file_in_the_order_of_its_kinds_is_asked_in_another(tmp_path):
    kinds = [*["add"] * 64, *["take"] * 64]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"{kind} {i}", "answer": i} for i, kind in enumerate(kinds)])
    first, again = ([q.prompt for q in read(path).questions] for _ in range(2))
    assert first == again
    assert len(set(first)) == 128
    assert 8 <= sum(prompt.startswith("add") for prompt in first[:24]) <= 16


def test_a_question_that_repeats_another_counts_once(tmp_path):
    rows = [{"prompt": f"What is {i % 40}?", "answer": i % 40} for i in range(100)]
    found = read(write_jsonl(tmp_path / "p.jsonl", [*rows, {"prompt": "what is 3", "answer": "three"}]))
    assert len(found.questions) == 40
    assert found.source.endswith("p.jsonl (61 repeat another and are left out)")
    with pytest.raises(
        DataError, match=r"q\.jsonl:101: the question of .*q\.jsonl:4 again, with another answer \('5', there '3'\)"
    ):
        read(write_jsonl(tmp_path / "q.jsonl", [*rows, {"prompt": "What is 3?", "answer": 5}]))


@pytest.mark.parametrize(
    ("grader", "gold", "why"),
    [
        ("choice", "(B)", ""),
        ("choice", "b", ""),
        ("choice", "B) Paris", ""),
        ("choice", "Paris", "the right answer is 'Paris', and the grader choice compares letters"),
        ("default", "6 * 12 = 72\n#### 72", r'the right answer holds "####"'),
        ("exact", "#### 72", ""),
    ],
)
def test_a_right_answer_that_nobody_could_give_is_refused(grader, gold, why, tmp_path):
    rows = [{"prompt": f"w{i}", "answer": "B" if grader == "choice" else "1"} for i in range(31)]
    path = write_jsonl(tmp_path / "p.jsonl", [*rows, {"prompt": "w31", "answer": gold}])
    if why:
        with pytest.raises(DataError, match=rf"p\.jsonl:32: {why}"):
            read(path, settings=ProbeSettings(probe_grader=grader))
    else:
        assert read(path, settings=ProbeSettings(probe_grader=grader)).labelled


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": [{"type": "text", "text": "What is 3?"}]}],
        [{"role": None, "content": None, "from": "human", "value": "What is 3?"}],
    ],
)
def test_a_question_among_the_training_rows_is_found_in_every_form_of_theirs(turns, tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"What is {i}?", "answer": i} for i in range(32)])
    taken = prompts_of([{"messages": [*turns, {"role": "assistant", "content": "3"}]}])
    with pytest.raises(DataError, match="1 of 32 probe questions are also among the rows"):
        read_probe(path, "", EXACT, [(taken, "the rows")])


def test_a_task_brings_its_own_columns_and_prompt(tmp_path):
    rows = [{"problem": f"{i}+1?", "answer": "2", "solution": "x"} for i in range(32)]
    found = read(write_jsonl(tmp_path / "m.jsonl", rows), "math500")
    assert found.labelled
    assert found.task.name == "math500"
    assert {q.prompt.split("?")[0] for q in found.questions} == {f"{i}+1" for i in range(32)}
    assert "boxed" in found.questions[0].prompt


def test_plain_text_probes_skip_the_chat_template(tmp_path):
    asked = read(write_jsonl(tmp_path / "p.jsonl", [{"prompt": "w1 w2"}]))
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


def test_a_probe_answer_may_take_what_training_answers_take():
    def rows(*lengths):
        return [{"labels": [-100] * 7 + [1] * length} for length in lengths]

    assert answer_tokens(rows(*[14] * 500)) == 48, "14 and half as many again, 16 to spare, in steps of 16"
    assert answer_tokens(rows(*[14] * 500, 4000)) == 48, "one row of its own kind"
    assert answer_tokens(rows(1000, 1000)) == 1520
