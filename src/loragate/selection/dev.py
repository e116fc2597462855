"""Dev and retention sets: questions that choose a variant, and questions of an ability to keep. Both are tasks like any other.

Neither may share a question with the training examples, nor with those that a result is reported on (`overlap`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from loragate.data import EncodedRows, Rows, load_rows
from loragate.data.encoding import IGNORED
from loragate.data.formats import CHOICES, CONTEXT, MEDIA, SYSTEM, refuse_left_out, with_system
from loragate.data.rows import RowsGiven, is_saved
from loragate.display import pluralize
from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.grader_checks import check_references
from loragate.evaluation.judging import REFERENCE_GRADERS as ANSWER_GRADERS
from loragate.evaluation.judging import require_graders
from loragate.evaluation.prepared import PreparedTask, prepare
from loragate.evaluation.settings import GradingSettings, TaskSettings
from loragate.evaluation.tasks import Question, Questions, Task, load_questions, load_task
from loragate.evaluation.tasks.task import Dataset, Generation, Grader, found_columns
from loragate.printable import escape_controls
from loragate.selection.overlap import (
    ANSWERS,
    PROMPTS,
    ExcludedPrompts,
    find_overlap,
    normalize_question,
    prompts_with_location,
)
from loragate.selection.settings import DevSettings

GRADERS = (*ANSWER_GRADERS, "tiny")
ASKED = (*CONTEXT, *CHOICES, "history", "tools", *MEDIA)
"""Columns that are part of a question, which is the prompt column alone."""
TINY_COLUMNS = ("prompt", "kind", "operations")  # that the grader of the tiny world reads
PLACEHOLDERS = frozenset(
    ("?", "??", "???", "-", "--", "–", "—", ".", "...", "…", "n/a", "na", "nan", "nil", "none", "null", "tbd", "todo")
)
"""Right answers, in small letters, that people and programs write where none is known; "none" may also be one."""
MIN_QUESTIONS, ADVISED = 32, 128
SHARED, SAME = 20, 3  # shared questions in a message, and places of each
RETENTION_TOKENS = 512  # of an answer to a plain file of retention questions
MEASURED = 2_000  # training examples whose answers are measured


@dataclass(frozen=True)
class DevSet:
    """Questions with answers, read and checked, before a model is there.

    Attributes:
        task: how they are asked and judged.
        questions: all different, and none of them among the training examples.
        settings: of samples and verdicts.
        dropped: {what they are also among: number of questions that were left out for it}.
    """

    task: Task
    questions: Questions
    settings: DevSettings
    dropped: dict[str, int] = field(default_factory=dict)

    def prepare_task(
        self, tokenizer: Any, positions: int | None, seed: int, *, system: str, answer_tokens: int, raw: bool = False
    ) -> PreparedTask:
        """The task for one model.

        Args:
            tokenizer: of the model.
            positions: of the model; None where it has no limit.
            seed: of sampling.
            system: "none" leaves out a template's own system message, "keep" keeps it.
            answer_tokens: that an answer may take where the settings leave it open.
            raw: the questions of a plain file are text to complete, as the training examples are.
        """
        task = replace(self.task, raw=True) if raw and not self.task.path.name else self.task
        if task.raw and task.system:
            raise DataError(
                f"{self.questions.source}: the questions have a system message ({task.system!r:.60}), and the training examples "
                "are plain text, which has none; remove the column, or train on rows with a system message"
            )
        limit = self.settings.dev_max_new_tokens or answer_tokens
        # every variant says its temperature; the task's own is never used
        how = TaskSettings(samples=self.settings.dev_samples, temperature="1", max_new_tokens=limit, seed=seed)
        return prepare(task, self.questions, tokenizer, how, positions, system)


def read_dev(
    given: RowsGiven,
    settings: DevSettings,
    name: str = "dev",
    taken: Sequence[ExcludedPrompts] = (),
) -> DevSet:
    """Questions of a file or of rows in memory, checked as far as they can be without a model.

    A question that repeats another is left out, as intervals count each as one.

    Args:
        given: a file of `load_rows` with a prompt and an answer column, or such rows; or with the columns of the settings' task.
        name: "dev" or "retention", which has a task of its own in the settings.
        taken: questions must not be among these, or are left out with the settings' `drop_overlap`.

    Raises:
        ConfigError: for a grader that cannot be used, or questions without answers.
        DataError: for a file that is not there, a row that cannot be used, a question that is also among those taken, or fewer
            than 32 different questions.
    """
    if isinstance(given, str | Path) and not (path := Path(given).expanduser()).is_file() and not is_saved(path):
        beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"found no file {given}{nearest(path.name, beside)} (a {name} set is a local .jsonl, .json, .csv or .parquet file)"
        )
    rows, own = load_rows(given), settings.dev_task if name == "dev" else settings.retention_task
    source, warnings = rows.source, list[str]()
    if own:
        task = load_task(own)
    else:
        _require_answers(rows, source, name)
        task = plain_task(name, settings.dev_grader, settings.dev_pattern)
        task = replace(task, system=_system_message(rows, name))
        if unused := _unused_columns(rows, settings.dev_grader):
            warnings.append(f"columns that are not used: {escape_controls(', '.join(unused))}")
    require_graders([task], GradingSettings(sandbox=settings.sandbox))
    # a data set's full size says nothing about these questions
    found = load_questions(replace(task, dataset=replace(task.dataset, rows=None)), rows)
    known, dropped, remaining = len(found.questions), dict[str, int](), list(found.questions)
    for prompts, what in taken:
        if shared := find_overlap(remaining, prompts):
            if not settings.drop_overlap:
                raise DataError(_overlap(shared, what, name, known))
            dropped[what] = len(shared)
            remaining = [question for question in remaining if question.place not in shared]
    questions = _deduplicate(remaining)
    if repeated := len(remaining) - len(questions):
        dropped[f"the {name} questions before them"] = repeated
    if len(questions) < MIN_QUESTIONS:
        less = "".join(f"; left out: {count} also among {what}" for what, count in dropped.items())
        raise DataError(
            f"the {name} set {source} has {pluralize(len(questions), 'different question')}; fewer "
            f"than {MIN_QUESTIONS} cannot tell variants apart, so nothing would be chosen on them{less}"
        )
    for question in questions if task.grader == "tiny" else ():
        if missing := [column for column in TINY_COLUMNS if column not in question.row]:
            raise DataError(
                f"{question.place}: the grader tiny reads the column {missing[0]!r}, which this row has not"
            )
    warnings += _warn_of_placeholders(questions, source, name)
    warnings += check_references(task, questions, task.grader, GradingSettings(sandbox=settings.sandbox))
    found = replace(found, questions=questions, source=source, warnings=(*found.warnings, *warnings))
    return DevSet(task, found, settings, dropped)


def plain_task(name: str, grader: str, pattern: str = "") -> Task:
    """The task of a plain file of prompts and answers; the prompt column is the user's turn, as it stands.

    A grader that needs more than an answer is a ConfigError.
    """
    if grader not in GRADERS:
        raise ConfigError(f"--dev-grader {grader}: expected one of {', '.join(GRADERS)}{nearest(grader, GRADERS)}")
    return Task(
        name=name,
        version=1,
        suite="math",
        # the rows are given; a file and a schema, so that what is written down is a task file again
        dataset=Dataset(
            file=f"{name}.jsonl",
            schema={**dict.fromkeys(PROMPTS, "text?"), **dict.fromkeys(ANSWERS, "text|number?")},
        ),
        columns={"question": PROMPTS, "gold": ANSWERS},
        prompt="{{ question }}",
        generation=Generation(samples=4),
        grader=cast(Grader, grader),
        pattern=pattern,
    )


def estimate_max_new_tokens(encoded: EncodedRows) -> int:
    """Tokens that an answer may take: half more than all but a hundredth of the training answers, in steps of 16."""
    lengths = [
        sum(label != IGNORED for label in encoded[index]["labels"]) for index in range(min(len(encoded), MEASURED))
    ]
    return 16 * math.ceil((1.5 * float(np.quantile(lengths, 0.99)) + 16) / 16)


def collect_excluded_prompts(rows: Rows, settings: DevSettings) -> list[ExcludedPrompts]:
    """What no question may be among: the training examples, and what `exclude` names (DataError if that has no prompts)."""
    taken: list[ExcludedPrompts] = [(prompts_with_location(rows), "the training examples")]
    if settings.exclude:
        what = f"the questions of {settings.exclude}"
        if not (texts := prompts_with_location(load_rows(settings.exclude))):
            raise DataError(
                f"no prompts were found in {settings.exclude}, so nothing shows that the dev set is new to them; expected "
                f"messages, or one of the columns {', '.join(PROMPTS)}"
            )
        taken.append((texts, what))
    return taken


def _require_answers(rows: Rows, source: str, name: str) -> None:
    """Refuse rows of a plain file that are no questions with answers."""
    for index, row in enumerate(rows):
        where = rows.where(index)
        if row.get("messages") or row.get("conversations"):
            raise DataError(
                f'{where}: a conversation is no {name} question; write each as {{"prompt": question, "answer": answer}}, with '
                "the final answer alone"
            )
        used = next((column for column in PROMPTS if row.get(column) is not None), "")
        try:
            refuse_left_out(row, ASKED if used else (), used, str(row.get(used)))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    missing = [index for index, row in enumerate(rows) if all(row.get(column) is None for column in ANSWERS)]
    if missing and len(missing) == len(rows):
        raise ConfigError(
            f"{source} has no answers (columns {', '.join(ANSWERS)}), so no variant can be shown to be better than another: use "
            f"the adapter as it is, decoded greedily, or give questions with answers. {found_columns(rows[0])}; where they hold "
            "the answers, rename them, or name them in a task file for --dev-task"
        )
    if missing:
        raise DataError(f"{rows.where(missing[0])}: no answer, though other questions have one; give all of them one")


def _system_message(rows: Rows, name: str) -> str | None:
    """The system message of the rows of a plain file; a DataError where they have different ones."""
    first: str | None = None
    for index, row in enumerate(rows):
        try:
            messages = with_system(row, ())
        except DataError as error:
            raise DataError(f"{rows.where(index)}: {error}") from None
        found = messages[0]["content"] if messages else None
        first = found if index == 0 else first
        if found != first:
            raise DataError(
                f"{rows.where(index)}: the system message is {found!r:.60}, in {rows.where(0)} {first!r:.60}; a {name} set has "
                "one for all questions, or none: write what differs into the question"
            )
    return first


def _unused_columns(rows: Rows, grader: str) -> list[str]:
    """Columns of a plain file that hold something and that nothing reads, in the order in which they are met."""
    found: dict[str, None] = {}
    for row in rows:
        read = {*SYSTEM, *ASKED, *(TINY_COLUMNS if grader == "tiny" else ())}
        for candidates in (PROMPTS, ANSWERS):
            read |= {*[column for column in candidates if row.get(column) is not None][:1]}
        found |= {
            str(column): None for column, value in row.items() if column not in read and value not in (None, "", [], {})
        }
    return list(found)


def _deduplicate(questions: Sequence[Question]) -> list[Question]:
    """The first of every question; a DataError if one that repeats it has another answer.

    What is alike but for case and signs, with another answer, is another question: "2⁵" and "25", "US" and "us".
    """
    first: dict[tuple[str, str], Question] = {}
    asked: dict[str, Question] = {}
    for question in questions:
        first.setdefault((normalize_question(question.prompt), question.gold), question)
        before = asked.setdefault(question.prompt, question)
        if before.gold != question.gold:
            raise DataError(
                f"{question.place}: the question of {before.place} again, with another answer ({question.gold!r:.60}, there "
                f"{before.gold!r:.60}); remove the one that is wrong"
            )
    return list(first.values())


def _warn_of_placeholders(questions: Sequence[Question], source: str, name: str) -> list[str]:
    """A warning for right answers that only say that there is none; a DataError where all do."""
    empty = [question for question in questions if question.gold.strip().casefold() in PLACEHOLDERS]
    if not empty:
        return []
    golds = ", ".join(repr(gold) for gold in list(dict.fromkeys(question.gold for question in empty))[:SAME])
    lines = ", ".join(question.place for question in empty[:SAME]) + (", …" if len(empty) > SAME else "")
    if len(empty) == len(questions):
        raise DataError(
            f"{lines}: all answers of the {name} set {source} are placeholders ({golds}); write the right ones"
        )
    return [
        f"{len(empty)} of {pluralize(len(questions), 'right answer')} look like placeholders ({golds}): {lines}; unless that is "
        "what should be answered, write the right answer there, or remove these questions"
    ]


def _overlap(shared: Mapping[str, Sequence[str]], what: str, name: str, count: int) -> str:
    """Which questions are also among others, line by line."""
    lines = [f"{place} = {', '.join(there[:SAME])}" for place, there in list(shared.items())[:SHARED]]
    if len(shared) > SHARED:
        lines.append(f"and {len(shared) - SHARED} more")
    return "\n".join(
        [
            f"{next(iter(shared))}: {len(shared)} of {pluralize(count, f'{name} question')} are also among {what}; a choice "
            "made on questions that were trained on, or that the result is reported on, means nothing. Take other questions, "
            f"or leave these out of the {name} set with --drop-overlap (drop_overlap=True):",
            *lines,
        ]
    )
