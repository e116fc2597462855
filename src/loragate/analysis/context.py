"""What every diagnosis is given, a model and how it is read, and what every one leaves behind, a JSON record.

A diagnosis is a function of a `DiagnosticContext`. It first refuses what cannot work, then takes `context.loaded`, which loads
the model. Answers that are only read are those of a stored evaluation; scores come from an evaluation in the same folder.
Records are frozen dataclasses with the fields `about`, `conclusion`, `kind` and `schema`; `loragate.records.read` reads them as
strictly as they are written.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from loragate import records
from loragate.analysis.rows import Reader, Row, TokenClasses, answer_rows, distinct, no_progress
from loragate.analysis.settings import DiagnoseSettings
from loragate.data import encode_rows, load_rows
from loragate.display import pluralize
from loragate.errors import ConfigError, DataError, LoragateError, nearest
from loragate.evaluation.answers import Grade
from loragate.evaluation.engines import EngineContext, load
from loragate.evaluation.evaluate import Evaluation, open_evaluation
from loragate.evaluation.judging import resolve_grader
from loragate.evaluation.prepared import PreparedTask, Request, require_run_folder
from loragate.evaluation.results import EvaluationRecord
from loragate.evaluation.tasks import Task
from loragate.evaluation.variants import ModelVariant, activate_variant
from loragate.files import write_json
from loragate.generation import OnProgress, Sample
from loragate.models import Loaded, resolve
from loragate.models.source import Kind
from loragate.validate import comma_list

R = TypeVar("R", bound="Record")


@dataclass(frozen=True)
class About:
    """What stands in every record.

    Attributes:
        created: time, ISO 8601 with time zone.
        models: {"base": …, "adapter": …, "gated": …}, as far as there were any.
        source: what was read: rows, answers, tasks.
        seed: of sampling and of the bootstrap.
        settings: the settings that decide the figures, as text.
        versions: of the packages and the machine's system.
        seconds: of the whole diagnosis.
    """

    created: str
    models: dict[str, str]
    source: str
    seed: int
    settings: dict[str, str]
    versions: dict[str, str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Record:
    """What every record has; its own fields, a literal `kind` among them, follow.

    Attributes:
        about: models, source, seed, versions.
        conclusion: what it says, in sentences.
    """

    about: About
    conclusion: tuple[str, ...] = ()
    schema: Literal[1] = 1


@dataclass(frozen=True)
class Answers:
    """Answers of one variant to one task, each with its verdict, None before the evaluation graded it."""

    prepared: PreparedTask
    graded: list[tuple[Sample, Grade | None]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for sample, _ in self.graded]

    @property
    def grades(self) -> list[Grade | None]:
        return [grade for _, grade in self.graded]


def stored_answers(
    evaluation: Evaluation, variant: ModelVariant, prepared: PreparedTask, count: int, limit: int | None = None
) -> Answers:
    """The first `count` answers of a row to the first `limit` questions of a task."""
    grader = resolve_grader(prepared.task, evaluation.grading.grader)
    samples, grades = evaluation.answers(variant, prepared.task.name, grader)
    first = len(prepared.prompts) if limit is None else limit
    graded = zip(samples, [None] * len(samples) if grades is None else grades, strict=True)
    return Answers(prepared, [(s, grade) for s, grade in graded if s.sample < count and s.question < first])


class ReadsModel(ABC):
    """Something with a model, and how it is read."""

    @property
    @abstractmethod
    def loaded(self) -> Loaded:
        """The model, loaded when it is first asked for."""

    @cached_property
    def reader(self) -> Reader:
        """Reads rows with the model."""
        return Reader(self.loaded.model, self.loaded.tokenizer)

    @cached_property
    def classes(self) -> TokenClasses:
        """Token classes of the model, with the ids that end an answer."""
        return TokenClasses(self.loaded.tokenizer, self.loaded.endings.token_ids)

    def acting(self, kind: Kind) -> AbstractContextManager[None]:
        """The context in which the model is its base, its adapter or its gates."""
        return activate_variant(self.loaded.model, ModelVariant(kind), self.loaded.kind)


class DiagnosticContext(ReadsModel):
    """A model that is looked at, silently; a subclass says and shows what goes on.

    Args:
        request: the model, the folder of the record, the tasks whose answers are drawn (none need be named), and how.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.folder = request, request.out
        self.seed, self.batch_size = request.tasks.seed, request.engine.batch_size
        self.has_tasks = bool(request.tasks.suite or request.tasks.tasks)
        self.tasks: list[Task] = []
        self.noted: set[Kind] = set()
        self.began = time.monotonic()

    def say(self, line: str) -> None:
        """Something that a reader should know."""

    def show(self, record: Record) -> None:
        """What was found, before it is written: a full disk then costs the file, and not hours of reading."""

    @contextmanager
    def job(self, name: str, total: int = 0, unit: str = "") -> Iterator[OnProgress]:
        """A part of the work; yields what is called with (done, of)."""
        yield no_progress

    def open(self, model: str, base: str, engine: str) -> Loaded:
        """The model of the request, or another that is read beside it."""
        return load(model, base, engine=engine)

    def score(self, evaluation: Evaluation) -> EvaluationRecord:
        """Run an evaluation in the folder."""
        evaluation.begin(self.request.resume)
        return evaluation.run()

    def require_answers(self, settings: DiagnoseSettings) -> None:
        """Refuse a diagnosis of stored answers that is given none."""
        if not settings.run:
            raise ConfigError("give --run FOLDER, an evaluation of `loragate eval` whose stored answers are read")

    def begin(self, *, gated: bool = True, drawing: bool = True) -> Loaded:
        """The model, after the folder was found free and the tasks can be asked; a ConfigError says what is not so.

        Args:
            gated: whether gates are needed.
            drawing: whether answers to the tasks are drawn, if any is named.
        """
        drawing = drawing and self.has_tasks
        # what can be refused without the model is refused before its weights are loaded
        if self.request.resume and not drawing:
            raise ConfigError("--resume goes on with sampling, and no task was named; run the command without it")
        if drawing:
            self.tasks = self.request.check()
        else:
            require_run_folder(self.folder, self.request.resume)
        if drawing and len(self.request.tasks.temperatures) > 1:
            raise ConfigError(
                f"--temperature {self.request.tasks.temperature}: a diagnosis draws its answers at one temperature; give one"
            )
        for task in self.tasks:
            if task.harness is not None:
                raise ConfigError(
                    f"{task.name} is asked through lm-evaluation-harness, which `loragate diagnose` does not use in this "
                    "version; name other tasks, such as --suite math, code, arithmetic or tiny"
                )
        loaded = self.loaded
        if loaded.kind == "base":
            raise ConfigError(f"--model {self.request.model} is a base; give an adapter or a gated folder")
        if gated and loaded.kind != "gated":
            raise ConfigError(loaded.note or f"--model {self.request.model} is a plain adapter; this look needs gates")
        if loaded.note:
            self.say(loaded.note)
        return loaded

    @cached_property
    def loaded(self) -> Loaded:
        """The model, loaded when it is first asked for."""
        with self.job("loading the model"):
            return self.open(self.request.model, self.request.base, self.request.engine.engine)

    def load_reference(self, name: str) -> Loaded:
        """Another model; the request's base says where that of an adapter is, and a whole model has none."""
        with self.job("loading the reference"):
            whole = resolve(name, base_optional=True).kind == "base"
            return self.open(name, "" if whole else self.request.base, "transformers")

    def rows(self, settings: DiagnoseSettings, most: int) -> tuple[list[Row], str]:
        """The first rows of a file or data set, `most` where the settings do not say, encoded, and which they are, in words."""
        with self.job("reading the rows"):
            rows = load_rows(settings.rows, limit=settings.max_rows or most)
            length = min(settings.max_length, self.loaded.max_positions or settings.max_length)
            encoded = encode_rows(rows, self.loaded.tokenizer, max_length=length, system=self.request.system)
        found = list(encoded)
        if repeats := len(found) - len(set(distinct(found))):
            self.say(
                f"note: {settings.rows}: of {len(found)} rows {repeats} repeat another; intervals are over the "
                f"{len(found) - repeats} that differ"
            )
        used = "" if len(found) == len(rows) else f"{len(found)} of "  # the others have no response that is read
        return found, f"{used}the first {len(rows)} rows of {settings.rows}"

    def evaluate(
        self,
        variants: Sequence[ModelVariant],
        identity: dict[str, Any],
        engine_for: EngineContext | None = None,
    ) -> EvaluationRecord:
        """Score rows of our own on the tasks; the whole evaluation lies in the folder, its record in results.json.

        Args:
            identity: what a resumed run must share beside the evaluation's own.
            engine_for: (variant) -> context with an engine that answers as it; None for rows that the request's engine can be.
        """
        with self.job("reading the questions"):
            prepared = self.request.prepare(self.tasks, self.loaded)
        evaluation = Evaluation.from_request(self.request, prepared, self.loaded, variants, diagnose=identity)
        evaluation.engine_for = engine_for or evaluation.engine_for
        return self.score(evaluation)

    def answers(self, of: Kind, settings: DiagnoseSettings) -> tuple[list[Answers], str]:
        """(stored answers of base, adapter or gates by task, where they come from).

        Raises:
            ConfigError: for a run without answers, and for a variant or tasks that it does not hold.
        """
        folder, asked = Path(settings.run), self.request.tasks
        evaluation = open_evaluation(folder, self.request.grading)
        acted: tuple[Kind, ...] = ("base", "adapter", "gated")
        for kind in acted[: acted.index(of) + 1]:  # all that `of` is made of
            theirs, here = evaluation.models.get(kind), self.loaded.sources.get(kind)
            if theirs not in (None, here) and kind not in self.noted:
                self.noted.add(kind)  # a look may read the answers of several variants
                what = "gates" if kind == "gated" else kind
                self.say(f"note: the answers in {folder} were given with the {what} {theirs}; here it is {here}")
        by_name = {one.task.name: one for one in evaluation.tasks if one.task.harness is None}
        if not by_name:
            raise ConfigError(
                f"{folder} holds no answers to read: its tasks were asked through lm-evaluation-harness, which loragate "
                "diagnose does not read; give a run with other tasks"
            )
        held, variant = [one.label for one in evaluation.variants], ModelVariant(of)
        cells = {str(Path(one.gates).resolve()): one for one in evaluation.variants if one.gates}  # of a sweep
        if of == "gated" and "gated" in self.loaded.names:
            variant = cells.get(str(Path(self.loaded.names["gated"]).resolve()), variant)
        if variant.label not in held:
            cell = f", or a cell of the sweep, --model {next(iter(cells))}" if cells else ""
            raise ConfigError(
                f"--run {folder} holds answers of {', '.join(held)}, and none of {of}; give a run of `loragate eval --model "
                f"{self.request.model}`{cell} (gates and alignment read those of another variant with --of)"
            )
        names = comma_list(asked.tasks) or list(by_name)
        for name in names:
            if name not in by_name:
                raise ConfigError(f"--tasks {name}: the run holds {', '.join(by_name)}{nearest(name, by_name)}")
        count = settings.answers
        chosen = [by_name[name] for name in dict.fromkeys(names)]
        found = [stored_answers(evaluation, variant, prepared, count, asked.limit) for prepared in chosen]
        tasks = ", ".join(answers.prepared.task.name for answers in found)
        return (
            found,
            f"answers of the {variant.label} model to {tasks} stored in {folder}, {count} per question at most",
        )

    def answer_rows(self, answers: Answers, max_length: int | None = None) -> list[Row]:
        """The answers behind their prompts, see `loragate.analysis.rows.answer_rows`; what is left out or cut is said."""
        samples, name = answers.samples, answers.prepared.task.name
        prompts = self.loaded.tokenizer(answers.prepared.prompts, add_special_tokens=False)["input_ids"]
        rows = answer_rows(prompts, samples, max_length)
        lengths = [len(prompts[sample.question]) + len(sample.token_ids) for sample in samples]
        empty = sum(not sample.token_ids for sample in samples)
        account = {
            "left out without a response": empty,
            "left out, as max_length cuts the whole response": len(samples) - len(rows) - empty,
            "cut by max_length": sum(len(row["input_ids"]) < lengths[row["row"]] for row in rows),
        }
        notes = "; ".join(f"{count} {what}" for what, count in account.items() if count)
        if notes:
            self.say(f"note: {name}: of {pluralize(len(samples), 'answer')} {notes}")
        return rows

    def require_rows(self, rows: Sequence[Row], source: str) -> None:
        """Refuse (DataError) answers of which nothing is left to read."""
        if not rows:
            raise DataError(
                f"{source}: no answer has a token to read; give other answers, or a higher --max-length where it has one"
            )

    def about(self, source: str, settings: DiagnoseSettings, names: str) -> About:
        """`About` of a diagnosis, with the settings of these names as text (some are the tasks'); `write_record` adds the time."""
        return About(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            models=dict(self.loaded.sources),
            source=source,
            seed=self.seed,
            settings={
                name: str(getattr(self.request.tasks if hasattr(self.request.tasks, name) else settings, name))
                for name in names.split()
            },
            versions=records.package_versions(),
            seconds=0.0,
        )

    def write_record(self, record: R, name: str, conclude: Callable[[R], tuple[str, ...]]) -> R:
        """The record with its conclusion and the time that it took, shown and written as `name`.json into the folder."""
        about = replace(record.about, seconds=round(time.monotonic() - self.began, 3))
        record = replace(record, about=about, conclusion=conclude(record))
        self.show(record)
        self.write(name, records.to_json(record))
        return record

    def write(self, name: str, record: dict[str, Any]) -> None:
        """A record that was shown, as `name`.json into the folder; where that fails, the error says what is left of the work."""
        try:
            write_json(self.folder / f"{name}.json", record)
        except LoragateError as error:
            said = "Of this look the lines above are all that was kept"
            raise LoragateError(f"{str(error).rstrip('.')}. {said}") from error
