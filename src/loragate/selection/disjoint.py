"""Whether questions are also among other rows: what was trained on, or what a result is reported on.

Texts are compared without case, surplus white space and closing punctuation; signs inside stay, because "2 + 3" and
"2 - 3" are different questions. A long question also counts as shared where it stands inside a longer prompt.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from loragate.errors import DataError
from loragate.evaluation.tasks import Question

PROMPTS = ("prompt", "question", "problem", "instruction")
LONG = 60
"""Characters from which a question is looked for inside other prompts; shorter ones occur by accident."""


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
                texts += [
                    str(turn.get("content", turn.get("value", "")))
                    for turn in value
                    if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in ("user", "human")
                ]
    return texts


def prompts_to_exclude(rows: Iterable[Mapping[str, Any]], what: str) -> list[str]:
    """`prompts_of`, refusing rows without any, because a check against nothing would pass.

    Raises:
        DataError: saying which columns are looked at.
    """
    texts = prompts_of(rows)
    if not texts:
        raise DataError(
            f"no prompts were found in {what}, so nothing shows that the probe is new to them; expected messages, or one of "
            f"the columns {', '.join(PROMPTS)}"
        )
    return texts


def shared_with(questions: Sequence[Question], others: Iterable[str]) -> list[Question]:
    """The questions that are also among `others`, compared by their prompt and by the row's own question."""
    seen = {key for key in map(key_of, others) if key}
    joined = "\n".join(seen)
    return [
        question
        for question in questions
        if any(
            key in seen or (len(key) >= LONG and key in joined)
            for key in map(key_of, {question.prompt, *prompts_of([question.row])})
            if key
        )
    ]


def require_disjoint(questions: Sequence[Question], others: Sequence[str], what: str) -> None:
    """Refuse a probe that shares questions with other rows.

    Raises:
        DataError: naming the first shared question and how many there are.
    """
    shared = shared_with(questions, others)
    if shared:
        raise DataError(
            f"{shared[0].place}: {len(shared)} of {len(questions)} probe questions are also among {what}; a range picked on "
            "questions that were trained on, or that the result is reported on, means nothing. Take other questions"
        )
