"""Diagnoses as blocks, from the records of `loragate diagnose` (plain data; `docs/diagnostics.md` has their schemas)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from loragate.display import percent
from loragate.report.figures import column_chart, lambda_map, module_gates
from loragate.report.page.build import Block, chart, text
from loragate.report.table import ABSENT, GROUP_OF, Cell, Line, Sheet, difference_cell, or_absent, share_cell

Record = Mapping[str, Any]
Blocks = list[Block | Sheet]


def diagnosis_blocks(record: Record) -> Blocks:
    """What one diagnosis found; its conclusion in words first."""
    return [text(*record["conclusion"]), *DIAGNOSES[record["kind"]][1](record)]


def _entropy(record: Record) -> Blocks:
    blocks: Blocks = []
    if record["classes"]:
        columns = ("tokens", "number", "H base", "H adapter", "H gated", "ΔH", "ΔH < 0, %", "ΔH > 0, %")
        lines = []
        for item in record["classes"]:
            streams = [_interval(item.get(stream), "{:.3f}".format) for stream in ("base", "adapter", "gated")]
            shares = [(percent(item[side]["mean"]),) for side in ("negative", "positive")]
            cells = [(f"{item['tokens']:,}",), *streams, _interval(item["delta"], "{:+.3f}".format), *shares]
            lines.append(Line(item["name"], cells))
        caption = "Entropy in nats per token, with 95 % intervals over rows"
        blocks.append(Sheet("By token class", columns, lines, caption))
    if record["distribution"]:
        blocks += _histogram(record["distribution"], "ΔH, nats", "Distribution of ΔH")
    return [*blocks, *_scores(record["interventions"], "vs the adapter, points")]


def _gates(record: Record) -> Blocks:
    note = (
        f"Range [{record['lower']:g}, {record['upper']:g}]. λ = 1 leaves the adapter as it is, 0 to 1 suppresses it, below 0 "
        "reverses it, above 1 extrapolates it."
    )
    blocks: Blocks = [text(note), chart(partial(lambda_map, module_gates(record)), "λ by layer and module")]
    shares = ("below_zero", "zero_to_one", "above_one", "at_lower", "at_upper")
    columns = ("coefficients", "mean λ", "λ < 0, %", "0 to 1, %", "λ > 1, %", "at L, %", "at U, %")
    groups = {"token class": {"all": record["all"], **record["by_class"]}}
    groups |= {"module type": record["by_type"], "layer": record["by_layer"]}
    for what, values in groups.items():
        lines = [
            Line(name, [(f"{one['count']:,}",), (f"{one['mean']:+.2f}",), *((percent(one[key]),) for key in shares)])
            for name, one in values.items()
        ]
        blocks.append(Sheet(f"By {what}", (what, *columns), lines))
    return [*blocks, *_histogram(record["histogram"], "λ", "Distribution of λ")]


def _alignment(record: Record) -> Blocks:
    columns = ("angle", "cosine", "ρ", "condition", "b_sg, %", "tail, %")
    caption = (
        f"Direction of gate training against the direction of the task value ({record['value_of']}); {record['tokens']:,} "
        f"tokens of {record['rows']} rows, k = {record['k']}. The condition can be met where ρ < 1. b_sg: error of the stopped "
        "gradient; tail: of the top k."
    )
    count = len(record["modules"])
    blocks: Blocks = []
    for title, what, terms, folded in (
        ("All gates", "module", [record["all"]], ""),
        ("Over training", "point", record["checkpoints"], ""),
        ("By module", "module", record["modules"], f"{count} modules"),
    ):
        if terms:
            blocks.append(Sheet(title, (what, *columns), [_terms(one) for one in terms], caption, folded=folded))
            caption = ""
    wanted = ("entropy\nwants more, %", "value\nwants more, %")
    where = ("where", "number of λ", "right way, %", "weighted, %", *wanted)
    caption = "Single λ: do entropy and task value agree on the sign? Weighted: by what each matters for the value"
    lines = []
    for item in record["coordinates"]:
        agreement = [_interval(item[key], percent, "–") for key in ("share", "weighted")]
        more = [(percent(item[key]),) for key in ("raised", "value_raised")]
        lines.append(Line(item["name"], [(f"{item['coordinates']:,}",), *agreement, *more]))
    return [*blocks, *([Sheet("Single coefficients", where, lines, caption)] if lines else [])]


def _terms(item: Record) -> Line:
    total = item["total"]
    cells = [
        (or_absent(total["angle"], "{:.0f}°".format),),
        _interval(total["cosine"], "{:.2f}".format),
        _interval(total["rho"], "{:.2f}".format),
        (str(total["verdict"]),),
        *((or_absent(item[error], percent),) for error in ("stopped_error", "tail_error")),
    ]
    return Line(item["name"], cells)


DIAGNOSES: dict[str, tuple[str, Callable[[Record], Blocks]]] = {
    "delta entropy": ("Entropy: adapter against base", _entropy),
    "realised gates": ("Gates on generated text", _gates),
    "interventions": ("Interventions on the gates", lambda record: _scores(record["rows"], "vs the gates, points")),
    "alignment": ("Does entropy point the right way?", _alignment),
}
"""{kind of record: its heading, and what makes its blocks}"""


def _scores(rows: Sequence[Record], versus: str) -> Blocks:
    """One table per task, from rows with score, difference and verdict."""
    lines: dict[str, list[Line]] = {}
    for row in rows:
        off = f": off at {percent(row['suppressed'])} % of the tokens" if "suppressed" in row else ""
        # the p that the verdict was made with
        versus_row = row["difference"] and {**row["difference"], "p": row["adjusted_p"]}
        cells = [share_cell(row["score"]), difference_cell(versus_row, row["verdict"])]
        line = Line(row["name"] + off, cells, GROUP_OF.get(row["name"], "intervention"), row["score"])
        lines.setdefault(row["task"], []).append(line)
    return [Sheet(task, ("row", "score %", versus), found) for task, found in lines.items()]


def _histogram(data: Record, label: str, title: str) -> Blocks:
    edges, counts = data["edges"], data["counts"]
    bins = zip(edges, edges[1:], counts, strict=False)
    lines = [Line(f"{low:.3g} to {high:.3g}", [(f"{count:,}",)]) for low, high, count in bins]
    numbers = Sheet("", (label, "number"), lines, folded="The numbers")
    return [chart(partial(column_chart, edges, counts, label), title), numbers]


def _interval(value: Mapping[str, float | None] | None, show: Callable[[Any], str], to: str = "\nto ") -> Cell:
    """Mean and ends; the ends are null where rows were too few for them."""
    if value is None or value["mean"] is None:
        return (ABSENT,)
    if value["low"] is None or value["high"] is None:
        return show(value["mean"]), "too few rows\nfor an interval"
    return show(value["mean"]), f"{show(value['low'])}{to}{show(value['high'])}"
