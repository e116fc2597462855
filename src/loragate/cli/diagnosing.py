"""Diagnoses on a terminal: what `diagnose` asks of `loragate.analysis`, shown while it runs, and the tables of its records.

Apart from the command, which the help reads, as this loads what a diagnosis needs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from loragate.analysis.alignment import AlignmentRecord, diagnose_alignment
from loragate.analysis.delta_entropy import ClassEntropy, EntropyRecord, diagnose_entropy
from loragate.analysis.interventions import InterventionsRecord, diagnose_interventions
from loragate.analysis.realised_gates import GatesRecord, diagnose_gates
from loragate.analysis.subject import Subject
from loragate.analysis.token_traces import diagnose_tokens
from loragate.cli.arguments import resolved_yaml
from loragate.cli.diagnose import DiagnoseOptions
from loragate.cli.evaluating import load_inputs, progress, request_of
from loragate.display import Display, console, duration
from loragate.evaluation.canary import describe
from loragate.evaluation.evaluate import EngineFor, Evaluation
from loragate.evaluation.results import EvaluationRecord
from loragate.evaluation.session import Session
from loragate.files import write_text
from loragate.generation import OnProgress
from loragate.models import Loaded
from loragate.report.scores import caption, score_markdown, score_tables

MODULES_SHOWN = 12


class Shown(Subject):
    """A subject whose diagnosis is shown on the terminal while it runs."""

    def __init__(self, options: DiagnoseOptions) -> None:
        super().__init__(request_of(options, options.model))
        self.options, self.display, self.out = options, Display(), console()

    def say(self, line: str) -> None:
        self.out.print(line, markup=False)

    @contextmanager
    def job(self, name: str, total: int = 0, unit: str = "") -> Iterator[OnProgress]:
        with self.display.job(name, total, unit) as one:
            yield one.advance_to

    def open(self, model: str, base: str, engine: str) -> Loaded:
        return load_inputs(replace(self.options, base=base), model, engine)

    def score(self, session: Session, evaluation: Evaluation, engine_for: EngineFor | None = None) -> EvaluationRecord:
        for warning in evaluation.warnings:
            self.say(f"warning: {warning}")
        self.say(describe(evaluation.canary))
        evaluation.begin(self.request.resume)
        write_text(self.folder / "config.yaml", resolved_yaml(self.options))
        with progress(self.display, evaluation.sample_count) as on_event:
            record = session.run(evaluation, on_event, engine_for)
        plain = record.to_json()
        write_text(self.folder / "results.md", score_markdown(plain))
        for table in score_tables(plain):
            self.out.print(table)
        self.say(caption(plain))
        return record


def diagnose(options: DiagnoseOptions) -> int:
    """Take the look, print its tables and its conclusion, and say what to run next."""
    subject, folder = Shown(options), Path(options.out)
    say, out = subject.say, subject.out
    if options.what == "tokens":
        traces = diagnose_tokens(subject, options)
        say(f"{len(traces['questions'])} questions written to {folder / 'tokens.json'}")
    else:
        record: EntropyRecord | GatesRecord | InterventionsRecord | AlignmentRecord
        if options.what == "entropy":
            # tasks take long after it
            record = diagnose_entropy(subject, options, lambda classes: out.print(class_table(classes)))
        elif options.what == "gates":
            record = diagnose_gates(subject, options)
            out.print(*gate_tables(record), sep="")
        elif options.what == "interventions":
            record = diagnose_interventions(subject, options)
            out.print(intervention_table(record))
        else:
            record = diagnose_alignment(subject, options)
            out.print(*alignment_tables(record), sep="")
        write_text(folder / "config.yaml", resolved_yaml(options))
        for line in record.conclusion:
            say(f"• {line}")
        say(f"written to {folder / str(options.what)}.json in {duration(time.monotonic() - subject.began)}")
    say(f"next: loragate {next_command(options, subject.loaded.kind)}")
    return 0


def next_command(options: DiagnoseOptions, kind: str) -> str:
    """What to run next: the look that goes on from this one."""
    model, out = options.model, options.out
    if options.what == "tokens":
        return f"report {options.run} {out}"
    if options.what == "interventions":
        return f"diagnose gates --model {model} --run {out} --out {out}-gates"
    if options.what == "entropy":
        return (
            f"diagnose gates --model {model} --tasks … --out {out}-gates"
            if kind == "gated"
            else (f"diagnose entropy --model {model} --suite … --out …")
        )
    tasks = "--suite …"
    if options.what == "gates" and not options.run:
        tasks = f"--suite {options.suite}" if options.suite else f"--tasks {options.tasks}"
    return f"diagnose interventions --model {model} {tasks} --out {out}-interventions"


def class_table(classes: Sequence[ClassEntropy]) -> Table:
    """ΔH by token class."""
    table = columns(
        "ΔH = H(adapter) − H(base), nats per token; 95 % intervals over rows",
        ("tokens of class",),
        ("number", "ΔH", "ΔH < 0, %", "ΔH > 0, %", "H base", "H adapter", "H gated"),
    )
    for row in classes:
        shares = f"{100 * row.negative.mean:.1f}", f"{100 * row.positive.mean:.1f}"
        means = ["–" if one is None else f"{one.mean:.3f}" for one in (row.base, row.adapter, row.gated)]
        table.add_row(row.name, f"{row.tokens:,}", f"{row.delta.mean:+.3f}{row.delta.ends('+.3f')}", *shares, *means)
    return table


def gate_tables(record: GatesRecord) -> list[Table]:
    """Shares by token class, module type and layer."""
    tables = []
    for title, groups in (
        ("token class", {"all": record.all, **record.by_class}),
        ("module type", record.by_type),
        ("layer", record.by_layer),
    ):
        table = columns(
            f"realised λ by {title}, % of coefficients (range [{record.lower:g}, {record.upper:g}])",
            (title,),
            ("λ < 0", "0 ≤ λ ≤ 1", "λ > 1", "at L", "at U", "mean λ", "number"),
        )
        for name, shares in groups.items():
            parts = (shares.below_zero, shares.zero_to_one, shares.above_one, shares.at_lower, shares.at_upper)
            percent = [f"{100 * part:.1f}" for part in parts]
            table.add_row(name, *percent, f"{shares.mean:+.2f}", f"{shares.count:,}")
        tables.append(table)
    return tables


def intervention_table(record: InterventionsRecord) -> Table:
    """Scores and paired differences to the unmodified gates."""
    table = columns(
        f"interventions on gates in [{record.lower:g}, {record.upper:g}]; differences to the gates as they are",
        ("task", "row"),
        ("score %", "difference, points", "p (Holm)"),
        ("shows",),
    )
    for row in record.rows:
        score = f"{100 * row.score:.1f} ({100 * row.low:.1f}–{100 * row.high:.1f})"
        points, ends = row.points
        difference, p = ("–", "–") if row.p is None else (f"{points} ({ends})", f"{row.p:.3f}")
        table.add_row(row.task, f"{row.name}: {row.meaning}", score, difference, p, row.verdict or "")
    return table


def alignment_tables(record: AlignmentRecord) -> list[Table]:
    """Terms overall, over training and per module; agreement of signs."""
    shown = sorted(record.modules, key=lambda row: -abs(row.gain.mean))[:MODULES_SHOWN]
    modules = [row for row in record.modules if row in shown]
    title = "direction of training against the task value's; 95 % intervals over rows"
    if len(modules) < len(record.modules):
        title += f"\n({len(modules)} of {len(record.modules)} modules: the largest gains; alignment.json has all)"
    numbers = ("angle", "cosine", "smallest ρ", "b_sg, %", "tail, %")
    terms = columns(title, ("where",), numbers, ("condition",))
    for row in (record.all, *record.checkpoints, *modules):
        total, place = row.total, short_name(row.name)
        errors = ["–" if value is None else f"{100 * value:.1f}" for value in (row.stopped_error, row.tail_error)]
        if total.cosine is None or total.rho is None:
            terms.add_row(place, "–", "–", "–", *errors, "direction is zero")
        else:
            cosine = f"{total.cosine.mean:+.2f}{total.cosine.ends('+.2f')}"
            terms.add_row(place, f"{total.angle:.0f}°", cosine, f"{total.rho.mean:.3f}", *errors, total.verdict)
    signs = columns(
        "single λ: does entropy push the way the task value would?",
        ("next token",),
        ("λ", "right way, %", "weighted, %", "entropy wants more, %", "value wants more, %"),
    )
    names = {row.name for row in record.modules}
    for one in record.coordinates:
        if one.name not in names:
            shares = (one.share.mean, one.weighted.mean, one.raised, one.value_raised)
            signs.add_row(one.name, f"{one.coordinates:,}", *[f"{100 * share:.1f}" for share in shares])
    return [terms, signs]


def columns(title: str, texts: Sequence[str], numbers: Sequence[str], closing: Sequence[str] = ()) -> Table:
    """An empty table: texts to the left, numbers to the right, closing texts."""
    table = Table(title=title)
    for name in (*texts, *numbers, *closing):
        table.add_column(name, justify="right" if name in numbers else "left")
    return table


def short_name(path: str) -> str:
    """A module path as a narrow table has room for: "layer 3 down_proj"."""
    number = re.search(r"\.(\d+)\.", path)
    return path if number is None else f"layer {number.group(1)} {path.rsplit('.', 1)[-1]}"
