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
RATIOS = {
    "gated_to_adapter": "gated : plain",
    "strengths_to_adapter": "a strength per sequence : plain",
    "adapter_to_base": "plain : base",
    "adapter_to_vllm": "plain : vLLM's own products",
}


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are text, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows))


def throughput() -> str:
    """Medians and quartiles of the ratios of speeds."""
    cases = json.loads((RESULTS / "serving_throughput_real.json").read_text(encoding="utf-8"))["cases"]
    rows = [
        [case, *("{:.2f} ({:.2f}–{:.2f})".format(found[name]["median"], *found[name]["quartiles"]) for name in RATIOS)]
        for case, found in cases.items()
    ]
    return table(["", *RATIOS.values()], rows)


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
    "throughput": throughput,
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
