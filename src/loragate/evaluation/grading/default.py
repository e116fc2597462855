r"""The default grader's decision on (gold, extracted answer), up to the one step that needs algebra.

`decide` runs the same rules in two places. In the caller's process the `algebra` callback answers None ("not known
here"), and most answers are settled without it; what is not goes to a worker, where `algebra` is
`symbolic.same_expression`. Verdicts are three-valued throughout, and a list is only right when a pairing of its
parts is certain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from loragate.evaluation.grading.notation import (
    Shape,
    is_text,
    key,
    name_of,
    normalise,
    read_shape,
    read_unit,
    sides_of,
    split_unit,
    strip_outer_braces,
    unwrap_fonts,
)
from loragate.evaluation.grading.numbers import Number, read_number, same_number

Verdict = bool | None
Algebra = Callable[[str, str, float | None], Verdict]
MAX_LENGTH = 1000  # characters in the box; more is a whole solution
MAX_PARTS = 12  # of a list, as all are compared with all

_UNJUDGED = re.compile(r"\\(?:[lcvd]?dots[a-z]?|bmod|pmod|mod|equiv)(?![A-Za-z])|\.\.\.")
_BASE = re.compile(r"([0-9A-F]+)_\{?(\d+)\}?")
# a letter and its option's text; a second letter, or an operator after a bare one, makes it something else
_CHOICE = re.compile(
    r"\(?([A-J])(?:[).:]*|[).:]+\s(?!(?:and|or)\s+\(?[A-J](?![A-Za-z])).*|\s(?!(?:and|or)\s+\(?[A-J](?![A-Za-z]))[\w(\"'].*)",
    re.S,
)
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_CHOICE_GOLD = re.compile(r"\(([A-J])\)(?:\s.*)?|([A-J])", re.S)


class UnjudgedError(Exception):
    """The pair holds notation that cannot be judged by value, such as an ellipsis; equal spellings were accepted."""


def decide(gold: str, answer: str, tolerance: float | None, algebra: Algebra) -> Verdict:
    """Return whether `answer` is right where `gold` is, both as they stand in the box; None where `algebra` is needed.

    Raises:
        UnjudgedError: for answers that must not be judged by value.
    """
    if len(answer) > MAX_LENGTH:
        raise UnjudgedError
    left, right = normalise(gold), normalise(answer)
    if not left or not right:
        return False
    return _same(left, right, tolerance, algebra)


def _same(gold: str, answer: str, tolerance: float | None, algebra: Algebra) -> Verdict:
    if key(gold) == key(answer):
        return True
    if _UNJUDGED.search(gold) or _UNJUDGED.search(answer):
        raise UnjudgedError
    special = _same_special(gold, answer)  # None for what it knows nothing of
    if special is not None:
        return special
    gold_shape, answer_shape = read_shape(gold), read_shape(answer)
    if gold_shape.kind != "item" or answer_shape.kind != "item":
        number = _same_value(gold, answer, tolerance)  # before its commas are taken for a list: 10,080
        if number is not None:
            return number
        pair = ((gold, gold_shape), (answer, answer_shape))
        left, right = (name_of(text)[1] if shape.kind == "item" else text for text, shape in pair)
        if (left, right) != (gold, answer):  # a tuple, set or matrix with a name on one side: v = (1,2)
            return _same(left, right, tolerance, algebra)
        return _same_shape(gold_shape, answer_shape, tolerance, algebra)
    return _same_item(gold_shape.parts[0], answer_shape.parts[0], tolerance, algebra)


def _same_special(gold: str, answer: str) -> Verdict:
    """Choices, words, times and ratios, numbers in other bases, the empty set: decided by spelling alone."""
    plain_gold, plain_answer = unwrap_fonts(gold), unwrap_fonts(answer)
    letter = _CHOICE_GOLD.fullmatch(plain_gold)
    if letter is not None:
        chosen = _CHOICE.fullmatch(plain_answer)
        if chosen is not None:
            return chosen[1] == (letter[1] or letter[2])
    words = [_is_word(text) for text in (gold, answer)]
    if all(words):
        return _fold(plain_gold) == _fold(plain_answer)
    if any(words) and (read_number(plain_gold) or read_number(plain_answer)):
        return False
    bases = [_BASE.fullmatch(re.sub(r"\s+|(?<=_)\{?\\text", "", text)) for text in (plain_gold, plain_answer)]
    if any(base is not None and len(base[1]) * len(base[2]) and base[1][0].isdigit() for base in bases):
        return bases[0] is not None and bases[1] is not None and bases[0].groups() == bases[1].groups()
    # 3:30 p.m. and 3:30pm, 1:2 and 1 : 2
    if ":" in plain_gold or ":" in plain_answer:
        times = [re.sub(r"[\s.]+", "", text).casefold() for text in (plain_gold, plain_answer)]
        return times[0] == times[1]
    if re.fullmatch(r"\\emptyset\s*", plain_gold) or re.fullmatch(r"\\emptyset\s*", plain_answer):
        return False
    return None


def _is_word(text: str) -> bool:
    """Whether letters are a word and not a product of variables: font commands say so, or their number, or "no"."""
    plain = unwrap_fonts(text)
    return is_text(text) and (len(plain) > (1 if "{" in text else 2) or plain.casefold() == "no")


def _fold(text: str) -> str:
    return re.sub(r"[\s\-]+", " ", text).strip().casefold().removeprefix("the ")


def _same_item(gold: str, answer: str, tolerance: float | None, algebra: Algebra) -> Verdict:
    gold_name, gold_value = name_of(gold)
    answer_name, answer_value = name_of(answer)
    if gold_name and answer_name:
        short, long = sorted((key(gold_name), key(answer_name)), key=len)
        # y is a name for any function: y=x^2 and f(x)=x^2
        if short != long and not (short == "y" and re.fullmatch(r"[a-z]\([a-z]\)", long)):
            return False
        return _same(gold_value, answer_value, tolerance, algebra)
    if (gold_name and "=" not in answer) or (answer_name and "=" not in gold):
        return _same(gold_value, answer_value, tolerance, algebra)
    known = _same_value(gold, answer, tolerance)
    if known is not None:
        return known
    # one of `\frac{1}{3} \approx 0.333` is enough; of `5+7=12` all must be right
    for enough, sides in ((True, _APPROXIMATELY.split(answer)), (False, sides_of(answer))):
        filled = [side.strip() for side in sides if side.strip()]
        if len(sides) > 1 and filled and "=" not in gold:
            verdicts = [_same_item(gold, side, tolerance, algebra) for side in filled]
            return enough if enough in verdicts else None if None in verdicts else not enough
    (gold_body, _), (answer_body, _) = split_unit(gold), split_unit(answer)
    # equal wholes were seen in `_same`
    if (gold_body, answer_body) != (gold, answer) and key(gold_body) == key(answer_body):
        return True
    return algebra(unwrap_fonts(gold_body), unwrap_fonts(answer_body), tolerance)


def _same_value(gold: str, answer: str, tolerance: float | None) -> Verdict:
    """Compare as numbers with units; None unless both sides are numbers, or their units already differ."""
    (gold_body, gold_unit), (answer_body, answer_unit) = split_unit(gold), split_unit(answer)
    known_gold, known_answer = read_unit(gold_unit), read_unit(answer_unit)
    if known_gold and known_answer and known_gold.kinds != known_answer.kinds:
        return False
    left, right = (read_number(strip_outer_braces(unwrap_fonts(body))) for body in (gold_body, answer_body))
    if left is None or right is None:
        return None
    # the answer in the gold's unit; the slack of a rounded decimal is the gold's
    if known_gold and known_answer and known_gold.size != known_answer.size:
        factor = known_answer.size / known_gold.size
        right = Number(None if right.value is None else right.value * factor, right.percent)
    return same_number(left, right, tolerance)


def _same_shape(gold: Shape, answer: Shape, tolerance: float | None, algebra: Algebra) -> Verdict:
    def same(left: str, right: str) -> Verdict:
        return _same(left, right, tolerance, algebra)

    kinds = {gold.kind, answer.kind}
    if kinds <= {"list", "set", "item"}:
        if kinds == {"item", "set"} and gold.kind == "set":
            return False  # a set with one element is asked for as a set
        return _pair_up(gold.parts, answer.parts, same)
    if len(kinds) > 1:
        return False
    if len(gold.parts) != len(answer.parts) or gold.marks != answer.marks:
        return False
    if gold.kind == "union":
        return _pair_up(gold.parts, answer.parts, same)
    verdicts = [same(left, right) for left, right in zip(gold.parts, answer.parts)]
    return False if False in verdicts else None if None in verdicts else True


def _pair_up(gold: Sequence[str], answer: Sequence[str], same: Callable[[str, str], Verdict]) -> Verdict:
    """Whether the parts can be paired off, in any order."""
    if len(gold) != len(answer) or len(gold) > MAX_PARTS:
        return False
    table = [[same(left, right) for right in answer] for left in gold]
    # right where the certain pairs do; wrong where not even the uncertain ones would; else algebra must say
    if _perfect([[verdict is True for verdict in row] for row in table]):
        return True
    return None if _perfect([[verdict is not False for verdict in row] for row in table]) else False


def _perfect(allowed: list[list[bool]]) -> bool:
    """Whether every left part gets a right one of its own (augmenting paths)."""
    partner: dict[int, int] = {}  # of a right part, its left one

    def place(left: int, seen: set[int]) -> bool:
        for right, fits in enumerate(allowed[left]):
            if fits and right not in seen:
                seen.add(right)
                # free, or its partner can go elsewhere
                if right not in partner or place(partner[right], seen):
                    partner[right] = left
                    return True
        return False

    return all(place(left, set()) for left in range(len(allowed)))
