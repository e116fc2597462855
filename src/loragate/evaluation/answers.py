r"""The answer in a response (the content of a box, a letter, a text), and the verdict on it.

For mathematics only a box counts. A number that happens to stand last in a response that was cut off is not an answer, so a
response without a box has none; so has one whose only box was cut off before it closed. Models announce a choice in many
forms; they are tried from the most to the least explicit, and of several announcements of one form the last counts, because
models correct themselves. Light: the processes that grade load this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.S)  # an escaped character is consumed, so that it is no brace
# what `\boxed 5` without braces holds: a number, a command or word, or one other character
_BARE = re.compile(r"-?\d[\d.,]*\d|-?\d|\\?[A-Za-z]+|[^\s{}]")
# between two boxes that are one answer, and the name before a box
_JOINER = re.compile(
    r"(?:[\s$]|\\[()\[\]])*+(?:[,;]|(?:\\text\s*\{\s*)?(?:and|or)\b\s*\}?)(?:[\s$,]|\\[()\[\]]|(?:and|or)\b)*+"
)
_NAME_BEFORE = re.compile(r"(?<![A-Za-z\\])((?:[A-Za-z]|\\[a-z]{2,8})(?:_\{?\w{1,4}\}?)?)\s*=\s*$")
LETTERS = "ABCDEFGHIJ"
# what may stand between the announcement and the letter, and what ends a letter; possessive, as no time limit holds here
# and a model that is stuck writes the same filler a thousand times
_OPEN = r"[\s(\[*_$\"'`{]*+(?:\\\()?(?:\\(?:text|textbf|mathrm|mathbf)\s*+\{\s*+)?[(\[*]*+"
_END = r"(?![A-Za-z0-9'’])"
_AND = r"[)\]}*\s]*+(?:,|/|\\?&|(?:\\text\{\s*)?(?:and|or)\b)[\s(}*]*+"
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


def strip_reasoning(response: str) -> str:
    """What follows the last `</think>`; the whole response where thoughts were never closed, or there are none."""
    return response.rpartition("</think>")[2]


def last_boxed(response: str) -> str | None:
    r"""Return what the last complete `\boxed{…}` or `\fbox{…}` of `response` holds, or None.

    Braces are matched, escaped ones (`\{`) included as ordinary characters. `\boxed 5` holds the one token after it.
    Of nested boxes the innermost last one is returned. Surrounding blanks are removed; an empty box holds "".
    """
    return next((content for _, _, content in _boxes(response)), None)


def extract_boxed_answers(response: str) -> list[str]:
    r"""Return what the last boxes of `response` hold as one answer; none without a box, otherwise seldom more than one.

    `\boxed{4} and \boxed{-7}` is the list `4, -7`, and `x=\boxed{2}, y=\boxed{5}` keeps its names; boxes count as one
    answer only if nothing but a comma, "and" or "or" joins them. Otherwise it is `last_boxed`.
    """
    found: list[str] = []
    after = len(response)
    for start, end, content in _boxes(response):
        joiner = _JOINER.fullmatch(response, end, after)
        if found and (joiner is None or end > after):
            break
        name = _NAME_BEFORE.search(response, max(0, start - 40), start)
        found.append(f"{name[1]}={content}" if name and "=" not in content else content)
        after = name.start() if name else start
    if len(found) < 2 or len(set(found)) == 1:
        alone = last_boxed(response)
        return [] if alone is None else [alone]
    return found[::-1]


def _boxes(response: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, content) of every complete box, the last one first."""
    boxes = list(_BOX.finditer(response))
    closing = closing_braces(response) if boxes else {}
    for match in reversed(boxes):
        start = match.end()
        if response.startswith("{", start):
            end = closing.get(start)
            if end is not None:
                yield match.start(), end + 1, response[start + 1 : end].strip()
        else:
            bare = _BARE.match(response, start)
            if bare is not None and bare.group() != "$":
                yield match.start(), bare.end(), bare.group()


def closing_braces(text: str) -> dict[int, int]:
    r"""The index of the closing brace of every brace that has one, in one pass, as an answer can repeat an open box thousands of
    times; `\{` and `\}` do not count.
    """
    pairs: dict[int, int] = {}
    unclosed: list[int] = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            unclosed.append(match.start())
        elif match.group() == "}" and unclosed:  # of an escaped character neither branch is true
            pairs[unclosed.pop()] = match.start()
    return pairs


# behind a letter: what is said of an option, not the option's text
_VERB = "(?:is|was|are|were|has|have|can(?:not)?|could|would|will|does|seems|looks|sounds|means|says)"


def extract_choice_letter(response: str) -> str | None:
    r"""The letter that a response chooses, or None.

    Tried in turn: the last `\boxed{C}`, which chooses nothing where it holds several letters; "the answer is (C)",
    "Answer: **C**" and the like, small letters only where a bracket, a full stop or the end follows; "C is correct"; a
    bold `**C**` or `**C. text**`; a line that holds only the letter; "C. text" or "(C) text" at the very beginning, unless the
    response goes through several options so; the last capital that stands alone with no small word after it, as "A" and "I" are
    words of their own. An announcement of several ("the answer is A or B") chooses nothing.
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
    listed = rf"(?:\A|[.;!?] |\n)[^\S\n]*\(?({allowed})[).:]+\s"
    goes_through_options = len(set(re.findall(listed, response))) > 1
    forms = (
        rf"{_ANNOUNCED}({allowed}){_END}(?!(?<=I) +[a-z])",
        rf"{_ANNOUNCED}((?i:{allowed}))(?=[)\]*}}.]|\s*$)",
        rf"(?<![A-Za-z0-9'’\\])({allowed})[)*_]*\s+(?:is|must be)\s+(?:the\s+)?(?:correct|right|best)\b",
        rf"\*\*\s*\(?({allowed})\)?\s*(?:[.:)][^*\n]*)?\*\*",
        rf"(?m)^[^\S\n]*\(?({allowed})[).]?[^\S\n]*$",
        r"(?!)()" if goes_through_options else rf"\A\s*\(?({allowed})[).:]+\s+(?!{_VERB}\b)",
        rf"(?<![A-Za-z0-9'’\\])({allowed}){_END}(?! +[a-z])",
    )
    for form in forms:
        if matches := list(re.finditer(form, response)):
            several = rf"{_ANNOUNCED}{allowed}{_AND}{allowed}{_END}(?![)*]* +[a-z])"
            return None if re.compile(several).match(response, matches[-1].start()) else matches[-1][1].upper()
    return None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "choice": extract_choice_letter,
    "exact": str.strip,
    "boxed": last_boxed,
}
"""What takes an answer from a response, by the name of its grader."""


def parse_gold_letter(gold: str) -> str | None:
    """The letter that a right answer names: "B", "b", "(B)", "B." or "B) Paris"; None for anything else."""
    found = re.fullmatch(rf"\(?((?i:[{LETTERS}]))(?:[).:].*)?", gold.strip(), re.S)
    return None if found is None else found[1].upper()


def grade_text(response: str, gold: str, grader: str) -> Grade:
    r"""Whether a response chooses the letter `gold` ("choice") or is `gold`: whole ("exact"), or its last \boxed{...} ("boxed").

    White space at the ends does not count.
    """
    found = EXTRACTORS[grader](response)
    if not found:
        return Grade(False, None, "no_box" if grader == "boxed" else "no_answer")
    wanted = parse_gold_letter(gold) if grader == "choice" else gold.strip()
    return Grade(found == wanted, found, "ok" if found == wanted else "wrong")
