r"""How an answer is written: one spelling for the many ways to write the same, its unit, and what kind of thing it is.

`normalise` removes what carries no meaning: dollars, spacing commands, `\left`, display fractions, font commands,
thousands separators, a final full stop. It never removes a letter that could be a variable.

Units are set apart from the numbers that they stand after while their `\text{}` is still in place. A unit that one side leaves
out is forgiven; two known units must measure the same kind of thing and are converted (`500 cm` is `5 m`). Words that are no unit
known here ("apples") are dropped: the question fixes what is counted. A letter counts as a unit only inside `\text{}` or
`\mathrm{}` or after a blank, never as a factor such as the m of `5m`.

`read_shape` takes an answer apart (list, tuple, set, interval, union, matrix, inequality, or one plain item) by brackets and
separators at the top level only; the parts stay text. `(0,1)` may be a point or an open interval and need not be distinguished, as
both compare part by part and bracket by bracket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from loragate.evaluation.answers import closing_brace

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
        "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "°": r"^\circ ", "±": r"\pm ", "…": r"\ldots ", "（": "(", "）": ")", "，": ",", "：": ":", "\u00a0": " ",
        "\u2009": " ", "\u202f": " ", "²": "^2", "³": "^3", "≈": r"\approx ",
    }
)  # fmt: skip
_REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[()\[\]]", " "),  # \( \) \[ \] as delimiters of the whole
        (r"\\\$|\$", " "),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|(?<!\\)~", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle)(?![A-Za-z])\.?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:leqslant|le)(?![A-Za-z])", r"\\leq "),
        (r"\\(?:geqslant|ge)(?![A-Za-z])", r"\\geq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\ne(?![A-Za-z])", r"\\neq "),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\colon(?![A-Za-z])|\{:\}", ":"),
        (r"\{,\}", "\x00"),  # a comma that is certainly a thousands separator
        (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"\\(?:degree|degrees)(?![A-Za-z])", r"^\\circ "),
        (r"\\operatorname\*?\s*\{(sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan|max|min|gcd)\}", r"\\\1 "),
    )
)
_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|operatorname)\s*\{"
)
_ROOT = re.compile(r"\\sqrt\s*\(")

# name: (kind, size in the kind's own unit); a kind with no common unit of measure between entries stands alone
_TABLE: dict[str, tuple[str, str]] = {
    "nm": ("length", "1e-9"), "mm": ("length", "1e-3"), "cm": ("length", "1e-2"), "dm": ("length", "1e-1"),
    "m": ("length", "1"), "km": ("length", "1e3"), "inch": ("length", "0.0254"), "ft": ("length", "0.3048"),
    "yard": ("length", "0.9144"), "mile": ("length", "1609.344"), "pc": ("parsec", "1"), "kpc": ("parsec", "1e3"),
    "mg": ("mass", "1e-6"), "g": ("mass", "1e-3"), "kg": ("mass", "1"), "lb": ("pound", "1"), "ounce": ("ounce", "1"),
    "ms": ("time", "1e-3"), "s": ("time", "1"), "minute": ("time", "60"), "h": ("time", "3600"),
    "day": ("time", "86400"), "week": ("time", "604800"), "month": ("month", "1"), "year": ("month", "12"),
    "cent": ("money", "0.01"), "dollar": ("money", "1"), "euro": ("euro", "1"), "degree": ("angle", "1"),
    "radian": ("radian", "1"),
    "Hz": ("frequency", "1"), "kHz": ("frequency", "1e3"), "MHz": ("frequency", "1e6"), "GHz": ("frequency", "1e9"),
    "J": ("energy", "1"), "kJ": ("energy", "1e3"), "erg": ("energy", "1e-7"), "eV": ("eV", "1"), "keV": ("eV", "1e3"),
    "MeV": ("eV", "1e6"), "W": ("power", "1"), "kW": ("power", "1e3"), "N": ("force", "1"), "K": ("kelvin", "1"),
    "Pa": ("pressure", "1"), "kPa": ("pressure", "1e3"), "V": ("voltage", "1"), "A": ("current", "1"),
    "L": ("litre", "1"), "mL": ("litre", "1e-3"), "mol": ("amount", "1"), "gallon": ("gallon", "1"),
    r"M_\odot": ("sun mass", "1"), r"L_\odot": ("sun light", "1"), r"R_\odot": ("sun radius", "1"),
}  # fmt: skip
_ALIASES = {
    "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "kilometer": "km",
    "kilometre": "km", "inches": "inch", "in": "inch", "foot": "ft", "feet": "ft", "gram": "g", "kilogram": "kg",
    "pound": "lb", "oz": "ounce", "sec": "s", "second": "s", "min": "minute", "hour": "h", "hr": "h",
    "hertz": "Hz", "joule": "J", "watt": "W", "newton": "N", "kelvin": "K", "litre": "L", "liter": "L", "l": "L",
    "ml": "mL", "mi": "mile", "yd": "yard", "yr": "year", "mph": "mile/h", "milliliter": "mL", "ergs": "erg",
    "mole": "mol", "deg": "degree",
}  # fmt: skip
_UNIT_FONT = r"\\(?:text(?:rm|it|bf)?|mbox|mathrm|operatorname)\s*\{[^{}]*\}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|\d))?"
_SUN = r"[MLR]_\{?\\odot\}?"
_WORDS = r"(?<=[\d})\s])\s(?:square |cubic )?[A-Za-z]{1,12}" + _POWER + r"(?:\s*/\s*[A-Za-z]{1,8}" + _POWER + ")?"
# words that change the number before them
_FACTORS = (
    "alpha|beta|gamma|delta|epsilon|theta|kappa|lambda|sigma|omega|infinity|sqrt|(?:sin|cos|tan|cot|sec|csc|log|exp)[a-z]|"
    "squared|cubed|factorial|hundred|thousand|million|billion|trillion|dozen"
)
_COUNTED = re.compile(rf"(?:square |cubic )?(?!(?:{_FACTORS})s?$)[A-Za-z]{{4,}}")
_TAIL = re.compile(
    rf"\s*(?:(?:(?:{_UNIT_FONT}|{_SUN}){_POWER}[\s/]*(?:\\cdot\s*)?)+|{_WORDS}|\^\s*\\circ\s*(?:[CFK])?)\s*$"
)


def normalise(answer: str) -> str:
    """Return `answer` without notation that carries no meaning, font commands still in place."""
    text = answer.translate(_UNICODE)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    # between digits it goes, elsewhere `{,}` was a comma after all
    text = re.sub(r"(?<=\d)\x00(?=\d{3})", "", text).replace("\x00", ",")
    text = re.sub(r"\s+", " ", text).strip()
    while len(text) > 1 and text.endswith((".", ",", ";", "\\")) and not text.endswith("..."):
        text = text[:-1].rstrip()
    return _root_braces(strip_outer_braces(text))


def unwrap_fonts(text: str) -> str:
    r"""Return `text` with `\text{…}`, `\mathrm{…}` and their like replaced by what they hold."""
    for _ in range(20):  # fonts inside fonts; a bound, as each round copies the text
        match = _FONT.search(text)
        if match is None:
            break
        end = closing_brace(text, match.end() - 1)
        if end is None:
            break
        inner = text[match.end() : end]
        # `\pi\text{cm}` must not become the command `\picm`
        if re.search(r"\\[A-Za-z]+$", text[: match.start()]) and inner[:1].isalpha():
            inner = " " + inner
        text = text[: match.start()] + inner + text[end + 1 :]
    return re.sub(r"\s+", " ", text).strip()


def is_text(text: str) -> bool:
    r"""Whether `text` is words: letters, blanks, hyphens and apostrophes only, `\text{}` around them allowed."""
    return re.fullmatch(r"[^\W\d_][^\W\d_ '’\-]*(?:[ '’\-]+[^\W\d_]+)*", unwrap_fonts(text)) is not None


def key(text: str) -> str:
    """Return the spelling under which equal answers are equal strings: no fonts, no blanks, braces only where needed."""
    # digits apart are two numbers, unless in groups of three: 10 000
    # and a command's name ends at a blank: `\pi r` is not `\pir`. Blanks that stay wait as \x00 while the others go
    plain = re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])|(?<=\d) (?=\d)(?!\d{3}(?!\d))", "\\1\x00", unwrap_fonts(text))
    plain = re.sub(r"\s+", "", plain).replace("\x00", " ")
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", plain)


def strip_outer_braces(text: str) -> str:
    """Return `text` without braces that enclose all of it."""
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _root_braces(text: str) -> str:
    r"""Write `\sqrt(2)` as `\sqrt{2}`."""
    while (match := _ROOT.search(text)) is not None:
        depth = 0
        for index in range(match.end() - 1, len(text)):
            depth += (text[index] == "(") - (text[index] == ")")
            if depth == 0:
                break
        else:
            return text
        text = text[: match.start()] + r"\sqrt{" + text[match.end() : index] + "}" + text[index + 1 :]
    return text


@dataclass(frozen=True)
class Unit:
    """What a unit measures, as kind and exponent pairs, and its size in the units of the table."""

    kinds: tuple[tuple[str, int], ...]
    size: Fraction


def split_unit(text: str) -> tuple[str, str]:
    """Return `text` (normalised) as (number or expression, the unit or words after it); the unit may be "".

    Nothing is split off where no digit would remain in front.
    """
    # `\text{5 cm}` as `5\text{cm}`
    text = re.sub(r"^\\text\{\s*([\d.,/]+)\s+([A-Za-z ]+)\}$", r"\1\\text{\2}", text)
    match = _TAIL.search(text)
    if match is None:
        return text, ""
    body, tail = text[: match.start()].rstrip(), match.group().strip()
    body = re.sub(r"\\(?:cdot|times)$", "", body).rstrip()
    if not re.search(r"\d", body) or re.search(r"[_^=<>+\-*/,(]$|\\(?!pi$)[A-Za-z]+$", body):
        return text, ""
    if tail.startswith("^") and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", body):
        return text, ""  # an angle inside a function is part of the expression
    plain = unwrap_fonts(tail)
    if re.fullmatch(r"(?:and|or|if|where|is|not|for|mod|e|i|pi|x|y|z|n)", plain):
        return text, ""
    is_words = re.match(_UNIT_FONT + r"|\^|" + _SUN, tail) is None
    if is_words and read_unit(plain) is None and not _COUNTED.fullmatch(plain):
        return text, ""  # a few bare letters are variables unless they are known to be a unit
    return body, plain


def read_unit(text: str) -> Unit | None:
    """Return the unit that `text` names, or None for words that are no unit known here."""
    if re.match(r"\^\s*\\circ", text):
        return Unit((("angle", 1),), Fraction(1)) if not re.search("[CFK]$", text) else None
    kinds: dict[str, int] = {}
    size = Fraction(1)
    words = re.sub(r"\b(?:square|sq)\.?\s+([A-Za-z]+)", r"\1^2", text)
    words = re.sub(r"\b(?:cubic|cu)\.?\s+([A-Za-z]+)", r"\1^3", words)
    words = re.sub(r"\s+per\s+|\s+an\s+", "/", words)
    if "mph" in words.split():
        words = words.replace("mph", "mile/h")
    for place, group in enumerate(words.split("/")):
        parts = re.findall(r"([A-Za-z]+(?:_\{?\\odot\}?)?)(?:\s*\^\s*\{?\s*(-?\d+)\s*\}?)?", group)
        if not parts:
            return None
        for name, power in parts:
            entry = _lookup(name.replace("{", "").replace("}", ""))
            if entry is None:
                return None
            exponent = int(power or 1) * (1 if place == 0 else -1)  # what follows a slash divides: m/s/s
            kinds[entry[0]] = kinds.get(entry[0], 0) + exponent
            size *= Fraction(entry[1]) ** exponent
    return Unit(tuple(sorted((kind, exponent) for kind, exponent in kinds.items() if exponent)), size)


def _lookup(name: str) -> tuple[str, str] | None:
    for candidate in (name, name.removesuffix("s"), name.lower(), name.lower().removesuffix("s")):
        found = _TABLE.get(candidate) or _TABLE.get(_ALIASES.get(candidate, ""))
        # one letter counts as it is written only: S is no second
        if found is not None and (len(name) > 1 or candidate == name):
            return found
    return None


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
