"""Probe questions: from a file of prompts and answers, of prompts alone, or from training rows that were set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loragate.data import Rows, encode_rows, load_rows
from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.judging import MATH, TEXT
from loragate.evaluation.tasks import Question, Task, load_questions, load_task
from loragate.evaluation.tasks.task import EXTRACTORS_OF, Dataset, Generation
from loragate.training.rollouts import training_prompts

PROMPTS = ("prompt", "question", "problem", "instruction")
ANSWERS = ("answer", "gold", "target")
GRADERS = (*MATH, *TEXT)
HELD_OUT = 64


def probe_task(grader: str = "default", file: str = "", *, labelled: bool = True) -> Task:
    """A task for a plain file of prompts and answers; the prompt column is the user's turn, as it stands.

    Raises:
        ConfigError: for a grader that needs more than an answer.
    """
    if grader not in GRADERS:
        raise ConfigError(f"--probe-grader {grader}: expected one of {', '.join(GRADERS)}{nearest(grader, GRADERS)}")
    return Task(
        name="probe",
        version=1,
        suite="math",
        dataset=Dataset(file=file or None),
        columns={"question": PROMPTS, "gold": ANSWERS if labelled else PROMPTS},
        prompt="{{ question }}",
        generation=Generation(samples=4),
        extractor=EXTRACTORS_OF[grader][0],
        grader=grader,
        metric="avg@k",
    )


def read_probe(
    file: str, task_name: str = "", grader: str = "default", limit: int | None = None
) -> tuple[Task, list[Question], bool]:
    """The questions of a probe file.

    Args:
        file: .jsonl, .json or .parquet with a prompt and, where there are labels, an answer column.
        task_name: a task whose prompt, columns and grader are used, by name or file; the file has its schema then.
        grader: how answers are judged where no task is named.
        limit: first questions only.

    Returns:
        (task, questions, whether they are labelled).

    Raises:
        DataError: if some rows have an answer and others have not, or a row cannot be used.
    """
    if task_name:
        task = load_task(task_name)
        return task, load_questions(task, file, limit).questions, True
    rows = load_rows(file)
    with_answer = [any(row.get(name) is not None for name in ANSWERS) for row in rows]
    if any(with_answer) and not all(with_answer):
        missing = with_answer.index(False)
        raise DataError(
            f"{rows.where(missing)}: no answer, though other rows have one; give all of them an answer, or none"
        )
    task = probe_task(grader, labelled=all(with_answer))
    return task, load_questions(task, Path(file), limit).questions, all(with_answer)


def held_out_prompts(
    rows: Rows, tokenizer: Any, *, max_length: int, max_new_tokens: int, positions: int | None, system: str
) -> tuple[list[Question], list[str]]:
    """Questions without answers from rows that calibration does not use, and their rendered prompts.

    Raises:
        DataError: if no row can be used.
    """
    encoded = encode_rows(rows, tokenizer, max_length=max_length, system=system)
    prompts = training_prompts(encoded, rows, tokenizer, max_new_tokens, positions)
    questions = [Question(str(item.row), item.text, "", {}, rows.where(item.row)) for item in prompts]
    return questions, [item.text for item in prompts]


def set_aside(rows: Rows, count: int = HELD_OUT) -> tuple[Rows, Rows]:
    """(rows to calibrate on, rows set aside): the last `count`, but never more than a tenth."""
    kept = len(rows) - min(count, len(rows) // 10)
    return rows.take(max(kept, 1)), rows[max(kept, 1) :]


def prompts_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The user's words in training rows of any format, for the comparison with a probe."""
    texts = []
    for row in rows:
        for name in ("messages", "conversations"):
            for turn in row.get(name) or ():
                if turn.get("role", turn.get("from")) in ("user", "human"):
                    texts.append(str(turn.get("content", turn.get("value", ""))))
        for name in PROMPTS:
            value = row.get(name)
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, list):
                texts += [str(turn.get("content", "")) for turn in value if isinstance(turn, dict)]
    return texts
