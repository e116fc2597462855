r"""How an answer is written: one spelling for the many ways to write the same, and what kind of thing it is.

`normalise` removes what carries no meaning: dollars, spacing commands, `\left`, display fractions, a final full stop. It writes
other alphabets' roots, fractions and Greek names as LaTeX and never removes a letter that could be a variable.

`read_shape` takes an answer apart (list, tuple, set, matrix, or one plain item) by brackets and separators at the top level
only; the parts stay text. `(0,1)` may be a point or an open interval and need not be distinguished, as both compare part by
part and bracket by bracket.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from loragate.evaluation.answers import closing_braces

_SCRIPTS = {"^": "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "_": "₀₁₂₃₄₅₆₇₈₉₊₋ₙ"}
_GREEK = {
    chr(code): f"\\{word if 'SMALL' in name else word.capitalize()} "
    for code in (*range(0x391, 0x3AA), *range(0x3B1, 0x3CA))
    if (name := unicodedata.name(chr(code), "")).startswith("GREEK")
    and (word := name.rsplit(" ", 1)[1].lower().replace("lamda", "lambda")) != "omicron"
}
_UNICODE = str.maketrans(
    _GREEK | {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "ς": r"\sigma ",
        "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∉": r"\notin ",
        "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
        "°": r"^\circ ", "±": r"\pm ", "…": r"\ldots ", "（": "(", "）": ")", "，": ",", "：": ":", "\u00a0": " ",
        "\u2009": " ", "\u202f": " ", "≈": r"\approx ", "√": r"\sqrt ", "∣": "|", "⟨": "(", "⟩": ")", "∖": r"\setminus ",
        "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∨": " or ", "∧": " and ", "′": "'", "⁄": "/",
        "∑": r"\sum ", "∛": r"\sqrt[3]",
    }
)  # fmt: skip
# commands that another spelling stands for
_COMMANDS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"), **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("le", "leqslant"), r"\leq "), **dict.fromkeys(("ge", "geqslant"), r"\geq "), "lt": "<", "gt": ">",
    "ne": r"\neq ", "lbrace": r"\{", "rbrace": r"\}", "langle": "(", "rangle": ")", "varnothing": r"\emptyset ",
    **dict.fromkeys(("mid", "vert", "lvert", "rvert"), "|"), **dict.fromkeys(("lor", "vee"), " or "),
    **dict.fromkeys(("land", "wedge"), " and "), "backslash": r"\setminus ",
    "pounds": "£", "euro": "€", "textdollar": r"\$", "colon": ":",
    **dict.fromkeys(("degree", "degrees"), r"^\circ "), "lg": r"\log_{10}", **dict.fromkeys(("R", "Reals"), r"\mathbb{R}"),
    **dict.fromkeys(("quad", "qquad"), " "), **dict.fromkeys(("displaystyle", "textstyle", "limits"), ""),
}  # fmt: skip
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_FUNCTION_NAMES = "sin|cos|tan|cot|sec|csc|ln|log|exp|arcsin|arccos|arctan|max|min|gcd|lcm"
# what must be in the text, pattern, replacement; in this order
_REPLACEMENTS: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (needle, re.compile(pattern), replacement)
    for needle, pattern, replacement in (
        ("\\", r"(?<!\\)\\[()\[\]]", " "),  # \( \) \[ \] as delimiters of the whole
        ("$", r"(?<!\\)\$", " "),
        ("$", r"\\\$", "$"),  # from here on the currency
        ("\\!", r"(?<!\\)\\!\s*", ""),
        ("\\", r"(?<!\\)\\[,;:> ]|\\hspace\{[^{}]*\}", " "),
        ("~", r"(?<!\\)~", " "),
        ("\\", r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        ("\\{", r"\\\{\s*\\\}", r"\\emptyset "),
        ("=", r"\\not\s*=|(?<=[A-Za-z])\s*!=", r"\\neq "),
        ("<=", r"<=", r"\\leq "),
        (">=", r">=", r"\\geq "),
        ("{:}", r"\{:\}", ":"),
        ("{,}", r"\{,\}", "\x00"),  # a comma that is certainly a thousands separator
        ("circ", r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        ("operatorname", rf"\\operatorname\*?\s*\{{({_FUNCTION_NAMES})\}}", r"\\\1 "),
        ("mathbb", r"\\mathbb\s*R", r"\\mathbb{R}"),
        ("**", r"\*\*", "^"),
        ("inf", r"(?<![A-Za-z\\])inf(?:inity)?(?![A-Za-z])", r"\\infty "),
        ("oo", r"(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty "),
        ("C", r"(?<![A-Za-z\\])C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
        ("C", r"(?:\{\s*\}\s*)?[_^]\s*(\{)?\s*(\d+)\s*(?(1)\})\s*C\s*_\s*(\{)?\s*(\d+)(?(3)\s*\})", r"\\binom{\2}{\4}"),
        ("C", r"(?<![\w\\])(\d+)C(\d+)(?!\w)", r"\\binom{\1}{\2}"),
        ("choose", r"(\d+)\s*(?:\\text\{)?\s*choose\s*\}?\s*(\d+)", r"\\binom{\1}{\2}"),
        ("circ", r"\^\\circ\s*\\(?:text|mathrm)\{\s*([CFK])\s*\}", r"^\\circ \1"),
        ("array", r"\\begin\{array\}\s*(?:\{[^{}]*\})?", r"\\begin{array}"),
    )
)
PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FRACTIONS = re.compile("[¼½¾⅐-⅞]")
_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mbox|hbox|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|operatorname)\s*\{"
)
_ROOT = re.compile(r"\\sqrt\s*\(")
_INFIX = re.compile(r"\\(over|choose)(?![A-Za-z])")
_JOINING_TEXT = re.compile(r"\\(?:text|textrm|mathrm|mbox)\s*\{([^{}]*(?:\b(?:and|or)\b|[,;])[^{}]*)\}")
_THOUSANDS = re.compile(r"(?<![\d.,])(?<!\d )(\d{1,3})((?:,\d{3})+|(?: \d{3})+)(?![\d,])(?=\.\d|[^.]|$)")
_REPEATING = re.compile(
    r"(?P<head>\d*\.\d*)(?:\\(?:overline|bar)\s*(\{)?(?P<bar>\d+)(?(2)\})"
    r"|\\dot\s*(\{)?(?P<first>\d)(?(4)\})(?P<rest>\d*\\dot\s*(\{)?\d(?(7)\}))?|\((?P<round>\d+)\))(?![\d.])"
)
_GOES_ON = re.compile(r"(\d*\.\d*?)(\d{1,6}?)(\2{2,}|(?<=\d{2})\2)(?:\\[lcd]?dots[a-z]?(?![A-Za-z])|\.\.\.)")


def normalise(answer: str) -> str:
    """Return `answer` without notation that carries no meaning, font commands still in place."""
    if PLAIN_NUMBER.fullmatch(answer):
        return answer
    text = answer if answer.isascii() else _from_unicode(answer)
    if "\\" in text:
        text = _JOINING_TEXT.sub(r" \1 ", _COMMAND.sub(lambda match: _COMMANDS.get(match[1], match[0]), text))
    for needle, pattern, replacement in _REPLACEMENTS:
        if needle in text:
            text = pattern.sub(replacement, text)
    if "\\\\" in text and r"\begin" not in text:  # lines outside a matrix
        text = re.sub(r"\\\\(?:\[\w+\])?(?=.*\S)", "; ", text)
    if "\x00" in text:  # between digits it goes, elsewhere `{,}` was a comma after all
        text = re.sub(r"(?<=\d)\x00(?=\d{3})", "", text).replace("\x00", ",")
    text = re.sub(r"\s+", " ", text).strip()
    while (inside := strip_outer_braces(_without_final_stop(text))) != text:
        text = inside
    if not any(bracket in text for bracket in "()[]"):  # which would make 10,080 a list
        text = _THOUSANDS.sub(lambda match: match.group(1) + re.sub(r"[ ,]", "", match.group(2)), text)
    if "." in text:
        text = _REPEATING.sub(_repeating, _GOES_ON.sub(r"\1\\overline{\2}", text))
    text = _without_final_stop(_infix(text))
    quoted = re.fullmatch(r"(['\"`]|\^\^)(.+)\1", text)
    return _root_braces(strip_outer_braces(quoted[2] if quoted else text))


def _without_final_stop(text: str) -> str:
    while len(text) > 1 and text.endswith((".", ",", ";", "\\")) and not text.endswith("..."):
        text = text[:-1].rstrip()
    return text


def _from_unicode(text: str) -> str:
    """Write raised and lowered digits, fractions, Greek letters and signs as LaTeX."""
    for mark, characters in _SCRIPTS.items():
        raised = re.compile(f"[{characters}]+")
        plain = str.maketrans(characters, "0123456789+-n")
        text = raised.sub(lambda match: f"{mark}{{{match.group().translate(plain)}}}", text)  # noqa: B023
    text = text.translate(_UNICODE)
    return _FRACTIONS.sub(
        lambda match: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("\u2044")), text
    )


def _repeating(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}`, `0.1\dot{6}` and `0.1(6)` as the fraction that they are."""
    block = match["bar"] or match["round"] or match["first"] + re.sub(r"\D", "", match["rest"] or "")
    whole, _, decimals = match["head"].partition(".")
    value = Fraction(int("0" + whole + decimals)) + Fraction(int(block), 10 ** len(block) - 1)
    return r"\frac{{{}}}{{{}}}".format(*(value / 10 ** len(decimals)).as_integer_ratio())


def _infix(text: str) -> str:
    r"""Write `{a \over b}` as `\frac{a}{b}` and `{a \choose b}` as `\binom{a}{b}`."""
    for _ in range(20):
        match = _INFIX.search(text)
        if match is None:
            break
        start, depth = match.start(), 0
        while start > 0 and depth >= 0:
            start -= 1
            depth += (text[start] == "}") - (text[start] == "{")
        opened = depth < 0
        end = closing_braces(text).get(start) if opened else len(text)
        if end is None:
            break
        left, right = text[start + opened : match.start()].strip(), text[match.end() : end].strip()
        command = "frac" if match[1] == "over" else "binom"
        text = text[:start] + rf"\{command}{{{left}}}{{{right}}}" + text[end + opened :]
    return text


def unwrap_fonts(text: str) -> str:
    r"""Return `text` with `\text{…}`, `\mathrm{…}` and their like replaced by what they hold."""
    for _ in range(20):  # fonts inside fonts; a bound, as each round copies the text
        match = _FONT.search(text)
        if match is None:
            break
        end = closing_braces(text).get(match.end() - 1)
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


def canonical_spelling(text: str) -> str:
    """Return the spelling under which equal answers are equal strings: no fonts, no blanks, braces only where needed."""
    if PLAIN_NUMBER.fullmatch(text):
        return text
    # digits apart are two numbers, unless in groups of three: 10 000
    # and a command's name ends at a blank: `\pi r` is not `\pir`. Blanks that stay wait as \x00 while the others go
    plain = re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])|(?<=\d) (?=\d)(?!\d{3}(?!\d))", "\\1\x00", unwrap_fonts(text))
    plain = re.sub(r"[\s$]+", "", plain).replace("\x00", " ")
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", plain)


def strip_outer_braces(text: str) -> str:
    """Return `text` without braces that enclose all of it."""
    while text.startswith("{") and closing_braces(text).get(0) == len(text) - 1:
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


_OPEN, _CLOSE = "([{", ")]}"
_MATRIX = re.compile(r"\\begin\{([pbvVB]?matrix|smallmatrix|array)\}(.*)\\end\{\1\}", re.S)
_LINES = re.compile(r"\\begin\{(cases|aligned|gathered)\}(.*)\\end\{\1\}", re.S)
_ROW = re.compile(r"\\\\(?:\[\w+\])?")
_OR = re.compile(r"\s*,?\s*(?:\\text\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z]))\s*")
WORD_SEPARATOR = re.compile(
    r"\s*,?\s*(?:\\(?:text|mathrm|textrm|mbox)\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*,?\s*"
)
# a name and a sign of equality that begin a further assignment: `p=6 q=8`
_ALONGSIDE = r"(?:with|when|where|for|at)"
_NEXT_NAME = re.compile(
    rf"(?<=[\w)}}\]!])(?:\s*\\text\{{\s*{_ALONGSIDE}\s*\}}\s*|\s+(?:{_ALONGSIDE}\s+)?)"
    r"(?=(?:[A-Za-z]|\\[A-Za-z]+)(?:_\{?\w+\}?)?\s*=)"
)
# possessive throughout: a left side of many words that is no name must not be taken apart in every possible way
# what may stand to the left of a sign of equality as a name: `x`, `f(x)`, `f^{-1}(x)`, `v_{max}`, `\angle ABC`, `(a,b)`
_LEFT_SIDE = re.compile(
    r"(?:\\(?!(?:frac|sqrt|log|ln|exp|sum|prod|int|binom)(?![A-Za-z]))[A-Za-z]++|[A-Za-z]++|_\{?\w++\}?|\^\{-1\}"
    r"|\((?:[A-Za-z,\s]|\\[A-Za-z]++|_\w)++\)|(?<=[A-Za-z])\(\s*(?:\d++|[A-Z]\s*(?:=|<|>|\\[lg]eq)\s*\d++)\s*\)|[|'{}\s])++"
)


@dataclass(frozen=True)
class AnswerStructure:
    """One answer taken apart.

    Attributes:
        kind: "item", "list", "group" (brackets), "set" or "matrix".
        parts: the texts inside; rows of a matrix are joined cell by cell.
        marks: the brackets of a group (`[)`), or the row lengths and style of a matrix.
    """

    kind: str
    parts: tuple[str, ...]
    marks: str = ""


def read_shape(text: str) -> AnswerStructure:
    """Return the shape of a normalised answer."""
    text = re.sub(r"^(?:[A-Za-z]|\\theta)\s*\\in(?![A-Za-z])\s*", "", text)
    lines = _LINES.fullmatch(text)
    if lines is not None:
        rows = [row.replace("&", "").strip(" ,;") for row in _ROW.split(lines[2]) if row.strip()]
        return AnswerStructure("list", tuple(rows)) if len(rows) > 1 else AnswerStructure("item", (text,))
    bare = text
    while bare[:1] in ("(", "[") and closes_at_end(bare) and _MATRIX.fullmatch(bare[1:-1].strip()):
        bare = bare[1:-1].strip()  # the brackets of an array
    matrix = _MATRIX.fullmatch(bare)
    if matrix is not None:
        # a determinant is no matrix; round and square brackets mean the same
        style = "|" if matrix[1].startswith(("v", "V")) else ""
        return _matrix([row.split("&") for row in _ROW.split(matrix[2]) if row.strip()], style)
    items = split_list(text)
    if len(items) > 1:
        return AnswerStructure("list", tuple(items))
    if text.startswith(r"\{") and closes_at_end(text):
        return AnswerStructure("set", tuple(split_list(text[2:-2].strip())))
    if text[:1] in ("(", "[") and closes_at_end(text):
        inner = split_top(text[1:-1], ",")
        if text[0] == "[" and all(row[:1] == "[" and closes_at_end(row) for row in inner):
            return _matrix([split_top(row[1:-1], ",") for row in inner])
        if len(inner) > 1:
            return AnswerStructure("group", tuple(inner), text[0] + text[-1])
        if text[0] == "(" and text[-1] == ")":  # brackets around one item mean nothing
            return read_shape(text[1:-1].strip())
    return AnswerStructure("item", (text,))


def _matrix(rows: list[list[str]], style: str = "") -> AnswerStructure:
    return AnswerStructure(
        "matrix", tuple(cell.strip() for row in rows for cell in row), style + ",".join(str(len(row)) for row in rows)
    )


def split_list(text: str) -> list[str]:
    r"""Split at top-level commas, semicolons, the words "and" and "or", and between assignments; expand `\pm` into both signs."""
    if text.count("=") > 2 and "or" in text:  # x=1, y=2 or x=2, y=1: a list of lists
        answers = split_top(re.sub(_OR, "\x01", text), "\x01")
        if len(answers) > 1 and all(answer.count("=") > 1 for answer in answers):
            return answers
    joined = WORD_SEPARATOR.sub(",", text) if "and" in text or "or" in text else text
    parts = [part for piece in split_top(joined, ",") for part in split_top(piece, ";")]
    parts = [name for part in parts for name in (_NEXT_NAME.split(part) if part.count("=") > 1 else [part])]
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
    if separator not in text:
        return [text.strip()]
    parts, start, next_at = [], 0, 0
    for index, depth in _depths(text):
        if depth == 0 and index >= next_at and text.startswith(separator, index):
            parts.append(text[start:index].strip())
            start = next_at = index + len(separator)
    return [*parts, text[start:].strip()]


def sides_of(text: str) -> list[str]:
    """Split at the signs of equality outside brackets."""
    marked = re.sub(r"(?<![<>!\\=])=(?!=)", "\x01", text)
    return [side.replace("\x01", "=") for side in split_top(marked, "\x01")]


def split_assignment(text: str) -> tuple[str, list[str]]:
    r"""Split `x = 5`, `f(x) = 5`, `\angle ABC = 5` or `A = \pi r^2 = 9\pi` into (name, values); the name may be ""."""
    left, *rest = sides_of(text)
    if len(rest) == 1 and re.search(r"\d", left) and _LEFT_SIDE.fullmatch(rest[0]) and not _LEFT_SIDE.fullmatch(left):
        left, rest = rest[0], [left]  # 5 = x
    if not rest or not all(rest) or left.count("{") != left.count("}") or not _LEFT_SIDE.fullmatch(left):
        return "", [text]
    return re.sub(r"\s+", "", left), rest


def _signs(text: str, upper: str, lower: str) -> str:
    text = re.sub(r"\\pm(?![A-Za-z])\s*", lambda _: upper, text)
    return re.sub(r"\\mp(?![A-Za-z])\s*", lambda _: lower, text)


def closes_at_end(text: str) -> bool:
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
