"""Confined interpreters as the host sees them: how they start, what they say and use, how they are killed, and the verdict.

Everything that comes out of one is read in small pieces with a cap, so that a flood costs this process nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
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
TAIL = 2000
TICK = 0.1
START_UP = 60.0
MAX_REPORT = 64 * 1024  # a frame to the host is a word and a line; more is not from the harness


class Child:
    """A process that serves one role of the harness ("program", "candidate" or "checker").

    Args:
        role: the harness module whose `main` it runs.
        launch: how it is confined.
        channel: a socket for it to keep besides the one to the host; the caller closes its own copy.
        request: the first frame sent to it; `confine` is added.
        limits: its limits.
    """

    def __init__(
        self, role: str, launch: Launch, limits: Limits, request: dict[str, Any], channel: socket.socket | None = None
    ) -> None:
        self.role, self.limits = role, limits
        self.written, self.tail, self.closed = 0, b"", False
        self._inbox = b""
        # The top tier has a /tmp of its own; below it a program gets a folder that goes with it.
        self._folder = None if launch.filter else tempfile.TemporaryDirectory(prefix="loragate-program-")
        self.control, theirs = socket.socketpair()
        kept = [theirs.fileno()] + ([channel.fileno()] if channel else [])
        words = list(launch.command)
        filter_end = None
        if launch.filter is not None:
            filter_end, write_end = os.pipe()
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(launch.filter)  # smaller than a pipe holds
            words[-1:] = ["--seccomp", str(filter_end), "--"]
        numbers = ", ".join(map(str, kept))
        code = f"{harness_text(role)}\nsys.modules[{PACKAGE + '.' + role!r}].main({numbers})"
        try:
            self.process = subprocess.Popen(
                [*words, *interpreter(), "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
                cwd=self._folder.name if self._folder else "/",
                pass_fds=kept + ([filter_end] if filter_end is not None else []),
                start_new_session=True,
            )
        except BaseException:
            self.control.close()
            if self._folder:
                self._folder.cleanup()
            raise
        finally:
            theirs.close()
            if filter_end is not None:
                os.close(filter_end)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        confine = {
            "uid": launch.uid,
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "seconds": limits.seconds,
            "processes": limits.processes if launch.filter else None,
            "packages": package_folders(),
        }
        self.say({**request, "confine": confine})
        self.control.setblocking(False)

    def say(self, message: dict[str, Any]) -> None:
        """Send one frame; a child that has gone or does not read is found out by other means."""
        data = json.dumps(message).encode("ascii")
        self.control.settimeout(60)
        with contextlib.suppress(OSError):
            self.control.sendall(len(data).to_bytes(4, "big") + data)
        self.control.setblocking(False)

    def frames(self) -> list[Any]:
        """Read what has come on the control socket; sets `closed` at its end. A malformed frame is `None`."""
        try:
            part = self.control.recv(MAX_REPORT)
        except BlockingIOError:
            return []
        except OSError:
            part = b""
        if not part:
            self.closed = True
            return []
        self._inbox += part
        found: list[Any] = []
        while len(self._inbox) >= 4:
            size = int.from_bytes(self._inbox[:4], "big")
            if size > MAX_REPORT:
                return [*found, None]
            if len(self._inbox) < 4 + size:
                break
            body, self._inbox = self._inbox[4 : 4 + size], self._inbox[4 + size :]
            try:
                found.append(json.loads(body))
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

    def kill(self) -> None:
        """Kill the child and all that descends from it, and wait until it has gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # The processes of a PID namespace die a moment after its first; they hold the pipe until then.
        with contextlib.suppress(OSError):
            self._wait_for_the_last()
        self.output.close()
        self.control.close()
        if self._folder:
            with contextlib.suppress(OSError):
                self._folder.cleanup()

    def _wait_for_the_last(self) -> None:
        for _ in range(64):
            ready, _, _ = select.select([self.output], [], [], 0.5)
            if not ready or not self.drain():
                return


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


def watch(children: list[Child], nonce: str, tier: str, cancel: threading.Event | None) -> ProgramResult:
    """The last word on one program, whose processes have ended when it is said.

    Args:
        children: its process; where its tests have one of their own, that is the second. The last one is the judge, whose
            "nonce" frame is the sign of success.
        nonce: what that frame must hold. A program alone is told it only in answer to "ended".
        cancel: set by another thread to give up.
    """
    try:
        run = Watch(children, nonce, cancel)
        reason, detail = run.verdict()
        seconds = time.monotonic() - run.started
    finally:
        for child in children:
            child.kill()
    tail = children[0].tail.decode("utf-8", "replace")
    mode = "one process" if len(children) == 1 else "two processes"
    return ProgramResult(reason == "ok", reason, tier, mode, seconds, detail, tail)


class Watch:
    """What is known of a program that runs; see `watch`."""

    def __init__(self, children: list[Child], nonce: str, cancel: threading.Event | None) -> None:
        self.children, self.judge, self.nonce, self.cancel = children, children[-1], nonce, cancel
        self.ready: set[Child] = set()
        self.ended = False
        self.seconds = max(child.limits.seconds for child in children)
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
            late = now - self.born > START_UP
            return ("error", f"the sandbox was not up after {START_UP:.0f} s") if late else None
        if now - self.started > self.seconds:
            return "timeout", f"still running after {self.seconds:g} s"
        for child in self.children:
            processes, memory = child.usage()
            if memory > child.limits.memory_mb + 64:  # the harness's own
                return "memory", f"{memory} MiB in all; the limit is {child.limits.memory_mb}"
            if processes > child.limits.processes + 4:
                return "processes", f"{processes} processes; the limit is {child.limits.processes}"
        return None

    def _output(self, child: Child, selector: selectors.BaseSelector) -> Found:
        if not child.drain():
            selector.unregister(child.output)
        if child.written > child.limits.output_kb * 1024:
            return "output", f"more than {child.limits.output_kb} KiB of output"
        return None

    def _control(self, child: Child, selector: selectors.BaseSelector) -> Found:
        for frame in child.frames():
            if found := self._frame(child, frame):
                return found
        if not child.closed:
            return None
        selector.unregister(child.control)
        if child is not self.judge:
            # The program's process ends when the checker has; the checker's last word is then already there.
            for frame in self.judge.frames():
                if found := self._frame(self.judge, frame):
                    return found
        return self._gone(child)

    def _frame(self, child: Child, frame: object) -> Found:
        match frame:
            case ["ready"]:
                if child not in self.ready:
                    self.ready.add(child)
                    self.started = time.monotonic()
            case ["failed", str(reason), str(detail)]:
                return self._failed(child, reason, detail[:500])
            case ["ended"] if len(self.children) == 1 and not self.ended:
                self.ended = True
                child.say({"nonce": self.nonce})
            case ["nonce", str(nonce)] if child is self.judge and secrets.compare_digest(
                nonce.encode(errors="replace"), self.nonce.encode()
            ):
                return "ok", ""
            case _:
                return "protocol", "the program spoke for the harness"
        return None

    def _failed(self, child: Child, reason: str, detail: str) -> tuple[str, str]:
        if reason == "exit" and child.role == "checker":
            # It only saw the line go dead; the program's own process knows more.
            for other in self.children:
                if other is not child:
                    return self._last_words(other)
        if reason not in ("wrong", "error", "syntax", "memory", "exit", "output", "protocol"):
            return "protocol", "a report of no known form"
        return reason, detail

    def _last_words(self, candidate: Child) -> tuple[str, str]:
        candidate.control.settimeout(2)
        for frame in candidate.frames():
            match frame:
                case ["ready"]:
                    continue
                case ["failed", str(reason), str(detail)] if reason != "ok":
                    return self._failed(candidate, reason, detail[:500])
        return self._gone(candidate) or ("exit", "the program ended before its end")

    def _gone(self, child: Child) -> Found:
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
        if child.role == "checker":
            return "error", "the process of the tests ended early"
        return "exit", "the program ended before its end"
