"""Confined interpreters as the host sees them: how they start, what they say and use, how they are killed, and the verdict.

Everything that comes out of one is read in small pieces with a cap, so that a flood costs this process nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
from importlib.resources import files
from typing import Any

from loragate.evaluation.sandbox.tiers import ENVIRONMENT, Launch, Limits, ProgramResult, interpreter, package_folders

PACKAGE = "loragate.evaluation.sandbox.harness"
TAIL = 2000  # bytes of output that are kept
TICK = 0.1  # seconds between two looks at time, memory and number of processes
START_UP = 60.0  # seconds for both interpreters to be up, on a busy machine too
REPORTED = ("wrong", "error", "syntax", "memory", "exit", "output", "protocol")
MAX_REPORT = 64 * 1024  # a line to the host is a word and a sentence; more is not from the harness


class Child:
    """A process that serves one side of the harness.

    Args:
        role: the harness module whose `main` it runs ("candidate" or "checker").
        launch: how it is confined.
        request: what it is told to do; `confine` is added.
        channel: a socket to the other side; the caller closes its own copy.
    """

    def __init__(
        self, role: str, launch: Launch, limits: Limits, request: dict[str, Any], channel: socket.socket
    ) -> None:
        self.limits = limits
        self.written, self.tail, self.closed = 0, b"", False
        self._inbox = b""
        # The top tier has a /tmp of its own; below it a program gets a folder that goes with it.
        self._folder = None if launch.filter else tempfile.TemporaryDirectory(prefix="loragate-program-")
        confine = {
            "uid": launch.uid,
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "seconds": limits.seconds,
            "processes": limits.processes if launch.filter else None,
            "packages": package_folders(),
        }
        self.control, theirs = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, theirs)
            given = stack.enter_context(tempfile.TemporaryFile())
            given.write(json.dumps({**request, "confine": confine}).encode("ascii"))
            given.seek(0)
            kept, words = [theirs, given.fileno(), channel.fileno()], list(launch.command)
            # as words of the command: inside, no file of this package can be read
            code = f"{harness_text(role)}\nsys.modules[{PACKAGE + '.' + role!r}].main({', '.join(map(str, kept))})"
            if launch.filter is not None:
                filtering = stack.enter_context(tempfile.TemporaryFile())
                filtering.write(launch.filter)
                filtering.seek(0)
                kept.append(filtering.fileno())
                # bubblewrap reads the filter from a descriptor; "--" ends its own words
                words[-1:] = ["--seccomp", str(filtering.fileno()), "--"]
            try:
                self.process = subprocess.Popen(
                    [*words, *interpreter(), "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=ENVIRONMENT,
                    cwd=self._folder.name if self._folder else "/",
                    pass_fds=kept,
                    start_new_session=True,  # a process group of its own, which `kill` ends as a whole
                )
            except BaseException:
                os.close(self.control)
                if self._folder:
                    self._folder.cleanup()
                raise
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        os.set_blocking(self.control, False)

    def lines(self, wait: float = 0.0) -> list[Any]:
        """What it has said to the host since; sets `closed` at the end. A malformed line is `None`."""
        if wait:
            select.select([self.control], [], [], wait)
        try:
            part = os.read(self.control, MAX_REPORT)
        except BlockingIOError:
            return []  # nothing yet; at the end of the stream a read gives b"" instead
        self.closed = not part
        *lines, self._inbox = (self._inbox + part).split(b"\n")
        if len(self._inbox) > MAX_REPORT or (self.closed and self._inbox):
            lines, self._inbox = [*lines, b"torn"], b""
        found: list[Any] = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except (ValueError, RecursionError):
                found.append(None)
        return found

    def drain(self) -> bool:
        """Read one piece of output; returns whether there may be more. Keeps the tail and the count only."""
        try:
            part = os.read(self.output.fileno(), 65536)
        except BlockingIOError:
            return True
        self.written += len(part)
        self.tail = (self.tail + part)[-TAIL:]
        return bool(part)

    def usage(self) -> tuple[int, int]:
        """Return the processes of this child's tree and the MiB of memory that they hold among them."""
        page = os.sysconf("SC_PAGE_SIZE")
        pages, found, waiting = 0, 0, [self.process.pid]
        while waiting:
            folder = f"/proc/{waiting.pop()}"
            try:
                with open(f"{folder}/statm", "rb") as file:
                    # without shared pages: forks and libraries would be counted once for each process
                    resident, shared = map(int, file.read().split()[1:3])
                with open(f"{folder}/task/{folder.rsplit('/', 1)[1]}/children", "rb") as file:
                    waiting += map(int, file.read().split())
            except (OSError, ValueError):
                continue
            found += 1
            pages += max(resident - shared, 0)
        return found, pages * page // (1024 * 1024)

    def signal_that_ended_it(self) -> int | None:
        """The signal that the program died of, as far as it can be told from the exit status, or None."""
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return None
        # Popen says -9 of its own child; bubblewrap, like a shell, ends with 128 + 9 for the program inside
        code = -code if code < 0 else code - 128
        return code if 0 < code < 65 else None

    def kill(self) -> None:
        """Kill the child and all that descends from it, and wait until it has gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # The processes of a PID namespace die a moment after its first; they hold the pipe until then.
        with contextlib.suppress(OSError):
            for _ in range(64):
                ready, _, _ = select.select([self.output], [], [], 0.5)
                if not ready or not self.drain():
                    break
        self.output.close()
        os.close(self.control)
        if self._folder:
            with contextlib.suppress(OSError):
                self._folder.cleanup()


@functools.cache
def harness_text(role: str) -> str:
    """Python text that makes what `role` needs of the harness importable where the package is not."""
    # the parts are ASCII, as a command line is encoded as the host's locale says
    folder = files(PACKAGE)
    parts = [
        (f"{PACKAGE}.{name}", folder.joinpath(f"{name}.py").read_text(encoding="ascii")) for name in ("wire", role)
    ]
    return (
        "import sys, types\n"
        f"for name, text in {parts!r}:\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(text, name, 'exec'), sys.modules[name].__dict__)\n"
    )


Found = tuple[str, str] | None
"""Why a program stopped, in one word and one line, where it has; "ok" is the only word that passes."""


def watch(candidate: Child, checker: Child, tier: str, cancel: threading.Event | None) -> ProgramResult:
    """The last word on one program, whose processes have ended when it is said.

    Args:
        candidate: runs the program.
        checker: runs its tests; "passed" counts from it alone.
        cancel: set by another thread to give up.
    """
    try:
        run = Watch(candidate, checker, cancel)
        reason, detail = run.verdict()
        seconds = time.monotonic() - run.started
    finally:
        candidate.kill()
        checker.kill()
    tail = candidate.tail.decode("utf-8", "replace")
    return ProgramResult(reason == "ok", reason, tier, seconds, detail, tail)


class Watch:
    """What is known of a program that runs; see `watch`."""

    def __init__(self, candidate: Child, checker: Child, cancel: threading.Event | None) -> None:
        self.candidate, self.checker, self.children, self.cancel = candidate, checker, (candidate, checker), cancel
        self.ready: set[Child] = set()
        self.seconds = candidate.limits.seconds
        self.started = self.born = time.monotonic()

    def verdict(self) -> tuple[str, str]:
        """Block until there is one."""
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                selector.register(child.control, selectors.EVENT_READ, (child, self._control))
                selector.register(child.output, selectors.EVENT_READ, (child, self._output))
            next_look = time.monotonic() + TICK
            while True:
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + TICK
                    if found := self._look(now):
                        return found
                for key, _ in selector.select(max(next_look - time.monotonic(), 0)):
                    child, read = key.data
                    if found := read(child, selector):
                        return found

    def _look(self, now: float) -> Found:
        if self.cancel is not None and self.cancel.is_set():
            return "cancelled", "the run was given up"
        if len(self.ready) < len(self.children):
            late = now - self.born > START_UP  # no time of the program's counts before both sides are up
            return ("error", f"the sandbox was not up after {START_UP:.0f} s") if late else None
        if now - self.started > self.seconds:
            return "timeout", f"still running after {self.seconds:g} s"
        for child in self.children:
            processes, memory = child.usage()
            if memory > child.limits.memory_mb + 64:  # the harness's own
                return "memory", f"{memory} MiB in all; the limit is {child.limits.memory_mb}"
            if processes > child.limits.processes + 4:  # some for bubblewrap itself and for those that are just ending
                return "processes", f"{processes} processes; the limit is {child.limits.processes}"
        return None

    def _output(self, child: Child, selector: selectors.BaseSelector) -> Found:
        if not child.drain():
            selector.unregister(child.output)
        return self._too_much(child)

    def _passed(self) -> Found:
        """The verdict once what the program printed before its end has been read too."""
        # the pipe may hold more than one piece, and the checker's word can be read before any of them
        seen, candidate = -1, self.candidate
        while seen < candidate.written <= candidate.limits.output_kb * 1024:
            seen = candidate.written
            candidate.drain()
        return self._too_much(candidate) or ("ok", "")

    @staticmethod
    def _too_much(child: Child) -> Found:
        if child.written > child.limits.output_kb * 1024:
            return "output", f"more than {child.limits.output_kb} KiB of output"
        return None

    def _control(self, child: Child, selector: selectors.BaseSelector) -> Found:
        if (found := self._said(child)) or not child.closed:
            return found
        selector.unregister(child.control)
        # The program's process ends when the checker has; the checker's last word is then already there.
        return (self._said(self.checker) if child is self.candidate else None) or self._gone(child)

    def _said(self, child: Child, wait: float = 0.0) -> Found:
        for line in child.lines(wait):
            if found := self._line(child, line):
                return found
        return None

    def _line(self, child: Child, line: object) -> Found:
        match line:
            case ["ready"]:
                if child not in self.ready:
                    self.ready.add(child)
                    self.started = time.monotonic()
                return None
            case ["failed", "exit", str(_)] if child is self.checker:
                # it only saw the line go dead; the program's own process knows more, and may not have been read yet
                return self._said(self.candidate, wait=2) or self._gone(self.candidate)
            case ["failed", str(reason), str(detail)] if reason in REPORTED:
                return reason, detail[:500]
            case ["passed"] if child is self.checker:
                return self._passed()
        return "protocol", "the program spoke for the harness"

    def _gone(self, child: Child) -> tuple[str, str]:
        if child not in self.ready:
            child.drain()
            last = child.tail.decode("utf-8", "replace").strip().splitlines()[-1:]
            return "error", f"the sandbox did not start: {last[0][:300] if last else 'no word'}"
        number = child.signal_that_ended_it()
        if number is not None:
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            if name == "SIGXCPU":
                return "timeout", "the limit on processor time"
            return "killed", f"ended by {name}"
        if child is self.checker:
            return "error", "the process of the tests ended early"
        return "exit", "the program ended before its end"
