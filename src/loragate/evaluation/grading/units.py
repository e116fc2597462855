r"""Units set apart from the numbers they stand after.

A unit that one side leaves out is forgiven; two known units must measure the same kind of thing and are converted
(`500 cm` is `5 m`). Words that are no unit known here ("apples") are dropped: the question fixes what is counted.
A letter counts as a unit only inside `\text{}` or `\mathrm{}` or after a blank, never as a factor such as the m of `5m`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from loragate.evaluation.grading.notation import unwrap_fonts

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
_FONT = r"\\(?:text(?:rm|it|bf)?|mbox|mathrm|operatorname)\s*\{[^{}]*\}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|\d))?"
_SUN = r"[MLR]_\{?\\odot\}?"
_WORDS = r"(?<=[\d})\s])\s(?:square |cubic )?[A-Za-z]{1,12}" + _POWER + r"(?:\s*/\s*[A-Za-z]{1,8}" + _POWER + ")?"
# words that change the number before them
_FACTORS = (
    "alpha|beta|gamma|delta|epsilon|theta|kappa|lambda|sigma|omega|infinity|sqrt|(?:sin|cos|tan|cot|sec|csc|log|exp)[a-z]|"
    "squared|cubed|factorial|hundred|thousand|million|billion|trillion|dozen"
)
_COUNTED = re.compile(rf"(?:square |cubic )?(?!(?:{_FACTORS})s?$)[A-Za-z]{{4,}}")
_TAIL = re.compile(rf"\s*(?:(?:(?:{_FONT}|{_SUN}){_POWER}[\s/]*(?:\\cdot\s*)?)+|{_WORDS}|\^\s*\\circ\s*(?:[CFK])?)\s*$")


@dataclass(frozen=True)
class Unit:
    """What a unit measures, as kind and exponent pairs, and its size in the units of the table."""

    kinds: tuple[tuple[str, int], ...]
    size: Fraction


def split_unit(text: str) -> tuple[str, str]:
    """Return `text` (normalised) as (number or expression, the unit or words after it); the unit may be "".

    Nothing is split off where no digit would remain in front.
    """
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
    is_words = re.match(_FONT + r"|\^|" + _SUN, tail) is None
    if is_words and read_unit(plain) is None and not _COUNTED.fullmatch(plain):
        return text, ""  # a few bare letters are variables unless they are known to be a unit
    return body, plain


def read_unit(text: str) -> Unit | None:
    """Return the unit that `text` names, or None for words that are no unit known here."""
    if re.match(r"\^\s*\\circ", text):
        return Unit((("angle", 1),), Fraction(1)) if not re.search("[CFK]$", text) else None
    kinds: dict[str, int] = {}
    size = Fraction(1)
    words = re.sub(r"\b(square|sq|cubic|cu)\.?\s+([A-Za-z]+)", _spell_power, text)
    words = re.sub(r"\s+per\s+|\s+an\s+", "/", words)
    if "mph" in words.split():
        words = words.replace("mph", "mile/h")
    for place, group in enumerate(words.split("/")):
        parts = re.findall(r"([A-Za-z]+(?:_\{?\\odot\}?)?)(?:\s*\^\s*\{?\s*(-?\d+)\s*\}?)?", group)
        if not parts:
            return None
        for name, power in parts:
            entry = _lookup(name + r"" if "odot" not in name else name.replace("{", "").replace("}", ""))
            if entry is None:
                return None
            exponent = int(power or 1) * (1 if place == 0 else -1)
            kinds[entry[0]] = kinds.get(entry[0], 0) + exponent
            size *= Fraction(entry[1]) ** exponent
    return Unit(tuple(sorted((kind, exponent) for kind, exponent in kinds.items() if exponent)), size)


def _spell_power(match: re.Match[str]) -> str:
    return f"{match[2]}^{2 if match[1].startswith('sq') else 3}"


def _lookup(name: str) -> tuple[str, str] | None:
    for candidate in (name, name.removesuffix("s"), name.lower(), name.lower().removesuffix("s")):
        found = _TABLE.get(candidate) or _TABLE.get(_ALIASES.get(candidate, ""))
        if found is not None and (len(name) > 1 or candidate == name):
            return found
    return None
