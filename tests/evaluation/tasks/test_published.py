"""Files as the data sets are published: read as the hub's rows, or refused with the task that is meant."""

from __future__ import annotations

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loragate.data import load_rows
from loragate.errors import ConfigError, DataError
from loragate.evaluation.sandbox import Limits, grade_code
from loragate.evaluation.tasks import load_questions, load_task
from tiny import rehearsal_rows, write_rows

TIER = "rlimits"
PROMPT = 'from typing import List\n\n\ndef total(values: List[float]) -> float:\n    """ The sum of the values. """\n'
BASE = {
    "task_id": "HumanEval/700",
    "prompt": PROMPT,
    "entry_point": "total",
    "canonical_solution": "    return sum(values)\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n",
}
RELEASE = BASE | {"base_input": [[[1, 2]]], "plus_input": [[[]], [[0.1, 0.2]]], "atol": 0}
PLUS = BASE | {
    "test": "import numpy as np\n\n\ndef check(candidate):\n    assert np.isclose(candidate([0.1, 0.2]), 0.3)\n"
}
SANITIZED = {
    "source_file": "a.ipynb",
    "task_id": 702,
    "prompt": "Write a function to find the largest of a list.",
    "code": "def largest(xs):\n    return max(xs)",
    "test_imports": ["import math"],
    "test_list": ["assert largest([3, 9, 2]) == 9", "assert largest([-math.inf, 1]) == 1"],
}
FULL = {"task_id": 702, "text": "Find the largest.", "code": SANITIZED["code"], "test_list": SANITIZED["test_list"][:1],
        "test_setup_code": "", "challenge_test_list": []}  # fmt: skip
MBPP_PLUS = SANITIZED | {
    "test_list": ["assert largest([3, 9, 2]) == 9"],
    "test": "import numpy as np\n\ninputs = [[[3, 9, 2]], [[-1, -2]]]\nresults = [9, -1]\n"
    "for arguments, result in zip(inputs, results):\n    assert np.equal(largest(*arguments), result)\n",
}
MATH = {"problem": "What is 1 + 1?", "level": "Level 5", "type": "Algebra", "solution": r"It is $\boxed{2}$."}


def read(tmp_path, task, *rows):
    return load_questions(load_task(task), write_rows(tmp_path / "rows.jsonl", rows)).questions


def test_sanitized_and_plus_rows_of_mbpp(tmp_path):
    (question,) = read(tmp_path, "mbpp_sanitized", SANITIZED)
    assert "largest of a list. Your code should pass these tests:\n\nassert largest" in question.prompt
    assert grade_code("mbpp", question.row, SANITIZED["code"], TIER).reason == "ok"
    (question,) = read(tmp_path, "mbpp_plus", MBPP_PLUS)
    assert grade_code("mbpp", question.row, MBPP_PLUS["code"], TIER).reason == "ok"
    cheat = "def largest(xs):\n    return 9"
    assert grade_code("mbpp", FULL, cheat, TIER, Limits(seconds=5)).reason == "ok"
    assert grade_code("mbpp", question.row, cheat, TIER).reason == "wrong", "its own tests ran"


OTHERS = [
    ("humaneval_plus", BASE, "HumanEval's own tests alone.*use --tasks humaneval"),
    ("humaneval", PLUS, "tests of HumanEval\\+.*--tasks humaneval_plus"),
    ("humaneval", RELEASE, "--tasks humaneval_plus"),
    ("humaneval_raw", RELEASE, "--tasks humaneval_plus"),
    ("humaneval_plus", RELEASE, "evalplus/humanevalplus .* on the hub"),
    ("mbpp", SANITIZED, "--tasks mbpp_sanitized"),
    ("mbpp", MBPP_PLUS, "--tasks mbpp_plus"),
    ("mbpp_sanitized", MBPP_PLUS, "--tasks mbpp_plus"),
    ("mbpp_sanitized", FULL, "--tasks mbpp"),
    ("mbpp_plus", SANITIZED, "only MBPP's base tests would run"),
    ("mbpp_plus", RELEASE | {"task_id": "Mbpp/2"}, "evalplus/mbppplus on the hub"),
    ("math500", MATH | {"solution": "It is 2."}, "no .boxed.* in its 'solution'"),
]


@pytest.mark.parametrize(("task", "row", "why"), OTHERS)
def test_rows_of_another_set_are_refused_by_name(task, row, why, tmp_path):
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{why}"):
        read(tmp_path, task, row)


@pytest.mark.parametrize(("kind", "row"), [("mbpp", MBPP_PLUS), ("humaneval", RELEASE)])
def test_inputs_without_their_tests_are_never_judged_by_the_base_tests(kind, row):
    with pytest.raises(DataError, match="evalplus/mbppplus"):
        grade_code(kind, row | {"plus_input": [[[1]]]}, "x", TIER)


def test_math_as_it_is_published(tmp_path):
    pq.write_table(pa.Table.from_pylist([MATH, MATH | {"level": "Level ?"}]), tmp_path / "test.parquet")
    found = load_questions(load_task("math500"), tmp_path / "test.parquet")
    assert [(question.gold, question.row["subject"], question.row["level"]) for question in found.questions] == [
        ("2", "Algebra", 5),
        ("2", "Algebra", None),
    ]
    assert "holds 2 rows, the set that math500 means has 500" in found.warnings[0]


def test_big_bench_hard_as_it_is_published(tmp_path):
    examples = [{"input": "True and False is", "target": "False"}, {"input": "True or False is", "target": "True"}]
    (tmp_path / "boolean_expressions.json").write_text(json.dumps({"canary": "x", "examples": examples}))
    found = load_questions(load_task("bbh"), tmp_path)
    assert [(question.subset, question.gold) for question in found.questions] == [
        ("boolean_expressions", "False"),
        ("boolean_expressions", "True"),
    ]
    for broken in (
        {"train": examples, "test": examples},
        {"examples": []},
        {"examples": [1]},
        {"a": {}, "b": examples},
    ):
        (tmp_path / "b.json").write_text(json.dumps(broken))
        with pytest.raises(DataError, match="found an object with the keys"):
            load_rows(tmp_path / "b.json")


def test_folders_that_datasets_saved(tmp_path):
    rows = rehearsal_rows("math500")
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": data, "train": data.select([0])}).save_to_disk(str(tmp_path / "splits"))
    task = load_task("math500")
    for folder in ("one", "splits"):
        assert len(load_questions(task, tmp_path / folder).questions) == len(rows), "the split of the task"
    assert load_questions(task, tmp_path / "one").fingerprint == load_rows(rows).fingerprint
    assert len(load_rows(tmp_path / "splits")) == 1
    with pytest.raises(DataError, match="no split 'tset'; did you mean 'test'"):
        load_rows(tmp_path / "splits", split="tset")
    with pytest.raises(ConfigError, match="no effect"):
        load_rows(tmp_path / "one", split="test")
