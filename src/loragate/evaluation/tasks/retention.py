"""The questions of the retention suites: rows that are sound before lm-evaluation-harness puts them to a model.

Rows come from the hub or from a local file, which for a suite whose subsets lie apart may be a folder with a file for each.
The types of the columns are the task's schema; here is what one column says about another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loragate.data import Rows, load_rows
from loragate.errors import DataError, nearest
from loragate.evaluation.tasks.schema import check_row, describe_schema
from loragate.evaluation.tasks.task import Harness, Question, Questions, Task

SUBSET = "loragate_subset"
"""The column of a question's row that names its subset; empty where the suite has none."""


def load_suite_questions(task: Task, file: Path | None, limit: int | None, commit: str | None) -> Questions:
    """The questions of a suite, subset by subset.

    Args:
        file: a local file or folder; None reads the hub.
        limit: the first questions of each subset only.
        commit: of the hub data set.

    Raises:
        DataError: for rows that cannot be read or used; the message names the file and line.
    """
    harness = task.harness
    assert harness is not None, f"{task.name} is no task of the harness"
    order = harness.subsets or ("",)
    found: dict[str, list[Question]] = {subset: [] for subset in order}
    parts = _parts(task, harness, file, commit)
    for of_file, rows in parts:
        for index in range(len(rows)):
            where, row = rows.where(index), rows[index]
            check_row(row, task.dataset.schema, where, task.name)
            if empty := [
                name for name, kind in task.dataset.schema.items() if kind == "text" and not row[name].strip()
            ]:
                raise DataError(f"{where}: column '{empty[0]}' is empty")
            subset = of_file if of_file is not None else _subset(row, harness, where)
            key, gold, columns = COLUMNS[task.name](row, where, subset)
            members = found[subset]
            name = str(key) if key is not None else f"{subset}/{len(members)}"
            members.append(Question(name, "", gold, {**columns, SUBSET: subset}, where))
    missing = [subset for subset, members in found.items() if not members]
    source = str(file or task.dataset.hub)
    warnings = []
    if missing:
        some = f"{', '.join(missing[:4])}{', …' if len(missing) > 4 else ''}"
        warnings.append(
            f"{task.name}: {len(missing)} of {len(order)} subsets have no question in {source} ({some}); the score is not that "
            "of the whole suite."
        )
    digest = hashlib.sha256("".join(rows.fingerprint for _, rows in parts).encode()).hexdigest()
    questions = [question for members in found.values() for question in members[:limit]]
    return Questions(questions, source, commit, digest, tuple(warnings))


def _parts(task: Task, harness: Harness, file: Path | None, commit: str | None) -> Sequence[tuple[str | None, Rows]]:
    """The sources of a suite, each with its subset, or None where a column names it."""
    dataset = task.dataset
    columns = f"the columns {describe_schema(dataset.schema)}"
    if file is None:
        subsets: Sequence[str | None] = harness.subsets if "{subset}" in str(dataset.config) else (None,)
        try:
            names = [(subset, f"{dataset.hub}:{dataset.config}".format(subset=subset)) for subset in subsets]
            return [(subset, load_rows(name, split=dataset.split, revision=commit)) for subset, name in names]
        except DataError as error:
            raise DataError(
                f"{task.name}: {error} Without a connection give a local file, --data {task.name}=FILE.jsonl (or .parquet), with "
                f"{columns}"
            ) from error
    if not file.is_dir():
        return [(None, load_rows(file))]
    files = [path for path in sorted(file.iterdir()) if path.suffix in (".jsonl", ".json", ".parquet")]
    for path in files:
        if path.stem not in harness.subsets:
            raise DataError(
                f"{path} is no subset of {task.name}{nearest(path.stem, harness.subsets)}; name files by subset"
            )
    if not files:
        raise DataError(f"{task.name}: the folder {file} holds no file; expected one with {columns}")
    return [(path.stem, load_rows(path)) for path in files]


def _subset(row: dict[str, Any], harness: Harness, where: str) -> str:
    if harness.subset_column is None:
        return ""
    subset = row.get(harness.subset_column)
    if subset not in harness.subsets:
        raise DataError(
            f"{where}: found {harness.subset_column} {subset!r}, expected one of {', '.join(harness.subsets)}"
            f"{nearest(str(subset), harness.subsets)}"
        )
    return str(subset)


def _mmlu_pro(row: dict[str, Any], where: str, _: str) -> Checked:
    options, answer, index = row["options"], row["answer"], row.get("answer_index")
    letters = "ABCDEFGHIJ"[: len(options)]
    if not 2 <= len(options) <= 10:
        raise DataError(f"{where}: options has {len(options)} entries, expected 2 to 10 (A to J)")
    if answer not in list(letters):
        raise DataError(f"{where}: found answer {answer!r}, expected one of {', '.join(letters)}")
    if index is not None and index != letters.index(answer):
        raise DataError(f"{where}: answer {answer!r} and answer_index {index} name different options")
    return row["question_id"], answer, {name: row[name] for name in ("question", "options", "answer")}


def _bbh(row: dict[str, Any], where: str, subset: str) -> Checked:
    # after which the harness's filter looks for the words to sort
    if subset == "word_sorting" and "List:" not in row["input"]:
        raise DataError(f"{where}: input has no 'List:', after which word_sorting names the words to sort")
    return None, row["target"], {name: row[name] for name in ("input", "target")}


def _openbookqa(row: dict[str, Any], where: str, _: str) -> Checked:
    texts, labels = (row["choices"].get(name) for name in ("text", "label"))
    if not isinstance(texts, list) or not isinstance(labels, list) or not 2 <= len(texts) == len(labels):
        raise DataError(
            f"{where}: found choices {row['choices']!r:.80}, expected the lists text and label of one length"
        )
    answer = row["answerKey"].strip()
    if answer not in labels:
        raise DataError(f"{where}: found answerKey {answer!r}, expected one of {', '.join(labels)}")
    columns = {"question_stem": row["question_stem"], "answerKey": answer}
    return row["id"], answer, {**columns, "choices": {"text": texts, "label": labels}}


Checked = tuple[int | str | None, str, dict[str, Any]]
"""A row's id, its gold and the columns that the harness needs."""
COLUMNS: dict[str, Callable[[dict[str, Any], str, str], Checked]] = {
    "mmlu_pro": _mmlu_pro,
    "bbh": _bbh,
    "bbh_zeroshot": _bbh,
    "openbookqa": _openbookqa,
}
