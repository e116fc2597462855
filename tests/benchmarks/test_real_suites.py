"""The published suites: the committed figures, and the script on excerpts (LORAGATE_REAL_DATA names the whole files)."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from tiny import load_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "real_suites.py"
SUITES = {"math500": 500, "minerva": 272, "olympiadbench": 675, "amc23": 40, "aime24": 30}
QUESTION = "What is $2 + 3$?"
PROGRAM = {
    "prompt": 'def add(a, b):\n    """Sum."""\n',
    "canonical_solution": "    return a + b\n",
    "entry_point": "add",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One or two rows of each file, in the published columns."""
    place = tmp_path_factory.mktemp("data")
    solved = {"problem": QUESTION, "answer": "5", "solution": "So it is $\\boxed{5}$."}
    rows = {
        "math/math500.jsonl": [solved, solved | {"problem": "Another", "solution": "It is $\\boxed{6}$."}],
        "math/minerva.jsonl": [{name: solved[name] for name in ("problem", "solution")}],
        "math/olympiadbench.jsonl": [
            {"id": 1, "question": QUESTION, "final_answer": ["5"], "is_multiple_answer": False}
        ],
        "math/amc23.jsonl": [{"id": 0, "question": QUESTION, "answer": 5.0}],
        "math/aime24.jsonl": [{"id": 60, "problem": QUESTION, "answer": "005", "url": "", "year": "2024"}],
        "retention/mmlu_stem.jsonl": [
            {"question": QUESTION, "type": "abstract_algebra", "choices": ["4", "5", "6", "7"], "answer": 1}
        ],
    }
    for name, lines in rows.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    examples = {"canary": "GUID", "examples": [{"input": "not True is", "target": "False"}]}
    (place / "retention" / "bbh_boolean_expressions.json").write_text(json.dumps(examples))
    test = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    programs = [{"task_id": "HumanEval/0", "test": test, **PROGRAM}]
    programs.append({**programs[0], "task_id": "HumanEval/1", "canonical_solution": "    return a - b\n"})
    (place / "code").mkdir()
    with gzip.open(place / "code" / "HumanEval.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps(program) + "\n" for program in programs))
    return place


@pytest.mark.slow("processes")
def test_what_is_wrong_is_counted_as_wrong(script: ModuleType, data: Path) -> None:
    found = script.math_checks(data)
    assert {name: one["questions"] for name, one in found.items()} == dict.fromkeys(SUITES, 1) | {"math500": 2}
    assert all(one["prompts"] == one["golds_judged_right"] == one["questions"] for one in found.values())
    assert {name: one["solutions_judged_right"] for name, one in found.items()} == {
        **dict.fromkeys(SUITES),
        "math500": 1,
        "minerva": 1,
    }
    assert script.code_checks(data) == {"questions": 2, "programs_judged_right": 1}


def test_retention_files_as_published_become_suites(script: ModuleType, data: Path) -> None:
    assert script.retention_checks(data) == {
        "bbh_zeroshot": {"questions": 1, "subsets": 1},
        "mmlu_pro": {"questions": 1, "subsets": 1},
    }


def test_the_committed_run_read_every_question_and_judged_all_right(script: ModuleType) -> None:
    record = json.loads(script.RESULTS.read_text(encoding="utf-8"))
    checks = record["checks"]
    assert {name: one["questions"] for name, one in checks["math"].items()} == SUITES
    assert all(one["prompts"] == one["golds_judged_right"] == one["questions"] for one in checks["math"].values())
    assert sum(one["solutions_judged_right"] or 0 for one in checks["math"].values()) == 772
    assert checks["code"] == {"questions": 164, "programs_judged_right": 164}
    assert {name: one["questions"] for name, one in checks["retention"].items()} == {
        "bbh_zeroshot": 2000,
        "mmlu_pro": 3018,
    }
    for run in record["samples"].values():
        assert set(run["rows"]) == {*SUITES, "humaneval", "bbh_zeroshot", "mmlu_pro"}


def test_the_page_shows_the_results_as_they_are(script: ModuleType) -> None:
    text = script.PAGE.read_text(encoding="utf-8")
    assert [mark[1] for mark in script.MARKS.findall(text)] == ["checks", "samples"]
    assert script.filled(text) == text, "run python benchmarks/real_suites.py page"


@pytest.mark.slow("other")
@pytest.mark.skipif(
    "LORAGATE_REAL_DATA" not in os.environ, reason="LORAGATE_REAL_DATA names no folder of published files"
)
def test_the_whole_files(script: ModuleType) -> None:
    place = Path(os.environ["LORAGATE_REAL_DATA"])
    checks = json.loads(script.RESULTS.read_text(encoding="utf-8"))["checks"]
    assert script.math_checks(place) == checks["math"]
    assert script.code_checks(place) == checks["code"]
    assert script.retention_checks(place) == checks["retention"]
