"""The study's tables, from the verdicts that `measure.py` kept; no model is loaded.

    python benchmarks/study/report.py [--cache CACHE [CACHE …] --pack FILE] [--out FILE.json] [--docs docs/study.md]

reads the committed verdicts, benchmarks/results/study_verdicts.jsonl.gz. A cell is one base and one training seed. Every
difference is paired within the cell and on the same questions. Cells of one base are not independent, so intervals are
Student's over bases: the cells of a base are averaged first, and five bases give four degrees of freedom. A method is
compared only on cells where it was measured, and the table says how many these are. `--docs` puts the tables between the
two markers of a page.
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
from scipy.stats import t as student
from tables import FEWEST_BASES, glance, markdown

from loragate.files import write_json, write_text
from loragate.selection import choose

VERDICTS = Path(__file__).parents[1] / "results" / "study_verdicts.jsonl.gz"
WORLD_ORDER = ("arithmetic", "commands", "larger", "english")
TABLES = ("<!-- tables: begin -->", "<!-- tables: end -->")
GLANCE = ("<!-- glance: begin -->", "<!-- glance: end -->")
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
RULES: dict[str, tuple[str, ...]] = {
    "always LoRA": ("LoRA",),
    "always [-6,3]": ("SCALE [-6,3]",),
    "always [-3,1]": ("SCALE [-3,1]",),
    "always [0,1]": ("SCALE [0,1]",),
    "always [0,6]": ("SCALE [0,6]",),
    "automatic: [0,1] [-6,3] [0,6]": ("LoRA", "SCALE [0,1]", "SCALE [-6,3]", "SCALE [0,6]"),
    "automatic: [0,6] and anchored": ("LoRA", "SCALE [0,6]", "SCALE [0,6] anchored product"),
    "automatic: all four ranges": ("LoRA", *PLAIN),
    "automatic: one λ for all": ("LoRA", "λ=-0.5", "λ=0.5", "λ=1.5"),
    "automatic: adapter on or off": ("LoRA", "base"),
}
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


def from_cache(cache: Path) -> list[dict[str, Any]]:
    """One row per cell and method; verdicts as strings of digits, question after question."""
    rows = []
    for folder in sorted((cache / "answers").iterdir()):
        cell = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            if path.name == "cell.json":
                continue
            splits = {name: record[name] for name in ("test", "dev", "retention") if name in record}
            row = {
                "cell": cell["name"],
                "world": cell["world"],
                "base": cell["base_seed"],
                "seed": cell["sft_seed"],
                "method": record["name"],
                "samples": {name: len(split["correct"][0]) for name, split in splits.items()},
                "verdicts": {
                    name: "".join(str(v) for line in split["correct"] for v in line) for name, split in splits.items()
                },
                "ended": record["test"]["ended"],
                "tokens": record["test"]["tokens"],
                "training": record.get("training"),
            }
            gates = folder / "gates" / path.name
            if gates.is_file():
                row["gates"] = json.loads(gates.read_text(encoding="utf-8"))
            rows.append(row)
    return rows


def pack(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the rows as gzipped JSON lines; equal verdicts give equal bytes."""
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def joined(parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of several files, worlds in the order of `WORLD_ORDER`; the last one counts where two have a cell's method."""
    rows = {(row["cell"], row["method"]): row for part in parts for row in part}
    return sorted(rows.values(), key=lambda row: (WORLD_ORDER.index(row["world"]), row["cell"], row["method"]))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `pack` wrote."""
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


def rules(cells: list[Cell]) -> dict[str, dict[str, Any]]:
    """Automatic choice on 64 development questions against fixed ranges and the best on the test questions."""
    found = {}
    for name, candidates in RULES.items():
        having = [cell for cell in cells if cell.has("base", "LoRA", *PLAIN, *candidates)]
        if not having:
            continue
        picks = {cell.name: pick(cell, candidates) for cell in having}

        gains = [cell.score(picks[cell.name]) - cell.score("LoRA") for cell in having]
        best = [max(cell.score(one) for one in ("LoRA", *PLAIN)) for cell in having]
        regrets = [top - cell.score(picks[cell.name]) for top, cell in zip(best, having, strict=True)]
        counts: dict[str, int] = {}
        for one in picks.values():
            counts[one] = counts.get(one, 0) + 1
        found[name] = {
            "gain": over_bases(having, gains),
            "versus_base": over_bases(having, [cell.score(picks[cell.name]) - cell.score("base") for cell in having]),
            "regret": over_bases(having, regrets),
            "regret_fair": over_bases(having, [fair_regret(cell, picks[cell.name]) for cell in having]),
            "harmed": int(sum(gain < 0 for gain in gains)),
            "cells": len(having),
            "picks": dict(sorted(counts.items(), key=lambda item: -item[1])),
        }
    return found


def pick(cell: Cell, candidates: tuple[str, ...]) -> str:
    """A single candidate is taken as it is; of several, what `loragate.selection.choose` picks."""
    if len(candidates) == 1:
        return candidates[0]
    return choose({name: cell.verdicts[name]["dev"] for name in candidates}, "LoRA").name


def fair_regret(cell: Cell, picked: str) -> float:
    """Regret against a best that was chosen on one half of the test questions and is compared on the other; 400 halves."""
    names = list(dict.fromkeys(("LoRA", *PLAIN, picked)))
    scores = np.stack([cell.verdicts[name]["test"].mean(axis=1) for name in names])
    generator = np.random.default_rng(0)
    half = np.stack([generator.permutation(scores.shape[1]) < scores.shape[1] // 2 for _ in range(400)])
    first, second = (scores @ half.T) / half.sum(axis=1), (scores @ ~half.T) / (~half).sum(axis=1)
    best = first[: len(PLAIN) + 1].argmax(axis=0)
    return 100 * float(np.mean(second[best, np.arange(len(best))] - second[names.index(picked)]))


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
            "rules": rules(of_world),
            "cooler": cooler_above_all(of_world),
        }
    return results


def filled(page: str, results: dict[str, Any]) -> str:
    """The page with its tables in place of what stood between the markers."""
    everything = "\n".join(line for world, result in results.items() for line in markdown(world, result))
    for (begin, end), tables in ((GLANCE, "\n".join(glance(results))), (TABLES, everything)):
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n\n{tables.strip()}\n\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache",
        type=Path,
        nargs="+",
        help="answers of measure.py, in place of the committed verdicts; several are joined",
    )
    parser.add_argument("--pack", type=Path, help="write the verdicts of --cache to this .jsonl.gz file")
    parser.add_argument("--add", action="store_true", help="join the verdicts of --cache to those that are committed")
    parser.add_argument("--out", type=Path, help="write every number as JSON")
    parser.add_argument("--docs", type=Path, help="a page whose tables between the markers are replaced")
    options = parser.parse_args()
    verdicts = VERDICTS
    if options.cache:
        verdicts = options.pack or options.cache[0] / "verdicts.jsonl.gz"
        pack(joined([*([read_rows(VERDICTS)] if options.add else []), *map(from_cache, options.cache)]), verdicts)
    elif options.pack or options.add:
        parser.error("--pack and --add take the verdicts of a --cache; give one")
    results = study(load(verdicts))
    print("\n".join(glance(results)), *(line for item in results.items() for line in markdown(*item)), sep="\n")
    if options.docs:
        write_text(options.docs, filled(options.docs.read_text(encoding="utf-8"), results))
    if options.out:
        write_json(options.out, results)


if __name__ == "__main__":
    main()
