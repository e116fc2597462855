"""The retention suites and their questions: what a suite is, and rows that are sound before a model sees them.

Each suite is one YAML file in `harness_tasks/`: the name and version of our definition, the harness's task that it builds
on, the columns and where the rows live on the hub. Rows come from there or from a local file and are checked line by
line. Nothing here knows the harness itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from loragate.data import Rows, load_rows
from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.tasks import load_task
from loragate.evaluation.tasks.questions import commit_of

DEFINITIONS = Path(__file__).parent / "harness_tasks"
# asked for by habit; these run code, which needs the sandbox
CODE_TASKS = ("humaneval", "humaneval_plus", "mbpp", "mbpp_plus")
INDEX = "loragate_index"  # the column that carries a question's place through the harness
ROW_FILES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Suite:
    """One file of `harness_tasks/`.

    `harness_files` and `hub` may hold `{subset}`; `metric` is the main metric and `also` the others, each "name,filter";
    `average` says what counts the same in the suite's score beside others: each question, or each subset.
    """

    name: str
    version: int
    harness_task: str
    harness_files: str
    hub: str
    split: str
    columns: str
    subset_column: str | None
    metric: str
    also: tuple[str, ...]
    average: Literal["questions", "subsets"]
    max_new_tokens: int | None
    subsets: tuple[str, ...]
    override: dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A checked row: its id, its subset ("" where the suite has none) and the columns that the harness needs."""

    id: str
    subset: str
    row: dict[str, Any]


@dataclass(frozen=True)
class Questions:
    """All questions of a suite in the order in which they are scored.

    `source` is the file, folder or hub id; `fingerprints` holds the SHA-256 of each source read; `missing` the subsets
    without a question; `revision` is the commit (or branch, where the hub did not tell) that was read, None for files.
    """

    items: list[Question]
    source: str
    fingerprints: dict[str, str]
    missing: list[str]
    revision: str | None = None


def suite_names() -> list[str]:
    """The suites that can be run."""
    return sorted(path.stem for path in DEFINITIONS.glob("*.yaml"))


def task_name(suite: Suite, subset: str) -> str:
    """Our name for the harness's task of one subset; with "" for the whole suite."""
    return f"loragate_{suite.name}" + (f"_{subset.replace(' ', '_')}" if subset else "")


def load_suite(name: str, max_new_tokens: int | None = None) -> Suite:
    """Read the definition of a suite; `max_new_tokens` replaces its token limit where it generates.

    Raises:
        ConfigError: for a name that is none of `suite_names()`.
    """
    known = suite_names()
    if name in CODE_TASKS:
        raise ConfigError(
            f"found the task {name!r}, which runs code; it has its own runner with a sandbox and is not run here"
        )
    if name not in known:
        raise ConfigError(f"found the task {name!r}, expected one of {', '.join(known)}{nearest(name, known)}")
    fields = yaml.safe_load((DEFINITIONS / f"{name}.yaml").read_text(encoding="utf-8"))
    suite = Suite(**{**fields, "subsets": tuple(fields["subsets"]), "also": tuple(fields["also"])})
    if max_new_tokens is None or suite.max_new_tokens is None:
        return suite
    return dataclasses.replace(suite, max_new_tokens=max_new_tokens)


def load_questions(
    suite: Suite, source: str | None = None, limit: int | None = None, revision: str | None = None
) -> Questions:
    """Read and check the questions of a suite.

    Args:
        source: a local file, or for a suite whose subsets are separate on the hub also a folder with one file per
            subset. With it no connection is opened. None reads the hub.
        limit: the first questions of each subset only.
        revision: of the hub data set; None takes the commit that the task's file pins, or the newest where it pins none.

    Raises:
        ConfigError: for a revision beside a local source.
        DataError: for rows that cannot be read or used; the message names the file and line.
    """
    if source is not None and revision is not None:
        raise ConfigError(f"{suite.name}: found revision={revision!r}, which has no effect on the local {source}")
    if source is None:
        dataset = load_task(suite.name).dataset
        revision = revision or dataset.revision
        # where none is pinned, what the main branch is now is read and recorded, for all subsets the same
        revision = commit_of(str(dataset.hub), revision) or revision
    parts = _parts(suite, source, revision)
    found: dict[str, list[Question]] = {}
    seen: dict[str, str] = {}
    for fixed_subset, rows in parts:
        for index in range(len(rows)):
            where = rows.where(index)
            subset, identifier, row = _checked(suite, rows[index], where, fixed_subset)
            members = found.setdefault(subset, [])
            identifier = identifier or f"{subset}/{len(members)}"
            if identifier in seen:
                raise DataError(
                    f"{where}: the id {identifier!r} stands at {seen[identifier]} too; give each question its own"
                )
            seen[identifier] = where
            members.append(Question(identifier, subset, row))
    order = suite.subsets or ("",)
    items = [question for subset in order for question in found.get(subset, [])[:limit]]
    return Questions(
        items=items,
        source=source or suite.hub,
        fingerprints={rows.source: rows.fingerprint for _, rows in parts},
        missing=[subset for subset in order if subset not in found],
        revision=revision,
    )


def _parts(suite: Suite, source: str | None, revision: str | None) -> list[tuple[str | None, Rows]]:
    """The sources of a suite, each with its subset, or None where a column names it."""
    if source is None:
        subsets: tuple[str | None, ...] = suite.subsets if "{subset}" in suite.hub else (None,)
        try:
            return [
                (subset, load_rows(suite.hub.format(subset=subset), split=suite.split, revision=revision))
                for subset in subsets
            ]
        except DataError as error:
            raise DataError(
                f"{suite.name}: {error} Without a connection give a local file, --data {suite.name}=FILE.jsonl (or "
                f".parquet), with the columns {suite.columns}."
            ) from error
    path = Path(source).expanduser()
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"{suite.name}: found no file {source}; expected one with the columns {suite.columns}")
        return [(None, load_rows(path))]
    files = sorted(file for file in path.iterdir() if file.suffix in ROW_FILES)
    if "{subset}" not in suite.hub:
        raise DataError(f"{suite.name}: {source} is a folder; give one file with the columns {suite.columns}")
    for file in files:
        if file.stem not in suite.subsets:
            raise DataError(
                f"{file} is no subtask of {suite.name}{nearest(file.stem, suite.subsets)}; name files by subtask"
            )
    if not files:
        raise DataError(f"{suite.name}: the folder {source} holds no file such as {suite.subsets[0]}.jsonl")
    return [(file.stem, load_rows(file)) for file in files]


def _checked(suite: Suite, row: Mapping[str, Any], where: str, subset: str | None) -> tuple[str, str, dict[str, Any]]:
    """Subset, id ("" where rows have none) and the columns that the harness needs."""
    if subset is None and suite.subset_column is not None:
        subset = _text(row, suite.subset_column, where, suite)
        if subset not in suite.subsets:
            raise DataError(
                f"{where}: found {suite.subset_column} {subset!r}, expected one of {', '.join(suite.subsets)}"
                f"{nearest(subset, suite.subsets)}"
            )
    return subset or "", *CHECKS[suite.name](row, where, suite, subset or "")


def _mmlu_pro(row: Mapping[str, Any], where: str, suite: Suite, subset: str) -> tuple[str, dict[str, Any]]:
    options = _texts(row.get("options"), "options", where)
    if len(options) > 10:
        raise DataError(f"{where}: options has {len(options)} entries, expected at most 10 (A to J)")
    answer = _text(row, "answer", where, suite)
    letters = "ABCDEFGHIJ"[: len(options)]
    if answer not in list(letters):
        raise DataError(
            f"{where}: found answer {answer!r}, expected one of {', '.join(letters)} for {len(options)} options"
        )
    index = row.get("answer_index")
    if index is not None and index != letters.index(answer):
        raise DataError(f"{where}: answer {answer!r} and answer_index {index!r} name different options")
    question = _text(row, "question", where, suite)
    return _identifier(row, "question_id", where, suite), {"question": question, "options": options, "answer": answer}


def _bbh(row: Mapping[str, Any], where: str, suite: Suite, subset: str) -> tuple[str, dict[str, Any]]:
    columns = {name: _text(row, name, where, suite) for name in ("input", "target")}
    if subset == "word_sorting" and "List:" not in columns["input"]:
        raise DataError(f"{where}: input has no 'List:', after which word_sorting names the words to sort")
    return "", columns


def _openbookqa(row: Mapping[str, Any], where: str, suite: Suite, subset: str) -> tuple[str, dict[str, Any]]:
    choices = row.get("choices")
    if not isinstance(choices, Mapping):
        raise DataError(
            f"{where}: found choices {type(choices).__name__}, expected an object of the lists text and label"
        )
    texts, labels = (_texts(choices.get(name), f"choices.{name}", where) for name in ("text", "label"))
    if len(texts) != len(labels):
        raise DataError(f"{where}: choices has {len(texts)} texts and {len(labels)} labels")
    answer = _text(row, "answerKey", where, suite).strip()
    if answer not in labels:
        raise DataError(f"{where}: found answerKey {answer!r}, expected one of {', '.join(labels)}")
    columns = {"question_stem": _text(row, "question_stem", where, suite), "answerKey": answer}
    return _identifier(row, "id", where, suite), {**columns, "choices": {"text": texts, "label": labels}}


Check = Callable[[Mapping[str, Any], str, Suite, str], tuple[str, dict[str, Any]]]
CHECKS: dict[str, Check] = {"mmlu_pro": _mmlu_pro, "bbh": _bbh, "bbh_zeroshot": _bbh, "openbookqa": _openbookqa}


def _text(row: Mapping[str, Any], name: str, where: str, suite: Suite) -> str:
    value = row.get(name)
    if name not in row:
        raise DataError(
            f"{where}: the column {name} is absent{nearest(name, map(str, row))}; {suite.name} needs {suite.columns}"
        )
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: found {name} {value!r}, expected a text that is not empty")
    return value


def _texts(value: Any, name: str, where: str) -> list[str]:
    if not isinstance(value, list | tuple) or len(value) < 2 or not all(isinstance(text, str) for text in value):
        raise DataError(f"{where}: found {name} {value!r}, expected a list of at least two texts")
    return list(value)


def _identifier(row: Mapping[str, Any], name: str, where: str, suite: Suite) -> str:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise DataError(
            f"{where}: found {name} {value!r}, expected a number or text; {suite.name} needs {suite.columns}"
        )
    return str(value)
