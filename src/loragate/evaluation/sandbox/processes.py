"""Confined interpreters as the host sees them: how they start, what they say and use, how they are killed, and the verdict.

What one prints goes into a file whose growth the system limits, so that a flood costs this process nothing.
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

from loragate.evaluation.sandbox.tiers import (
    ENVIRONMENT,
    Limits,
    ProgramResult,
    bubblewrap,
    filter_program,
    interpreter,
    package_folders,
    unused_uid,
)

PACKAGE = "loragate.evaluation.sandbox.harness"
TAIL = 2000
TICK = 0.1
START_UP = 60.0
REPORTED = ("wrong", "error", "syntax", "memory", "exit", "output", "protocol")
MAX_REPORT = 64 * 1024  # a line to the host is a word and a sentence; more is not from the harness


class Child:
    """A process that serves one side of the harness.

    Args:
        role: the harness module whose `main` it runs ("candidate" or "checker").
        tier: how it is confined.
        style: how root enters the top tier. "drop" starts with full rights and changes to a user id that nobody else has, fresh
            per program; "namespace" is for containers whose root may not, and is how other users enter.
        request: what it is told to do; `confine` is added.
        channel: a socket to the other side; the caller closes its own copy.
    """

    def __init__(
        self, role: str, tier: str, style: str, limits: Limits, request: dict[str, Any], channel: socket.socket
    ) -> None:
        self.limits = limits
        self.closed, self._inbox = False, b""
        isolated = tier == "bubblewrap"
        drop = isolated and os.geteuid() == 0 and style == "drop"
        confine = {
            "uid": unused_uid() if drop else None,
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "seconds": limits.seconds,
            # below the top tier the kernel's limit would count the processes of others
            "processes": limits.processes if isolated else None,
            "packages": package_folders(),
        }
        with contextlib.ExitStack() as held, contextlib.ExitStack() as stack:
            self._output = held.enter_context(tempfile.TemporaryFile())
            # The top tier has a /tmp of its own; below it a program gets a folder that goes with it.
            folder = "/" if isolated else held.enter_context(tempfile.TemporaryDirectory(prefix="loragate-program-"))
            self.control, theirs = os.pipe()
            held.callback(os.close, self.control)
            stack.callback(os.close, theirs)
            given = stack.enter_context(tempfile.TemporaryFile())
            given.write(json.dumps({**request, "confine": confine}).encode("ascii"))
            given.seek(0)
            kept, words = [theirs, given.fileno(), channel.fileno()], list[str]()
            code = f"{harness_text(role)}\nsys.modules[{PACKAGE + '.' + role!r}].main({', '.join(map(str, kept))})"
            if isolated:
                filtering = stack.enter_context(tempfile.TemporaryFile())
                filtering.write(filter_program() or b"")
                filtering.seek(0)
                kept.append(filtering.fileno())
                words = [*bubblewrap(limits, drop), "--seccomp", str(filtering.fileno()), "--"]
            self.process = subprocess.Popen(
                [*words, *interpreter(), "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
                cwd=folder,
                pass_fds=kept,
                start_new_session=True,
            )
            self._held = held.pop_all()
        os.set_blocking(self.control, False)

    def lines(self, wait: float = 0.0) -> list[Any]:
        """What it has said to the host since; sets `closed` at the end. A malformed line is `None`."""
        if wait:
            select.select([self.control], [], [], wait)
        try:
            part = os.read(self.control, MAX_REPORT)
        except BlockingIOError:
            return []
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

    def output(self) -> tuple[int, str]:
        """How many bytes it has printed, and the last of them."""
        place = self._output.fileno()
        size = os.fstat(place).st_size
        # not by a seek: the program writes at the same place
        return size, os.pread(place, TAIL, max(0, size - TAIL)).decode("utf-8", "replace")

    def usage(self) -> tuple[int, int]:
        """Return the processes of this child's tree and the MiB of memory that they hold among them."""
        page = os.sysconf("SC_PAGE_SIZE")
        pages, found, waiting = 0, 0, [self.process.pid]
        while waiting:
            folder = f"/proc/{waiting.pop()}"
            try:
                with open(f"{folder}/statm", "rb") as file:
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
        code = -code if code < 0 else code - 128
        return code if 0 < code < 65 else None

    def kill(self) -> tuple[int, str]:
        """Kill the child and all that descends from it, and wait until it has gone; returns its `output`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # The processes of a PID namespace die a moment after its first; they hold the pipe until then.
        with contextlib.suppress(OSError):
            for _ in range(64):
                ready, _, _ = select.select([self.control], [], [], 0.5)
                if not ready or not os.read(self.control, MAX_REPORT):
                    break
        printed = self.output()
        with contextlib.suppress(OSError):
            self._held.close()
        return printed


@functools.cache
def harness_text(role: str) -> str:
    """Python text that makes what `role` needs of the harness importable where the package is not."""
    folder = files(PACKAGE)
    parts = []
    for name in ("wire", role):
        parts.append((f"{PACKAGE}.{name}", folder.joinpath(f"{name}.py").read_text(encoding="utf-8")))
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
        printed = candidate.kill()
        checker.kill()
    # whatever else became of it
    reason, detail = _too_much(candidate, printed[0]) or (reason, detail)
    return ProgramResult(reason == "ok", reason, tier, seconds, detail, printed[1])


def _too_much(child: Child, size: int) -> Found:
    if size > child.limits.output_kb * 1024:
        return "output", f"more than {child.limits.output_kb} KiB of output"
    return None


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
                selector.register(child.control, selectors.EVENT_READ, child)
            while True:
                if found := self._look(time.monotonic()):
                    return found
                for key, _ in selector.select(TICK):
                    child = key.data
                    if found := self._said(child):
                        return found
                    if child.closed:
                        # The program's process ends when the checker has; the checker's last word is then already there.
                        return (self._said(self.checker) if child is self.candidate else None) or self._gone(child)

    def _look(self, now: float) -> Found:
        if self.cancel is not None and self.cancel.is_set():
            return "cancelled", "the run was given up"
        if len(self.ready) < len(self.children):
            late = now - self.born > START_UP
            return ("error", f"the sandbox was not up after {START_UP:.0f} s") if late else None
        if now - self.started > self.seconds:
            return "timeout", f"still running after {self.seconds:g} s"
        for child in self.children:
            if found := _too_much(child, child.output()[0]):
                return found
            processes, memory = child.usage()
            if memory > child.limits.memory_mb + 64:  # the harness's own
                return "memory", f"{memory} MiB in all; the limit is {child.limits.memory_mb}"
            if processes > child.limits.processes + 4:
                return "processes", f"{processes} processes; the limit is {child.limits.processes}"
        return None

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
                return "ok", ""
        return "protocol", "the program spoke for the harness"

    def _gone(self, child: Child) -> tuple[str, str]:
        if child not in self.ready:
            last = child.output()[1].strip().splitlines()[-1:]
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
