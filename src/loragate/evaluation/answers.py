r"""The answer in a response (the content of a box, a letter, a text), and the verdict on it.

For mathematics only a box counts. A number that happens to stand last in a response that was cut off is not an answer, so a
response without a box has none; so has one whose only box was cut off before it closed. Models announce a choice in many
forms; they are tried from the most to the least explicit, and of several announcements of one form the last counts, because
models correct themselves. Light: the processes that grade load this.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.S)  # an escaped character is consumed, so that it is no brace
# what `\boxed 5` without braces holds: a number, a command or word, or one other character
_BARE = re.compile(r"-?\d[\d.,]*\d|-?\d|\\?[A-Za-z]+|[^\s{}]")
LETTERS = "ABCDEFGHIJ"
# what may stand between the announcement and the letter, and what ends a letter; possessive, as no time limit holds here
# and a model that is stuck writes the same filler a thousand times
_OPEN = r"[\s(\[*_$\"'`{]*+(?:\\\()?(?:\\(?:text|textbf|mathrm|mathbf)\s*+\{\s*+)?[(\[*]*+"
_END = r"(?![A-Za-z0-9'’])"
_AND = r"[)\]}*\s]*+(?:,|/|\\?&|(?:\\text\{\s*)?(?:and|or)\b)[\s(}]*+"
_ANNOUNCED = r"(?i:\banswer\b(?:\s+choice)?[\s*_]*+(?:\bis\b|:|=)[\s*_]*+(?:(?:option|choice)\b)?[:\s*_]*+)" + _OPEN


@dataclass(frozen=True)
class Grade:
    """A verdict and why.

    Attributes:
        correct: whether the answer counts.
        extracted: what was taken from the response as its answer; None where nothing was found.
        reason: "ok", "wrong", or why nothing could be judged ("no_box", "unparsed", "timeout", "crashed", …).
        scores: all figures of a grader that gives several, by its own names.
    """

    correct: bool
    extracted: str | None
    reason: str
    scores: dict[str, float] = field(default_factory=dict, repr=False)


def last_boxed(response: str) -> str | None:
    r"""Return what the last complete `\boxed{…}` or `\fbox{…}` of `response` holds, or None.

    Braces are matched, escaped ones (`\{`) included as ordinary characters. `\boxed 5` holds the one token after it.
    Of nested boxes the innermost last one is returned. Surrounding blanks are removed; an empty box holds "".
    """
    boxes = list(_BOX.finditer(response))
    closing = _closing_braces(response) if boxes else {}
    for match in reversed(boxes):
        start = match.end()
        if response.startswith("{", start):
            end = closing.get(start)
            if end is not None:
                return response[start + 1 : end].strip()
        else:
            bare = _BARE.match(response, start)
            if bare is not None and bare.group() != "$":
                return bare.group()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """The closing brace of every brace that has one, in one pass: answers can repeat an open box thousands of times."""
    pairs: dict[int, int] = {}
    unclosed: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            unclosed.append(match.start())
        elif match.group() == "}" and unclosed:  # of an escaped character neither branch is true
            pairs[unclosed.pop()] = match.start()
    return pairs


def closing_brace(text: str, start: int) -> int | None:
    r"""Return the index of the brace that closes the one at `start`, or None; `\{` and `\}` do not count."""
    return _closing_braces(text).get(start)


def choice_letter(response: str) -> str | None:
    r"""The letter that a response chooses, or None.

    Tried in turn: the last `\boxed{C}`, which chooses nothing where it holds several letters; "the answer is (C)",
    "Answer: **C**" and the like, small letters only where a bracket, a full stop or the end follows; "C is correct"; a
    bold `**C**` or `**C. text**`; a line that holds only the letter; the last capital that stands alone with no small
    word after it, as "A" and "I" are words of their own.
    """
    allowed = f"[{LETTERS}]"
    if (boxed := last_boxed(response)) is not None:
        # a capital A or I before a small word is an English word ("A plant"); a small letter needs something that ends it
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


READERS: dict[str, Callable[[str], str | None]] = {"choice": choice_letter, "exact": str.strip, "boxed": last_boxed}
"""What takes an answer from a response, by the name of its grader."""


def letter_of(gold: str) -> str | None:
    """The letter that a right answer names: "B", "b", "(B)", "B." or "B) Paris"; None for anything else."""
    found = re.fullmatch(rf"\(?((?i:[{LETTERS}]))(?:[).:].*)?", gold.strip(), re.S)
    return None if found is None else found[1].upper()


def grade_text(response: str, gold: str, grader: str) -> Grade:
    r"""Whether a response chooses the letter `gold` ("choice") or is `gold`: whole ("exact"), or its last \boxed{...} ("boxed").

    White space at the ends does not count.
    """
    found = READERS[grader](response)
    if not found:
        return Grade(False, None, "no_box" if grader == "boxed" else "no_answer")
    wanted = letter_of(gold) if grader == "choice" else gold.strip()
    return Grade(found == wanted, found, "ok" if found == wanted else "wrong")
