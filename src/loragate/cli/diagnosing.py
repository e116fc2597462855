"""Diagnoses on a terminal: what `diagnose` asks of `loragate.analysis`, shown while it runs, and the tables of its records.

Apart from the command, which the help reads, as this loads what a diagnosis needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from loragate import records
from loragate.analysis.alignment import diagnose_alignment
from loragate.analysis.delta_entropy import diagnose_entropy
from loragate.analysis.interventions import diagnose_interventions
from loragate.analysis.realised_gates import diagnose_gates
from loragate.analysis.subject import Subject
from loragate.analysis.token_traces import diagnose_tokens
from loragate.cli.arguments import resolved_yaml
from loragate.cli.diagnose import DiagnoseOptions
from loragate.cli.evaluating import begin, load_inputs, request_of, sample, show
from loragate.display import Display, console, duration
from loragate.evaluation.evaluate import EngineFor, Evaluation
from loragate.evaluation.results import EvaluationRecord
from loragate.evaluation.session import Session
from loragate.files import write_text
from loragate.generation import OnProgress
from loragate.models import Loaded
from loragate.report.page.blocks import diagnosis_blocks
from loragate.report.table import Sheet

LOOKS: dict[str, Callable[[Subject, DiagnoseOptions], Any]] = {
    "entropy": diagnose_entropy,
    "gates": diagnose_gates,
    "interventions": diagnose_interventions,
    "alignment": diagnose_alignment,
    "tokens": diagnose_tokens,
}


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
        begin(self.options, evaluation, self.out, f"{evaluation.sample_count:,} answers to sample")
        record = sample(session, evaluation, self.out, self.display, engine_for)
        show(self.out, self.folder / "results", record)
        return record


def diagnose(options: DiagnoseOptions) -> int:
    """Take the look, print its tables and its conclusion, and say what to run next."""
    subject, folder, what = Shown(options), Path(options.out), str(options.what)
    record = LOOKS[what](subject, options)
    if what == "tokens":
        subject.say(f"{len(record['questions'])} questions written to {folder / 'tokens.json'}")
    else:
        for block in diagnosis_blocks(records.to_json(record)):
            if isinstance(block, Sheet) and not block.folded:
                subject.out.print(block)
        write_text(folder / "config.yaml", resolved_yaml(options))
        for line in record.conclusion:
            subject.say(f"• {line}")
        subject.say(f"written to {folder / what}.json in {duration(time.monotonic() - subject.began)}")
    subject.say(f"next: loragate {next_command(options, subject.loaded.kind)}")
    return 0


def next_command(options: DiagnoseOptions, kind: str) -> str:
    """What to run next: the look that goes on from this one."""
    model, out = options.model, options.out
    if options.what == "tokens":
        return f"report {options.run} {out}"
    if options.what == "interventions":
        return f"diagnose gates --model {model} --run {out} --out {out}-gates"
    if options.what == "entropy":
        gates = f"diagnose gates --model {model} --tasks … --out {out}-gates"
        return gates if kind == "gated" else f"diagnose entropy --model {model} --suite … --out …"
    tasks = "--suite …"
    if options.what == "gates" and not options.run:
        tasks = f"--suite {options.suite}" if options.suite else f"--tasks {options.tasks}"
    return f"diagnose interventions --model {model} {tasks} --out {out}-interventions"
