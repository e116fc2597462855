r"""The `dft` grader: the decision procedure behind published numbers, kept for comparison with them.

Written anew from its description. Extraction, string rules and the order of comparisons follow it, its known faults
included: units are removed even where they are variables, `\text{…}` is dropped, brackets are ignored, numbers agree
to 1e-4 relative and also when off by a factor of 100. Do not "fix" this file; the default grader is the place for that.

What could not be reproduced exactly: the last parser tried is the maintained fork of latex2sympy, not version 1.9;
Python-like expressions are read by a small evaluator instead of sympy's `parse_expr`, which would run code from
answers; sympy is the installed version, not 1.12; the time limit is the pool's, not three seconds; the list of unit
words was compiled from its description and is not the original's to the last word.

`extract` and `strip_string` run in the caller's process, `math_equal` in a worker, where its last step is
`symbolic.dft_algebra`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isclose

_LETTERS = "a b c d g h k l m n o p s t A C F J K L N V W"
_WORDS = (
    "degree mph kmph ft feet foot meter metre mile kilometer km cm mm centimeter inch inches yard square cubic unit units "
    "second sec minute min hour day week month year kg gram pound lb ounce liter litre gallon dollar cent pm am "
    "point pts people student child children apple book ball card coin ticket page problem percent way time term "
    "number edge face side integer base hundred thousand million per watt joule newton kelvin mol mole hz"
)
_UNITS = sorted(
    {*_LETTERS.split(), *_WORDS.split(), *(word + "s" for word in _WORDS.split())}, key=lambda w: (-len(w), w)
)
_UNIT = re.compile(rf"(^|\W)(?:{'|'.join(_UNITS)})(?=$|\W)")
_NUMBER = re.compile(r"-?\d*\.?\d+")


def extract(response: str) -> str:
    """Return the answer of `response`: a stated final answer, the last box, a sentence, or the last number; "" if none."""
    found = ""
    if "final answer is $" in response and "$. I hope" in response:
        found = response.split("final answer is $", 1)[1].split("$. I hope", 1)[0].strip()
    elif "boxed" in response:
        rest = response.rsplit("boxed", 1)[1]
        if rest.startswith("{"):
            depth, held = 1, []
            for character in rest[1:]:
                depth += (character == "{") - (character == "}")
                if depth == 0:
                    break
                held.append(character)
            found = "".join(held)
        else:
            found = rest.split("$")[0].strip()
    elif "he answer is" in response:
        found = response.rsplit("he answer is", 1)[1].strip()
    elif "final answer is" in response:
        found = response.rsplit("final answer is", 1)[1].strip()
    else:
        numbers = _NUMBER.findall(response.replace(",", ""))
        found = numbers[-1] if numbers else ""
    found = re.sub(r"\n\s*", "", found).removeprefix(":")
    return strip_string(found.rstrip("./"))


def _without(command: str, text: str) -> str:
    """`text` without the matches of `command`, none of which is looked for past the last brace: answers repeat open ones."""
    before, brace, after = text.rpartition("}")
    return re.sub(command, "", before + brace) + after


def strip_string(text: str) -> str:
    """Return the spelling that is compared: fractions braced, units, words, degrees and dollars removed."""
    text = text.strip().replace("\n", "").rstrip(".").replace(r"\!", "")
    text = re.sub(r"\\begin\{[a-z]*(?:matrix|array)\}(?:\{.*?\})?", r"\\begin{pmatrix}", text)
    text = re.sub(r"\\end\{[a-z]*(?:matrix|array)\}", r"\\end{pmatrix}", text)
    text = re.sub(r"\\[td]frac", r"\\frac", text).replace(r"\neq", r"\ne")
    text = text.replace(r"\leq", r"\le").replace(r"\geq", r"\ge").replace(r"\left", "").replace(r"\right", "")
    text = text.replace(r"\{", "{").replace(r"\}", "}")
    # from the first \text{ on all goes, where the answer ends with a brace and something is left
    at = text.find(r"\text{")
    without = (text[:at] if at >= 0 and text.endswith("}") else text).strip()
    text = without if without and without != text else text
    for _ in range(2):  # twice, as the procedure has it
        text = _UNIT.sub(r"\1", text) or text
    text = re.sub(r"\^\{?\\circ\}?", "", text).replace(r"\$", "").replace("$", "").replace(r"\(", "").replace(r"\)", "")
    text = _without(r"\\text\{.*?\}", text)
    # wherever they stand, not in front only
    for prefix in ("x=", "y=", "z=", r"x\in", r"y\in", r"z\in", r"x\to", r"y\to"):
        text = text.replace(prefix, "")
    text = text.replace(r"\emptyset", "{}").replace(r"(-\infty,\infty)", r"\mathbb{R}")
    text = text.replace(r"\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    if re.fullmatch(r"[({\[]\w+[)}\]]", text):  # brackets around one word or number
        text = text[1:-1]
    text = text.replace("infinity", r"\infty").replace("and", "").replace(r"\mathbf", "")
    text = _without(r"\\mbox\{.*?\}", text).replace("'", "").replace('"', "")
    if "j" in text and "i" not in text:  # the imaginary unit of engineers
        text = text.replace("j", "i")
    text = re.sub(r"(?<!\d)(\d+)\.0*(\D|$)", r"\1\2", text)  # from the first digit on only: 0.333… may go on for long
    if text.startswith("."):
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0].strip()) <= 2:  # a short name and its value
        text = sides[1]
    text = re.sub(r"\\sqrt(\w+)", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac(\d)\{", r"\\frac{\1}{", text)
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def math_equal(answer: str, gold: str, algebra: Callable[[str, str], bool], depth: int = 0) -> bool:
    """Whether two stripped answers count as equal: text, number, brackets, parts, equation, then `algebra` on both texts."""
    if answer.strip().lower() == gold.strip().lower():
        return True
    # a choice: the last letter that stands alone
    if gold in tuple("ABCDE") and re.findall(r"\b([A-E])\b", answer.upper())[-1:] == [gold]:
        return True
    left, right = _number(answer), _number(gold)
    if left is not None and right is not None:
        # a percentage and its share are the same, whichever side is which
        return any(isclose(value, left, rel_tol=1e-4) for value in (right / 100, right, right * 100))
    if not answer:
        return False
    bare_answer, bare_gold = (
        re.sub(r"[{}()]", "", _unbracket(text, other)) for text, other in ((answer, gold), (gold, answer))
    )
    if bare_answer.lower() == bare_gold.lower():
        return True
    # part by part, and parts of parts, as far as three deep
    if depth < 3:
        if all(re.fullmatch(r"[(\[].+[)\]]", text) for text in (answer, gold)):
            parts, others = answer[1:-1].split(","), gold[1:-1].split(",")
            if len(parts) == len(others) and all(math_equal(a, b, algebra, depth + 1) for a, b in zip(parts, others)):
                return True
        rows = [_matrix(text) for text in (answer, gold)]
        if rows[0] and rows[1] and [len(row) for row in rows[0]] == [len(row) for row in rows[1]]:
            pairs = [pair for row, other in zip(rows[0], rows[1]) for pair in zip(row, other)]
            if all(math_equal(a, b, algebra, depth + 1) for a, b in pairs):
                return True
    sides, others = answer.split("="), gold.split("=")
    if len(sides) == len(others) == 2:
        one, two = (f"{pair[0].strip()} - ({pair[1].strip()})" for pair in (sides, others))
        return algebra(one, two) or algebra(f"-({one})", two)
    if len(sides) == 2 and len(others) == 1 and len(sides[0].strip()) <= 2:
        return math_equal(sides[1], gold, algebra, depth + 1)
    if len(others) == 2 and len(sides) == 1 and len(others[0].strip()) <= 2:
        return math_equal(answer, others[1], algebra, depth + 1)
    return algebra(answer, gold)


def _number(text: str) -> float | None:
    text = text.replace(",", "")
    try:
        return float(text)
    except ValueError:
        try:
            return float(text.removesuffix("%").removesuffix("\\")) / 100 if text.endswith("%") else None
        except ValueError:
            return None


def _unbracket(text: str, other: str) -> str:
    for left, right in ("[]", "()"):
        if text.startswith(left) and text.endswith(right) and not other.startswith("(" if left == "[" else "["):
            return text.strip("[]()")
    return text


def _matrix(text: str) -> list[list[str]]:
    match = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", text)
    return [row.split("&") for row in match[1].split("\\\\") if row.strip()] if match else []
