"""Watching children until there is a verdict: their reports, their output, their time and their size."""

from __future__ import annotations

import secrets
import selectors
import signal
import threading
import time

from loragate.evaluation.sandbox.child import Child
from loragate.evaluation.sandbox.tiers import ProgramResult

TICK = 0.1
START_UP = 60.0


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
