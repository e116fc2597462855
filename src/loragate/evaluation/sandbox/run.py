"""Running one program that a model has written, where it can do no harm, against tests that it cannot reach.

A program runs in one of two tiers, and a tier is never exchanged for a lower one silently: what is asked for works, or there is
an error which says what to install and which flag lowers the tier. The host starts one process, the harness, and watches it
from outside: what the whole tree of processes uses, what it prints, and the one verdict that the harness gives.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from loragate.errors import ConfigError, nearest
from loragate.evaluation.sandbox.bubblewrap import (
    ARCHITECTURES,
    SandboxError,
    bubblewrap_command,
    build_seccomp_filter,
    package_folders,
    python_command,
    unused_uid,
)
from loragate.validate import PositiveFloat, PositiveInt, check_fields

TIERS = {
    "bubblewrap": "no network, read-only system, private /tmp, no privileges, own processes, limits",
    "rlimits": "limits only, NOT isolated; for containers that are a sandbox themselves",
}
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    # Verdicts must not depend on the order of sets, nor on how many cores compute a sum.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# The tests of one HumanEval+ problem hold thousands of expected values, and numpy to compare them with.
TESTS_MEMORY_MB = 4096
HARNESS = Path(__file__).with_name("harness.py")
READY = b"ready"  # the first word of the harness
KEPT_OUTPUT_BYTES = 2000  # bytes of output that are kept
POLL_INTERVAL_S = 0.1  # seconds between two looks at time, memory and number of processes
START_UP = 300.0  # seconds for the harness to be up, on a busy machine too
# What a program may take, in units of its processor time. A verdict must not depend on what else runs on the machine, so time in
# which a process wants to run and cannot is no time of the program's; the last bound is for what the kernel does not show.
MAX_SLEEP_FACTOR = 6.0  # in which all of its processes sleep
MAX_WALL_FACTOR = 60.0


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: processor time of the program and its tests, all processes together, after the interpreter is up. It may sleep
            for six times as long; time in which the machine is busy with others does not count.
        memory_mb: address space of each process, and resident memory of all of them together, MiB.
        processes: processes and threads at one time.
        output_kb: bytes on standard output and error together, KiB; a program that writes more is stopped.
        file_mb: size of one file, and of the private /tmp as a whole, MiB.

    Raises `ConfigError` for a limit that is not positive and finite.
    """

    seconds: PositiveFloat = 10.0
    memory_mb: PositiveInt = 1024
    processes: PositiveInt = 32
    output_kb: PositiveInt = 1024
    file_mb: PositiveInt = 64

    def __post_init__(self) -> None:
        check_fields(self)


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


@dataclass(frozen=True)
class ProgramResult:
    """What became of one program.

    Attributes:
        passed: whether it ran to its end, all asserts included.
        reason: "ok", "wrong" (an assertion failed), "error" (another exception), "syntax", "timeout", "memory",
            "output" (too much of it), "exit" (it ended before its end), "killed" (by a signal), "processes" (too many),
            "protocol" (it tried to speak for the harness), or "cancelled".
        tier: the tier it ran in.
        seconds: processor time that it and its tests used, in steps of 0.1 s of wall time.
        detail: one line on the failure, at most 500 characters; written by the program where it raised.
        output: the last 2,000 characters of its output and error stream.
    """

    passed: bool
    reason: str
    tier: str
    seconds: float = 0.0
    detail: str = ""
    output: str = ""


def run_program(
    source: str,
    checks: Checks | None = None,
    tier: str = "bubblewrap",
    *,
    limits: Limits | None = None,
    cancel: threading.Event | None = None,
) -> ProgramResult:
    """Hold the program `source` against `checks`, or run it alone with the asserts that it contains.

    The checks run in another process. Only calls go over to the program, and only plain values come back, so that it sees
    neither an expected value nor the comparison. Changes that a function makes to its arguments stay on its side. Arguments must
    be built-in values (or the program's own objects); a function or class that only the checks define cannot be passed.

    Without checks it passes only if it ran to its end; the exit code says nothing. A program that sets out to imitate the
    harness, or whose objects claim to equal everything, can pass: use checks where it matters.

    Args:
        source: Python.
        checks: the tests; None for a program that contains its own.
        tier: a name in `TIERS`.
        limits: what it may use.
        cancel: set by another thread to give up.

    Raises:
        SandboxError: when the tier does not work here, or its process does not start this time.
        ConfigError: for an unknown tier or a limit that makes no sense.
    """
    return _run(source, checks, tier, require_sandbox(tier), limits or Limits(), cancel)


def probe(tier: str) -> str | None:
    """Return None where a program can run in `tier`, otherwise one line on why not.

    The first call for a tier takes about a second, later ones nothing. Raises `ConfigError` for an unknown tier.
    """
    return _probe_tier(tier)[0]


def require_sandbox(tier: str) -> bool:
    """Raise `SandboxError` where `tier` does not work; returns whether root drops its rights in it (see `bubblewrap_command`)."""
    reason, drop_root = _probe_tier(tier)
    if reason is not None:
        weaker = f" Mend that, or run programs with {TIERS['rlimits']}: --sandbox rlimits." if tier != "rlimits" else ""
        raise SandboxError(f"Model-written programs cannot run in the sandbox tier '{tier}': {reason}.{weaker}")
    return drop_root


@functools.cache
def _probe_tier(tier: str) -> tuple[str | None, bool]:
    reason = _find_missing_requirement(tier)
    if reason is not None:
        return reason, False
    reasons = []
    # a container's root may not change to a user of its own, and enters as other users do
    for drop_root in (True, False) if tier == "bubblewrap" and os.geteuid() == 0 else (False,):
        try:
            result = _run("assert sum(range(10)) == 45", None, tier, drop_root, Limits(seconds=20), None)
        except OSError as error:
            reasons.append(f"it could not be started ({error.strerror or error})")
            continue
        except SandboxError as error:
            reasons.append(str(error))
            continue
        if result.passed:
            return None, drop_root
        reasons.append(f"a program that does nothing ended with {result.reason}: {result.detail}")
    if tier == "bubblewrap":
        reasons.append('docs/tasks.md, "Where it does not start", has the ways out')
    return "; ".join(dict.fromkeys(reasons)), False


def _find_missing_requirement(tier: str) -> str | None:
    """Why `tier` cannot even be tried here, or None."""
    if tier not in TIERS:
        raise ConfigError(f"There is no sandbox tier {tier!r}{nearest(tier, TIERS)}; known: {', '.join(TIERS)}")
    if os.name != "posix":
        return f"the {tier} tier needs a POSIX system and this is {sys.platform}"
    if tier == "rlimits":
        return None
    if sys.platform != "linux":
        return f"the {tier} tier needs Linux and this is {sys.platform}"
    if not shutil.which("bwrap"):
        return "there is no `bwrap` here; install it with `apt install bubblewrap`"
    if build_seccomp_filter() is None:
        return f"the filter over system calls is written for {' and '.join(ARCHITECTURES)}, and this is {platform.machine()}"
    return None


def _run(
    source: str, checks: Checks | None, tier: str, drop_root: bool, limits: Limits, cancel: threading.Event | None
) -> ProgramResult:
    isolated = tier == "bubblewrap"
    # in "rlimits", the kernel's limit on processes would count those of others
    confined = {
        "CORE": 0,
        "AS": limits.memory_mb << 20,
        "FSIZE": limits.file_mb << 20,
        "NOFILE": 256,
        "CPU": math.ceil(limits.seconds) + 2,  # a second line: the host adds up the time of all processes
    } | ({"NPROC": limits.processes} if isolated else {})
    program = {"source": source, "name": "__main__" if checks is None else "candidate", "limits": confined}
    checks = checks or Checks("")
    tests = {
        "before": checks.before,
        "required": checks.required,
        "source": checks.source,
        "limits": {"CORE": 0, "AS": max(limits.memory_mb, TESTS_MEMORY_MB) << 20, "FSIZE": confined["FSIZE"]},
    }
    with Sandbox(limits, isolated, drop_root) as sandbox:
        reason, detail = sandbox.wait_for_verdict([program, tests], cancel)
    # what was printed before the end has been read by now
    if reason == "ok" and (found := sandbox.check_output_limit()):
        reason, detail = found
    output = sandbox.tail.decode("utf-8", "replace")
    return ProgramResult(reason == "ok", reason, tier, sandbox.seconds, detail, output)


class Sandbox(contextlib.AbstractContextManager["Sandbox"]):
    """The harness's process as the host sees it: how it starts, what it says and uses, how it is killed.

    Output is read in small pieces with a cap, so that a flood costs this process nothing.

    Args:
        limits: what the program may use.
        isolated: whether bubblewrap is around it.
        drop_root: see `bubblewrap_command`.
    """

    def __init__(self, limits: Limits, isolated: bool, drop_root: bool) -> None:
        self.limits = limits
        self.written, self.tail, self.seconds, self.asleep_seconds = 0, b"", 0.0, 0.0
        # known when the harness is up; before, nothing of the program's runs
        self.harness_pid, self.used_before = 0, 0.0
        with contextlib.ExitStack() as stack:
            # Where isolated, /tmp is the program's own; otherwise it gets a folder that goes with it.
            folder = "/" if isolated else stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            self.control, theirs = os.pipe()
            stack.callback(os.close, self.control)
            with contextlib.ExitStack() as kept:
                kept.callback(os.close, theirs)
                descriptors, words = [theirs], []
                if isolated:
                    filtering = kept.enter_context(tempfile.TemporaryFile())
                    filtering.write(build_seccomp_filter() or b"")
                    filtering.seek(0)
                    descriptors.append(filtering.fileno())
                    words = [*bubblewrap_command(limits.file_mb, drop_root), "--seccomp", str(filtering.fileno()), "--"]
                # as a word of the command: inside, no file of this package can be read
                call = f"main({theirs}, {unused_uid() if drop_root else None}, {package_folders()!a})\n"
                self.process = subprocess.Popen(
                    [*words, *python_command(), "-c", HARNESS.read_text(encoding="ascii") + call],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=ENVIRONMENT,
                    cwd=folder,
                    pass_fds=descriptors,
                    start_new_session=True,  # a process group of its own, which is killed as a whole
                )
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            stack.callback(_close, self.process.stdin)
            self.output = stack.enter_context(self.process.stdout)
            os.set_blocking(self.output.fileno(), False)
            stack.callback(self._kill)
            self._stack = stack.pop_all()

    def __exit__(self, *failure: object) -> None:
        """Kill all that runs, wait until it has gone, and read what it had printed."""
        self._stack.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # The processes of a PID namespace die a moment after its first; they hold the pipe until then.
        for _ in range(64):
            if not _readable(0.5, self.output.fileno()) or not self._read_output():
                break

    def wait_for_verdict(self, request: list[dict[str, Any]], cancel: threading.Event | None) -> tuple[str, str]:
        """Block until there is a verdict: why the program stopped, in one word and one line; "ok" alone passes.

        Args:
            request: what the harness is sent, the program first, the tests after it.

        Raises:
            SandboxError: where the harness does not start, which says nothing of the program.
        """
        open_ends = [self.control, self.output.fileno()]
        started = looked = now = time.monotonic()
        while True:
            ready = _readable(max(looked + POLL_INTERVAL_S - now, 0), *open_ends)
            if self.output.fileno() in ready:
                if not self._read_output():
                    open_ends.remove(self.output.fileno())
                if found := self.check_output_limit():
                    return found
            if self.control in ready:
                message = os.read(self.control, 1 << 16)
                if message != READY or self.harness_pid:
                    return self._verdict(message)
                # Nothing has been forked: the last of the chain is the harness. It goes on with what it is sent.
                pids, _, self.used_before, _ = self._usage()
                self.harness_pid, started = pids[-1], time.monotonic()
                self._send(request)
            now = time.monotonic()
            if now >= looked + POLL_INTERVAL_S:
                if cancel is not None and cancel.is_set():
                    return "cancelled", "the run was given up"
                if found := self._over_limits(now - started, now - max(looked, started)):
                    return found
                looked = now

    def _send(self, request: list[dict[str, Any]]) -> None:
        """Send frames as `harness.receive` reads them."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the end of the harness will be heard
            for part in request:
                data = json.dumps(part).encode("ascii")
                self.process.stdin.write(len(data).to_bytes(4, "big") + data)
            self.process.stdin.flush()

    def _verdict(self, message: bytes) -> tuple[str, str]:
        """What the harness said last, where it said anything; shorter than what a pipe takes in one piece."""
        with contextlib.suppress(ValueError):
            match json.loads(message):
                case [str(reason), str(detail)]:
                    return reason, detail
        if self.harness_pid:
            return "killed", "the process of the tests was ended"
        self._read_output()
        last = self.tail.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise SandboxError(f"the sandbox did not start: {last[0][:300] if last else 'no word'}")

    def _over_limits(self, elapsed: float, since: float) -> tuple[str, str] | None:
        """The verdict on a program that uses too much, `elapsed` seconds after its start, `since` after the last look."""
        limits = self.limits
        if not self.harness_pid:  # no time of the program's counts before the harness is up
            if elapsed > START_UP:
                raise SandboxError(f"the sandbox was not up after {START_UP:.0f} s")
            return None
        pids, memory, seconds, running = self._usage()
        used = seconds - self.used_before
        self.asleep_seconds += 0 if running or used > self.seconds else since
        self.seconds = max(self.seconds, used)
        if self.seconds > limits.seconds:
            return "timeout", f"still running after {limits.seconds:g} s of processor time"
        bounds = (
            (self.asleep_seconds, MAX_SLEEP_FACTOR, "asleep for"),
            (elapsed, MAX_WALL_FACTOR, "still running after"),
        )
        for spent, factor, what in bounds:
            if spent > factor * limits.seconds:
                return "timeout", f"{what} {factor * limits.seconds:g} s, {self.seconds:.1f} s of processor time"
        if memory > limits.memory_mb + 64:  # bubblewrap's and the interpreter's own
            return "memory", f"{memory} MiB in all; the limit is {limits.memory_mb}"
        if len(pids) > limits.processes + 4:  # some for bubblewrap itself and for those that are just ending
            return "processes", f"{len(pids)} processes; the limit is {limits.processes}"
        return None

    def check_output_limit(self) -> tuple[str, str] | None:
        """The verdict on a program that has printed more than it may."""
        if self.written > self.limits.output_kb * 1024:
            return "output", f"more than {self.limits.output_kb} KiB of output"
        return None

    def _read_output(self) -> bool:
        """Read one piece of output; returns whether there may be more. Keeps the tail and the count only."""
        try:
            part = os.read(self.output.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        self.written += len(part)
        self.tail = (self.tail + part)[-KEPT_OUTPUT_BYTES:]
        return bool(part)

    def _usage(self) -> tuple[list[int], int, float, bool]:
        """The process ids of the tree, the MiB that it holds without the harness, the seconds of processor time it used, and
        whether a thread of it runs now, or wants to."""
        pages, ticks, running, found, waiting = 0, 0, False, [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            with contextlib.suppress(OSError, ValueError):  # it has ended
                # utime and stime, and those of children that have ended; the name before them may hold anything
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                # without shared pages: forks and libraries would be counted once for each process
                resident, shared = map(int, Path(f"/proc/{pid}/statm").read_bytes().split()[1:3])
                found.append(pid)
                ticks += sum(map(int, fields[11:15]))
                pages += max(resident - shared, 0) if pid != self.harness_pid else 0
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with contextlib.suppress(OSError):
                        state = Path(f"/proc/{pid}/task/{thread}/stat").read_bytes().rpartition(b")")[2].split()[0]
                        running |= state in (b"R", b"D")  # D: it waits for a disk
                        waiting += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
        found = found or [self.process.pid]  # where there is no /proc
        return found, pages * os.sysconf("SC_PAGE_SIZE") >> 20, ticks / os.sysconf("SC_CLK_TCK"), running


def _readable(seconds: float, *descriptors: int) -> set[int]:
    """Those that have something to read or have been closed, waiting for `seconds` at most."""
    poll = select.poll()  # as select takes no descriptor beyond 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):  # closing writes out what was not sent
        file.close()
