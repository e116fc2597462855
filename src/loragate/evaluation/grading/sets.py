r"""Sets of real numbers: intervals, inequalities, set builders, unions and differences, in whichever of these forms they come.

A set is read into a condition that a number fulfils or not, and the places where that may change: end points, elements, and
where the two sides of an inequality meet. Between two such places nothing changes, so two sets are equal if they agree at all
places and between them. Inequalities may be linear, quadratic, or either of these between absolute values; letters
other than the variable are set to the points at which functions are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from typing import Any

from loragate.evaluation.grading.expression import Node, ParseError, read_expression, variables, walk
from loragate.evaluation.grading.notation import closes_at_end, split_list, split_top, unwrap_fonts
from loragate.evaluation.grading.values import UndecidedError, alike, evaluate, points

_SIGNS = re.compile(r"\\leq(?![A-Za-z])|\\geq(?![A-Za-z])|\\neq(?![A-Za-z])|<|>|=")
_LOOKS = re.compile(
    r"\\(?:leq|geq|neq|cup|cap|setminus|emptyset|notin|in|infty)(?![A-Za-z])|<|>|\\mathbb\s*\{R\}|^\\\{[^{}]*[|:]|^\[.*\)$|^\(.*\]$"
)
_NAME = r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|tau))(?:_\{?\w+\}?)?"
_MEMBER = re.compile(rf"({_NAME})\s*\\(in|notin)(?![A-Za-z])\s*(.+)", re.S)
_BUILDER = re.compile(rf"\\\{{\s*({_NAME})\s*(?:\\in\s*\\mathbb\s*\{{R\}})?\s*[|:](.*)\\\}}", re.S)
_NOTHING = re.compile(
    r"\\emptyset|(?:there (?:is|are) )?(?:no|none)(?: real| such)?(?: solutions?| values?| roots?)?|(?:the )?(?:empty|null) set",
    re.I,
)
_EVERYTHING = re.compile(r"\\mathbb\s*\{R\}|(?:all|any)(?: the)? reals?(?: numbers?)?", re.I)
_DIGITS = 50
_SAMPLES = (0, 1, 2, 3, 5)
_MAX_ABS = 3
_ORDERS = {"<": (-1,), ">": (1,), r"\leq": (-1, 0), r"\geq": (0, 1), r"\neq": (-1, 1), "=": (0,)}

Condition = tuple[Any, ...]


@dataclass(frozen=True)
class RealSet:
    """A set as it was read.

    Attributes:
        condition: ("all",), ("none",), ("interval", low, high, brackets), ("points", *nodes), ("relation", left, sign, right),
            ("not", condition), ("and" | "or" | "comma", *conditions); a tree like those of `expression`, whose nodes it holds.
        names: variables that the text itself names, as in `x > 2` or `x \\in S`; none for a plain interval.
    """

    condition: Condition
    names: frozenset[str]


def looks_like_set(text: str) -> bool:
    """Whether `text` (normalised) writes a set of numbers and nothing else."""
    return _LOOKS.search(text) is not None or _NOTHING.fullmatch(unwrap_fonts(text)) is not None


def read_set(text: str) -> RealSet | None:
    """Return the set that `text` (normalised) writes, or None where it is none that can be read."""
    try:
        return _read(text.strip(), frozenset())
    except ParseError:
        return None


def same_set(gold: RealSet, answer: RealSet, mp: Any = None) -> bool:
    """Whether both are the same set.

    Raises:
        MpmathRequiredError: without `mp`, where an end point is not rational.
        UndecidedError: where it cannot be told.
    """
    one, other = _variable(gold, answer)
    if one and other and one != other:
        return False
    name = one or other
    letters = (variables(gold.condition) | variables(answer.condition)) - {name}
    if not letters:
        return _agree(gold, answer, name, {}, mp)
    agreed = 0
    for point in points(letters, False):
        try:  # at some points an end may lie behind the other
            if not _agree(gold, answer, name, dict(point), mp):
                return False
        except UndecidedError:
            continue
        agreed += 1
    if agreed < 2:
        raise UndecidedError
    return True


def _agree(gold: RealSet, answer: RealSet, name: str, point: dict[str, Any], mp: Any) -> bool:
    if mp is None:
        return _outline(gold, name, point, None) == _outline(answer, name, point, None)
    with mp.workdps(_DIGITS):
        (low, steps), (other_low, other_steps) = (_outline(side, name, point, mp) for side in (gold, answer))
        if low != other_low or len(steps) != len(other_steps):
            return False
        return all(one[1:] == two[1:] and _order(one[0], two[0], mp) == 0 for one, two in zip(steps, other_steps))


def _outline(found: RealSet, name: str, point: dict[str, Any], mp: Any) -> tuple[bool, list[tuple[Any, bool, bool]]]:
    """Whether the set goes on to minus infinity, and (place, whether it is in, whether what follows is in) of every change."""
    judge = _Judge(name, point, mp)
    places: list[Any] = []
    for place in sorted(judge.places(found.condition), key=cmp_to_key(lambda a, b: _order(a, b, mp))):
        if not places or _order(places[-1], place, mp):
            places.append(place)
    places = alike(places, mp)
    between = [
        (low + high) / 2 for low, high in zip([places[0] - 2, *places], [*places, places[-1] + 2])
    ] if places else [Fraction(0)]  # fmt: skip
    inside = [judge.holds(found.condition, value) for value in between]
    steps = []
    for index, place in enumerate(places):
        here = judge.holds(found.condition, place)
        if not inside[index] == here == inside[index + 1]:
            steps.append((place, here, inside[index + 1]))
    if found.condition[0] == "comma" and not steps and not inside[0]:
        # x < 1, x > 2 has no number in both: either was meant
        return _outline(RealSet(("or", *found.condition[1:]), found.names), name, point, mp)
    return inside[0], steps


def _order(left: Any, right: Any, mp: Any) -> int:
    """-1, 0 or 1 as left is smaller, the same up to rounding, or larger."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return (left > right) - (left < right)
    one, two = alike((left, right), mp)
    if abs(one - two) <= max(abs(one), abs(two)) * mp.mpf(10) ** -25:
        return 0
    return 1 if one > two else -1


class _Judge:
    """Places and truth of conditions in one variable, all other letters being numbers."""

    def __init__(self, name: str, point: dict[str, Any], mp: Any) -> None:
        self.name, self.point, self.mp = name, point, mp

    def value(self, node: Node, at: Any = None) -> Any:
        value = evaluate(node, self.point if at is None else {**self.point, self.name: at}, self.mp)
        if self.mp is not None and not isinstance(value, Fraction):
            if not self.near_zero(self.mp.im(value)) or self.mp.isinf(value):
                raise UndecidedError
            return self.mp.re(value)
        return value

    def places(self, condition: Condition) -> list[Any]:
        match condition:
            case ("interval", low, high, _):
                ends = [self.value(end) for end in (low, high) if not _infinite(end)]
                if len(ends) == 2 and _order(ends[0], ends[1], self.mp) >= 0:
                    raise UndecidedError  # a point, with its coordinates
                return ends
            case ("points", *nodes):
                return [self.value(node) for node in nodes]
            case ("relation", left, _, right):
                return list(self.roots(("+", left, ("neg", right))))
            case ("not" | "and" | "or" | "comma", *parts):
                return [place for part in parts for place in self.places(part)]
        return []

    def holds(self, condition: Condition, at: Any) -> bool:
        match condition:
            case ("interval", low, high, brackets):
                for end, side, bracket in ((low, 1, brackets[0]), (high, -1, brackets[1])):
                    if _infinite(end):
                        continue
                    order = _order(at, self.value(end), self.mp) * side
                    if order < 0 or (order == 0 and bracket in "()"):
                        return False
                return True
            case ("points", *nodes):
                return any(_order(at, self.value(node), self.mp) == 0 for node in nodes)
            case ("relation", left, sign, right):
                one, two = alike((self.value(left, at), self.value(right, at)), self.mp)
                order = _order(one, two, self.mp)
                # a root that was rounded leaves a little where nothing is
                return (0 if self.near_zero(one - two) else order) in _ORDERS[sign]
            case ("not", inner):
                return not self.holds(inner, at)
            case ("and" | "comma", *parts):
                return all(self.holds(part, at) for part in parts)
            case ("or", *parts):
                return any(self.holds(part, at) for part in parts)
        return bool(condition[0] == "all")

    def roots(self, node: Node) -> Iterator[Any]:
        """Where an expression may be zero: those of its forms without absolute values, and where these change sign."""
        inner = [part for part in walk(node) if part[:2] == ("call", "abs") and self.name in variables(part)]
        if len(inner) > _MAX_ABS:
            raise UndecidedError
        if not inner:
            yield from self.polynomial_roots(node)
            return
        yield from self.roots(inner[0][2])
        for sign in (inner[0][2], ("neg", inner[0][2])):
            yield from self.roots(_replaced(node, inner[0], sign))

    def polynomial_roots(self, node: Node) -> list[Any]:
        """Real roots of what is at most quadratic, as its values at five points tell."""
        values = alike([self.value(node, Fraction(at)) for at in _SAMPLES], self.mp)
        square = (values[2] - 2 * values[1] + values[0]) / 2
        slope = values[1] - values[0] - square
        for at, value in zip(_SAMPLES, values):
            if not self.near_zero(values[0] + slope * at + square * at * at - value):
                raise UndecidedError
        if self.near_zero(square):
            return [] if self.near_zero(slope) else [-values[0] / slope]
        under = slope * slope - 4 * square * values[0]
        if under < 0:
            return []
        root = evaluate(("call", "root", ("num", under), ("num", Fraction(2))), {}, self.mp)
        slope, square, root = alike((slope, square, root), self.mp)
        return [(-slope - root) / (2 * square), (-slope + root) / (2 * square)]

    def near_zero(self, value: Any) -> bool:
        return bool(value == 0 if isinstance(value, Fraction) else abs(value) < self.mp.mpf(10) ** -25)


def _replaced(node: Node, old: Node, new: Node) -> Node:
    if node == old:
        return new
    return tuple(_replaced(part, old, new) if isinstance(part, tuple) else part for part in node)


def _infinite(node: Node) -> bool:
    return node in (("const", "inf"), ("neg", ("const", "inf")))


def _variable(*sides: RealSet) -> tuple[str, str]:
    """The variable of each set, "" where it has none: one that both name if they can agree on it."""
    shared = sides[0].names & sides[1].names
    first, second = (min(shared or side.names, default="", key=lambda name: (name != "x", name)) for side in sides)
    return first, second


def _read(text: str, named: frozenset[str]) -> RealSet | None:
    text = text.strip()
    plain = unwrap_fonts(text)
    if _NOTHING.fullmatch(plain):
        return RealSet(("none",), frozenset())
    if _EVERYTHING.fullmatch(plain):
        return RealSet(("all",), frozenset())
    text = re.sub(r"^\\mathbb\s*\{R\}\s*[-\\]\s*(?=\\\{)", r"\\mathbb{R} \\setminus ", text)
    if r"\pm" in text and r"\neq" in text:
        return _joined("and", split_list(text), named)
    builder = _BUILDER.fullmatch(text)
    if builder is not None and closes_at_end(text):
        return _read(builder[2], named | {_plain_name(builder[1])})
    for separator, kind in (
        (r"\cup", "or"),
        (" or ", "or"),
        (r"\setminus", "without"),
        (r"\cap", "and"),
        (" and ", "and"),
    ):
        parts = split_top(re.sub(r"\s+(or|and)\s+", r" \1 ", text), separator)
        if len(parts) > 1:
            return _joined(kind, parts, named)
    member = _MEMBER.fullmatch(text)
    if member is not None:
        inner = _read(member[3], named | {_plain_name(member[1])})
        if inner is None:
            return None
        names = inner.names | {_plain_name(member[1])}
        return RealSet(inner.condition if member[2] == "in" else ("not", inner.condition), names)
    pieces = split_top(text, ",")
    if len(pieces) > 1 and _SIGNS.search(pieces[0]):
        if all(_SIGNS.search(piece) for piece in pieces):
            return _joined("comma", pieces, named)
        left, *others = re.split(r"\\neq(?![A-Za-z])", pieces[0])
        if len(others) == 1 and not any(_SIGNS.search(piece) for piece in pieces[1:]):  # x \ne 1, 2
            return _joined("and", [rf"{left} \neq {piece}" for piece in (others[0], *pieces[1:])], named)
        return None
    if _SIGNS.search(text):
        return _relations(text, named)
    return _enclosed(text, named)


def _joined(kind: str, parts: list[str], named: frozenset[str]) -> RealSet | None:
    sets = [found for part in parts if (found := _read(part, named)) is not None]
    if len(sets) < len(parts):
        return None
    names = frozenset().union(*(found.names for found in sets))
    conditions = [found.condition for found in sets]
    if kind == "without":
        return RealSet(("and", conditions[0], *(("not", condition) for condition in conditions[1:])), names)
    return RealSet((kind, *conditions), names)


def _relations(text: str, named: frozenset[str]) -> RealSet | None:
    signs = [sign.strip() for sign in _SIGNS.findall(text)]
    sides = [side.strip() for side in _SIGNS.split(text)]
    if len(signs) > 3 or not all(sides):
        return None
    nodes = [read_expression(side) for side in sides]
    letters = set().union(*map(variables, nodes))
    lone = {node[1] for node in nodes if node[0] == "sym"}
    # the variable is the one that is spoken of: alone on a side, in the middle of a chain, or the only one
    names = (named & letters) or (letters if len(letters) == 1 else lone) or letters
    middle = nodes[1] if len(nodes) == 3 else None
    if middle is not None and middle[0] == "sym":
        names = {middle[1]}
    if not letters:
        return None
    conditions = [("relation", nodes[i], sign, nodes[i + 1]) for i, sign in enumerate(signs)]
    return RealSet(("and", *conditions), frozenset(names))


def _enclosed(text: str, named: frozenset[str]) -> RealSet | None:
    if text.startswith(r"\{") and closes_at_end(text):
        return RealSet(("points", *map(read_expression, split_list(text[2:-2]))), frozenset())
    if text[:1] in ("(", "[", "]") and text[-1:] in (")", "]", "["):
        ends = split_top(text[1:-1], ",")
        if len(ends) == 1:
            return _read(text[1:-1], named) if text[0] == "(" and text[-1] == ")" else None
        if len(ends) != 2 or not all(ends):
            return None
        low, high = (read_expression(end.replace("+", "", 1) if end.startswith("+") else end) for end in ends)
        if (_infinite(low) and low[0] != "neg") or (high[0] == "neg" and _infinite(high)):
            return None
        brackets = ("[" if text[0] == "[" else "(") + ("]" if text[-1] == "]" else ")")
        return RealSet(("interval", low, high, brackets), frozenset())
    return None


def _plain_name(name: str) -> str:
    node = read_expression(name.strip())
    if node[0] != "sym":
        raise ParseError(name)
    return str(node[1])
