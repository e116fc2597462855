r"""A letter or a text out of a response, for tasks that need no mathematics.

Models announce a choice in many forms; they are tried from the most to the least explicit, and of several announcements
of one form the last counts, because models correct themselves. `\boxed{}` for mathematics is read by the graders.
"""

from __future__ import annotations

import re

from loragate.evaluation.grade import Grade
from loragate.evaluation.grading.extraction import last_boxed

LETTERS = "ABCDEFGHIJ"
# what may stand between the announcement and the letter, and what ends a letter; possessive, as no time limit holds here
# and a model that is stuck writes the same filler a thousand times
_OPEN = r"[\s(\[*_$\"'`{]*+(?:\\\()?(?:\\(?:text|textbf|mathrm|mathbf)\s*+\{\s*+)?[(\[*]*+"
_END = r"(?![A-Za-z0-9'’])"
_AND = r"[)\]}*\s]*+(?:,|/|\\?&|(?:\\text\{\s*)?(?:and|or)\b)[\s(}]*+"
_ANNOUNCED = r"(?i:\banswer\b(?:\s+choice)?[\s*_]*+(?:\bis\b|:|=)[\s*_]*+(?:(?:option|choice)\b)?[:\s*_]*+)" + _OPEN


def choice_letter(response: str, letters: str = LETTERS) -> str | None:
    r"""The letter that a response chooses, or None.

    Tried in turn: the last `\boxed{C}`, which chooses nothing where it holds several letters; "the answer is (C)",
    "Answer: **C**" and the like, small letters only where a bracket, a full stop or the end follows; "C is correct"; a
    bold `**C**` or `**C. text**`; a line that holds only the letter; the last capital that stands alone with no small
    word after it, as "A" and "I" are words of their own.
    """
    allowed = f"[{letters}]"
    if (boxed := last_boxed(response)) is not None:
        letter = rf"({allowed}(?!(?<=[AI]) +[a-z])|(?i:{allowed})(?=[)\]}}*.:]|$))"
        if re.match(rf"{_OPEN}{allowed}{_AND}{allowed}{_END}(?! +[a-z])", boxed):
            return None
        found = re.fullmatch(rf"{_OPEN}{letter}(?:[)\]}}*.:,\s].*)?", boxed, re.S)
        if found:
            return found[1].upper()
    forms = (
        rf"{_ANNOUNCED}({allowed}){_END}(?!(?<=I) +[a-z])",
        rf"{_ANNOUNCED}((?i:{allowed}))(?=[)\]*}}.]|\s*$)",
        rf"(?<![A-Za-z0-9'’\\])({allowed})[)*_]*\s+(?:is|must be)\s+(?:the\s+)?(?:correct|right|best)\b",
        rf"\*\*\s*\(?({allowed})\)?\s*(?:[.:)][^*\n]*)?\*\*",
        rf"(?m)^[^\S\n]*\(?({allowed})[).]?[^\S\n]*$",
        rf"(?<![A-Za-z0-9'’\\])({allowed}){_END}(?! +[a-z])",
    )
    for form in forms:
        if matches := list(re.finditer(form, response)):
            return matches[-1][1].upper()
    return None


def exact_text(response: str) -> str:
    """The response without surrounding white space."""
    return response.strip()


def grade_choice(response: str, gold: str, letters: str = LETTERS) -> Grade:
    """Whether a response chooses the letter `gold`."""
    found = choice_letter(response, letters)
    if found is None:
        return Grade(False, None, "no_answer")
    correct = found == gold.strip().upper()
    return Grade(correct, found, "ok" if correct else "wrong")


def grade_exact(response: str, gold: str, extractor: str = "exact") -> Grade:
    r"""Whether a response (or, with the extractor "boxed", its last \boxed{...}) is `gold`, white space at the ends aside."""
    found = last_boxed(response) if extractor == "boxed" else exact_text(response)
    if not found:
        return Grade(False, None, "no_box" if extractor == "boxed" else "no_answer")
    correct = found == gold.strip()
    return Grade(correct, found, "ok" if correct else "wrong")
