"""From sources to the page: what answers the question first, where things came from last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from loragate.errors import ConfigError, LoragateError
from loragate.report.figures import curve_of
from loragate.report.page.blocks import (
    CURVES,
    DIAGNOSES,
    SHARES,
    diagnosis_blocks,
    selection_blocks,
    sweep_blocks,
    training_blocks,
)
from loragate.report.page.build import Block, Section, build_page, drawn, text, tokens_block
from loragate.report.scores import caption, evaluation_statements, score_tables
from loragate.report.sources import Source
from loragate.report.sweep import selection_sentence
from loragate.report.table import Line, Table
from loragate.version import __version__

Record = Mapping[str, Any]
Make = Callable[[Any], Sequence[Block | Table]]
PAGE_LIMIT = 3_000_000
"""Bytes that a report stays below, so that it can be mailed and opened on a phone."""
SECTIONS: tuple[tuple[str, str, str | Callable[[Record], str], Make], ...] = (
    ("evaluation", "scores", "Scores", lambda record: [*score_tables(record), text(*caption(record).split("\n"))]),
    ("sweep", "ranges", "Ranges", sweep_blocks),
    ("artifact", "selection", "How the range was chosen", lambda record: selection_blocks(record.get("selection"))),
    ("diagnosis", "diagnosis", lambda record: DIAGNOSES[record["kind"]][0], diagnosis_blocks),
)
"""(kind of source, anchor, heading, its blocks) in the order of the page; a section without blocks is left out."""


def page(sources: Sequence[Source], title: str, more: Sequence[str] = ()) -> str:
    """The HTML of some sources; `more` are statements that follow those of their records.

    Raises:
        LoragateError: if it would pass `PAGE_LIMIT`.
    """
    sections: list[Section] = []
    of: dict[str, list[Source]] = {}
    for source in sources:
        of.setdefault(source.kind, []).append(source)
    several = len({source.name.split("/")[0] for source in sources}) > 1
    for kind, anchor, heading, make in SECTIONS:
        for source in of.get(kind, []):
            # charts are drawn here and not by `build_page`, so that a fault is that of this file
            blocks = source.read(partial(_drawn, make))
            said = heading if isinstance(heading, str) else source.read(heading)
            said = f"{said}: {source.name}" if several or len(of[kind]) > 1 else said
            sections += [Section(f"{anchor}-{len(sections)}", said, blocks)] if blocks else []
    if shown := of.get("traces", []):
        if len(shown) > 1:
            raise ConfigError(
                f"{shown[1].path}: a report shows the tokens of one run; {shown[0].path} is there already"
            )
        sections.append(Section("tokens", "Token by token", (shown[0].read(tokens_block),)))
    if trained := of.get("training"):
        for source in trained:  # so that a fault is that of one file
            source.read(lambda record: [curve_of(record["history"], key) for key in (*CURVES, *SHARES)])
        histories = {source.name: source.record["history"] for source in trained}
        sections.append(Section("trainings", "Training runs", training_blocks(histories)))
    facts = [
        Line(f"{source.name}: {what}", [(value,)])
        for source in sources
        for what, value in source.read(partial(_facts, source))
    ]
    where = Table("", ("What", "Value"), facts)
    sections.append(Section("provenance", "Where this comes from", (where,)))
    footer = f"Written by loragate {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from {len(sources)} records."
    whole = build_page(title, [*statements(sources), *more], sections, footer)
    size = len(whole.encode())
    if size > PAGE_LIMIT:
        raise LoragateError(
            f"the report would be {size / 1e6:.1f} MB, more than {PAGE_LIMIT / 1e6:g} MB; give it fewer runs, or fewer "
            "token traces (diagnose tokens --limit)"
        )
    return whole


def _drawn(make: Make, record: Any) -> list[Block | Table]:
    return [drawn(block) for block in make(record)]


def statements(sources: Sequence[Source]) -> list[str]:
    """The summary: verdicts first, then how ranges were chosen, then what diagnoses found."""
    lines: list[str] = []
    for source in sources:
        if source.kind == "evaluation":
            lines += source.read(evaluation_statements)
    for source in sources:
        if source.kind == "sweep":
            lines += [f"Sweep {source.name}: {line}" for line in source.read(_choices)]
        elif source.kind == "artifact":
            lines += [f"Artifact {source.name}: {line}" for line in source.read(_artifact)]
        elif source.kind == "diagnosis":
            lines += source.read(lambda record: record["conclusion"][:1])
    return lines or ["No scores were given to this report: it shows what was trained, not whether it helps."]


def _choices(record: Record) -> list[str]:
    return [selection_sentence(record)]


def _artifact(record: Record) -> list[str]:
    """Range, choice and what training did, of one artifact."""
    gate, selection, training = record["gate"], record.get("selection") or {}, record.get("training") or {}
    range_ = f"range [{gate['lower']:g}, {gate['upper']:g}]"
    if not selection:
        lines = [f"{range_}; how it was chosen is not recorded."]
    elif selection.get("accepted") is False:
        lines = [f"{range_}; nothing was shown to beat the adapter, which therefore remains."]
    else:
        lines = [f"{range_}, chosen by: {selection.get('method', 'not recorded')}."]
        lines += [f"{selection['note']}."] if "note" in selection else []
    if {"entropy_before", "entropy_after"} <= set(training):
        lines.append(
            f"training brought the top-k entropy from {training['entropy_before']:.3f} to "
            f"{training['entropy_after']:.3f} in {training['steps']} steps; that alone does not show better answers."
        )
    return lines


def _facts(source: Source, record: Any) -> list[tuple[str, str]]:
    """Files, models, data and versions, as the record states them."""
    found = [(source.kind, source.path.name)]
    if source.kind == "artifact":
        found += [
            ("base", str(record["base"]["id"])),
            ("adapter sha256", record["adapter"]["sha256"][:16]),
            ("gates sha256", str(record.get("gates_sha256", ""))[:16]),
        ]
        if parity := record.get("parity"):  # zero gates were not trained
            found.append(("parity before training", f"{parity['initial']:.2g} in logits"))
    elif source.kind == "evaluation":
        found += [(key, str(value)) for key, value in record["models"].items() if value]
        for task in record["tasks"]:
            found.append((task["name"], f"{task['dataset']} @ {task['dataset_revision'] or 'no revision'}"))
    if versions := record.get("versions") if isinstance(record, dict) else None:
        found.append(("versions", ", ".join(f"{key} {value}" for key, value in versions.items())))
    return found
