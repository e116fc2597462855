"""Fill the tables of docs/speed.md from benchmarks/results/speed_*.json: text between `<!-- figures: NAME -->` marks.

    python benchmarks/speed/page.py [--check]

No number of that page is typed by hand. A result that is not there yet leaves a sentence that says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKS = re.compile(r"(<!-- figures: ([\w ]+) -->\n).*?(<!-- /figures -->)", re.S)
NAMES = {
    "lora": "LoRA, full logits",
    "lora_trl": "LoRA, TRL's fused head",
    "dora": "DoRA, full logits",
    "gates_naive": "gates done naively",
    "gates_loragate": "**gates, loragate**",
}


def load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"speed_{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def made_on(found: dict[str, Any]) -> str:
    """One line on the machine of a result; the file has the versions."""
    machine = found["machine"]
    kind = "A quick run, to be replaced" if found.get("quick") else "Measured"
    place = f"{machine['cores']} {machine['architecture']} cores ({machine['instructions']})"
    return f"\n{kind} on {place}, {found['repeats']} repeats."


def step(found: dict[str, Any]) -> str:
    """All contestants: FLOPs, saved bytes and time as shares of a LoRA step, a column for each shape."""
    rows = []
    for name in found["cases"][0]["rows"]:
        cells = []
        for case in found["cases"]:
            to = case["rows"][name]["to_lora"]
            low, high = to["time"]["quartiles"]
            cells.append(f"{to['flops']:.3f} / {to['saved']:.3f} / {to['time']['median']:.2f} ({low:.2f}–{high:.2f})")
        rows.append([NAMES[name], *cells])
    shapes = (f"vocabulary {case['vocabulary']:,}, MLP {case['intermediate']}" for case in found["cases"])
    return table(["FLOPs / saved bytes / time ÷ LoRA", *shapes], rows) + "\n" + made_on(found)


def true_shapes(found: dict[str, Any]) -> str:
    limits = {row["figure"]: row for row in found["targets"]}
    rows = []
    for case in found["cases"]:
        start = f"FLOPs of a Stage-II step, {case['model']}, 1 × {case['sequence']} tokens"
        floor, lora = limits.get(f"{start}, to the floor"), limits.get(f"{start}, to a LoRA step")
        rows.append(
            [
                case["model"],
                str(case["sequence"]),
                f"{case['flops']['floor'] / 1e12:.3f}",
                f"{case['flops']['gates_loragate'] / 1e12:.3f}",
                f"{case['to_floor']:.4f}" + (f" ({floor['target']}: {verdict(floor['met'])})" if floor else ""),
                f"{case['to_lora']:.3f}" + (f" ({lora['target']}: {verdict(lora['met'])})" if lora else ""),
                f"{case['to_lora_without_attention']:.3f}",
            ]
        )
    head = ["", "tokens", "floor, TFLOP", "step, TFLOP", "÷ floor", "÷ LoRA step", "÷ LoRA, without attention"]
    return table(head, rows) + "\n" + made_on(found)


def real_size(found: dict[str, Any]) -> str:
    """Steps and decoding beside the products of the base's weights alone."""
    steps = found["steps"]
    rows = []
    for name, row in steps["rows"].items():
        low, high = row["to_floor"]["quartiles"]
        rows.append(
            [
                NAMES[name],
                f"{row['seconds']['median']:.1f}",
                f"{row['to_lora']['median']:.2f}",
                f"{row['to_floor']['median']:.2f} ({low:.2f}–{high:.2f})",
                f"{row['saved_bytes'] / 2**20:.0f}",
            ]
        )
    training = table(["", "seconds", "÷ LoRA", "÷ floor", "saved MiB"], rows)
    sides = ("products", "plain", "gated")
    rows = [
        [
            f"batch {one['batch']}",
            *(f"{one['seconds'][side]['median'] * 1000:.0f}" for side in sides),
            *(f"{one[f'{side}_to_products']['median']:.2f}" for side in sides[1:]),
        ]
        for one in found["decoding"]
    ]
    head = ["ms a token step", "products alone", "plain LoRA", "gated", "plain ÷ products", "gated ÷ products"]
    speed = f"{steps['gflop_per_second']['median']:.0f} GFLOP/s in the products alone."
    return f"{training}\n\n{table(head, rows)}\n{made_on(found)} {speed}"


def targets_by(found: dict[str, Any], row: int, column: int) -> str:
    """The target lines of a result as a table; `row` and `column` say which parts of a figure's name are where."""
    cells: dict[str, dict[str, str]] = {}
    for one in found["targets"]:
        parts = one["figure"].split(", ")
        cells.setdefault(parts[row], {})[parts[column]] = (
            f"{one['measured']:.3g}" if one["met"] else f"**{one['measured']:.3g}**"
        )
    heads = dict.fromkeys(name for line in cells.values() for name in line)
    rows = [[name, *(line.get(head, "") for head in heads)] for name, line in cells.items()]
    figure, target = found["targets"][0]["figure"].split(", ")[0], found["targets"][0]["target"]
    return table([f"{figure} ({target})", *heads], rows) + "\n" + made_on(found)


def gpu(part: str) -> str:
    """A part of `make gpu`'s record."""
    found = json.loads((RESULTS / "gpu.json").read_text(encoding="utf-8"))["parts"].get(part, {}).get("result")
    return GPU[part](found) if found else "Not measured yet: run `make gpu`."


def parity(found: dict[str, Any]) -> str:
    cases = dict.fromkeys(case for row in found.values() for case in row)
    rows = [
        [case, *(f"{row[case][what]:.1e}" for row in found.values() for what in ("logits", "gradients"))]
        for case in cases
    ]
    return table(["", *(f"{family}: {what}" for family in found for what in ("logits", "gradients"))], rows)


def decoding(found: dict[str, Any]) -> str:
    sides = ["base", "adapter", "gated"]
    rows = []
    for name, row in sorted(found.items(), key=lambda one: int(one[0].split()[1])):
        spent = row["tokens_per_second"]
        rows.append(
            [name, *(f"{spent[side]['median']:.0f}" for side in sides), f"{row['time_to_adapter']['median']:.2f}"]
        )
    return table(["tokens per second", *sides, "time, gated ÷ adapter"], rows)


def gpu_steps(found: dict[str, Any]) -> str:
    rows = []
    for name, row in found.items():
        lora, ours = row["lora"], row["gates_loragate"]
        low, high = ours["time_to_lora"]["quartiles"]
        trl = row.get("lora_trl")
        rows.append(
            [
                name + (", recomputed" if row["recomputed"] else ""),
                f"{lora['seconds']['median'] * 1000:.0f}",
                f"{ours['seconds']['median'] * 1000:.0f}",
                f"{ours['time_to_lora']['median']:.2f} ({low:.2f}–{high:.2f})",
                f"{ours['seconds']['median'] / trl['seconds']['median']:.2f}" if trl else "",
                f"{ours['peak_bytes'] / lora['peak_bytes']:.2f}",
                f"{ours['peak_bytes'] / trl['peak_bytes']:.2f}" if trl else "",
            ]
        )
    head = [
        "",
        "LoRA step, ms",
        "gate step, ms",
        "time, gates ÷ LoRA",
        "÷ LoRA with TRL's head",
        "peak memory, gates ÷ LoRA",
        "÷ LoRA with TRL's head",
    ]
    return table(head, rows)


def one_token(found: dict[str, Any]) -> str:
    rows = []
    for name, row in found.items():
        for how in ("eager", "graph", "compiled"):
            if f"gated, {how}" not in row["seconds"]:
                continue
            spent = [
                f"{row['seconds'][f'{side}, {how}']['median'] * 1000:.1f}" for side in ("merged", "adapter", "gated")
            ]
            rows.append([f"{name}, {how}", *spent, f"{row[f'gated to adapter, {how}']['median']:.2f}"])
    return table(["ms a token", "merged", "adapter", "gated", "gated ÷ adapter"], rows)


GPU = {"parity": parity, "decode": decoding, "step": gpu_steps, "token": one_token}
OTHERS: dict[str, Callable[[], str]] = {f"gpu {part}": partial(gpu, part) for part in GPU}
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "step": ("step", step),
    "true shapes": ("true_shapes", true_shapes),
    "head": ("head", partial(targets_by, row=1, column=2)),
    "decode": ("decode", partial(targets_by, row=1, column=2)),
    "real size": ("real_size", real_size),
    "paper size": ("real_size_1.5B", real_size),
}


def filled(text: str) -> str:
    """The page with every marked table made again."""

    def fill(found: re.Match[str]) -> str:
        if found[2] not in OTHERS and found[2] not in TABLES:
            return found[0]  # of another script
        if found[2] in OTHERS:
            return f"{found[1]}\n{OTHERS[found[2]]()}\n\n{found[3]}"
        source, make = TABLES[found[2]]
        result = load(source)
        made = f"Not measured yet: `{source}` of benchmarks/speed." if result is None else make(result)
        return f"{found[1]}\n{made}\n\n{found[3]}"

    return MARKS.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 if the page is not up to date"
    )
    chosen = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = filled(before)
    if chosen.check:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    print("docs/speed.md: up to date" if before == after else "docs/speed.md: tables made again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
