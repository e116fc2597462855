"""Count what `loragate.examine` finds in the adapters of material.py: the planted faults by their code, and false alarms.

    python benchmarks/doctor/count.py --material runs/doctor     # goes on where it was stopped

Every examined case is a line of counted.jsonl in the material's folder. Once all are there, benchmarks/results/doctor.json is
written, and the table between `<!-- figures: doctor -->` and `<!-- /figures -->` of docs/doctor.md is filled. A fault counts as
named when one of its codes is found as an error or a warning (where it forbids one use alone, also as a note); a healthy adapter
should have neither.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loragate
from loragate.evaluation.statistics import average_at_k
from loragate.files import write_json, write_text

ROOT = Path(__file__).parents[2]
RESULT, PAGE = ROOT / "benchmarks" / "results" / "doctor.json", ROOT / "docs" / "doctor.md"
MARKS = re.compile(r"(<!-- figures: doctor -->\n).*?(<!-- /figures -->)", re.S)
HALVES = ("fix", "count")
ASKED = ("kind", "half", "expected", "note", "allowed")
"""What is right of a case."""
Record = dict[str, Any]


def examined(case: Record) -> Record:
    """A case with what was found in it; what `examine` raises is recorded, as a doctor should not raise."""
    began, found, failure, verdict = time.monotonic(), [], "", ""
    given = {name: case[name] for name in ("data", "dev_data") if case[name]}
    try:
        examination = loragate.examine(case["adapter"], case["base"], quick=case["quick"], **given)
        verdict = examination.verdict
        found = [[one.code, one.severity, str(one)] for one in examination.findings]
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    return {
        **{key: case[key] for key in ("name", "quick", "family", *ASKED)},
        "found": found,
        "verdict": verdict,
        "failure": failure,
        "seconds": round(time.monotonic() - began, 1),
    }


def alarms(record: Record) -> list[str]:
    """Codes of a case's errors and warnings, and of its notes where these count."""
    return sorted({code for code, severity, _ in record["found"] if severity != "note" or record["note"]})


def is_right(record: Record) -> bool:
    """A fault is named; a healthy adapter has nothing but what is true of it."""
    if record["failure"]:
        return False
    if record["kind"] == "healthy":
        return not set(alarms(record)) - set(record["allowed"])
    return bool(set(alarms(record)) & set(record["expected"]))


def tally(records: list[Record]) -> Record:
    """How many are right."""
    return {"cases": len(records), "right": sum(map(is_right, records))}


def share(records: list[Record]) -> Record:
    """How many are right, with their share and its 95 % interval."""
    estimate = average_at_k(np.array([[float(is_right(record))] for record in records]))
    interval = [round(estimate.low, 4), round(estimate.high, 4)]
    return tally(records) | {"share": round(estimate.mean, 4), "interval": interval}


def counted(records: list[Record]) -> Record:
    """All figures, as they are written to the result."""
    result: Record = {"loragate": loragate.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for half in HALVES:
        here = [record for record in records if record["half"] == half]
        healthy = [record for record in here if record["kind"] == "healthy"]
        faults = [record for record in here if record["kind"] != "healthy"]
        result[half] = {"faults_named": share(faults), "healthy_without_alarm": share(healthy)}
    kinds = dict.fromkeys(record["kind"] for record in records)
    for kind in kinds:
        here = [record for record in records if record["kind"] == kind]
        kinds[kind] = {
            "expected": here[0]["expected"],
            **{half: tally(part) for half in HALVES if (part := [record for record in here if record["half"] == half])},
            "found": dict(Counter(code for record in here for code in alarms(record)).most_common()),
        }
    result["kinds"] = kinds
    result["misses"] = [
        {
            **{key: record[key] for key in ("name", "half", "expected", "failure")},
            # without the folder of the material
            "found": [
                [code, severity, re.sub(r"\S*/(?=adapters/)", "", said)] for code, severity, said in record["found"]
            ],
        }
        for record in records
        if not is_right(record)
    ]
    for name, quick in (("static", True), ("whole", False)):
        seconds = [record["seconds"] for record in records if record["quick"] == quick]
        result[f"seconds_{name}"] = {"median": statistics.median(seconds), "most": max(seconds)} if seconds else {}
    return result


def table(result: Record) -> str:
    """The result in Markdown: the two halves, and a row for each kind of case in which something was missed."""

    def told(one: Record | None) -> str:
        return f"{one['right']} of {one['cases']}" if one else ""

    def incomplete(row: Record) -> bool:
        return any(row[half]["right"] < row[half]["cases"] for half in HALVES if row.get(half))

    lines = []
    for half, what in (("fix", "to set thresholds"), ("count", "to count")):
        faults, healthy = result[half]["faults_named"], result[half]["healthy_without_alarm"]
        low, high = (f"{100 * bound:.0f}" for bound in faults["interval"])
        lines.append(
            f"- half {what}: {told(faults)} faults named by the right code ({100 * faults['share']:.0f} %, {low}–{high}), "
            f"{told(healthy)} healthy adapters without an error or warning"
        )
    missed = {kind: row for kind, row in result["kinds"].items() if incomplete(row)}
    lines += [
        f"- of {len(result['kinds'])} kinds of cases, healthy ones included, all but these were complete:",
        "",
        "| case | right code | right, thresholds | right, counted | all errors and warnings |",
        "|---|---|---:|---:|---|",
    ]
    for kind, row in missed.items():
        expected = " or ".join(f"`{code}`" for code in row["expected"]) or "none"
        found = ", ".join(f"`{code}` {count}" for code, count in row["found"].items())
        lines.append(f"| {kind} | {expected} | {told(row.get('fix'))} | {told(row.get('count'))} | {found} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--material", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = json.loads((given.material / "cases.json").read_text(encoding="utf-8"))
    path, known = given.material / "counted.jsonl", {}
    if path.is_file():
        known = {record["name"]: record for record in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    records = []
    for number, case in enumerate(cases, 1):
        record = known.get(case["name"])
        if record is None:
            record = examined(case)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            found = record["failure"] or ", ".join(alarms(record)) or "nothing"
            print(
                f"[{number}/{len(cases)}] {'right' if is_right(record) else 'WRONG'} {case['name']}: {found}",
                flush=True,
            )
        # what is right is told by the material as it is now
        records.append({**record, **{key: case[key] for key in ASKED}})
    result = counted(records)
    write_json(given.out, result)
    print(table(result))
    if PAGE.is_file() and MARKS.search(page := PAGE.read_text(encoding="utf-8")):
        write_text(PAGE, MARKS.sub(lambda found: f"{found[1]}{table(result)}\n{found[2]}", page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
