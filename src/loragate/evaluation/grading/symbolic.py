r"""What a worker calls: one function per grader, and all algebra, which may hang or eat memory.

The graders are loaded by name inside the worker process, so that neither sympy nor math-verify is imported by the caller.

math-verify's LaTeX parser reads both sides; our own numeric test compares them, because its comparison is absolute
(every tiny number equals every other) and its parser may stop early (`1-1/\mathrm{e}` read as 1). A reading that lost
a variable or number of its source is refused. Two expressions are the same when they agree to 1e-15 relative at
several fixed rational points; equations, when their difference is a constant multiple. What cannot be evaluated goes
to math-verify's own `verify`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fractions import Fraction
from math import isclose
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.parsing.latex import parse_latex

from loragate.evaluation.grading.default import UnjudgedError, Verdict, decide
from loragate.evaluation.grading.dft import math_equal
from loragate.evaluation.grading.numbers import Number, read_number, same_number

_DIGITS = 40  # carried, so that 15 of them are right after cancellation
_SAME = sympy.Rational(1, 10**15)
_ZERO = sympy.Rational(1, 10**36)
# values of up to six variables, at each of which two expressions must agree: awkward fractions, so that no two different
# expressions meet there by accident; small ones for functions of limited domain; and whole numbers, for factorials and the like
_POINTS = (
    ("7/5", "11/13", "23/17", "31/11", "13/29", "37/19"),
    ("5/7", "17/11", "9/23", "41/29", "8/13", "3/19"),
    ("29/9", "19/6", "43/13", "25/7", "51/16", "33/8"),
    ("3/31", "2/37", "5/41", "1/23", "4/53", "6/61"),
)
_WHOLE = (("3", "5", "2", "7", "4", "6"), ("6", "2", "5", "3", "8", "4"))
# commands whose value may be a bare number although several are written
_EVALUATES = re.compile(r"\\(?:[dt]?binom|sqrt|log|ln|gcd|lcm|sin|cos|tan|lfloor|lceil|max|min|sum|prod)(?![A-Za-z])")
_BINDS = re.compile(r"\\(?:sum|prod|int|lim)(?![A-Za-z])")  # a bound variable may be gone after evaluation
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp|sqrt|max|min"
_BARE_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp")
_IDENTIFIER = re.compile(
    rf"\\(?:begin|end)\{{[a-z]+\}}|\\[A-Za-z]+|(?<![A-Za-z])(?:{_FUNCTIONS})(?![A-Za-z])"
    r"|(?P<name>[A-Za-z](?:\s*_\s*(?:\{\s*\\?\w+\s*\}|\w))?)"
)

_DEGREES, _RADIANS = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?"), r"\\frac{\1 \\pi}{180}"


class Unread(Exception):
    """One side could not be read as mathematics."""


def same_expression(gold: str, answer: str, tolerance: float | None) -> Verdict:
    """Whether two LaTeX expressions without fonts are equal.

    Raises:
        Unread: where one side cannot be read completely.
    """
    gold_number, answer_number = read_number(gold), read_number(answer)
    left, right = read(gold), read(answer)
    if isinstance(left, sympy.Eq) and isinstance(right, sympy.Eq):
        return _proportional(left.lhs - left.rhs, right.lhs - right.rhs)
    if isinstance(left, sympy.Eq) or isinstance(right, sympy.Eq):
        return False
    if isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr):
        if gold_number is None and answer_number is None and left == right:
            return True
        if not (left.free_symbols | right.free_symbols):
            return _same_constant(left, right, gold_number, answer_number, tolerance)
        return _same_function(left, right)
    if isinstance(left, sympy.Expr) or isinstance(right, sympy.Expr) or type(left) is not type(right):
        return False
    return _verify(left, right)


def read(text: str) -> Any:
    """Return the sympy object that `text` writes."""
    # its removal of units takes variables with it (the t of `E_0 t`); ours are gone by now
    spelling = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    parsed = parse(
        f"${_IDENTIFIER.sub(_code, _DEGREES.sub(_RADIANS, text))}$",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=-1, normalization_config=spelling)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    if not parsed or isinstance(parsed[0], str):
        raise Unread(text)
    result = parsed[0]
    if _lost_something(text, result):
        raise Unread(text)
    if not hasattr(result, "free_symbols"):
        return result
    # the parser gives one letter several assumptions, and its imaginary unit is at times a symbol
    names = {symbol: sympy.I if symbol.name == "i" else sympy.Symbol(symbol.name) for symbol in result.free_symbols}
    return result.subs(names) if names else result


def _code(match: re.Match[str]) -> str:
    """Spell an identifier as one that the parser keeps apart: it folds case and reads `I_0` as a multiple of i."""
    if _BARE_FUNCTION.fullmatch(match.group()):
        return f"\\{match.group()} "
    name = re.sub(r"[{}\s]", "", match["name"] or "")
    if not name or re.fullmatch("[a-z]", name):
        return match.group()
    return "x_{9" + "".join(f"{ord(character):03d}" for character in name) + "}"


def _lost_something(text: str, result: Any) -> bool:
    """Whether identifiers of `text` are missing from `result`, or several numbers became a bare one."""
    found = [match for match in _IDENTIFIER.finditer(text) if match["name"]]
    # e, i and d are read as constants or a differential
    expected = {re.sub(r"[{}]", "", _code(match)) for match in found} - set("eid")
    try:
        symbols = {re.sub(r"[{}]", "", symbol.name) for symbol in result.atoms(sympy.Symbol)}
        symbols |= {str(call.func) for call in result.atoms(sympy.core.function.AppliedUndef)}
    except AttributeError:
        return False
    if expected - symbols and not _BINDS.search(text):
        return True
    is_atom = isinstance(result, sympy.Number | sympy.NumberSymbol | sympy.Symbol)
    words = [*found, *re.findall(r"\d+(?:\.\d+)?", re.sub(r"_\{[^{}]*\}|_\w", " ", text))]
    return is_atom and not _EVALUATES.search(text) and len(words) > 1 and read_number(text) is None


def _exact(expression: Any) -> Any:
    """Decimals as the fractions that they write."""
    return expression.replace(
        lambda node: isinstance(node, sympy.Float), lambda node: sympy.Rational(str(Fraction(str(node))))
    ).doit()


def _value(expression: Any) -> Any:
    value = expression.evalf(_DIGITS)
    if not value.is_number or value.has_free(*value.free_symbols) or "nan" in str(value) or "zoo" in str(value):
        raise Unread(str(expression))
    return value


def _same_constant(
    left: Any, right: Any, gold: Number | None, answer: Number | None, tolerance: float | None
) -> Verdict:
    first, second = _value(_exact(left)), _value(_exact(right))
    if gold is not None and gold.value is not None and second.is_real:
        written = Number(Fraction(str(second)), answer.percent if answer else False)
        if same_number(gold, written, tolerance):
            return True
    if tolerance is not None and first.is_real and second.is_real:
        return bool(abs(first - second) <= 1.01 * tolerance)
    return _near(first, second)


def _near(first: Any, second: Any) -> bool:
    """Equal to 1e-15 of the larger one; both exactly zero also counts, as does zero up to rounding."""
    if not (first.is_finite and second.is_finite):
        return bool(first == second)
    size = max(abs(first), abs(second))
    return bool(abs(first - second) <= size * _SAME) or bool(size < _ZERO)


def _values(left: Any, right: Any, with_negative: bool) -> Iterator[tuple[Any, Any]]:
    """Both expressions at the fixed points where both have a value."""
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    points = [
        # a seventh variable begins the row again, one higher
        {symbol: sympy.Rational(row[i % len(row)]) + i // len(row) for i, symbol in enumerate(symbols)}
        for row in (*_POINTS, *_WHOLE)
    ]
    if with_negative:
        points += [{symbol: -value for symbol, value in point.items()} for point in points[:2]]
    for point in points:
        try:
            yield _value(left.subs(point)), _value(right.subs(point))
        except Unread:
            continue


def _same_function(left: Any, right: Any) -> Verdict:
    left, right = _exact(left), _exact(right)
    if left == right:
        return True
    # a variable that one side lacks has to cancel on the other, which agreement at a few points does not show
    if left.free_symbols != right.free_symbols and (left - right).simplify() != 0:
        return False
    agreed = 0
    for first, second in _values(left, right, left.has(sympy.Abs) or right.has(sympy.Abs)):
        if not _near(first, second):
            return False
        agreed += 1
    return True if agreed >= 3 else _verify(left, right)


def _proportional(left: Any, right: Any) -> Verdict:
    left, right = _exact(left), _exact(right)
    if left.free_symbols != right.free_symbols:
        return False
    ratios = []
    for first, second in _values(left, right, True):
        if first == 0 or second == 0:  # both or neither
            if not first == second == 0:
                return False
            continue
        ratios.append(first / second)
    if len(ratios) < 3:
        return None
    return all(_near(ratio, ratios[0]) for ratio in ratios)


def _verify(left: Any, right: Any) -> bool:
    return bool(verify(left, right, timeout_seconds=None))


def dft_algebra(answer: str, gold: str) -> bool:
    """The `dft` procedure's algebra: sympy reads both and finds no difference after `simplify`, or none beyond 1e-4 in value."""
    left, right = _parse(answer), _parse(gold)
    # in turn, as each may fail on what the one before could not read: spelling, value, sides of an equation, number
    for test in (
        lambda: str(left) == str(right) or left == right,
        lambda: left.equals(right) or sympy.simplify(left - right) == 0,
        lambda: abs(left.lhs - left.rhs).equals(abs(right.lhs - right.rhs)),
        lambda: isclose(float(sympy.N(left)), float(sympy.N(right)), rel_tol=1e-4),
    ):
        try:
            if test():
                return True
        except (Exception, RecursionError):  # whatever sympy raises counts as "not equal", as in the original
            continue
    return False


def _parse(text: str) -> Any:
    for parser in (parse_latex, python_expression, latex2sympy):
        for spelling in (text.replace("\\\\", "\\"), text):
            try:
                return parser(spelling)
            except (Exception, RecursionError):
                continue
    return text  # no parser reads it, so that it equals its own spelling alone


def python_expression(text: str) -> Any:
    """Read `2*sqrt(3)+x**2` (`^` allowed) into sympy: numbers, names, + - * / ** and sqrt only, nothing executed."""

    def build(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return build(body)
            case ast.Constant(value=int() | float() as value):
                return sympy.sympify(value)
            case ast.Name(id=name):
                return sympy.pi if name == "pi" else sympy.Symbol(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -build(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operators:
                return operators[type(op)](build(left), build(right))
            case ast.Call(func=ast.Name(id="sqrt"), args=[argument], keywords=[]):
                return sympy.sqrt(build(argument))
        raise ValueError(ast.dump(node))

    operators: dict[type, Any] = {
        ast.Add: lambda a, b: a + b,
        ast.Sub: lambda a, b: a - b,
        ast.Mult: lambda a, b: a * b,
        ast.Div: lambda a, b: a / b,
        ast.Pow: lambda a, b: a**b,
    }
    return build(ast.parse(text.replace("^", "**"), mode="eval"))


Judgement = tuple[bool, str, str | None]


def default(gold: str, answer: str, tolerance: float | None) -> Judgement:
    """The default grader on an answer from the box, with algebra."""
    try:
        verdict = decide(gold, answer, tolerance, same_expression)
    except (UnjudgedError, Unread, RecursionError):
        verdict = None
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError):
        verdict = None  # sympy could not carry out what it had read
    return bool(verdict), "unparsed" if verdict is None else "ok" if verdict else "wrong", answer


def dft(gold: str, answer: str, tolerance: float | None) -> Judgement:
    """The `dft` procedure on an extracted and stripped answer; it knows no tolerance."""
    correct = math_equal(answer, gold, dft_algebra)
    return correct, "ok" if correct else "wrong", answer


def math_verify(gold: str, response: str, tolerance: float | None) -> Judgement:
    """math-verify with its defaults on the whole response; its own timeouts are off, as the pool kills."""
    wrapped = gold if "$" in gold or r"\boxed" in gold else f"${gold}$"
    expected = parse(wrapped, parsing_timeout=None)
    found = parse(response, parsing_timeout=None)
    if not found:
        return False, "no_box", None
    text = found[-1] if isinstance(found[-1], str) else str(found[0])[:1000]
    if not expected:
        return False, "unparsed", text
    correct = bool(verify(expected, found, timeout_seconds=None))
    return correct, "ok" if correct else "wrong", text
