"""What a worker calls, one function per grader: (gold, text, tolerance) to (correct, reason, extracted).

Loaded by name inside the worker process, so that neither sympy nor math-verify is ever imported by the caller.
"""

from __future__ import annotations

from math_verify import parse, verify

from loragate.evaluation.grading.default import UnjudgedError, decide
from loragate.evaluation.grading.dft import math_equal
from loragate.evaluation.grading.symbolic import Unread, same_expression

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
    correct = math_equal(answer, gold)
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
