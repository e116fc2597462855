"""Checks before anything is sampled: the grader on right answers, which it must accept, and the system message of the questions
against that of the training examples.

Nothing is asked of a model here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from loragate.data import Rows
from loragate.data.formats import Turns, detect_format, normalize
from loragate.errors import DataError
from loragate.evaluation.answers import parse_gold_letter
from loragate.evaluation.grading.numeric import last_number, numbers_in
from loragate.evaluation.judging import CODE_GRADERS, MATH_GRADER_NAMES, grade_samples
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import Question, Task
from loragate.generation import Sample

MAX_REFERENCES = 32  # right answers that are graded
MEASURED = 128  # training examples that are looked at
NEAR_ZERO_SHARE = 0.05  # a share that is near none
FEWEST_WORDS = 4  # of a sentence
NAMED = 3  # places in a message
_PHRASE = re.compile(r"(?i)\banswer(?: is|:)\s*(.+?)\.?\s*$")
_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")  # and no command of LaTeX
# two sentences; one with a capital and a full stop; one with a capital and a verb
_SENTENCE = re.compile(
    r"\w[.!?]\s+[A-Z]|\A[A-Z].*[.!?]\Z|\A[A-Z].*\b(?:is|are|was|were|has|have|had|equals|gives|gets|makes|costs|takes)\b",
    re.S,
)


def explain_unusable_gold(gold: str, grader: str) -> str | None:
    """Why no answer could ever be found right, or None."""
    if grader == "choice" and parse_gold_letter(gold) is None:
        return f"the right answer is {gold!r:.60}, and the grader choice compares letters; give the letter, such as B"
    if grader == "gsm8k":
        found, several = last_number(gold), "####" not in gold and len(list(numbers_in(gold))) > 1
        if found is None or found.value is None or several:
            return (
                f"the right answer is {gold!r:.60}, and the grader gsm8k compares numbers; give one number, or a solution that "
                "ends in #### and the number"
            )
    elif grader not in ("exact", "tiny", *CODE_GRADERS) and "####" in gold:
        return (
            'the right answer holds "####", as GSM8K\'s solutions do: the grader gsm8k reads it; for others give only what '
            'follows (answer.split("####")[-1])'
        )
    return None


def check_references(task: Task, questions: Sequence[Question], grader: str, settings: GradingSettings) -> list[str]:
    """Put right answers through the grader: some of the data set's own, each in the form that the grader reads.

    Returns:
        What a reader of the scores should know: that some are not accepted, or are sentences.

    Raises:
        DataError: for a question whose right answer no response can have, where near none is accepted, and where most are
            sentences.
    """
    if grader in ("lm-eval", "tiny") or task.own_grader is not None or not questions:
        return []
    for question in questions:
        if why := explain_unusable_gold(question.gold, grader):
            raise DataError(f"{question.place}: {why}")
    if grader == "regex":  # what would be right depends on the pattern
        return []
    warnings = _warn_of_sentences(task, questions, grader, settings)
    tried = [questions[place] for place in _evenly_spaced_indices(len(questions), MAX_REFERENCES)]
    grades = grade_samples(task, tried, _samples(_answer(question, grader) for question in tried), grader, settings)
    refused = [(question, grade) for question, grade in zip(tried, grades, strict=True) if not grade.correct]
    if not refused:
        return warnings
    first, grade = refused[0]
    what = "reference solutions" if grader in CODE_GRADERS else "right answers"
    said = (
        f"{task.name}: the grader {grader} accepts {len(tried) - len(refused)} of {len(tried)} {what} that were tried "
        f"({first.place}: {first.gold!r:.80} is found {grade.reason})"
    )
    if len(refused) >= (1 - NEAR_ZERO_SHARE) * len(tried):
        raise DataError(f"{said}; give right answers in the form that it reads, or another grader")
    return [*warnings, f"{said}; such questions cannot be answered rightly, whatever the model does"]


def _warn_of_sentences(task: Task, questions: Sequence[Question], grader: str, settings: GradingSettings) -> list[str]:
    """A warning for right answers that are sentences, which no short answer in a box equals; a DataError where most are."""
    if grader not in MATH_GRADER_NAMES:
        return []
    asked = [(question, short) for question in questions if (short := _short_answer(question.gold)) is not None]
    if not asked:
        return []
    boxed = _samples(rf"\boxed{{{short}}}" for _, short in asked)
    grades = grade_samples(task, [question for question, _ in asked], boxed, grader, settings)
    found = [one for one, grade in zip(asked, grades, strict=True) if not grade.correct]
    if not found:
        return []
    (first, short), count = found[0], len(found)
    said = (
        f"{', '.join(question.place for question, _ in found[:NAMED])}{', …' * (count > NAMED)}: {count} of {len(questions)} "
        f"right answers are sentences ({first.gold!r:.80}), and for the grader {grader} \\boxed{{{short}}} would be wrong"
    )
    if count > len(questions) / 2:
        raise DataError(f"{said}; give only the final answer, such as 14, or another grader")
    return [f"{said}; give only the final answer there"]


def _short_answer(gold: str) -> str | None:
    """What a box would hold where a right answer is a sentence: what follows "answer is", or its last number; else None."""
    if phrase := _PHRASE.search(gold):
        return phrase[1]
    if len(_WORD.findall(gold)) < FEWEST_WORDS or not _SENTENCE.search(gold.strip()):
        return None
    number = last_number(gold)
    return number.text if number else None


def check_system_message(task: Task, rows: Rows, default_system: str = "") -> list[str]:
    """One sentence where most training examples have a system message and the questions none of theirs, or the reverse, and
    where neither has one and the chat template's own, `default_system`, is left out."""
    talks = [turns.messages for turns in _measured_turns(rows) if turns.messages]
    texts = [talk[0]["content"].strip() for talk in talks if talk[0]["role"] in ("system", "developer")]
    own = (task.system or "").strip()
    if task.harness is not None or not talks or own in texts:
        return []
    if len(texts) <= len(talks) / 2 and not own:
        left_out = (
            f"the chat template's own system message ({default_system.strip()!r:.100}) is left out; --system keep keeps it, as "
            "TRL and most trainers do (loragate doctor --data FILE measures what suits the adapter)"
        )
        return [left_out] if default_system else []
    trained = f"{len(texts)} of {len(talks)} training examples that were looked at have a system message"
    trained += f" ({Counter(texts).most_common(1)[0][0]!r:.80})" if texts else ""
    asked = f"have {own!r:.80}" if own else "have none"
    return [f"{trained}, and the questions {asked}; ask them with the one that the adapter was trained with"]


def _measured_turns(rows: Rows) -> Iterator[Turns]:
    for place in _evenly_spaced_indices(len(rows), MEASURED):
        row = rows[place]
        with suppress(DataError):
            yield normalize(row, detect_format(row))


def _answer(question: Question, grader: str) -> str:
    """A response that is right where the data set is."""
    if grader == "humaneval":
        return f"```python\n{question.row['prompt']}{question.gold}\n```"
    if grader == "mbpp":
        return f"```python\n{question.gold}\n```"
    return rf"\boxed{{{question.gold}}}" if grader in (*MATH_GRADER_NAMES, "boxed") else question.gold


def _samples(texts: Iterable[str]) -> list[Sample]:
    return [Sample(place, 0, text, (), "stop", None) for place, text in enumerate(texts)]


def _evenly_spaced_indices(count: int, most: int) -> list[int]:
    """Up to `most` places of `count`, evenly apart."""
    return [place * count // min(count, most) for place in range(min(count, most))]
