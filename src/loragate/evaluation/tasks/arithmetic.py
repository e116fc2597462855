"""A suite of exact arithmetic that no model can have seen: every question is made from a seed.

Published test sets leak into training data; a seed chosen at run time gives questions that did not exist before. Seven
kinds at three levels follow one another in turn, so any first N are balanced. Answers are exact by construction, in
integers and fractions.

    expression   integers with + - * // and brackets      fractions    sums and products of fractions
    modular      remainders of powers and products        comparison   the largest of a few fractions
    base         numbers in bases 2 to 9                  linear       one or two linear equations
    ages         short stories about ages
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from numpy import base_repr

from loragate.errors import DataError

LEVELS = (1, 2, 3)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jan", "Kofi", "Lea", "Mona", "Nils")
# draws in a row that may repeat a question before the kind counts as used up
_FRUITLESS_DRAWS = 2_000
_LARGEST_VALUE = 10**7

Draw = tuple[str, Fraction | int | str]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` different questions: {id, question, answer, kind, level, seed}, the kinds and levels in turn.

    Raises:
        DataError: if a kind has fewer different questions than are wanted.
    """
    cells = [(kind, level) for level in LEVELS for kind in KINDS]
    # a stream for each: the first rows are the same however many are wanted
    streams = {cell: random.Random(f"arithmetic/{seed}/{cell[0]}/{cell[1]}") for cell in cells}
    seen: set[str] = set()
    items = []
    for position in range(count):
        kind, level = cell = cells[position % len(cells)]
        for _ in range(_FRUITLESS_DRAWS):
            question, answer = KINDS[kind](streams[cell], level)
            if question not in seen:
                break
        else:
            raise DataError(f"no new '{kind}' question of level {level} after {position}; ask for fewer than {count}")
        seen.add(question)
        items.append(
            {
                "id": f"{kind}-{level}-{seed}-{position}",
                "question": question,
                "answer": str(answer),
                "kind": kind,
                "level": level,
                "seed": seed,
            }
        )
    return items


def _expression(rng: random.Random, level: int) -> Draw:
    while True:
        text, value, _ = _random_expression(rng, (2, 4, 7)[level - 1], (20, 50, 99)[level - 1])
        if abs(value) <= _LARGEST_VALUE:
            hint = " Here // divides and rounds down to the next integer." if "//" in text else ""
            return f"Compute {text}.{hint}", value


def _random_expression(rng: random.Random, operators: int, largest: int) -> tuple[str, int, int]:
    """(text, value, binding strength) of a random expression with exactly `operators` operators."""
    if operators == 0:
        value = rng.randint(2, largest)
        return str(value), value, 3
    before = rng.randint(0, operators - 1)  # of the operators that are left after this one
    left, a, left_strength = _random_expression(rng, before, largest)
    right, b, right_strength = _random_expression(rng, operators - 1 - before, largest)
    # a divisor of at least 2, so that neither zero nor the rounding of negative divisors comes up
    operator = rng.choice(("+", "-", "*", "//") if b > 1 else ("+", "-", "*"))
    value = a + b if operator == "+" else a - b if operator == "-" else a * b if operator == "*" else a // b
    strength = 1 if operator in "+-" else 2
    # operators group from the left, so an equally strong right side needs brackets
    left = f"({left})" if left_strength < strength else left
    right = f"({right})" if right_strength <= strength else right
    return f"{left} {operator} {right}", value, strength


def _modular(rng: random.Random, level: int) -> Draw:
    modulus = rng.randint(3, (12, 50, 200)[level - 1])
    base, exponent = rng.randint(2, (12, 40, 99)[level - 1]), rng.randint(2, (5, 12, 40)[level - 1])
    c, d = rng.randint(2, 99), rng.randint(2, 99)
    value = pow(base, exponent, modulus) + c * d
    return f"What is the remainder when {base}^{exponent} + {c} * {d} is divided by {modulus}?", value % modulus


def _fractions(rng: random.Random, level: int) -> Draw:
    first = _fraction(rng, 9)
    text, value = str(first), first
    for step in range(level):
        term = _fraction(rng, (9, 12, 16)[level - 1])
        # one product at the end would bind tighter than the sum before it, so it is bracketed
        operator = rng.choice("+-") if step < level - 1 else rng.choice("+-*")
        if operator == "*" and step:
            text = f"({text})"
        text += f" {operator} {term}"
        value = value + term if operator == "+" else value - term if operator == "-" else value * term
    return f"Compute {text}. Give the result as a reduced fraction or an integer.", value


def _comparison(rng: random.Random, level: int) -> Draw:
    found: set[Fraction] = set()
    near = rng.randint(2, 8)
    while len(found) < level + 1:
        denominator = rng.randint(5, (15, 30, 60)[level - 1])
        # numerators around one share keep the fractions close to one another
        numerator = denominator * near // 10 + rng.randint(0, 2)
        if 0 < numerator < denominator:
            found.add(Fraction(numerator, denominator))
    shuffled = sorted(found)
    rng.shuffle(shuffled)
    listed = ", ".join(map(str, shuffled[:-1])) + f" and {shuffled[-1]}"
    return f"Which of these fractions is the largest: {listed}? Answer with that fraction.", max(found)


def _base(rng: random.Random, level: int) -> Draw:
    value, target = rng.randint(20, (200, 2_000, 20_000)[level - 1]), rng.randint(2, 9)
    if level == 1:
        return f"Write the decimal number {value} in base {target}. Give the digits only.", base_repr(value, target)
    if level == 2:
        return f"The digits {base_repr(value, target)} are a number in base {target}. Write it in base ten.", value
    source = rng.choice([base for base in range(2, 10) if base != target])
    text = f"The digits {base_repr(value, source)} are a number in base {source}. Write it in base {target}."
    return f"{text} Give the digits only.", base_repr(value, target)


def _linear(rng: random.Random, level: int) -> Draw:
    if level < 3:
        a, c = rng.sample(range(2, (9, 25)[level - 1]), 2)
        b = rng.randint(-30, 30)
        x = Fraction(rng.randint(-20, 20), 1 if level == 1 else rng.randint(1, 6))
        # the constant on the right is chosen so that x solves the equation
        if (d := (a - c) * x + b).denominator != 1:
            return _linear(rng, level)
        return f"Solve for x: {a}x {_signed(b)} = {c}x {_signed(d)}.", x
    p, q = rng.randint(-15, 15), rng.randint(-15, 15)
    a, b, c, e = (rng.randint(2, 12) for _ in range(4))
    if a * e == b * c:  # no single solution
        return _linear(rng, level)
    equations = f"{a}x + {b}y = {a * p + b * q} and {c}x + {e}y = {c * p + e * q}"
    return f"The numbers x and y satisfy {equations}. What is 10x + y?", 10 * p + q


def _ages(rng: random.Random, level: int) -> Draw:
    older, younger = rng.sample(NAMES, 2)
    if level == 1:
        age, gap = rng.randint(3, 40), rng.randint(2, 30)
        story = f"{older} is {gap} years older than {younger}. Together they are {2 * age + gap} years old."
        return f"{story} How old is {younger}?", age
    now = rng.randint(3, 6)
    if level == 2:
        age, years = rng.randint(3, 15), rng.randint(2, 20)
        total = (now + 1) * age + 2 * years
        story = f"{older} is {now} times as old as {younger}. In {years} years their ages will add up to {total}."
        return f"{story} How old is {older} now?", now * age
    later, unit = rng.randint(2, now - 1), rng.randint(2, 9)
    # now * age + years = later * (age + years) holds for age = (later - 1) u and years = (now - later) u
    age, years, past = (later - 1) * unit, (now - later) * unit, rng.randint(2, unit)
    story = f"{past} years ago {older} was {now} times as old as {younger}. Counted from then,"
    story += f" {older} is {later} times as old as {younger} after {years} years."
    return f"{story} What is the sum of their ages today?", (now + 1) * age + 2 * past


KINDS: dict[str, Callable[[random.Random, int], Draw]] = {
    "expression": _expression,
    "modular": _modular,
    "fractions": _fractions,
    "comparison": _comparison,
    "base": _base,
    "linear": _linear,
    "ages": _ages,
}


def _fraction(rng: random.Random, largest: int) -> Fraction:
    while True:
        value = Fraction(rng.randint(1, 2 * largest), rng.randint(2, largest))
        if value.denominator > 1:
            return value


def _signed(value: Fraction | int) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value)}"
