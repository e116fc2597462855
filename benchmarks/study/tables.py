"""The study's results as markdown tables: one world with everything, and all worlds at a glance."""

from __future__ import annotations

from typing import Any

from scipy.stats import false_discovery_control as bh

from loragate.evaluation import holm

TITLES = {"english": "English"}
FEWEST_BASES = 3
SCORES = ("base", "LoRA", "LoRA T=0.3", "DFT", "SCALE [0,1]", "SCALE [-6,3]", "SCALE [0,6]")
RULE = "automatic: [0,1] [-6,3] [0,6]"


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
        found = [results[world]["claims"].get(said) for world in worlds]
        lines.append(_row([said, *(_shown(gap) if gap else "–" for gap in found)]))
    chosen = [results[world]["rules"][RULE] for world in worlds]
    lines.append(_row(["the automatic choice beats the LoRA", *(_shown(entry["gain"]) for entry in chosen)]))
    lines.append(_row(["the automatic choice beats the base", *(_shown(entry["versus_base"]) for entry in chosen)]))
    lines.append(_row(["cells that it harmed", *(f"{entry['harmed']} of {entry['cells']}" for entry in chosen)]))
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
    lines += [
        "",
        "| rule | gain over the LoRA | worst cell | cells harmed | regret | fair regret | picks |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for rule, entry in result["rules"].items():
        picks = ", ".join(f"{one.removeprefix('SCALE ')} {count}" for one, count in entry["picks"].items())
        lines.append(
            f"| {rule} | {interval(entry['gain'])} | {entry['gain']['worst']:+.1f} | {entry['harmed']} of {entry['cells']} | "
            f"{entry['regret']['mean']:.1f} | {entry['regret_fair']['mean']:.1f} | {picks} |"
        )
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
