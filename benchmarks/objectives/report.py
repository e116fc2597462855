"""The tables of the trials, from the verdicts that `trial.py` and `real.py` kept; no model is loaded.

    python benchmarks/objectives/report.py [--cache CACHE] [--diagnostic FOLDER] [--readme]

reads benchmarks/results/objectives_verdicts.jsonl.gz and objectives_diagnostic.json, and for the real model records/ beside
this file with the study's own (benchmarks/real/records). `--cache` first packs what `trial.py` has left; `--diagnostic` takes
up what `diagnostic.py` or `real.py` has left (answers too, without their tokens). `--readme` puts the tables between the
markers of README.md.

The best cheap setting of a cell is chosen on its development questions among base, adapter, one λ and the contrast, each at
every temperature. A contender is compared with it at every temperature on the same test questions; fixes and breaks are
counted against the adapter at the same temperature, answer by answer on the same random streams. Intervals are Student's
over training seeds within a situation, and over all tiny cells; where there is one cell, over its questions.

The diagnostic is also read from the adapters of the study (benchmarks/results/study_verdicts.jsonl.gz), whose greedy
answers and samples are on file; four at T = 1 and four at T = 0.6 make the eight there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/, which holds objectives/
sys.path.insert(0, str(Path(__file__).parents[1] / "real"))  # which holds kinds.py

import kinds
import numpy as np
from scipy.stats import t as student

from loragate.evaluation import compare
from loragate.files import write_json, write_text
from objectives.real import CONTENDERS, RECORDS, measure

HERE = Path(__file__).parent
VERDICTS = HERE.parent / "results" / "objectives_verdicts.jsonl.gz"
DIAGNOSTIC = HERE.parent / "results" / "objectives_diagnostic.json"
STUDY = HERE.parent / "results" / "study_verdicts.jsonl.gz"
MARKERS = ("<!-- tables: begin -->", "<!-- tables: end -->")
HEATS = ("0", "0.3", "0.6", "1")
CHEAP = ("base", "adapter", "λ=", "contrast")
REAL = "real "  # begins the names of situations of the study on the real model
ALL = "all tiny situations"
# that study's methods by their names here; its gates by entropy learned from the adapter's own rows
STUDY_METHODS = {
    "base": "base",
    "LoRA": "adapter",
    "λ=0.5": "λ=0.5",
    "λ=1.5": "λ=1.5",
    "gates [-6,3]": "gates, entropy on own rows",
    "gates [-6,3], unseen rows": "gates, entropy",
    "CE gates [-6,3], unseen rows": "gates, CE",
    "LoRA continued, unseen rows": "LoRA, CE",
}
Cells = dict[str, dict[str, dict[str, Any]]]


def load(path: Path = VERDICTS, real: Path = RECORDS) -> Cells:
    """Records by cell and contender; the real model's cells come last."""
    cells: Cells = defaultdict(dict)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            cells[record["cell"]][record["contender"]] = record
    for place in sorted(real.glob("*.jsonl.gz")):
        name = place.name.removesuffix(".jsonl.gz")
        situation, seed = name.rsplit("-", 1)
        study = measure.records_of(name, measure.read_design(), measure.RECORDS)
        lines = [(STUDY_METHODS.get(line["method"]), line) for record in study for line in record.lines.values()]
        lines += [(line["method"], line) for line in measure.Record(place).lines.values()]
        cells[f"{REAL}{situation}/{seed}"] = as_in_trials(lines)
    return dict(cells)


def as_in_trials(lines: Sequence[tuple[str | None, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Lines of the real model's records in the form of `trial.py`, with the training: {contender: record}."""
    found: dict[str, dict[str, Any]] = {}
    for name, line in lines:
        if name is None or line["what"] == "retention":
            continue
        record = found.setdefault(name, {"verdicts": {}})
        if line["what"] == "training":
            record["training"] = line
        else:
            record["verdicts"][line["what"]] = line["correct"]
    return found


def pack(cache: Path, path: Path = VERDICTS) -> None:
    """The records of a cache as one file; the same records, the same bytes."""
    records = [json.loads(one.read_text(encoding="utf-8")) for one in sorted((cache / "answers").glob("*/*/*.json"))]
    lines = "".join(json.dumps(record, ensure_ascii=False, sort_keys=True) + "\n" for record in records)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def pack_diagnostic(folder: Path, path: Path = DIAGNOSTIC) -> None:
    """Take the summaries of a folder of `diagnostic.py` up into one file, and its answers into the one beside it."""
    answers_path = path.with_suffix(".jsonl.gz")
    found, answers = {}, {}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        with gzip.open(answers_path, "rt", encoding="utf-8") as lines:
            for line in lines:
                answers.setdefault(json.loads(line)["of"], []).append(line)
    for place in sorted(one.parent for one in folder.rglob("summary.json")):
        name = str(place.relative_to(folder))
        found[name] = json.loads((place / "summary.json").read_text(encoding="utf-8"))
        answers[name] = []
        for kind in ("greedy", "sampled"):
            for line in (place / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines():
                sample = json.loads(line)
                kept = {key: sample[key] for key in ("question", "sample", "text", "finish_reason")}
                answers[name].append(json.dumps({"of": name, "kind": kind, **kept}, ensure_ascii=False) + "\n")
    write_json(path, found)
    text = "".join(line for name in found for line in answers[name])
    answers_path.write_bytes(gzip.compress(text.encode(), mtime=0))


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
    offered = [
        (name, heat)
        for name, record in contenders.items()
        for heat in HEATS
        if name.startswith(CHEAP) and f"dev T={heat}" in record["verdicts"]
    ]
    return max(
        offered,
        key=lambda one: (scores(contenders[one[0]], "dev", one[1]).mean(), one[0] == "adapter", -HEATS.index(one[1])),
    )


def flips(after: np.ndarray, before: np.ndarray) -> tuple[int, int]:
    """Answers that became right, and those that became wrong."""
    return int((after > before).sum()), int((after < before).sum())


def interval(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> str:
    """Mean difference of pairs of verdicts [Q, K], one pair a cell, in points, with its 95 % interval."""
    if len(pairs) == 1:
        return kinds.interval(compare(*pairs[0]))
    values = [100 * (own.mean() - other.mean()) for own, other in pairs]
    mean = float(np.mean(values))
    half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"


def ledger(cells: Cells) -> str:
    """One table per situation: scores, fixes and breaks, and the greedy answers beside the best cheap setting."""
    parts = []
    groups: dict[str, list[str]] = defaultdict(list)
    for name in cells:
        groups[name.rsplit("/", 1)[0]].append(name)
    tiny = [name for name in cells if not name.startswith(REAL)]
    for situation, members in {**groups, **({ALL: tiny} if len(tiny) > 1 else {})}.items():
        picked = {name: best_cheap(cells[name]) for name in members}
        told = ", ".join(f"seed {name.rsplit('/', 1)[1]}: {who} T={heat}" for name, (who, heat) in picked.items())
        parts.append(f"### {situation[0].upper()}{situation[1:]}\n")
        if situation != ALL:
            parts.append(f"Best cheap setting, {told}.\n")
        heads = [f"T = {heat}" if heat != "0" else "greedy" for heat in HEATS]
        heads += ["greedy − best cheap", "greedy − adapter's greedy"]
        parts.append(f"| | cells | {' | '.join(heads)} |\n|---|---:|{'---:|' * len(heads)}")
        for contender in ordered(cells, members):
            asked = [name for name in members if "test T=0" in cells[name].get(contender, {"verdicts": ()})["verdicts"]]
            if not asked:
                parts.append(f"| {contender} | 0 | {' | '.join(['not run'] * len(heads))} |")
                continue
            columns = [column(contender, [cells[name] for name in asked], heat) for heat in HEATS]
            for settings in (picked, dict.fromkeys(asked, ("adapter", "0"))):
                others = [scores(cells[name][settings[name][0]], "test", settings[name][1]) for name in asked]
                own = [scores(cells[name][contender], "test", "0") for name in asked]
                columns.append(interval(list(zip(own, others, strict=True))))
            columns[-1] = "" if contender == "adapter" else columns[-1]
            parts.append(f"| {contender} | {len(asked)} | {' | '.join(columns)} |")
        parts.append("")
    return "\n".join(parts)


def column(contender: str, cells: Sequence[dict[str, dict[str, Any]]], heat: str) -> str:
    """Share of right answers at a temperature, and fixes and breaks against the adapter."""
    if any(f"test T={heat}" not in cell[contender]["verdicts"] for cell in cells):
        return "not run"
    pairs = [(scores(cell[contender], "test", heat), scores(cell["adapter"], "test", heat)) for cell in cells]
    mean = 100 * np.mean([after.mean() for after, _ in pairs])
    counts = np.sum([flips(after, before) for after, before in pairs], axis=0)
    return f"{mean:.1f}" if contender == "adapter" else f"{mean:.1f} (+{counts[0]} −{counts[1]})"


def trainings(cells: Cells) -> str:
    """How the contenders' training on the real model went.

    A loss compares with itself alone, the first with the last. A dozen λ have no loss: their rounds have mean scores.
    """
    parts = ["| | first five losses | last five | λ mean | λ < 0 | λ > 1 | CPU minutes |", f"|---|{'---:|' * 6}"]
    for name in (name for name in cells if name.startswith(REAL)):
        for contender in CONTENDERS:
            found = cells[name].get(contender, {}).get("training")
            if found is None:
                continue
            if rounds := found.get("rounds"):
                values = np.array(list(found["constants"].values()))
                ends = [f"{100 * rounds[at]:.1f} % in the {place} round" for at, place in ((0, "first"), (-1, "last"))]
                acting = {"mean": values.mean(), "below_zero": (values < 0).mean(), "above_one": (values > 1).mean()}
            else:
                ends = [f"{np.mean(found['losses'][part]):.3f}" for part in (slice(5), slice(-5, None))]
                acting = found.get("gates")
            shares = (
                [f"{acting['mean']:.2f}", *(f"{100 * acting[key]:.0f} %" for key in ("below_zero", "above_one"))]
                if acting
                else ["–"] * 3
            )
            minutes = (found.get("preparing_cpu_seconds", 0.0) + found["training_cpu_seconds"]) / 60
            parts.append(f"| {name}: {contender} | {' | '.join(ends)} | {' | '.join(shares)} | {minutes:.1f} |")
    return "\n".join(parts)


def both_kinds(folder: Path = RECORDS) -> str:
    """Greedy answers of the real model to questions of one operation (the test) and of two (the rest), where both were asked."""
    parts = [
        "| | test: right, % | longer, % | rest: right, % | longer, % | rest, against the adapter | weighed, against the adapter "
        "| other forms |",
        f"|---|{'---:|' * 6}---|",
    ]
    over_cells: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}  # [test, rest, weighed] of each cell
    for place in sorted(folder.glob("*.jsonl.gz")):
        cell = place.name.removesuffix(".jsonl.gz")
        study, _ = measure.records_of(cell, measure.read_design(), measure.RECORDS)
        lines = {**study.lines, **measure.Record(place).lines}
        both = (kinds.GREEDY, kinds.REST)
        asked = [name for name in (kinds.ADAPTER, *CONTENDERS) if all((name, what) in lines for what in both)]
        for name in asked if kinds.ADAPTER in asked[:-1] else ():  # and somebody beside it
            adapter = name == kinds.ADAPTER
            marked = "marked" if not adapter and kinds.sign_of(lines, name).get("told") else ""
            row = [*kinds.side_by_side(cell, lines, name), marked]
            parts.append(f"| {cell}: {'adapter' if adapter else name} | {' | '.join(row)} |")
            if not adapter:
                over_cells[name].append([gap.mean for gap in kinds.against_adapter(cell, lines, name)])
    if several := {name: np.array(found) for name, found in over_cells.items() if len(found) > 1}:
        parts += ["", "| points against the adapter | cells | test | rest | weighed | weighed, each cell |"]
        parts += ["|---|---:|---:|---:|---:|---|"]
    for name, found in several.items():
        each = ", ".join(map(kinds.points, found[:, 2]))
        parts.append(f"| {name} | {len(found)} | {' | '.join(map(kinds.points, found.mean(axis=0)))} | {each} |")
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
    cells = load()
    parts = {
        "The diagnostic: development questions of tiny situations, unseen prompts of the real model": diagnosed(),
        "The diagnostic on the study's adapters": reached_in_study(),
        "Trials": ledger(cells),
    }
    if any(name.startswith(REAL) for name in cells):
        parts["Questions of one operation and of two, on the real model, greedily"] = both_kinds()
        parts["Training on the real model"] = trainings(cells)
    return "\n\n".join(f"## {title}\n\n{table}" for title, table in parts.items()).strip()


def ordered(cells: Cells, members: Sequence[str]) -> list[str]:
    """Contenders of some cells: cheap settings, gates, controls on the LoRA."""
    found = {contender for name in members for contender in cells[name]}
    if any(name.startswith(REAL) for name in members):
        found |= set(CONTENDERS)  # those that were not run are said to be so
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
