"""The page of `loragate doctor`: what an adapter did to its base, from `doctor.json` alone (plain data), for someone in a hurry.

The verdict with what to do comes first, then findings, then one section for each part that was measured, each opened by a
sentence on what is seen. A part that is null in the record has no section; the last section says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from loragate.display import duration, percent
from loragate.files import write_text
from loragate.report.blocks import (
    Banner,
    Block,
    Blocks,
    Section,
    build_page,
    chart,
    interval_cell,
    row,
    text,
)
from loragate.report.figures import (
    LINES,
    ByModule,
    MeanInterval,
    format_signed,
    layers_and_kinds,
    module_map,
    paired_dots,
    strength_curve,
)
from loragate.report.table import ABSENT, Cell, Line, Table, format_cell, format_optional
from loragate.version import __version__

Record = Mapping[str, Any]
Bars = Sequence[tuple[str, Record, Sequence[Cell]]]
TEXT = 2_000  # characters of a prompt or an answer
SHORT = 80  # of a prompt in a list
CHANGES = 6  # changed tokens that are seen without unfolding
MOST = "The tokens that changed most"
SIGNS = {"error": "✖", "warning": "▲", "note": "●"}
TONES = {"broken": "error", "warnings": "warning", "unfinished": "grey", "healthy": "good"}
FLAGS = {
    "cut": "cut at the limit",
    "repeats": "repeats itself",
    "language": "other language",
    "thinking": "no thoughts",
}
CLASSES = {"all": "all tokens", "space": "white space", "special": "special tokens", "end": "end of the answer"}
MODULE_ROLES = {
    ("q_proj", "k_proj", "qkv_proj"): "q_proj and k_proj decide which earlier tokens are looked at.",
    ("v_proj", "o_proj", "qkv_proj"): "v_proj and o_proj decide what is taken over from them.",
    (
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
    ): "gate_proj, up_proj and down_proj work on each token by itself; much of what a model knows lies there.",
}
"""{kinds of modules: what they do}, for readers who meet the names here first."""
GROUPS = {"scale": LINES[0], "band": LINES[2], "kind": LINES[3], "gates": LINES[1]}
PER_TOKEN = "nats per token"
BEST = "better by more than chance"
OWN = "its own answers"
"""What stands for "what it is for" where no examples say that."""
TARGETS = {"loss": ("What it is for", "loss on the examples"), "kept": (OWN.capitalize(), f"loss on {OWN}")}
COLOURS = {"What it is for": LINES[0], OWN.capitalize(): LINES[0], "What the base could": LINES[1]}
MEASURES = {
    "accuracy": ("What it is for", "right on the dev set", "%", "higher"),
    "target": ("What it is for", "", PER_TOKEN, "lower"),
    "kept": ("What the base could", "right on the retention set", "%", "higher"),
    "retention": ("What the base could", "forgotten", PER_TOKEN, "lower"),
}
"""{figure of a way to use the adapter: (what it tells of, what it is, unit, which is better)}, as they stand below each other"""
PARTS = {
    "answers": "how it answers",
    "effect": "what it changed",
    "learned": "what it learned",
    "strength": "how strongly it should act",
}


def write_page(examination: Record, path: Path) -> None:
    """Write the page of an examination, the content of its `doctor.json`, which the page takes to lie beside it."""
    static = examination["measures"]["static"]
    name = static["adapter"].rstrip("/").rpartition("/")[2] or "adapter"
    sections = [*examination_sections(examination), _provenance(examination)]
    footer = f"Written by loragate {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    write_text(path, build_page(f"Check-up of {name}", examination_banner(examination), sections, footer))


def examination_banner(examination: Record) -> Banner:
    """The verdict, and what to do."""
    findings, strength = examination["findings"], examination["measures"]["strength"]
    verdict = examination["verdict"]
    unseen = any(one["code"] == "base-unreachable" for one in findings)
    counted = {kind: sum(one["severity"] == kind for one in findings) for kind in ("error", "warning")}
    counts = [f"{count} {kind}{'s' * (count != 1)}" for kind, count in counted.items() if count]
    advice = {
        "broken": f"Do not use this adapter as it is: {' and '.join(counts)}",
        "warnings": f"{'Not known without its base' if unseen else 'Usable, but read this first'}: {' and '.join(counts)}",
    }.get(verdict, _sentence(examination["summary"]).rstrip("."))
    first = next((one for one in findings if one["severity"] != "note" and one["remedy"]), None)
    more = [f"What to do first: {_sentence(first['remedy'])}"] if first else []
    if verdict != "broken" and strength is not None:
        gains = ("does better what it is for", "keeps what it is for")
        if strength["decided_by"] == "kept":
            unsaid = "(without examples, --data, nothing says how right they are)"
            gains = (f"predicts {OWN} better {unsaid}", f"keeps {OWN} {unsaid}")
        for label, gain in zip((strength["best"], strength["least"]), gains, strict=True):
            if label is not None:
                more.append(f"At {label} times its strength it {gain}: see “How strongly it should act”.")
    if examination["unfinished"]:
        named = ", ".join(PARTS.get(one, one) for one in examination["unfinished"])
        unloaded = verdict == "broken" and set(examination["seconds"]) == {"static"}
        why = "they need a model that can be loaded" if unloaded else "--resume goes on with them"
        more.append(f"Not measured: {named}; {why}.")
    return Banner(advice, more=more, tone=TONES[verdict])


def examination_blocks(examination: Record) -> Blocks:
    """The short form inside a report: the verdict, findings, the strength."""
    banner, strength = examination_banner(examination), examination["measures"]["strength"]
    said = text(f"{banner.advice}.", *banner.more, "The whole check-up is on the page doctor.html in its folder.")
    return [said, *_findings(examination["findings"]), *(_strength(strength) if strength else [])]


def examination_sections(examination: Record) -> list[Section]:
    """Findings, then what was measured."""
    measures = examination["measures"]
    left_out = [_sentence(one) for one in examination.get("left_out", ())]
    listed = [Block("list", left_out, "What was left out")] if left_out else []
    found: list[Section] = [Section("findings", "What was found", [*_findings(examination["findings"]), *listed])]
    parts: tuple[tuple[str, str, str, Callable[[Any], Blocks]], ...] = (
        ("strength", "strength", "How strongly it should act", _strength),
        ("effect", "where", "Where it acts", _where),
        ("effect", "changed", "What it changed", _changed),
        ("answers", "answers", "How it answers", _answers),
        ("learned", "learned", "What it learned", _learned),
        ("static", "made", "What it is made of", _static),
    )
    for part, anchor, title, make in parts:
        blocks = make(measures[part]) if measures[part] is not None else []
        found += [Section(anchor, title, blocks)] if blocks else []
    return found


def _findings(findings: Sequence[Record]) -> Blocks:
    if not findings:
        return [text("Everything that was checked is as it should be.")]
    cards = [
        {
            **one,
            "sign": SIGNS[one["severity"]],
            "message": _sentence(one["message"]),
            "remedy": _sentence(one["remedy"]),
        }
        for one in findings
    ]
    return [text("Worst first, each with what to do about it."), Block("findings", cards)]


def _sentence(words: str) -> str:
    """With a capital, unless it begins with a name, and a full stop."""
    first = (words.split() or [""])[0]
    named = any(mark in first.rstrip(".,:;") for mark in "_./") or first.startswith("--")
    words = words if named else words[:1].upper() + words[1:]
    return words if not words or words.endswith((".", "!", "?")) else f"{words}."


def _strength(record: Record) -> Blocks:
    points = record["points"]
    curve = [one for one in points if one["group"] == "scale"]
    least = f"least that keeps {OWN if record['decided_by'] == 'kept' else 'what it is for'}"
    marks = {}
    for what, label in (("as it is", "1"), (least, record["least"]), (BEST, record["best"])):
        if found := [one["strength"] for one in curve if one["label"] == label]:
            marks[f"{found[0]:g}: {what}"] = found[0]
    measures = {
        key: (*((of, what) if what else TARGETS[record["target"]]), unit, better)
        for key, (of, what, unit, better) in MEASURES.items()
        if any(one[key] is not None for one in points)
    }
    shown = dict.fromkeys(of for of, *_ in measures.values() if of != "What the base could")
    curves = [
        (
            f"{of}: {what}, {better} is better",
            {one["strength"]: _scaled_interval(one[key], unit) for one in curve if one[key]},
            unit,
            COLOURS[of],
        )
        for key, (of, what, unit, better) in measures.items()
    ]
    pictures = [chart(partial(strength_curve, curves, marks), "Strength of the whole adapter")] if curve else []
    parts = [one for one in points if one["group"] != "scale"]
    whole = [one for label in ("1", "0.5") for one in curve if one["label"] == label]
    if parts and whole:
        both = [(key, of, unit) for key, (of, _, unit, _) in measures.items() if key in ("target", "retention")]
        dots = [
            (_setting_label(one), GROUPS[one["group"]], [_scaled_interval(one[key], unit) for key, _, unit in both])
            for one in (*whole, *parts)
        ]
        labels = [f"{of.lower()}\n{unit}, ← better" for _, of, unit in both]
        gated = any(one["group"] == "gates" for one in parts)
        title = "Weaker in one part, or with gates" if gated else "Weaker in one part"
        pictures.append(chart(partial(paired_dots, dots, labels), title))
    said = {"1": "", record["least"]: f" ({least})", record["best"]: f" ({BEST})"}
    lines = [
        Line(
            _setting_label(one) + said.get(one["label"], ""),
            [
                interval_cell(one[key], percent, "–") if unit == "%" else interval_cell(one[key], _format_3_decimals)
                for key, (_, _, unit, _) in measures.items()
            ],
        )
        for one in points
    ]
    columns = ("use", *(f"{what}, {unit}" for _, what, unit, _ in measures.values()))
    return [
        text(
            "All that an adapter adds to its base can be multiplied by a strength: 0 is the base, 1 the adapter as it is. Each "
            f"picture shows {' and '.join(of.lower() for of in shown)} beside what the base could do before."
        ),
        *([Block("list", record["sentences"])] if record["sentences"] else []),
        row(*pictures),
        text(
            "Shades and whiskers are 95 % intervals of each figure alone; all were measured on the same texts, so differences "
            "are surer than they look. Thirds are of the layers, the lower one next to the input; attention is what reads "
            "earlier tokens, mlp what works on each token by itself."
        ),
        Table("", columns, lines, collapsed_label="The numbers"),
    ]


def _setting_label(point: Record) -> str:
    """A way to use the adapter in words."""
    if point["group"] == "gates":
        return "with its gates"
    part = point["label"].rpartition(" ")[0]
    name = {"scale": "whole", "band": f"{part} third", "kind": part}[point["group"]]
    strength = point["strength"]
    if point["group"] == "scale":
        return {1: "as it is", 0: "the base (0)"}.get(strength, f"whole × {strength:g}")
    return f"{name} off" if strength == 0 else f"{name} × {strength:g}"


def _format_3_decimals(value: float) -> str:
    return format_signed(value, ".3f")


def _scaled_interval(value: Record, unit: str = "") -> MeanInterval:
    """Mean and ends in the unit; a figure without an interval is its own."""
    factor = 100 if unit == "%" else 1
    mean, low, high = (value["mean"] if value[end] is None else value[end] for end in ("mean", "low", "high"))
    return factor * mean, factor * low, factor * high


def _where(record: Record) -> Blocks:
    cells = record["cells"]
    if not cells:
        return []
    squares = {(one["layer"], one["kind"]): one["nats"] for one in cells if one["layer"] is not None and one["kind"]}
    by_layer = {one["layer"]: one["nats"] for one in cells if one["layer"] is not None and not one["kind"]}
    by_kind = {one["kind"]: one["nats"] for one in cells if one["layer"] is None and one["kind"]}
    on = f"{record['cell_tokens']:,} tokens"
    most = []
    for values, what in ((by_layer, "layer {}"), (by_kind, "{}")):
        if values:
            key = max(values, key=lambda key: values[key])
            most.append(f"{what.format(key)} ({values[key]:.3g} nats)")
    told = f"It leans most on {' and on '.join(most)}." if most else ""
    if not squares:
        opening = f"Parts of the adapter were switched off in turn: the longer the bar, the more the predictions change ({on})."
        tables = [
            _bar_table(
                f"By {what}",
                (what, f"change, {PER_TOKEN}"),
                [(str(key), {"mean": nats, "low": None, "high": None}, []) for key, nats in values.items()],
            )
            for what, values in (("layer", by_layer), ("kind of module", by_kind))
            if values
        ]
        return [text(*filter(None, (opening, told))), row(*tables)]
    opening = (
        "Each square is one kind of weight matrix in one layer (0 is next to the input), switched off alone: the darker, the more "
        f"the predictions change without it. Bars are whole layers and whole kinds ({on})."
    )
    picture, numbers = _map(squares, by_layer, by_kind, f"Change without it, {PER_TOKEN}", "By layer and kind")
    known = [said for names, said in MODULE_ROLES.items() if any(kind in names for kind in by_kind)]
    return [text(opening, told), row(picture, *([Block("list", known, "What the kinds do")] if known else [])), numbers]


def _map(
    cells: ByModule, by_layer: Mapping[int, float], by_kind: Mapping[str, float], label: str, title: str, form: str = ""
) -> Blocks:
    """A map of the modules and its numbers."""
    layers, kinds = layers_and_kinds(cells)
    lines = [
        Line(
            ABSENT if layer is None else str(layer),
            [
                *((format_optional(cells.get((layer, kind)), "{:.4f}".format),) for kind in kinds),
                (format_optional(by_layer.get(layer) if layer is not None else None, "{:.4f}".format),),
            ],
        )
        for layer in layers
    ]
    if by_kind:
        lines.append(Line("all", [*((format_optional(by_kind.get(kind), "{:.4f}".format),) for kind in kinds), ("",)]))
    numbers = Table("", ("layer", *kinds, "all"), lines, collapsed_label=f"The numbers: {title[:1].lower()}{title[1:]}")
    return [chart(partial(module_map, cells, by_layer, by_kind, label, form=form), title), numbers]


def _bar_table(title: str, columns: Sequence[str], lines: Bars, caption: str = "") -> Table:
    """A table of (name, figure with its interval, more cells) with a bar for each figure, the largest the longest."""
    top = max([0.0, *(max(_scaled_interval(value)) for _, value, _ in lines)]) or 1.0
    made = []
    for name, value, more in lines:
        mean, low, high = (max(0.0, one / top) for one in _scaled_interval(value))
        ends = (
            [f"{_format_3_decimals(value['low'])} to {_format_3_decimals(value['high'])}"]
            if value["low"] is not None
            else []
        )
        cells = [(_format_3_decimals(value["mean"]), *ends), *more]
        made.append(Line(name, cells, "baseline", {"mean": mean, "low": low, "high": high}))
    return Table(title, columns, made, caption)


def _changed(record: Record) -> Blocks:
    opening = (
        f"Base and adapter read the same {record['tokens']:,} tokens ({record['source']}) and put the same token first at "
        f"{percent(record['agree'])} % of them."
    )
    classes = [(CLASSES.get(one["name"], one["name"]), one) for one in record["classes"]]
    bars = [
        (f"{name}, {one['tokens']:,}", one["kl"], [(format_signed(one["delta"]["mean"], "+.2f"),)])
        for name, one in classes
    ]
    caption = (
        "Change: KL(adapter‖base); 0 where the prediction is the same, 0.1 is little, 1 and more is another answer. ΔH: entropy "
        "of the adapter minus that of the base; below 0 the adapter is surer."
    )
    columns = ("tokens", "change", "H of the base", "H of the adapter", "ΔH")
    numbers = [
        Line(name, [interval_cell(one[key], _format_3_decimals) for key in ("kl", "base", "adapter", "delta")])
        for name, one in classes
    ]
    blocks: Blocks = [
        text(opening),
        _bar_table("By kind of token", ("tokens", f"change, {PER_TOKEN}", "ΔH, nats"), bars, caption),
        Table("", columns, numbers, collapsed_label="The numbers, nats per token"),
    ]
    if record["changed"]:
        ordered = list(record["changed"])
        # of places where the same token stands, the first one says it
        shown = list({one["token"]: one for one in reversed(ordered)}.values())[::-1][:CHANGES]
        more = [one for one in ordered if one not in shown]
        blocks.append(text("The marked tokens changed most; what each model thought likeliest there stands below."))
        blocks.append(Block("changes", {"first": list(map(_change, shown)), "more": list(map(_change, more))}, MOST))
    return blocks


def _change(record: Record) -> Record:
    """A changed token as its card shows it."""
    token = record["token"].lstrip(" ")
    models = {
        name: [
            (_visible(one), f"{100 * share:.0f}")
            for place, (one, share) in enumerate(record[name])
            if not place or share >= 0.005  # which is the least that is not shown as 0 %
        ]
        for name in ("base", "adapter")
    }
    return {
        "before": f"…{record['before']}{' ' * (len(record['token']) - len(token)) if token else ''}",
        "token": _visible(token or record["token"]),
        "after": record["after"],
        "kl": f"{record['kl']:.2f}",
        "models": list(models.items()),
    }


def _visible(token: str) -> str:
    """A token with its white space."""
    shown = token.replace("\n", "⏎").replace("\t", "⇥")
    return "∅" if not shown else shown if shown.strip() else shown.replace(" ", "␣")


def _answers(record: Record) -> Blocks:
    base, adapter = record["base"], record["adapter"]

    def line(name: str, key: str, show: Callable[[Any], str]) -> list[Line]:
        both = [None if one is None else one[key] for one in (base, adapter)]
        return [] if both == [None, None] else [Line(name, [(format_optional(one, show),) for one in both])]

    def share(value: float) -> str:
        return f"{percent(value)} %"

    lines = [
        *line("length of an answer, tokens", "tokens", "{:.1f}".format),
        *line(f"cut at {record['max_new_tokens']} tokens", "cut", share),
        *line("ends in a loop", "repeats", share),
        *line("begins with thoughts", "thinking", share),
        *line("in the language asked for", "languages", share),
    ]
    if record["retention_base"] or record["retention_adapter"]:
        cells = [interval_cell(record[key], percent, "–") for key in ("retention_base", "retention_adapter")]
        lines.append(Line("right on the questions to keep, %", cells))
    count, most = len(record["pairs"]), record["max_new_tokens"]
    opening = f"Both models answered the same {count} prompts greedily, with at most {most} tokens."
    if base is None:
        opening = f"The adapter answered {count} prompts greedily; its base cannot be had beside it."
    blocks: Blocks = [text(opening), Table("", ("", "base", "adapter"), lines)]
    pairs = sorted(record["pairs"], key=lambda one: not one["flags"])
    odd = sum(bool(one["flags"]) for one in pairs)
    said = f"All {len(pairs)} prompts with {'the answers of both' if base else 'the answers'}"
    said += f"; the first {odd} {'has' if odd == 1 else 'have'} something odd" if odd else ""
    shown = [
        {
            "kind": one["kind"],
            "flags": [FLAGS.get(flag, flag) for flag in one["flags"]],
            "short": _cut(" ".join(one["prompt"].split()), SHORT),
            "prompt": _cut(one["prompt"], TEXT),
            "answers": [
                (name.capitalize(), _cut(one[name], TEXT) or "(nothing)")
                for name in ("base", "adapter")[base is None :]
            ],
            "nats": ""
            if one["nats"] is None
            else f"The base's answer is {format_signed(one['nats'], '.2f')} nats per token less likely under the adapter.",
        }
        for one in pairs
    ]
    return [*blocks, *([Block("pairs", {"said": said, "pairs": shown})] if shown else [])]


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _learned(record: Record) -> Blocks:
    opening = (
        f"Loss is how much the responses of the examples surprise a model; lower is better ({record['rows']:,} rows, "
        f"{record['tokens']:,} tokens)."
    )
    told = ""
    if record["gain"] is not None:
        gain = record["gain"]
        less = "less" if gain["mean"] >= 0 else "more"
        unsure = gain["low"] is not None and gain["low"] <= 0 <= gain["high"]
        shown = "; 0 is in the interval, so a difference is not shown" if unsure else ""
        told = f"The adapter's loss is {_gain_text(gain)} nats per token {less} than the base's{shown}."
    named = {
        "base": "base, on the examples",
        "adapter": "adapter, on the examples",
        "heldout_base": "base, on held-out questions",
        "heldout": "adapter, on held-out questions",
    }
    lines: Bars = [(name, record[key], []) for key, name in named.items() if record[key] is not None]
    blocks: Blocks = [
        text(*filter(None, (opening, told))),
        _bar_table("", ("model", f"loss, {PER_TOKEN}"), lines, f"Examples: {record['source']}."),
    ]
    return blocks


def _gain_text(value: Record) -> str:
    """A difference and its interval on one line, both turned so that the difference is above 0."""
    sign = 1 if value["mean"] >= 0 else -1
    ends = sorted(sign * value[end] for end in ("low", "high")) if value["low"] is not None else []
    return format_cell((_format_3_decimals(abs(value["mean"])), " to ".join(map(_format_3_decimals, ends))))


def _static(record: Record) -> Blocks:
    modules = record["modules"]
    facts = {
        "adapter": record["adapter"],
        "base": record["base"],
        "rank and alpha": ""
        if record["rank"] is None
        else f"{record['rank']} and {format_optional(record['alpha'], '{:g}'.format)}",
        "numbers in the file": f"{record['parameters']:,}" if record["parameters"] else "",
        "modules": f"{len(modules)}" if modules else "",
        "changes beside LoRA": "; ".join(record["beside"]),
        "gates can act on": _gateable(record),
        "training gates": _sentence(record["training"]) if record["training"] else "",
        "an answer ends with": ", ".join(record["endings"])
        + {True: "; generation stops there", False: "; generation does not stop there", None: ""}[record["stops"]],
        "its gates": ", ".join(f"{key} {value}" for key, value in record["gates"].items()),
    }
    lines = [Line(name, [(value,)]) for name, value in facts.items() if value]
    blocks: Blocks = [text("What the files say, without running the model."), Table("", ("what", "value"), lines)]
    if not modules:
        return blocks
    blocks.append(
        text(
            "The first map shows which part of the adapter's size (squared norm) lies in which matrix, the second how many "
            "directions it really uses; far fewer than its rank means that a lower rank would have done."
        )
    )
    grouped: dict[tuple[int | None, str], list[Record]] = {}
    for one in modules:
        grouped.setdefault((one["layer"], one["kind"]), []).append(one)
    maps = []
    for key, total, label, form in (
        ("share", sum, "Share of the size, %", ".1f"),
        ("effective_rank", fmean, "Effective rank", ".1f"),
    ):
        factor = 100 if key == "share" else 1
        cells = {cell: factor * total([one[key] for one in group]) for cell, group in grouped.items()}
        margins: list[dict[Any, float]] = []
        for part in ("layer", "kind"):
            values: dict[Any, list[float]] = {}
            for one in modules:
                values.setdefault(one[part], []).append(factor * one[key])
            margins.append({name: total(found) for name, found in values.items()})
        maps += _map(cells, margins[0], margins[1], label, label.split(",")[0] + " by layer and kind", form)
    return [*blocks, row(maps[0], maps[2]), maps[1], maps[3]]


def _gateable(record: Record) -> str:
    words = {"gate": "can be gated", "leave": "stay as they are", "refuse": "cannot be gated"}
    counts = [f"{count} {words.get(status, status)}" for status, count in record["gateable"].items()]
    return "; ".join([", ".join(counts), *record["reasons"]]) if counts else ""


def _provenance(examination: Record) -> Section:
    """What ran how long, what did not and why, with which packages."""
    lines = []
    for part, name in {"static": "the files", **PARTS}.items():
        if part in examination["seconds"]:
            found = examination["measures"][part] is not None
            said = duration(examination["seconds"][part]) + ("" if found else "; nothing could be measured")
        elif part in examination["unfinished"]:
            said = "not done"
        else:
            said = "not asked for (--quick)"
        lines.append(Line(name, [(said,)]))
    versions = {key: value for key, value in examination["versions"].items() if value != "absent"}
    lines.append(Line("versions", [(", ".join(f"{key} {value}" for key, value in versions.items()),)]))
    where = Markup('All figures are in <a href="doctor.json">doctor.json</a>, which lies beside this page.')
    return Section("provenance", "Where this comes from", [text(where), Table("", ("what", "time"), lines)])
