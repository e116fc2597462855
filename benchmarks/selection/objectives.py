"""The objectives on sampled answers beside plain ranges: one table of scores, differences to the adapter, and costs.

    python benchmarks/selection/objectives.py [--out FILE.json]

reads the committed verdicts (benchmarks/results/selection_verdicts.jsonl.gz), where `measure.py --extra` put the variants, for
every situation that has them. Scores are in points on 160 test questions × 8 samples at temperature 1; differences are to
the adapter, paired by question, with 95 % intervals (`loragate.evaluation.compare`). Cost is in plain trainings of the same
situation. The verdicts "helps" and "harms" are those of the interval, without adjustment for the number of rows.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compare_rules import PLAIN, VERDICTS, Situation, load

from loragate.evaluation import compare
from loragate.files import write_json

BESIDE = ("base", "adapter T=0.3")


def kinds(situations: list[Situation]) -> list[str]:
    """Plain ranges first, then every candidate on sampled answers, in a fixed order."""
    found = {name for one in situations for name in one.test if " anchored " in name or name.endswith(" reward")}
    return [*PLAIN, *sorted(found)]


def line(one: Situation, name: str) -> dict[str, Any]:
    """Score, difference to the adapter, and cost of one candidate."""
    found = compare(one.test[name], one.test["adapter"])
    low, high = 100 * found.low, 100 * found.high
    return {
        "score": round(one.score(name), 2),
        "difference": round(100 * found.mean, 2),
        "low": round(low, 2),
        "high": round(high, 2),
        "verdict": "helps" if low > 0 else "harms" if high < 0 else "no clear difference",
        "cost": round(one.cost[name], 2) if name in one.cost else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="tune", choices=("tune", "test", "test2", "all"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    situations = [one for one in load(VERDICTS, options.split) if "[-6,3] anchored adapter" in one.test]
    table = {one.name: {name: line(one, name) for name in kinds(situations) if name in one.test} for one in situations}
    print("| | " + " | ".join(table) + " | cost |")
    print("|---|" + "---:|" * (len(table) + 1))
    print("| adapter | " + " | ".join(f"{one.score('adapter'):.1f}" for one in situations) + " | |")
    for name in kinds(situations):
        rows = [table[one.name].get(name) for one in situations]
        cells = [f"{r['score']:.1f} ({r['low']:+.1f} to {r['high']:+.1f})" if r else "–" for r in rows]
        costs = [r["cost"] for r in rows if r and r["cost"] is not None]
        print(f"| {name} | {' | '.join(cells)} | {sum(costs) / len(costs):.1f} |")
    for name in BESIDE:
        print(f"| {name} | " + " | ".join(f"{one.score(name):.1f}" for one in situations) + " | |")
    if options.out:
        adapter = {one.name: round(one.score("adapter"), 2) for one in situations}
        write_json(options.out, {"split": options.split, "adapter": adapter, "candidates": table})


if __name__ == "__main__":
    main()
