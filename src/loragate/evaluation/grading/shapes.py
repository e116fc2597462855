r"""What kind of thing an answer is: list, tuple, set, interval, union, matrix, inequality, or one plain item.

Reading is by brackets and separators at the top level only; the parts stay text. `(0,1)` may be a point or an open
interval and need not be told apart, as both compare part by part and bracket by bracket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_OPEN, _CLOSE = "([{", ")]}"
_RELATION = re.compile(r"\\leq(?![A-Za-z])|\\geq(?![A-Za-z])|<=|>=|<|>")
_MATRIX = re.compile(r"\\begin\{([pbvVB]?matrix)\}(.*)\\end\{\1\}", re.S)
_WORD_SEPARATOR = re.compile(
    r"\s*,?\s*(?:\\(?:text|mathrm|textrm|mbox)\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*"
)
_NAME = re.compile(r"(?:[A-Za-z]|\\(?:theta|alpha|beta|lambda|mu|omega|tau|phi))(?:_\{?\w+\}?)?")

# possessive throughout: a left side of many words that is no name must not be taken apart in every possible way
# what may stand to the left of a sign of equality as a name: `x`, `f(x)`, `f^{-1}(x)`, `v_{max}`, `\angle ABC`, `(a,b)`
_LEFT_SIDE = re.compile(
    r"(?:\\[A-Za-z]++|[A-Za-z]++|_\{?\w++\}?|\^\{-1\}|\((?:[A-Za-z,\s]|\\[A-Za-z]++|_\w)++\)|[|'{}\s])++"
)


@dataclass(frozen=True)
class Shape:
    """One answer taken apart.

    Attributes:
        kind: "item", "list", "group" (brackets), "set", "union" or "matrix".
        parts: the texts inside; rows of a matrix are joined cell by cell.
        marks: the brackets of a group (`[)`), or the row lengths and style of a matrix.
    """

    kind: str
    parts: tuple[str, ...]
    marks: str = ""


def read_shape(text: str) -> Shape:
    """Return the shape of a normalised answer; inequalities in one name come back as the intervals that they are."""
    text = re.sub(r"^(?:[A-Za-z]|\\theta)\s*\\in(?![A-Za-z])\s*", "", text).strip()
    if re.fullmatch(r"\\(?:mathbb\s*\{?\s*R\s*\}?|R|Reals)", text):
        text = r"(-\infty,\infty)"
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        rows = [
            [cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\(?:\[\w+\])?", matrix[2]) if row.strip()
        ]
        # a determinant (vmatrix, Vmatrix) is no matrix; round and square brackets mean the same
        style = "|" if matrix[1].startswith(("v", "V")) else ""
        return Shape(
            "matrix", tuple(cell for row in rows for cell in row), style + ",".join(str(len(row)) for row in rows)
        )
    unions = split_top(text, r"\cup")
    if len(unions) > 1:
        return Shape("union", tuple(unions))
    interval = _inequality(text)
    if interval is not None:
        return interval
    items = split_list(text)
    if len(items) > 1 and re.search(r"(?<![A-Za-z])or(?![A-Za-z])", text) and all(_inequality(item) for item in items):
        return Shape("union", tuple(items))
    if len(items) > 1:
        return Shape("list", tuple(items))
    if text.startswith(r"\{") and _closes_at_end(text):
        return Shape("set", tuple(split_list(text[2:-2].strip())))
    if text[:1] in ("(", "[") and _closes_at_end(text):
        inner = split_top(text[1:-1], ",")
        if len(inner) > 1:
            return Shape("group", tuple(inner), text[0] + text[-1])
        if text[0] == "(" and text[-1] == ")":  # brackets around one item mean nothing
            return read_shape(text[1:-1].strip())
    return Shape("item", (text,))


def split_list(text: str) -> list[str]:
    r"""Split at top-level commas, semicolons and the words "and" and "or"; expand `\pm` into both signs."""
    parts = [part for piece in split_top(_WORD_SEPARATOR.sub(",", text), ",") for part in split_top(piece, ";")]
    expanded: list[str] = []
    for part in parts:
        if not part:
            continue
        if re.search(r"\\(?:pm|mp)(?![A-Za-z])", part):
            # a plus in front of the whole, or right behind a bracket or =, is not written
            expanded.append(re.sub(r"^\s*\+|(?<=[(=])\s*\+", "", _signs(part, "+", "-")).strip())
            expanded.append(_signs(part, "-", "+"))
        else:
            expanded.append(part)
    return expanded


def split_top(text: str, separator: str) -> list[str]:
    """Split at `separator` where no bracket is open; half-open intervals count as closed by either bracket."""
    parts, start, next_at = [], 0, 0
    for index, depth in _depths(text):
        if depth == 0 and index >= next_at and text.startswith(separator, index):
            parts.append(text[start:index].strip())
            start = next_at = index + len(separator)
    return [*parts, text[start:].strip()]


def sides_of(text: str) -> list[str]:
    """Split at the signs of equality."""
    return [side.strip() for side in re.split(r"(?<![<>!\\=])=(?!=)", text)]


def name_of(text: str) -> tuple[str, str]:
    r"""Split `x = 5`, `f(x) = 5` or `\angle ABC = 5` into (name, value); the name is "" where there is none."""
    left, *rest = sides_of(text)
    if not rest or not rest[-1] or left.count("{") != left.count("}") or not _LEFT_SIDE.fullmatch(left):
        return "", text
    return re.sub(r"\s+", "", left), rest[-1]


def _inequality(text: str) -> Shape | None:
    relations = [relation.strip() for relation in _RELATION.findall(text)]
    sides = [side.strip() for side in _RELATION.split(text)]
    if (
        not 1 <= len(relations) <= 2
        or not all(sides)
        or split_top(text, ",")[1:]
        or "=" in text.replace("<=", "").replace(">=", "")
    ):
        return None
    # from here on all signs point one way, and the name stands between two bounds
    signs = [{"\\leq": "<=", "\\geq": ">="}.get(relation, relation) for relation in relations]
    if len({sign[0] for sign in signs}) > 1:
        return None
    if signs[0][0] == ">":
        sides, signs = sides[::-1], [sign.replace(">", "<") for sign in signs[::-1]]
    if len(signs) == 1:
        if _NAME.fullmatch(sides[0]) and not _NAME.fullmatch(sides[1]):
            sides, signs = [r"-\infty", *sides], ["<", *signs]
        elif _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
            sides, signs = [*sides, r"\infty"], [*signs, "<"]
        else:
            return None
    if not _NAME.fullmatch(sides[1]):
        return None
    return Shape("group", (sides[0], sides[2]), ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]"))


def _signs(text: str, upper: str, lower: str) -> str:
    text = re.sub(r"\\pm(?![A-Za-z])\s*", lambda _: upper, text)
    return re.sub(r"\\mp(?![A-Za-z])\s*", lambda _: lower, text)


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens `text` is closed by its last character."""
    closed = (index for index, depth in _depths(text) if depth == 0 and index and text[index - 1] in _CLOSE)
    return next(closed, None) == len(text)


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """(place, brackets that are open before it) of every character and command, and of the end; escaped braces are brackets."""
    depth = index = 0
    while index < len(text):
        yield index, depth
        if text[index] == "\\" and text[index + 1 : index + 2] not in ("{", "}"):
            index += 1  # a command, whose first character is no bracket whatever it is: \( and \[ are none
        else:
            depth += (text[index] in _OPEN) - (text[index] in _CLOSE)
        index += 1
    yield index, depth
