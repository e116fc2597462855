"""The report: one self-contained HTML file out of plain records. First a banner (what to do, its score, what the alternatives
score) with one chart, then the details, and last where everything came from.

The script is named in the content security policy by its hash; data for it lies in a JSON block whose "<" is escaped, so that no
text in it can end the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from loragate.display import duration, pluralize
from loragate.errors import ConfigError, DataError
from loragate.files import RunFolder
from loragate.report.blocks import (
    CURVES,
    DIAGNOSES,
    SHARES,
    Banner,
    Block,
    Section,
    build_page,
    chart,
    diagnosis_blocks,
    evaluation_blocks,
    render_chart,
    selection_blocks,
    tokens_block,
    training_blocks,
)
from loragate.report.examination import examination_banner, examination_blocks
from loragate.report.figures import Draw, accuracy_bars, curve_of, lambda_map, line_chart
from loragate.report.scores import VERDICTS, advice_of, evaluation_statements, score_tables
from loragate.report.selection import heat_maps, read_selection, selection_table
from loragate.report.sources import SETS, Source
from loragate.report.table import Line, Table
from loragate.selection_record import FILE, SelectionRecord
from loragate.version import __version__

Record = Mapping[str, Any]
Make = Callable[[Any], Sequence[Block | Table]]
BARS = 8  # of the banner's chart
VETOES = 3  # that the banner names
SECTIONS: tuple[tuple[str, str, str | Callable[[Record], str], Make], ...] = (
    ("evaluation", "scores", "Scores", evaluation_blocks),
    ("selection", "selection", "How it was selected", selection_blocks),
    ("dev", "dev", "Dev set (the choice was made on these)", evaluation_blocks),
    ("retention", "retention", "Retention set (the choice was made on these)", evaluation_blocks),
    ("artifact", "selection", "How it was selected", lambda record: selection_blocks(record.get("selection"))),
    ("examination", "examination", "Check-up of the adapter", examination_blocks),
    ("diagnosis", "diagnosis", lambda record: DIAGNOSES[record["kind"]][0], diagnosis_blocks),
)
"""(kind of source, anchor, heading, its blocks) in the order of the page; a section without blocks is left out."""


def page(sources: Sequence[Source], title: str, more: Sequence[str] = ()) -> str:
    """The HTML of some sources; `more` are statements that follow those of their records."""
    banner = banner_of(sources)
    # what the banner says need not be found again below it
    said = [
        line for line in [*statements(sources), *more] if line not in banner.more and not line.startswith(banner.advice)
    ]
    sections = [Section("findings", "Findings", (Block("list", list(dict.fromkeys(said))),))] if said else []
    of: dict[str, list[Source]] = {}
    for source in sources:
        of.setdefault(source.kind, []).append(source)
    several = len({source.name.split("/")[0] for source in sources}) > 1
    for kind, anchor, heading, make in SECTIONS:
        if kind == "artifact" and "selection" in of:  # the same, from its own record
            continue
        for source in of.get(kind, []):
            # charts are drawn here and not by `build_page`, so that a fault is that of this file
            blocks = source.convert(partial(_drawn, make))
            titled = heading if isinstance(heading, str) else source.convert(heading)
            titled = f"{titled}: {source.name}" if several or len(of[kind]) > 1 else titled
            sections += [Section(f"{anchor}-{len(sections)}", titled, blocks)] if blocks else []
    if shown := of.get("traces", []):
        if len(shown) > 1:
            raise ConfigError(
                f"{shown[1].path}: a report shows the tokens of one run; {shown[0].path} is there already"
            )
        sections.append(Section("tokens", "Token by token", (shown[0].convert(tokens_block),)))
    if trained := of.get("training"):
        for source in trained:  # so that a fault is that of one file
            source.convert(lambda record: [curve_of(record["history"], key) for key in (*CURVES, *SHARES)])
        histories = {source.name: source.record["history"] for source in trained}
        sections.append(Section("trainings", "Training runs", training_blocks(histories)))
    facts = [
        Line(f"{source.name}: {what}", [(value,)])
        for source in sources
        for what, value in source.convert(partial(_facts, source))
    ]
    where = Table("", ("What", "Value"), facts)
    sections.append(Section("provenance", "Where this comes from", (where,)))
    when, read = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", pluralize(len(sources), "record")
    footer = f"Written by loragate {__version__} on {when} from {read}."
    return build_page(title, banner, sections, footer)


def _drawn(make: Make, record: Any) -> list[Block | Table]:
    return [render_chart(block) for block in make(record)]


def banner_of(sources: Sequence[Source]) -> Banner:
    """From the one selection among the sources, else the first evaluation, else the first selection or check-up."""
    found: list[SelectionRecord] = []
    chosen: list[Source] = []
    for source in sources:
        selection = source.convert(lambda record: read_selection(_selection(record)))
        if selection and selection not in found:
            found.append(selection)
            chosen.append(source)
    evaluations = [source for source in sources if source.kind == "evaluation"]
    if found and (len(found) == 1 or not evaluations):
        record, table = found[0], selection_table(found[0], BARS)
        # of a test the first line, and each that says worse or that the base is better
        lines = [line for one in evaluations[:1] for line in _said(one, sources, evaluation_statements)]
        notable = (VERDICTS["worse"], f"the base is {VERDICTS['better']}")
        tested = [line for line in lines if line == lines[0] or any(words in line for words in notable)]
        why = f"Why: {record.recommendation.reason}."
        more = [
            line
            for line in (record.all_right(), record.alternatives(), record.beside_base(), why, *_cautions(record))
            if line
        ]
        more += [*_which(chosen), *tested]
        bars = chart(partial(accuracy_bars, table.lines, narrow=True), table.title)
        return Banner(record.recommendation.format_advice(), record.format_score(), more, render_chart(bars))
    for source in evaluations[:1]:
        advice, score, more, table = source.convert(advice_of)
        bars = chart(partial(accuracy_bars, table.lines[:BARS], narrow=True), table.title)
        return Banner(advice, score, [*more, *_which(evaluations)], render_chart(bars))
    examined = [source for source in sources if source.kind == "examination"]
    for source in examined[:1]:
        banner = source.convert(examination_banner)
        return replace(banner, more=[*banner.more, *_which(examined)])
    begun = [source for source in sources if (job := _job_of(source)) and not _is_finished(job)]
    if begun:
        scored = any(source.kind in SETS for source in begun)
        so_far = "what was scored so far is below" if scored else "nothing was scored yet, only gates were trained"
        return Banner(
            "The choice or check-up is not finished: nothing is recommended yet",
            more=[f"The same command with --resume goes on with it; {so_far}."],
        )
    return Banner("No scores were given to this report", more=["It shows what was trained, not whether it helps."])


def _which(alike: Sequence[Source]) -> list[str]:
    """Which of several sources of one kind a banner goes by."""
    if len(alike) < 2:
        return []
    return [f"This goes by {alike[0].path.name} of {alike[0].name}, the first of {len(alike)}; all are below."]


def _cautions(record: SelectionRecord) -> list[str]:
    """What the recommended variant keeps, the vetoes, of the best ones first, and the warnings."""
    means = {one.label: one.mean for one in record.variants}
    lines, sentences = record.kept()[:1], record.sentences()
    vetoed = sorted(record.retention.vetoed if record.retention else (), key=lambda label: -means.get(label, 0.0))
    lines += [line for label in vetoed[:VETOES] for line in sentences if line.startswith(f"{label} was not taken")]
    if (more := len(vetoed) - VETOES) > 0:
        lines.append(f"{more} more {'was' if more == 1 else 'were'} not taken for what is lost there.")
    return [*lines, *(line for line in sentences if line.startswith("Warning, "))]


def _job_of(source: Source) -> Path | None:
    """The folder of the choice or check-up that an evaluation or the training of a trial belongs to; None for any other."""
    parents = source.path.absolute().parents
    if source.kind in SETS:
        return parents[1]
    # trials/entropy_0_1_seed0/run/metrics.jsonl
    is_trial = source.kind == "training" and len(parents) > 3 and parents[2].name == "trials"
    return parents[3] if is_trial and (parents[3] / RunFolder.RECORD).is_file() else None


def _is_finished(job: Path) -> bool:
    """Whether a choice or a check-up has left its record."""
    return (job / FILE).is_file() or (job.parent / "doctor.json").is_file()


def _selection(record: Any) -> Any:
    """What may tell of a selection: the record itself, or what an artifact's says of it."""
    return record.get("selection") if "gate" in record else record


def statements(sources: Sequence[Source]) -> list[str]:
    """Verdicts first, then what training did, then what diagnoses found."""
    lines: list[str] = []
    for kind, said in (
        ("evaluation", evaluation_statements),
        ("artifact", _artifact),
        ("diagnosis", lambda record: record["conclusion"][:1]),
    ):
        for source in (one for one in sources if one.kind == kind):
            lines += _said(source, sources, said)
    return lines


def _said(source: Source, sources: Sequence[Source], make: Callable[[Any], Sequence[str]]) -> list[str]:
    """The sentences of a source, with its name before each where others say the like, and before those of an artifact."""

    def subject(one: Source) -> tuple[str, Any]:
        return one.kind, one.record.get("kind") if one.kind == "diagnosis" else None

    alone = source.kind != "artifact" and [subject(one) for one in sources].count(subject(source)) == 1
    return [line if alone else f"{source.name}: {line}" for line in source.convert(make)]


def _artifact(record: Record) -> list[str]:
    """Range, choice and what training did, of one artifact; the range is of no account where gates are not recommended."""
    gate, selection, training = record["gate"], record.get("selection") or {}, record.get("training") or {}
    range_ = f"range [{gate['lower']:g}, {gate['upper']:g}]"
    if not selection:
        lines = [f"{range_}; how it was selected is not recorded."]
    elif found := read_selection(selection):
        acts = {"gates": range_, "adapter": "gates are off"}
        how = acts.get(found.recommendation.weights, "λ is the same at every token")
        lines = [f"{how}; recommended: {found.recommendation.label}."]
    else:
        lines = [f"{range_}: {selection.get('reason', 'how it was selected is not recorded')}."]
    if {"entropy_before", "entropy_after"} <= set(training):
        lines.append(
            f"training brought the top-k entropy from {training['entropy_before']:.3f} to "
            f"{training['entropy_after']:.3f} in {pluralize(training['steps'], 'step')}; that alone does not show better answers."
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
        training = record.get("training") or {}
        if heldout := training.get("heldout"):
            change = f"{heldout['entropy_before']:.3f} to {heldout['entropy_after']:.3f}"
            found.append(("top-k entropy / log k of held-out examples", change))
        if training.get("training_seconds"):
            found.append(("time of the training loop", duration(training["training_seconds"])))
        if parity := record.get("parity"):  # zero gates were not trained
            found.append(("parity before training", f"{parity['initial']:.2g} in logits"))
    elif source.kind in ("evaluation", *SETS):
        found += [(key, str(value)) for key, value in record["models"].items() if value]
        for task in record["tasks"]:
            found.append((task["name"], "@".join(filter(None, (task["dataset"], task["dataset_revision"])))))
    elif source.kind == "training":
        took = next((one["train_runtime"] for one in reversed(record["history"]) if "train_runtime" in one), None)
        found += [] if took is None else [("time of the training loop", duration(took))]
    if versions := record.get("versions") if isinstance(record, dict) else None:
        found.append(("versions", ", ".join(f"{key} {value}" for key, value in versions.items())))
    return found


def draw_figures(sources: Sequence[Source], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write scores, maps of λ and of ranges, and training curves, as far as the records have them, as SVG and PDF.

    Returns:
        The files.

    Raises:
        ConfigError: if one of them is there already and is not to be overwritten.
        DataError: if no record allows a figure.
    """
    drawings: dict[str, Draw] = {}
    for source in sources:
        drawings |= source.convert(partial(_figures, source))
    if not drawings:
        raise DataError("none of these runs holds what a figure shows: scores, gates, a sweep, a training")
    written = {folder / f"{name}{suffix}": draw for name, draw in drawings.items() for suffix in (".svg", ".pdf")}
    present = [path for path in written if path.exists()]
    if present and not overwrite:
        raise ConfigError(f"--figures {folder}: {present[0].name} exists; choose another folder, or give --overwrite")
    for path, draw in written.items():
        draw(path)
    return list(written)


def _figures(source: Source, record: Any) -> dict[str, Draw]:
    """{file name without suffix: draws it} of one record."""
    tag = source.name.replace("/", "_")
    if source.kind == "training":
        curve = curve_of(record["history"], "topk_entropy")
        label = CURVES["topk_entropy"]
        return {f"training_{tag}": partial(line_chart, {source.name: curve}, label)} if curve else {}
    if source.kind == "diagnosis" and record["kind"] == "realised gates":
        return {f"gates_{tag}": partial(lambda_map, record["modules"])}
    found: dict[str, Draw] = {}
    if source.kind in ("evaluation", *SETS):
        for task, table in zip(record["tasks"], score_tables(record)):
            found[f"scores_{tag}_{task['name']}"] = partial(accuracy_bars, table.lines)
    if source.kind in ("evaluation", "selection"):
        found |= {f"{name}_{tag}": draw for name, draw in heat_maps(record).items()}
    return found
