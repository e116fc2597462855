from __future__ import annotations

import gzip
import json
from dataclasses import replace

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loragate.errors import ConfigError, DataError
from loragate.evaluation.grading import grade_math
from loragate.evaluation.judging import grade_samples
from loragate.evaluation.prepared import questions_of
from loragate.evaluation.settings import GradingSettings, TaskSettings
from loragate.evaluation.tasks import Question, load_questions, load_task
from loragate.generation import Sample
from loragate.recipes import QUESTIONS
from tiny import rehearsal_rows, write_rows

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LOCAL = ["aime24", "amc23", "humaneval", "humaneval_plus", "math500", "mbpp", "minerva", "olympiadbench"]


@pytest.fixture
def jsonl(tmp_path):
    return lambda rows: write_rows(tmp_path / "rows.jsonl", rows)


@pytest.mark.parametrize("name", LOCAL)
def test_samples_load_in_every_file_format(name, tmp_path):
    task, rows = load_task(name), rehearsal_rows(name)
    loaded = load_questions(task, file=QUESTIONS / f"{name}.jsonl")
    assert len(loaded.questions) == len(rows) >= 4
    assert loaded.questions[1].place == f"{QUESTIONS / name}.jsonl:2"
    assert [question.row for question in loaded.questions] == rows
    assert loaded.revision is None
    assert loaded.warnings == (
        f"{QUESTIONS / name}.jsonl holds {len(rows)} rows, the set that {name} means has {task.dataset.rows}: scores on it "
        "are not comparable with published ones",
    )
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    (tmp_path / "set.json").write_text(json.dumps(rows), encoding="utf-8")
    by_folder = load_questions(task, file=tmp_path)
    assert by_folder.source == str(tmp_path / f"{name}.parquet")
    for other in (by_folder, load_questions(task, file=tmp_path / "set.json")):
        assert other.fingerprint == loaded.fingerprint
        assert [(q.id, q.prompt, q.gold) for q in other.questions] == [
            (q.id, q.prompt, q.gold) for q in loaded.questions
        ]
    first = load_questions(task, file=QUESTIONS, limit=2)
    assert first.questions == loaded.questions[:2]
    assert first.warnings == ()
    assert first.fingerprint != loaded.fingerprint


def test_math_prompts_and_golds():
    golds = {
        "math500": ["56", "9", "\\frac{1}{4}", "6\\sqrt{2}", "(-2,4)"],
        "minerva": ["24", "5e14", "\\sqrt{\\frac{k}{m}}", "9"],
        "olympiadbench": ["7", "-2,-1,1,2", "2.7", "\\frac{n(n+1)}{2}", "(7,3)"],
        "aime24": ["010", "024", "040", "030"],
        "amc23": ["120", "23", "4", "14"],
    }
    for name, expected in golds.items():
        questions = load_questions(load_task(name), file=QUESTIONS).questions
        assert [question.gold for question in questions] == expected
        for question in questions:
            assert question.prompt == (question.row.get("problem") or question.row["question"]) + BOXED
    assert load_questions(load_task("math500"), file=QUESTIONS).questions[0].id == "test/prealgebra/9001.json"
    assert load_questions(load_task("minerva"), file=QUESTIONS).questions[3].id == "3"


def test_code_prompts():
    chat = load_questions(load_task("humaneval"), file=QUESTIONS).questions
    raw = load_questions(load_task("humaneval_raw"), file=QUESTIONS / "humaneval.jsonl").questions
    for asked, plain in zip(chat, raw, strict=True):
        assert plain.prompt == plain.row["prompt"]
        assert f"```python\n{plain.prompt.rstrip()}\n```" in asked.prompt
        assert asked.gold == plain.gold == plain.row["canonical_solution"]
        assert asked.id == plain.row["task_id"]
    question = load_questions(load_task("mbpp"), file=QUESTIONS).questions[1]
    assert question.prompt.startswith("Write a python function to count the vowels of a text. Your code should pass")
    assert all(f"\n{line}\n" in question.prompt for line in question.row["test_list"])
    assert question.id == "9012"


def test_other_published_forms_of_the_same_sets(jsonl):
    bundle = [{"problem": "P?", "solution": r"so \boxed{3} or rather $\boxed{\frac{1}{2}}$", "type": "x", "idx": 0}]
    (question,) = load_questions(load_task("minerva"), file=jsonl(bundle)).questions
    assert (question.prompt, question.gold) == ("P?" + BOXED, r"\frac{1}{2}")
    with pytest.raises(DataError, match=r"rows.jsonl:1: 'gold' cannot be filled: there is no .boxed"):
        load_questions(load_task("minerva"), file=jsonl([{"problem": "P?", "solution": "none"}]))
    floats = [{"id": 7, "problem": "P?", "answer": 27.0, "url": "u"}, {"id": 8, "problem": "Q?", "answer": 2.5}]
    questions = load_questions(load_task("amc23"), file=jsonl(floats)).questions
    assert [question.gold for question in questions] == ["27", "2.5"]
    huge = [{"id": 7, "problem": "P?", "answer": 10**400, "url": "u"}]
    assert load_questions(load_task("amc23"), file=jsonl(huge)).questions[0].gold == "1" + "0" * 400
    numbers = [{"problem": "P?", "answer": 25}]
    (question,) = load_questions(load_task("aime24"), file=jsonl(numbers)).questions
    assert (question.id, question.gold) == ("0", "25")


@pytest.mark.parametrize(
    ("value", "answer"), [(100 / 3, r"\frac{100}{3}"), (0.1 + 0.2, "0.3"), (3 * 1.1, "3.3"), (2 / 3, "2/3")]
)
def test_a_float_is_the_number_that_was_meant(value, answer, jsonl):
    (question,) = load_questions(
        load_task("amc23"), file=jsonl([{"id": 7, "problem": "P?", "answer": value}])
    ).questions
    assert grade_math(f"\\boxed{{{answer}}}", question.gold).correct, question.gold
    assert not grade_math("\\boxed{33.33}", question.gold).correct


REQUIRED = [
    (name, column)
    for name in LOCAL
    for column, kind in load_task(name).dataset.schema.items()
    if not kind.endswith("?")
]


@pytest.mark.parametrize(("name", "column"), REQUIRED)
def test_a_missing_column_or_a_wrong_type_is_named(name, column, jsonl):
    rows = rehearsal_rows(name)
    dropped = [rows[0], {key: value for key, value in rows[1].items() if key != column}]
    with pytest.raises(DataError, match=rf"rows.jsonl:2: no column '{column}'.* Found the columns .*{name} expects "):
        load_questions(load_task(name), file=jsonl(dropped))
    for wrong, shown in ((None, "null"), ({"a": 1}, "a.*1"), (True, "true")):
        broken = [rows[0], rows[1], {**rows[2], column: wrong}]
        with pytest.raises(DataError, match=rf"rows.jsonl:3: column '{column}' holds .*{shown}.*, expected "):
            load_questions(load_task(name), file=jsonl(broken))


def test_more_rows_that_do_not_fit(jsonl):
    task, rows = load_task("math500"), rehearsal_rows("math500")
    renamed = [{**{key: value for key, value in rows[0].items() if key != "answer"}, "anwser": "1"}]
    with pytest.raises(DataError, match=r"no column 'answer'; did you mean 'anwser'\?"):
        load_questions(task, file=jsonl(renamed))
    with pytest.raises(DataError, match=r"column 'level' holds 3.5, expected integer"):
        load_questions(task, file=jsonl([{**rows[0], "level": 3.5}]))
    with pytest.raises(DataError, match=r"rows.jsonl:1: 'gold' is empty, taken from answer"):
        load_questions(task, file=jsonl([{**rows[0], "answer": " "}]))
    with pytest.raises(DataError, match=r"rows.jsonl:3: the id 'test/prealgebra/9001.json'.*used at .*rows.jsonl:1"):
        load_questions(task, file=jsonl([rows[0], rows[1], rows[0]]))
    with pytest.raises(DataError, match=r"nothing for 'question'. .*; expected one of question, problem"):
        load_questions(load_task("minerva"), file=jsonl([{"answer": "3"}]))
    with pytest.raises(DataError, match=r"column 'final_answer' holds .*, expected texts"):
        load_questions(
            load_task("olympiadbench"), file=jsonl([{**rehearsal_rows("olympiadbench")[0], "final_answer": [3]}])
        )
    with pytest.raises(DataError, match=r"rows.jsonl:2: column 'solution' holds half of a surrogate pair"):
        load_questions(task, file=jsonl([rows[0], {**rows[1], "solution": "\ud83d"}]))
    torn = jsonl([])
    torn.write_text('{"problem": \n', encoding="utf-8")
    with pytest.raises(DataError, match=r"rows.jsonl:1: malformed JSON"):
        load_questions(task, file=torn)


def test_a_tolerance_acts_only_where_the_task_names_its_column(tmp_path, jsonl):
    olympiad = load_task("olympiadbench")
    questions = load_questions(olympiad, file=QUESTIONS).questions
    assert [question.tolerance for question in questions] == [None, None, 0.1, None, None]

    def correct(task, questions):
        samples = [Sample(place, 0, r"\boxed{2.75}", (1,), "stop", None) for place in range(len(questions))]
        return [
            grade.correct for grade in grade_samples(task, questions, samples, "default", GradingSettings(workers=1))
        ]

    assert correct(olympiad, questions[2:3]) == [True]
    definition = """\
name: mine
version: 1
suite: math
dataset: {file: rows.jsonl, schema: {question: text, answer: text, error: 'text|number?'}}
columns: {question: question, gold: answer}
prompt: "{{ question }}"
grader: default
"""
    place = tmp_path / "mine.yaml"
    jsonl([{"question": f"q{error}", "answer": "2.7", "error": error} for error in (1, "an ordinary text", "", 0.1)])
    place.write_text(definition, encoding="utf-8")
    task = load_task(place)
    assert correct(task, load_questions(task).questions) == [False] * 4
    place.write_text(definition.replace("gold: answer", "gold: answer, tolerance: error"), encoding="utf-8")
    task = load_task(place)
    with pytest.raises(DataError, match=r"rows.jsonl:2: 'tolerance' is 'an ordinary text'; expected a number"):
        load_questions(task)
    for wrong in ("inf", -1):
        with pytest.raises(DataError, match=r"'tolerance' is .*expected a number of at least 0"):
            load_questions(task, file=jsonl([{"question": "q", "answer": "2.7", "error": wrong}]))
    rows = [{"question": f"q{error}", "answer": "2.7", "error": error} for error in (1, None, "", 0.1)]
    assert correct(task, load_questions(task, file=jsonl(rows)).questions) == [True, False, False, True]
    place.write_text(definition.replace("gold: answer", "gold: answer, tolerance: error").replace("default", "exact"))
    with pytest.raises(ConfigError, match=r"columns.tolerance has no effect with grader exact, only with default"):
        load_task(place)


def test_text_of_a_row_is_never_read_as_a_template(jsonl):
    rows = [{"problem": "{{ 7 * 7 }} {% raw %} \\boxed{}", "answer": "{{ answer }}"}]
    (question,) = load_questions(load_task("aime24"), file=jsonl(rows)).questions
    assert (question.prompt, question.gold) == (rows[0]["problem"] + BOXED, "{{ answer }}")


def test_a_template_that_a_row_cannot_fill(tmp_path, jsonl):
    definition = """\
name: mine
version: 1
suite: math
dataset: {file: rows.jsonl, schema: {question: text, tags: object}}
columns: {gold: question}
prompt: "{{ tags.topic }}: {{ question }}"
generation: {samples: 1, temperature: 0, max_new_tokens: 8}
grader: exact
"""
    (tmp_path / "mine.yaml").write_text(definition, encoding="utf-8")
    jsonl([{"question": "a", "tags": {"topic": "t"}}, {"question": "b", "tags": {}}])
    task = load_task(tmp_path / "mine.yaml")
    assert load_questions(task, limit=1).questions == [
        Question("0", "t: a", "a", {"question": "a", "tags": {"topic": "t"}}, f"{tmp_path / 'rows.jsonl'}:1")
    ]
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: the prompt of mine cannot be filled: 'dict object' has no attribute"
    ):
        load_questions(task)
    moved = definition.replace("file: rows.jsonl", "file: owner/name")
    (tmp_path / "mine.yaml").write_text(moved, encoding="utf-8")
    with pytest.raises(DataError, match=r"found no file .*owner/name for mine; --data mine=FILE takes"):
        load_questions(load_task(tmp_path / "mine.yaml"))
    escape = definition.replace("tags.topic", "question.__class__.__mro__")
    (tmp_path / "mine.yaml").write_text(escape, encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot be filled: access to attribute '__class__' of 'str' object is unsafe"):
        load_questions(load_task(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("name", LOCAL)
def test_an_unreachable_hub_says_which_file_would_do(name, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    task = load_task(name)
    with pytest.raises(DataError) as caught:
        load_questions(task)
    message = str(caught.value)
    config = f":{task.dataset.config}"
    assert (
        f"{name}: {task.dataset.hub}{config}[{task.dataset.split}] at {task.dataset.revision} could not be" in message
    )
    assert (
        f"--data {name}=FILE takes a .jsonl, .json, .csv or .parquet file, or a folder that holds {name}.jsonl"
        in message
    )
    assert f"https://huggingface.co/datasets/{task.dataset.hub}" in message
    for column, kind in task.dataset.schema.items():
        assert kind.endswith("?") or f"{column} (" in message


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz", ".ndjson"])
def test_a_folder_holds_a_file_of_every_kind_that_is_read_alone(suffix, tmp_path):
    file, task = tmp_path / f"aime24{suffix}", load_task("aime24")
    text = json.dumps({"problem": "1+1?", "answer": "2"}) if suffix == ".ndjson" else "problem,answer\n1+1?,2\n"
    text = text.replace(",", "\t") if suffix == ".tsv" else text
    file.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    tasks = [task, load_task("minerva")]
    (inside,) = questions_of(TaskSettings(tasks="aime24,minerva", data=str(tmp_path)), task, tasks).questions
    assert (inside.gold, inside.place) == ("2", load_questions(task, file).questions[0].place)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match=r"holds no minerva.jsonl .*with the columns of .*minerva\.yaml"):
        load_questions(load_task("minerva"), file=tmp_path)
    with pytest.raises(DataError, match=r"found no file .*none.jsonl for aime24; --data aime24=FILE takes"):
        load_questions(load_task("aime24"), file=tmp_path / "none.jsonl")


class Hub:
    """Stands in for the hub: keeps what was asked of it."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(self, *arguments, **keywords):
        self.calls.append((arguments, keywords))
        return datasets.Dataset.from_list(rehearsal_rows("aime24"))


def test_the_pinned_revision_is_asked_for(monkeypatch):
    hub, task = Hub(monkeypatch), load_task("aime24")
    loaded = load_questions(task)
    pinned = task.dataset.revision
    assert hub.calls == [(("HuggingFaceH4/aime_2024", "default"), {"split": "train", "revision": pinned})]
    assert (loaded.revision, loaded.source) == (pinned, "HuggingFaceH4/aime_2024:default[train]")
    assert [q.prompt for q in loaded.questions] == [q.prompt for q in load_questions(task, file=QUESTIONS).questions]
    assert loaded.questions[2].place == "HuggingFaceH4/aime_2024:default[train] row 2"


def test_a_branch_is_read_with_a_warning(monkeypatch):
    hub, task = Hub(monkeypatch), load_task("aime24")
    task = replace(task, dataset=replace(task.dataset, revision="main"))
    loaded = load_questions(task, limit=3)
    assert hub.calls[0][1]["revision"] == "main"
    assert (loaded.revision, len(loaded.questions)) == (None, 3)
    assert loaded.warnings == (
        "aime24: HuggingFaceH4/aime_2024 is read at no fixed commit; dataset.revision in the task file makes this repeatable",
    )
