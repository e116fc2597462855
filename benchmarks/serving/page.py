"""Fill the figures of docs/serving.md and docs/verify.md from benchmarks/results: text between `<!-- figures: NAME -->` marks.

python benchmarks/serving/page.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("serving.md", "verify.md")]
RESULTS = ROOT / "benchmarks" / "results"
MARKS = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- /figures -->)", re.S)
RATIOS = ("gated_to_adapter", "strengths_to_adapter", "adapter_to_base", "adapter_to_vllm")
CASES = {
    "all slots filled": "base, plain, two gated; all slots filled",
    "prefix cache": "the same from the prefix cache",
    "one slot, chunked prefill": "one slot, chunked prefill of 24 tokens",
    "other granularities": "other granularities",
    "two ranks": "two CPU ranks (tensor parallel)",
    "two ranks, sharded adapters": "two ranks, fully sharded adapters",
    "adapter four times as strong": "adapter four times as strong",
}


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"serving_{name}.json").read_text(encoding="utf-8"))
    return found


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def agreement() -> str:
    """The largest difference of each batch, over prompts and generated tokens; all gated adapters of a batch in one column."""
    rows = []
    for case, found in load("agreement")["largest_difference_of_a_log_prob"].items():
        sides: dict[str, list[float]] = {"base": [], "plain": [], "gated": []}
        for name, one in found.items():
            sides.get(name, sides["gated"]).append(max(one["prompt"] or 0.0, one["generated"]))
        other = f"{sum(one['other_greedy_choices'] for one in found.values())} of {sum(one['tokens'] for one in found.values())}"
        rows.append([CASES[case], *(f"{max(side):.1e}" if side else "" for side in sides.values()), other])
    return table(["batch", "base", "plain adapter", "gated", "other greedy choices"], rows)


def rounding() -> str:
    found = load("agreement")["transformers_with_and_without_cache"]
    others = max(value for name, value in found.items() if name != "strong")
    return (
        "transformers differs from itself, token by token with its cache against one pass over the same tokens, by "
        f"{found['base']:.1e} for the base, by at most {others:.1e} for these adapters and by {found['strong']:.1e} for the "
        "one four times as strong."
    )


def throughput() -> str:
    rows = []
    for case, found in load("throughput")["cases"].items():
        speeds = [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in found["tokens_per_second"].values()]
        ratios = [found[name] for name in RATIOS]
        rows.append(
            [case, *speeds, *("{:.2f} ({:.2f}–{:.2f})".format(one["median"], *one["quartiles"]) for one in ratios)]
        )
    head = [
        "tokens per second",
        "base",
        "plain adapter",
        "gated",
        "a strength per sequence",
        "plain, vLLM's own products",
    ]
    head += ["gated : plain, median (quartiles)", "strengths : plain", "plain : base", "plain : vLLM's own"]
    return table(head, rows)


def clients() -> str:
    found = load("load_vllm")
    row = [
        f"{found['requests']:,} of {found['tokens_per_request']} tokens",
        str(found["errors"]),
        str(found["replies_that_differ"]),
        ", ".join(f"{value:.0f} s" for value in found["latency_s"].values()),
        ", ".join(str(size) for size in found["memory_mib"]),
    ]
    memory = "memory before the first and after each round, MiB"
    return table(["requests", "errors", "replies that differ", "p50, p95 latency", memory], [row], left=0)


def verify() -> str:
    """One line for each check, with the worst figure and the verdict of each runtime."""
    runs = json.loads((RESULTS / "verify.json").read_text(encoding="utf-8"))["runs"]
    names = dict.fromkeys(one["name"] for run in runs.values() for one in run["checks"])
    rows = [
        [name, *(verdict([one for one in run["checks"] if one["name"] == name]) for run in runs.values())]
        for name in names
    ]
    return table(["", *(f"{case}<br>{run['runtime']}" for case, run in runs.items())], rows)


def verdict(checks: list[dict[str, Any]]) -> str:
    """Of a check of one or several models: the one that fails, else the largest figure."""
    if not checks or all(one["verdict"] == "not measured" for one in checks):
        return "not measured"
    worst = max(checks, key=lambda one: (one["verdict"] == "FAILS", one["figure"] is None, one["figure"] or 0.0))
    figure = "other tokens" if worst["figure"] is None else f"{worst['figure']:.1e}"
    if worst["unit"] != "nats":
        figure = f"{worst['figure']:g} {worst['unit']}"
    return f"**fails**: {worst['of']}, {figure}" if worst["verdict"] == "FAILS" else figure


PARTS: dict[str, Callable[[], str]] = {
    "agreement": agreement,
    "rounding": rounding,
    "throughput": throughput,
    "clients": clients,
    "verify": verify,
}


def filled(text: str) -> str:
    """The page with every table as the results have it."""
    return MARKS.sub(lambda mark: f"{mark[1]}{PARTS[mark[2]]()}\n{mark[3]}" if mark[2] in PARTS else mark[0], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; the exit status tells")
    options = parser.parse_args()
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    if options.check:
        sys.exit(any(filled(text) != text for text in texts.values()))
    for page, text in texts.items():
        page.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
