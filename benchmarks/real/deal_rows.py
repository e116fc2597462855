"""Makes the questions and rows of this study from their sources; the same sources always give the same files.

    python benchmarks/real/deal_rows.py --svamp SVAMP.json --gsm8k-train train.jsonl --gsm8k-test test.jsonl

Stories with a question that a formula answers, as in examples/word_problems, whose reading of SVAMP this uses (sources and
licences are in that folder's README.md). SVAMP's questions are dealt out anew, whole stories at a time. The answers to 100
questions were known when that example chose formulas as its form: their stories are development questions here, so that
nothing was chosen by an answer to a test question of this study. The rest of SVAMP and questions of one or two steps out of
GSM8K's training split are the pool of rows to train on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "word_problems"))

import make_rows as example

HERE, EXAMPLE = Path(__file__).parent, Path(example.__file__).parent
KNOWN = 100  # test questions of the example that were looked at
DEV, TEST, GSM8K, KEPT = 128, 300, 960, 64
STEP = re.compile(r"([\d.]+)([-+*/])([\d.]+)=([\d.]+)")  # a calculator annotation of GSM8K of one operation


def main() -> None:
    """Write questions/dev.jsonl, test.jsonl, retention.jsonl and pool.jsonl.gz beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("svamp", "gsm8k-train", "gsm8k-test"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    known = [json.loads(line)["id"] for line in (EXAMPLE / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    dev, test, rest = dealt(example.by_story(example.read_svamp(given.svamp)), set(known[:KNOWN]))
    pool = sorted([*map(from_svamp, rest), *short(given.gsm8k_train)[:GSM8K]], key=example.shuffle_key)
    folder = HERE / "questions"
    folder.mkdir(exist_ok=True)
    example.write(folder / "dev.jsonl", dev, ("id", "prompt", "answer"))
    example.write(folder / "test.jsonl", test, ("id", "prompt", "answer"))
    asked = [
        {
            "id": f"gsm8k/test/{number}",
            "prompt": (row := json.loads(line))["question"].strip(),
            "answer": row["answer"].split("####")[1].strip(),
        }
        for number, line in enumerate(given.gsm8k_test.read_text(encoding="utf-8").splitlines())
    ]
    example.write(folder / "retention.jsonl", sorted(asked, key=example.shuffle_key)[:KEPT], ("id", "prompt", "answer"))
    with (folder / "pool.jsonl.gz").open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        file.writelines((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in pool)
    print(f"pool.jsonl.gz: {len(pool)} rows")


def dealt(stories: list[list[dict]], known: set[str]) -> tuple[list[dict], list[dict], list[dict]]:
    """(dev, test, rest) of the questions; stories with a known question are dev's, and no story is in two of them."""
    seen = [story for story in stories if known & {row["id"] for row in story}]
    others = [story for story in stories if not known & {row["id"] for row in story}]
    test, others = example.dealt(others, TEST)
    more, others = example.dealt(others, DEV - sum(map(len, seen)))
    return [row for story in seen for row in story] + more, test, [row for story in others for row in story]


def from_svamp(row: dict) -> dict[str, Any]:
    """A row of the pool: id, prompt, formula, answer, and GSM8K's solution, which SVAMP does not have."""
    formula = re.search(r"\{(.*)\}", row["response"])
    assert formula
    return {"id": row["id"], "prompt": row["prompt"], "formula": formula[1], "answer": row["answer"], "solution": None}


def short(path: Path) -> list[dict[str, Any]]:
    """GSM8K's questions of one annotated step, and of two where the second takes up the first's result once; shuffled."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        solution, answer = (part.strip() for part in row["answer"].split("####"))
        formula = one_formula([STEP.fullmatch(text) for text in re.findall(r"<<(.*?)>>", solution)], answer)
        if formula:
            prompt = f"{row['question'].strip()} {example.ASK}"
            answer = example.shown(Fraction(answer.replace(",", "")))
            rows.append(
                {
                    "id": f"gsm8k/train/{number}",
                    "prompt": prompt,
                    "formula": formula,
                    "answer": answer,
                    "solution": solution,
                }
            )
    return sorted(rows, key=example.shuffle_key)


def one_formula(steps: list[re.Match[str] | None], answer: str) -> str | None:
    """The steps as one formula, or None where they are not such, or do not give the answer."""
    found = [step.groups() for step in steps if step]
    if len(found) != len(steps) or len(found) not in (1, 2):
        return None
    if any(example.operated(left, sign, right) != Fraction(result) for left, sign, right, result in found):
        return None
    if Fraction(found[-1][3]) != Fraction(answer.replace(",", "")):
        return None
    left, sign, right = (one if one in "+-*/" else example.shown(Fraction(one)) for one in found[-1][:3])
    if len(found) == 2:
        (a, first_sign, b), result = found[0][:3], found[0][3]
        first = f"({example.shown(Fraction(a))} {first_sign} {example.shown(Fraction(b))})"
        taken = [Fraction(one) == Fraction(result) for one in (found[1][0], found[1][2])]
        if sum(taken) != 1:
            return None
        left, right = (first, right) if taken[0] else (left, first)
    return f"{left} {sign} {right}"


if __name__ == "__main__":
    main()
