"""What choosing by agreement, without labels, gives and takes: against the adapter at T = 0.3, on the cells of the real model.

    python benchmarks/selection/without_labels.py [--seed 13] [--out benchmarks/results/selection_without_labels.json]

Where nobody gives labels, gates and adapter are compared at one temperature by how often they give the adapter's own usual
answer. Which temperature? Somebody who trains nothing can always sample the adapter at T = 0.3, so that is what a choice is
held against, whatever temperature it was made at. The cells are those of the study on the real model (benchmarks/real), with the
adapter and gates in [0,1] and [−6,3] where both were asked: 128 of a cell's 428 questions are the probe and the others the
truth, dealt 200 times. The adapter's greedy answer stands in for its majority, which the package takes of 8 samples at T = 0.3:
the study drew two, and they are needed as the adapter's own answers. Two formulas agree if they have one value. Where the
adapter remains it is used at the temperature of the comparison, "then cool" at T = 0.3. No model is loaded.
"""

from __future__ import annotations

import argparse
import ast
import operator
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

import numpy as np
from measure import RECORDS, read_design, situation_of
from recommending import dealt

from loragate.files import write_json
from loragate.gates.range import Range
from loragate.selection.candidate import ADAPTER, Candidate
from loragate.selection.recommend import recommend
from report import read, scores

ALONE = Candidate(None, ADAPTER)
COOL, HEATS, SPLITS = 0.3, (1.0, 0.6, 0.3), ("dev", "test")
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
Answer = float | str | None


def value(node: ast.AST) -> float:
    """What a formula of +, −, × and / comes to; ValueError for anything else."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    raise ValueError(ast.dump(node))


def read_answer(text: str) -> Answer:
    """The value of the last formula in \\boxed{}, its text where it has none, None where there is none."""
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    if not found:
        return None
    formula = found[-1].strip().replace(",", "")
    try:
        return round(value(ast.parse(formula, mode="eval").body), 6)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError):
        return formula


def cells() -> dict[str, dict[Candidate, tuple[np.ndarray, np.ndarray]]]:
    """Of cells with gates: {setting: (agreement with the adapter's greedy answer, verdicts), both [questions, samples]}."""
    design, found = read_design(), {}
    ranges = {name: design["methods"][name]["calibrate"]["range"] for name in design["automatic"]}
    models = {"LoRA": ALONE} | {name: Candidate(Range.parse(bounds)) for name, bounds in ranges.items()}
    for cell, lines in read(RECORDS, design).items():
        if "base" in situation_of(cell, design):
            continue  # of another family; the record averages SmolLM2's cells
        whole = {
            replace(model, temperature=heat): [lines[name, f"{split} T={heat:g}"] for split in SPLITS]
            for name, model in models.items()
            for heat in (*HEATS, 0.0)
            if all((name, f"{split} T={heat:g}") in lines for split in SPLITS)
        }
        said = {
            one: [[read_answer(text) for text in row] for line in two for row in line["texts"]]
            for one, two in whole.items()
        }
        if any(one.range is not None for one in whole):
            usual = [row[0] for row in said[replace(ALONE, temperature=0.0)]]
            verdicts = {one: np.concatenate([scores(line) for line in two]) for one, two in whole.items()}
            found[cell] = {one: (agreement(said[one], usual), verdicts[one]) for one in whole}
    return found


def agreement(said: list[list[Answer]], usual: list[Answer]) -> np.ndarray:
    """1.0 where a sample gives the usual answer, [questions, samples]."""
    return np.array(
        [[float(one is not None and one == own) for one in row] for row, own in zip(said, usual, strict=True)]
    )


def judged(seed: int) -> dict[str, Any]:
    """For each temperature of comparison: how often gates are taken, and points against the adapter at T = 0.3."""
    found: dict[str, Any] = {}
    everything = cells()
    for heat in HEATS:
        rows = {}
        for name, tables in everything.items():
            taken, gains, alone = [], [], []
            for probe, test in dealt(len(next(iter(tables.values()))[0]), seed):
                pick = recommend(
                    {one: agree[probe] for one, (agree, _) in tables.items() if one.temperature == heat}
                ).setting
                cool = tables[replace(ALONE, temperature=COOL)][1][test].mean()
                taken.append(pick.range is not None)
                gains.append(100 * (tables[pick][1][test].mean() - cool))
                alone.append(100 * (tables[replace(ALONE, temperature=heat)][1][test].mean() - cool))
            mine, all_ = np.array(taken), np.array(gains)
            cooled = np.where(mine, all_, 0.0)
            rows[name] = {
                "gates_taken_percent": round(100 * float(mine.mean()), 1),
                "points": round(float(all_.mean()), 1),
                "points_then_cool": round(float(cooled.mean()), 1),
                "worst_then_cool": round(float(cooled.min()), 1),
                "harmful_then_cool_percent": round(100 * float((cooled < -1).mean()), 1),
                "adapter_alone_points": round(float(np.mean(alone)), 1),
            }
        table = list(rows.values())
        means = {key: round(float(np.mean([row[key] for row in table])), 1) for key in table[0]}
        worst = min(row["worst_then_cool"] for row in table)
        found[f"T={heat:g}"] = {**means, "worst_then_cool": worst, "cells": rows}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/selection_without_labels.json"))
    given = parser.parse_args()
    found = {"seed": given.seed, **judged(given.seed)}
    write_json(given.out, found)
    for heat, row in found.items():
        if isinstance(row, dict):
            print(heat, {key: value for key, value in row.items() if key != "cells"})
            for name, one in row["cells"].items():
                print("   ", name, one)


if __name__ == "__main__":
    main()
