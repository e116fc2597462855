"""Published suites in their published files: every question read and judged.

    python benchmarks/real_suites.py check DATA
    python benchmarks/real_suites.py page [--check]

DATA holds `math/<task>.jsonl` for the five mathematics suites, `code/HumanEval.jsonl.gz`, and `retention/` with
`bbh_<subset>.json` (BIG-Bench Hard as published) and `mmlu_stem.jsonl` (question, choices, the number of the right choice).
`check` builds every prompt, reads every gold, judges each gold as an answer, and the reference solutions where a set has
them; HumanEval's canonical programs run in the sandbox. BBH and MMLU's STEM questions are first written with the columns of
the retention suites `bbh_zeroshot` and `mmlu_pro`. It writes results/real_suites.json, and `page` the table of
docs/evaluation.md from it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "real_suites.json"
PAGE = ROOT / "docs" / "evaluation.md"
MARKS = re.compile(r"(<!-- real suites: checks -->\n).*?(<!-- /real suites -->)", re.S)
WITH_SOLUTIONS = ("math500", "minerva")
"""Their solutions end in a box."""


def math_checks(data: Path) -> dict[str, Any]:
    """{suite: questions, golds judged right as an answer, reference solutions judged right where they have a box}."""
    from loragate.evaluation.tasks import load_questions, suite

    found: dict[str, Any] = {}
    for task in suite("math"):
        questions = load_questions(task, data / "math").questions
        golds = judged(task, questions, [f"\\boxed{{{question.gold}}}" for question in questions])
        found[task.name] = {
            "questions": len(questions),
            "prompts": sum(prompt_holds(question) for question in questions),
            "golds_judged_right": golds,
            "solutions": None,
            "solutions_judged_right": None,
        }
        if task.name in WITH_SOLUTIONS:
            solutions = [str(question.row["solution"]) for question in questions]
            right = judged(task, questions, solutions)
            found[task.name] |= {"solutions": len(solutions), "solutions_judged_right": right}
        print(task.name, found[task.name], flush=True)
    return found


def prompt_holds(question: Any) -> bool:
    """Whether the prompt carries the row's own question."""
    texts = [question.row.get(name) for name in ("problem", "question")]
    return any(isinstance(text, str) and text.strip() in question.prompt for text in texts)


def judged(task: Any, questions: list[Any], answers: list[str]) -> int:
    """How many of the answers the task's grader takes; those that it does not are printed."""
    from loragate.evaluation.judging import grade_samples, resolve_grader
    from loragate.generation import Sample

    samples = [Sample(place, 0, answer, (0,), "stop", None) for place, answer in enumerate(answers)]
    grades = grade_samples(task, questions, samples, resolve_grader(task))
    for question, grade in zip(questions, grades):
        if not grade.correct:
            print(f"  {task.name} {question.id}: {grade.reason}, gold {question.gold!r}, read {grade.extracted!r}")
    return sum(grade.correct for grade in grades)


def code_checks(data: Path) -> dict[str, Any]:
    """HumanEval's own programs, in a fenced block as a model would answer."""
    from loragate.evaluation.tasks import load_questions, load_task

    task = load_task("humaneval")
    questions = load_questions(task, data / "code" / "HumanEval.jsonl.gz").questions
    rows = [question.row for question in questions]
    answers = [f"```python\n{row['prompt']}{row['canonical_solution']}\n```" for row in rows]
    return {"questions": len(questions), "programs_judged_right": judged(task, questions, answers)}


def write_retention(data: Path, place: Path) -> dict[str, Path]:
    """The retention files with the columns that the suites read: {suite: file or folder}."""
    folder = place / "bbh"
    folder.mkdir(parents=True)
    for file in sorted((data / "retention").glob("bbh_*.json")):
        rows = json.loads(file.read_text(encoding="utf-8"))["examples"]
        write_rows(folder / f"{file.stem.removeprefix('bbh_')}.jsonl", rows)
    lines = (data / "retention" / "mmlu_stem.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [
        {
            "question_id": place_,
            "question": row["question"],
            "options": row["choices"],
            "answer": "ABCD"[row["answer"]],
            "answer_index": row["answer"],
            "category": category(row["type"]),
        }
        for place_, row in enumerate(map(json.loads, lines))
    ]
    write_rows(place / "mmlu_pro.jsonl", rows)
    return {"bbh_zeroshot": folder, "mmlu_pro": place / "mmlu_pro.jsonl"}


def category(subject: str) -> str:
    """The category of MMLU-Pro that a subject of MMLU's STEM questions falls into."""
    known = {"biology": "biology", "chemistry": "chemistry", "physics": "physics", "astronomy": "physics"}
    known |= {"engineering": "engineering", "mathematics": "math", "algebra": "math", "statistics": "math"}
    known |= dict.fromkeys(("computer_science", "computer_security", "machine_learning"), "computer science")
    return next(found for ending, found in known.items() if subject.endswith(ending))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def retention_checks(data: Path) -> dict[str, Any]:
    """Questions of BBH and of MMLU's STEM subjects that the retention suites accept."""
    from loragate.evaluation.tasks import load_questions, load_task

    with tempfile.TemporaryDirectory() as scratch:
        files = write_retention(data, Path(scratch))
        read = {name: load_questions(load_task(name), path) for name, path in files.items()}
    return {
        name: {"questions": len(found.questions), "subsets": len({one.subset for one in found.questions})}
        for name, found in read.items()
    }


def checks_table() -> str:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))["checks"]
    rows = []
    for name, one in found["math"].items():
        right = "" if one["solutions"] is None else f"{one['solutions_judged_right']} of {one['solutions']}"
        golds = f"{one['golds_judged_right']} of {one['questions']}"
        rows.append([name, f"{one['questions']:,}", f"{one['prompts']:,}", golds, right])
    code = found["code"]
    programs = f"{code['programs_judged_right']} of {code['questions']}"
    rows.append(["humaneval", str(code["questions"]), "", "", programs])
    for name, one in found["retention"].items():
        rows.append([f"{name}, {one['subsets']} subsets", f"{one['questions']:,}", "", "", ""])
    head = ["suite", "questions", "prompts that hold their question", "golds judged right", "solutions judged right"]
    return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def filled(text: str) -> str:
    """The page with its table as the results have it."""
    return MARKS.sub(lambda mark: f"{mark[1]}{checks_table()}\n{mark[2]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("check").add_argument("data", type=Path)
    page = parts.add_parser("page")
    page.add_argument("--check", action="store_true", help="change nothing; the exit status tells")
    options = parser.parse_args()
    if options.part == "check":
        found = {"math": math_checks(options.data), "code": code_checks(options.data)}
        checks = {"checks": found | {"retention": retention_checks(options.data)}}
        record = {**checks, "machine": f"{os.cpu_count()} {platform.machine()} CPU cores"}
        RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    else:
        text = PAGE.read_text(encoding="utf-8")
        if options.check:
            sys.exit(filled(text) != text)
        PAGE.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
