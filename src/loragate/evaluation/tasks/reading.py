"""YAML files to tasks: the built-in ones by name, the user's own by path.

Every mistake is a ConfigError that names the file, the key, what was found and what is known. A task that could be read
in two ways, or that holds a setting without effect, is refused.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from loragate.effects import require_effect
from loragate.errors import ConfigError, nearest
from loragate.evaluation.tasks.generated import GENERATORS
from loragate.evaluation.tasks.schema import check_schema
from loragate.evaluation.tasks.task import EXTRACTORS_OF, SUITES, Task
from loragate.evaluation.tasks.templates import is_template, variables
from loragate.strict_yaml import read_mapping
from loragate.validate import validate

DEFINITIONS = Path(__file__).parent / "definitions"
SUFFIXES = (".yaml", ".yml")
# what a task of either engine needs
NEEDED = {
    "loragate": (
        *("dataset", "columns", "prompt", "generation", "grader", "metric", "dataset.schema", "columns.gold"),
        *("generation.samples", "generation.temperature", "generation.max_new_tokens"),
    ),
    "lm-eval": ("dataset", "harness"),
}


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


def load_task(name_or_path: str | Path) -> Task:
    """A built-in task by name, or any task by the path of its YAML file.

    Raises:
        ConfigError: for an unknown name, or a file with a mistake.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() in SUFFIXES:
        return _task(read_mapping(path), path)
    known = task_names()
    if str(name_or_path) in known:
        path = DEFINITIONS / f"{name_or_path}.yaml"
        return _task(read_mapping(path), path)
    raise ConfigError(
        f"unknown task '{name_or_path}'{nearest(str(name_or_path), known) or '.'} Known: {', '.join(known)}; a task of your own "
        "is given as the path of its .yaml file"
    )


def _given(value: Any) -> Any:
    """A block without its nulls: they stand for what is left out."""
    return {key: _given(one) for key, one in value.items() if one is not None} if isinstance(value, dict) else value


def _need(content: Any, keys: tuple[str, ...], path: Path) -> None:
    missing = []
    for key in keys:
        block, _, name = key.rpartition(".")
        inside = content.get(block) if block else content
        if isinstance(inside, dict) and name not in inside:
            missing.append(key)
    if missing:
        raise ConfigError(f"{path}: missing {', '.join(missing)}")


def _task(content: dict[str, Any], path: Path) -> Task:
    content = _given(content)
    columns = content.get("columns")
    if isinstance(columns, dict):
        content["columns"] = {name: [one] if isinstance(one, str) else one for name, one in columns.items()}
    # what is known and of the right kind comes first: a misspelt key is not a missing one
    task = validate(Task, {"name": "", "version": 0, "suite": "math", "dataset": {}, **content}, str(path))
    _need(content, ("name", "version", "suite", *NEEDED[task.engine]), path)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", task.name):
        raise ConfigError(f"{path}: name is {task.name!r}; files are called by it: letters, digits, '_', '-', '.'")
    task = dataclasses.replace(task, path=path)
    try:
        require_effect("task", task)
        require_effect("dataset", task.dataset)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    _check_dataset(task, path)
    if task.engine == "lm-eval":
        return task
    if "lm-eval" in (task.grader, task.metric):
        raise ConfigError(f"{path}: grader and metric lm-eval are for engine: lm-eval")
    readable = EXTRACTORS_OF[task.grader]
    if "extractor" not in content:
        task = dataclasses.replace(task, extractor=readable[0])
    if task.extractor not in readable:
        raise ConfigError(
            f"{path}: extractor is '{task.extractor}', but the grader '{task.grader}' reads {' or '.join(readable)}"
        )
    generation = task.generation
    if generation.stop and not task.raw:
        raise ConfigError(
            f"{path}: generation.stop is for raw: true; with the chat template an answer ends at the end-of-turn token"
        )
    if generation.temperature == 0 and generation.samples > 1:
        raise ConfigError(f"{path}: generation.samples is {generation.samples}, but greedy samples are all the same")
    _check_columns(task, path)
    known = {*task.dataset.schema, *(task.columns.keys() - {"gold"})}
    _check_variables(task.prompt, known, f"{path}: prompt")
    return task


def _check_dataset(task: Task, path: Path) -> None:
    dataset = task.dataset
    sources = [key for key in ("hub", "file", "generator") if getattr(dataset, key) is not None]
    if len(sources) != 1:
        found = " and ".join(sources) or "none of them"
        raise ConfigError(f"{path}: dataset needs exactly one of hub, file and generator; found {found}")
    if dataset.generator is not None and dataset.generator not in GENERATORS:
        raise ConfigError(
            f"{path}: dataset.generator is '{dataset.generator}'{nearest(dataset.generator, GENERATORS) or '.'} "
            f"Known: {', '.join(GENERATORS)}"
        )
    if dataset.generator is not None and dataset.rows is None:
        raise ConfigError(f"{path}: missing dataset.rows")
    check_schema(dataset.schema, f"{path}: dataset.schema")


def _check_columns(task: Task, path: Path) -> None:
    """Every candidate is a column of the data set, or a template over its columns."""
    schema = task.dataset.schema
    for name, candidates in task.columns.items():
        place = f"{path}: columns.{name}"
        for candidate in candidates:
            if is_template(candidate):
                _check_variables(candidate, set(schema), place)
            elif candidate not in schema:
                raise ConfigError(
                    f"{place} names the column '{candidate}', which dataset.schema does not have"
                    f"{nearest(candidate, schema) or '.'} It has {', '.join(schema)}"
                )


def _check_variables(source: str, known: set[str], place: str) -> None:
    for name in sorted(variables(source, place) - known):
        raise ConfigError(
            f"{place} uses '{name}', which the data set does not have{nearest(name, known) or '.'} "
            f"It may use {', '.join(sorted(known))}"
        )
