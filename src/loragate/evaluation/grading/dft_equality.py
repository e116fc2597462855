"""What the `dft` grader takes for equal, in the process that has algebra; `dft.py` reads the answers and says whose rules."""

from __future__ import annotations

import ast
import re
from math import isclose
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from sympy.parsing.latex import parse_latex


def math_equal(answer: str, gold: str, depth: int = 0) -> bool:
    """Whether two stripped answers count as equal: text, number, brackets, parts, equation, then algebra."""
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
            if len(parts) == len(others) and all(math_equal(a, b, depth + 1) for a, b in zip(parts, others)):
                return True
        rows = [_matrix(text) for text in (answer, gold)]
        if rows[0] and rows[1] and [len(row) for row in rows[0]] == [len(row) for row in rows[1]]:
            pairs = [pair for row, other in zip(rows[0], rows[1]) for pair in zip(row, other)]
            if all(math_equal(a, b, depth + 1) for a, b in pairs):
                return True
    sides, others = answer.split("="), gold.split("=")
    if len(sides) == len(others) == 2:
        one, two = (f"{pair[0].strip()} - ({pair[1].strip()})" for pair in (sides, others))
        return symbolic_equal(one, two) or symbolic_equal(f"-({one})", two)
    if len(sides) == 2 and len(others) == 1 and len(sides[0].strip()) <= 2:
        return math_equal(sides[1], gold, depth + 1)
    if len(others) == 2 and len(sides) == 1 and len(others[0].strip()) <= 2:
        return math_equal(answer, others[1], depth + 1)
    return symbolic_equal(answer, gold)


def symbolic_equal(answer: str, gold: str) -> bool:
    """Whether sympy reads both and finds no difference after `simplify`, or none beyond 1e-4 in value."""
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
