"""math-verify with its defaults: a second opinion on the default grader. Workers alone import this, and sympy with it."""

from __future__ import annotations

from math_verify import parse, verify


def judge(gold: str, response: str, tolerance: float | None) -> tuple[bool, str, str | None]:
    """What a worker calls on the whole response; math-verify's own timeouts are off, as the worker has one."""
    expected = parse(gold if "$" in gold or r"\boxed" in gold else f"${gold}$", parsing_timeout=None)
    found = parse(response, parsing_timeout=None)
    if not found:
        return False, "no_box", None
    text = found[-1] if isinstance(found[-1], str) else str(found[0])[:1000]
    if not expected:
        return False, "unparsed", text
    correct = bool(verify(expected, found, timeout_seconds=None))
    return correct, "ok" if correct else "wrong", text
