"""The sandbox as its callers see it: verdicts, limits, many at once, interrupts, and what it says where it cannot work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from guard import need

from loragate.errors import ConfigError
from loragate.evaluation.sandbox import (
    Checks,
    Limits,
    ProgramResult,
    SandboxError,
    grade_codes,
    probe,
    run,
    run_program,
)

TOP = "bubblewrap"
EACH = [TOP, pytest.param("rlimits", marks=pytest.mark.slow("attacks"))]

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(30)", MARK])
    os._exit(0)
os.wait()
time.sleep(0.3)
"""


def alive(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in words:
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("tier", EACH)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert 1 + 1 == 2", "ok"),
        ("if __name__ == '__main__':\n    ran = True\nassert ran", "ok"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nassert A(1) == A(1)", "ok"),
        ("assert 1 + 1 == 3", "wrong"),
        ("1 / 0", "error"),
        ("def f(:", "syntax"),
        ("import os\nos._exit(0)", "exit"),
        ("raise SystemExit(0)", "exit"),
        ("import threading\nthreading.Thread(target=__import__('time').sleep, args=(30,)).start()", "ok"),
        ("import os, json\nfor fd in range(3, 256):\n    try: os.write(fd, b'[\"passed\"]\\n')\n"
         "    except OSError: pass\nassert False", "protocol"),
    ],
    ids=lambda value: value.split("\n")[-1][:40] if isinstance(value, str) else None,
)  # fmt: skip
def test_one_program(tier: str, source: str, reason: str) -> None:
    result = run_program(source, tier=need(tier))
    assert (result.reason, result.passed) == (reason, reason == "ok"), result
    assert result.tier == tier


@pytest.mark.parametrize("tier", EACH)
def test_time_and_output(tier: str) -> None:
    result = run_program("print('started', flush=True)\nwhile True: pass", None, need(tier), limits=Limits(seconds=0.5))
    assert result.reason == "timeout"
    assert 0.5 <= result.seconds < 3, "processor time"
    assert result.output == "started\n"
    result = run_program("import sys\nprint('x' * 99_999)\nprint('end', file=sys.stderr)", tier=tier)
    assert result.passed
    assert len(result.output) == 2000
    assert "end" in result.output
    limits = Limits(output_kb=8)
    assert run_program("print('x' * 99_999)", tier=tier, limits=limits).reason == "output"


def test_time_is_the_processor_s() -> None:
    """A program that waits is given more wall time than processor time, and what its children use counts."""
    waits = "import time\ntime.sleep(1.5)"
    assert run_program(waits, tier=need(TOP), limits=Limits(seconds=1)).reason == "ok"
    fork = "import os, time\nfor _ in range(2):\n    if os.fork() == 0:\n        while True: pass\ntime.sleep(60)"
    result = run_program(fork, tier=TOP, limits=Limits(seconds=2))
    assert result.reason == "timeout"
    assert "processor time" in result.detail
    assert result.seconds >= 2, "of both"


def test_sleep_is_bounded_and_a_busy_machine_is_not_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time counts as the program's own where it computes or where all of it sleeps, not where it waits for a processor."""
    result = run_program("import time\ntime.sleep(60)", tier=need(TOP), limits=Limits(seconds=0.2))
    assert result.reason == "timeout"
    assert "asleep" in result.detail
    # four others share the program's core, so that what it computes takes longer than it may sleep
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(run.Sandbox, "_send", _pinned(run.Sandbox._send, core))
    monkeypatch.setattr(run, "MAX_SLEEP_FACTOR", 0.4)
    hog = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", hog]) for _ in range(4)]
    try:
        began = time.monotonic()
        result = run_program("import time\nwhile time.process_time() < 0.8: pass", tier=TOP, limits=Limits(seconds=1.5))
        assert result.passed, result
        assert time.monotonic() - began > 0.4 * 1.5, "otherwise nothing was shown"
    finally:
        for other in others:
            other.kill()
            other.wait()


def _pinned(send: Callable[..., None], core: int) -> Callable[..., None]:
    """A `Sandbox._send` that first keeps all of the tree on one core."""

    def pinned(sandbox: run.Sandbox, request: list[dict[str, object]]) -> None:
        os.sched_setaffinity(sandbox.harness_pid, [core])
        send(sandbox, request)

    return pinned


def test_a_sandbox_that_does_not_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    need(TOP)
    monkeypatch.setattr(run, "bubblewrap_command", lambda *_: ["false"])
    with pytest.raises(SandboxError, match="did not start"):
        run_program("pass")


@pytest.mark.parametrize("ending", ["", "while True: pass", "import os\nos._exit(0)"], ids=["ends", "loops", "exits"])
def test_no_daemon_lives_on(ending: str) -> None:
    mark = f"loragate-test-{os.getpid()}-{time.monotonic_ns()}"
    run_program(f"MARK = {mark!r}\n{DAEMON}\n{ending}", None, need(TOP), limits=Limits(seconds=1))
    for _ in range(20):
        if not alive(mark):
            return
        time.sleep(0.05)
    pytest.fail(f"still there: {alive(mark)}")


VALUES = [
    "None", "True", "1", "-1.5", "2**70", "-0.0", "float('inf')", "'\\ud800é'", "b'ab'", "bytearray(b'a')", "1+2j", "[1, [2]]",
    "(1, (2,))", "{1, 2}", "frozenset({1})", "{(1, 'a'): [None]}", "range(2, 9, 3)", "...", "int",
    "__import__('decimal').Decimal('1.10')", "__import__('fractions').Fraction(1, 3)", "__import__('datetime').date(2024, 2, 29)",
    "__import__('datetime').datetime(2024, 2, 29, 1, 2, 3, 4)", "__import__('datetime').timedelta(1, 2, 3)",
    "__import__('collections').deque([1, 2], 3)", "10**5000",
]  # fmt: skip


def test_values_cross_unchanged() -> None:
    lines = [f"v = {value}\nw = same(v)\nassert w == v and type(w) is type(v), {value!r}" for value in VALUES]
    lines.append("import math\nassert math.isnan(same(float('nan'))) and math.copysign(1, same(-0.0)) == -1")
    result = run_program("def same(x): return x", Checks("\n".join(lines), ("same",)), need(TOP))
    assert result.passed, result


OBJECTS = """
import collections, enum, itertools
class Node:
    def __init__(self, value): self.value, self.next = value, None
    def double(self): return self.value * 2
class Colour(enum.Enum):
    RED = 1
def count(text): return collections.Counter(text)
def groups(pairs):
    result = collections.defaultdict(list)
    for key, value in pairs: result[key].append(value)
    return result
def squares(n): return (i * i for i in range(n))
def naturals(): return itertools.count()
def total(node):
    return node.value + (total(node.next) if node.next else 0)
def fail(x): raise ValueError("no " + x)
def numbers():
    import numpy
    return [numpy.float64(0.5), numpy.int64(3), numpy.bool_(True)]
def adder(n): return lambda x: x + n
def same(node): return node
def sort(values):
    values.sort()
    return values
LIMIT = 7
"""
OBJECT_CHECKS = """
assert count("aab") == {"a": 2, "b": 1}
assert groups([(1, 2), (1, 3)]) == {1: [2, 3]}
assert list(squares(600)) == [i * i for i in range(600)]
assert next(squares(3)) == 0 and 4 in squares(3)
numbers_from = naturals()
assert [next(numbers_from) for _ in range(3)] == [0, 1, 2]
values = [3, 1]
assert sort(values) == [1, 3] and values == [3, 1], "arguments are copies"
root = Node(1)
root.next = Node(2)
assert total(root) == 3 and root.next.value == 2 and root.double() == 2
assert same(root) is root and not (root == Node(1))
assert Colour.RED == Colour.RED and Colour.RED.value == 1
assert adder(3)(4) == 7
assert numbers() == [0.5, 3, True]
class Named:
    limit = LIMIT
assert Named.limit == 7 and [LIMIT for _ in range(2)] == [7, 7]
try:
    fail("way")
except ValueError as error:
    assert "no way" in str(error)
else:
    assert False
"""


def test_objects_stay_where_they_were_made() -> None:
    result = run_program(OBJECTS, Checks(OBJECT_CHECKS), need(TOP))
    assert result.passed, result


def test_many_programs_keep_their_order() -> None:
    seen: list[tuple[int, int]] = []
    rows = [{"code": "def f(): pass", "test_list": ["assert f() % 2 == 0"]}] * 6
    answers = [f"def f(): return {n}" for n in range(6)]
    results = grade_codes(
        "mbpp", rows, answers, 3, need(TOP), on_progress=lambda done, total: seen.append((done, total))
    )
    assert [result.reason for result in results] == ["ok", "wrong"] * 3
    assert seen == [(n, 6) for n in range(1, 7)]


def test_an_interrupt_kills_what_runs() -> None:
    mark = f"loragate-test-{os.getpid()}-{time.monotonic_ns()}"
    loop = f"MARK = {mark!r}\n{DAEMON}\nwhile True: pass"
    row = {"code": "def f(): pass", "test_list": ["assert f"]}

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    answers = ["def f(): pass", *[f"def f(): pass\n{loop}"] * 3]
    with pytest.raises(KeyboardInterrupt):
        grade_codes("mbpp", [row] * 4, answers, 2, need(TOP), Limits(seconds=60), interrupt)
    for _ in range(20):
        if not alive(mark):
            return
        time.sleep(0.05)
    pytest.fail(f"still there: {alive(mark)}")


def test_a_tier_that_cannot_work_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(run, "_probe_tier", run._probe_tier.__wrapped__)  # each time anew
    assert "bwrap" in str(probe(TOP))
    with pytest.raises(SandboxError, match=r"apt install bubblewrap.*--sandbox rlimits"):
        run_program("pass")
    with pytest.raises(SandboxError, match="bwrap"):
        run_program("pass", Checks("pass"))
    assert isinstance(SandboxError(""), ConfigError)


def test_a_tier_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ProgramResult(False, "error", TOP, detail="the sandbox did not start: bwrap: uid map: Permission denied")
    monkeypatch.setattr(run, "_probe_tier", run._probe_tier.__wrapped__)
    monkeypatch.setattr(run, "_find_missing_requirement", lambda tier: None)
    monkeypatch.setattr(run, "_run", lambda *_: failed)
    with pytest.raises(SandboxError, match=r"uid map: Permission denied; docs/tasks.md") as refused:
        run_program("pass")
    assert '"Where it does not start"' in str(refused.value)
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert "## Where it does not start\n" in page


def test_names_and_limits_are_checked() -> None:
    assert probe("rlimits") is None
    with pytest.raises(ConfigError, match="did you mean 'bubblewrap'"):
        run_program("pass", tier="bubblewarp")
    for wrong in ({"seconds": 0}, {"seconds": float("nan")}, {"memory_mb": 1.5}, {"processes": True}, {"file_mb": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Limits(**wrong)
