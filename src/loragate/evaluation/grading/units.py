r"""What a number counts: its unit, a word that multiplies it, a percent sign.

A unit that one side leaves out is forgiven; two known units must measure the same kind of thing and are converted (`500 cm` is
`5 m`). Words that are no unit known here ("apples") are dropped, as the question fixes what is counted, unless they change the
number: `9 million`, `5 thirds` and `8 factorial` are worked out, and `9 or more`, `40 minus 5` or words with digits are no unit
at all. A letter counts as a unit only inside `\text{}` or `\mathrm{}` or after a blank, never as a factor such as the m of `5m`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from loragate.evaluation.grading.expression import FUNCTIONS, GREEK, ParseError
from loragate.evaluation.grading.notation import PLAIN_NUMBER, strip_outer_braces, unwrap_fonts

# name: (kind, size in the kind's own unit); a kind with no common unit of measure between entries stands alone
_TABLE: dict[str, tuple[str, str]] = {
    "nm": ("length", "1e-9"), "mm": ("length", "1e-3"), "cm": ("length", "1e-2"), "dm": ("length", "1e-1"),
    "m": ("length", "1"), "km": ("length", "1e3"), "inch": ("length", "0.0254"), "ft": ("length", "0.3048"),
    "yard": ("length", "0.9144"), "mile": ("length", "1609.344"), "pc": ("parsec", "1"), "kpc": ("parsec", "1e3"),
    "mg": ("mass", "1e-6"), "g": ("mass", "1e-3"), "kg": ("mass", "1"), "lb": ("pound", "1"), "ounce": ("pound", "0.0625"),
    "ton": ("ton", "1"), "ms": ("time", "1e-3"), "s": ("time", "1"), "minute": ("time", "60"), "h": ("time", "3600"),
    "day": ("time", "86400"), "week": ("time", "604800"), "month": ("month", "1"), "year": ("month", "12"),
    "cent": ("money", "0.01"), "dollar": ("money", "1"), "euro": ("euro", "1"), "sterling": ("pound", "1"),
    "yen": ("yen", "1"), "rupee": ("rupee", "1"), "degree": ("angle", "1"), "radian": ("radian", "1"),
    "Hz": ("frequency", "1"), "kHz": ("frequency", "1e3"), "MHz": ("frequency", "1e6"), "GHz": ("frequency", "1e9"),
    "J": ("energy", "1"), "kJ": ("energy", "1e3"), "erg": ("energy", "1e-7"), "eV": ("eV", "1"), "keV": ("eV", "1e3"),
    "MeV": ("eV", "1e6"), "W": ("power", "1"), "kW": ("power", "1e3"), "N": ("force", "1"), "K": ("kelvin", "1"),
    "celsius": ("celsius", "1"), "fahrenheit": ("fahrenheit", "1"),
    "Pa": ("pressure", "1"), "kPa": ("pressure", "1e3"), "V": ("voltage", "1"), "A": ("current", "1"),
    "L": ("litre", "1"), "mL": ("litre", "1e-3"), "mol": ("amount", "1"), "gallon": ("gallon", "1"),
    "quart": ("gallon", "0.25"), "pint": ("gallon", "0.125"),
    r"M_\odot": ("sun mass", "1"), r"L_\odot": ("sun light", "1"), r"R_\odot": ("sun radius", "1"),
}  # fmt: skip
_ALIASES = {
    "meter": "m", "metre": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm",
    "kilometer": "km", "kilometre": "km", "inches": "inch", "in": "inch", "foot": "ft", "feet": "ft", "gram": "g",
    "kilogram": "kg", "kilo": "kg", "pound": "lb", "oz": "ounce", "sec": "s", "second": "s", "min": "minute", "hour": "h",
    "hr": "h", "hertz": "Hz", "joule": "J", "watt": "W", "newton": "N", "kelvin": "K", "litre": "L", "liter": "L", "l": "L",
    "ml": "mL", "mi": "mile", "yd": "yard", "yr": "year", "milliliter": "mL", "millilitre": "mL",
    "ergs": "erg", "mole": "mol", "deg": "degree", "rad": "radian", "usd": "dollar", "buck": "dollar", "eur": "euro",
    "gbp": "sterling", "quid": "sterling", "jpy": "yen", "inr": "rupee", "tonne": "ton",
}  # fmt: skip
_CURRENCY = {"$": "dollar", "€": "euro", "£": "sterling", "¥": "yen", "₹": "rupee"}
CURRENCIES = "".join(_CURRENCY)

_UNIT_FONT = r"\\(?:text(?:rm|it|bf)?|mbox|mathrm|operatorname)\s*\{[^{}]*\}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|\d))?"
_SUN = r"[MLR]_\{?\\odot\}?"
_WORD = r"[A-Za-z][A-Za-z.'-]{0,20}"
_TAIL = re.compile(
    rf"\s*(?:(?:(?:{_UNIT_FONT}|{_SUN}){_POWER}[\s/]*(?:\\cdot\s*)?)+|(?<=[\d}})!\s])\s(?:{_WORD}{_POWER}(?:\s*/\s*|\s+|$))+"
    rf"|\^\s*\\circ\s*(?:[CFK])?|(?<=\d)[{CURRENCIES}])\s*$"
)
SCALES = {
    "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12, "score": 20,
    "ten": 10, "quadrillion": 10**15, "quintillion": 10**18, "lakh": 10**5, "crore": 10**7, "gross": 144, "grand": 1000,
    "mil": 10**6, "mln": 10**6, "mn": 10**6, "bn": 10**9,
}  # fmt: skip
_PARTS = {
    name: Fraction(1, size)
    for size, names in {
        2: "half halves", 3: "third", 4: "quarter fourth", 5: "fifth", 6: "sixth", 7: "seventh", 8: "eighth", 9: "ninth",
        10: "tenth", 12: "twelfth", 16: "sixteenth", 20: "twentieth", 100: "hundredth", 1000: "thousandth",
        10**6: "millionth",
    }.items()
    for name in names.split()
}  # fmt: skip
_OPERATORS = {"factorial": "!", "squared": "^2", "cubed": "^3"}
# words behind a number that make it another number, or several
_CHANGING = {
    "and", "or", "if", "where", "is", "are", "not", "for", "mod", "modulo", "minus", "plus", "times", "divided", "multiplied",
    "over", "to", "through", "between", "than", "least", "most", "up", "down", "except", "without", "but", "when", "only",
    "twice", "double", "triple", "negative", "positive", "below", "above", "under", "beyond", "choose", "root", "power", "base",
    "binary", "decimal", "hex", "hexadecimal", "octal", "remainder", "e", "i", "pi", "x", "y", "z", "n", "infinity", "infinite",
    "until", "versus", "vs", "by", "nor", "either", "maybe", "approximately", "about", "roughly", "almost", "nearly", "less",
    "fewer", "greater", "something", "unknown", "undefined", "exclusive", "inclusive",
}  # fmt: skip
_LAST = {"more", "off", "short"}  # which change it where nothing follows
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SPELLED = {
    **{name: value for value, name in enumerate(_ONES)},
    **{name: 10 * value for value, name in enumerate(_TENS, 2)},
}


@dataclass(frozen=True)
class Unit:
    """What a unit measures, as kind and exponent pairs, and its size in the units of the table."""

    kinds: tuple[tuple[str, int], ...]
    size: Fraction


@dataclass(frozen=True)
class Quantity:
    """A number or expression and what it counts.

    Attributes:
        body: the expression, words that multiply it worked in.
        unit: the unit, if it is known here.
        percent: whether a percent sign follows.
        is_bare_number: whether neither a unit nor a word follows.
    """

    body: str
    unit: Unit | None = None
    percent: bool = False
    is_bare_number: bool = True


def read_quantity(text: str) -> Quantity:
    """Take the unit, the percent sign and the number words off `text` (normalised).

    Raises:
        ParseError: where the words make it another number, in a way that is not known here.
    """
    if PLAIN_NUMBER.fullmatch(text):
        return Quantity(text)
    text = re.sub(r"^\\text\{\s*([\d.,/]+)\s+([A-Za-z ]+)\}$", r"\1\\text{ \2}", text)  # `\text{5 cm}`
    sign = re.match(rf"([+-]?)\s*([{CURRENCIES}])\s*(?=[\d.\\+-])", text)
    if sign is not None:
        rest = read_quantity(sign[1] + text[sign.end() :])
        unit = read_unit(_CURRENCY[sign[2]])
        return Quantity(rest.body, unit if rest.unit is None else rest.unit, rest.percent, is_bare_number=False)
    text = text.replace("$", "")
    mixed = read_mixed(text)
    if mixed is not None:
        return mixed
    percent = re.search(r"\s*(?:\\?%|\\text\{\s*\\?%\s*\}|(?:\\text\{)?\s*per\s?cent\s*\}?)$", text)
    if percent is not None and percent.start():
        return Quantity(strip_outer_braces(text[: percent.start()].strip()), percent=True, is_bare_number=False)
    body, words = _split(text)
    spelled = _parse_number_words(unwrap_fonts(body))
    if not words:
        return Quantity(strip_outer_braces(body) if spelled is None else str(spelled))
    body = f"({body})" if re.search(r"[^\d.]", body) else body
    found = words.split()
    changed = False
    while found:  # nine hundred million, 3 quarters
        word = found[0].casefold().strip("-")
        singular = word.removesuffix("s")
        if word in _OPERATORS:
            body = f"({body}){_OPERATORS[word]}"
        elif (
            factor := SCALES.get(word) or SCALES.get(singular) or _PARTS.get(word) or _PARTS.get(singular)
        ) is not None:
            body = f"({body})*({factor})"
        else:
            break
        changed = True
        found.pop(0)
    if any(word.casefold().removesuffix("s") in SCALES for word in found):  # parts per million
        raise ParseError(text)
    if changed and found[:1] == ["of"]:
        found.pop(0)
    unit = read_unit(" ".join(found)) if found else None
    return Quantity(strip_outer_braces(body), unit, is_bare_number=False)


def _parse_number_words(text: str) -> Fraction | int | None:
    """The number that words spell, up to 99, or a half or quarter; None for anything else."""
    words = text.casefold().removeprefix("a ").replace("-", " ").split()
    if words in (["half"], ["quarter"]):
        return _PARTS[words[0]]
    values = [_SPELLED.get(word) for word in words]
    if len(values) == 1:
        return values[0]
    match values:
        case [int(tens), int(ones)] if tens >= 20 and 0 < ones < 10:
            return tens + ones
    return None


def read_mixed(text: str) -> Quantity | None:
    r"""`3\text{ hours }30\text{ minutes}` and `5 feet 6 inches`: several numbers, each smaller unit of one kind added."""
    number = r"\d+(?:\.\d+)?"
    part = rf"({number})\s*(?:\\(?:text|mathrm)\{{\s*([A-Za-z]+)\.?,?\s*(?:and)?\s*\}}|([A-Za-z]+)),?\s*(?:and\s+)?"
    if not re.fullmatch(rf"(?:{part}){{2,4}}", text):
        return None
    found = [(value, read_unit(font or word)) for value, font, word in re.findall(part, text)]
    units = [unit for _, unit in found if unit is not None]
    if len(units) < len(found) or len({unit.kinds for unit in units}) > 1:
        return None
    if any(larger.size <= smaller.size for larger, smaller in pairwise(units)):
        return None
    return Quantity(
        "+".join(f"({value})*({unit.size / units[0].size})" for (value, _), unit in zip(found, units)),
        units[0],
        is_bare_number=False,
    )


def _split(text: str) -> tuple[str, str]:
    """Return `text` as (number or expression, the words or unit after it); the second may be "".

    Nothing is split off where no digit would remain in front.
    """
    spelled = re.fullmatch(r"(?:\\text\{)?\s*([A-Za-z-]+)\s+([A-Za-z ]+?)\s*\}?", text)
    value = None if spelled is None else _parse_number_words(spelled[1])
    if spelled is not None and value is not None and _parse_number_words(f"{spelled[1]} {spelled[2]}") is None:
        return str(value), spelled[2]
    match = _TAIL.search(text)
    if match is None:
        return text, ""
    body, tail = text[: match.start()].rstrip(), match.group().strip()
    body = re.sub(r"\\(?:cdot|times)$", "", body).rstrip()
    plain = unwrap_fonts(re.sub(r"\}\s*\\(?:text|mathrm)\{", "} \\\\text{ ", tail))
    plain = " ".join(_CURRENCY.get(word, word) for word in plain.split())
    known = read_unit(plain) is not None
    if not (re.search(r"\d|\\pi", body) or (known and body and re.match(_UNIT_FONT, tail))) or re.search(
        r"[_^=<>+\-*/,(]$|\\(?!pi$)[A-Za-z]+$", body
    ):
        return text, ""
    if tail.startswith("^"):
        # an angle inside a function is part of the expression
        return (text, "") if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", body) else (body, plain)
    is_words = re.match(_UNIT_FONT + "|" + _SUN, tail) is None
    words = re.findall(r"[A-Za-z]+", plain)
    lowered = [word.casefold() for word in words]
    if (
        _CHANGING & set(lowered)
        or (lowered and lowered[-1] in _LAST)
        or re.search(r"\d", re.sub(_POWER + "|²", "", plain))
    ):
        return text, ""
    if not known and any(len(word) == 1 and word not in "aA" for word in words):
        return text, ""  # 5M and 5k
    if is_words and not known and (not words or any(map(_may_be_variables, words))):
        return text, ""
    return body, plain


def _may_be_variables(word: str) -> bool:
    """Whether a bare word may be letters that are multiplied, or a function before one: a few letters, a Greek name, `sinx`."""
    few = len(word) < 3 and word not in ("of", "in", "on", "a", "an")
    function = word in FUNCTIONS or re.fullmatch(r"(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)[a-z]", word)
    return few or word in GREEK or bool(function)


def read_unit(text: str) -> Unit | None:
    """Return the unit that `text` names, or None for words that are no unit known here."""
    if re.match(r"\^\s*\\circ", text):
        kind = {"C": "celsius", "F": "fahrenheit", "K": "kelvin"}.get(text[-1], "angle")
        return Unit(((kind, 1),), Fraction(1))
    kinds: dict[str, int] = {}
    size = Fraction(1)
    words = re.sub(r"\b(?:square|sq)\.?\s+([A-Za-z]+)", r"\1^2", text)
    words = re.sub(r"\b(?:cubic|cu)\.?\s+([A-Za-z]+)", r"\1^3", words)
    words = re.sub(r"\s*\bper\s+|\s+an\s+", "/", words)
    words = re.sub(r"(?i)\bmph\b", "mile/h", words)
    words = re.sub(r"(?i)\bdegrees?\s+(?=celsius|fahrenheit|kelvin)", "", words)
    for place, group in enumerate(words.split("/")):
        parts = re.findall(r"([A-Za-z]+(?:_\{?\\odot\}?)?)(?:\s*\^\s*\{?\s*(-?\d+)\s*\}?)?", group)
        if not parts:
            return None
        seen: set[str] = set()
        for name, power in parts:
            entry = _lookup(name.replace("{", "").replace("}", ""))
            if entry is None:
                return None
            exponent = int(power or 1) * (1 if place == 0 else -1)  # what follows a slash divides: m/s/s
            if abs(exponent) > 12:
                return None
            if entry[0] in seen:  # 5 US dollars dollars
                continue
            seen.add(entry[0])
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
