"""Rows to questions (from the hub at a pinned revision, a local file of the same schema, or a generator) and to prompts.

Every row is checked before anything is sampled. A set that cannot be reached says which local file would do instead, so
that machines without a connection are first-class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loragate.data import Chat, prompt_ids
from loragate.data.loading import load_rows
from loragate.data.rows import Rows
from loragate.errors import ConfigError, DataError
from loragate.evaluation.tasks.generated import GENERATORS
from loragate.evaluation.tasks.retention import load_suite_questions
from loragate.evaluation.tasks.schema import check_row, describe_schema, found_columns, shown
from loragate.evaluation.tasks.task import Question, Questions, Task
from loragate.evaluation.tasks.templates import is_template, render, variables

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
COMMIT = re.compile(r"[0-9a-f]{40}")


def load_questions(
    task: Task,
    file: str | Path | Rows | None = None,
    limit: int | None = None,
    seed: int = 0,
    revision: str | None = None,
) -> Questions:
    """The questions of a task.

    Args:
        task: as `load_task` gives it.
        file: a .jsonl, .json or .parquet file with the data set's columns, or a folder that holds `<task>.jsonl` (or
            .json, .parquet), in place of the hub or generator; or its rows. For a suite of the harness whose subsets lie apart
            also a folder, or `<task>/` in it, with a file for each.
        limit: the first questions only, in the data set's order; of a suite of the harness those of each subset.
        seed: of a generated set; fixed sets do not depend on it.
        revision: of the hub data set, in place of the pinned one.

    Raises:
        DataError: naming file and line for a row that does not fit, or the local file that would do where the hub cannot
            be reached.
        ConfigError: for a revision without effect, or a limit below 1.
    """
    dataset = task.dataset
    local = file if isinstance(file, Rows) else _local_file(task, file)
    if revision is not None:
        if local is not None or dataset.hub is None:
            raise ConfigError(f"{task.name}: found revision={revision!r}, which has no effect without a hub data set")
        task = task.with_revision(revision)
        dataset = task.dataset
    if task.harness is not None:
        assert not isinstance(local, Rows)
        # where none is pinned, what the main branch is now is read and recorded, for all subsets the same
        commit = None if local else commit_of(str(dataset.hub), dataset.revision) or dataset.revision
        loaded = load_suite_questions(task, local, limit, commit)
        _refuse_repeated_ids(loaded.questions)
        return loaded
    warnings: list[str] = []
    commit = None
    if local is not None:
        rows = load_rows(local, limit=limit)
        source = rows.source
    elif dataset.generator is not None:
        source = f"generated: {dataset.generator}, seed {seed}"
        made = GENERATORS[dataset.generator](dataset.rows or 1, seed)
        rows = Rows(made, source=source, place=f"{source}, row ")
        rows = rows if limit is None else rows.take(limit)
    else:
        rows, source, commit = _from_hub(task, limit, warnings)
    if limit is None and dataset.rows is not None and len(rows) != dataset.rows:
        warnings.append(
            f"{source} holds {len(rows)} rows, the set that {task.name} means has {dataset.rows}: scores on it are not "
            "comparable with published ones"
        )
    questions = [_question(task, rows[index], rows.where(index), index) for index in range(len(rows))]
    _refuse_repeated_ids(questions)
    return Questions(questions, source, commit, rows.fingerprint, tuple(warnings))


def files_in(folder: Path, task: str) -> list[Path]:
    """The task's own files, then its folder of subsets, in a folder of data."""
    found = [folder / f"{task}{suffix}" for suffix in FILE_SUFFIXES]
    return [path for path in found if path.is_file()] + [path for path in (folder / task,) if path.is_dir()]


def _local_file(task: Task, file: str | Path | None) -> Path | None:
    """The file to read, or None where the set comes from the hub or a generator."""
    if file is None and task.dataset.file is None:
        return None
    path = Path(file).expanduser() if file is not None else task.path.parent / str(task.dataset.file)
    if path.is_dir():
        if inside := files_in(path, task.name):
            return inside[0]
        if task.harness is not None and task.harness.subsets:
            return path
        raise DataError(f"the folder {path} holds no {task.name}.jsonl (nor .json, .parquet); {_local_help(task)}")
    if not path.is_file():
        raise DataError(f"found no file {path} for {task.name}; {_local_help(task)}")
    return path


def _local_help(task: Task) -> str:
    schema = task.dataset.schema
    columns = [describe_schema(schema)] if describe_schema(schema) else []
    for name, candidates in task.columns.items():
        needed = [sorted(variables(text, name)) if is_template(text) else [text] for text in candidates]
        # what the schema requires anyway was named already, and an id may be absent
        if name != "id" and all(any(schema[column].endswith("?") for column in item) for item in needed):
            columns.append(f"{' or '.join(' and '.join(item) for item in needed)} (for the {name})")
    return (
        f"--data {task.name}=FILE takes a .jsonl, .json or .parquet file, or a folder that holds {task.name}.jsonl, "
        f"with the columns {', '.join(columns)}"
    )


def _from_hub(task: Task, limit: int | None, warnings: list[str]) -> tuple[Rows, str, str | None]:
    dataset = task.dataset
    name = f"{dataset.hub}:{dataset.config}" if dataset.config else str(dataset.hub)
    split = dataset.split or "train"
    try:
        rows = load_rows(name, split=split, limit=limit, revision=dataset.revision)
    except DataError as error:
        raise DataError(
            f"{task.name}: {name}[{split}] at {dataset.revision or 'main'} could not be loaded. A local copy does as "
            f"well: {_local_help(task)}. The set lives at https://huggingface.co/datasets/{dataset.hub}. ({error})"
        ) from error
    commit = commit_of(str(dataset.hub), dataset.revision)
    if commit is None:
        warnings.append(
            f"{task.name}: the commit of {dataset.hub} could not be told; pin one with --revision to make this repeatable"
        )
    return rows, f"{name}[{split}]", commit


def commit_of(hub: str, revision: str | None) -> str | None:
    """The commit that a revision means now; None where the hub does not answer."""
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(hub, revision=revision, timeout=10).sha
    except Exception:  # best effort: the questions are loaded already
        return None


def _question(task: Task, row: dict[str, Any], where: str, index: int) -> Question:
    schema = task.dataset.schema
    check_row(row, schema, where, task.name)
    _refuse_torn_text(row, where)
    # an optional column that is absent reads as null, so that a template can ask for it
    values = {**dict.fromkeys(schema), **row}
    filled: dict[str, str | None] = {
        name: _fill(name, candidates, values, where) for name, candidates in task.columns.items()
    }
    filled["id"] = filled.get("id") or str(index)
    gold = filled.pop("gold")
    prompt = render(task.prompt, {**values, **filled}, f"{where}: the prompt of {task.name}")
    return Question(str(filled["id"]), prompt, str(gold), row, where)


def _fill(name: str, candidates: tuple[str, ...], values: Mapping[str, Any], where: str) -> str | None:
    """The text of `name` from the first candidate whose columns the row has; an id may be None."""
    for candidate in candidates:
        needed = variables(candidate, where) if is_template(candidate) else {candidate}
        if any(values.get(column) is None for column in needed):
            continue
        value = values[candidate] if candidate in needed else render(candidate, values, f"{where}: '{name}'")
        text = _as_text(value)
        if text is None:
            raise DataError(f"{where}: column '{candidate}' holds {shown(value)}; '{name}' needs a text or a number")
        # a gold of code or a question may need its line breaks; only emptiness is refused
        if not text.strip():
            raise DataError(f"{where}: '{name}' is empty, taken from {candidate}")
        return text
    if name == "id":
        return None
    raise DataError(f"{where}: nothing for '{name}'. {found_columns(values)}; expected one of {', '.join(candidates)}")


def _as_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # 27.0 is how a column of floats writes 27
    return str(int(value)) if isinstance(value, int) or value.is_integer() else repr(value)


def _refuse_torn_text(row: dict[str, Any], where: str) -> None:
    """All columns are stored with the answers, and half of a surrogate pair can neither be stored nor tokenised."""
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{where}: column '{name}' holds half of a surrogate pair, which is not valid text; mend or remove the row"
            ) from None


def _refuse_repeated_ids(questions: list[Question]) -> None:
    seen: dict[str, Question] = {}
    for question in questions:
        first = seen.setdefault(question.id, question)
        if first is not question:
            raise DataError(f"{question.place}: the id {shown(question.id)} was used at {first.place} already")


def render_questions(task: Task, questions: Sequence[Question], tokenizer: Any, system: str = "none") -> list[str]:
    """The prompts of a task, ready to be tokenised without special tokens.

    Args:
        task: says whether the chat template is used, and with which system message.
        questions: their `prompt` is the user's turn, or the whole text where the task is raw.
        tokenizer: with the chat template of the model.
        system: "none" leaves out a system message that the template would slip in, "keep" leaves the template alone.

    Raises:
        ConfigError: where the tokenizer has no chat template and the task needs one.
    """
    if task.raw:
        begin = tokenizer.bos_token_id
        return [
            tokenizer.bos_token + question.prompt
            if begin is not None and begin in prompt_ids(question.prompt, tokenizer)[:1]
            else question.prompt
            for question in questions
        ]
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{task.name} asks through a chat template and the tokenizer has none; give one with --chat-template FILE (in "
            "Python: tokenizer.chat_template = TEXT)"
        )
    chat = Chat(tokenizer, system)
    head = [{"role": "system", "content": task.system}] if task.system else []
    return [
        chat.render([*head, {"role": "user", "content": question.prompt}], tools=None, generation_prompt=True)
        for question in questions
    ]
