r"""What a task is: a frozen description that says how its questions are asked and judged, read from a YAML file.

Two evaluations are comparable when their tasks have the same fingerprint. Prose (`paper`, `notes`) and the place of the file do
not count towards it; the pinned revision does. Every mistake in a file is a ConfigError that names the file, the key, what was
found and what is known. A task that could be read in two ways, or that holds a setting without effect, is refused.

A column's type is written `text`, `integer`, `number`, `boolean`, `texts` (a list of text) or `object`; `text|number` allows
either, and a `?` at the end allows null or no such column. Columns that a schema does not name are left alone.

Templates are Jinja, sandboxed: no attribute tricks, files or globals. A name that an example cannot fill is an error and never an
empty text, as a prompt with a hole looks like a model that cannot answer. Two filters are added to Jinja's own: `boxed`, the
content of the last \boxed{...}, and `undollar`, which takes the dollar signs of LaTeX mathematics away.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from annotated_types import Gt, Le, Len
from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loragate.effects import active_settings, require_effect
from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.answers import last_boxed
from loragate.printable import excerpt
from loragate.strict_yaml import read_mapping
from loragate.validate import NonNegativeFloat, PositiveInt, validate


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # True is an int to Python


TYPES: dict[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": lambda value: _is_integer(value) or (isinstance(value, float) and math.isfinite(value)),
    "boolean": lambda value: isinstance(value, bool),
    "texts": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "object": lambda value: isinstance(value, dict),
}


def check_schema(schema: Mapping[str, str], place: str) -> None:
    """Raise ConfigError for a type that is not known; `place` names file and key."""
    for column, type_name in schema.items():
        for word in type_name.removesuffix("?").split("|"):
            if word not in TYPES:
                raise ConfigError(
                    f"{place}: the column '{column}' has the unknown type '{word}'{nearest(word, TYPES)}; "
                    f"known: {', '.join(TYPES)}, joined by |, with ? where null is allowed"
                )


def describe_schema(schema: Mapping[str, str]) -> str:
    """The columns that must be there: "problem (text), answer (text or number)"."""
    return ", ".join(f"{name} ({_words(kind)})" for name, kind in schema.items() if not kind.endswith("?"))


def check_row(row: Mapping[str, Any], schema: Mapping[str, str], where: str, task: str) -> None:
    """Raise DataError naming place and column if a column is absent or of another type than the schema's."""
    for column, type_name in schema.items():
        value = row.get(column)
        if value is None and type_name.endswith("?"):
            continue
        if column not in row:
            raise DataError(
                f"{where}: no column '{column}'{nearest(column, map(str, row)) or '.'} {found_columns(row)}; "
                f"{task} expects {describe_schema(schema)}"
            )
        if not any(TYPES[word](value) for word in type_name.removesuffix("?").split("|")):
            raise DataError(f"{where}: column '{column}' holds {format_value(value)}, expected {_words(type_name)}")


def found_columns(row: Mapping[str, Any]) -> str:
    """ "Found the columns a, b", the first twelve, safe to print."""
    names = [excerpt(str(name), 40).strip("'") for name in row]
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"Found the columns {', '.join(names[:12])}{more}" if names else "Found no columns"


def format_value(value: Any) -> str:
    """A text between quotes, any other value as JSON writes it; cut and escaped for a message."""
    return excerpt(value) if isinstance(value, str) else excerpt(json.dumps(value, default=str)).strip("'")


def _words(type_name: str) -> str:
    return type_name.removesuffix("?").replace("|", " or ")


def _boxed(text: str) -> str:
    found = last_boxed(text)
    if not found:
        raise ValueError(r"there is no \boxed{...} in it")
    return found


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.globals.clear()  # Jinja's own: range, dict, lipsum, …
    environment.filters |= {"boxed": _boxed, "undollar": lambda text: re.sub(r"(?<!\\)\$", "", text).strip()}
    return environment


@cache
def _compile(source: str) -> Template:
    return _environment().from_string(source)


def is_template(text: str) -> bool:
    """Whether a text is a template rather than the name of a column."""
    return "{{" in text or "{%" in text


def variables(source: str, place: str) -> set[str]:
    """Names of columns that a template reads; the name of a column reads itself.

    Raises:
        ConfigError: for a template that cannot be read; `place` names file and key.
    """
    if not is_template(source):
        return {source}
    try:
        _compile(source)  # `parse` alone takes a filter that does not exist
        return meta.find_undeclared_variables(_environment().parse(source))
    except TemplateSyntaxError as error:
        raise ConfigError(f"{place}: line {error.lineno} of the template: {error.message}") from None


def render(source: str, values: Mapping[str, Any], what: str) -> str:
    """The text of a template.

    Raises:
        DataError: naming `what` (place and template) if it cannot be filled.
    """
    try:
        return _compile(source).render(values)
    except Exception as error:  # filters raise whatever the row's values make them raise
        raise DataError(f"{what} cannot be filled: {error}") from None


Suite = Literal["math", "code", "retention", "arithmetic", "tiny", "tiny_retention"]
SUITES: tuple[str, ...] = get_args(Suite)
OurName = Literal["id", "question", "gold", "tolerance"]
Grader = Literal[
    "default",
    "math_verify",
    "gsm8k",
    "regex",
    "choice",
    "exact",
    "boxed",
    "humaneval",
    "mbpp",
    "tiny",
    "lm-eval",
]
OwnGrader = Callable[[str, str, dict[str, Any]], bool]
"""Called with (answer behind any reasoning, right answer, row of the data set): whether the answer is right."""
DEFINITIONS = Path(__file__).parent / "definitions"
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Dataset:
    """Where the questions come from: exactly one of `hub`, `file` and `generator`.

    Attributes:
        hub: data set id on the hub, "owner/name".
        config: configuration of the hub data set.
        split: split of the hub data set.
        revision: commit of the hub data set; None follows its main branch.
        file: .jsonl, .json, .csv or .parquet file; relative to the task's file.
        generator: what makes them (`questions.GENERATORS`).
        rows: number of rows of the full set; None when it is open.
        license: as stated by the card; None when none is stated.
        schema: column -> type (`TYPES`); other columns are allowed.
    """

    hub: str | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    file: str | None = None
    generator: Literal["arithmetic", "tiny", "tiny_retention"] | None = None
    rows: PositiveInt | None = None
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
        stop: texts that end an answer; for raw completion and suites of the harness only.
    """

    samples: PositiveInt = 1
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    max_new_tokens: PositiveInt = 1024
    stop: tuple[Annotated[str, Len(1)], ...] = ()


@dataclass(frozen=True)
class Harness:
    """How lm-evaluation-harness writes the prompts of a task and judges its answers.

    Attributes:
        files: the harness's own task file, which may hold {subset}, as the data set's configuration may.
        metric: the figure to report, "name,filter" as the harness writes it.
        average: what counts the same in the task's score beside others: each question, or each subset.
        subset_column: column that names a row's subset where all share one file.
        subsets: in the order in which they are asked; empty where there are none.
        override: what replaces keys of the harness's task file; null takes one away.
    """

    files: str
    metric: str
    average: Literal["questions", "subsets"] = "questions"
    subset_column: str | None = None
    subsets: tuple[str, ...] = ()
    override: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One task, as read from its file.

    Attributes:
        name: unique short name.
        version: raised whenever the questions, the prompt or the judging change.
        suite: "math", "code", "retention", "arithmetic", "tiny" or "tiny_retention".
        dataset: where the questions come from.
        columns: our names (`id`, `question`, `gold`, `tolerance`) -> candidates, each a column or a template; the first that
            a row can fill is used. `tolerance` is the absolute error that the grader "default" allows.
        prompt: template of the user's turn, over the row's columns and `question`.
        system: system message, or None for none.
        raw: plain completion, without the chat template.
        generation: how answers are sampled.
        grader: "default" or "math_verify" for mathematics; "gsm8k" for a last number; "regex" for the group of `pattern`;
            "choice", "exact", "boxed", "humaneval", "mbpp", "tiny"; or "lm-eval" for a task whose prompts and verdicts are the
            harness's.
        pattern: regular expression with one group, for the grader "regex".
        harness: of such a task.
        variant_of: a task of which this is another form; suites leave it out.
        paper: what the paper or its code states about this task.
        notes: anything a reader of a score should know.
        path: the file this was read from.
        own_grader: a function of a Python caller, which `grader` then names; no file can bring one.
    """

    name: str
    version: int
    suite: Suite
    dataset: Dataset
    grader: Grader
    columns: dict[OurName, Annotated[tuple[str, ...], Len(1)]]
    prompt: str = ""
    pattern: str = ""
    system: str | None = None
    raw: bool = False
    generation: Generation = field(default_factory=Generation)
    harness: Harness | None = None
    variant_of: str | None = None
    paper: str = ""
    notes: str = ""
    path: Path = field(default=Path(), metadata={"key": False})
    own_grader: OwnGrader | None = field(default=None, metadata={"key": False})

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the resolved content, without prose and place."""
        content = self.as_dict()
        for name in ("paper", "notes"):
            del content[name]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """JSON-able content, as results record it: written as YAML it is the same task again, wherever its file lies."""
        content = dataclasses.asdict(dataclasses.replace(self, path=Path(), own_grader=None))
        # raw as if it were false: a raw task has no system message, which its record states like any other's
        acts = active_settings("task", content, grader="exact" if self.own_grader else self.grader, raw=False)
        return {name: content[name] for name in acts if name not in ("path", "own_grader")}

    def as_yaml(self) -> str:
        """The text of a task file: its own where it was read from one, comments included."""
        if self.path.is_file() and self.own_grader is None:
            return self.path.read_text(encoding="utf-8")
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


def task_names() -> list[str]:
    """Names of the built-in tasks, sorted; variants included."""
    return sorted(path.stem for path in DEFINITIONS.glob("*.yaml"))


def suite(name: str) -> list[Task]:
    """The built-in tasks of a suite, sorted by name, without variants; "all" gives those of every suite.

    Raises:
        ConfigError: for an unknown suite.
    """
    known = (*SUITES, "all")
    if name not in known:
        raise ConfigError(f"unknown suite '{name}'{nearest(name, known) or '.'} Known: {', '.join(known)}")
    tasks = [load_task(task) for task in task_names()]
    return [task for task in tasks if task.variant_of is None and name in (task.suite, "all")]


def load_task(name_or_path: str | Path, grader: OwnGrader | None = None) -> Task:
    """A built-in task by name, or any task by the path of its YAML file.

    Args:
        grader: a function that judges its answers, in place of the file's grader: called with (answer behind any reasoning,
            right answer, row of the data set), it returns True or False. Records name it by module and qualified name.

    Raises:
        ConfigError: for an unknown name, a file with a mistake, or a function without a name of its own.
    """
    path, known = Path(name_or_path).expanduser(), task_names()
    if str(name_or_path) in known:
        path = DEFINITIONS / f"{name_or_path}.yaml"
    elif path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"unknown task '{name_or_path}'{nearest(str(name_or_path), known) or '.'} Known: {', '.join(known)}; a task of your "
            "own is given as the path of its .yaml file"
        )
    content = _drop_nulls(read_mapping(path))
    # one candidate may stand without a list
    columns = content.get("columns")
    if isinstance(columns, dict):
        content["columns"] = {name: [one] if isinstance(one, str) else one for name, one in columns.items()}
    task = validate(Task, content, str(path))
    absent = "columns.gold" if "gold" not in task.columns else "" if task.harness or task.prompt else "prompt"
    if task.grader == "lm-eval" and task.harness is None:
        absent = "harness"
    if absent:
        raise ConfigError(f"{path}: missing {absent}")
    if "tolerance" in task.columns and task.grader != "default":
        raise ConfigError(f"{path}: columns.tolerance has no effect with grader {task.grader}, only with default")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", task.name):
        raise ConfigError(f"{path}: name is {task.name!r}; files are called by it: letters, digits, '_', '-', '.'")
    task = dataclasses.replace(task, path=path)
    try:
        require_effect("task", task)
        require_effect("dataset", task.dataset)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    dataset = task.dataset
    sources = [key for key in ("hub", "file", "generator") if getattr(dataset, key) is not None]
    if len(sources) != 1:
        found = " and ".join(sources) or "none of them"
        raise ConfigError(f"{path}: dataset needs exactly one of hub, file and generator; found {found}")
    if dataset.generator is not None and dataset.rows is None:
        raise ConfigError(f"{path}: missing dataset.rows")
    check_schema(dataset.schema, f"{path}: dataset.schema")
    generation = task.generation
    if generation.stop and not task.raw and task.harness is None:
        raise ConfigError(
            f"{path}: generation.stop is for raw: true; with the chat template an answer ends at the end-of-turn token"
        )
    if generation.temperature == 0 and generation.samples > 1:
        raise ConfigError(f"{path}: generation.samples is {generation.samples}, but greedy samples are all the same")
    # names are checked now, so that a slip of the pen does not wait for the first row that takes this candidate
    for column, candidates in task.columns.items():
        for candidate in candidates:
            _check_variables(candidate, dataset.schema, f"{path}: columns.{column}")
    if is_template(task.prompt):
        # the gold is no part of what may be asked
        _check_variables(
            task.prompt, {*dataset.schema, *(task.columns.keys() - {"gold", "tolerance"})}, f"{path}: prompt"
        )
    if grader is None:
        return task
    name = getattr(grader, "__qualname__", "<lambda>")
    if task.harness is not None or name.endswith("<lambda>"):
        why = "is judged by the harness" if task.harness else "records name the function: write it with def"
        raise ConfigError(f"load_task({str(name_or_path)!r}, grader={grader!r:.80}): {why}")
    # pydantic holds the files' graders to their names
    return dataclasses.replace(task, grader=f"{grader.__module__}.{name}", own_grader=grader)  # type: ignore[arg-type]


def _drop_nulls(value: Any) -> Any:
    """A block without its nulls: they stand for what is left out, but for the harness, whose keys they take away."""
    if not isinstance(value, dict):
        return value
    return {key: one if key == "override" else _drop_nulls(one) for key, one in value.items() if one is not None}


def _check_variables(source: str, known: Collection[str], place: str) -> None:
    for name in sorted(variables(source, place) - set(known)):
        what = "uses" if is_template(source) else "names the column"
        raise ConfigError(
            f"{place} {what} '{name}', which dataset.schema does not have{nearest(name, known) or '.'} "
            f"It has {', '.join(sorted(known))}"
        )
