"""Evaluations and diagnoses on a terminal: what `eval`, `regrade` and `diagnose` ask of their rooms, shown while it runs.

Apart from the commands, which the help reads, as this loads what an evaluation needs; it knows none of them.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from loragate import records
from loragate.analysis.alignment import diagnose_alignment
from loragate.analysis.context import DiagnosticContext, Record
from loragate.analysis.delta_entropy import diagnose_entropy
from loragate.analysis.gates import diagnose_gates, diagnose_interventions
from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.token_traces import diagnose_tokens
from loragate.cli.arguments import resolved_yaml
from loragate.cli.options import EvaluationInputs
from loragate.display import Display, console, duration
from loragate.evaluation.engines import find_available_variants, load
from loragate.evaluation.evaluate import Evaluation, make_progress_reporter
from loragate.evaluation.prepared import Request
from loragate.evaluation.results import EvaluationRecord
from loragate.evaluation.variants import describe_canary
from loragate.files import write_text
from loragate.gates.override import constant_name
from loragate.models import Loaded
from loragate.report.blocks import diagnosis_blocks
from loragate.report.scores import advice_of, caption, score_markdown, score_tables
from loragate.report.selection import write_maps
from loragate.report.table import Table
from loragate.serving.vllm_server import require_served

DIAGNOSIS_RUNNERS: dict[str, Callable[[DiagnosticContext, DiagnoseSettings], Any]] = {
    "entropy": diagnose_entropy,
    "gates": diagnose_gates,
    "interventions": diagnose_interventions,
    "alignment": diagnose_alignment,
    "tokens": diagnose_tokens,
}


def make_request(options: EvaluationInputs, model: str) -> Request:
    """What an evaluation is asked for by a command's options."""
    return Request(
        model,
        Path(options.out),
        tasks=options,
        engine=options,
        grading=options,
        base=options.base,
        system=options.system,
        resume=options.resume,
    )


def load_inputs(options: EvaluationInputs, name: str, engine: str = "transformers") -> Loaded:
    """The model and tokenizer of `--model`; its plain adapter where the gates are off."""
    loaded = load(name, options.base, options, engine)
    if engine == "vllm":
        require_served(loaded.names["base"], loaded.config)
    return loaded


def evaluate(options: EvaluationInputs, controls: str, constants: Sequence[float | str]) -> int:
    """`loragate eval` on one model, with these controls beside it."""
    request = make_request(options, options.model)
    tasks = request.check()
    out, display = console(), Display()
    with display.job("loading the model"):
        loaded = load_inputs(options, options.model, options.engine)
    if loaded.note:
        out.print(loaded.note)
    with display.job("reading the questions"):
        prepared = request.prepare(tasks, loaded)
    temperatures = request.added_temperatures(prepared, loaded, controls)
    variants, left_out = find_available_variants(loaded, controls, constants, temperatures)
    evaluation = Evaluation.from_request(request, prepared, loaded, variants, left_out=left_out)
    if note := request.sampling_note(prepared, loaded):
        out.print(note)
    rows = ", ".join(variant.label for variant in evaluation.variants)
    record = run_evaluation(options, evaluation, out, display, f"rows: {rows}; ")
    print_results(out, request.out / "results", record)
    out.print(next_line(request.out, record))
    return 0


def evaluate_sweep(options: EvaluationInputs, sweep: str) -> int:
    """`loragate eval --sweep`: an evaluation with the finished cells of the sweep as rows; heat maps."""
    from loragate.selection.sweep import TrainedCells  # it trains as well, and an environment of vLLM need not have TRL

    cells = TrainedCells.of(Path(sweep), make_request(options, ""))
    out, display = console(), Display()
    # nobody names the model of a sweep: it is the adapter of the cells, and stands so in config.yaml
    resolved_options = replace(options, model=cells.request.model, base=cells.request.base)
    with display.job("loading the model"):
        loaded = load_inputs(resolved_options, resolved_options.model, options.engine)
        loaded.stop_token_ids = cells.stop_token_ids
    with display.job("reading the questions"):
        evaluation = cells.evaluation(loaded)
    record = run_evaluation(resolved_options, evaluation, out, display, f"{len(cells.trials)} cells, ")
    folder, plain = cells.request.out, record.to_json()
    write_text(folder / "results.md", score_markdown(plain))
    out.print(advice_of(plain)[-1])
    out.print(f"written to {folder}/results.json and .md in {duration(record.seconds)}")
    if maps := write_maps(plain, folder):
        out.print(f"maps of the ranges: {', '.join(f'{name}.png' for name in maps)}")
    out.print(f"next: loragate report {folder} --figures {folder}/figures")
    return 0


def run_evaluation(
    options: EvaluationInputs, evaluation: Evaluation, out: Console, display: Display, rows: str = ""
) -> EvaluationRecord:
    """Say what a reader should know and which `rows` come, write down what is being run, sample and judge behind one bar.

    Ctrl-C says how to go on.
    """
    for warning in evaluation.warnings:
        out.print(f"warning: {warning}")
    out.print(describe_canary(evaluation.canary))
    evaluation.begin(options.resume)
    write_text(evaluation.folder / "config.yaml", resolved_yaml(options))
    out.print(f"{rows}{evaluation.sample_count:,} answers to sample")
    try:
        with display.job("sampling and grading") as job:
            return evaluation.run(make_progress_reporter(job, evaluation.sample_count))
    except KeyboardInterrupt:
        where = evaluation.folder
        out.print(f"stopped; every answer so far is in {where}. The same command with --resume goes on")
        raise


def print_results(out: Console, place: Path, record: EvaluationRecord) -> None:
    """The tables of a record that stands in `place`.json, which are also written beside it."""
    plain: dict[str, Any] = record.to_json()
    write_text(place.with_name(f"{place.name}.md"), score_markdown(plain))
    for table in score_tables(plain):
        out.print(table)
        out.print()
    out.print(caption(plain))
    out.print(f"written to {place}.json and .md in {duration(record.seconds)}")


def next_line(folder: Path, record: EvaluationRecord) -> str:
    """What to run next: a second opinion where there is one, else a look at the answers."""
    other = {"default": "math_verify", "math_verify": "default"}
    for info in record.tasks:
        if info.grader in other:
            return f"next: loragate regrade {folder} --grader {other[info.grader]}"
    # no second grader: look at answers of the row that did best
    # no name stands for random gates
    rows = [row for row in record.results if not (row.control or "").startswith("random gates")]
    own = {info.name: info.sampling.temperature for info in record.tasks}

    def temperature_of(row: Any) -> float:
        return own[row.task] if row.temperature is None else row.temperature

    # of equals the coldest, which needs one answer
    best = max(rows, key=lambda row: (row.avg_at_k.mean, -temperature_of(row)))
    model = record.models.get(best.variant, record.models["base"])
    if best.scale is not None:
        model += f"@{constant_name(best.scale, best.part)}"
    return f'next: loragate generate --model {shlex.quote(model)} --temperature {temperature_of(best):g} --prompt "…"'


class TerminalContext(DiagnosticContext):
    """A context whose diagnosis is shown on the terminal while it runs."""

    def __init__(self, options: EvaluationInputs) -> None:
        super().__init__(make_request(options, options.model))
        self.options, self.display, self.out = options, Display(), console()

    def say(self, line: str) -> None:
        self.out.print(line)

    def show(self, record: Record) -> None:
        for block in diagnosis_blocks(records.to_json(record)):
            # what is folded away on the page is too long for a terminal
            if isinstance(block, Table) and not block.collapsed_label:
                self.out.print(block)
        for line in record.conclusion:
            self.say(f"• {line}")

    def job(self, name: str, total: int = 0, unit: str = "") -> Any:
        return self.display.job(name, total, unit)

    def open(self, model: str, base: str, engine: str) -> Loaded:
        return load_inputs(replace(self.options, base=base), model, engine)

    def score(self, evaluation: Evaluation) -> EvaluationRecord:
        record = run_evaluation(self.options, evaluation, self.out, self.display)
        print_results(self.out, self.folder / "results", record)
        return record


def diagnose(what: str, options: EvaluationInputs, settings: DiagnoseSettings) -> None:
    """Take one of the `DIAGNOSIS_RUNNERS`, which shows its tables and its conclusion, and say what was written."""
    context, folder = TerminalContext(options), Path(options.out)
    record = DIAGNOSIS_RUNNERS[what](context, settings)
    if what == "tokens":
        context.say(f"{len(record['questions'])} questions written to {folder / 'tokens.json'}")
    else:
        write_text(folder / "config.yaml", resolved_yaml(options))
        context.say(f"written to {folder / what}.json in {duration(time.monotonic() - context.began)}")
