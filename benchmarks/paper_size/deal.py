"""Makes questions/ from the published files; the same files always give the same questions.

    python benchmarks/paper_size/deal.py FOLDER

FOLDER holds `word_problems/gsm8k_train.jsonl` and `gsm8k_test.jsonl` (openai/grade-school-math), `word_problems/svamp.json`
(arkilpatel/SVAMP), `math/math500.jsonl` and `retention/mmlu_stem.jsonl` (copies of MATH-500 and MMLU in yongliang-wu/DFT) and
`code/HumanEval.jsonl.gz` (openai/human-eval); all MIT. Of each set the first questions by the SHA-256 of their id are taken.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COUNTS = {"gsm8k_train": 1024, "gsm8k": 500, "svamp": 200, "math500": 100, "humaneval": 164, "mmlu_stem": 300}
ANNOTATION = re.compile(r"<<.*?>>")  # of GSM8K's calculator


def gsm8k(path: Path, split: str) -> list[dict[str, Any]]:
    """Questions with their results, and their solutions without the calculator's annotations."""
    rows = []
    for number, row in enumerate(read(path)):
        solution, answer = (part.strip() for part in ANNOTATION.sub("", row["answer"]).split("####"))
        answer = answer.replace(",", "")
        rows.append({"id": f"gsm8k/{split}/{number}", "question": row["question"].strip(), "answer": answer})
        if split == "train":
            rows[-1]["solution"] = solution
    return rows


def svamp(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [
        {
            "id": f"svamp/{row['ID']}",
            "question": f"{row['Body'].strip().rstrip('.')}. {row['Question'].strip()}",
            "answer": f"{float(row['Answer']):.15g}",
        }
        for row in rows
    ]


def mmlu_stem(path: Path) -> list[dict[str, Any]]:
    return [
        {
            "id": f"mmlu/{row['type']}/{number}",
            "question": row["question"],
            "choices": row["choices"],
            "answer": "ABCD"[row["answer"]],
        }
        for number, row in enumerate(read(path))
    ]


def read(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def first(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first so many by the SHA-256 of their id."""

    def key(row: dict[str, Any]) -> str:
        name = row.get("id") or row.get("unique_id") or row.get("task_id") or row["problem"]
        return hashlib.sha256(str(name).encode()).hexdigest()

    return sorted(rows, key=key)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    sets = {
        "gsm8k_train": gsm8k(folder / "word_problems" / "gsm8k_train.jsonl", "train"),
        "gsm8k": gsm8k(folder / "word_problems" / "gsm8k_test.jsonl", "test"),
        "svamp": svamp(folder / "word_problems" / "svamp.json"),
        "math500": read(folder / "math" / "math500.jsonl"),
        "humaneval": read(folder / "code" / "HumanEval.jsonl.gz"),
        "mmlu_stem": mmlu_stem(folder / "retention" / "mmlu_stem.jsonl"),
    }
    (HERE / "questions").mkdir(exist_ok=True)
    for name, rows in sets.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in first(rows, COUNTS[name]))
        (HERE / "questions" / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{name}: {COUNTS[name]} of {len(rows)}")


if __name__ == "__main__":
    main()
