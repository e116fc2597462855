"""From sources to the page: what answers the question first, where things came from last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from loragate.errors import ConfigError
from loragate.report.cells import choice_sentence
from loragate.report.page.build import build_page, embedded
from loragate.report.page.content import Block, Section, table
from loragate.report.page.diagnosis import TITLES, diagnosis_blocks
from loragate.report.page.scores import (
    evaluation_blocks,
    evaluation_statements,
    quickstart_blocks,
    selection_blocks,
    sweep_blocks,
)
from loragate.report.page.training import gates_blocks, training_blocks
from loragate.report.sources import Source
from loragate.version import __version__

Record = Mapping[str, Any]


def _of_quickstart(record: Record) -> Sequence[Block]:
    gates = record["picked"].strip("[]").split(",")
    return gates_blocks(record["realised_gates"], *map(float, gates))


def _histories(record: Record) -> dict[str, Any]:
    return {name: value["history"] for name, value in record["calibrations"].items()}


SECTIONS: tuple[tuple[str, str, str | Callable[[Record], str], Callable[[Any], Sequence[Block]]], ...] = (
    ("quickstart", "scores", "Scores", lambda record: quickstart_blocks(record["table"])),
    ("evaluation", "scores", "Scores", evaluation_blocks),
    ("sweep", "ranges", "Ranges", sweep_blocks),
    (
        "artifact",
        "selection",
        "How the range was chosen",
        lambda record: selection_blocks(record.get("selection") or {}),
    ),
    ("quickstart", "gates", "Gates on generated text", _of_quickstart),
    ("quickstart", "training", "Training", lambda record: training_blocks(_histories(record))),
    ("diagnosis", "diagnosis", lambda record: TITLES[record["kind"]], diagnosis_blocks),
)
"""(kind of source, anchor, heading, its blocks) in the order of the page; a section without blocks is left out."""


def page(sources: Sequence[Source], title: str) -> str:
    """The HTML of some sources."""
    sections: list[Section] = []
    of: dict[str, list[Source]] = {}
    for source in sources:
        of.setdefault(source.kind, []).append(source)
    several = len({source.name.split("/")[0] for source in sources}) > 1
    for kind, anchor, heading, make in SECTIONS:
        for source in of.get(kind, []):
            blocks = source.read(make)
            said = heading if isinstance(heading, str) else source.read(heading)
            said = f"{said}: {source.name}" if several or len(of[kind]) > 1 else said
            sections += [Section(f"{anchor}-{len(sections)}", said, blocks)] if blocks else []
    traces = None
    if shown := of.get("traces", []):
        if len(shown) > 1:
            raise ConfigError(
                f"{shown[1].path}: a report shows the tokens of one run; {shown[0].path} is there already"
            )
        traces, left_out = shown[0].read(embedded)
        block = Block("tokens", {"questions": len(traces["questions"]), "left_out": left_out})
        sections.append(Section("tokens", "Token by token", (block,)))
    if trained := of.get("training"):
        for source in trained:  # so that a fault is that of one file
            source.read(lambda record: training_blocks({"": record["history"]}))
        histories = {source.name: source.record["history"] for source in trained}
        sections.append(Section("trainings", "Training runs", training_blocks(histories)))
    facts = [(f"{source.name}: {what}", value) for source in sources for what, value in source.read(_facts(source))]
    where = table(("What", "Value"), facts, plain=True)
    sections.append(Section("provenance", "Where this comes from", (where,)))
    footer = f"Written by loragate {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from {len(sources)} records."
    return build_page(title, statements(sources), sections, traces=traces, footer=footer)


def statements(sources: Sequence[Source]) -> list[str]:
    """The summary: verdicts first, then how ranges were chosen, then what diagnoses found."""
    lines: list[str] = []
    for source in sources:
        if source.kind == "quickstart":
            lines += source.read(lambda record: record["reading"])
        elif source.kind == "evaluation":
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
    return [choice_sentence(record, choice) for choice in record["choices"]]


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
    if {"entropy_before", "entropy_after"} <= set(training):
        lines.append(
            f"training brought the top-k entropy from {training['entropy_before']:.3f} to "
            f"{training['entropy_after']:.3f} in {training['steps']} steps; that alone does not show better answers."
        )
    return lines


def _facts(source: Source) -> Callable[[Any], list[tuple[str, str]]]:
    """Files, models, data and versions, as the record states them."""

    def facts(record: Any) -> list[tuple[str, str]]:
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

    return facts
