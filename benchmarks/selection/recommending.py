"""How good is the recommended setting, how often is it worse than the adapter at its best temperature, and what does it cost?

    python benchmarks/selection/recommending.py [--worlds 120] [--seed 13] [--out benchmarks/results/selection_recommending.json]

Two kinds of evidence. Simulated worlds have a known truth: questions differ in difficulty, models in what they are good at,
cooler sampling helps or does not, and 40 settings (adapter, base, three λ, five gates, each at T = 1, 0.6, 0.3 and greedy)
are asked 64, 128 or 256 questions × 4 samples. The study's committed verdicts (49 cells of small worlds) are real: half of
a cell's questions is the probe, the other half says what the pick is worth, and back; gates were sampled at T = 1 only.
The cells of the study on the real model (benchmarks/real) have everything at all four temperatures: 128 of a cell's questions
are the probe and the other 300 the truth, dealt 200 times.

Regret is what the best setting has more than the pick, in points; "harmful" is a pick of another kind than the adapter that
is more than one point below the adapter at its best temperature. Rules of comparison: the former choice (adapter or gates,
both at T = 1, highest score), the adapter greedily, the adapter at its best temperature on the probe, and the highest score
of all settings. "Best expected" takes the setting with the highest expected score where everything was asked, and knows no
simplicity: what the same answers allow. Its loss on the study's cells is mostly the noise of the other half; "noise" there is
the loss of a pick that is the best of all questions. Everything depends on --seed alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

import numpy as np
from measure import RECORDS, read_design
from scipy.special import expit, ndtr

from loragate.gates.range import Range
from loragate.selection.candidate import ADAPTER, BASE, CONSTANT, GATES, Candidate
from loragate.selection.recommend import (
    FINALISTS,
    SURE,
    Recommendation,
    believe,
    halve,
    most_answers,
    recommend,
)
from report import read, settings

TEMPERATURES = (1.0, 0.6, 0.3, 0.0)
COOLING = {1.0: 0.0, 0.6: 0.5, 0.3: 0.8, 0.0: 0.9}
SITUATIONS = {
    "all alike": {"base": 0.0, "constant": 0.0, "gates": 0.0, "apart": 0.0},
    "gates help": {"base": -1.0, "constant": -0.2, "gates": 0.8, "apart": 0.4},
    "open": {"base": -1.0, "constant": -0.2, "gates": 0.0, "apart": 0.4},
    "gates harm": {"base": -1.0, "constant": -0.2, "gates": -0.5, "apart": 0.4},
}
SAMPLES = 4
DIFFICULTY = (-0.5, 1.6)  # mean and standard deviation over questions, in log-odds
OF_MODEL, OF_SETTING = 0.6, 0.7  # standard deviations of how a model, and a setting, gets along with a question
STUDY = Path("benchmarks/results/study_verdicts.jsonl.gz")
DEALS, PROBE = 200, 128  # of a real cell's 428 questions
Scores = dict[Candidate, np.ndarray]
Splits = list[tuple[np.ndarray, np.ndarray]]
ALONE = {t: Candidate(None, ADAPTER, temperature=t) for t in TEMPERATURES}


def world(kind: str, generator: np.random.Generator) -> dict[Candidate, float]:
    """{setting: its log-odds beside the adapter's at T = 1}."""
    at = SITUATIONS[kind]
    slope = generator.normal(0.8, 0.6)
    models = [(Candidate(None, ADAPTER), 0.0, slope)]
    models += [(Candidate(None, BASE), at["base"] + 2 * at["apart"] * generator.normal(), slope)]
    models += [
        (Candidate(None, CONSTANT, scale=value), at["constant"] + at["apart"] * generator.normal(), slope)
        for value in (0.5, 0.75, 1.5)
    ]
    shared = at["gates"] + at["apart"] * generator.normal()
    for upper in range(2, 7):  # gates by entropy have had their cooling already
        lost = abs(generator.normal(0.5, 0.3)) if at["apart"] else 0.0
        models += [(Candidate(Range(0, upper)), shared + at["apart"] * generator.normal(), slope - lost)]
    return {
        replace(model, temperature=t): offset + own * COOLING[t] for model, offset, own in models for t in TEMPERATURES
    }


def truth_of(offsets: Mapping[Candidate, float]) -> dict[Candidate, float]:
    """Each setting's chance of being right, over all questions."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    mean, spread = DIFFICULTY[0], float(np.sqrt(DIFFICULTY[1] ** 2 + OF_MODEL**2 + OF_SETTING**2))
    return {
        setting: float(expit(mean + offset + spread * nodes) @ weights / weights.sum())
        if setting.temperature
        else float(ndtr((mean + offset) / spread))
        for setting, offset in offsets.items()
    }


def draw(offsets: Mapping[Candidate, float], questions: int, generator: np.random.Generator) -> Scores:
    """Verdicts [questions, samples] of every setting on new questions, the same ones for all."""
    difficulty = generator.normal(*DIFFICULTY, questions)
    # not a set, whose order would differ from process to process
    of_model = {
        model: generator.normal(0, OF_MODEL, questions) for model in dict.fromkeys(one.model for one in offsets)
    }
    found = {}
    for setting, offset in offsets.items():
        odds = difficulty + of_model[setting.model] + offset + generator.normal(0, OF_SETTING, questions)
        chance = expit(odds) if setting.temperature else (odds > 0).astype(float)
        samples = SAMPLES if setting.temperature else 1
        found[setting] = (generator.random((questions, samples)) < chance[:, None]).astype(float)
    return found


def former(scores: Scores, temperature: float = 1.0) -> Candidate:
    """The adapter or gates, whichever scores highest at one temperature; the adapter wins ties."""
    warm = [setting for setting in scores if setting.temperature == temperature and setting.kind in (ADAPTER, GATES)]
    return max(warm, key=lambda setting: scores[setting].mean())


def cooled(scores: Scores) -> Candidate:
    """The adapter at the temperature with the highest score."""
    return max((s for s in scores if s.kind == ADAPTER), key=lambda setting: scores[setting].mean())


def expected(scores: Scores) -> Candidate:
    """The setting with the highest expected score."""
    belief = believe(scores)
    return belief.settings[int(np.argmax(belief.mean))]


def halved(scores: Scores) -> tuple[Recommendation, int]:
    """The recommendation after sequential halving, and how many answers were asked in all."""
    asked: dict[Candidate, int] = {}

    def ask(setting: Candidate, count: int) -> np.ndarray:
        asked[setting] = count * scores[setting].shape[1]
        return scores[setting][:count]

    found = recommend(halve(list(scores), ask, max(map(len, scores.values()))))
    return found, sum(asked.values())


RULES: dict[str, Callable[[Scores], Candidate]] = {
    "former choice at T = 1": former,
    "adapter, greedy": lambda scores: ALONE[0.0],
    "adapter at its best temperature": cooled,
    "highest score of all": lambda scores: max(scores, key=lambda setting: scores[setting].mean()),
    "best expected, everything asked": expected,
    "recommended, everything asked": lambda scores: recommend(scores).setting,
}
HALVED = "recommended"


def score(pick: Candidate, truth: Mapping[Candidate, float]) -> tuple[float, float, float]:
    """(regret, loss against the adapter at its best temperature, whether the pick is harmful)."""
    adapter = max(value for setting, value in truth.items() if setting.kind == ADAPTER)
    loss = adapter - truth[pick]
    return max(truth.values()) - truth[pick], max(loss, 0.0), float(pick.kind != ADAPTER and loss > 0.01)


def summary(found: list[tuple[float, float, float]]) -> dict[str, float]:
    """Means over worlds; regret and loss in points, harm in percent."""
    regret, loss, harm = np.array(found).T * 100
    return {
        "regret_mean": round(float(regret.mean()), 2),
        "regret_p95": round(float(np.quantile(regret, 0.95)), 1),
        "regret_worst": round(float(regret.max()), 1),
        "below_adapter_mean": round(float(loss.mean()), 2),
        "below_adapter_worst": round(float(loss.max()), 1),
        "harmful_percent": round(float(harm.mean()), 1),
    }


def simulated(worlds: int, questions: int, seed: int) -> dict[str, Any]:
    """{situation: {rule: summary}} with a known truth."""
    result: dict[str, Any] = {}
    for number, kind in enumerate(SITUATIONS):
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in [*RULES, HALVED]}
        answers, held, most = [], [], 0
        for index in range(worlds):
            generator = np.random.default_rng((seed, number, index))
            offsets = world(kind, generator)
            truth = truth_of(offsets)
            scores = draw(offsets, questions, generator)
            for name, rule in RULES.items():
                found[name].append(score(rule(scores), truth))
            advice, asked = halved(scores)
            most = most_answers(len(scores), questions, SAMPLES)
            assert asked <= most
            found[HALVED].append(score(advice.setting, truth))
            answers.append(asked)
            for step in advice.steps:
                difference = truth[advice.best[step.kind]] - truth[advice.best[step.against]]
                held.append(step.low <= difference <= step.high)
        result[kind] = {name: summary(values) for name, values in found.items()}
        whole = questions * SAMPLES  # of one setting
        result[kind][HALVED] |= {
            "settings_asked": round(float(np.mean(answers)) / whole, 1),
            "settings_at_most": round(most / whole, 1),
            "coverage_percent": round(100 * float(np.mean(held)), 1),
        }
    return result


def study_cells() -> dict[str, Scores]:
    """{cell: {setting: verdicts [questions, samples]}} of the committed study."""
    ranges = ("[-3,1]", "[-6,3]", "[0,1]", "[0,6]")
    settings = {
        "LoRA": ALONE[1.0],
        "LoRA T=0.6": ALONE[0.6],
        "LoRA T=0.3": ALONE[0.3],
        "LoRA greedy": ALONE[0.0],
    }
    settings |= {"base": Candidate(None, BASE, temperature=1.0)}
    settings |= {f"λ={scale:g}": Candidate(None, CONSTANT, temperature=1.0, scale=scale) for scale in (-0.5, 0.5, 1.5)}
    settings |= {f"SCALE {bounds}": Candidate(Range.parse(bounds), temperature=1.0) for bounds in ranges}
    cells: dict[str, Scores] = {}
    with gzip.open(STUDY, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            if setting := settings.get(row["method"]):
                verdicts = np.array([int(mark) for mark in row["verdicts"]["test"]], dtype=float)
                cells.setdefault(row["cell"], {})[setting] = verdicts.reshape(-1, row["samples"]["test"])
    return cells


def real_cells() -> dict[str, Scores]:
    """{cell: {setting: verdicts}} of the study on the real model, development and test questions together.

    Of models that were asked at all temperatures, in cells with gates.
    """
    design = read_design()
    cells = {}
    for name, lines in read(RECORDS, design).items():
        of_dev, of_test = (settings(lines, design, split) for split in ("dev", "test"))
        both = {one: np.concatenate([of_dev[one], of_test[one]]) for one in of_dev if one in of_test}
        whole = {one: scores for one, scores in both.items() if sum(one.model == other.model for other in both) == 4}
        if any(one.kind == GATES for one in whole):
            cells[name] = whole
    return cells


def halves(count: int, seed: int) -> Splits:
    """Half of the questions as probe and the other half as truth, and back."""
    order = np.random.default_rng((seed, count)).permutation(count)
    return [(order[: count // 2], order[count // 2 :]), (order[count // 2 :], order[: count // 2])]


def dealt(count: int, seed: int) -> Splits:
    """`DEALS` random probes of `PROBE` questions, all others as truth."""
    generator = np.random.default_rng((seed, count))
    orders = [generator.permutation(count) for _ in range(DEALS)]
    return [(order[:PROBE], order[PROBE:]) for order in orders]


def measured(cells: Mapping[str, Scores], splits: Callable[[int, int], Splits], seed: int) -> dict[str, Any]:
    """{temperature of use: {rule: summary}} over cells, each split into probe and truth."""
    heats = [heat for heat in TEMPERATURES if all(any(_gates_at(one, heat) for one in cell) for cell in cells.values())]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (*RULES, HALVED, "noise")}
    fixed: dict[float, dict[str, list[tuple[float, float, float]]]] = {
        heat: {name: [] for name in ("former choice", HALVED)} for heat in heats
    }
    for scores in cells.values():
        for probe, test in splits(_questions(scores), seed):
            asked = {setting: values[probe] for setting, values in scores.items()}
            truth = {setting: float(values[test].mean()) for setting, values in scores.items()}
            for name, rule in RULES.items():
                found[name].append(score(rule(asked), truth))
            found[HALVED].append(score(halved(asked)[0].setting, truth))
            found["noise"].append(score(max(scores, key=lambda setting: scores[setting].mean()), truth))
            for heat, rules in fixed.items():  # where the temperature of use is fixed
                own = {setting: values for setting, values in asked.items() if setting.temperature == heat}
                there = {setting: truth[setting] for setting in own}
                rules["former choice"].append(score(former(own, heat), there))
                rules[HALVED].append(score(halved(own)[0].setting, there))
    return {
        "cells": len(cells),
        "questions": sorted({len(probe) for one in cells.values() for probe, _ in splits(_questions(one), seed)}),
        "any temperature": {name: summary(values) for name, values in found.items()},
        **{
            f"T = {heat:g} only": {name: summary(values) for name, values in rules.items()}
            for heat, rules in fixed.items()
        },
    }


def _questions(scores: Scores) -> int:
    return len(next(iter(scores.values())))


def _gates_at(setting: Candidate, heat: float) -> bool:
    return setting.kind == GATES and setting.temperature == heat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/selection_recommending.json"))
    arguments = parser.parse_args()
    result = {
        "settings": {"sure": SURE, "finalists": FINALISTS, "samples": SAMPLES},
        "worlds": arguments.worlds,
        "seed": arguments.seed,
        "simulated": {count: simulated(arguments.worlds, count, arguments.seed) for count in (64, 128, 256)},
        "measured": measured(study_cells(), halves, arguments.seed),
        "real model": {name: measured({name: scores}, dealt, arguments.seed) for name, scores in real_cells().items()},
    }
    arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for title, table in [*((f"{n} questions, {k}", t) for n, by in result["simulated"].items() for k, t in by.items())]:
        print(f"\n{title}")
        for name, row in table.items():
            print(f"  {name:34s}", *(f"{key} {value}" for key, value in row.items()))
    for cells, tables in {"measured": result["measured"], **result["real model"]}.items():
        for title, table in tables.items():
            print(f"\n{cells}, {title}", "" if isinstance(table, dict) else table)
            for name, row in table.items() if isinstance(table, dict) else ():
                print(f"  {name:34s}", *(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
