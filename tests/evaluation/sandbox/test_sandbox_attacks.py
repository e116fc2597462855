"""Every attack of the list against every tier that promises to hold it; the weaker tiers' promises in the slow half."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import pytest
from breakouts import ATTEMPT, BREAKOUTS, Breakout
from cheats import CHEATS, CHECKS, Cheat
from guard import TOP, need

import loragate
from loragate.evaluation.sandbox import Checks, Limits, run_program, run_tests, tiers

SQUARE = Checks(CHECKS, ("f",), ("f",))
SLOW_TIERS = ("rlimits",)


def cases(entries):
    for entry in entries:
        for tier in entry.holds:
            marks = [pytest.mark.slow("attacks")] if entry.slow or tier in SLOW_TIERS else []
            yield pytest.param(entry, tier, id=f"{tier}: {entry.name}", marks=marks)


def limits_for(cheat: Cheat) -> Limits:
    """Short time where time is what ends it."""
    return Limits(seconds=1 if "timeout" in cheat.reasons else 10, memory_mb=512)


@pytest.mark.parametrize(("cheat", "tier"), list(cases(CHEATS)))
def test_cheats_do_not_pass(cheat: Cheat, tier: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run_tests(cheat.program, SQUARE, need(tier), limits=limits_for(cheat))
    assert not result.passed
    assert result.reason in cheat.reasons, result
    assert result.mode == "two processes"
    assert len(result.detail) <= 500
    assert len(result.output) <= 2000
    # Kilobytes: whatever was written or returned did not pile up here.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(("breakout", "tier"), list(cases(BREAKOUTS)))
def test_breakouts_are_refused(breakout: Breakout, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAGATE_SECRET", "secret")
    host_file = tmp_path / "host.txt"
    host_file.write_text("secret", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {
            "PORT": server.getsockname()[1],
            "HOST_FILE": str(host_file),
            "HOST_PID": os.getpid(),
            "CHECKOUT": str(Path(loragate.__file__).parent),
            "PYTHON": (os.path.realpath(sys.base_prefix), *tiers.package_folders()),
            "TMP_TOP": Path(sys.prefix).parts[2] if sys.prefix.startswith("/tmp/") else "",
        }
        lines = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        result = run_program(lines + ATTEMPT + breakout.program, tier=need(tier))
    assert result.passed, result
    assert host_file.read_text(encoding="utf-8") == "secret"
    assert list(tmp_path.iterdir()) == [host_file]


@pytest.mark.parametrize("tier", TOP)
def test_a_right_program_passes_all_the_same(tier: str) -> None:
    result = run_tests("def f(x):\n    print(x)\n    return x * x", SQUARE, need(tier))
    assert (result.passed, result.reason, result.tier) == (True, "ok", tier)
