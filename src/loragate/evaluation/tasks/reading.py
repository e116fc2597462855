"""YAML files to tasks: the built-in ones by name, the user's own by path.

Every mistake is a ConfigError that names the file, the key, what was found and what is known. A task that could be read
in two ways, or that holds a setting without effect, is refused.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

from loragate import strict_yaml
from loragate.errors import ConfigError, nearest
from loragate.evaluation.tasks.generated import GENERATORS
from loragate.evaluation.tasks.schema import check_schema
from loragate.evaluation.tasks.task import (
    ENGINES,
    EXTRACTORS_OF,
    METRICS,
    SUITES,
    WITHOUT_EFFECT,
    Dataset,
    Generation,
    Harness,
    Task,
)
from loragate.evaluation.tasks.templates import is_template, variables

DEFINITIONS = Path(__file__).parent / "definitions"
SUFFIXES = (".yaml", ".yml")
OUR_NAMES = ("id", "question", "gold")

# key -> (accepted types, how a message calls them)
Kinds = dict[str, tuple[tuple[type, ...], str]]
_TEXT = ((str,), "text")
_WHOLE = ((int,), "a whole number")
_NUMBER = ((int, float), "a number")
_BLOCK = ((dict,), "a block of keys")
TASK_KEYS: Kinds = {
    "name": _TEXT,
    "version": _WHOLE,
    "suite": _TEXT,
    "dataset": _BLOCK,
    "columns": _BLOCK,
    "system": _TEXT,
    "prompt": _TEXT,
    "raw": ((bool,), "true or false"),
    "generation": _BLOCK,
    "extractor": _TEXT,
    "grader": _TEXT,
    "metric": _TEXT,
    "engine": _TEXT,
    "harness": _BLOCK,
    "variant_of": _TEXT,
    "paper": _TEXT,
    "notes": _TEXT,
}
DATASET_KEYS: Kinds = {
    **dict.fromkeys(("hub", "config", "split", "revision", "file", "generator", "license"), _TEXT),
    "rows": _WHOLE,
    "schema": _BLOCK,
}
GENERATION_KEYS: Kinds = {
    "samples": _WHOLE,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "max_new_tokens": _WHOLE,
    "stop": ((list,), "a list of texts"),
}
HARNESS_KEYS: Kinds = {"task": _TEXT, "metric": _TEXT}
# what a task of either engine needs
NEEDED = {
    "loragate": ("dataset", "columns", "prompt", "generation", "grader", "metric"),
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
        return _task(_read(path), path)
    known = task_names()
    if str(name_or_path) in known:
        path = DEFINITIONS / f"{name_or_path}.yaml"
        return _task(_read(path), path)
    raise ConfigError(
        f"unknown task '{name_or_path}'{nearest(str(name_or_path), known) or '.'} Known: {', '.join(known)}; a task of your own "
        "is given as the path of its .yaml file"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = strict_yaml.load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no task file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a block of keys such as name, dataset and prompt")
    return content


def _block(content: dict[str, Any], kinds: Kinds, path: Path, prefix: str = "") -> dict[str, Any]:
    """`content` without nulls, its keys known and their values of the right type."""
    for key, value in content.items():
        if key not in kinds:
            raise ConfigError(
                f"{path}: unknown key '{prefix}{key}'{nearest(str(key), kinds) or '.'} Known: {', '.join(kinds)}"
            )
        types, words = kinds[key]
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise ConfigError(f"{path}: {prefix}{key} is {value!r} ({type(value).__name__}), expected {words}")
    return {key: value for key, value in content.items() if value is not None}


def _need(content: dict[str, Any], keys: tuple[str, ...], path: Path, prefix: str = "") -> None:
    missing = [prefix + key for key in keys if key not in content]
    if missing:
        raise ConfigError(f"{path}: missing {', '.join(missing)}")


def _one_of(value: str, known: Any, path: Path, key: str) -> None:
    if value not in known:
        raise ConfigError(f"{path}: {key} is '{value}'{nearest(value, known) or '.'} Known: {', '.join(known)}")


def _task(content: dict[str, Any], path: Path) -> Task:
    content = _block(content, TASK_KEYS, path)
    _need(content, ("name", "version", "suite"), path)
    engine = content.get("engine", "loragate")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", content["name"]):
        raise ConfigError(
            f"{path}: name is {content['name']!r}; files are called by it: letters, digits, '_', '-', '.'"
        )
    _one_of(engine, ENGINES, path, "engine")
    _one_of(content["suite"], SUITES, path, "suite")
    _need(content, NEEDED[engine], path)
    if idle := [key for key in WITHOUT_EFFECT[engine] if key in content]:
        raise ConfigError(f"{path}: {', '.join(idle)} would have no effect with engine: {engine}; leave it out")
    dataset = _dataset(content.pop("dataset"), path, engine)
    if engine == "lm-eval":
        harness = _block(content.pop("harness"), HARNESS_KEYS, path, "harness.")
        _need(harness, ("task", "metric"), path, "harness.")
        return Task(**content, dataset=dataset, harness=Harness(**harness), path=path)

    grader = content["grader"]
    _one_of(grader, EXTRACTORS_OF, path, "grader")
    _one_of(content["metric"], [name for name in METRICS if name != "lm-eval"], path, "metric")
    extractor = content.pop("extractor", EXTRACTORS_OF[grader][0])
    if extractor not in EXTRACTORS_OF[grader]:
        raise ConfigError(
            f"{path}: extractor is '{extractor}', but the grader '{grader}' reads {' or '.join(EXTRACTORS_OF[grader])}"
        )
    generation = _generation(content.pop("generation"), path)
    if content.get("raw") and "system" in content:
        raise ConfigError(f"{path}: system would have no effect with raw: true, which uses no chat template")
    if generation.stop and not content.get("raw"):
        raise ConfigError(
            f"{path}: generation.stop is for raw: true; with the chat template an answer ends at the end-of-turn token"
        )
    columns = _columns(content.pop("columns"), dataset, path)
    _check_variables(content["prompt"], {*dataset.schema, *(columns.keys() - {"gold"})}, f"{path}: prompt")
    return Task(**content, dataset=dataset, columns=columns, generation=generation, extractor=extractor, path=path)


def _dataset(content: dict[str, Any], path: Path, engine: str) -> Dataset:
    content = _block(content, DATASET_KEYS, path, "dataset.")
    sources = [key for key in ("hub", "file", "generator") if key in content]
    if len(sources) != 1:
        found = " and ".join(sources) or "none of them"
        raise ConfigError(f"{path}: dataset needs exactly one of hub, file and generator; found {found}")
    if sources != ["hub"] and (idle := [key for key in ("config", "split", "revision") if key in content]):
        raise ConfigError(f"{path}: dataset.{idle[0]} is for hub data sets; it has no effect with {sources[0]}")
    if "generator" in content:
        _one_of(content["generator"], GENERATORS, path, "dataset.generator")
        _need(content, ("rows",), path, "dataset.")
    if content.get("rows", 1) < 1:
        raise ConfigError(f"{path}: dataset.rows is {content['rows']}, expected at least 1")
    dataset = Dataset(**content)
    if engine == "loragate":
        _need(content, ("schema",), path, "dataset.")
        for column, kind in dataset.schema.items():
            if not isinstance(column, str) or not isinstance(kind, str):
                raise ConfigError(f"{path}: dataset.schema has {column!r}: {kind!r}, expected column: type")
        check_schema(dataset.schema, f"{path}: dataset.schema")
    return dataset


def _generation(content: dict[str, Any], path: Path) -> Generation:
    content = _block(content, GENERATION_KEYS, path, "generation.")
    _need(content, ("samples", "temperature", "max_new_tokens"), path, "generation.")
    stop = content.pop("stop", [])
    if not all(isinstance(text, str) and text for text in stop):
        raise ConfigError(f"{path}: generation.stop is {stop!r}, expected a list of texts")
    generation = Generation(**content, stop=tuple(stop))
    for key in ("samples", "max_new_tokens"):
        if getattr(generation, key) < 1:
            raise ConfigError(f"{path}: generation.{key} is {getattr(generation, key)}, expected at least 1")
    if not 0 <= generation.temperature < float("inf"):
        raise ConfigError(
            f"{path}: generation.temperature is {generation.temperature}, expected 0 or a positive number"
        )
    if not 0 < generation.top_p <= 1:
        raise ConfigError(f"{path}: generation.top_p is {generation.top_p}, expected a number in (0, 1]")
    if generation.temperature == 0 and generation.samples > 1:
        raise ConfigError(f"{path}: generation.samples is {generation.samples}, but greedy samples are all the same")
    # 1 and 1.0 are one setting and must give one fingerprint
    return dataclasses.replace(generation, temperature=float(generation.temperature), top_p=float(generation.top_p))


def _columns(content: dict[str, Any], dataset: Dataset, path: Path) -> dict[str, tuple[str, ...]]:
    kinds: Kinds = dict.fromkeys(OUR_NAMES, ((str, list), "a column, a template, or a list of them"))
    content = _block(content, kinds, path, "columns.")
    _need(content, ("gold",), path, "columns.")
    columns = {}
    for name, candidates in content.items():
        candidates = [candidates] if isinstance(candidates, str) else candidates
        if not candidates or not all(isinstance(item, str) for item in candidates):
            raise ConfigError(f"{path}: columns.{name} is {candidates!r}, expected columns or templates")
        for candidate in candidates:
            place = f"{path}: columns.{name}"
            if is_template(candidate):
                _check_variables(candidate, set(dataset.schema), place)
            elif candidate not in dataset.schema:
                raise ConfigError(
                    f"{place} names the column '{candidate}', which dataset.schema does not have"
                    f"{nearest(candidate, dataset.schema) or '.'} It has {', '.join(dataset.schema)}"
                )
        columns[name] = tuple(candidates)
    return columns


def _check_variables(source: str, known: set[str], place: str) -> None:
    for name in sorted(variables(source, place) - known):
        raise ConfigError(
            f"{place} uses '{name}', which the data set does not have{nearest(name, known) or '.'} "
            f"It may use {', '.join(sorted(known))}"
        )
