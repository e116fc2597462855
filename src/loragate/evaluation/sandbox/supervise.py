"""Watching children until there is a verdict: their reports, their output, their time and their size."""

from __future__ import annotations

import secrets
import selectors
import signal
import threading
import time
from dataclasses import dataclass

from loragate.evaluation.sandbox.child import Child

TICK = 0.1
START_UP = 60.0


@dataclass(frozen=True)
class Verdict:
    """Why a program stopped, in one word and one line; "ok" is the only word that passes."""

    reason: str
    detail: str
    seconds: float


class Watch:
    """The last word on one program, which may be several children; `judge` is the one that knows.

    Args:
        children: all of them.
        judge: the child whose "nonce" frame is the sign of success.
        nonce: what that frame must hold. When `handed_out` is set, it is sent only in answer to "ended".
        cancel: set by another thread to give up.
    """

    def __init__(
        self, children: list[Child], judge: Child, nonce: str, handed_out: bool, cancel: threading.Event | None
    ) -> None:
        self.children, self.judge, self.nonce, self.handed_out, self.cancel = children, judge, nonce, handed_out, cancel
        self.ready: set[Child] = set()
        self.ended = False
        self.seconds = max(child.limits.seconds for child in children)
        self.started = self.born = time.monotonic()

    def verdict(self) -> Verdict:
        """Block until there is one."""
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                selector.register(child.control, selectors.EVENT_READ, (child, "control"))
                selector.register(child.output, selectors.EVENT_READ, (child, "output"))
            next_look = time.monotonic() + TICK
            while True:
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + TICK
                    found = self._look(now)
                    if found:
                        return self._say(*found)
                for key, _ in selector.select(max(next_look - time.monotonic(), 0)):
                    child, stream = key.data
                    found = self._output(child, selector) if stream == "output" else self._control(child, selector)
                    if found:
                        return self._say(*found)

    def _say(self, reason: str, detail: str) -> Verdict:
        return Verdict(reason, detail, time.monotonic() - self.started)

    def _look(self, now: float) -> tuple[str, str] | None:
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

    def _output(self, child: Child, selector: selectors.BaseSelector) -> tuple[str, str] | None:
        if not child.drain():
            selector.unregister(child.output)
        if child.written > child.limits.output_kb * 1024:
            return "output", f"more than {child.limits.output_kb} KiB of output"
        return None

    def _control(self, child: Child, selector: selectors.BaseSelector) -> tuple[str, str] | None:
        for frame in child.frames():
            found = self._frame(child, frame)
            if found:
                return found
        if not child.closed:
            return None
        selector.unregister(child.control)
        if child is not self.judge:
            # The program's process ends when the checker has; the checker's last word is then already there.
            for frame in self.judge.frames():
                found = self._frame(self.judge, frame)
                if found:
                    return found
        return self._gone(child)

    def _frame(self, child: Child, frame: object) -> tuple[str, str] | None:
        match frame:
            case ["ready"]:
                if child not in self.ready:
                    self.ready.add(child)
                    self.started = time.monotonic()
            case ["failed", str(reason), str(detail)]:
                return self._failed(child, reason, detail[:500])
            case ["ended"] if self.handed_out and child is self.judge and not self.ended:
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

    def _gone(self, child: Child) -> tuple[str, str] | None:
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
