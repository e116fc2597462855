"""What a page shows of trainings, of how a range was chosen, and of diagnoses, as blocks.

From their records, which are plain data; `docs/diagnostics.md` has those of `loragate diagnose`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from loragate.display import percent, stopped_notes
from loragate.report.figures import (
    Curve,
    History,
    column_chart,
    curve_of,
    lambda_map,
    line_chart,
    thinned,
)
from loragate.report.page.build import Block, chart, text
from loragate.report.sweep import heat_maps, selection_sentence, suite_table, sweep_tables
from loragate.report.table import ABSENT, GROUP_OF, Cell, Line, Table, difference_cell, or_absent, share_cell

Record = Mapping[str, Any]
Blocks = list[Block | Table]
ROWS = 24  # of the table below a curve
CURVES = {
    "topk_entropy": "top-k entropy / log k",
    "nll": "negative log-likelihood per token, nats",
    "gate_mean": "mean λ",
}
SHARES = {"gate_below_zero": "λ < 0", "gate_above_one": "λ > 1", "gate_saturated": "at a bound"}


def training_blocks(histories: Mapping[str, History]) -> Blocks:
    """Curves of one or several trainings, {label: log records}."""
    note = "The training loss says that the objective was met. It does not say that answers improved."
    blocks: Blocks = [text(note)]
    for key, label in CURVES.items():
        curves = {name: curve_of(history, key) for name, history in histories.items()}
        blocks += _curves(curves, label, label[:1].upper() + label[1:])
    for name, history in histories.items():
        shares = {label: curve_of(history, key) for key, label in SHARES.items()}
        shares = {label: points for label, points in shares.items() if any(value for _, value in points)}
        blocks += _curves(shares, "share of tokens", f"Where λ lies, {name}")
    return blocks


def _curves(curves: Mapping[str, Curve], label: str, title: str) -> Blocks:
    """A chart of those that have points, and its numbers; nothing where none has."""
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return []
    values = {name: dict(points) for name, points in curves.items()}
    lines = [
        Line(f"{step:g}", [(f"{found[step]:.4g}" if step in found else ABSENT,) for found in values.values()])
        for step in thinned(sorted(set().union(*values.values())), ROWS)
    ]
    numbers = Table("", ("step", *curves), lines, folded="The numbers")
    return [chart(partial(line_chart, curves, label), title), numbers]


def selection_blocks(selection: Record | None) -> Blocks:
    """The evidence on which a range was chosen, as the artifact's record keeps it: scores of candidates, or a sentence."""
    if not selection:
        return []
    evidence = selection.get("evidence") or {}
    sentences = [f"Method: {selection.get('method', 'not recorded')}."]
    if isinstance(evidence, str):
        sentences.append(f"Evidence: {evidence}.")
        evidence = {}
    sentences += [f"{note}." for note in stopped_notes(selection)]
    # of a sweep and of earlier records the name, else the setting with its temperature
    chosen = (selection.get("recommendation") or {}).get("setting", selection.get("picked"))
    lines = []
    for name, value in evidence.items():
        if isinstance(value, Mapping) and {"mean", "low", "high"} <= set(value):
            group = "baseline" if name.startswith("adapter") else "scale"
            lines.append(Line(name + (" (chosen)" if name == chosen else ""), [share_cell(value)], group, value))
    scored = [Table("", ("Setting", "Score %"), lines, "On the probe; the chosen one is optimistic.")] if lines else []
    return [text(*sentences), *scored]


def sweep_blocks(record: Record) -> Blocks:
    """What was chosen of a sweep's cells, heat maps of them, and their numbers."""
    blocks: Blocks = [text(selection_sentence(record))]
    for name, draw in heat_maps(record).items():
        of = name.removeprefix("heatmap").replace("_", ", ")
        blocks.append(chart(draw, f"Scores by range{of}"))
    tables = [suite_table(record)] if "suite" in record else sweep_tables(record, None)
    return [*blocks, *(replace(table, folded="The numbers") for table in tables)]


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
        blocks.append(Table("By token class", columns, lines, caption))
    if record["distribution"]:
        blocks += _histogram(record["distribution"], "ΔH, nats", "Distribution of ΔH")
    return [*blocks, *_scores(record["interventions"], "vs the adapter, points")]


def _gates(record: Record) -> Blocks:
    note = (
        f"Range [{record['lower']:g}, {record['upper']:g}]. λ = 1 leaves the adapter as it is, 0 to 1 suppresses it, below 0 "
        "reverses it, above 1 extrapolates it."
    )
    blocks: Blocks = [text(note), chart(partial(lambda_map, record["modules"]), "λ by layer and module")]
    shares = ("below_zero", "zero_to_one", "above_one", "at_lower", "at_upper")
    columns = ("coefficients", "mean λ", "λ < 0, %", "0 to 1, %", "λ > 1, %", "at L, %", "at U, %")
    groups = {"token class": {"all": record["all"], **record["by_class"]}}
    groups |= {"module type": record["by_type"], "layer": record["by_layer"]}
    for what, values in groups.items():
        lines = [
            Line(name, [(f"{one['count']:,}",), (f"{one['mean']:+.2f}",), *((percent(one[key]),) for key in shares)])
            for name, one in values.items()
        ]
        blocks.append(Table(f"By {what}", (what, *columns), lines))
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
            blocks.append(Table(title, (what, *columns), [_terms(one) for one in terms], caption, folded=folded))
            caption = ""
    wanted = ("entropy\nwants more, %", "value\nwants more, %")
    where = ("where", "number of λ", "right way, %", "weighted, %", *wanted)
    caption = "Single λ: do entropy and task value agree on the sign? Weighted: by what each matters for the value"
    lines = []
    for item in record["coordinates"]:
        agreement = [_interval(item[key], percent, "–") for key in ("share", "weighted")]
        more = [(percent(item[key]),) for key in ("raised", "value_raised")]
        lines.append(Line(item["name"], [(f"{item['coordinates']:,}",), *agreement, *more]))
    return [*blocks, *([Table("Single coefficients", where, lines, caption)] if lines else [])]


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
    return [Table(task, ("row", "score %", versus), found) for task, found in lines.items()]


def _histogram(data: Record, label: str, title: str) -> Blocks:
    edges, counts = data["edges"], data["counts"]
    bins = zip(edges, edges[1:], counts, strict=False)
    lines = [Line(f"{low:.3g} to {high:.3g}", [(f"{count:,}",)]) for low, high, count in bins]
    numbers = Table("", (label, "number"), lines, folded="The numbers")
    return [chart(partial(column_chart, edges, counts, label), title), numbers]


def _interval(value: Mapping[str, float | None] | None, show: Callable[[Any], str], to: str = "\nto ") -> Cell:
    """Mean and ends; the ends are null where rows were too few for them."""
    if value is None or value["mean"] is None:
        return (ABSENT,)
    if value["low"] is None or value["high"] is None:
        return show(value["mean"]), "too few rows\nfor an interval"
    return show(value["mean"]), f"{show(value['low'])}{to}{show(value['high'])}"
