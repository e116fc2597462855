r"""The value of an expression, with bounded work, and whether two expressions are equal.

Arithmetic is exact over the rationals as long as the numbers stay below `MAX_BITS`. Roots, logarithms and the like need the
arithmetic of mpmath, which is handed in; without it they raise `MpmathRequiredError`. Two values are the same if their
difference vanishes as the precision rises. There is no absolute floor, so that 1/1607! and 1/1608! differ, and a term too
small or too large for the precision is noticed. Nothing grows beyond a bound before it is worked out: a tower of powers raises
`UndecidedError` at once.

Expressions with variables are compared at fixed rational points, equations by whether the ratio of what they set to zero is the
same at all points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import ceil, comb, factorial, floor, gcd, isqrt, lcm
from typing import Any

from loragate.evaluation.grading.expression import Node, variables, walk

Value = Any  # Fraction, or a real or complex number of mpmath
MAX_BITS = 100_000  # of a numerator or denominator that is written out, some 30,000 digits
MAX_FACTORIAL = 5000
MAX_STEPS = 12_000  # operations for one value
MAX_TERMS = 2000  # of a finite sum
MAX_EXTRAPOLATED = 200  # terms of an infinite one, from which its limit is extrapolated; what converges needs no more
_EXACT: dict[str, Callable[[list[Fraction]], Fraction | int]] = {
    "min": min,
    "max": max,
    "abs": lambda values: abs(values[0]),
    "floor": lambda values: floor(values[0]),
    "ceil": lambda values: ceil(values[0]),
}
_ROUNDED = 12  # digits that may be lost to rounding
_MAGNITUDE = 40  # bits of the largest exponent
# decimal digits at which a difference is seen; the second pair where the first loses a term
_PRECISIONS = ((40, 160), (800, 2400))
_OF_SERIES = ((18, 40),)  # whose digits are dear
# values of up to six variables: awkward fractions, so that no two different expressions meet there by accident; small ones
# for functions of limited domain; and whole numbers, for sums and the like
_POINTS = (
    ("7/5", "11/13", "23/17", "31/11", "13/29", "37/19"),
    ("5/7", "17/11", "9/23", "41/29", "8/13", "3/19"),
    ("29/9", "19/6", "43/13", "25/7", "51/16", "33/8"),
    ("3/31", "2/37", "5/41", "1/23", "4/53", "6/61"),
    ("3", "5", "2", "7", "4", "6"),
    ("6", "2", "5", "3", "8", "4"),
    ("4", "7", "3", "5", "9", "2"),
)
_STEPS = 40  # whole numbers at which functions with steps are compared as well
_NEEDED = 3  # points at which both sides have a value


class MpmathRequiredError(Exception):
    """The value is no rational number, and no other arithmetic is at hand."""


class UndecidedError(Exception):
    """The value is not defined, or too large to be worked out."""


def evaluate(node: Node, point: dict[str, Value], mp: Any = None) -> Value:
    """The value of `node` where its variables are those of `point`.

    Raises:
        MpmathRequiredError: without `mp`, where the value is not rational.
        UndecidedError: for what has no value, or would take too long.
    """
    return _Evaluation(point, mp).of(node)


def same_value(left: Node, right: Node, mp: Any = None, point: dict[str, Fraction] | None = None) -> bool:
    """Whether two expressions have the same value; raises as `evaluate`."""
    endless = any(node[0] == "sum" and node[3] == ("const", "inf") for side in (left, right) for node in walk(side))
    precisions = _OF_SERIES if endless else _PRECISIONS
    return _vanishes(lambda run: [(run(left, point or {}), run(right, point or {}))], mp, precisions)


def same_function(left: Node, right: Node, mp: Any = None) -> bool | None:
    """Whether two expressions in variables agree wherever both have a value; None where they have too few in common.

    Raises:
        MpmathRequiredError: as `evaluate`.
    """
    agreed = 0
    called = {node[1] for side in (left, right) for node in walk(side) if node[0] == "call"}
    names = variables(left) | variables(right)
    for point in points(names, "abs" in called, stepped=bool(called & {"floor", "ceil", "gcd", "lcm", "max", "min"})):
        try:
            if not same_value(left, right, mp, point):
                return False
        except UndecidedError:
            continue
        agreed += 1
    return True if agreed >= _NEEDED else None


def are_proportional(left: Node, right: Node, mp: Any = None) -> bool | None:
    """Whether one expression is a constant multiple of the other, so that both vanish together; None where too few points show it.

    Raises:
        MpmathRequiredError: as `evaluate`.
    """
    if variables(left) != variables(right) or not variables(left):
        return False
    kept: dict[str, Fraction] | None = None
    agreed = 0
    for point in points(variables(left), True):
        try:
            if kept is None:
                if same_value(left, ("num", Fraction(0)), mp, point):
                    continue
                kept = point
                continue
            first = kept
            if not _vanishes(
                lambda run: [(run(left, point) * run(right, first), run(left, first) * run(right, point))],  # noqa: B023
                mp,
            ):
                return False
        except UndecidedError:
            continue
        agreed += 1
    if kept is None or agreed < _NEEDED:
        return None
    return not same_value(right, ("num", Fraction(0)), mp, kept)


def points(names: set[str], with_negative: bool, stepped: bool = False) -> Iterator[dict[str, Fraction]]:
    """Where expressions in these variables are compared; a seventh variable begins the row again, one higher.

    Functions that rise in steps agree at many places by accident, so all small whole numbers follow for them.
    """
    for sign in (1, -1) if with_negative else (1,):
        for row in _POINTS[:: 1 if sign > 0 else 2]:
            yield {name: sign * (Fraction(row[i % len(row)]) + i // len(row)) for i, name in enumerate(sorted(names))}
    for whole in range(1, _STEPS + 1) if stepped else ():
        yield {name: Fraction(1 + (whole * (2 * i + 1)) % _STEPS) for i, name in enumerate(sorted(names))}


Run = Callable[[Node, dict[str, Any]], Value]


def _vanishes(
    pairs: Callable[[Run], list[tuple[Value, Value]]], mp: Any, precisions: Sequence[tuple[int, int]] = _PRECISIONS
) -> bool:
    """Whether both values of every pair are the same, seen at two precisions."""
    if mp is None:
        return all(left == right for left, right in pairs(lambda node, point: evaluate(node, point)))
    for low, high in precisions:
        seen, lost = [], []
        for digits in (low, high):
            with mp.workdps(digits):
                run = _Evaluation({}, mp)
                differences = []
                for left, right in pairs(lambda node, point: run.at(point).of(node)):  # noqa: B023
                    size = max(abs(_float(left, mp)), abs(_float(right, mp)))
                    exact = isinstance(left, Fraction) and isinstance(right, Fraction)
                    if mp.isinf(size) or mp.isnan(size):
                        differences.append((mp.mpf(0) if left == right else mp.mpf(1), mp.mpf(1), True))
                    else:
                        gap = left - right if exact else _float(left, mp) - _float(right, mp)
                        differences.append((abs(_float(gap, mp)), size, exact))
                seen.append(differences)
                lost.append(run.absorbed)
        with mp.workdps(high):
            for (first, _, _), (second, size, exact) in zip(*seen):
                # rounding shrinks as the precision rises, a difference does not
                shrinks = first > 0 and second <= first * mp.mpf(10) ** -(high - low - _ROUNDED)
                if second and (exact or not (shrinks or second <= size * mp.mpf(10) ** -(high - _ROUNDED))):
                    return False
        if not any(abs(one - other) <= 2 for one in lost[0] for other in lost[1]):
            return True
    raise UndecidedError


def alike(values: Sequence[Value], mp: Any) -> list[Value]:
    """The values, all rational or all numbers of mpmath."""
    return (
        list(values)
        if all(isinstance(value, Fraction) for value in values)
        else [_float(value, mp) for value in values]
    )


def _float(value: Value, mp: Any) -> Value:
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


class _Evaluation:
    """Values at one point; counts its steps, and keeps the magnitudes of terms that a sum was too coarse for."""

    def __init__(self, point: dict[str, Value], mp: Any) -> None:
        self.point, self.mp = point, mp
        self.steps = 0
        self.absorbed: list[int] = []

    def at(self, point: dict[str, Value]) -> _Evaluation:
        self.point, self.steps = point, 0
        return self

    def spend(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise UndecidedError

    def of(self, node: Node) -> Value:
        self.spend()
        match node:
            case ("num", value):
                return value
            case ("sym", name):
                if name not in self.point:
                    raise UndecidedError
                return self.point[name]
            case ("const", name):
                self.need_algebra()
                return {"pi": +self.mp.pi, "e": +self.mp.e, "i": self.mp.j, "inf": self.mp.inf}[name]
            case ("neg", inner):
                return -self.of(inner)
            case ("+", left, right):
                return self.add(self.of(left), self.of(right))
            case ("*", left, right):
                return self.exact_or(self.of(left), self.of(right), lambda a, b: a * b)
            case ("/", left, right):
                top, bottom = self.of(left), self.of(right)
                if bottom == 0:
                    raise UndecidedError
                return self.exact_or(top, bottom, lambda a, b: a / b)
            case ("^", left, right):
                return self.power(self.of(left), self.of(right))
            case ("sum" | "prod" as kind, name, low, high, body):
                return self.series(kind, name, self.of(low), high, body)
            case ("call", function, *arguments):
                return self.call(function, [self.of(argument) for argument in arguments])
        raise UndecidedError

    def need_algebra(self) -> None:
        if self.mp is None:
            raise MpmathRequiredError

    def exact_or(self, left: Value, right: Value, operation: Callable[[Value, Value], Value]) -> Value:
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            bits = sum(abs(part).bit_length() for value in (left, right) for part in value.as_integer_ratio())
            if bits <= MAX_BITS:
                self.spend(bits >> 9)
                return operation(left, right)
            self.need_algebra()
        value = operation(_float(left, self.mp), _float(right, self.mp))
        if self.mp.isnan(value):
            raise UndecidedError
        return value

    def add(self, left: Value, right: Value) -> Value:
        total = self.exact_or(left, right, lambda a, b: a + b)
        if not isinstance(total, Fraction):
            large, small = sorted((abs(_float(left, self.mp)), abs(_float(right, self.mp))), reverse=True)
            if small and not self.mp.isinf(large) and self.mp.mag(small) < self.mp.mag(large) - self.mp.prec + 30:
                self.absorbed.append(int(self.mp.mag(small)))
        return total

    def power(self, base: Value, exponent: Value) -> Value:
        exact = isinstance(base, Fraction) and isinstance(exponent, Fraction)
        if base == 0:
            if isinstance(exponent, Fraction) and exponent > 0:
                return Fraction(0)
            raise UndecidedError
        if exact and exponent.denominator == 1:
            bits = max(abs(part).bit_length() for part in base.as_integer_ratio())
            if abs(base) == 1:
                return base ** (int(exponent) % 2)
            if abs(exponent) * bits <= MAX_BITS:
                return base ** int(exponent)
        if exact and base > 0 and 2 <= exponent.denominator <= 64:
            root = _exact_root(base, exponent.denominator)
            if root is not None:
                return self.power(root, Fraction(exponent.numerator))
        self.need_algebra()
        base, exponent = _float(base, self.mp), _float(exponent, self.mp)
        if self.mp.isinf(base) or self.mp.isinf(exponent) or (self.mp.mag(exponent) > _MAGNITUDE):
            raise UndecidedError
        if self.mp.mag(exponent * self.mp.log(base)) > _MAGNITUDE:
            raise UndecidedError
        return self.mp.power(base, exponent)

    def series(self, kind: str, name: str, low: Value, high_node: Node, body: Node) -> Value:
        outer, terms, most = self.point, 0, MAX_TERMS

        def term(index: Value) -> Value:
            nonlocal terms
            terms += 1
            if terms > most:
                raise UndecidedError
            self.point = {**outer, name: index}
            try:
                return self.of(body)
            finally:
                self.point = outer

        if high_node == ("const", "inf"):
            self.need_algebra()
            if kind == "prod" or not isinstance(low, Fraction) or low.denominator != 1:
                raise UndecidedError
            most = MAX_EXTRAPOLATED
            try:
                return self.mp.nsum(lambda index: _float(term(Fraction(int(index))), self.mp), [int(low), self.mp.inf])
            except (ValueError, ZeroDivisionError, OverflowError, self.mp.NoConvergence) as error:
                raise UndecidedError from error
        high = self.of(high_node)
        whole = all(isinstance(bound, Fraction) and bound.denominator == 1 for bound in (low, high))
        if not whole or high - low > MAX_TERMS:
            raise UndecidedError
        total: Value = Fraction(0 if kind == "sum" else 1)
        for index in range(int(low), int(high) + 1):
            value = term(Fraction(index))
            total = self.add(total, value) if kind == "sum" else self.exact_or(total, value, lambda a, b: a * b)
        return total

    def call(self, function: str, arguments: list[Value]) -> Value:
        exact = all(isinstance(value, Fraction) for value in arguments)
        whole = exact and all(value.denominator == 1 for value in arguments)
        first = arguments[0]
        if whole:
            integers = [int(value) for value in arguments]
            if function == "factorial" and 0 <= first <= MAX_FACTORIAL:
                return Fraction(factorial(integers[0]))
            if function == "binom" and integers[1] >= 0 and 0 <= integers[0] <= MAX_FACTORIAL:
                return Fraction(comb(*integers))
            if function in ("gcd", "lcm"):
                return Fraction((gcd if function == "gcd" else lcm)(*integers))
        if exact:
            if function in _EXACT:
                return Fraction(_EXACT[function](arguments))
            if function == "root" and arguments[1].denominator == 1 and 2 <= arguments[1] <= 64:
                root = _exact_root(abs(first), int(arguments[1]))
                if root is not None and (first >= 0 or arguments[1] % 2):
                    return root if first >= 0 else -root
            if (function, first) in (("ln", 1), ("sin", 0), ("tan", 0), ("arcsin", 0), ("arctan", 0)):
                return Fraction(0)
        self.need_algebra()
        return self.rounded(function, [_float(value, self.mp) for value in arguments])

    def rounded(self, function: str, arguments: list[Value]) -> Value:
        """A function whose value is not rational, or not known to be."""
        mp, first = self.mp, arguments[0]
        second = arguments[-1]
        large = any(value and mp.mag(value) > _MAGNITUDE for value in arguments)
        if any(map(mp.isinf, arguments)) or (large and function not in ("ln", "log", "abs", "root", "min", "max")):
            raise UndecidedError
        try:
            if function == "root":
                if first == 0:
                    return first
                if mp.im(first) == 0 and mp.re(first) < 0 and second == int(second) and int(second) % 2:
                    return -mp.power(-first, 1 / second)
                return mp.power(first, 1 / second)
            if function == "log":
                return mp.log(first) / mp.log(second)
            if function in ("min", "max", "abs"):
                return _EXACT[function](arguments)
            if function in ("floor", "ceil"):
                return self.whole(function, first)
            if function in ("gcd", "lcm"):
                raise UndecidedError
            name = "binomial" if function == "binom" else function.replace("arc", "a")  # arcsin is asin
            return getattr(mp, name)(*arguments)
        except (ValueError, ZeroDivisionError, OverflowError, TypeError) as error:
            raise UndecidedError from error

    def whole(self, function: str, value: Value) -> Value:
        """The value rounded down or up, unless it is a whole number up to rounding, or complex."""
        if self.mp.im(value) != 0 or self.mp.mag(value) > self.mp.prec - 20:
            raise UndecidedError
        near = self.mp.nint(value)
        if abs(value - near) < self.mp.mpf(10) ** (-self.mp.dps // 2):
            return near
        return (self.mp.floor if function == "floor" else self.mp.ceil)(value)


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    """The rational root of a rational number that is not negative, or None."""
    parts = []
    for part in value.as_integer_ratio():
        if degree == 2:
            root = isqrt(part)
        elif part.bit_length() > 900:
            return None
        else:
            root = round(part ** (1 / degree))
        if root**degree != part:
            return None
        parts.append(root)
    return Fraction(*parts)
