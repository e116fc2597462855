r"""The default grader's decision on (gold, extracted answer).

`verify_answer` runs the same rules in two places. In the caller's process it has no arithmetic but that of the rational numbers,
which settles most answers; what needs roots, logarithms or constants is None there and goes to a worker, where `mp` is mpmath.
Verdicts are three-valued throughout, and a list is only right when a pairing of its parts is certain.

Tolerance: none, unless the gold is a rounded decimal (`0.1429`, `4.5e33`). Then an answer is right that rounds to it, i.e. is off
by at most half a unit of its last digit, and by at most 1e-4 of it. The second bound falls for an answer that no decimal could
write, such as 200/3 for 66.7, if the gold has three digits or more. `27.0` is an integer, not a rounded decimal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from mpmath import mp

from loragate.evaluation.grading.expression import Node, ParseError, read_expression, variables, walk
from loragate.evaluation.grading.notation import (
    PLAIN_NUMBER,
    AnswerStructure,
    canonical_spelling,
    is_text,
    normalise,
    read_shape,
    sides_of,
    split_assignment,
    split_list,
    unwrap_fonts,
)
from loragate.evaluation.grading.sets import looks_like_set, read_set, same_set
from loragate.evaluation.grading.units import Quantity, read_mixed, read_quantity
from loragate.evaluation.grading.values import (
    MAX_BITS,
    MpmathRequiredError,
    UndecidedError,
    are_proportional,
    evaluate,
    same_function,
    same_value,
)

Verdict = bool | None
MAX_LENGTH = 1000  # characters in the box; more is a whole solution
MAX_PARTS = 12  # of a list, as all are compared with all
MAX_RELATIVE_ERROR = Fraction(1, 10_000)
# digits and denominator from which a gold may be the rounding of another number
_ROUNDED_DIGITS, _ROUNDED_PARTS = 3, 10

_UNJUDGED = re.compile(r"\\(?:[lcvd]?dots[a-z]?|bmod|pmod|mod|equiv)(?![A-Za-z])|\.\.\.")
_BASE = re.compile(r"\(?([0-9A-F]+)\)?(?:_\{?\(?|\s*(?:in\s*)?base\s*)([0-9a-z]+)\)?\}?")
_BASES = {name: str(size) for size, name in enumerate(
    ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"], start=2
)} | {"sixteen": "16"}  # fmt: skip
# a letter and its option's text; a second letter, or an operator after a bare one, makes it something else
_CHOICE = re.compile(
    r"\(?([A-J])(?:[).:]*|[).:]+\s(?!(?:and|or)\s+\(?[A-J](?![A-Za-z])).*|\s(?!(?:and|or)\s+\(?[A-J](?![A-Za-z]))[\w(\"'].*)",
    re.S,
)
_CHOICE_GOLD = re.compile(r"\(([A-J])\)(?:\s.*)?|([A-J])", re.S)
_CHOICES = re.compile(r"\(?[A-J]\)?(?:\s*(?:,|;|,?\s*and)\s*\(?[A-J]\)?)+")
_OPTION_TEXT = re.compile(r"(?:\\text(?:bf|rm|it)?\{\s*)?\([A-J]\)\s*\}?\s*(.+)", re.S)
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])")
_CONDITION = re.compile(
    r"(?:,\s*|\s+)(?:(?:\\text\{)?\s*(?:for|where|with)\s*(?:any|all|every|some)?\s*(?:integers?)?\s*\}?)?\s*"
    r"\(?([a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?[ZN]\}?|(?:\\text\{)?\s*is an(?:y)? integer\s*\}?)\)?$"
    r"|(?:,\s*|\s+)(?:\\text\{)?\s*for (?:any|all|every|some)? ?integers?\s*\}?\s*([a-zA-Z])$"
)
_DECIMAL = re.compile(
    r"[-+]?\s*(?P<mantissa>\d+(?:\.\d*)?|\.\d+)"
    r"(?:[eE]\{?(?P<e>[+-]?\d+)\}?|\s*(?:\\times|\\cdot|\*|[xX])\s*10\s*\^\s*\{?\s*(?P<ten>[+-]?\s*\d+)\s*\}?)?"
)
# a range or score, a date, a short code: sums and quotients by their looks
_CODED = re.compile(r"\(?\d+(?:\s*-\s*\d+){1,2}\)?|\d+/\d+/\d{2,4}")
_ROMAN = re.compile("[IVXLCDM]{2}")  # more letters are a word
_ANGLE = (("angle", 1),)
_WITH_DEGREES = {(("radian", 1),), (("celsius", 1),), (("fahrenheit", 1),)}  # where one side says only "degrees"
_TEN = re.compile(r"(?<=[\d.])\s*[xX]\s*(?=10\s*\^)")


class UnjudgedError(Exception):
    """The pair holds notation that cannot be judged by value, such as an ellipsis; equal spellings were accepted."""


def verify_answer(gold: str, answer: str, tolerance: float | None = None, mp: Any = None) -> Verdict:
    """Return whether `answer` is right where `gold` is, both as they stand in the box; None where `mp` is needed.

    Raises:
        UnjudgedError: for answers that cannot be read completely, or must not be judged by value.
    """
    if len(answer) > MAX_LENGTH:
        raise UnjudgedError
    left, right = (normalise(text.rpartition("####")[2]) for text in (gold, answer))
    if not left or not right:
        return False
    try:
        return _Decision(tolerance, mp).compare(left, right)
    except (ParseError, UndecidedError, ArithmeticError, ValueError) as error:
        raise UnjudgedError from error


def judge(gold: str, answer: str, tolerance: float | None) -> tuple[bool, str, str | None]:
    """What a worker calls: correct, reason and the answer."""
    try:
        verdict = verify_answer(gold, answer, tolerance, mp)
    except (UnjudgedError, RecursionError, TypeError):  # of mpmath, which got a kind of number that it does not order
        verdict = None
    return bool(verdict), "unparsed" if verdict is None else "ok" if verdict else "wrong", answer


class _Decision:
    def __init__(self, tolerance: float | None, mp: Any) -> None:
        self.tolerance, self.mp = tolerance, mp

    def compare(self, gold: str, answer: str) -> Verdict:
        try:
            return self._compare(gold, answer)
        except MpmathRequiredError:
            return None

    def _compare(self, gold: str, answer: str) -> Verdict:
        if canonical_spelling(gold) == canonical_spelling(answer):
            return True
        if PLAIN_NUMBER.fullmatch(gold) and PLAIN_NUMBER.fullmatch(answer):
            return self.same_quantity(gold, answer)
        if _UNJUDGED.search(gold) or _UNJUDGED.search(answer):
            raise UnjudgedError
        special = _same_special(gold, answer)  # None for what it knows nothing of
        if special is not None:
            return special
        conditions = [_CONDITION.search(text) for text in (gold, answer)]
        if any(conditions):  # n \in \mathbb{Z} behind a general solution
            if len({_condition_of(found) for found in conditions if found}) > 1:
                return False
            return self.compare(
                *(text[: found.start()] if found else text for text, found in zip((gold, answer), conditions))
            )
        as_sets = self.same_sets(gold, answer)
        if as_sets != "unread":
            return as_sets  # type: ignore[return-value]
        if read_mixed(gold) or read_mixed(answer):  # 3 hours and 30 minutes, which are no list
            return self.same_quantity(gold, answer)
        left, right = read_shape(gold), read_shape(answer)
        if left.kind == right.kind == "item":
            return self.same_item(left.parts[0], right.parts[0])
        named = self.same_named(left, right)
        if named != "unnamed":
            return named  # type: ignore[return-value]
        return self.same_shape(left, right)

    def same_sets(self, gold: str, answer: str) -> Verdict | str:
        if not (looks_like_set(gold) or looks_like_set(answer)):
            return "unread"
        left, right = read_set(gold), read_set(answer)
        if left is None or right is None:
            return "unread"
        try:
            return same_set(left, right, self.mp)
        except UndecidedError:
            return "unread"

    def same_named(self, gold: AnswerStructure, answer: AnswerStructure) -> Verdict | str:
        """Assignments `x=2, y=5`, against others by name, or against values without names in the order of the names."""
        pairs = [_assignments(shape) for shape in (gold, answer)]
        if any(pairs) and not all(pairs):  # (a,b)=(1,2) beside a=1, b=2
            pairs = [found or _assigned_tuple(shape) for found, shape in zip(pairs, (gold, answer))]
        if not any(pairs):
            return self.same_value_named(gold, answer)
        left, right = pairs
        if left and right:
            if len(left) != len(right):
                return False
            if sorted(name for name, _ in left) == sorted(name for name, _ in right):
                return self.match_unordered(left, right, lambda a, b: a[0] == b[0] and self.same_or_unread(a[1], b[1]))
            return self.match_unordered(gold.parts, answer.parts)
        known, other = (left, answer) if left else (right, gold)
        assert known
        stems = {re.sub(r"_.*|'", "", name) for name, _ in known}
        values = [value for _, value in known]
        if len(known) != len(other.parts) or other.kind not in ("list", "group", "set"):
            return False
        if len(stems) < len(known) or other.kind == "set":  # x=3 or x=-5: several values of one
            one, two = (values, other.parts) if left else (other.parts, values)
            return other.kind != "group" and self.match_unordered(one, two)
        values = [value for _, value in sorted(known, key=lambda pair: (pair[0].startswith("\\"), pair[0]))]
        return self.all_same(*((values, other.parts) if left else (other.parts, values)))

    def same_value_named(self, gold: AnswerStructure, answer: AnswerStructure) -> Verdict | str:
        """A tuple, set or matrix with a name on one side: v = (1,2)."""
        texts = []
        for shape in (gold, answer):
            values = split_assignment(shape.parts[0])[1] if shape.kind == "item" else []
            texts.append(values[-1] if values and values[-1] != shape.parts[0] else "")
        if not any(texts):
            return "unnamed"
        left, right = (read_shape(text) if text else shape for text, shape in zip(texts, (gold, answer)))
        return False if left.kind == right.kind == "item" else self.same_shape(left, right)

    def same_item(self, gold: str, answer: str) -> Verdict:
        (gold_name, gold_values), (answer_name, answer_values) = split_assignment(gold), split_assignment(answer)
        if gold_name and answer_name:
            short, long = sorted((canonical_spelling(gold_name), canonical_spelling(answer_name)), key=len)
            # y is a name for any function: y=x^2 and f(x)=x^2
            if short == long or (short == "y" and re.fullmatch(r"[a-z]\([a-z]\)", long)):
                return self.compare_equality_chain(gold_values, answer_values)
            return self.same_equation(sides_of(gold), sides_of(answer))
        if (gold_name and len(sides_of(answer)) == 1) or (answer_name and len(sides_of(gold)) == 1):
            return self.compare_equality_chain(gold_values, answer_values)
        # one of `\frac{1}{3} \approx 0.333` is enough; of `5+7=12` all must be right
        sides = [side for side in map(str.strip, _APPROXIMATELY.split(answer)) if side]
        if len(sides) > 1 or sides != [answer]:
            verdicts = [self.same_or_unread(gold, side) for side in sides]
            return True if True in verdicts else None if None in verdicts else False
        gold_sides, answer_sides = sides_of(gold), sides_of(answer)
        if len(gold_sides) > 1 and len(answer_sides) > 1:
            return self.same_equation(gold_sides, answer_sides)
        if len(gold_sides) == 1 and (value := self.value_of_formula(gold, answer_sides)) is not None:
            return self.compare(gold, value)
        if len(gold_sides) > 1 or len(answer_sides) > 1:
            filled = [[side for side in sides if side] for sides in (gold_sides, answer_sides)]
            pairs = [(left, right) for left in filled[0] for right in filled[1]]
            return bool(pairs) and self.all_same(*zip(*pairs))
        option = _OPTION_TEXT.fullmatch(answer)
        if option is not None and not is_text(option[1]):  # (D) 7
            return self.compare(gold, option[1])
        option = _OPTION_TEXT.fullmatch(gold)
        if option is not None and not is_text(option[1]):
            return self.compare(option[1], answer)
        return self.same_quantity(gold, answer)

    def compare_equality_chain(self, gold: Sequence[str], answer: Sequence[str]) -> Verdict:
        """`= 10/2 = 5`: the last is the value; what stands before it may be a formula, but no other value."""
        verdict = self.compare(gold[-1], answer[-1])
        for value in answer[:-1]:
            if re.fullmatch(
                r"[-+]?[\d.]+(?:\s|\\text\{[^{}]*\})+(?:[A-Za-z]|\\[a-z]+)\s*", value
            ):  # `p=6 q=8` is no chain
                return False
            if verdict and not self.is_formula(value):
                before = self.same_or_unread(gold[-1], value)
                verdict = False if before is False else None if before is None else verdict
        return verdict

    @staticmethod
    def value_of_formula(gold: str, answer: Sequence[str]) -> str | None:
        """5 of `m+n=5` and `5=m+n` where the gold is a constant: what was asked for and its value; None for another answer.

        `2x=5` and `x+1=5` have one unknown, and another value of it.
        """
        if len(answer) != 2:
            return None
        try:
            gold_names, left, right = (variables(read_expression(unwrap_fonts(one))) for one in (gold, *answer))
        except ParseError:
            return None
        if gold_names or min(len(left), len(right)) > 0 or max(len(left), len(right)) < 2:
            return None
        return answer[0] if left == set() else answer[1]

    @staticmethod
    def is_formula(text: str) -> bool:
        try:
            return bool(variables(read_expression(unwrap_fonts(read_quantity(text).body))))
        except ParseError:
            return True

    def same_or_unread(self, gold: str, answer: str) -> Verdict:
        try:
            return self.compare(gold, answer)
        except (UnjudgedError, ParseError, UndecidedError):
            return False

    def same_equation(self, gold: Sequence[str], answer: Sequence[str]) -> Verdict:
        """Equations are the same where the differences of their sides vanish together, those without variables side by side."""
        if len(gold) != len(answer) or not all((*gold, *answer)):
            return False
        if len(gold) > 2:
            return self.all_same(gold, answer)
        left, right = ([read_expression(side) for side in sides] for sides in (gold, answer))
        if not any(variables(side) for side in (*left, *right)):
            return any(
                all(same_value(one, two, self.mp) for one, two in zip(left, other)) for other in (right, right[::-1])
            )
        first, second = (("+", one, ("neg", two)) for one, two in (left, right))
        verdict = are_proportional(first, second, self.mp)
        if verdict is None:
            raise UndecidedError
        return verdict

    def same_quantity(self, gold: str, answer: str) -> Verdict:
        left, right = read_quantity(gold), read_quantity(answer)
        if _CODED.fullmatch(left.body) and _CODED.fullmatch(right.body):  # 2-1 is no 3-2, but 5-3 may be 2
            one, two = (canonical_spelling(side.body).strip("()") for side in (left, right))
            return one == two and (not left.unit or not right.unit or left.unit == right.unit)
        trees = [read_expression(_TEN.sub(r"\\times ", side.body)) for side in (left, right)]
        if left.unit and right.unit and left.unit.kinds != right.unit.kinds:
            kinds = {left.unit.kinds, right.unit.kinds}
            if _ANGLE not in kinds or not kinds & _WITH_DEGREES:
                return False
        trees = _convert_degrees(left, right, trees)
        if left.unit and right.unit and left.unit.kinds == right.unit.kinds and left.unit.size != right.unit.size:
            trees[1] = ("*", trees[1], ("num", right.unit.size / left.unit.size))
        readings = [(trees[0], trees[1], Fraction(1))]
        hundred: Node = ("num", Fraction(100))
        if left.percent != right.percent:
            if (right if left.percent else left).unit:  # 12 dollars are no 12 per cent
                return False
            # 50% agrees with 50 and with 0.5, but a percentage below one only with the fraction that it is
            if self.below_one(trees[0] if left.percent else trees[1]):
                readings = []
            if left.percent:
                readings.append((("/", trees[0], hundred), trees[1], Fraction(1, 100)))
            else:
                readings.append((trees[0], ("/", trees[1], hundred), Fraction(1)))
        return any(self.same_tree(one, two, left.body, scale) for one, two, scale in readings)

    def below_one(self, node: Node) -> bool:
        if variables(node):
            return False
        value = evaluate(node, {}, self.mp)
        return bool(abs(value) < 1)

    def same_tree(self, gold: Node, answer: Node, written: str, scale: Fraction) -> bool:
        if variables(gold) | variables(answer):
            verdict = same_function(gold, answer, self.mp)
            if verdict is None:
                raise UndecidedError
            return verdict
        slack = _rounding_tolerance(written)
        if slack is not None or self.tolerance is not None:
            near = self.is_within_tolerance(gold, answer, slack, scale)
            if near is not None:
                return near
        return same_value(gold, answer, self.mp)

    def is_within_tolerance(
        self, gold: Node, answer: Node, slack: tuple[Fraction, int] | None, scale: Fraction
    ) -> bool | None:
        """Within what a rounded gold, or the question, allows; None where one of the values is no real number."""
        wanted, found = (evaluate(node, {}, self.mp) for node in (gold, answer))
        exact = isinstance(found, Fraction)
        if not exact:
            if self.mp.im(found) != 0 or not self.mp.isfinite(found):
                return None
            found = self.rational(found)
        if not isinstance(wanted, Fraction):
            if self.tolerance is None or self.mp.im(wanted) != 0 or not self.mp.isfinite(wanted):
                return None
            wanted = self.rational(wanted)
        error = abs(wanted - found)
        if self.tolerance is not None:  # as the official OlympiadBench judge takes it
            return error <= Fraction(self.tolerance) * Fraction(101, 100)
        assert slack is not None
        half, digits = slack[0] * scale, slack[1]
        # a gold of few parts (0.125 is 1/8) is exact itself
        endless = (
            _is_repeating_decimal(found) and found.denominator <= wanted.denominator
            if exact
            else wanted.denominator >= _ROUNDED_PARTS
        )
        return error <= (half if endless and digits >= _ROUNDED_DIGITS else min(half, MAX_RELATIVE_ERROR * abs(wanted)))

    def rational(self, value: Any) -> Fraction:
        mantissa, exponent = self.mp.re(value).man_exp
        return Fraction(int(mantissa)) * Fraction(2) ** exponent if abs(exponent) < MAX_BITS else Fraction(0)

    def same_shape(self, gold: AnswerStructure, answer: AnswerStructure) -> Verdict:
        kinds = {gold.kind, answer.kind}
        if kinds <= {"list", "set", "item"}:
            if kinds == {"item", "set"} and gold.kind == "set":
                return False  # a set with one element is asked for as a set
            return self.match_unordered(gold.parts, answer.parts)
        if kinds == {"matrix", "group"}:  # a vector
            matrix, group = (gold, answer) if gold.kind == "matrix" else (answer, gold)
            if group.marks not in ("()", "[]") or not re.fullmatch(r"\d+|1(?:,1)*", matrix.marks):
                return False
        elif len(kinds) > 1 or gold.marks != answer.marks:
            return False
        return self.all_same(gold.parts, answer.parts)

    def all_same(self, gold: Sequence[str], answer: Sequence[str]) -> Verdict:
        if len(gold) != len(answer):
            return False
        verdicts = [self.compare(left, right) for left, right in zip(gold, answer)]
        return False if False in verdicts else None if None in verdicts else True

    def match_unordered(
        self, gold: Sequence[Any], answer: Sequence[Any], same: Callable[[Any, Any], Verdict] | None = None
    ) -> Verdict:
        """Whether the parts can be paired off, in any order; those that cannot be compared are no pair."""
        if len(gold) != len(answer) or len(gold) > MAX_PARTS:
            return False
        table = [[(same or self.same_or_unread)(left, right) for right in answer] for left in gold]
        # right where the certain pairs do; wrong where not even the uncertain ones would; else algebra must say
        if _has_perfect_matching([[verdict is True for verdict in row] for row in table]):
            return True
        return None if _has_perfect_matching([[verdict is not False for verdict in row] for row in table]) else False


def _condition_of(found: re.Match[str]) -> tuple[str, bool]:
    return found[1] or found[2], r"\mathbb{N}" in found.group()


def _same_special(gold: str, answer: str) -> Verdict:
    """Choices, words, Roman numerals, times and ratios, numbers in other bases: decided by spelling alone."""
    plain_gold, plain_answer = unwrap_fonts(gold), unwrap_fonts(answer)
    letter = _CHOICE_GOLD.fullmatch(plain_gold)
    if letter is not None:
        chosen = _CHOICE.fullmatch(plain_answer)
        if chosen is not None:
            return chosen[1] == (letter[1] or letter[2])
    if _CHOICES.fullmatch(plain_gold) and _CHOICES.fullmatch(plain_answer):
        return sorted(re.findall("[A-J]", plain_gold)) == sorted(re.findall("[A-J]", plain_answer))
    words = [_is_word(text) for text in (gold, answer)]
    if all(words) and not (looks_like_set(gold) and looks_like_set(answer)):
        cased = re.search("[a-z][A-Z]", f"{plain_gold} {plain_answer}")  # AaBb is no AABB
        return _fold(plain_gold) == _fold(plain_answer) and (
            not cased or canonical_spelling(gold) == canonical_spelling(answer)
        )
    if _ROMAN.fullmatch(plain_gold) and _ROMAN.fullmatch(plain_answer):
        return plain_gold == plain_answer
    bases = [_base(text) for text in (plain_gold, plain_answer)]
    if any(bases):
        return bases[0] == bases[1]
    # 3:30 p.m. and 3:30pm, 1:2 and 1 : 2
    if re.search(r"\d\s*:\s*\d", plain_gold) or re.search(r"\d\s*:\s*\d", plain_answer):
        times = [re.sub(r"[\s.]+", "", text).casefold() for text in (plain_gold, plain_answer)]
        return times[0] == times[1]
    return None


def _base(text: str) -> tuple[str, str] | None:
    """Digits and base of `413_6`, `413_{\text{six}}` or `413 base 6`."""
    found = _BASE.fullmatch(text.strip())
    if found is None or not found[1][0].isdigit():
        return None
    size = _BASES.get(found[2], found[2])
    return (found[1], size) if size.isdigit() else None


def _is_word(text: str) -> bool:
    """Whether letters are a word and not a product of variables: font commands say so, their number, or "no" and "on"."""
    plain = unwrap_fonts(text)
    return is_text(text) and (len(plain) > (1 if "{" in text else 2) or plain.casefold() in ("no", "on"))


def _fold(text: str) -> str:
    return re.sub(r"[\s\-]+", " ", text).strip().casefold().removeprefix("the ")


def _assignments(shape: AnswerStructure) -> list[tuple[str, str]] | None:
    """Names and values of a list that has names: `n=7, 3, 5` gives all of them the first; None where there are none."""
    if shape.kind != "list":
        return None
    found: list[tuple[str, str]] = []
    for part in shape.parts:
        name, values = split_assignment(part)
        if len(split_list(part)) > 1 or (not name and (not found or "=" in part)):
            return None
        found.append((canonical_spelling(name) or found[-1][0], values[-1]))
    return found


def _assigned_tuple(shape: AnswerStructure) -> list[tuple[str, str]] | None:
    """Names and values of `(a,b)=(1,2)`."""
    name, values = split_assignment(shape.parts[0]) if shape.kind == "item" else ("", [""])
    names, inner = read_shape(name), read_shape(values[-1])
    if names.kind != "group" or inner.kind != "group" or len(names.parts) != len(inner.parts):
        return None
    return [(canonical_spelling(one), value) for one, value in zip(names.parts, inner.parts)]


def _convert_degrees(gold: Quantity, answer: Quantity, trees: list[Node]) -> list[Node]:
    """Degrees as radians where the other side is in radians, by its unit or because it has no unit and holds pi."""
    sides = (gold, answer)
    degrees = [side.unit is not None and side.unit.kinds == _ANGLE for side in sides]
    if sum(degrees) != 1:
        return trees
    index = degrees.index(True)
    other, tree = sides[1 - index], trees[1 - index]
    radians = other.unit is not None and other.unit.kinds == (("radian", 1),)
    if radians or (other.is_bare_number and ("const", "pi") in walk(tree)):
        trees[index] = ("/", ("*", trees[index], ("const", "pi")), ("num", Fraction(180)))
    return trees


def _rounding_tolerance(body: str) -> tuple[Fraction, int] | None:
    """Half a unit of the last digit of a rounded decimal, and its number of digits; None for anything else."""
    match = _DECIMAL.fullmatch(body)
    if match is None:
        return None
    exponent = match["e"] or match["ten"]  # both written: 4.5e33 and 4.5 \times 10^{33}
    power = int(exponent.replace(" ", "")) if exponent else 0
    if abs(power) > 1000:
        return None
    mantissa = match["mantissa"]
    decimals = len(mantissa.partition(".")[2])
    # 27.0 and 27. are the integer; with an exponent the digits are those that were measured
    if exponent is None and Fraction(mantissa if mantissa[-1] != "." else mantissa[:-1]).denominator == 1:
        return None
    return Fraction(10) ** (power - decimals) / 2, len(mantissa.replace(".", "").lstrip("0"))


def _is_repeating_decimal(value: Fraction) -> bool:
    """Whether the decimal of a rational number never ends: its denominator divides no power of ten."""
    return pow(10, value.denominator.bit_length(), value.denominator) != 0


def _has_perfect_matching(allowed: list[list[bool]]) -> bool:
    """Whether every left part gets a right one of its own."""
    taken = {0}  # the sets of right parts, as bits, that the left parts so far can have
    for row in allowed:
        free = [1 << right for right, fits in enumerate(row) if fits]
        taken = {before | one for before in taken for one in free if not before & one}
    return bool(taken)
