"""Compare rules that choose a range, from the answers that `measure.py` kept; no model is loaded.

    python benchmarks/selection/compare_rules.py --split tune|test|test2|all [--out FILE.json]

reads the committed verdicts, benchmarks/results/selection_verdicts.jsonl.gz; --cache CACHE takes the answers of a measurement
of your own instead, and --pack FILE writes those as such a file.

Each rule sees a probe of 64 development questions × 4 samples, drawn with replacement from the pool 1,000 times, and picks;
the pick is then judged on the test questions. Regret against the oracle is the best test score among the seven plain
ranges and the adapter, minus the pick's (so the oracle is flattered by its own noise, and regret is overstated); "fair"
regret takes a best that was chosen on half of the test questions and compared on the other half. Gain is the pick's minus the
adapter's. A switch is harmful where the pick's test score lies below the adapter's. Cost is counted in plain trainings
(CPU seconds, relative to the mean plain training of the same situation). The target is a mean regret of at most 1 point, a
worst of at most 3, and harmful switches in at most 5 % of the draws, for at most three trainings.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, which holds worlds/

import numpy as np

from loragate.files import write_json
from worlds.situations import SITUATIONS, SPLITS

VERDICTS = Path(__file__).parents[1] / "results" / "selection_verdicts.jsonl.gz"
PROBE, DRAWS, SEED = 64, 1000, 0
MEAN_REGRET, WORST_REGRET, HARMFUL = 1.0, 3.0, 0.05  # the target
PLAIN = ("[-3,1]", "[0,1]", "[-6,3]", "[-1,2]", "[0,3]", "[0,6]", "[-4,4]")
CLIPPED = ("[-6,3] no reversal", "[-6,3] no extrapolation", "[-6,3] unit")
BESIDE = ("base", "adapter T=0.6", "adapter T=0.3", "dft", "ensemble")
CONSTANTS = ("λ=-0.5", "λ=0.5", "λ=1.5", "λ=2")


@dataclass
class Situation:
    """One situation's answers.

    Attributes:
        dev: {candidate: [questions, samples]} verdicts on the pool; test the same on the test questions.
        agree: {candidate: [questions, samples]} agreement with the adapter's cool majority on the pool; NaN rows where
            there is no majority.
        cost: {candidate: trainings}.
        fall: {candidate: fall of the training entropy}.
        majority_right: share of the pool's questions whose majority answer is right.
    """

    name: str
    split: str
    dev: dict[str, np.ndarray] = field(default_factory=dict)
    test: dict[str, np.ndarray] = field(default_factory=dict)
    agree: dict[str, np.ndarray] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    fall: dict[str, float] = field(default_factory=dict)
    majority_right: float = float("nan")

    def score(self, candidate: str) -> float:
        """Test score in points."""
        return 100 * float(self.test[candidate].mean())

    @property
    def oracle(self) -> float:
        """The best plain range or the adapter, in points."""
        return max(self.score(name) for name in ("adapter", *PLAIN) if name in self.test)


def load(verdicts: Path, split: str) -> list[Situation]:
    """The situations of a split from a file of verdicts."""
    found: dict[str, Situation] = {}
    with gzip.open(verdicts, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if split not in ("all", row["split"]):
                continue
            one = found.setdefault(row["situation"], Situation(row["situation"], row["split"]))
            one.majority_right = row["majority_right"]
            name = row["candidate"]
            for key, table in (("dev", one.dev), ("test", one.test), ("agree", one.agree)):
                bits = [{"0": 0.0, "1": 1.0, "-": np.nan}[bit] for bit in row[key]]
                table[name] = np.array(bits).reshape(-1, row["samples"]["test" if key == "test" else "dev"])
            if row["training"]:
                one.cost[name], one.fall[name] = row["training"]["cpu_seconds"], row["training"]["fall"]
    for one in found.values():
        _in_trainings(one)
    return list(found.values())


def _in_trainings(one: Situation) -> None:
    unit = float(np.mean([one.cost[name] for name in PLAIN]))
    one.cost = {name: seconds / unit for name, seconds in one.cost.items()}


def pack(cache: Path, path: Path) -> None:
    """Write the verdicts of a measurement as one line of JSON per candidate, gzipped."""

    def bits(table: np.ndarray) -> str:
        return "".join("-" if np.isnan(value) else str(int(value)) for value in table.reshape(-1))

    # no time stamp in the file, so that equal verdicts give equal bytes
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for one in from_answers(cache):
            for name in one.dev:
                row = {
                    "situation": one.name,
                    "split": one.split,
                    "candidate": name,
                    "majority_right": one.majority_right,
                    "samples": {"dev": one.dev[name].shape[1], "test": one.test[name].shape[1]},
                    "dev": bits(one.dev[name]),
                    "agree": bits(one.agree[name]),
                    "test": bits(one.test[name]),
                    "training": {"cpu_seconds": one.cost[name], "fall": one.fall[name]} if name in one.cost else None,
                }
                file.write((json.dumps(row) + "\n").encode())


def from_answers(cache: Path) -> list[Situation]:
    """The situations whose answers are complete in a cache of `measure.py`; costs in CPU seconds."""
    found = []
    for known in SITUATIONS:
        folder = cache / "answers" / known.name
        if not (folder / "dft.json").is_file():
            continue
        one = Situation(known.name, known.split)
        majority = json.loads((folder / "adapter majority.json").read_text(encoding="utf-8"))
        answers = [Counter(a for a in row if a is not None).most_common(1) for row in majority["answers"]]
        common = [row[0][0] if row else None for row in answers]
        one.majority_right = float(np.mean([a == gold.split()[-1] for a, gold in zip(common, majority["gold"])]))
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            if "candidate" not in record:
                continue
            name = record["candidate"]
            one.dev[name] = np.array(record["dev"]["correct"], dtype=float)
            one.test[name] = np.array(record["test"]["correct"], dtype=float)
            one.agree[name] = np.array(
                [
                    [np.nan if c is None else float(a == c) for a in row]
                    for row, c in zip(record["dev"]["answers"], common)
                ]
            )
            training = record.get("training")
            if training:
                one.cost[name] = training["training_cpu_seconds"]
                one.fall[name] = training["entropy"][0] - training["entropy"][1]
        found.append(one)
    return found


Pick = Callable[[Situation, np.ndarray], list[str]]
"""(situation, drawn questions [draws, probe]) to the pick of each draw."""


def best_on_probe(candidates: tuple[str, ...], *, table: str = "dev", margin: float = 0.0) -> Pick:
    """Highest mean on the probe; the adapter wins ties, and unless a candidate leads by `margin` standard errors."""

    def pick(situation: Situation, drawn: np.ndarray) -> list[str]:
        names = ["adapter", *candidates]
        per_question = np.stack([np.nanmean(getattr(situation, table)[name], axis=1) for name in names])
        sampled = np.nan_to_num(per_question, nan=0.0)[:, drawn]
        means = sampled.mean(axis=2)
        best = means.argmax(axis=0)  # the first of equals, so the adapter wins ties
        if margin:
            lead = np.take_along_axis(sampled, best[None, :, None], axis=0)[0] - sampled[0]
            error = lead.std(axis=1, ddof=1) / np.sqrt(lead.shape[1])
            best = np.where(lead.mean(axis=1) > margin * error, best, 0)
        return [names[index] for index in best]

    return pick


def always(candidate: str) -> Pick:
    """A fixed range, whatever the probe says."""
    return lambda situation, drawn: [candidate] * len(drawn)


def lowest_entropy(candidates: tuple[str, ...]) -> Pick:
    """The range whose training met its objective best: what must never select."""
    return lambda s, drawn: [max(candidates, key=lambda name: s.fall[name])] * len(drawn)


THREE = ("[-3,1]", "[0,1]", "[-6,3]")
DEFAULT = ("[0,1]", "[-6,3]", "[0,6]")
# the lowest worst regret on the tune situations among all choices of at most three plain ranges
TUNED = ("[0,1]", "[-1,2]", "[0,6]")
RULES: dict[str, tuple[Pick, tuple[str, ...]]] = {
    "always [-6,3]": (always("[-6,3]"), ("[-6,3]",)),
    "always [-3,1]": (always("[-3,1]"), ("[-3,1]",)),
    "always [0,1]": (always("[0,1]"), ("[0,1]",)),
    "lowest training entropy of 7": (lowest_entropy(PLAIN), PLAIN),
    "probe, [-3,1] [0,1]": (best_on_probe(THREE[:2]), THREE[:2]),
    "probe, [-3,1] [0,1] [-6,3]": (best_on_probe(THREE), THREE),
    "probe, [0,1] [-6,3] [0,6]": (best_on_probe(DEFAULT), DEFAULT),
    "probe, [0,1] [-1,2] [0,6]": (best_on_probe(TUNED), TUNED),
    "probe, [-6,3] [-1,2] [0,6]": (best_on_probe(("[-6,3]", *TUNED[1:])), ("[-6,3]", *TUNED[1:])),
    "probe, [-1,2] [0,6]": (best_on_probe(TUNED[1:]), TUNED[1:]),
    "probe, [-3,1] [0,1] [0,6]": (best_on_probe(("[-3,1]", "[0,1]", "[0,6]")), ("[-3,1]", "[0,1]", "[0,6]")),
    "probe, [-3,1] [-6,3] [0,6]": (best_on_probe(("[-3,1]", "[-6,3]", "[0,6]")), ("[-3,1]", "[-6,3]", "[0,6]")),
    "probe, all 7": (best_on_probe(PLAIN), PLAIN),
    "probe, [-6,3] and its clips (one training)": (best_on_probe(("[-6,3]", *CLIPPED)), ("[-6,3]",)),
    "probe, [-3,1] [0,1] [0,6], lead of 1 SE": (
        best_on_probe(("[-3,1]", "[0,1]", "[0,6]"), margin=1.0),
        ("[-3,1]", "[0,1]", "[0,6]"),
    ),
    "probe, [-6,3] anchored product": (best_on_probe(("[-6,3] anchored product",)), ("[-6,3] anchored product",)),
    "probe, [-6,3] anchored base": (best_on_probe(("[-6,3] anchored base",)), ("[-6,3] anchored base",)),
    "probe, [0,6] and anchored product": (
        best_on_probe(("[0,6]", "[-6,3] anchored product")),
        ("[0,6]", "[-6,3] anchored product"),
    ),
    "agreement, [-3,1] [0,1] [-6,3]": (best_on_probe(THREE, table="agree"), THREE),
    "agreement, [-3,1] [0,1] [0,6]": (
        best_on_probe(("[-3,1]", "[0,1]", "[0,6]"), table="agree"),
        ("[-3,1]", "[0,1]", "[0,6]"),
    ),
    "agreement, [0,1] [-6,3] [0,6]": (best_on_probe(DEFAULT, table="agree"), DEFAULT),
    "agreement, [0,1] [-1,2] [0,6]": (best_on_probe(TUNED, table="agree"), TUNED),
    "agreement, all 7": (best_on_probe(PLAIN, table="agree"), PLAIN),
    "probe, one λ for all": (best_on_probe(CONSTANTS), ()),
}


def judge(rule: Pick, situations: list[Situation], trained: tuple[str, ...]) -> dict[str, Any]:
    """What a rule does on each situation, and over them."""
    rows = {}
    for one in situations:
        generator = np.random.default_rng(SEED)
        drawn = generator.integers(len(one.dev["adapter"]), size=(DRAWS, PROBE))
        picks = rule(one, drawn)
        scores = np.array([one.score(name) for name in picks])
        rows[one.name] = {
            "regret": float(one.oracle - scores.mean()),
            "regret_fair": fair_regret(one, Counter(picks)),
            "gain": float(scores.mean() - one.score("adapter")),
            "gain_p5": float(np.quantile(scores, 0.05) - one.score("adapter")),
            "harmful": float(np.mean(scores < one.score("adapter"))),
            "picks": dict(Counter(picks).most_common(4)),
        }
    regrets = np.array([row["regret"] for row in rows.values()])
    gains = np.array([row["gain"] for row in rows.values()])
    costs = [sum(one.cost[name] for name in trained) for one in situations]
    harmful = float(np.mean([row["harmful"] for row in rows.values()]))
    met = regrets.mean() <= MEAN_REGRET and regrets.max() <= WORST_REGRET and harmful <= HARMFUL
    return {
        "mean_regret": float(regrets.mean()),
        "mean_regret_fair": float(np.mean([row["regret_fair"] for row in rows.values()])),
        "worst_regret_fair": float(max(row["regret_fair"] for row in rows.values())),
        "regret_interval": _over_situations(regrets),
        "worst_regret": float(regrets.max()),
        "mean_gain": float(gains.mean()),
        "gain_interval": _over_situations(gains),
        "worst_gain": float(gains.min()),
        "harmful": harmful,
        "target": bool(met),
        "cost": float(np.mean(costs)) if costs else 0.0,
        "situations": rows,
    }


def fair_regret(one: Situation, picks: Counter[str]) -> float:
    """Regret against a best that is not flattered: chosen on one half of the test questions, compared on the other.

    Mean of 400 random halves, in points. It is below zero where the rule picks better than the best of a half.
    """
    known = [name for name in ("adapter", *PLAIN) if name in one.test]
    names = [*known, *(name for name in picks if name not in known)]
    share = np.array([picks[name] for name in names]) / sum(picks.values())
    score = np.stack([one.test[name].mean(axis=1) for name in names])
    generator = np.random.default_rng(SEED)
    half = np.stack([generator.permutation(score.shape[1]) < score.shape[1] // 2 for _ in range(400)])
    first = (score @ half.T) / half.sum(axis=1)
    second = (score @ ~half.T) / (~half).sum(axis=1)
    best = first[: len(known)].argmax(axis=0)
    return 100 * float(np.mean(second[best, np.arange(len(best))] - share @ second))


def _over_situations(values: np.ndarray) -> list[float]:
    """95 % bootstrap interval of the mean over situations, which share bases and so are not independent."""
    generator = np.random.default_rng(SEED)
    means = values[generator.integers(len(values), size=(4000, len(values)))].mean(axis=1)
    return [float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))]


def table(situations: list[Situation]) -> list[str]:
    """Test scores of every candidate."""
    names = ["adapter", *PLAIN, *CLIPPED, "[-6,3] anchored base", "[-6,3] anchored product", *CONSTANTS, *BESIDE]
    lines = ["| | " + " | ".join(one.name for one in situations) + " |", "|---|" + "---:|" * len(situations)]
    for name in names:
        cells = [f"{one.score(name):.1f}" if name in one.test else "–" for one in situations]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("| majority right | " + " | ".join(f"{100 * one.majority_right:.0f}" for one in situations) + " |")
    return lines


def triples(situations: list[Situation]) -> list[tuple[float, float, tuple[str, ...]]]:
    """(mean regret, worst regret, ranges) of every choice of three plain ranges, best first."""
    found = []
    for ranges in itertools.combinations(PLAIN, 3):
        result = judge(best_on_probe(ranges), situations, ranges)
        found.append((result["mean_regret"], result["worst_regret"], ranges))
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="answers of measure.py, in place of the committed verdicts")
    parser.add_argument("--pack", type=Path, help="write the verdicts of --cache to this .jsonl.gz file")
    parser.add_argument("--split", default="tune", choices=(*SPLITS, "all"))
    parser.add_argument("--triples", action="store_true", help="also rank all choices of three ranges (tune only)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.pack:
        pack(options.cache, options.pack)
    if options.cache:
        situations = [one for one in from_answers(options.cache) if options.split in ("all", one.split)]
        for one in situations:
            _in_trainings(one)
    else:
        situations = load(VERDICTS, options.split)
    print("\n".join(table(situations)))
    print()
    results = {name: judge(rule, situations, trained) for name, (rule, trained) in RULES.items()}
    print("| rule | cost | mean regret | worst | fair | worst | mean gain | worst | harmful switch | target |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for name, found in results.items():
        low, high = found["regret_interval"]
        print(
            f"| {name} | {found['cost']:.1f} | {found['mean_regret']:.1f} ({low:.1f} to {high:.1f}) | "
            f"{found['worst_regret']:.1f} | {found['mean_regret_fair']:.1f} | {found['worst_regret_fair']:.1f} | "
            f"{found['mean_gain']:+.1f} | {found['worst_gain']:+.1f} | "
            f"{100 * found['harmful']:.1f} % | {'met' if found['target'] else 'missed'} |"
        )
    if options.triples:
        if options.split != "tune":
            parser.error("--triples chooses ranges, which is done on the tune situations only")
        for mean, worst, ranges in triples(situations)[:8]:
            print(f"{mean:5.2f} {worst:5.2f} {' '.join(ranges)}")
    if options.out:
        scores = {one.name: {name: one.score(name) for name in one.test} for one in situations}
        write_json(options.out, {"split": options.split, "scores": scores, "rules": results})


if __name__ == "__main__":
    main()
