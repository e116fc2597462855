"""The rows of examples/word_problems: no test question has a near copy in what is trained or chosen on, and answers are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loragate.evaluation import grade_math
from tiny import load_script

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "word_problems"


@pytest.fixture(scope="module")
def maker():
    return load_script(FOLDER / "make_rows.py")


@pytest.fixture(scope="module")
def rows():
    names = ("train", "dev", "test")
    return {name: [json.loads(line) for line in (FOLDER / f"{name}.jsonl").open(encoding="utf-8")] for name in names}


def test_no_two_files_tell_one_story(maker, rows):
    svamp = {name: [row for row in file if row["id"].startswith("svamp/")] for name, file in rows.items()}
    assert all(svamp.values())
    words = {
        name: [maker.content(row["prompt"].replace(maker.ASK, "")) for row in file] for name, file in svamp.items()
    }
    for one, other in (("test", "train"), ("test", "dev"), ("dev", "train")):
        shared = [len(a & b) / len(a | b) for a in words[one] for b in words[other]]
        assert max(shared) < maker.SAME_STORY, (one, other)
    ids = [row["id"] for file in rows.values() for row in file]
    assert len(ids) == len(set(ids))
    assert (len(rows["dev"]), len(rows["test"])) == (maker.DEV, maker.TEST)


def test_the_formula_of_a_training_row_is_read_by_the_grader(maker, rows):
    for row in rows["train"][:100]:
        left, sign, right = row["response"].split("{")[1].split("}")[0].split()
        answer = maker.shown(maker.operated(left, sign, right))
        assert grade_math(row["response"], answer).correct, row
        assert not grade_math(row["response"], f"{answer}1").correct, row
