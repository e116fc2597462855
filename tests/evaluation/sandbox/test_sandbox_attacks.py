"""Every attack of the lists against every tier that promises to hold it; the weaker tier's promises in the slow half."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from guard import ALL, TOP, need

import loragate
from loragate.evaluation.sandbox import Checks, Limits, run, run_program
from loragate.evaluation.sandbox.bubblewrap import package_folders

SQUARE = Checks("import colorsys\nassert f(3) == 9\nassert f(-7) == 49\nassert f(12) == 144\n", ("f",))
ATTEMPT = """
def refused(action, *kinds):
    try:
        result = action()
    except (kinds or (OSError, ValueError)) as error:
        return
    raise RuntimeError(f"not refused: {result!r}")
"""


@dataclass(frozen=True)
class Attack:
    """A program of `cheats.txt` or `breakouts.txt`; `reasons` are the words that a cheat may end with."""

    name: str
    program: str
    reasons: tuple[str, ...]
    slow: bool
    both: bool
    holds: tuple[str, ...]


def read(name: str) -> list[Attack]:
    _, *parts = (Path(__file__).parent / name).read_text(encoding="utf-8").split("### ")
    found = []
    for part in parts:
        head, _, program = part.partition("\n")
        title, *marks = head.split(" | ")
        only = [mark.removeprefix("only ") for mark in marks if mark.startswith("only ")]
        words = [mark for mark in marks if mark not in ("slow", "both") and not mark.startswith("only ")]
        reasons = tuple(words[0].split(", ")) if words else ()
        found.append(
            Attack(title, program.replace("<NUL>", "\0"), reasons, "slow" in marks, "both" in marks, tuple(only) or ALL)
        )
    return found


def cases(name: str) -> list[object]:
    found = []
    for attack in read(name):
        ways = [*attack.holds, *(["namespace"] if attack.both else [])]
        for way in ways:
            marks = [pytest.mark.slow("attacks")] if attack.slow or way == "rlimits" else []
            found.append(pytest.param(attack, way, id=f"{way}: {attack.name}", marks=marks))
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Modules that a cheat wrote where nothing isolates it would be imported by whatever runs in /tmp next."""
    yield
    folders = [Path("/tmp"), Path("/tmp/.config"), *Path("/tmp/.local/lib").glob("python*/site-packages")]
    for name in ("colorsys", "usercustomize", "sitecustomize"):
        for path in (folder / f"{name}.py" for folder in folders):
            if path.is_file() and "builtins.AssertionError = ValueError" in path.read_text(encoding="utf-8"):
                path.unlink()


@pytest.fixture
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tier by its name; "namespace" is bubblewrap as it is for users who are not root."""
    if request.param != "namespace":
        return need(request.param)
    need("bubblewrap")
    if run._run("pass", None, "bubblewrap", False, Limits(), None).reason != "ok":
        pytest.skip("bubblewrap cannot make user namespaces here")
    monkeypatch.setattr(run, "_probe_tier", lambda tier: (None, False))
    return "bubblewrap"


@pytest.mark.parametrize(("cheat", "tier"), cases("cheats.txt"), indirect=["tier"])
def test_cheats_do_not_pass(cheat: Attack, tier: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # short time where time is what ends it
    limits = Limits(seconds=1 if "timeout" in cheat.reasons else 10, memory_mb=512)
    result = run_program(cheat.program, SQUARE, tier, limits=limits)
    assert not result.passed
    assert result.reason in cheat.reasons, result
    assert len(result.detail) <= 500
    assert len(result.output) <= 2000
    # Kilobytes: whatever was written or returned did not pile up here.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(("breakout", "tier"), cases("breakouts.txt"), indirect=["tier"])
def test_breakouts_are_refused(breakout: Attack, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAGATE_SECRET", "secret")
    host_file = tmp_path / "host.txt"
    host_file.write_text("secret", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {
            "PORT": server.getsockname()[1],
            "HOST_FILE": str(host_file),
            "HOST_PID": os.getpid(),
            "CHECKOUT": str(Path(loragate.__file__).parent),
            "PYTHON": (os.path.realpath(sys.base_prefix), *package_folders()),
            "TMP_TOP": Path(sys.prefix).parts[2] if sys.prefix.startswith("/tmp/") else "",
        }
        lines = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        result = run_program(lines + ATTEMPT + breakout.program, tier=tier)
    assert result.passed, result
    assert host_file.read_text(encoding="utf-8") == "secret"
    assert list(tmp_path.iterdir()) == [host_file]


@pytest.mark.parametrize("tier", [*TOP, "namespace"], indirect=True)
def test_a_right_program_passes_all_the_same(tier: str) -> None:
    result = run_program("def f(x):\n    print(x)\n    return x * x", SQUARE, tier)
    assert (result.passed, result.reason, result.tier) == (True, "ok", tier)
