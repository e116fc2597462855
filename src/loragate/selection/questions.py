"""Probe questions: from a file of prompts and answers, of prompts alone, or from training rows that were set aside."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from loragate.data import Rows, encode_rows, load_rows
from loragate.data.loading import RowsGiven
from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.judging import MATH, TEXT
from loragate.evaluation.tasks import Question, Task, load_questions, load_task
from loragate.evaluation.tasks.task import EXTRACTORS_OF, Dataset, Generation, Grader
from loragate.selection.disjoint import PROMPTS, key_of, prompts_of
from loragate.training.rollouts import training_prompts

ANSWERS = ("answer", "gold", "target")
GRADERS = (*MATH, *TEXT)
HELD_OUT = 64
PROBE_TOKENS = 512  # where no training rows say how long an answer is


@dataclass(frozen=True)
class Manner:
    """How questions are put to a model.

    Attributes:
        tokenizer: of the model.
        positions: of the model; None where it has no limit.
        seed: of the samples.
        system: "none" leaves out a template's own system message, "keep" keeps it.
        answer: tokens that an answer may take where the settings leave it open.
        raw: the questions of a plain file are plain text to complete, as the training rows are.
    """

    tokenizer: Any
    positions: int | None
    seed: int
    system: str = "none"
    answer: int = PROBE_TOKENS
    raw: bool = False


def probe_task(grader: str = "default", *, labelled: bool = True) -> Task:
    """A task for a plain file of prompts and answers; the prompt column is the user's turn, as it stands.

    Args:
        grader: how answers are judged.
        labelled: whether there are answers.

    Raises:
        ConfigError: for a grader that needs more than an answer.
    """
    if grader not in GRADERS:
        raise ConfigError(f"--probe-grader {grader}: expected one of {', '.join(GRADERS)}{nearest(grader, GRADERS)}")
    return Task(
        name="probe",
        version=1,
        suite="math",
        dataset=Dataset(),
        columns={"question": PROMPTS, "gold": ANSWERS if labelled else PROMPTS},
        prompt="{{ question }}",
        generation=Generation(samples=4),
        extractor=EXTRACTORS_OF[grader][0],
        grader=cast(Grader, grader),
        metric="avg@k",
    )


def read_probe(given: RowsGiven, task_name: str = "", grader: str = "default") -> tuple[Task, list[Question], bool]:
    """The questions of a probe.

    Args:
        given: .jsonl, .json or .parquet with a prompt and, where there are labels, an answer column; or such rows.
        task_name: a task whose prompt, columns and grader are used, by name or file; the rows have its schema then.
        grader: how answers are judged where no task is named.

    Returns:
        (task, questions, whether they are labelled).

    Raises:
        DataError: for a file that is not there, a row that cannot be used, or if some rows have an answer and others have not.
    """
    if isinstance(given, str | Path):
        path = Path(given).expanduser()
        if not path.is_file():
            beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
            raise DataError(
                f"found no file {given}{nearest(path.name, beside)} (a probe is a local .jsonl, .json or .parquet file)"
            )
    rows = load_rows(given)
    if task_name:
        task = load_task(task_name)
        return task, load_questions(task, rows).questions, True
    for index, row in enumerate(rows):
        if row.get("messages") or row.get("conversations"):
            raise DataError(
                f"{rows.where(index)}: a conversation is no probe question; write each as "
                '{"prompt": question, "answer": answer}, with the final answer alone'
            )
        used = next((name for name in PROMPTS if row.get(name) is not None), "")
        if used == "instruction" and row.get("input"):
            raise DataError(
                f"{rows.where(index)}: the column 'input' would be left out; write the whole question into one column 'prompt'"
            )
    with_answer = [any(row.get(name) is not None for name in ANSWERS) for row in rows]
    if any(with_answer) and not all(with_answer):
        missing = with_answer.index(False)
        raise DataError(
            f"{rows.where(missing)}: no answer, though other rows have one; give all of them an answer, or none"
        )
    task = probe_task(grader, labelled=all(with_answer))
    return task, load_questions(task, rows).questions, all(with_answer)


def held_out_prompts(rows: Rows, how: Manner, max_length: int) -> tuple[list[Question], list[str]]:
    """Questions without answers from rows that calibration does not use, and their rendered prompts.

    Raises:
        DataError: if no row can be used.
    """
    encoded = encode_rows(rows, how.tokenizer, max_length=max_length, system=how.system)
    prompts = training_prompts(encoded, rows, how.tokenizer, how.answer, how.positions)
    questions = [Question(str(item.row), item.text, "", dict(rows[item.row]), rows.where(item.row)) for item in prompts]
    return questions, [item.text for item in prompts]


def set_aside(rows: Rows, count: int = HELD_OUT) -> tuple[Rows, Rows]:
    """(rows to calibrate on, rows set aside): the last `count`, but never more than a tenth.

    Rows that repeat a prompt stay together: of those set aside one remains as a question, and the others are left out
    of the calibration, so that no question was trained on. Fewer than ten rows set nothing aside.
    """
    keys = [tuple(map(key_of, prompts_of([row]))) for row in rows]
    wanted = min(count, len(rows) // 10)
    aside: dict[tuple[str, ...], int] = {}
    taken = 0  # rows that calibration loses; a prompt with more rows than are left to take stays where it is
    rows_of: dict[tuple[str, ...], int] = {}
    for key in keys:
        rows_of[key] = rows_of.get(key, 0) + 1
    for index in range(len(rows) - 1, -1, -1):
        key = keys[index]
        if key and key not in aside and taken + rows_of[key] <= wanted:
            aside[key] = index
            taken += rows_of[key]
    kept = [index for index, key in enumerate(keys) if key not in aside]
    return _view_of(rows, kept), _view_of(rows, sorted(aside.values()))


def _view_of(rows: Rows, indices: list[int]) -> Rows:
    """These rows, which keep their places."""
    return rows._view([rows._order[index] for index in indices])
