"""The tables of the trials, from the verdicts that `trial.py` kept; no model is loaded.

    python benchmarks/objectives/report.py [--cache CACHE] [--diagnostic FOLDER] [--readme]

reads benchmarks/results/objectives_verdicts.jsonl.gz and objectives_diagnostic.json. `--cache` and `--diagnostic` first pack
what `trial.py` and `diagnostic.py` have left into them (the diagnostic's answers too, without their tokens). `--readme` puts
the tables between the markers of README.md.

The best cheap setting of a cell is chosen on its development questions among base, adapter, one λ and the contrast, each at
every temperature. A contender is compared with it at every temperature on the same test questions; fixes and breaks are
counted against the adapter at the same temperature, answer by answer on the same random streams. Intervals are Student's
over training seeds within a situation, and over all cells.

The diagnostic is also read from the adapters of the study (benchmarks/results/study_verdicts.jsonl.gz), whose greedy
answers and samples are on file; four at T = 1 and four at T = 0.6 make the eight there.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from loragate.files import write_json, write_text

HERE = Path(__file__).parent
VERDICTS = HERE.parent / "results" / "objectives_verdicts.jsonl.gz"
DIAGNOSTIC = HERE.parent / "results" / "objectives_diagnostic.json"
STUDY = HERE.parent / "results" / "study_verdicts.jsonl.gz"
MARKERS = ("<!-- tables: begin -->", "<!-- tables: end -->")
HEATS = ("0", "0.3", "0.6", "1")
CHEAP = ("base", "adapter", "λ=", "contrast")
Cells = dict[str, dict[str, dict[str, Any]]]


def load(path: Path = VERDICTS) -> Cells:
    """Records by cell and contender."""
    cells: Cells = defaultdict(dict)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            cells[record["cell"]][record["contender"]] = record
    return dict(cells)


def pack(cache: Path, path: Path = VERDICTS) -> None:
    """The records of a cache as one file; the same records, the same bytes."""
    records = [json.loads(one.read_text(encoding="utf-8")) for one in sorted((cache / "answers").glob("*/*/*.json"))]
    lines = "".join(json.dumps(record, ensure_ascii=False, sort_keys=True) + "\n" for record in records)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def pack_diagnostic(folder: Path, path: Path = DIAGNOSTIC) -> None:
    """The summaries of a folder of `diagnostic.py` as one file, and its answers beside it."""
    found, answers = {}, []
    for place in sorted(one.parent for one in folder.rglob("summary.json")):
        name = str(place.relative_to(folder))
        found[name] = json.loads((place / "summary.json").read_text(encoding="utf-8"))
        for kind in ("greedy", "sampled"):
            for line in (place / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines():
                sample = json.loads(line)
                kept = {key: sample[key] for key in ("question", "sample", "text", "finish_reason")}
                answers.append(json.dumps({"of": name, "kind": kind, **kept}, ensure_ascii=False) + "\n")
    write_json(path, found)
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress("".join(answers).encode(), mtime=0))


def diagnosed(path: Path = DIAGNOSTIC) -> str:
    """The table of the diagnostic on development questions."""
    parts = [
        "| | questions | greedy | single at T = 0.8 | majority of 8 | wrong greedily | of them reached | by chance |",
        f"|---|{'---:|' * 7}",
    ]
    for name, one in json.loads(path.read_text(encoding="utf-8")).items():
        share, low, high = one["share"]
        parts.append(
            f"| {name} | {one['questions']} | {one['greedy']:.1f} | {one['single at T=0.8']:.1f} | {one['majority of 8']:.1f} "
            f"| {one['wrong greedily']} | {one['of them reached']}: {share:.0f} % ({low:.0f} to {high:.0f}) "
            f"| {one['share by chance']:.0f} % |"
        )
    return "\n".join(parts)


def scores(record: dict[str, Any], split: str, heat: str) -> np.ndarray:
    """Verdicts [Q, K]."""
    bits = np.array([int(bit) for bit in record["verdicts"][f"{split} T={heat}"]])
    return bits.reshape(len(record["verdicts"][f"{split} T=0"]), -1)


def best_cheap(contenders: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """The cheap setting with the most right development answers; ties go to the adapter, then to the cooler."""
    offered = [(name, heat) for name in contenders if name.startswith(CHEAP) for heat in HEATS]
    return max(
        offered,
        key=lambda one: (scores(contenders[one[0]], "dev", one[1]).mean(), one[0] == "adapter", -HEATS.index(one[1])),
    )


def flips(after: np.ndarray, before: np.ndarray) -> tuple[int, int]:
    """Answers that became right, and those that became wrong."""
    return int((after > before).sum()), int((after < before).sum())


def interval(values: Sequence[float]) -> str:
    """Mean with its 95 % interval over cells."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:+.1f}"
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"


def ledger(cells: Cells) -> str:
    """One table per situation: scores, fixes and breaks, and the greedy answers beside the best cheap setting."""
    parts = []
    groups: dict[str, list[str]] = defaultdict(list)
    for name in cells:
        groups[name.rsplit("/", 1)[0]].append(name)
    for situation, members in {**groups, "all situations": list(cells)}.items():
        picked = {name: best_cheap(cells[name]) for name in members}
        told = ", ".join(f"seed {name.rsplit('/', 1)[1]}: {who} T={heat}" for name, (who, heat) in picked.items())
        whole = situation == "all situations"
        parts.append(
            f"### {situation[0].upper()}{situation[1:]}\n\n" + ("" if whole else f"Best cheap setting, {told}.\n")
        )
        heads = [f"T = {heat}" if heat != "0" else "greedy" for heat in HEATS]
        parts.append(f"| | cells | {' | '.join(heads)} | greedy − best cheap |\n|---|---:|{'---:|' * (len(HEATS) + 1)}")
        for contender in ordered(cells, members):
            measured = [name for name in members if contender in cells[name] and "adapter" in cells[name]]
            columns = []
            for heat in HEATS:
                pairs = [
                    (scores(cells[name][contender], "test", heat), scores(cells[name]["adapter"], "test", heat))
                    for name in measured
                ]
                counts = np.sum([flips(after, before) for after, before in pairs], axis=0)
                mean = 100 * np.mean([after.mean() for after, _ in pairs])
                columns.append(f"{mean:.1f}" if contender == "adapter" else f"{mean:.1f} (+{counts[0]} −{counts[1]})")
            gaps = [
                100
                * (scores(cells[name][contender], "test", "0").mean() - scores(cells[name][who], "test", heat).mean())
                for name in measured
                for who, heat in [picked[name]]
            ]
            parts.append(f"| {contender} | {len(measured)} | {' | '.join(columns)} | {interval(gaps)} |")
        parts.append("")
    return "\n".join(parts)


def reached_in_study(path: Path = STUDY) -> str:
    """Of the questions that the study's adapters answer wrongly when greedy, the share with a right one among eight samples."""
    methods = ("LoRA greedy", "LoRA", "LoRA T=0.6")
    cells: dict[tuple[str, int, int], dict[str, np.ndarray]] = defaultdict(dict)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row["method"] in methods:
                verdicts = np.array([bit == "1" for bit in row["verdicts"]["test"]])
                shaped = verdicts.reshape(-1, row["samples"]["test"])
                cells[row["world"], row["base"], row["seed"]][row["method"]] = shaped
    parts = ["| world | base | greedy | wrong greedily | of them reached |", "|---|---:|---:|---:|---:|"]
    for world, base in sorted({(world, base) for world, base, _ in cells}):
        found = [answers for place, answers in cells.items() if place[:2] == (world, base)]
        greedy = np.concatenate([answers["LoRA greedy"] for answers in found]).any(axis=1)
        sampled = np.concatenate([np.hstack([answers["LoRA"], answers["LoRA T=0.6"]]) for answers in found]).any(axis=1)
        wrong, reached = int((~greedy).sum()), int((~greedy & sampled).sum())
        share = f"{reached} ({100 * reached / wrong:.0f} %)" if wrong else "–"
        parts.append(f"| {world} | {base} | {100 * greedy.mean():.1f} | {wrong} | {share} |")
    return "\n".join(parts)


def tables() -> str:
    """Everything between the markers."""
    trials = ledger(load()) if VERDICTS.is_file() else "No cell has been measured yet."
    asked = f"## The diagnostic on development questions\n\n{diagnosed()}"
    return (
        f"{asked}\n\n## The diagnostic on the study's adapters\n\n{reached_in_study()}\n\n## Trials\n\n{trials}".strip()
    )


def ordered(cells: Cells, members: Sequence[str]) -> list[str]:
    """Contenders of some cells: cheap settings, gates, controls on the LoRA."""
    found = {contender for name in members for contender in cells[name]}
    groups = ("base", "adapter", "λ=", "contrast", "gates", "f ", "LoRA")
    return sorted(found, key=lambda one: (next(i for i, g in enumerate(groups) if one.startswith(g)), one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="of trial.py, to pack")
    parser.add_argument("--diagnostic", type=Path, help="of diagnostic.py, to pack")
    parser.add_argument("--readme", action="store_true")
    options = parser.parse_args()
    if options.cache:
        pack(options.cache)
    if options.diagnostic:
        pack_diagnostic(options.diagnostic)
    if options.readme:
        page = (HERE / "README.md").read_text(encoding="utf-8")
        before, after = page.split(MARKERS[0])[0], page.split(MARKERS[1])[1]
        write_text(HERE / "README.md", f"{before}{MARKERS[0]}\n\n{tables()}\n\n{MARKERS[1]}{after}")
    else:
        print(tables())


if __name__ == "__main__":
    main()
