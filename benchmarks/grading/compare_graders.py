"""Compare the math graders on the hand-made pairs of `pairs.jsonl`, and on the answers by class of notation that the tests hold.

    python benchmarks/grading/compare_graders.py

writes `benchmarks/results/grading.json` and prints a table by difficulty and, for the default grader and math-verify, one by
class. `--show NAME` lists the pairs that a grader judges wrongly (`--split dev` leaves the held-out ones unseen). `--pairs FILE`
judges pairs of your own, one JSON object a line with response, gold, expected and category.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from loragate.evaluation.grading import MATH_GRADERS, GradingPool
from loragate.files import write_json

PAIRS = Path(__file__).parent / "pairs.jsonl"
CLASSES = Path(__file__).parents[2] / "tests" / "evaluation" / "grading" / "answers.yaml"
RESULTS = Path(__file__).parents[1] / "results" / "grading.json"


def load_pairs(path: Path = PAIRS) -> list[dict[str, Any]]:
    """The rows of the pair list."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def load_classes(path: Path = CLASSES) -> list[dict[str, Any]]:
    """The answers by class, as pairs."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        {"category": name, "gold": gold, "response": f"So the answer is $\\boxed{{{answer}}}$.", "expected": verdict}
        for name, golds in rows.items()
        for gold, right, wrong in golds
        for verdict, answers in ((True, right), (False, wrong))
        for answer in answers
    ]


def by_class(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pairs, and by grader how many were judged rightly, accepted or rejected falsely; by category and in all."""
    verdicts = {name: judge_all(pairs, name)[0] for name in ("default", "math_verify")}
    judged = [
        {"difficulty": pair["category"], "split": "", "correct": pair["expected"]} for pair in pairs
    ]  # fmt: skip
    return [row for row in table(judged, verdicts) if not row["group"].startswith("split")]


def print_classes(rows: list[dict[str, Any]]) -> None:
    """One line a class: right (false accepts, false rejects)."""
    print("| class | pairs | default | math_verify |", "|---|---|---|---|", sep="\n")
    for row in rows:
        cells = (
            f"{row[n]['right']} ({row[n]['false_accepts']}, {row[n]['false_rejects']}) |"
            for n in ("default", "math_verify")
        )
        print(f"| {row['group']} | {row['pairs']} |", *cells)


def judge_all(
    pairs: list[dict[str, Any]], name: str, workers: int | None = None
) -> tuple[list[bool], list[str], float]:
    """Verdict and reason on every pair, and the seconds it took, start of the workers included."""
    started = time.perf_counter()
    with GradingPool(name, workers) as pool:
        answers = [(pair["response"], pair["gold"]) for pair in pairs]
        grades = pool.grade(answers, tolerances=[pair.get("tolerance") for pair in pairs])
    return [grade.correct for grade in grades], [grade.reason for grade in grades], time.perf_counter() - started


def table(pairs: list[dict[str, Any]], verdicts: dict[str, list[bool]]) -> list[dict[str, Any]]:
    """One row per difficulty group, split, and in all: pairs and, by grader, how many were judged rightly."""
    groups = list(dict.fromkeys(pair["difficulty"] for pair in pairs))
    rows = []
    selections = [(group, [pair["difficulty"] == group for pair in pairs]) for group in groups]
    selections += [(f"split: {name}", [pair["split"] == name for pair in pairs]) for name in ("dev", "held_out")]
    selections += [("all", [True] * len(pairs))]
    for name, chosen in selections:
        row: dict[str, Any] = {"group": name, "pairs": sum(chosen)}
        for grader, verdict in verdicts.items():
            kept = [(said, pair["correct"]) for said, pair, use in zip(verdict, pairs, chosen) if use]
            row[grader] = {
                "right": sum(said == truth for said, truth in kept),
                "false_accepts": sum(said and not truth for said, truth in kept),
                "false_rejects": sum(truth and not said for said, truth in kept),
            }
        rows.append(row)
    return rows


def minerva_ceiling(pairs: list[dict[str, Any]], verdicts: dict[str, list[bool]]) -> dict[str, int]:
    """How many right answers written a x 10^b each grader accepts where the gold is in e-notation."""
    chosen = [
        index
        for index, pair in enumerate(pairs)
        if pair["correct"] and "e" in pair["gold"] and pair["gold"].replace("e", "").replace("-", "").replace(".", "").isdigit()
        and "10^" in pair["response"]
    ]  # fmt: skip
    return {
        "pairs": len(chosen),
        **{name: sum(verdict[index] for index in chosen) for name, verdict in verdicts.items()},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=list(MATH_GRADERS))
    parser.add_argument("--split", choices=["dev", "held_out"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pairs", type=Path)
    options = parser.parse_args()
    if options.pairs:
        print_classes(by_class(load_pairs(options.pairs)))
        return
    pairs = [pair for pair in load_pairs() if options.split in (None, pair["split"])]
    if options.show:
        verdicts, reasons, _ = judge_all(pairs, options.show)
        for pair, said, reason in zip(pairs, verdicts, reasons):
            if said != pair["correct"]:
                print(pair["id"], pair["split"], f"should be {pair['correct']}, said {said} ({reason})", sep="  ")
                print("     ", repr(pair["gold"]), "<-", repr(pair["response"]), pair["note"])
        return
    judged = {name: judge_all(pairs, name) for name in MATH_GRADERS}
    verdicts_by = {name: verdicts for name, (verdicts, _, _) in judged.items()}
    rows = table(pairs, verdicts_by)
    print("| difficulty | pairs | default | math_verify |", "|---|---|---|---|", sep="\n")
    for row in rows:
        print(f"| {row['group']} | {row['pairs']} |", *(f"{row[name]['right']} |" for name in judged))
    classes = by_class(load_classes())
    print_classes(classes)
    ceiling = minerva_ceiling(pairs, verdicts_by)
    print("e-notation golds, right answers written a x 10^b, accepted:", ceiling)
    if options.split is None:
        result = {
            "command": "python benchmarks/grading/compare_graders.py",
            "versions": {name: version(name) for name in ("math-verify", "latex2sympy2_extended", "sympy")},
            "table": rows,
            "classes": classes,
            "minerva_ceiling": ceiling,
            "wrong": {
                name: [pair["id"] for pair, said in zip(pairs, verdicts) if said != pair["correct"]]
                for name, verdicts in verdicts_by.items()
            },
        }
        write_json(options.out, result)
    for name, (_, _, seconds) in judged.items():
        print(f"{name}: {seconds:.1f} s")


if __name__ == "__main__":
    main()
