r"""Graders of answers that are a number, or what a pattern takes out: `gsm8k` and `regex`.

`gsm8k` reads the number behind the first `####`, as the data set writes its answers, else the last number of the response. Both
numbers are compared exactly, whatever their notation: thousands separators, currencies, `.0`, fractions, `million`. What only
looks like a number (a time, a power, one side of an unfinished sum) has no value: no answer is better than a wrong one. `regex`
takes the group of the pattern's last match. Patterns run in a process that can be killed, as some never end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from loragate.errors import ConfigError
from loragate.evaluation.answers import Grade
from loragate.evaluation.grading.pool import Job, MathGrader
from loragate.evaluation.grading.units import SCALES

_MARK = re.compile(r"####[^\S\n]*(.*)")
_HEADING = re.compile(r"\d[.:)][^\S\n]*[A-Za-z]")  # "#### 3. Add them up"
_B = r"[^\S\n]*"  # blanks on one line
_TEN = rf"{_B}(?:[xX×*]|\\times|\\cdot){_B}10{_B}\^{_B}(?:\{{{_B}[-+]?\d+{_B}\}}|[-+]?\d+)"
_TOKEN = re.compile(
    rf"(?P<sign>[-−–+])?(?P<body>(?:\d+(?:[.,]\d+)*|\.\d+)(?:{_TEN}|[eE][-+]?\d+(?!\w)|[^\S\n]+\d+{_B}/{_B}\d+|{_B}/{_B}\d+)?)"
)
# Fonts and boxes of LaTeX and Markdown, currencies, and separators of thousands go before a number is looked for.
_BOX = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_DRESS = re.compile(
    r"\*\*|\\boxed|\\[!,;]|\\?\$|[€£¥₹]|\b(?:USD|EUR|GBP|INR|Rs)\b\.?|(?<=\d)[\u00a0\u202f\u2009](?=\d{3}\b)"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_PLAIN = re.compile(
    r"(?:\d+|\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})?(?:\.\d+)?"
)  # commas by threes, or as in India
_POWER = re.compile(rf"{_B}(?:[eE]([-+]?\d+)|(?:[xX×*]|\\times|\\cdot){_B}10{_B}\^\D*?([-+]?\d+).*)$")
MAX_EXPONENT, MAX_DIGITS = 1000, 400
_SCALE = re.compile(r"(?:[\s-]*(hundred|thousand|million|billion|trillion|dozen)s?|k)\b", re.I)
NEAR = 40  # characters around a number that say what it is
_LABEL = re.compile(r"(?:[A-Za-z_\\]|[\^_]\{?)\Z")  # directly before digits that are no number of their own: x1, cm^2
_NEGATIVE = re.compile(rf"(?:\b(?:minus|negative)|={_B}[-−–]){_B}\Z", re.I)
# beside a number that is part of another one
_PART_BEFORE = re.compile(
    rf"(?:[\d)%]{_B}(?:[-−–+*/÷×^xX]|minus|plus|times)|[A-Za-z][-−–+]|\b[a-z]{_B}[-−–+*/]|[×÷{{]|\\(?:times|cdot|div)){_B}\Z|\d:\Z",
    re.I,
)
_PART_AFTER = re.compile(
    rf"{_B}(?:\^|\}}|\*{_B}[\d(\\]|[×÷¼-¾⅐-⅞]|/(?!{_B}[A-Za-z]{{2}})|\\(?:times|cdot|div|sqrt|pi)|[xyz]\b|and\s+(?:a|an|one)\b)"
    r"|:\d|[MB]\b"
)


@dataclass(frozen=True)
class NumberMatch:
    """A number as it was written, and its exact value; None where it is part of something that is not read."""

    text: str
    value: Fraction | None
    alone: bool  # whether only punctuation stands beside it


def numbers_in(text: str) -> Iterator[NumberMatch]:
    """The numbers of a text, in order; digits in names and exponents are none."""
    text = _FRACTION.sub(r" \1/\2 ", text.replace("{,}", ","))
    for _ in range(3):  # boxes in boxes
        text = _BOX.sub(r" \1 ", text)
    text = _DRESS.sub("", text)
    for match in _TOKEN.finditer(text):
        start, end, sign = match.start(), match.end(), match["sign"] or ""
        before, after = text[max(start - NEAR, 0) : start], text[end : end + NEAR]
        if not sign and _LABEL.search(before):
            continue
        scale = 1
        while step := _SCALE.match(after):
            scale *= SCALES[step[1].lower()] if step[1] else 1000
            after = after[step.end() :]
        value = None
        if not _PART_BEFORE.search(before + sign) and not _PART_AFTER.match(after):
            negative = sign in ("-", "−", "–") or _NEGATIVE.search(before)
            size = _value(match["body"])
            value = None if size is None else size * scale * (-1 if negative else 1)
        rest = before + after if start <= NEAR and len(text) - end <= NEAR else "much"
        yield NumberMatch(match.group().strip(), value, not re.search(r"[^\W_]", _NEGATIVE.sub("", rest)))


def _value(body: str) -> Fraction | None:
    """The value of 1,234.5, 3/4, 3 3/4, 4.5e3 or 4.5 x 10^3; None for what is none of them, such as 1,00 or 3/0."""
    if len(body) > MAX_DIGITS:
        return None
    power = _POWER.search(body)
    exponent = int(power[1] or power[2]) if power else 0
    first, *rest = (body[: power.start()] if power else body).replace("/", " / ").split()
    if not _PLAIN.fullmatch(first) or abs(exponent) > MAX_EXPONENT:
        return None
    whole = Fraction(first.replace(",", "")) * Fraction(10) ** exponent
    match rest:
        case []:
            return whole
        case ["/", below] if int(below):
            return whole / int(below)
        case [above, "/", below] if int(below):
            return whole + Fraction(int(above), int(below))
    return None


def last_number(response: str) -> NumberMatch | None:
    """The number that a response gives as its answer: behind the first `####`, else the last one; None where there is none."""
    for mark in _MARK.finditer(response):
        found = list(numbers_in(mark[1]))
        if len(found) == 1 and re.match(r"[^\w\n]*(?:boxed\W*)?\d", mark[1]) and not _HEADING.search(mark[1]):
            return found[0]
        if not response[mark.start() :].strip("# \t\r\n"):
            return None  # cut off before its answer
    found = list(numbers_in(response))
    return found[-1] if found else None


def grade_last_number(response: str, gold: str) -> Grade:
    """Whether the number that a response gives is that of `gold`, which may be a whole solution with its `####`."""
    found, wanted = last_number(response), last_number(gold)
    if found is None:
        return Grade(False, None, "no_answer")
    if found.value is None or wanted is None or wanted.value is None:
        return Grade(False, found.text, "unparsed")
    return Grade(found.value == wanted.value, found.text, "ok" if found.value == wanted.value else "wrong")


def compile_pattern(pattern: str, place: str) -> re.Pattern[str]:
    """The pattern of the grader regex; a ConfigError begins with `place`."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{place} {pattern!r} is no regular expression: {error}") from None
    if compiled.groups != 1:
        raise ConfigError(
            f"{place} {pattern!r} has {compiled.groups} groups, expected one around the answer, as in 'answer is (.+)'; "
            "write others as (?:…)"
        )
    return compiled


def regex_grader(pattern: str) -> MathGrader:
    """The grader of what the group of the pattern's last match holds; it runs in a `GradingPool`."""
    compile_pattern(pattern, "the pattern")
    return MathGrader(
        "regex", lambda response, gold, _: Job(json.dumps([pattern, gold]), response), f"{__name__}:judge_pattern"
    )


def judge_pattern(job: str, response: str, _: float | None) -> tuple[bool, str, str | None]:
    """The verdict of a worker: the same text as the gold, or the same number where both are nothing else."""
    pattern, gold = json.loads(job)
    matches = [match[1] for match in re.finditer(pattern, response) if match[1] is not None]
    if not matches:
        return False, "no_answer", None
    found = matches[-1].strip()
    numbers = [list(numbers_in(text)) for text in (found, gold)]
    if found == gold.strip():
        return True, "ok", found
    if any(len(one) != 1 or not one[0].alone or one[0].value is None for one in numbers):
        return False, "wrong", found
    right = numbers[0][0].value == numbers[1][0].value
    return right, "ok" if right else "wrong", found
