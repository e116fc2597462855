"""Rows to questions (from the hub at a pinned revision, a local file of the same schema, or a generator) and to prompts.

Every row is checked before anything is sampled; of the suites of lm-evaluation-harness also what one column implies
about another. The error for a set that cannot be reached names the local file that would do instead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loragate.data import Chat, Rows, load_rows, raw_text
from loragate.data.rows import FILE_SUFFIXES, SAVED_SPLITS, is_saved
from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.answers import LETTERS
from loragate.evaluation.tasks import arithmetic
from loragate.evaluation.tasks.published import convert_to_hub_row
from loragate.evaluation.tasks.task import (
    DEFINITIONS,
    Dataset,
    Task,
    check_row,
    describe_schema,
    format_value,
    found_columns,
    is_template,
    render,
    variables,
)
from loragate.validate import NonNegativeFloat
from loragate.world.problems import draw_problems, draw_retention_items

COMMIT = re.compile(r"[0-9a-f]{40}")

GENERATORS: dict[str, Callable[[int, int], list[dict[str, Any]]]] = {
    "arithmetic": arithmetic.rows,
    # four steps of the tiny world's arithmetic; reversing, sorting and facts
    "tiny": lambda count, seed: [dataclasses.asdict(one) for one in draw_problems("test", count, (4, 4), seed)],
    "tiny_retention": lambda count, seed: [
        dataclasses.asdict(one) for one in draw_retention_items("test", count, seed)
    ],
}
"""Rows from (count, seed), by name."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: the data set's own id where it has one, else the position from 0; unique in the set.
        prompt: the user's turn, or the whole text where the task is raw; empty where the harness writes it.
        gold: the reference answer; for code, the reference solution.
        row: the row as it was read; code graders take the tests from here.
        place: file and line, for messages.
        subset: its part of a suite that has parts.
        options: continuations whose likelihoods are compared, where the harness asks so.
        tolerance: absolute error that the data set allows in an answer, where it states one.
    """

    id: str
    prompt: str
    gold: str
    row: dict[str, Any]
    place: str = field(default="", metadata={"key": False})
    subset: str = ""
    options: tuple[str, ...] = ()
    tolerance: NonNegativeFloat | None = None


@dataclass(frozen=True)
class Questions:
    """The questions of one task.

    Attributes:
        questions: in the order of the data set.
        source: file, hub id with split, or generator with seed.
        revision: commit of the hub data set, where its task names one.
        fingerprint: SHA-256 over the rows' content; equal for equal rows in any file format.
        warnings: what a reader of the score should know.
    """

    questions: list[Question]
    source: str
    revision: str | None
    fingerprint: str
    warnings: tuple[str, ...] = ()


def load_questions(
    task: Task,
    file: str | Path | Rows | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Questions:
    """The questions of a task.

    Args:
        task: as `load_task` gives it.
        file: a .jsonl, .json, .csv or .parquet file with the data set's columns, or a folder that holds `<task>.jsonl` (or
            .json, .csv, .parquet), in place of the hub or generator; or its rows. For a suite of the harness whose subsets lie
            apart also a folder, or `<task>/` in it, with a file for each.
        limit: the first questions only, in the data set's order; of a suite with subsets those of each subset.
        seed: of a generated set; fixed sets do not depend on it.

    Raises:
        DataError: naming file and line for a row that does not fit, or the local file that would do where the hub cannot
            be reached.
    """
    dataset, warnings = task.dataset, []
    local = file if isinstance(file, Rows) else _local_file(task, file)
    subsets = task.harness.subsets if task.harness is not None else ()
    commit = None
    if local is None and dataset.hub is not None:
        commit = dataset.revision if COMMIT.fullmatch(dataset.revision or "") else None
        if commit is None:
            warnings.append(
                f"{task.name}: {dataset.hub} is read at no fixed commit; dataset.revision in the task file makes this repeatable"
            )
    # the first questions of each subset are known only when all rows are
    parts, source = _parts(task, dataset, local, None if subsets else limit, seed)
    count = sum(len(rows) for _, rows in parts)
    if limit is None and dataset.rows is not None and count != dataset.rows:
        warnings.append(
            f"{source} holds {count} rows, the set that {task.name} means has {dataset.rows}: scores on it are not "
            "comparable with published ones"
        )
    found: dict[str, list[Question]] = {subset: [] for subset in subsets or ("",)}
    column = task.harness.subset_column if task.harness is not None else None
    # a task of one's own may have the name of a suite
    check = ROW_CHECKS.get(task.name) if task.harness is not None else None
    for part, rows in parts:
        for index in range(len(rows)):
            where, row = rows.where(index), dict(rows[index])
            if task.path.parent == DEFINITIONS:
                row = convert_to_hub_row(task.name, row, where)
            check_row(row, dataset.schema, where, task.name)
            subset = part or (_one_of(row.get(column), subsets, column, where) if column else "")
            if check is not None:
                check(row, where, subset)
            members = found[subset]
            name = f"{subset}/{len(members)}" if subsets else str(len(members))
            members.append(dataclasses.replace(_question(task, row, where, name), subset=subset))
    if empty := [subset for subset, members in found.items() if not members and subset]:
        some = f"{', '.join(empty[:4])}{', …' if len(empty) > 4 else ''}"
        warnings.append(
            f"{task.name}: {len(empty)} of {len(subsets)} subsets have no question in {source} ({some}); the score is not that "
            "of the whole suite."
        )
    questions = [question for members in found.values() for question in members[:limit]]
    _refuse_repeated_ids(questions)
    fingerprint = parts[0][1].fingerprint
    if len(parts) > 1:
        fingerprint = hashlib.sha256("".join(rows.fingerprint for _, rows in parts).encode()).hexdigest()
    return Questions(questions, source, commit, fingerprint, tuple(warnings))


def _parts(
    task: Task, dataset: Dataset, local: Path | Rows | None, limit: int | None, seed: int
) -> tuple[list[tuple[str | None, Rows]], str]:
    """The rows of a task and what they are called; in parts with the subset of each, or None where a column names it."""
    subsets: tuple[str, ...] = task.harness.subsets if task.harness is not None else ()
    if isinstance(local, Path) and local.is_dir() and not is_saved(local):
        files = {path: stem for path in sorted(local.iterdir()) if (stem := _stem(path)) is not None}
        first: dict[str, Path] = {}
        for path, stem in files.items():
            if stem not in subsets:
                raise DataError(f"{path} is no subset of {task.name}{nearest(stem, subsets)}; name files by subset")
            if stem in first:  # each of its questions would count twice
                raise DataError(
                    f"{first[stem]} and {path} both hold the subset {stem} of {task.name}; keep one of them"
                )
            first[stem] = path
        if not files:
            raise DataError(f"{task.name}: the folder {local} holds no file; {_local_help(task)}")
        return [(stem, load_rows(path)) for path, stem in files.items()], str(local)
    if local is not None:
        splits = isinstance(local, Path) and (local / SAVED_SPLITS).is_file()
        rows = load_rows(local, limit=limit, split=dataset.split if splits else None)
        return [(None, rows)], rows.source
    if dataset.generator is not None:
        source = f"generated: {dataset.generator}, seed {seed}"
        rows = Rows(GENERATORS[dataset.generator](dataset.rows or 1, seed), source=source, place=f"{source}, row ")
        return [(None, rows if limit is None else rows.take(limit))], source
    name = f"{dataset.hub}:{dataset.config}" if dataset.config else str(dataset.hub)
    split = dataset.split or "train"
    parts: list[tuple[str | None, Rows]] = []
    for subset in subsets if "{subset}" in name else (None,):
        part = name.replace("{subset}", subset or "")
        try:
            parts.append((subset, load_rows(part, split=split, limit=limit, revision=dataset.revision)))
        except DataError as error:
            raise DataError(
                f"{task.name}: {part}[{split}] at {dataset.revision or 'main'} could not be loaded. A local copy does as "
                f"well: {_local_help(task)}. The set lives at https://huggingface.co/datasets/{dataset.hub}. ({error})"
            ) from error
    return parts, f"{name}[{split}]"


def _stem(path: Path) -> str | None:
    """The name of a file of rows without its suffix, which may be a double one (`path.stem` keeps the first); else None."""
    found = next((end for end in sorted(FILE_SUFFIXES, key=len, reverse=True) if path.name.endswith(end)), None)
    return None if found is None else path.name.removesuffix(found)


def _question(task: Task, row: dict[str, Any], where: str, name: str) -> Question:
    """The question of a checked row; `name` is its id where the row has none."""
    for column, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:  # all columns are stored with the answers
            raise DataError(
                f"{where}: column '{column}' holds half of a surrogate pair, which is not valid text; mend or remove the row"
            ) from None
    # an optional column that is absent reads as null, so that a template can ask for it
    values = {**dict.fromkeys(task.dataset.schema), **row}
    filled: dict[str, str | None] = {
        column: _fill(column, candidates, values, where) for column, candidates in task.columns.items()
    }
    gold, tolerance = filled.pop("gold"), _tolerance(filled.pop("tolerance", None), where)
    filled["id"] = filled.get("id") or name
    prompt = render(task.prompt, {**values, **filled}, f"{where}: the prompt of {task.name}")
    return Question(str(filled["id"]), prompt, str(gold), row, where, tolerance=tolerance)


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
        if is_saved(path):
            return path
        if task.harness is not None and task.harness.subsets:
            return path  # itself the folder of the subsets
        raise DataError(
            f"the folder {path} holds no {task.name}.jsonl (nor .json, .csv, .parquet); {_local_help(task)}"
        )
    if not path.is_file():
        raise DataError(f"found no file {path} for {task.name}; {_local_help(task)}")
    return path


def _local_help(task: Task) -> str:
    columns = describe_schema(task.dataset.schema) or f"of {task.path}"
    return (
        f"--data {task.name}=FILE takes a .jsonl, .json, .csv or .parquet file, or a folder that holds {task.name}.jsonl "
        f"or that `datasets` saved, with the columns {columns}"
    )


def _fill(name: str, candidates: tuple[str, ...], values: Mapping[str, Any], where: str) -> str | None:
    """The text of `name` from the first candidate whose columns the row has; id and tolerance may be None."""
    for candidate in candidates:
        if any(values.get(column) is None for column in variables(candidate, where)):
            continue
        value = render(candidate, values, f"{where}: '{name}'") if is_template(candidate) else values[candidate]
        if isinstance(value, float):  # 27.0 is how a column of floats writes 27, and 0.1 + 0.2 is 0.30000000000000004
            value = int(value) if value.is_integer() else f"{value:.15g}"
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(
                f"{where}: column '{candidate}' holds {format_value(value)}; '{name}' needs a text or a number"
            )
        # a gold of code or a question may need its line breaks; only emptiness is refused
        if not str(value).strip():
            if name == "tolerance":
                return None
            raise DataError(f"{where}: '{name}' is empty, taken from {candidate}")
        return str(value)
    if name in ("id", "tolerance"):
        return None
    raise DataError(f"{where}: nothing for '{name}'. {found_columns(values)}; expected one of {', '.join(candidates)}")


def _tolerance(stated: str | None, where: str) -> float | None:
    try:
        allowed = None if stated is None else float(stated)
    except ValueError:
        allowed = math.nan
    if allowed is not None and not (math.isfinite(allowed) and allowed >= 0):
        raise DataError(
            f"{where}: 'tolerance' is {format_value(stated)}; expected a number of at least 0, such as 1e-1"
        )
    return allowed


def _refuse_repeated_ids(questions: list[Question]) -> None:
    seen: dict[str, Question] = {}
    for question in questions:
        first = seen.setdefault(question.id, question)
        if first is not question:
            raise DataError(f"{question.place}: the id {format_value(question.id)} was used at {first.place} already")


def render_questions(task: Task, questions: Sequence[Question], tokenizer: Any, system: str = "none") -> list[str]:
    """The prompts of a task, ready to be tokenised without special tokens.

    Args:
        task: says whether the chat template is used, and with which system message.
        questions: their `prompt` is the user's turn, or the whole text where the task is raw.
        tokenizer: with the chat template of the model.
        system: "none" leaves out a system message that the template would slip in, "keep" leaves the template alone.

    Raises:
        ConfigError: where the tokenizer has no chat template and the task needs one; as `raw_text` for a raw task.
    """
    if task.raw or (task.harness is not None and tokenizer.chat_template is None):
        return [raw_text(question.prompt, tokenizer) for question in questions]
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


def _one_of(value: Any, known: Sequence[str], column: str, where: str) -> str:
    if value not in list(known):
        raise DataError(
            f"{where}: found {column} {value!r:.80}, expected one of {', '.join(known)}{nearest(str(value), known)}"
        )
    return str(value)


def _mmlu_pro(row: dict[str, Any], where: str, _: str) -> None:
    options, index = row["options"], row.get("answer_index")
    letters = LETTERS[: len(options)]
    if not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"{where}: options has {len(options)} entries, expected 2 to 10 (A to J)")
    answer = _one_of(row["answer"], letters, "answer", where)
    if index is not None and index != letters.index(answer):
        raise DataError(f"{where}: answer {answer!r} and answer_index {index} name different options")


def _bbh(row: dict[str, Any], where: str, subset: str) -> None:
    # after which the harness's filter looks for the words to sort
    if subset == "word_sorting" and "List:" not in row["input"]:
        raise DataError(f"{where}: input has no 'List:', after which word_sorting names the words to sort")


def _openbookqa(row: dict[str, Any], where: str, _: str) -> None:
    texts, labels = (row["choices"].get(name) for name in ("text", "label"))
    if not isinstance(texts, list) or not isinstance(labels, list) or not 2 <= len(texts) == len(labels):
        raise DataError(
            f"{where}: found choices {row['choices']!r:.80}, expected the lists text and label of one length"
        )
    row["answerKey"] = _one_of(row["answerKey"].strip(), labels, "answerKey", where)


ROW_CHECKS = {"mmlu_pro": _mmlu_pro, "bbh": _bbh, "bbh_zeroshot": _bbh, "openbookqa": _openbookqa}
"""What one column of a suite implies about another, checked by (row, place, subset); blanks around an answer's key go."""
