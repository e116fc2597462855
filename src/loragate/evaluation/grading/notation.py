r"""One spelling for the many ways to write the same answer.

`normalise` removes what carries no meaning: dollars, spacing commands, `\left`, display fractions, font commands,
thousands separators, a final full stop. It never removes a letter that could be a variable; units are set apart by
`units.py`, which sees them before their `\text{}` is unwrapped.
"""

from __future__ import annotations

import re

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


def normalise(answer: str) -> str:
    """Return `answer` without notation that carries no meaning, font commands still in place."""
    text = answer.translate(_UNICODE)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = re.sub(r"(?<=\d)\x00(?=\d{3})", "", text).replace("\x00", ",")
    text = re.sub(r"\s+", " ", text).strip()
    while len(text) > 1 and text.endswith((".", ",", ";", "\\")) and not text.endswith("..."):
        text = text[:-1].rstrip()
    return _root_braces(strip_outer_braces(text))


def unwrap_fonts(text: str) -> str:
    r"""Return `text` with `\text{…}`, `\mathrm{…}` and their like replaced by what they hold."""
    for _ in range(20):
        match = _FONT.search(text)
        if match is None:
            break
        end = closing_brace(text, match.end() - 1)
        if end is None:
            break
        inner = text[match.end() : end]
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
