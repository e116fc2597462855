r"""Exact arithmetic on answers that are numbers, in every notation.

`read_number` evaluates sums, products, quotients, powers, factorials, mixed numbers, percentages and scientific
notation over the rationals, without rounding. Anything else (a root, a variable, a constant) is not its business and
gives None.

Tolerance of `same_number`: none, unless the gold is itself a rounded decimal (`0.1429`, `4.5e33`, `6.6\times 10^{-34}`).
Then an answer is right that is off by at most 1e-4 of the gold and rounds to it, i.e. is also off by at most half a
unit of the gold's last digit. `27.0` is an integer, not a rounded decimal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import factorial

RELATIVE = Fraction(1, 10_000)
MAX_BITS = 20_000  # of a numerator or denominator, some 6,000 digits

_LITERAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>{_LITERAL}(?:[eE](?:[+-]?\d+|\{{[+-]?\d+\}}))?)|(?P<op>\\times|\\cdot|\\div|\\frac|[-+*/^!(){{}}]))"
)
# the one form that `Number.slack` is read from: a decimal alone, or times a power of ten
_TIMES_TEN = r"\s*(?:\\times|\\cdot|\*|[xX])\s*10\s*\^\s*"
_DECIMAL = re.compile(
    rf"[-+]?\s*(?P<mantissa>{_LITERAL})(?:[eE]\{{?(?P<e>[+-]?\d+)\}}?|{_TIMES_TEN}\{{?\s*(?P<ten>[+-]?\s*\d+)\s*\}}?)?"
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+|(?: \d{3})+)(?![\d,])(?=\.\d|[^.]|$)")


@dataclass(frozen=True)
class Number:
    """A rational number as it was written.

    Attributes:
        value: its exact value, before a percent sign is applied; None for one too large to write out.
        percent: whether a percent sign follows.
        slack: half a unit of the last digit where it is written as a rounded decimal, else None.
    """

    value: Fraction | None
    percent: bool = False
    slack: Fraction | None = None


class _NotANumberError(Exception):
    pass


class _TooLargeError(Exception):
    pass


def read_number(text: str) -> Number | None:
    """Return the number that `text` (normalised, without fonts) writes, or None where it is not arithmetic."""
    body = text.strip()
    if not any(bracket in body for bracket in "()[]"):  # which would make 10,080 a list
        body = _THOUSANDS.sub(lambda match: match.group(1) + re.sub(r"[ ,]", "", match.group(2)), body)
    percent = re.search(r"\\?%$", body)  # `50%` and LaTeX's `50\%`
    if percent is not None:
        body = body[: percent.start()].strip()
    if not body or len(body) > 400:
        return None
    body = re.sub(r"(?<=[\d.])\s*[xX]\s*(?=10\s*\^)", r"\\times ", body)
    try:
        value = _Reader(body).read()
    except _NotANumberError:
        return None
    except _TooLargeError:
        return Number(None)
    return Number(value, percent is not None, _slack(body))


def same_number(gold: Number, answer: Number, tolerance: float | None = None) -> bool | None:
    """Whether `answer` is right where `gold` is; None where both are too large to be written out.

    A percent sign on one side only may mean either reading: `50%` agrees with 50 and with 0.5,
    but a percentage below one only with the fraction it is (`0.25%` is not 0.25). `tolerance` is an
    absolute error, taken as the official OlympiadBench judge takes it (times 1.01); it replaces the rule for decimals.
    """
    if gold.value is None or answer.value is None:
        return None if gold.value is answer.value else False
    pairs = [(gold.value, answer.value, gold.slack)]
    if gold.percent != answer.percent and abs(gold.value if gold.percent else answer.value) < 1:
        pairs = []
    if gold.percent and not answer.percent:
        pairs.append((gold.value / 100, answer.value, gold.slack and gold.slack / 100))
    if answer.percent and not gold.percent:
        pairs.append((gold.value, answer.value / 100, gold.slack))
    return any(_close(*pair, tolerance) for pair in pairs)


def _close(gold: Fraction, answer: Fraction, slack: Fraction | None, tolerance: float | None) -> bool:
    error = abs(gold - answer)
    if tolerance is not None:
        return error <= Fraction(tolerance) * Fraction(101, 100)
    return error <= (0 if slack is None else min(slack, RELATIVE * abs(gold)))


def _slack(body: str) -> Fraction | None:
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
    return Fraction(10) ** (power - decimals) / 2


class _Reader:
    """Recursive descent over the tokens of one arithmetic expression."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.spaced: list[bool] = []  # whether a blank stands before the token: "3 1/2" is mixed, "31/2" is not
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _NotANumberError
            self.tokens.append(match["number"] or match["op"])
            self.spaced.append(text[position] == " ")
            position = match.end()
        self.at = self.depth = 0

    def read(self) -> Fraction:
        value = self.sum()
        if self.at != len(self.tokens):
            raise _NotANumberError
        return value

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def accept(self, *expected: str) -> str:
        """The next token, behind which reading goes on, where it is one of these; else nothing."""
        token = self.peek()
        if not token or token not in expected:
            return ""
        self.at += 1
        return token

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > 50:  # brackets in brackets; Python's own stack would end much later
            raise _NotANumberError
        value = self.product()
        while sign := self.accept("+", "-"):
            term = self.product()
            value += term if sign == "+" else -term
        self.depth -= 1
        return value

    def product(self) -> Fraction:
        factor = 1
        while sign := self.accept("+", "-"):
            factor *= 1 if sign == "+" else -1
        value = self.mixed()
        while True:
            if self.accept("*", r"\times", r"\cdot"):
                value *= self.signed(self.mixed)
            elif self.accept("/", r"\div"):
                value = _divide(value, self.signed(self.mixed))
            elif self.peek() in ("(", r"\frac"):  # a product without a sign
                value *= self.power()
            else:
                return factor * value
            if value.numerator.bit_length() + value.denominator.bit_length() > 2 * MAX_BITS:
                raise _NotANumberError

    def signed(self, part: Callable[[], Fraction]) -> Fraction:
        return -part() if self.accept("-") else part()

    def mixed(self) -> Fraction:
        """An integer directly before a fraction is added to it: 3\\frac{1}{2}, 3 1/2."""
        first, top, slash, bottom = (*self.tokens[self.at : self.at + 4], "", "", "", "")[:4]  # fewer at the end
        if first.isdigit():
            if top == r"\frac":
                self.at += 1
                return Fraction(first) + self.power()
            if slash == "/" and top.isdigit() and bottom.isdigit() and self.spaced[self.at + 1]:
                self.at += 4
                return Fraction(first) + _divide(Fraction(top), Fraction(bottom))
        return self.power()

    def power(self) -> Fraction:
        base = self.atom()
        while self.accept("!"):
            if base.denominator != 1 or base < 0:
                raise _NotANumberError
            if base > 1500:
                raise _TooLargeError
            base = Fraction(factorial(int(base)))
        # the exponent is a power again, as ^ groups from the right
        return _power(base, self.signed(self.power)) if self.accept("^") else base

    def atom(self) -> Fraction:
        for opening, closing in ("()", "{}"):
            if self.accept(opening):
                value = self.sum()
                if not self.accept(closing):
                    raise _NotANumberError
                return value
        if self.accept(r"\frac"):
            top = self.argument()
            return _divide(top, self.argument())
        token = self.peek()
        if not re.match(r"[\d.]", token):
            raise _NotANumberError
        self.at += 1
        mantissa, _, exponent = token.lower().partition("e")
        power = int(exponent.strip("{}")) if exponent else 0
        if abs(power) > 5000:
            raise _TooLargeError
        return Fraction("0" + mantissa.removesuffix(".")) * Fraction(10) ** power

    def argument(self) -> Fraction:
        r"""One argument of \frac: a group, or a single digit of what follows (`\frac12`)."""
        token = self.peek()
        if token == "{":
            return self.atom()
        if not token.isdigit():
            raise _NotANumberError
        if len(token) > 1:  # the rest is the next argument, or a factor
            self.tokens[self.at] = token[1:]
        else:
            self.at += 1
        return Fraction(token[0])


def _divide(top: Fraction, bottom: Fraction) -> Fraction:
    if bottom == 0:
        raise _NotANumberError
    return top / bottom


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise _NotANumberError
    # bits of the result, before it is worked out
    size = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and abs(exponent) * size > MAX_BITS:
        if base.denominator == 1 and exponent > 0:
            raise _TooLargeError
        raise _NotANumberError
    return base ** int(exponent) if abs(base) != 1 else base ** (int(exponent) % 2)
