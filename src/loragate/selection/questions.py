"""Probe questions: from a file of prompts and answers, of prompts alone, or from training rows that were set aside.

None may also be among the rows that were trained on, or that a result is reported on. Texts are compared without case, surplus
white space and closing punctuation; signs inside stay, because "2 + 3" and "2 - 3" are different questions. A long question
also counts as shared where it stands inside a longer prompt.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from loragate.data import Rows, encode_rows, load_rows
from loragate.data.formats import conversation
from loragate.data.loading import RowsGiven
from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.judging import MATH, TEXT, require_graders
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import Question, Task, load_questions, load_task
from loragate.evaluation.tasks.questions import render_questions
from loragate.evaluation.tasks.task import Dataset, Generation, Grader
from loragate.generation import SamplingConfig
from loragate.generation.requests import tokenize_prompts
from loragate.selection.guards import training_prompts
from loragate.selection.probe import MIN_QUESTIONS, Probe, why_never_right, why_not_judged
from loragate.selection.settings import ProbeSettings

PROMPTS = ("prompt", "question", "problem", "instruction")
LONG = 60
"""Characters from which a question is looked for inside other prompts; shorter ones occur by accident."""
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


@dataclass(frozen=True)
class ProbeQuestions:
    """Questions as they were given, before the model is there.

    Attributes:
        source: where they come from.
        task: how they are asked and judged.
        questions: new to the training rows.
        labelled: whether their answers are known.
        settings: of the samples and their verdicts.
        rendered: the prompts, where they are known already.
    """

    source: str
    task: Task
    questions: list[Question]
    labelled: bool
    settings: ProbeSettings
    rendered: list[str] | None = None

    def put(self, how: Manner) -> Probe:
        """The questions as they are put to this model; without answers they have yet to get those of a majority.

        The engine lowers the token limit for a prompt that leaves fewer of the model's positions; a prompt that leaves none is
        refused (DataError), which is better known before anything is trained.
        """
        settings, task = self.settings, self.task
        if how.raw and not task.path.name:  # of a plain file
            task = replace(task, raw=True)
        prompts = self.rendered or render_questions(task, self.questions, how.tokenizer, how.system)
        limit = settings.probe_max_new_tokens or how.answer
        tokenize_prompts(how.tokenizer, prompts, limit, how.positions)
        temperature = 1.0 if settings.probe_temperature is None else settings.probe_temperature
        sampling = SamplingConfig(
            temperature=temperature,
            top_p=task.generation.top_p,
            max_new_tokens=limit,
            samples=settings.probe_samples if temperature else 1,
            seed=how.seed,
        )
        judging = GradingSettings(sandbox=settings.probe_sandbox)
        return Probe(task, tuple(self.questions), tuple(prompts), sampling, judging, self.source)


def read_probe(
    given: RowsGiven,
    task_name: str,
    settings: ProbeSettings,
    taken: Sequence[tuple[Sequence[str], str]] = (),
    *,
    need_answers: bool = False,
) -> ProbeQuestions:
    """Questions of a file or of rows in memory, checked as far as they can be without a model.

    They are shuffled, always in the same way: the first ones end the training of ranges, the last may be kept aside, and a file
    is often in the order of its kinds. A question that repeats another is left out, as intervals count each as one.

    Args:
        given: .jsonl, .json or .parquet with a prompt and, where there are labels, an answer column; or such rows.
        task_name: a task whose prompt, columns and grader are used, by name or file; the rows have its schema then. Without
            one the grader is that of the settings.
        taken: (prompts, what they are): questions must not be among them.
        need_answers: whether there must be labels.

    Raises:
        ConfigError: for a grader that cannot be used.
        DataError: for a file that is not there, a row that cannot be used, answers in some rows only, a question that is also
            among those taken, or fewer than 32 different questions with answers.
    """
    if isinstance(given, str | Path) and not (path := Path(given).expanduser()).is_file():
        beside = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"found no file {given}{nearest(path.name, beside)} (a probe is a local .jsonl, .json or .parquet file)"
        )
    rows = load_rows(given)
    labelled = bool(task_name) or _has_answers(rows)
    task = load_task(task_name) if task_name else probe_task(settings.probe_grader, labelled=labelled)
    require_graders([task], GradingSettings(sandbox=settings.probe_sandbox))
    every = load_questions(task, rows).questions
    for texts, what in taken:
        require_disjoint(every, texts, what)
    questions = _different(every)
    source = str(given) if isinstance(given, str | Path) else f"{len(every)} questions in memory"
    repeated = len(every) - len(questions)
    if labelled:
        if len(questions) < MIN_QUESTIONS:
            of = f" ({len(every)} rows)" if repeated else ""
            raise DataError(
                f"the probe {source} has {len(questions)} different questions{of}; fewer than {MIN_QUESTIONS} cannot tell "
                "ranges apart, so nothing would be picked on them"
            )
        if why := why_not_judged(task, questions) or why_never_right(task, questions):
            raise DataError(why)
    elif need_answers:
        raise ConfigError(
            f"{source} has no answers; what is asked here needs labelled questions (columns prompt and answer)"
        )
    random.Random(0).shuffle(questions)
    source += f" ({repeated} repeat another and are left out)" if repeated else ""
    return ProbeQuestions(source, task, questions, labelled, settings)


def _different(questions: Sequence[Question]) -> list[Question]:
    """The first of every question; a DataError if one that repeats it has another answer."""
    first: dict[str, Question] = {}
    for question in questions:
        before = first.setdefault(key_of(question.prompt), question)
        if before.prompt == question.prompt and before.gold != question.gold:
            raise DataError(
                f"{question.place}: the question of {before.place} again, with another answer ({question.gold!r:.60}, there "
                f"{before.gold!r:.60}); remove the one that is wrong"
            )
    return list(first.values())


def probe_task(grader: str = "default", *, labelled: bool = True) -> Task:
    """A task for a plain file of prompts and answers; the prompt column is the user's turn, as it stands.

    A grader that needs more than an answer is a ConfigError.
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
        grader=cast(Grader, grader),
    )


def _has_answers(rows: Rows) -> bool:
    """Whether the rows of a plain file have answers; rows that are no questions, or of which only some have one, are refused."""
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
    return all(with_answer)


def held_out_prompts(rows: Rows, how: Manner, max_length: int) -> tuple[list[Question], list[str]]:
    """Questions without answers from rows set aside, and their rendered prompts; a DataError if no row can be used."""
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
    wanted, rows_of = min(count, len(rows) // 10), Counter(keys)
    aside: dict[tuple[str, ...], int] = {}
    taken = 0  # rows that calibration loses; a prompt with more rows than are left to take stays where it is
    for index in range(len(rows) - 1, -1, -1):
        key = keys[index]
        if key and key not in aside and taken + rows_of[key] <= wanted:
            aside[key] = index
            taken += rows_of[key]
    kept = [index for index, key in enumerate(keys) if key not in aside]
    order = rows._order  # rows keep their places
    return rows._view([order[index] for index in kept]), rows._view([order[index] for index in sorted(aside.values())])


def key_of(text: str) -> str:
    """What two texts of one question have in common."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", text)  # "2+3" is "2 + 3"
    return re.sub(r"\s+", " ", text).strip(" .,;:!?\"'`*")


def prompts_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The user's words in rows of any format, for the comparison with a probe."""
    texts = []
    for row in rows:
        for name in ("messages", "conversations", *PROMPTS):
            value = row.get(name)
            if isinstance(value, str):
                more = row.get("input") if name == "instruction" else None
                texts.append(f"{value}\n{more}" if isinstance(more, str) and more.strip() else value)
            elif isinstance(value, list):
                with suppress(DataError):  # such as an image; rows to train on are refused by their line
                    texts += [turn["content"] for turn in conversation(value, name) if turn["role"] == "user"]
    return texts


def prompts_to_exclude(rows: Iterable[Mapping[str, Any]], what: str) -> list[str]:
    """`prompts_of` rows that have some (DataError), because a check against nothing would pass."""
    texts = prompts_of(rows)
    if not texts:
        raise DataError(
            f"no prompts were found in {what}, so nothing shows that the probe is new to them; expected messages, or one of "
            f"the columns {', '.join(PROMPTS)}"
        )
    return texts


def require_disjoint(questions: Sequence[Question], others: Iterable[str], what: str) -> None:
    """Refuse a probe that shares questions with other rows, compared by their prompt and by the row's own question.

    The DataError names the first and how many there are.
    """
    seen = {key for key in map(key_of, others) if key}
    joined = "\n".join(seen)
    shared = [
        question
        for question in questions
        if any(
            key in seen or (len(key) >= LONG and key in joined)
            for key in map(key_of, {question.prompt, *prompts_of([question.row])})
            if key
        )
    ]
    if shared:
        raise DataError(
            f"{shared[0].place}: {len(shared)} of {len(questions)} probe questions are also among {what}; a range picked on "
            "questions that were trained on, or that the result is reported on, means nothing. Take other questions"
        )
