"""Running programs that a model has written: one alone, or one against tests that it cannot reach.

A tier is tried once per process, with a program that does nothing; what it holds is proved by the tests, attack by attack.
"""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass, replace
from functools import cache

from loragate.evaluation.sandbox.processes import Child, watch
from loragate.evaluation.sandbox.tiers import (
    TIERS,
    Limits,
    ProgramResult,
    SandboxError,
    launch,
    missing,
)

# The tests of one HumanEval+ problem hold thousands of expected values, and numpy to compare them with.
CHECKER_MEMORY_MB = 4096


@dataclass(frozen=True)
class Checks:
    """What a program is held against.

    Attributes:
        source: Python that asserts. A name that neither it nor Python defines is the program's: plain values are copied, all else
            stays in the program's process.
        required: names of the program without which it makes no sense to begin; they hide built-ins of the same name.
        before: Python that runs first, on the side of the tests.
    """

    source: str
    required: tuple[str, ...] = ()
    before: str = ""


def run_program(
    source: str,
    timeout_s: float = 10,
    tier: str = "bubblewrap",
    *,
    limits: Limits | None = None,
) -> ProgramResult:
    """Run a program that contains its own asserts; it passes only if it ran to its end.

    The exit code says nothing: a second process, which the program cannot reach, says that it ran to its end. A program that
    sets out to imitate the harness, or whose objects claim to equal everything, can pass: use `run_tests` where it matters.

    Args:
        source: Python.
        timeout_s: wall time in seconds.
        tier: a name in `TIERS`.
        limits: the other limits; `timeout_s` stands for its `seconds`.

    Raises:
        SandboxError: when the tier does not work here.
        ConfigError: for an unknown tier or a limit that makes no sense.
    """
    own = replace(limits or Limits(), seconds=timeout_s)
    return _run(source, Checks(""), own, tier, root_style_of(tier), None, name="__main__")


def run_tests(
    program: str,
    checks: Checks,
    tier: str = "bubblewrap",
    *,
    limits: Limits | None = None,
    cancel: threading.Event | None = None,
) -> ProgramResult:
    """Hold `program` against `checks` that run in another sandboxed process.

    Only calls go over, and only plain values come back, so that the program sees neither an expected value nor the
    comparison. Changes that a function makes to its arguments stay on its side. Arguments must be built-in values (or
    the program's own objects); a function or class that only the tests define cannot be passed.

    Raises as `run_program`.
    """
    return _run(program, checks, limits or Limits(), tier, root_style_of(tier), cancel)


def probe(tier: str) -> str | None:
    """Return None where a program can run in `tier`, otherwise one line on why not.

    The first call for a tier takes about a second, later ones nothing. Raises `ConfigError` for an unknown tier.
    """
    return _tried(tier)[0]


def available_tiers() -> list[str]:
    """The tiers that work here, the strongest first."""
    return [tier for tier in TIERS if probe(tier) is None]


def root_style_of(tier: str) -> str:
    """How root enters `tier` here (see `tiers.launch`); raises `SandboxError` when the tier does not work."""
    reason, style = _tried(tier)
    if reason is not None:
        weaker = f" Mend that, or run programs with {TIERS['rlimits']}: --sandbox rlimits." if tier != "rlimits" else ""
        raise SandboxError(f"Model-written programs cannot run in the sandbox tier '{tier}': {reason}.{weaker}")
    return style


@cache
def _tried(tier: str) -> tuple[str | None, str]:
    reason = missing(tier)
    if reason is not None:
        return reason, ""
    reasons = []
    # a container's root may not change to a user of its own, and enters as other users do
    for style in ("drop", "namespace") if os.geteuid() == 0 else ("namespace",):
        try:
            result = _run("assert sum(range(10)) == 45", Checks(""), Limits(seconds=20), tier, style, None)
        except OSError as error:
            reasons.append(f"it could not be started ({error.strerror or error})")
            continue
        if result.passed:
            return None, style
        reasons.append(f"a program that does nothing ended with {result.reason}: {result.detail}")
    if tier == "bubblewrap":
        reasons.append('docs/sandbox.md, "Where it does not start", has the ways out')
    return "; ".join(dict.fromkeys(reasons)), ""


def _run(
    program: str,
    checks: Checks,
    limits: Limits,
    tier: str,
    style: str,
    cancel: threading.Event | None,
    name: str = "candidate",
) -> ProgramResult:
    checker_limits = replace(limits, memory_mb=max(limits.memory_mb, CHECKER_MEMORY_MB))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        way = launch(tier, limits, style)
        candidate = Child("candidate", way, limits, {"source": program, "name": name}, ours)
        try:
            request = {"before": checks.before, "required": checks.required, "tests": checks.source}
            way = launch(tier, checker_limits, style)
            checker = Child("checker", way, checker_limits, request, theirs)
        except BaseException:
            candidate.kill()
            raise
    return watch(candidate, checker, tier, cancel)
