"""A grader of a Python caller: asked for every answer, named in the record, and never brought by a file."""

import json
from dataclasses import replace

import pytest

from loragate.cli.main import main
from loragate.errors import ConfigError, DataError
from loragate.evaluation.evaluate import evaluate, open_evaluation
from loragate.evaluation.prepared import prepare
from loragate.evaluation.settings import TaskSettings
from loragate.evaluation.tasks import load_questions, load_task
from loragate.evaluation.variants import ModelVariant
from loragate.generation import read_samples
from tiny import tiny_adapter, tiny_tokenizer, write_rows

TASK = """\
name: words
version: 1
suite: math
dataset: {file: words.jsonl, schema: {question: text, answer: text}}
columns: {question: question, gold: answer}
prompt: "{{ question }}"
raw: true
generation: {samples: 2, max_new_tokens: 3}
grader: exact
"""
SEEN = []


def lenient(answer: str, gold: str, row: dict) -> bool:
    SEEN.append((answer, gold, row))
    return len(SEEN) % 2 == 0


def strict(answer, gold, row):
    return False


def undecided(answer, gold, row):
    return None


def broken(answer, gold, row):
    return row["absent"] == answer


@pytest.fixture
def place(tmp_path):
    write_rows(tmp_path / "words.jsonl", [{"question": f"w{n} w{n + 1}", "answer": f"w{n}"} for n in range(4)])
    (tmp_path / "words.yaml").write_text(TASK)
    return tmp_path


def run(place, grader, out="run", **more):
    task, tokenizer = load_task(place / "words.yaml", grader=grader), tiny_tokenizer()
    tasks = [prepare(task, load_questions(task, seed=0), tokenizer, TaskSettings())]
    return evaluate(tiny_adapter(), tokenizer, tasks, [ModelVariant("adapter")], place / out, **more)


def test_it_judges_every_answer_and_stands_in_the_record(place, capsys):
    SEEN.clear()
    record = run(place, lenient)
    samples = read_samples(place / "run" / "samples" / "adapter" / "words.jsonl")
    assert [answer for answer, _, _ in SEEN] == [sample.text for sample in samples]
    assert SEEN[2][1:] == ("w1", {"question": "w1 w2", "answer": "w1"})
    assert (record.tasks[0].grader, record.results[0].avg_at_k.mean) == (f"{__name__}.lenient", 0.5)
    (again,) = run(place, lenient, resume=True).results
    assert replace(again, seconds=record.results[0].seconds) == record.results[0]
    assert len(SEEN) == len(samples), "verdicts on file are used again"
    with pytest.raises(ConfigError, match=rf"tasks\[0\].grader = '{__name__}.lenient', now it is '{__name__}.strict'"):
        run(place, strict, resume=True)
    with pytest.raises(ConfigError, match="now it is 'exact'"):
        run(place, None, resume=True)
    assert main(["regrade", str(place / "run")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"words is judged by the Python function {__name__}.lenient, which no folder holds" in said


def test_a_folder_that_names_no_grader_is_judged_by_its_task_files(place):
    run(place, None)
    path = place / "run" / "run.json"
    stored = json.loads(path.read_text())
    stored["tasks"][0]["grader"] = ""
    path.write_text(json.dumps(stored))
    (result,) = open_evaluation(place / "run").regrade().results
    assert result.reasons


def test_what_a_task_is_without_its_grader_stays(place):
    own, plain = load_task(place / "words.yaml", grader=lenient).as_dict(), load_task(place / "words.yaml").as_dict()
    assert own.pop("grader") == f"{__name__}.lenient"
    assert plain.pop("grader") == "exact"
    assert own == plain
    json.dumps(own)


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (undecided, "undecided returned None for an answer to question 0; expected True or False"),
        (broken, r"broken failed on an answer to question 0 \(KeyError: 'absent'\)"),
    ],
)
def test_its_mistakes_are_no_wrong_answers(place, grader, message):
    with pytest.raises(DataError, match=message):
        run(place, grader)


def test_no_file_names_a_function_and_a_record_needs_a_name(place):
    (place / "other.yaml").write_text(TASK.replace("grader: exact", f"grader: {__name__}.lenient"))
    with pytest.raises(ConfigError, match=r"other\.yaml: grader must be"):
        load_task(place / "other.yaml")
    with pytest.raises(ConfigError, match="records name the function: write it with def"):
        load_task(place / "words.yaml", grader=lambda answer, gold, row: True)
    with pytest.raises(ConfigError, match="is judged by the harness"):
        load_task("openbookqa", grader=lenient)
