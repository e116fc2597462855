"""What a worker calls for the graders `dft` and `math_verify`, which sympy and math-verify decide.

They are loaded by name inside the worker process, so that neither library is imported by the caller.
"""

from __future__ import annotations

import ast
from math import isclose
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import parse, verify
from sympy.parsing.latex import parse_latex

from loragate.evaluation.grading.dft import math_equal


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
