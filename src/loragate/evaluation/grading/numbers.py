r"""Exact arithmetic on answers that are numbers, in every notation.

`read_number` evaluates sums, products, quotients, powers, factorials, mixed numbers, percentages and scientific
notation over the rationals, without rounding. Anything else (a root, a variable, a constant) is not its business and
gives None.

Tolerance of `same_number`: none, unless the gold is itself a rounded decimal (`0.1429`, `4.5e33`, `6.6\times 10^{-34}`).
Then an answer is right that is off by at most 1e-4 of the gold and rounds to it, i.e. is also off by at most half a
unit of the gold's last digit. `27.0` is an integer, not a rounded decimal.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import factorial

RELATIVE = Fraction(1, 10_000)
MAX_BITS = 20_000

_LITERAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>{_LITERAL}(?:[eE](?:[+-]?\d+|\{{[+-]?\d+\}}))?)|(?P<op>\\times|\\cdot|\\div|\\frac|[-+*/^!(){{}}]))"
)
_PYTHON = {"{": "[", "}": "]", "^": "**", r"\times": "*", r"\cdot": "*", r"\div": "/", r"\frac": "F", "!": ".f"}
# \frac12 and \frac{1}2 with their braces, and the sum that an integer directly before a fraction stands for: 3\frac{1}{2}, 3 1/2
_SPELT_OUT = (
    (re.compile(r"\\frac\s*(\d)"), r"\\frac{\1}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"(?<![\d.^eE])(?<![eE][-+])(\d+)\s*(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})"), r"{\1+\2}"),
    (re.compile(r"(?<![\d.^eE])(\d+)\s+(\d+\s*/\s*\d+)(?![\d.])"), r"{\1+\2}"),
)
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
    percent = re.search(r"\\?%$", body)
    if percent is not None:
        body = body[: percent.start()].strip()
    if not body or len(body) > 400:
        return None
    body = re.sub(r"(?<=[\d.])\s*[xX]\s*(?=10\s*\^)", r"\\times ", body)
    try:
        value = _evaluate(body)
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
    exponent = match["e"] or match["ten"]
    power = int(exponent.replace(" ", "")) if exponent else 0
    if abs(power) > 1000:
        return None
    mantissa = match["mantissa"]
    decimals = len(mantissa.partition(".")[2])
    if exponent is None and Fraction(mantissa if mantissa[-1] != "." else mantissa[:-1]).denominator == 1:
        return None
    return Fraction(10) ** (power - decimals) / 2


def _evaluate(text: str) -> Fraction:
    """The value of an arithmetic expression, which Python's own parser takes apart.

    Numbers go in as names, as Python would round them; braces as the brackets of a list, or of an index after a fraction's F; a
    factorial as an attribute, which binds as closely.
    """
    for pattern, spelling in _SPELT_OUT:
        text = pattern.sub(spelling, text)
    numbers: list[Fraction] = []
    python, before, position = "", "", 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _NotANumberError
        token, position = match["op"], match.end()
        if token in ("(", r"\frac") and before in ("number", ")", "}", "!"):
            python += "*"
        if token is None:
            python, token = f"{python} n{len(numbers)}", "number"
            numbers.append(_decimal(match["number"]))
        else:
            python += f" {_PYTHON.get(token, token)}"
        before = token
    try:
        return _value(ast.parse(python.strip(), mode="eval").body, numbers)
    except (SyntaxError, MemoryError, RecursionError):
        raise _NotANumberError from None


def _value(node: ast.expr, numbers: Sequence[Fraction]) -> Fraction:
    match node:
        case ast.Name(id=name) if name != "F":
            return numbers[int(name[1:])]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, numbers)
        case ast.BinOp(left=left, op=operator, right=right):
            value = _OPERATORS[type(operator)](_value(left, numbers), _value(right, numbers))
            if value.numerator.bit_length() + value.denominator.bit_length() > 2 * MAX_BITS:
                raise _NotANumberError
            return value
        case ast.Attribute(value=inside):
            return _factorial(_value(inside, numbers))
        case ast.List(elts=[inside]):
            return _value(inside, numbers)
        case ast.Subscript(value=ast.Subscript(value=ast.Name(id="F"), slice=top), slice=bottom):
            return _divide(_value(top, numbers), _value(bottom, numbers))
    raise _NotANumberError


def _decimal(text: str) -> Fraction:
    text = re.sub("[{}]", "", text)
    if abs(int(text.lower().partition("e")[2] or 0)) > 5000:
        raise _TooLargeError
    return Fraction(text)


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise _NotANumberError
    if value > 1500:
        raise _TooLargeError
    return Fraction(factorial(int(value)))


def _divide(top: Fraction, bottom: Fraction) -> Fraction:
    if bottom == 0:
        raise _NotANumberError
    return top / bottom


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise _NotANumberError
    size = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if abs(base) not in (0, 1) and abs(exponent) * size > MAX_BITS:
        if base.denominator == 1 and exponent > 0:
            raise _TooLargeError
        raise _NotANumberError
    return base ** int(exponent) if abs(base) != 1 else base ** (int(exponent) % 2)


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.Pow: _power,
}
