"""The plots of docs/speed.md, drawn from benchmarks/results/speed_*.json into docs/images as SVG.

    python benchmarks/speed/plots.py

Text and axes take the colour of the page's writing, light or dark; the series have colours that stand out on both. The
same results give the same files, byte for byte.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
INK = "#010203"  # stands for the page's own colour until the file is written
STYLE_SHEET = "<style>svg{color:#24292f}@media (prefers-color-scheme:dark){svg{color:#d8dee4}}</style>"
COLOURS = {
    "lora": "#8c8c8c",
    "lora_trl": "#CC79A7",
    "dora": "#b8860b",
    "gates_naive": "#56B4E9",
    "gates_loragate": "#D55E00",
}
NAMES = {"lora": "LoRA", "lora_trl": "LoRA, TRL's head", "dora": "DoRA", "gates_naive": "gates, naive"}
NAMES["gates_loragate"] = "gates, loragate"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "loragate",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlesize": 9,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def save(figure: Figure, name: str) -> None:
    held = io.StringIO()
    figure.savefig(held, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = held.getvalue().replace(INK, "currentColor")
    start = text.index(">", text.index("<svg")) + 1
    IMAGES.mkdir(parents=True, exist_ok=True)
    lines = (text[:start] + STYLE_SHEET + text[start:]).splitlines()
    (IMAGES / name).write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
    print(f"docs/images/{name}")


def step(found: dict[str, Any]) -> None:
    """Ratios to a LoRA step with full logits: one panel per vocabulary, of the widest MLP."""
    widest = max(case["intermediate"] for case in found["cases"])
    cases = [case for case in found["cases"] if case["intermediate"] == widest]
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    panels = figure.subplots(1, len(cases), sharey=True, squeeze=False)[0]
    groups = {
        "FLOPs": lambda row: row["to_lora"]["flops"],
        "saved activations": lambda row: row["to_lora"]["saved"],
        "time": lambda row: row["to_lora"]["time"]["median"],
    }
    for axes, case in zip(panels, cases, strict=True):
        width = 0.8 / len(case["rows"])
        for place, (name, row) in enumerate(case["rows"].items()):
            heights = [read(row) for read in groups.values()]
            at = [group + (place - (len(case["rows"]) - 1) / 2) * width for group in range(len(groups))]
            axes.bar(at, heights, 0.92 * width, color=COLOURS[name], label=NAMES[name])
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(groups)), list(groups))
        axes.tick_params(axis="x", length=0)
        axes.set_title(f"vocabulary {case['vocabulary']:,}")
    panels[0].set_ylabel("÷ LoRA step with full logits")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    save(figure, "speed-step.svg")


def true_shapes(found: dict[str, Any]) -> None:
    """FLOPs of floor, gate step and LoRA step, as shares of the LoRA step."""
    cases = found["cases"]
    figure = Figure(figsize=(7.6, 0.7 + 0.32 * len(cases)), layout="constrained")
    axes = figure.subplots()
    names = [f"{case['model']}, {case['sequence']}" for case in cases]
    ratios = [case["flops"]["gates_loragate"] / case["flops"]["lora"] for case in cases]
    floors = [case["flops"]["floor"] / case["flops"]["lora"] for case in cases]
    axes.barh(range(len(cases)), ratios, 0.6, color=COLOURS["gates_loragate"], label="Stage-II step, loragate")
    axes.scatter(floors, range(len(cases)), marker="|", s=260, linewidths=2.2, color=INK, label="the floor")
    axes.axvline(1.0, color=COLOURS["lora"], linewidth=1.5, label="LoRA step")
    axes.set_yticks(range(len(cases)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("FLOPs ÷ LoRA step")
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    save(figure, "speed-true-shapes.svg")


def scaling(found: dict[str, Any]) -> None:
    """FLOPs, saved bytes and time against what grows, each relative to its first point, on logarithmic axes."""
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    panels = figure.subplots(2, 4).flatten()
    for axes, (name, curve) in zip(panels, found["curves"].items(), strict=False):
        values = curve["values"]
        lines = {
            "FLOPs": (curve["flops"], "#D55E00"),
            "FLOPs without attention": (curve["flops_without_attention"], "#b8860b"),
            "saved bytes": (curve["saved_bytes"], "#56B4E9"),
            "time": ([one["median"] for one in curve["seconds"]], "#CC79A7"),
        }
        axes.plot(
            values, [value / values[0] for value in values], color=INK, linewidth=0.8, linestyle=":", label="linear"
        )
        for label, (costs, colour) in lines.items():
            axes.plot(values, [cost / costs[0] for cost in costs], color=colour, marker="o", markersize=3, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_title(name)
        axes.set_xticks(values, [f"{value >> 10}k" if value >= 4096 else str(value) for value in values])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[-1].set_axis_off()
    handles, labels = panels[0].get_legend_handles_labels()
    panels[-1].legend(handles, labels, loc="center", frameon=False)
    figure.supylabel("÷ first point", fontsize=9, color=INK)
    save(figure, "speed-scaling.svg")


PLOTS: dict[str, Callable[[dict[str, Any]], None]] = {"step": step, "true_shapes": true_shapes, "scaling": scaling}


def main() -> None:
    with rc_context(STYLE):
        for name, draw in PLOTS.items():
            path = RESULTS / f"speed_{name}.json"
            if path.is_file():
                draw(json.loads(path.read_text(encoding="utf-8")))
            else:
                print(f"{path.name} is not there, so its plot is left as it is")


if __name__ == "__main__":
    main()
