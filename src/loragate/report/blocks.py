"""What a page is made of, and what it shows of trainings, selections and diagnoses, from their records (plain data).

A block is a `Table`, or one of these by kind: text ([paragraph]), list ([item]), chart (what draws it, or its SVG), row ([block],
side by side where there is room), tokens ({"traces", "left_out"}, see `tokens_block`), and of `examination.py` findings, changes
and pairs. `docs/diagnostics.md` has the records of `loragate diagnose`.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from io import StringIO
from itertools import pairwise
from typing import Any

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from loragate.display import percent
from loragate.report.figures import INK, Curve, Draw, History, column_chart, curve_of, lambda_map, line_chart, subsample
from loragate.report.scores import caption, score_tables
from loragate.report.selection import heat_maps, read_selection, selection_table
from loragate.report.table import (
    ABSENT,
    GROUP_OF,
    Cell,
    Line,
    Table,
    difference_cell,
    format_cell,
    format_optional,
    share_cell,
)

Record = Mapping[str, Any]
TRACE_BYTES = 2_300_000
ROWS = 24  # of the table below a curve
CURVES = {
    "topk_entropy": "top-k entropy / log k",
    "nll": "negative log-likelihood per token, nats",
    "gate_mean": "mean λ",
}
SHARES = {"gate_below_zero": "λ < 0", "gate_above_one": "λ > 1", "gate_saturated": "at a bound"}


@dataclass(frozen=True)
class Block:
    """Something that the page shows other than a table.

    Attributes:
        kind, data: see the module.
        title: heading above it; empty for none.
    """

    kind: str
    data: Any
    title: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page with an entry in its contents."""

    anchor: str
    title: str
    blocks: Sequence[Block | Table] = ()


@dataclass(frozen=True)
class Banner:
    """What a report opens with.

    Attributes:
        advice: what to do.
        score: what that scores, and on what.
        more: the alternatives' scores and the reason, sentences.
        chart: of these scores; None where nothing was scored.
        tone: "error", "warning", "good" or "grey" colours its edge; empty for the usual one.
    """

    advice: str
    score: str = ""
    more: Sequence[str] = ()
    chart: Block | Table | None = None
    tone: str = ""


def text(*paragraphs: str) -> Block:
    """Paragraphs."""
    return Block("text", paragraphs)


def row(*blocks: Block | Table) -> Block:
    """Blocks side by side, one below the other on a phone."""
    return Block("row", blocks)


def chart(draw: Draw, title: str) -> Block:
    """A figure, drawn where it is shown."""
    return Block("chart", draw, title)


def render_chart(block: Block | Table) -> Block | Table:
    """The block with its chart as SVG: the ink is the page's own, and text stays text in the page's letters."""
    if isinstance(block, Block) and block.kind == "row":
        return replace(block, data=[render_chart(one) for one in block.data])
    if not isinstance(block, Block) or block.kind != "chart" or isinstance(block.data, Markup):
        return block
    buffer = StringIO()
    block.data(buffer)
    # a whole document, with an XML head that cannot stand inside HTML: of its root only the size is kept
    root, _, inside = buffer.getvalue().partition("<svg ")[2].partition(">")
    box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', root)
    assert box is not None
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r' id="[\w.]+_\d+"', "", inside)  # every figure on the page would have them
    inside = re.sub(r"; font-family: [^;\"]*", "", inside)
    inside = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", inside)  # as matplotlib before 3.10 has it
    inside = inside.replace(INK, "currentColor")
    # its own width lets the page keep the letters of narrow and wide figures at one size
    head = Markup('<svg {} role="img" aria-label="{}" class="chart" style="--size:{}px">').format(
        Markup(box[0]), block.title, box[1]
    )
    return replace(block, data=head + Markup(inside))


def tokens_block(traces: Mapping[str, Any], limit: int = TRACE_BYTES) -> Block:
    """The token view of a record of `loragate diagnose tokens`; a page can show one.

    Questions are left out from the end until the rest fits `limit` bytes, so that the page can be mailed and opened on a phone;
    the first always stays.
    """
    head = {key: traces[key] for key in ("lower", "upper", "modules")}
    size = len(safe_json(head).encode())
    kept: list[dict[str, Any]] = []
    for question in traces["questions"]:
        size += len(safe_json(question).encode()) + 1
        if kept and size > limit:
            break
        kept.append(question)
    left_out = len(traces["questions"]) - len(kept)
    return Block("tokens", {"traces": {**head, "questions": kept}, "left_out": left_out})


def safe_json(data: Any) -> Markup:
    """JSON that can stand inside a script element; raises ValueError for a number that is not finite."""
    return htmlsafe_json_dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def build_page(title: str, banner: Banner | None, sections: Sequence[Section], footer: str = "") -> str:
    """The whole HTML text.

    Args:
        title: heading and window title.
        banner: what it opens with; None leaves out heading and contents, too, for a page inside another.
        sections: what follows it, in order.
        footer: one line on what wrote the report, and when.
    """
    assets = resources.files("loragate.report") / "templates"
    script = (assets / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page: str = _template().render(
        title=title,
        banner=banner,
        sections=[replace(section, blocks=[render_chart(block) for block in section.blocks]) for section in sections],
        style=Markup((assets / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=digest,
        footer=footer,
    )
    return page


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("loragate.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"joined": format_cell, "safe_json": safe_json}
    return environment.get_template("page.html")


Blocks = list[Block | Table]


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
        for step in subsample(sorted(set().union(*values.values())), ROWS)
    ]
    numbers = Table("", ("step", *curves), lines, collapsed_label="The numbers")
    return [chart(partial(line_chart, curves, label), title), numbers]


def evaluation_blocks(record: Record) -> Blocks:
    """Maps of the ranges where several are compared, the tables of scores, and what they mean."""
    return [*_maps(record), *score_tables(record), text(*caption(record).split("\n"))]


def selection_blocks(record: Record | None) -> Blocks:
    """What was selected of how many, maps of the ranges, and the scores; of a record without scores what it says."""
    if not record:
        return []
    if (found := read_selection(record)) is None:
        return [text(f"Selection: {record.get('reason', 'not recorded')}.")]
    return [text(*found.sentences()), *_maps(record), selection_table(found, most=None)]


def _maps(record: Record) -> Blocks:
    """Maps of the ranges that a selection or an evaluation compares."""
    return [
        chart(draw, f"Scores by range{name.removeprefix('heatmap').replace('_', ': ', 1).replace('_', ' ')}")
        for name, draw in heat_maps(record).items()
    ]


def diagnosis_blocks(record: Record) -> Blocks:
    """What one diagnosis found; its conclusion in words first."""
    return [text(*record["conclusion"]), *DIAGNOSES[record["kind"]][1](record)]


def _entropy(record: Record) -> Blocks:
    blocks: Blocks = []
    if record["classes"]:
        columns = ("tokens", "number", "H base", "H adapter", "H gated", "ΔH", "ΔH < 0, %", "ΔH > 0, %")
        lines = []
        for item in record["classes"]:
            streams = [interval_cell(item.get(stream), "{:.3f}".format) for stream in ("base", "adapter", "gated")]
            shares = [(percent(item[side]["mean"]),) for side in ("negative", "positive")]
            cells = [(f"{item['tokens']:,}",), *streams, interval_cell(item["delta"], "{:+.3f}".format), *shares]
            lines.append(Line(item["name"], cells))
        caption = "Entropy in nats per token, with 95 % intervals over rows"
        blocks.append(Table("By token class", columns, lines, caption))
    if record["distribution"]:
        blocks += _histogram(record["distribution"], "ΔH, nats", "Distribution of ΔH", open_ends=True)
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
        f"tokens of {record['rows']} different rows or questions, k = {record['k']}. The condition can be met where ρ < 1. "
        "b_sg: error of the stopped gradient; tail: of the top k."
    )
    count = len(record["modules"])
    blocks: Blocks = []
    for title, what, terms, folded in (
        ("All gates", "module", [record["all"]], ""),
        ("By module", "module", record["modules"], f"{count} modules"),
    ):
        if terms:
            blocks.append(
                Table(title, (what, *columns), [_terms(one) for one in terms], caption, collapsed_label=folded)
            )
            caption = ""
    wanted = ("entropy\nwants more, %", "value\nwants more, %")
    where = ("where", "number of λ", "right way, %", "weighted, %", *wanted)
    caption = "Single λ: do entropy and task value agree on the sign? Weighted: by what each matters for the value"
    lines = []
    for item in record["coordinates"]:
        agreement = [interval_cell(item[key], percent, "–") for key in ("share", "weighted")]
        more = [(percent(item[key]),) for key in ("raised", "value_raised")]
        lines.append(Line(item["name"], [(f"{item['coordinates']:,}",), *agreement, *more]))
    return [*blocks, *([Table("Single coefficients", where, lines, caption)] if lines else [])]


def _terms(item: Record) -> Line:
    total = item["total"]
    cells = [
        (format_optional(total["angle"], "{:.0f}°".format),),
        interval_cell(total["cosine"], "{:.2f}".format),
        interval_cell(total["rho"], "{:.2f}".format),
        (str(total["verdict"]),),
        *((format_optional(item[error], percent),) for error in ("stopped_error", "tail_error")),
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
        cells = [share_cell(row["score"]), difference_cell(row["difference"], row["verdict"], row["adjusted_p"])]
        line = Line(row["name"] + off, cells, GROUP_OF.get(row["name"], "intervention"), row["score"])
        lines.setdefault(row["task"], []).append(line)
    return [Table(task, ("row", "score %", versus), found) for task, found in lines.items()]


def _histogram(data: Record, label: str, title: str, open_ends: bool = False) -> Blocks:
    """A chart of the counts, and these; with `open_ends` the outer ones hold what lies beyond, too."""
    edges, counts = data["edges"], data["counts"]
    names = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
    if open_ends:
        names[0], names[-1] = f"{edges[1]:.3g} or less", f"{edges[-2]:.3g} or more"
    lines = [Line(name, [(f"{count:,}",)]) for name, count in zip(names, counts, strict=True)]
    blocks: Blocks = [chart(partial(column_chart, edges, counts, label, open_ends=open_ends), title)]
    if open_ends:
        blocks.append(text("The grey columns at the ends also count everything beyond them, so a high one is no peak."))
    return [*blocks, Table("", (label, "number"), lines, collapsed_label="The numbers")]


def interval_cell(value: Mapping[str, float | None] | None, show: Callable[[Any], str], to: str = "\nto ") -> Cell:
    """Mean and ends; the ends are null where rows were too few for them."""
    if value is None or value["mean"] is None:
        return (ABSENT,)
    if value["low"] is None or value["high"] is None:
        return show(value["mean"]), "too few rows\nfor an interval"
    return show(value["mean"]), f"{show(value['low'])}{to}{show(value['high'])}"
