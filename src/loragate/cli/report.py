"""`loragate report`: one self-contained HTML file out of any runs, or the paper's figures out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command
from loragate.cli.display import console
from loragate.cli.report_sources import Source, all_sources, readable
from loragate.errors import ConfigError
from loragate.gates.range import Range
from loragate.version import __version__


@dataclass(frozen=True)
class ReportOptions:
    """Settings of `loragate report`.

    Attributes:
        runs: folders or records of evaluations, calibrations, sweeps, diagnoses, or of a quickstart.
        out: HTML file to write.
        title: heading of the report.
        figures: folder for the figures as SVG and PDF, in place of the report.
        overwrite: replace an existing report, or existing figures.
    """

    runs: tuple[str, ...] = ()
    out: str = "report.html"
    title: str = ""
    figures: str = ""
    overwrite: bool = False


def run(options: ReportOptions) -> int:
    """Find the records, write the page."""
    if not options.runs:
        raise ConfigError(f"loragate report needs at least one RUN; for example: {COMMAND.examples[0]}")
    path = Path(options.out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--out {path}: a report is an HTML file; end its name in .html")
    if path.exists() and not (options.overwrite or options.figures):
        raise ConfigError(f"--out {path} exists; choose another name, or give --overwrite")
    sources = all_sources(options.runs)
    out = console()
    if options.figures:
        from loragate.cli.report_figures import draw_figures

        for path in draw_figures(sources, Path(options.figures), overwrite=options.overwrite):
            out.print(f"written {path}", markup=False)
        return 0
    from loragate.files import write_text

    text = page(sources, options.title or f"loragate report: {Path(options.runs[0]).resolve().name}")
    write_text(path, text)
    for source in sources:
        out.print(f"• {source.kind}: {source.path}", markup=False)
    out.print(f"{path} ({len(text.encode()) / 1e6:.2f} MB) opens in any browser, without a network", markup=False)
    return 0


def page(sources: Sequence[Source], title: str) -> str:
    """The HTML of some sources: what answers the question first, where things came from last."""
    from loragate.report.page import Block, Section, build_page
    from loragate.report.page.diagnosis import TITLES, diagnosis_section
    from loragate.report.page.scores import evaluation_section, quickstart_section, selection_section, sweep_section
    from loragate.report.page.tokens import embedded
    from loragate.report.page.training import gates_section, provenance_section, training_section

    sections: list[Section] = []
    of: dict[str, list[Source]] = {}
    for source in sources:
        of.setdefault(source.kind, []).append(source)
    several = len({source.name.split("/")[0] for source in sources}) > 1

    def add(make: Any, kind: str, heading: str, source: Source, *data: Any) -> None:
        title = f"{heading}: {source.name}" if several or len(of[source.kind]) > 1 else heading
        with readable(source):
            sections.append(make(*data, anchor=f"{kind}-{len(sections)}", title=title))

    for source in of.get("quickstart", []):
        add(quickstart_section, "scores", "Scores", source, source.record["table"])
    for source in of.get("evaluation", []):
        add(evaluation_section, "scores", "Scores", source, source.record)
    for source in of.get("sweep", []):
        add(sweep_section, "ranges", "Ranges", source, source.record)
    for source in of.get("artifact", []):
        with readable(source):
            chosen = bool(source.record.get("selection"))
        if chosen:
            add(selection_section, "selection", "How the range was chosen", source, source.record["selection"])
    for source in of.get("quickstart", []):
        with readable(source):
            picked = Range.parse(source.record["picked"])
            histories = {name: value["history"] for name, value in source.record["calibrations"].items()}
            realised = source.record["realised_gates"]
        add(gates_section, "gates", "Gates on generated text", source, realised, picked.lower, picked.upper)
        add(training_section, "training", "Training", source, histories)
    traces, left_out = None, 0
    for source in of.get("diagnosis", []):
        with readable(source):
            heading = TITLES[source.record["kind"]]
        add(diagnosis_section, "diagnosis", heading, source, source.record)
    for number, source in enumerate(of.get("traces", [])):
        if number:
            raise ConfigError(
                f"{source.path}: a report shows the tokens of one run; {of['traces'][0].path} is there already"
            )
        with readable(source):
            traces, left_out = embedded(source.record)
            block = Block("tokens", {"questions": len(traces["questions"]), "left_out": left_out})
        sections.append(Section("tokens", "Token by token", (block,)))
    if of.get("training"):
        histories = {source.name: source.record["history"] for source in of["training"]}
        for source in of["training"]:
            with readable(source):
                training_section({source.name: source.record["history"]}, "", "")
        sections.append(training_section(histories, "trainings", "Training runs"))
    sections.append(provenance_section(provenance(sources), "provenance", "Where this comes from"))
    footer = f"Written by loragate {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from {len(sources)} records."
    return build_page(title, statements(sources), sections, traces=traces, footer=footer)


def statements(sources: Sequence[Source]) -> list[str]:
    """The summary: verdicts first, then how ranges were chosen, then what diagnoses found."""
    from loragate.report.cells import choice_sentence
    from loragate.report.page.diagnosis import diagnosis_statements
    from loragate.report.page.scores import evaluation_statements

    lines: list[str] = []
    for source in sources:
        with readable(source):
            if source.kind == "quickstart":
                lines += source.record["reading"]
            elif source.kind == "evaluation":
                lines += evaluation_statements(source.record)
    for source in sources:
        with readable(source):
            if source.kind == "sweep":
                record = source.record
                lines += [f"Sweep {source.name}: {choice_sentence(record, choice)}" for choice in record["choices"]]
            elif source.kind == "artifact":
                lines += artifact_statements(source)
            elif source.kind == "diagnosis":
                lines += diagnosis_statements(source.record)
    if not lines:
        lines.append("No scores were given to this report: it shows what was trained, not whether it helps.")
    return lines


def artifact_statements(source: Source) -> list[str]:
    """Range, choice and what training did, of one artifact."""
    gate, selection = source.record["gate"], source.record.get("selection") or {}
    training = source.record.get("training") or {}
    lines = []
    name = f"Artifact {source.name}: range [{gate['lower']:g}, {gate['upper']:g}]"
    if not selection:
        lines.append(f"{name}; how it was chosen is not recorded.")
    elif selection.get("accepted") is False:
        lines.append(f"{name}; nothing was shown to beat the adapter, which therefore remains.")
    else:
        lines.append(f"{name}, chosen by: {selection.get('method', 'not recorded')}.")
    if {"entropy_before", "entropy_after"} <= set(training):
        lines.append(
            f"Artifact {source.name}: training brought the top-k entropy from {training['entropy_before']:.3f} to "
            f"{training['entropy_after']:.3f} in {training['steps']} steps; that alone does not show better answers."
        )
    return lines


def provenance(sources: Sequence[Source]) -> list[tuple[str, str]]:
    """(what, value) of files, models, data and versions, as the records state them."""
    facts: list[tuple[str, str]] = []
    for source in sources:
        with readable(source):
            facts += _facts_of(source)
    return facts


def _facts_of(source: Source) -> list[tuple[str, str]]:
    record, name = source.record, source.name
    facts = [(f"{name}: {source.kind}", source.path.name)]
    if source.kind == "artifact":
        facts += [
            (f"{name}: base", str(record["base"]["id"])),
            (f"{name}: adapter sha256", record["adapter"]["sha256"][:16]),
            (f"{name}: gates sha256", str(record.get("gates_sha256", ""))[:16]),
        ]
        if parity := record.get("parity"):  # zero gates were not trained
            facts.append((f"{name}: parity before training", f"{parity['initial']:.2g} in logits"))
    elif source.kind == "evaluation":
        facts += [(f"{name}: {key}", str(value)) for key, value in record["models"].items() if value]
        for task in record["tasks"]:
            facts.append(
                (f"{name}: {task['name']}", f"{task['dataset']} @ {task['dataset_revision'] or 'no revision'}")
            )
    versions = record.get("versions") if isinstance(record, dict) else None
    if versions:
        facts.append((f"{name}: versions", ", ".join(f"{key} {value}" for key, value in versions.items())))
    return facts


COMMAND = Command(
    name="report",
    summary="One self-contained HTML file from any runs: verdict in plain words, scores, curves, gates, tokens.",
    options=ReportOptions,
    run=run,
    examples=(
        "loragate report runs/quickstart",
        "loragate report evaluation gated diagnosis --out report.html",
        "loragate report runs/quickstart --figures figures",
    ),
    positional="runs",
)
