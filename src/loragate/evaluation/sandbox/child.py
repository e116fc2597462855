"""One confined interpreter as the host sees it: how it starts, what it says, how much it uses, how it is killed.

Everything that comes out of it is read in small pieces with a cap, so that a flood costs this process nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from importlib.resources import files
from typing import Any

from loragate.evaluation.sandbox.harness.wire import MAX_FRAME
from loragate.evaluation.sandbox.tiers import ENVIRONMENT, Launch, Limits, interpreter, package_folders

PACKAGE = "loragate.evaluation.sandbox.harness"
TAIL = 2000
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
    for name in ("wire", "confine", role):
        parts.append((f"{PACKAGE}.{name}", folder.joinpath(f"{name}.py").read_text(encoding="utf-8")))
    return (
        "import sys, types\n"
        f"for name, text in {parts!r}:\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    exec(compile(text, name, 'exec'), sys.modules[name].__dict__)\n"
    )


assert MAX_REPORT < MAX_FRAME
