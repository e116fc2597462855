"""Diagnoses as blocks, from the records of `loragate diagnose` (plain data; `docs/diagnostics.md` has their schemas)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loragate.report.page.charts import column_chart
from loragate.report.page.content import Block, score, scores, table, text
from loragate.report.page.training import gates_blocks
from loragate.report.table import ABSENT, difference_cell, joined, or_absent, percent

Record = Mapping[str, Any]
TITLES = {
    "delta entropy": "Entropy: adapter against base",
    "realised gates": "Gates on generated text",
    "interventions": "Interventions on the gates",
    "alignment": "Does entropy point the right way?",
}


def diagnosis_blocks(record: Record) -> list[Block]:
    """What one diagnosis found; its conclusion in words first."""
    return [text(*record["conclusion"]), *_BLOCKS[record["kind"]](record)]


def _entropy(record: Record) -> list[Block]:
    blocks = []
    if record["classes"]:
        rows = [
            [
                item["name"],
                f"{item['tokens']:,}",
                _nats(item["base"]),
                _nats(item["adapter"]),
                _nats(item.get("gated")),
                _nats(item["delta"], "+.3f"),
                percent(item["negative"]["mean"]),
                percent(item["positive"]["mean"]),
            ]
            for item in record["classes"]
        ]
        columns = ["tokens", "number", "H base", "H adapter", "H gated", "ΔH", "ΔH < 0, %", "ΔH > 0, %"]
        blocks.append(
            table(columns, rows, "Entropy in nats per token, with 95 % intervals over rows", "By token class")
        )
    if record["distribution"]:
        blocks.append(_histogram(record["distribution"], "ΔH, nats", "Distribution of ΔH"))
    if record["interventions"]:
        blocks += _scores(record["interventions"], "vs the adapter, points")
    return blocks


def _gates(record: Record) -> list[Block]:
    stats = {item["module"]: {"tokens": item["all"]["count"], **item["all"]} for item in record["modules"]}
    blocks = gates_blocks(stats, record["lower"], record["upper"])
    shares = ("below_zero", "zero_to_one", "above_one", "at_lower", "at_upper")
    columns = ["coefficients", "mean λ", "λ < 0, %", "0 to 1, %", "λ > 1, %", "at L, %", "at U, %"]
    groups = {"token class": {"all": record["all"], **record["by_class"]}}
    groups |= {"module type": record["by_type"], "layer": record["by_layer"]}
    for what, values in groups.items():
        rows = [
            [name, f"{one['count']:,}", f"{one['mean']:+.2f}", *(percent(one[key]) for key in shares)]
            for name, one in values.items()
        ]
        blocks.append(table([what, *columns], rows, "", f"By {what}"))
    blocks.append(_histogram(record["histogram"], "λ", "Distribution of λ"))
    return blocks


def _interventions(record: Record) -> list[Block]:
    blocks = _scores(record["rows"], "vs the gates, points")
    if record["left_out"]:
        blocks.append(text(f"Left out: {', '.join(map(str, record['left_out']))}."))
    return blocks


def _alignment(record: Record) -> list[Block]:
    columns = ["module", "angle", "cosine", "ρ", "condition", "b_sg, %", "tail, %"]
    caption = (
        f"Direction of gate training against the direction of the task value ({record['value_of']}); {record['tokens']:,} "
        f"tokens of {record['rows']} rows, k = {record['k']}. The condition can be met where ρ < 1. b_sg: error of the stopped "
        "gradient; tail: of the top k."
    )
    blocks = [table(columns, [_alignment_row(record["all"])], caption, "All gates")]
    if record["checkpoints"]:
        steps = [_alignment_row(item) for item in record["checkpoints"]]
        blocks.append(table(["point", *columns[1:]], steps, "", "Over training"))
    modules = [_alignment_row(item) for item in record["modules"]]
    if modules:
        blocks.append(table(columns, modules, caption, "By module", folded=f"{len(modules)} modules"))
    names = ["where", "number of λ", "right way, %", "weighted, %"]
    names += ["entropy wants more, %", "value wants more, %"]
    caption = "Single λ: do entropy and task value agree on the sign? Weighted: by what each matters for the value"
    known = {item["name"] for item in record["modules"]}
    for title, inside in (("Single coefficients", False), ("Single coefficients by module", True)):
        rows = [
            [
                item["name"],
                f"{item['coordinates']:,}",
                *(_interval(item[key], percent, "–") for key in ("share", "weighted")),
                *(percent(item[key]) for key in ("raised", "value_raised")),
            ]
            for item in record["coordinates"]
            if (item["name"] in known) == inside
        ]
        if rows:
            blocks.append(table(names, rows, caption, title, **({"folded": f"{len(rows)} modules"} if inside else {})))
    return blocks


def _alignment_row(item: Record) -> list[str]:
    total, stopped = item["total"], item["stopped_error"]
    cosine, rho = total["cosine"], total["rho"]
    return [
        item["name"],
        or_absent(total["angle"], lambda value: f"{value:.0f}°"),
        _interval(cosine, "{:.2f}".format),
        _interval(rho, "{:.2f}".format),
        str(total["verdict"]),
        or_absent(stopped, percent),
        or_absent(item["tail_error"], percent),
    ]


_BLOCKS: dict[str, Callable[[Record], list[Block]]] = {
    "delta entropy": _entropy,
    "realised gates": _gates,
    "interventions": _interventions,
    "alignment": _alignment,
}


def _scores(rows: Sequence[Record], versus: str) -> list[Block]:
    """One block of bars per task, from rows with score, low, high, difference, …"""
    blocks = []
    for task in dict.fromkeys(row["task"] for row in rows):
        shown = []
        for row in (row for row in rows if row["task"] == task):
            group = {"base": "control", "adapter": "baseline", "gated": "scale"}.get(row["name"], "intervention")
            name = f"{row['name']}: {row['meaning']}" if "meaning" in row else row["name"]
            estimate = {"mean": row["score"], "low": row["low"], "high": row["high"]}
            ends = {
                "mean": row["difference"],
                "low": row["difference_low"],
                "high": row["difference_high"],
                "p": row["p"],
            }
            cell = difference_cell(None if row["difference"] is None else ends, row["verdict"])
            shown.append(score(name, group, estimate, [joined(cell)]))
        blocks.append(scores(shown, (versus,), title=task))
    return blocks


def _histogram(data: Record, label: str, title: str) -> Block:
    edges, counts = data["edges"], data["counts"]
    rows = [
        [f"{low:.3g} to {high:.3g}", f"{count:,}"] for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    return Block(
        "curves", {"chart": column_chart(edges, counts, label), "columns": [label, "number"], "rows": rows}, title
    )


def _nats(value: Mapping[str, float | None] | None, form: str = ".3f") -> str:
    return _interval(value, lambda nats: f"{nats:{form}}")


def _interval(value: Mapping[str, float | None] | None, show: Callable[[float], str], to: str = " to ") -> str:
    """Mean and ends; the ends are null where rows were too few for them."""
    if value is None or value["mean"] is None:
        return ABSENT
    if value["low"] is None or value["high"] is None:
        return f"{show(value['mean'])} (too few rows for an interval)"
    return f"{show(value['mean'])} ({show(value['low'])}{to}{show(value['high'])})"
