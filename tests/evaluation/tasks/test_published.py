"""Files as the data sets are published: read as the hub's rows, or refused with the task that is meant."""

from __future__ import annotations

import gzip
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
RELEASE = BASE | {
    "contract": "\n    assert all(type(value) in (int, float) for value in values)\n",
    "base_input": [[[1, 2]]],
    "plus_input": [[[]], [[0.1, 0.2]], [[-5, 5]], [[1e300, 1e300]]],
    "atol": 0,
}
PLUS = BASE | {
    "test": "import numpy as np\n\n\ndef check(candidate):\n    assert np.isclose(candidate([0.1, 0.2]), 0.3)\n"
}
# right for the base test alone
CHEAT = "    return 3\n"
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


def test_the_release_of_evalplus_runs_all_of_its_inputs(tmp_path):
    path = tmp_path / "HumanEvalPlus.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(RELEASE).encode() + b"\n"))
    for row in (load_questions(load_task("humaneval_plus"), path).questions[0].row, RELEASE):
        assert grade_code("humaneval", row, RELEASE["canonical_solution"], TIER).reason == "ok"
        assert grade_code("humaneval", row, CHEAT, TIER).reason == "wrong"
    assert grade_code("humaneval", BASE, CHEAT, TIER).reason == "ok", "the base test alone does not see it"


NEAR = [
    ("    return sum(values) + 1e-9\n", 0, "wrong"),  # whole numbers are compared exactly
    ("    return sum(values) + (1e-9 if values[:1] == [0.1] else 0)\n", 0, "ok"),  # floats within 1e-6
    ("    return sum(values) + (1e-3 if values[:1] == [0.1] else 0)\n", 0, "wrong"),
    ("    return sum(values) + (1e-3 if values[:1] == [0.1] else 0)\n", 1e-2, "ok"),
    ("    return [sum(values)]\n", 1e-2, "wrong"),
    ("    class A(float):\n        __eq__ = lambda *_: True\n    return A(3)\n", 0, "wrong"),
    ("    class A:\n        __eq__ = lambda *_: True\n    return A()\n", 0, "wrong"),
]


@pytest.mark.parametrize(("answer", "tolerance", "reason"), NEAR)
def test_results_are_compared_as_evalplus_does(answer, tolerance, reason):
    assert grade_code("humaneval", RELEASE | {"atol": tolerance}, answer, TIER).reason == reason


def test_any_root_is_right():
    row = {
        "task_id": "HumanEval/32",
        "prompt": "import math\n\n\ndef poly(xs: list, x: float):\n"
        "    return sum([c * math.pow(x, i) for i, c in enumerate(xs)])\n\n\ndef find_zero(xs: list):\n    '''A root.'''\n",
        "canonical_solution": "    return -1.0\n",
        "entry_point": "find_zero",
        "base_input": [[[-1, 0, 1]]],
        "plus_input": [[[-1, 0, 1]]],
        "atol": 0,
    }
    assert grade_code("humaneval", row, "    return 1.0\n", TIER).reason == "ok"
    assert grade_code("humaneval", row, "    return 1.1\n", TIER).reason == "wrong"


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
    ("humaneval_plus", RELEASE | {"plus_input": []}, "only the base tests would run"),
    ("humaneval_plus", RELEASE | {"base_input": "x"}, "expected a list of lists of arguments"),
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


def test_the_program_of_a_release_of_mbpp_is_refused():
    with pytest.raises(DataError, match="evalplus/mbppplus"):
        grade_code("mbpp", MBPP_PLUS | {"plus_input": [[[1]]]}, "x", TIER)


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
