"""What a task is: a frozen description that says everything about how its questions are asked and judged.

Two runs are comparable when their tasks have the same fingerprint. Prose (`paper`, `notes`) and the place of the file do
not count towards it; the pinned revision does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt, Le, Len

from loragate.effects import acting
from loragate.validate import Amount, Count

Suite = Literal["math", "code", "retention", "arithmetic", "tiny"]
SUITES: tuple[str, ...] = get_args(Suite)
OurName = Literal["id", "question", "gold"]
Grader = Literal["default", "math_verify", "dft", "choice", "exact", "humaneval", "mbpp", "tiny", "lm-eval"]
# which extractors can feed a grader; the first is the default
EXTRACTORS_OF = {
    "default": ("boxed",),
    "math_verify": ("boxed",),
    "dft": ("boxed",),
    "choice": ("choice",),
    "exact": ("exact", "boxed"),
    "humaneval": ("code", "completion"),
    "mbpp": ("code",),
    "tiny": ("none",),
}


@dataclass(frozen=True)
class Dataset:
    """Where the questions come from: exactly one of `hub`, `file` and `generator`.

    Attributes:
        hub: data set id on the hub, "owner/name".
        config: configuration of the hub data set.
        split: split of the hub data set.
        revision: commit of the hub data set; None follows its main branch.
        file: .jsonl, .json or .parquet file; relative to the task's file.
        generator: what makes them (`generated.GENERATORS`).
        rows: number of rows of the full set; None when it is open.
        license: as stated by the card; None when none is stated.
        schema: column -> type (see `schema`); other columns are allowed.
    """

    hub: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    file: str | None = None
    generator: Literal["arithmetic", "tiny", "tiny_retention"] | None = None
    rows: Count | None = None
    license: str | None = None
    schema: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """How answers are sampled.

    Attributes:
        samples: samples per question.
        temperature: 0 is greedy.
        top_p: nucleus mass.
        max_new_tokens: limit in tokens.
        stop: texts that end an answer; for raw completion only.
    """

    samples: Count = 1
    temperature: Amount = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    max_new_tokens: Count = 1024
    stop: tuple[Annotated[str, Len(1)], ...] = ()


@dataclass(frozen=True)
class Harness:
    """A task that lm-evaluation-harness asks and scores.

    Attributes:
        task: the harness's own name of the task or group.
        files: the harness's own task file, which may hold {subset}, as the data set's configuration may.
        metric: the figure to report, "name,filter" as the harness writes it.
        average: what counts the same in the task's score beside others: each question, or each subset.
        max_new_tokens: token limit of an answer; None where nothing is generated.
        subset_column: column that names a row's subset where all share one file.
        subsets: in the order in which they are asked; empty where there are none.
        override: what replaces keys of the harness's task file; null takes one away.
    """

    task: str
    files: str
    metric: str
    average: Literal["questions", "subsets"] = "questions"
    max_new_tokens: Count | None = None
    subset_column: str | None = None
    subsets: tuple[str, ...] = ()
    override: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One task, as read from its file.

    Attributes:
        name: unique short name.
        version: raised whenever the questions, the prompt or the judging change.
        suite: "math", "code", "retention", "arithmetic" or "tiny".
        dataset: where the questions come from.
        columns: our names (`id`, `question`, `gold`) -> candidates, each a column or a template; the first that a row
            can fill is used.
        prompt: template of the user's turn, over the row's columns and `question`.
        system: system message, or None for none.
        raw: plain completion, without the chat template.
        generation: how answers are sampled.
        extractor: "boxed", "choice", "exact", "code", "completion" or "none".
        grader: a key of `EXTRACTORS_OF`, or "lm-eval".
        metric: "avg@k", "pass@1" or "lm-eval".
        engine: "loragate", or "lm-eval" for a task that the harness runs.
        harness: set when the engine is "lm-eval".
        variant_of: a task of which this is another form; suites leave it out.
        paper: what the paper or its code states about this task.
        notes: anything a reader of a score should know.
        path: the file this was read from.
    """

    name: str
    version: int
    suite: Suite
    dataset: Dataset
    columns: dict[OurName, Annotated[tuple[str, ...], Len(1)]] = field(default_factory=dict)
    prompt: str = ""
    system: str | None = None
    raw: bool = False
    generation: Generation = field(default_factory=Generation)
    extractor: str = "none"
    grader: Grader = "lm-eval"
    metric: Literal["avg@k", "pass@1", "lm-eval"] = "lm-eval"
    engine: Literal["loragate", "lm-eval"] = "loragate"
    harness: Harness | None = None
    variant_of: str | None = None
    paper: str = ""
    notes: str = ""
    path: Path = field(default=Path(), metadata={"key": False})

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the resolved content, without prose and place."""
        content = self.as_dict()
        for name in ("paper", "notes"):
            del content[name]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able content, as results record it: written as YAML it is the same task again, wherever its file lies."""
        content = dataclasses.asdict(dataclasses.replace(self, path=Path()))
        return {
            name: content[name] for name in acting("task", content, engine=self.engine, raw=False) if name != "path"
        }

    def with_revision(self, revision: str) -> Task:
        """The same task on another revision of its hub data set."""
        return dataclasses.replace(self, dataset=dataclasses.replace(self.dataset, revision=revision))


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: the data set's own id where it has one, else the position from 0; unique in the set.
        prompt: the user's turn, or the whole text where the task is raw; empty where the harness writes it.
        gold: the reference answer; for code, the reference solution.
        row: the row as it was read; code graders take the tests from here.
        place: file and line, for messages.
    """

    id: str
    prompt: str
    gold: str
    row: dict[str, Any]
    place: str = field(default="", metadata={"key": False})


@dataclass(frozen=True)
class Questions:
    """The questions of one task.

    Attributes:
        questions: in the order of the data set.
        source: file, hub id with split, or generator with seed.
        revision: commit of the hub data set, where it could be told.
        fingerprint: SHA-256 over the rows' content; equal for equal rows in any file format.
        warnings: what a reader of the score should know.
    """

    questions: list[Question]
    source: str
    revision: str | None
    fingerprint: str
    warnings: tuple[str, ...] = ()
