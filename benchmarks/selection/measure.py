"""How good is what the selection rule takes, how often is it worse than the adapter at its best temperature, what does it cost?

    python benchmarks/selection/measure.py [--seed 29] [--worlds 120]

No model is loaded. In every cell a dev set is dealt, each rule picks by its scores, and the pick is judged by other questions:

- *alike*: nothing is better than the adapter, and everything that is taken is taken by chance.
- *simulated*: worlds with a known truth. Questions differ in difficulty, models in what they are good at, cooler sampling helps
  or does not; 40 labels (adapter, base, three scales, five gates, at T = 1, 0.6, 0.3 and greedily), 4 samples a question.
- *real*: the cells of benchmarks/real with gates, 128 of 428 questions as dev set, 200 times. One kind of questions.
- *small*, *objectives*: small models, all labels at all temperatures: 128 of 256 dev questions and 160 test questions; 128 of 528.
- *fine-tunes*: the 49 cells of benchmarks/study, half of 120 questions as dev set. Gates and base were sampled at T = 1 alone.
- *T = 1*: 18 situations of small models, and one made so that the adapter's majority is wrong, in which all labels have T = 1.
- *other kind*: real cells that were also asked another kind of questions, greedily. The rule sees a dev set without it, or with
  it in the share of the rows that the adapter was trained on.

Regret is what the best label has more than the pick, in points; *worst* is the largest of a deal. A pick is *harmful* if it is no
form of the adapter alone and more than a point below the adapter at its best temperature. *Cost* is in whole variants: all
questions of the dev set, four samples. Everything depends on --seed alone. Writes benchmarks/results/selection.json and the
tables of README.md beside this file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, ndtr, ndtri

from loragate.selection.select import TEMPERATURES, THRESHOLD, select

Label = tuple[str, float]
"""(variant, temperature); 0.0 is greedy."""

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
RECORDS = HERE.parent / "real" / "records"
ADAPTER = "adapter"
HEATS = (0.0, *reversed(TEMPERATURES))
COOL: Label = (ADAPTER, 0.0)
DEALS, DEV = 200, 128
LONGER = 0.6  # share of the real study's training rows that are of the other kind
Scores = dict[Label, np.ndarray]
"""{label: verdicts [questions, samples]}"""
Found = dict[str, list[tuple[Label, float, float, float]]]
"""{rule: (pick, regret, harmful, cost) of each deal}"""


# rules: scores of everything to the pick and what had to be evaluated for it


def picked(scores: Scores, asked: Iterable[Label], baseline: Label = COOL, threshold: float = THRESHOLD) -> Label:
    """What the package's `select` takes by the scores of what was asked."""
    by_name = {shown(label): label for label in asked}
    given = {name: scores[label] for name, label in by_name.items()}
    return by_name[select(given, shown(baseline), threshold=threshold).label]


def staged(scores: Scores) -> tuple[Label, list[Label]]:
    """The rule of the package; a variant that has no greedy answers counts as it was sampled."""
    coolest = {name: min(heat for who, heat in scores if who == name) for name, _ in scores}
    best = max(coolest.items(), key=lambda label: float(scores[label].mean()))[0]
    later = [(name, heat) for name in (best, ADAPTER) for heat in TEMPERATURES if (name, heat) in scores]
    asked = list(dict.fromkeys([*coolest.items(), *later]))
    return picked(scores, asked), asked


def staged_bonferroni(scores: Scores) -> tuple[Label, list[Label]]:
    """The same with 1.28, the z of 10 %, replaced by that of 10 % divided by the number of comparisons."""
    asked = staged(scores)[1]
    return picked(scores, asked, threshold=bonferroni(len(asked) - 1)), asked


def bonferroni(comparisons: int) -> float:
    return max(THRESHOLD, float(-ndtri(0.1 / max(comparisons, 1))))


def greedy_only(scores: Scores) -> tuple[Label, list[Label]]:
    asked = [label for label in scores if label[1] == 0]
    return picked(scores, asked), asked


def everything(scores: Scores) -> tuple[Label, list[Label]]:
    return picked(scores, scores), list(scores)


def highest(scores: Scores) -> tuple[Label, list[Label]]:
    return max(scores, key=lambda label: scores[label].mean()), list(scores)


def highest_hot(scores: Scores) -> tuple[Label, list[Label]]:
    hot = [label for label in scores if label[1] == 1]
    return max(hot, key=lambda label: scores[label].mean()), hot


def adapter_cooled(scores: Scores) -> tuple[Label, list[Label]]:
    alone = [label for label in scores if label[0] == ADAPTER]
    return max(alone, key=lambda label: scores[label].mean()), alone


RULES: dict[str, Callable[[Scores], tuple[Label, list[Label]]]] = {
    "staged (the rule)": staged,
    "staged, z by Bonferroni": staged_bonferroni,
    "greedy answers only, z ≥ 1.28": greedy_only,
    "everything evaluated, z ≥ 1.28": everything,
    "adapter, greedily": lambda scores: (COOL, []),
    "adapter at its best temperature": adapter_cooled,
    "highest mean of everything": highest,
    "highest mean at T = 1": highest_hot,
}


def judged(found: Found, dev: Scores, truth: Mapping[Label, float]) -> None:
    """Add what every rule picks by `dev`, judged by `truth`."""
    questions = len(dev[COOL])
    alone = max(value for (name, _), value in truth.items() if name == ADAPTER)
    best = max(truth.values())
    for name, rule in RULES.items():
        pick, asked = rule(dev)
        harm = pick[0] != ADAPTER and alone - truth[pick] > 0.01
        cost = sum(dev[one].size for one in asked) / (4 * questions)
        found.setdefault(name, []).append((pick, best - truth[pick], float(harm), cost))


def summary(found: Found) -> dict[str, Any]:
    """Means over deals: regret in points, harm in percent, cost in whole variants; how often the pick is not the adapter."""
    result = {}
    for name, rows in found.items():
        _, regret, harm, cost = zip(*rows, strict=True)
        kinds = Counter(kind_of(pick[0]) for pick, *_ in rows)
        result[name] = {
            "regret": round(100 * float(np.mean(regret)), 2),
            "worst": round(100 * max(regret), 1),
            "harmful_percent": round(100 * float(np.mean(harm)), 1),
            "cost": round(float(np.mean(cost)), 1),
            "taken_percent": {kind: round(100 * count / len(rows), 1) for kind, count in sorted(kinds.items())},
        }
    return result


def averaged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Mean over cells that count the same; worst of all."""
    result = {}
    for name in next(iter(parts.values())):
        rows = [part[name] for part in parts.values()]
        means = {
            key: round(float(np.mean([row[key] for row in rows])), 2) for key in ("regret", "harmful_percent", "cost")
        }
        result[name] = {**means, "worst": max(row["worst"] for row in rows)}
    return result


def kind_of(name: str) -> str:
    return name if name in (ADAPTER, "base") else "scale" if name.startswith("λ") else "gates"


def dealt(count: int, seed: int, size: int = DEV) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(dev set, other questions) of `count` questions, `DEALS` times."""
    generator = np.random.default_rng((seed, count))
    for order in [generator.permutation(count) for _ in range(DEALS)]:
        yield order[:size], order[size:]


def of_split(scores: Scores, seed: int, truth: Scores | None = None, size: int = DEV) -> dict[str, Any]:
    """One cell: dev sets dealt from `scores`; the truth is the other questions, or `truth`."""
    found: Found = {}
    for dev, test in dealt(len(scores[COOL]), seed, size):
        others = {label: scores[label][test] for label in scores} if truth is None else truth
        judged(
            found,
            {label: rows[dev] for label, rows in scores.items()},
            {label: float(rows.mean()) for label, rows in others.items()},
        )
    return summary(found)


# simulated worlds

SITUATIONS = {  # log-odds of base, constants and gates beside the adapter's; how far models are apart
    "all alike": (0.0, 0.0, 0.0, 0.0),
    "gates help": (-1.0, -0.2, 0.8, 0.4),
    "open": (-1.0, -0.2, 0.0, 0.4),
    "gates harm": (-1.0, -0.2, -0.5, 0.4),
}
COOLING = {1.0: 0.0, 0.6: 0.5, 0.3: 0.8, 0.0: 0.9}
DIFFICULTY = (-0.5, 1.6)  # mean and standard deviation over questions, in log-odds
OF_MODEL, OF_LABEL = 0.6, 0.7  # standard deviations of how a model, and a label, gets along with a question


def world(situation: str, generator: np.random.Generator) -> dict[Label, float]:
    """{label: its log-odds beside the adapter's at T = 1}."""
    base, constant, gates, apart = SITUATIONS[situation]
    slope = generator.normal(0.8, 0.6)
    models = [(ADAPTER, 0.0, slope), ("base", base + 2 * apart * generator.normal(), slope)]
    models += [(f"λ={value:g}", constant + apart * generator.normal(), slope) for value in (0.5, 0.75, 1.5)]
    shared = gates + apart * generator.normal()
    for upper in range(2, 7):  # gates by entropy have had their cooling already
        lost = abs(generator.normal(0.5, 0.3)) if apart else 0.0
        models.append((f"[0,{upper}]", shared + apart * generator.normal(), slope - lost))
    return {(name, heat): offset + own * COOLING[heat] for name, offset, own in models for heat in reversed(HEATS)}


def truth_of(offsets: Mapping[Label, float]) -> dict[Label, float]:
    """Each label's chance of being right, over all questions."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    mean, spread = DIFFICULTY[0], math.hypot(DIFFICULTY[1], OF_MODEL, OF_LABEL)
    return {
        label: float(expit(mean + offset + spread * nodes) @ weights / weights.sum())
        if label[1]
        else float(ndtr((mean + offset) / spread))
        for label, offset in offsets.items()
    }


def draw(offsets: Mapping[Label, float], questions: int, generator: np.random.Generator) -> Scores:
    """Verdicts of every label on new questions, the same ones for all."""
    difficulty = generator.normal(*DIFFICULTY, questions)
    of_model = {name: generator.normal(0, OF_MODEL, questions) for name in dict.fromkeys(name for name, _ in offsets)}
    found = {}
    for (name, heat), offset in offsets.items():
        odds = difficulty + of_model[name] + offset + generator.normal(0, OF_LABEL, questions)
        chance = expit(odds) if heat else (odds > 0).astype(float)
        found[name, heat] = (generator.random((questions, 4 if heat else 1)) < chance[:, None]).astype(float)
    return found


def simulated(worlds: int, questions: int, seed: int) -> dict[str, Any]:
    """{situation: summary} with a known truth."""
    result = {}
    for number, situation in enumerate(SITUATIONS):
        found: Found = {}
        for index in range(worlds):
            generator = np.random.default_rng((seed, number, index))
            offsets = world(situation, generator)
            judged(found, draw(offsets, questions, generator), truth_of(offsets))
        result[situation] = summary(found)
    return result


def alike(seed: int, worlds: int = 1_000) -> dict[str, Any]:
    """How often, in percent, something else than the adapter is taken where nothing is better.

    The greedy answers of a variant are the adapter's, but for 15 % of the questions, which are answered anew; it is as often right
    as the adapter on average, or 2 points less often.
    """
    result, anew = dict[str, Any](), 0.15
    for questions in (32, 64, 128):
        for variants in (1, 12, 20):
            for worse in (0, 2):
                generator, taken = np.random.default_rng((seed, questions, variants, worse)), np.zeros(2)
                for _ in range(worlds):
                    right = generator.random(questions) < generator.beta(1.2, 1.2, questions)
                    drawn = generator.random((variants, questions)) < anew
                    other = generator.random((variants, questions)) < right.mean() - worse / 100 / anew
                    scores = {COOL: right.astype(float)[:, None]}
                    for number, answers in enumerate(np.where(drawn, other, right).astype(float)):
                        scores[f"variant {number}", 0.0] = answers[:, None]
                    taken += [picked(scores, scores, threshold=z) != COOL for z in (THRESHOLD, bonferroni(variants))]
                shares = [round(100 * count / worlds, 1) for count in taken]
                about = f"{questions} questions, {variants} variants, {worse} points worse"
                result[about] = dict(zip(("z ≥ 1.28", "z by Bonferroni"), shares, strict=True))
    return result


# committed answers


def lines_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def verdicts(text: str, samples: int) -> np.ndarray:
    return np.array([int(mark) for mark in text], dtype=float).reshape(-1, samples)


def of_name(method: str) -> str | None:
    """The variant that a method of the real study is; None for what the package does not choose from."""
    if method == "LoRA":
        return ADAPTER
    if method in ("gates [0,1]", "gates [-6,3]", "gates [0,6]"):
        return method.removeprefix("gates ")
    return method if method == "base" or re.fullmatch(r"λ=[\d.]+", method) else None


def real_cells() -> dict[str, dict[str, Scores]]:
    """{cell: {"dev", "test" or "rest": verdicts}} of models asked at all temperatures, in cells with gates."""
    cells = {}
    for path in sorted(RECORDS.glob("*-?.jsonl.gz")):
        base = "gemma-48" if path.name.startswith("gemma") else "base-48"
        rows = [*lines_of(path), *([] if path.name.startswith("worked") else lines_of(RECORDS / f"{base}.jsonl.gz"))]
        cell: dict[str, Scores] = {"dev": {}, "test": {}, "rest": {}}
        for row in rows:
            split, _, heat = row["what"].partition(" T=")
            if heat and (name := of_name(row["method"])):
                cell[split][name, float(heat)] = verdicts(row["correct"], row["samples"])
        whole = [
            name for name in {name for name, _ in cell["dev"]} if all((name, heat) in cell["dev"] for heat in HEATS)
        ]
        if any(kind_of(name) == "gates" for name in whole):
            for split in ("dev", "test"):
                kept = {label: rows for label, rows in cell[split].items() if label[0] in whole}
                cell[split] = dict(sorted(kept.items(), key=lambda item: (item[0][0] != ADAPTER, item[0])))
            cells[path.name.removesuffix(".jsonl.gz")] = cell
    return cells


def real(cells: Mapping[str, Mapping[str, Scores]], seed: int, size: int = DEV) -> dict[str, Any]:
    return {name: of_split(both(cell), seed, size=size) for name, cell in cells.items()}


def both(cell: Mapping[str, Scores]) -> Scores:
    """Dev and test questions together."""
    return {label: np.concatenate([rows, cell["test"][label]]) for label, rows in cell["dev"].items()}


def own_dev(cells: Mapping[str, Mapping[str, Scores]]) -> dict[str, Any]:
    """What the rule takes by a cell's own 128 dev questions, and what that gives up on its 300 test questions."""
    result = {}
    for name, cell in cells.items():
        pick, _ = staged(cell["dev"])
        truth = {label: float(rows.mean()) for label, rows in cell["test"].items()}
        best = max(truth, key=lambda label: truth[label])
        result[name] = {
            "taken": shown(pick),
            "regret": round(100 * (truth[best] - truth[pick]), 1),
            "best": shown(best),
            "regret_of_adapter_greedily": round(100 * (truth[best] - truth[COOL]), 1),
        }
    return result


def other_kind(cells: Mapping[str, Mapping[str, Scores]], seed: int) -> dict[str, Any]:
    """Greedy picks by dev sets without and with the other kind of questions, judged on either kind and weighed."""
    result = {}
    for name, cell in cells.items():
        rest = cell["rest"]
        scores = {label: rows for label, rows in both(cell).items() if label in rest}
        if COOL not in rest or len(scores) < 2:
            continue
        generator = np.random.default_rng((seed, len(rest[COOL])))
        taken: dict[str, list[tuple[Label, np.ndarray]]] = {"narrow": [], "whole": []}
        for dev, test in dealt(len(scores[COOL]), seed):
            order = generator.permutation(len(rest[COOL]))
            share = round(LONGER * DEV)
            seen, unseen = order[:share], order[share:]
            own = dev[: DEV - share]
            mixed = {label: np.concatenate([rows[own], rest[label][seen]]) for label, rows in scores.items()}
            narrow = {label: rows[dev] for label, rows in scores.items()}
            for way, given in (("narrow", narrow), ("whole", mixed)):
                pick = picked(given, given)
                gaps = [
                    float(table[pick][rows].mean() - table[COOL][rows].mean())
                    for table, rows in ((scores, test), (rest, unseen))
                ]
                taken[way].append((pick, np.array([*gaps, (1 - LONGER) * gaps[0] + LONGER * gaps[1]])))
        result[name] = {"labels": [shown(label) for label in scores]}
        for way, rows in taken.items():
            gains = 100 * np.mean([gain for _, gain in rows], axis=0)
            result[name][way] = {
                "taken_percent": {
                    label: round(100 * count / DEALS, 1)
                    for label, count in Counter(shown(pick) for pick, _ in rows).most_common()
                },
                "against_adapter_greedily": dict(
                    zip(("same_kind", "other_kind", "weighed"), [round(float(gain), 2) for gain in gains])
                ),
            }
    return result


def staged_other_kind(cells: Mapping[str, Mapping[str, Scores]], seed: int) -> dict[str, Any]:
    """What the whole rule takes by dev sets without the other kind, and what the variant has of that kind, greedily."""
    result = {}
    for name, cell in cells.items():
        if COOL not in cell["rest"]:
            continue
        scores, picks = both(cell), Counter[str]()
        for dev, _ in dealt(len(scores[COOL]), seed):
            picks[staged({label: rows[dev] for label, rows in scores.items()})[0][0]] += 1
        right = {who: round(100 * float(rows.mean()), 1) for (who, _), rows in cell["rest"].items()}
        result[name] = {
            "taken_percent": {who: round(100 * count / DEALS, 1) for who, count in picks.most_common()},
            "right_of_the_other_kind": {who: right[who] for who in picks if who in right},
        }
    return result


def small(seed: int) -> dict[str, Any]:
    """Situations of which every label has 256 dev and 160 test questions."""
    cells: dict[str, tuple[Scores, Scores]] = {}
    for row in lines_of(RESULTS / "selection_stopping.jsonl.gz"):
        if row.get("share") != 1:
            continue
        about = row["setting"]
        lower, upper, kind = about["lower"], about["upper"], about["objective"]
        name = {"adapter": ADAPTER, "base": "base", "constant": f"λ={lower:g}"}.get(kind, f"[{lower:g},{upper:g}]")
        heat = about["temperature"]
        for scores, split in zip(cells.setdefault(row["situation"], ({}, {})), ("dev", "test"), strict=True):
            scores[name, heat] = verdicts(row[split], 4 if heat else 1)
    return {name: of_split(dev, seed, test) for name, (dev, test) in cells.items()}


def objectives(seed: int) -> dict[str, Any]:
    """Nine small cells with gates by entropy and by cross-entropy, 528 questions, two samples."""
    names = {
        ADAPTER: ADAPTER,
        "base": "base",
        "gates, entropy": "[entropy]",
        "gates, CE": "[cross-entropy]",
        "λ=0.5": "λ=0.5",
        "λ=1.5": "λ=1.5",
    }
    cells: dict[str, Scores] = {}
    for row in lines_of(RESULTS / "objectives_verdicts.jsonl.gz"):
        if name := names.get(row["contender"]):
            for heat in HEATS:
                text = row["verdicts"][f"dev T={heat:g}"] + row["verdicts"][f"test T={heat:g}"]
                cells.setdefault(row["cell"], {})[name, heat] = verdicts(text, 2 if heat else 1)
    return {name: of_split(scores, seed) for name, scores in cells.items()}


def fine_tunes(seed: int) -> dict[str, Any]:
    """The study's 49 cells: one half of the questions as dev set and the other as truth, and back."""
    labels = {
        "LoRA": (ADAPTER, 1.0),
        "LoRA T=0.6": (ADAPTER, 0.6),
        "LoRA T=0.3": (ADAPTER, 0.3),
        "LoRA greedy": COOL,
        "base": ("base", 1.0),
    }
    labels |= {f"λ={value:g}": (f"λ={value:g}", 1.0) for value in (-0.5, 0.5, 1.5)}
    labels |= {f"SCALE {bounds}": (bounds, 1.0) for bounds in ("[-3,1]", "[-6,3]", "[0,1]", "[0,6]")}
    cells: dict[str, Scores] = {}
    for row in lines_of(RESULTS / "study_verdicts.jsonl.gz"):
        if label := labels.get(row["method"]):
            cells.setdefault(row["cell"], {})[label] = verdicts(row["verdicts"]["test"], row["samples"]["test"])
    found: Found = {}
    for scores in cells.values():
        order = np.random.default_rng((seed, len(scores[COOL]))).permutation(len(scores[COOL]))
        for dev, test in (halves := (order[: len(order) // 2], order[len(order) // 2 :]), halves[::-1]):
            truth = {label: float(rows[test].mean()) for label, rows in scores.items()}
            judged(found, {label: rows[dev] for label, rows in scores.items()}, truth)
    del found["greedy answers only, z ≥ 1.28"]  # only the adapter has greedy answers here
    return summary(found)


def hot(seed: int) -> dict[str, Any]:
    """Where everything is used at T = 1: the paired test against the adapter at T = 1, and the highest mean."""
    cells: dict[str, tuple[Scores, Scores]] = {}
    plain = re.compile(r"adapter|base|λ=-?[\d.]+|\[-?\d,\d\]")
    for row in lines_of(RESULTS / "selection_verdicts.jsonl.gz"):
        if plain.fullmatch(row["candidate"]):
            for scores, split in zip(cells.setdefault(row["situation"], ({}, {})), ("dev", "test"), strict=True):
                scores[row["candidate"], 1.0] = verdicts(row[split], row["samples"][split])
    for row in lines_of(RESULTS / "selection_answers.jsonl.gz"):
        if "test" in row:
            gold = np.array(list(row["gold"]))[:, None]
            dev = {(who, 1.0): np.array(list(text)).reshape(len(gold), -1) == gold for who, text in row["warm"].items()}
            cells[row["situation"]] = (
                {label: rows.astype(float) for label, rows in dev.items()},
                {(who, 1.0): np.array([[*map(float, bits)] for bits in table]) for who, table in row["test"].items()},
            )
    adapter: Label = (ADAPTER, 1.0)
    rules: dict[str, Callable[[Scores], Label]] = {
        "z ≥ 1.28": lambda scores: picked(scores, scores, adapter),
        "highest mean": lambda scores: max(scores, key=lambda label: scores[label].mean()),
        "adapter": lambda scores: adapter,
    }
    parts: dict[str, Any] = {}
    for name, (pool, test) in cells.items():
        truth = {label: float(rows.mean()) for label, rows in test.items()}
        found: Found = {}
        for dev, _ in dealt(len(pool[adapter]), seed):
            given = {label: rows[dev] for label, rows in pool.items()}
            for rule, pick in ((rule, choose(given)) for rule, choose in rules.items()):
                harm = pick[0] != ADAPTER and truth[adapter] - truth[pick] > 0.01
                found.setdefault(rule, []).append((pick, max(truth.values()) - truth[pick], float(harm), len(pool)))
        parts[name] = summary(found)
    return parts


def shown(label: Label) -> str:
    return f"{label[0]} {f'T={label[1]:g}' if label[1] else 'greedy'}"


# tables


def of_rules(columns: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each rule; regret / worst / harmful, % of each column, and the cost in simulated worlds."""
    cost = "simulated"
    head = ["rule", "cost", *columns]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name in RULES:
        cells = [f"{columns[cost][name]['cost']:.1f}"]
        for found in columns.values():
            row = found.get(name)
            cells.append(f"{row['regret']:.2f} / {row['worst']:.1f} / {row['harmful_percent']:.1f} %" if row else "–")
        rows.append([name, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def of_cells(result: Mapping[str, Any]) -> str:
    """Markdown: the rule in each real cell."""
    rows = [["cell", "regret / worst / harmful", "adapter greedily", "by its own dev set", "points below the best"]]
    rows.append(["---", "---:", "---:", "---", "---:"])
    for name, found in result["real"].items():
        row, own = found["staged (the rule)"], result["own_dev"][name]
        rows.append(
            [
                name,
                f"{row['regret']:.2f} / {row['worst']:.1f} / {row['harmful_percent']:.1f} %",
                f"{found['adapter, greedily']['regret']:.2f}",
                own["taken"],
                f"{own['regret']:.1f} ({own['best']})",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def of_kinds(result: Mapping[str, Any]) -> str:
    """Markdown: what a dev set without the other kind of questions costs."""
    rows = [["cell", "dev set", "taken, %", "same kind", "other kind", "weighed"], ["---", "---", "---", *["---:"] * 3]]
    for name, found in result["other_kind"].items():
        for way, said in (("narrow", "one kind"), ("whole", "both kinds")):
            taken = ", ".join(f"{label} {share:g}" for label, share in found[way]["taken_percent"].items())
            gains = [f"{gain:+.1f}" for gain in found[way]["against_adapter_greedily"].values()]
            rows.append([name, said, taken, *gains])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def compact(result: Any, depth: int = 0) -> str:
    """JSON with a line for each innermost record."""
    if not isinstance(result, dict) or not any(isinstance(value, dict) for value in result.values()) or depth > 3:
        return json.dumps(result, ensure_ascii=False)
    pad = " " * (depth + 1)
    lines = [
        f"{pad}{json.dumps(key, ensure_ascii=False)}: {compact(value, depth + 1)}" for key, value in result.items()
    ]
    return "{\n" + ",\n".join(lines) + f"\n{pad[:-1]}}}" + ("" if depth else "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=29)
    given = parser.parse_args()
    cells = real_cells()
    result: dict[str, Any] = {
        "seed": given.seed,
        "worlds": given.worlds,
        "deals": DEALS,
        "dev_questions": DEV,
        "simulated": {str(count): simulated(given.worlds, count, given.seed) for count in (64, 128, 256)},
        "alike": alike(given.seed),
        "real": real(cells, given.seed),
        "own_dev": own_dev(cells),
        "other_kind": other_kind(cells, given.seed),
        "staged_other_kind": staged_other_kind(cells, given.seed),
        "small": small(given.seed),
        "objectives": objectives(given.seed),
        "fine_tunes": fine_tunes(given.seed),
        "hot": hot(given.seed),
    }
    nine = {name: found for name, found in result["real"].items() if name != "gemma-0"}
    result["means"] = {
        **{f"simulated, {count}": averaged(found) for count, found in result["simulated"].items()},
        "real": averaged(nine),
        **{
            f"real, {size}": averaged(real({name: cells[name] for name in nine}, given.seed, size)) for size in (32, 64)
        },
        "small": averaged(result["small"]),
        "objectives": averaged(result["objectives"]),
        "hot": averaged(result["hot"]),
    }
    (RESULTS / "selection.json").write_text(compact(result), encoding="utf-8")
    columns = {
        "nine real cells": result["means"]["real"],
        "simulated": result["means"]["simulated, 128"],
        "eight small models": result["means"]["small"],
        "nine of objectives": result["means"]["objectives"],
        "49 fine-tunes": result["fine_tunes"],
    }
    tables = {"rules": of_rules(columns), "cells": of_cells(result), "kinds": of_kinds(result)}
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        print(table, end="\n\n")
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
