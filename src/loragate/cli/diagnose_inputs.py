"""What the looks of `loragate diagnose` share: rows to read, answers drawn or stored, an evaluation under our own rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loragate.cli.arguments import resolved_yaml
from loragate.cli.diagnose import DiagnoseOptions
from loragate.cli.evaluating import load_inputs, progress, request_of
from loragate.display import Display, console, duration
from loragate.errors import ConfigError, nearest
from loragate.evaluation.canary import describe
from loragate.evaluation.prepared import chosen_tasks
from loragate.evaluation.session import Session as Scoring
from loragate.evaluation.session import require_run_folder
from loragate.evaluation.variants import Kind
from loragate.files import write_text
from loragate.validate import comma_list

if TYPE_CHECKING:
    from loragate.models import Loaded

KINDS: tuple[Kind, ...] = ("gated", "adapter", "base")


@dataclass
class Session:
    """One run of a look: its settings, folder, model and clock."""

    options: DiagnoseOptions
    folder: Path
    loaded: Loaded
    display: Display
    out: Any
    began: float

    @property
    def has_tasks(self) -> bool:
        """Whether tasks were asked for."""
        return bool(self.options.suite or self.options.tasks)

    def about(self, source: str, *names: str) -> Any:
        """`About` of the record, with the named settings."""
        from loragate.analysis.record import about

        seconds = time.monotonic() - self.began
        settings = {name: getattr(self.options, name) for name in names}
        return about(self.loaded.sources, source, self.options.seed, settings, seconds)

    def finish(self, record: Any, name: str, next_line: str) -> int:
        """Write the record, print its conclusion and what to run next."""
        from loragate.analysis.record import write

        write(record, self.folder / f"{name}.json")
        write_text(self.folder / "config.yaml", resolved_yaml(self.options))
        for line in record.conclusion:
            self.out.print(f"• {line}", markup=False)
        took = duration(time.monotonic() - self.began)
        self.out.print(f"written to {self.folder / name}.json in {took}", markup=False)
        self.out.print(f"next: {next_line}", markup=False)
        return 0


def begin(options: DiagnoseOptions, *, gated: bool) -> Session:
    """Check the folder and load the model.

    Args:
        gated: whether gates are needed.

    Raises:
        ConfigError: for a folder that is not free, a base alone, or gates
            that are absent or off.
    """
    folder = Path(options.out)
    samples_now = bool(options.suite or options.tasks) and not options.run
    if options.resume and not samples_now:
        raise ConfigError("--resume goes on with sampling, and no task was named; run the command without it")
    require_run_folder(folder, options.resume)
    if samples_now:
        ours(options)
    display = Display()
    began = time.monotonic()
    with display.job("loading the model"):
        loaded = load_inputs(options, options.model, options.engine)
    if loaded.kind == "base":
        raise ConfigError(f"--model {options.model} is a base; give an adapter or a gated folder")
    if gated and loaded.kind != "gated":
        raise ConfigError(loaded.note or f"--model {options.model} is a plain adapter; this look needs gates")
    out = console()
    if loaded.note:
        out.print(loaded.note, markup=False)
    return Session(options, folder, loaded, display, out, began)


def ours(options: DiagnoseOptions) -> list[Any]:
    """The tasks, all of which we ask ourselves.

    Raises:
        ConfigError: for a task that lm-evaluation-harness asks.
    """
    tasks = chosen_tasks(options)
    for task in tasks:
        if task.engine != "loragate":
            raise ConfigError(
                f"{task.name} is asked through lm-evaluation-harness, which `loragate diagnose` does not use in this version; "
                "name other tasks, such as --suite math, code, arithmetic or tiny"
            )
    return tasks


def read_rows(session: Session, default: int) -> tuple[list[dict[str, Any]], str]:
    """The rows of --rows, encoded, and where they come from."""
    from loragate.data import encode_rows, load_rows

    options = session.options
    with session.display.job("reading the rows"):
        rows = load_rows(options.rows, limit=options.max_rows or default)
        length = options.max_length
        if session.loaded.positions is not None:
            length = min(length, session.loaded.positions)
        encoded = encode_rows(rows, session.loaded.tokenizer, max_length=length, system=options.system)
    return list(encoded), f"the first {len(rows)} rows of {options.rows}"


ActingAs = Callable[[Any], AbstractContextManager[Any]]


def evaluate(
    session: Session, variants: Sequence[Any], identity: dict[str, Any], acting_as: ActingAs | None = None
) -> Any:
    """Sample and judge our own rows on the tasks; returns the record, which is also written as results.json.

    Args:
        identity: what a resumed run must share beside the evaluation's own.
        acting_as: (variant) -> context in which the model in memory is that row; None for rows that --engine can be.
    """
    from loragate.evaluation.engines import require_engine
    from loragate.evaluation.judging import require_graders
    from loragate.generation import TransformersEngine
    from loragate.report.scores import caption, score_markdown, score_tables

    options, loaded = session.options, session.loaded
    tasks, request = ours(options), request_of(options, options.model)
    require_graders(tasks, request.grader, request.judging)
    require_engine(request.engine)
    with session.display.job("reading the questions"):
        scoring = Scoring(request, tasks, loaded)
    evaluation = scoring.evaluation(variants, kind=loaded.kind, diagnose=identity)
    for warning in evaluation.warnings:
        session.out.print(f"warning: {warning}", markup=False)
    session.out.print(describe(evaluation.canary), markup=False)
    evaluation.begin(options.resume)
    write_text(session.folder / "config.yaml", resolved_yaml(options))

    @contextmanager
    def under(variant: Any) -> Iterator[Any]:
        assert acting_as is not None
        with acting_as(variant):
            yield TransformersEngine(loaded.model, loaded.tokenizer, batch_size=options.batch_size)

    with progress(session.display, evaluation.sample_count) as on_event:
        record = scoring.run(evaluation, on_event, None if acting_as is None else under)
    plain = record.to_json()
    write_text(session.folder / "results.md", score_markdown(plain))
    for table in score_tables(plain):
        session.out.print(table)
    session.out.print(caption(plain), markup=False)
    return record


@dataclass(frozen=True)
class Answers:
    """Answers of one variant to one task, with their verdicts where there are any."""

    prepared: Any
    samples: list[Any]
    grades: list[Any] | None


def read_answers(session: Session, default_of: Kind) -> tuple[list[Answers], str, str]:
    """(answers by task, whose they are, where they come from): stored ones of --run, or drawn now for --suite/--tasks."""
    from loragate.evaluation.judging import grader_for, read_grades
    from loragate.evaluation.stored import open_evaluation
    from loragate.evaluation.variants import Variant
    from loragate.generation import read_samples

    options, loaded = session.options, session.loaded
    of = options.of or default_of
    if not (options.run or session.has_tasks):
        raise ConfigError("give --run FOLDER (stored answers of `loragate eval`), or tasks with --suite or --tasks")
    variant: Any = Variant(of)
    if not options.run:
        evaluate(session, [variant], {"of": of})
    folder = Path(options.run) if options.run else session.folder
    evaluation = open_evaluation(folder, options.grader)
    if options.run and of == "gated":
        theirs, here = evaluation.models.get("gated"), loaded.sources.get("gated")
        if theirs != here:
            session.out.print(
                f"note: the answers in {folder} were given by {theirs}; the gates read here are {here}", markup=False
            )
    chosen = stored_tasks(evaluation, options.tasks) if options.run else evaluation.tasks
    found = []
    for prepared in chosen:
        name = prepared.task.name
        samples = read_samples(folder / "samples" / variant.slug / f"{name}.jsonl")
        first = len(prepared.prompts) if options.limit is None else options.limit
        kept = [
            sample
            for sample in samples
            if sample.sample < options.answers and sample.question < first and sample.token_ids
        ]
        path = folder / "grades" / grader_for(prepared.task, options.grader) / variant.slug / f"{name}.jsonl"
        grades = read_grades(path, samples)
        if grades is not None:
            by_sample = {id(sample): grade for sample, grade in zip(samples, grades, strict=True)}
            grades = [by_sample[id(sample)] for sample in kept]
        found.append(Answers(prepared, kept, grades))
    names = ", ".join(answers.prepared.task.name for answers in found)
    where = f" stored in {folder}" if options.run else ""
    return found, of, f"answers of the {of} model to {names}{where}, {options.answers} per question at most"


def stored_tasks(evaluation: Any, text: str) -> list[Any]:
    """The tasks of a stored evaluation named in `text`; all where it is empty.

    Raises:
        ConfigError: for a name that is not among them.
    """
    by_name = {prepared.task.name: prepared for prepared in evaluation.tasks}
    names = comma_list(text) or list(by_name)
    for name in names:
        if name not in by_name:
            raise ConfigError(f"--tasks {name}: the run holds {', '.join(by_name)}{nearest(name, by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)]


def pad_id(tokenizer: Any) -> int:
    """An id to pad with; padding is masked."""
    return int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id)


def classes_of(loaded: Loaded) -> Any:
    """Token classes of the loaded model, with the ids that end an answer."""
    from loragate.analysis.token_classes import TokenClasses

    return TokenClasses(loaded.tokenizer, loaded.endings.token_ids)
