"""The study's tables, from the committed verdicts; no model is loaded.

    python benchmarks/study/report.py [--out FILE.json] [--write]

reads benchmarks/results/study_verdicts.jsonl.gz. A cell is one base and one training seed. Every
difference is paired within the cell and on the same questions. Cells of one base are not independent, so intervals are
Student's over bases: the cells of a base are averaged first, and five bases give four degrees of freedom. A method is
compared only on cells where it was measured, and the table says how many these are. `--write` puts the tables
into README.md and RESULTS.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import false_discovery_control as bh
from scipy.stats import t as student

from loragate.evaluation import holm
from loragate.files import write_json, write_text

VERDICTS = Path(__file__).parents[1] / "results" / "study_verdicts.jsonl.gz"
WORLD_ORDER = ("arithmetic", "commands", "larger", "english")
HERE = Path(__file__).parent
GLANCE = ("<!-- glance: begin -->", "<!-- glance: end -->")
TITLES = {"english": "English"}
FEWEST_BASES = 3
SCORES = ("base", "LoRA", "LoRA T=0.3", "DFT", "SCALE [0,1]", "SCALE [-6,3]", "SCALE [0,6]")
ORDER = (
    "base",
    "LoRA",
    "LoRA T=0.6",
    "LoRA T=0.3",
    "LoRA greedy",
    "λ=-0.5",
    "λ=0.5",
    "λ=1.5",
    "DoRA",
    "DFT",
    "profit",
    "eaft",
    "talr",
    "mask",
    "eksft",
    "forgetting",
    "SCALE [0,1]",
    "SCALE [-6,3]",
    "SCALE [0,6]",
    "SCALE [-3,1]",
    "SCALE [0,6] anchored product",
    "SCALE [0,1] on DFT",
    "SCALE [-6,3] no reversal",
    "SCALE [-6,3] no extrapolation",
    "SCALE [-6,3] unit",
    "one λ per module [0,1]",
    "CE gates [-6,3]",
    "random gates [-6,3]",
    "LoRA continued",
    "LoRA by entropy",
    "LoRA interleaved",
)
PLAIN = ("SCALE [0,1]", "SCALE [-6,3]", "SCALE [0,6]", "SCALE [-3,1]")
CLAIMS: tuple[tuple[str, str, str], ...] = (
    ("gates in [-6,3] beat the LoRA", "SCALE [-6,3]", "LoRA"),
    ("gates in [0,1] beat the LoRA", "SCALE [0,1]", "LoRA"),
    ("gates in [0,1] beat DFT", "SCALE [0,1]", "DFT"),
    ("gates in [-6,3] beat DFT", "SCALE [-6,3]", "DFT"),
    ("gates in [0,1] beat the base", "SCALE [0,1]", "base"),
    ("gates in [-6,3] beat the base", "SCALE [-6,3]", "base"),
    ("gates in [0,1] beat the LoRA at T = 0.6", "SCALE [0,1]", "LoRA T=0.6"),
    ("gates in [0,1] beat the LoRA at T = 0.3", "SCALE [0,1]", "LoRA T=0.3"),
    ("reversal helps: [-6,3] beats itself without", "SCALE [-6,3]", "SCALE [-6,3] no reversal"),
    ("extrapolation helps: [-6,3] beats itself without", "SCALE [-6,3]", "SCALE [-6,3] no extrapolation"),
    ("both help: [-6,3] beats itself clipped to [0,1]", "SCALE [-6,3]", "SCALE [-6,3] unit"),
    ("entropy beats CE as the gates' objective, [-6,3]", "SCALE [-6,3]", "CE gates [-6,3]"),
    ("tokens matter: [0,1] beats one λ per module", "SCALE [0,1]", "one λ per module [0,1]"),
    ("trained gates beat random ones of their size", "SCALE [-6,3]", "random gates [-6,3]"),
    ("gates in [0,1] beat more training of the LoRA", "SCALE [0,1]", "LoRA continued"),
    ("gates in [-6,3] beat more training of the LoRA", "SCALE [-6,3]", "LoRA continued"),
    ("gates in [0,1] beat entropy on the LoRA itself", "SCALE [0,1]", "LoRA by entropy"),
    ("gates in [-6,3] beat entropy on the LoRA itself", "SCALE [-6,3]", "LoRA by entropy"),
    ("gates help an adapter trained with DFT", "SCALE [0,1] on DFT", "DFT"),
    ("the anchor helps: [0,6] beats itself without", "SCALE [0,6] anchored product", "SCALE [0,6]"),
)


@dataclass
class Cell:
    """What was measured in one cell: {method: {split: verdicts [questions, samples]}} and records."""

    name: str
    world: str
    base: int
    seed: int
    verdicts: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)

    def score(self, method: str, split: str = "test") -> float:
        """In points."""
        return 100 * float(self.verdicts[method][split].mean())

    def has(self, *methods: str) -> bool:
        return all(method in self.verdicts for method in methods)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """One row per cell and method; verdicts are strings of digits, question after question."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def load(path: Path) -> list[Cell]:
    """The cells of a file of verdicts."""
    found: dict[str, Cell] = {}
    for row in read_rows(path):
        cell = found.setdefault(row["cell"], Cell(row["cell"], row["world"], row["base"], row["seed"]))
        cell.verdicts[row["method"]] = {
            name: np.array([int(v) for v in text]).reshape(-1, row["samples"][name])
            for name, text in row["verdicts"].items()
        }
        cell.records[row["method"]] = row
    return list(found.values())


def over_bases(cells: list[Cell], values: Sequence[float]) -> dict[str, Any]:
    """Mean over bases of the mean over their cells, with Student's 95 % interval and p over bases and the extremes of cells."""
    groups: dict[int, list[float]] = {}
    for cell, value in zip(cells, values, strict=True):
        groups.setdefault(cell.base, []).append(value)
    means = np.array([np.mean(group) for group in groups.values()])
    each = np.array(values)
    low = high = p = None
    if len(means) > 1:
        error = means.std(ddof=1) / np.sqrt(len(means))
        half = student.ppf(0.975, len(means) - 1) * error
        low, high = float(means.mean() - half), float(means.mean() + half)
        p = 2 * float(student.sf(abs(means.mean()) / error, len(means) - 1)) if error else float(means.mean() == 0)
    return {
        "mean": float(means.mean()),
        "low": low,
        "high": high,
        "p": p,
        "worst": float(each.min()),
        "best": float(each.max()),
        "above": int((each > 0).sum()),
        "cells": len(each),
        "bases": len(means),
    }


def methods(cells: list[Cell]) -> dict[str, dict[str, Any]]:
    """What each method does, and its differences to the LoRA."""
    found = {}
    for name in ORDER:
        having = [cell for cell in cells if cell.has(name, "LoRA")]
        if not having:
            continue
        rows = [cell.records[name] for cell in having]
        entry: dict[str, Any] = {
            "score": over_bases(having, [cell.score(name) for cell in having]),
            "versus_lora": over_bases(having, [cell.score(name) - cell.score("LoRA") for cell in having]),
            "tokens": float(np.mean([row["tokens"] for row in rows])),
            "cut_off": 100 * (1 - float(np.mean([row["ended"] for row in rows]))),
        }
        if "retention" in having[0].verdicts[name]:
            entry["retention"] = over_bases(having, [cell.score(name, "retention") for cell in having])
        if all(row.get("training") and "entropy" in row["training"] for row in rows):
            entry["entropy"] = np.mean([row["training"]["entropy"] for row in rows], axis=0).tolist()
        if all("gates" in row for row in rows):
            shares = ("below_zero", "zero_to_one", "above_one")
            entry["gates"] = {share: float(np.mean([row["gates"][share] for row in rows])) for share in shares}
        found[name] = entry
    return found


def claims(cells: list[Cell]) -> dict[str, dict[str, Any]]:
    """The paper's picture, one paired difference each."""
    found = {}
    for said, better, worse in CLAIMS:
        having = [cell for cell in cells if cell.has(better, worse)]
        if having:
            result = over_bases(having, [cell.score(better) - cell.score(worse) for cell in having])
            found[said] = {**result, "verdict": verdict(result)}
    return found


def verdict(difference: dict[str, Any]) -> str:
    """In a word: does the interval over bases leave zero out? One or two bases decide nothing."""
    if difference["bases"] < FEWEST_BASES:
        return "too few bases"
    if difference["low"] > 0:
        return "holds"
    return "opposite" if difference["high"] < 0 else "not shown"


def cooler_above_all(cells: list[Cell]) -> dict[str, int]:
    """In how many cells the LoRA at T = 0.3 scores more than gates in any range at T = 1."""
    having = [cell for cell in cells if cell.has("LoRA T=0.3", *PLAIN)]
    above = sum(cell.score("LoRA T=0.3") > max(map(cell.score, PLAIN)) for cell in having)
    return {"above": int(above), "cells": len(having)}


def study(cells: list[Cell]) -> dict[str, Any]:
    """Everything that is read from the cells, world by world."""
    results = {}
    for world in sorted({cell.world for cell in cells}, key=WORLD_ORDER.index):
        of_world = [cell for cell in cells if cell.world == world]
        results[world] = {
            "methods": methods(of_world),
            "claims": claims(of_world),
            "cooler": cooler_above_all(of_world),
        }
    return results


def glance(results: dict[str, Any]) -> list[str]:
    """Scores, claims and the automatic choice of every world, a column each; what an interval over bases shows is bold."""
    worlds = list(results)
    header = ["", *(TITLES.get(world, world) for world in worlds)]
    counted = ["bases (cells)", *(_bases(results[world]) for world in worlds)]
    lines = [_row(header), "|---|" + "---:|" * len(worlds), _row(counted)]
    for method in SCORES:
        entries = [results[world]["methods"].get(method) for world in worlds]
        lines.append(_row([f"score of {method}", *(f"{e['score']['mean']:.1f}" if e else "–" for e in entries)]))
    for said in results[worlds[0]]["claims"]:
        if said.startswith("gates in [0,1] beat") and not said.endswith(("LoRA", "0.3")):
            continue  # in RESULTS.md
        found = [results[world]["claims"].get(said) for world in worlds]
        lines.append(_row([said, *(_shown(gap) if gap else "–" for gap in found)]))
    cooler = (f"{one['cooler']['above']} of {one['cooler']['cells']}" for one in results.values())
    lines.append(_row(["cells in which the LoRA at T = 0.3 beats every range", *cooler]))
    return [*lines, "", adjusted(results)]


def adjusted(results: dict[str, Any]) -> str:
    """How many of the claims' intervals leave zero out, and how many would after adjustment for their number."""
    p = [gap["p"] for one in results.values() for gap in one["claims"].values() if gap["bases"] >= FEWEST_BASES]
    alone, after_holm, controlled = (
        sum(value <= 0.05 for value in values) for values in (p, holm(p), bh(p, method="bh"))
    )
    return (
        f"Of the {len(p)} claims with an interval over bases, {alone} leave zero out. After Holm's adjustment for {len(p)} "
        f"comparisons {after_holm} would, at a false discovery rate of 5 % (Benjamini and Hochberg) {controlled}."
    )


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bases(result: dict[str, Any]) -> str:
    lora = result["methods"]["LoRA"]["score"]
    return f"{lora['bases']} ({lora['cells']})"


def _shown(gap: dict[str, Any]) -> str:
    decided = gap["bases"] >= FEWEST_BASES and (gap["low"] > 0 or gap["high"] < 0)
    return f"**{interval(gap)}**" if decided else interval(gap)


def markdown(name: str, result: dict[str, Any]) -> list[str]:
    """The tables of one world."""
    retained = any("retention" in entry for entry in result["methods"].values())
    lines = [
        f"### The {TITLES.get(name, name)} world",
        "",
        "| method | score | versus LoRA | cells above LoRA | worst cell | "
        + ("retention | " if retained else "")
        + "tokens | cut off |",
        "|---|---:|---:|---:|---:|" + ("---:|" if retained else "") + "---:|---:|",
    ]
    for method, entry in result["methods"].items():
        gap = entry["versus_lora"]
        cells = [
            method,
            f"{entry['score']['mean']:.1f}",
            "–" if method == "LoRA" else interval(gap),
            "–" if method == "LoRA" else f"{gap['above']} of {gap['cells']}",
            "–" if method == "LoRA" else f"{gap['worst']:+.1f}",
        ]
        if retained:
            cells.append(f"{entry['retention']['mean']:.1f}" if "retention" in entry else "–")
        cells += [f"{entry['tokens']:.1f}", f"{entry['cut_off']:.1f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| claim | difference | cells | verdict |", "|---|---:|---:|---|"]
    for said, gap in result["claims"].items():
        lines.append(f"| {said} | {interval(gap)} | {gap['above']} of {gap['cells']} | {gap['verdict']} |")
    gates = {method: entry["gates"] for method, entry in result["methods"].items() if "gates" in entry}
    entropies = {method: entry["entropy"] for method, entry in result["methods"].items() if "entropy" in entry}
    lines += ["", "| gates | λ < 0 | 0 to 1 | λ > 1 | training entropy |", "|---|---:|---:|---:|---:|"]
    for method, shares in gates.items():
        before, after = entropies[method]
        parts = " | ".join(f"{100 * share:.0f} %" for share in shares.values())
        lines.append(f"| {method} | {parts} | {before:.3f} → {after:.3f} |")
    return [*lines, ""]


def interval(gap: dict[str, Any]) -> str:
    """Mean and interval, in points; of one or two bases the extremes of their cells, in square brackets."""
    if gap["bases"] < FEWEST_BASES:
        return f"{gap['mean']:+.1f} [{gap['worst']:+.1f}, {gap['best']:+.1f}]"
    return f"{gap['mean']:+.1f} ({gap['low']:+.1f} to {gap['high']:+.1f})"


def pages(results: dict[str, Any]) -> dict[Path, str]:
    """README.md with its table at a glance, and RESULTS.md with all tables."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    before, rest = readme.split(GLANCE[0])
    _, after = rest.split(GLANCE[1])
    table = "\n".join(glance(results)).strip()
    everything = "\n".join(line for world, result in results.items() for line in markdown(world, result)).strip()
    head = "# All results of the study\n\nMade by `report.py`; [README.md](README.md) reads them."
    return {
        HERE / "README.md": f"{before}{GLANCE[0]}\n\n{table}\n\n{GLANCE[1]}{after}",
        HERE / "RESULTS.md": f"{head}\n\n{everything}\n",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write every number as JSON")
    parser.add_argument(
        "--write", action="store_true", help="write the tables of README.md and RESULTS.md beside this file"
    )
    options = parser.parse_args()
    results = study(load(VERDICTS))
    print("\n".join(glance(results)), *(line for item in results.items() for line in markdown(*item)), sep="\n")
    if options.write:
        for path, text in pages(results).items():
            write_text(path, text)
    if options.out:
        write_json(options.out, results)


if __name__ == "__main__":
    main()
