"""A pool of grading processes that can be killed.

Algebra on model output hangs, recurses and eats memory, often inside one uninterruptible call, so signals and threads
cannot bound it. Each worker has a memory limit and is killed at the time limit; either costs one grade, and a new
worker takes its place. One thread feeds all workers, so the pool works from any thread and leaves none behind.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from loragate.errors import ConfigError, LoragateError
from loragate.evaluation.grade import Grade
from loragate.evaluation.grading.graders import Job, MathGrader, math_grader

OnProgress = Callable[[int, int], None]
START_S = 120.0
JOBS_PER_WORKER = 2000


class GradingPool:
    """Grades many answers with one grader, each within a time and memory limit.

    Use as a context manager; leaving it, by Ctrl-C too, ends all workers. Verdicts on equal (gold, extracted answer)
    pairs are kept for the life of the pool.
    """

    def __init__(
        self,
        grader: str | MathGrader = "default",
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_mb: int = 2048,
    ) -> None:
        """Args:
            grader: a name in `MATH_GRADERS`, or a grader of your own.
            workers: processes; by default the number of usable cores, at most 8. They start when first needed.
            timeout_s: seconds for one answer, after which its worker is killed.
            memory_mb: memory for one answer, on top of what the worker has at start (Linux).

        Raises:
            ConfigError: for an unknown grader or a limit that is not positive.
        """
        self.grader = math_grader(grader) if isinstance(grader, str) else grader
        self.workers = _usable_cores() if workers is None else workers
        for name, value in (("workers", self.workers), ("timeout_s", timeout_s), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}; it must be positive")
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._known: dict[Job, Grade] = {}
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> GradingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers. The pool may be used again; it then starts new ones."""
        while self._idle or self._busy:
            (self._idle or self._busy).pop().kill()

    def grade(
        self,
        pairs: Sequence[tuple[str, str]],
        on_progress: OnProgress | None = None,
        *,
        tolerances: Sequence[float | None] | None = None,
    ) -> list[Grade]:
        """Return one grade per (response, gold), in order.

        Args:
            pairs: responses with their reference answers.
            tolerances: absolute error allowed in each answer, where its data set states one.
            on_progress: called with (answers done, answers in all).
        """
        allowed = [None] * len(pairs) if tolerances is None else tolerances
        begun = [
            self.grader.begin(response, gold, tolerance)
            for (response, gold), tolerance in zip(pairs, allowed, strict=True)
        ]
        waiting: dict[Job, int] = {}
        for item in begun:
            if isinstance(item, Job) and item not in self._known:
                waiting[item] = waiting.get(item, 0) + 1
        done = len(pairs) - sum(waiting.values())
        if on_progress is not None:
            on_progress(done, len(pairs))

        def report(job: Job) -> None:
            nonlocal done
            done += waiting[job]
            if on_progress is not None:
                on_progress(done, len(pairs))

        self.run(list(waiting), report)
        return [item if isinstance(item, Grade) else self._known[item] for item in begun]

    def run(self, jobs: Sequence[Job], on_done: Callable[[Job], None] | None = None) -> list[Grade]:
        """Return the grades of `jobs`, from memory or from workers; concurrent calls take turns."""
        with self._lock:
            todo = deque(job for job in dict.fromkeys(jobs) if job not in self._known)
            if todo:
                try:
                    self._work(todo, on_done)
                except BaseException:  # Ctrl-C above all: what is running now would answer the next call
                    self.close()
                    raise
            return [self._known[job] for job in jobs]

    def _work(self, todo: deque[Job], on_done: Callable[[Job], None] | None) -> None:
        with selectors.DefaultSelector() as selector:
            while todo or self._busy:
                self._hand_out(todo, selector)
                now = time.monotonic()
                wait = max(0.0, min(worker.deadline for worker in self._busy) - now)
                for ready, _ in selector.select(min(wait, 1.0)):
                    self._collect(ready.data, todo, selector, on_done)
                now = time.monotonic()
                for worker in [worker for worker in self._busy if worker.deadline <= now]:
                    self._give_up(worker, "timeout", todo, selector, on_done)

    def _hand_out(self, todo: deque[Job], selector: selectors.BaseSelector) -> None:
        while todo and len(self._busy) < self.workers:
            worker = self._idle.pop() if self._idle else _Worker(self.grader.judge, self.memory_mb)
            self._busy.append(worker)
            selector.register(worker.output, selectors.EVENT_READ, worker)
            worker.assign(todo.popleft(), self.timeout_s)

    def _collect(
        self, worker: _Worker, todo: deque[Job], selector: selectors.BaseSelector, on_done: Callable[[Job], None] | None
    ) -> None:
        message = worker.receive()
        if message is None:
            return
        if message == {}:
            self._give_up(worker, "crashed", todo, selector, on_done)
        elif "failed" in message:
            raise LoragateError(
                f"the grader '{self.grader.name}' cannot run: {message['failed']}. "
                'Install it with: pip install "math-verify[antlr4_11_0]"'
            )
        elif "ready" in message:
            worker.start(self.timeout_s)
        else:
            grade = Grade(message["correct"], message["extracted"], message["reason"])
            self._settle(worker, grade, selector, on_done)
            if worker.jobs < JOBS_PER_WORKER:
                self._idle.append(worker)
            else:
                worker.kill()

    def _give_up(
        self,
        worker: _Worker,
        reason: str,
        todo: deque[Job],
        selector: selectors.BaseSelector,
        on_done: Callable[[Job], None] | None,
    ) -> None:
        worker.kill()
        if not worker.is_ready:
            raise LoragateError(
                f"a process of the grader '{self.grader.name}' "
                + ("ended before it was ready" if reason == "crashed" else f"did not start within {START_S:.0f} s")
                + f": {self.grader.judge} with {self.memory_mb} MB. Check the machine's memory and process limits"
            )
        if reason == "crashed" and worker.jobs > 1:  # earlier jobs may have filled its memory: a fresh one decides
            selector.unregister(worker.output)
            self._busy.remove(worker)
            todo.appendleft(worker.job)
            return
        self._settle(worker, Grade(False, worker.job.text, reason), selector, on_done)

    def _settle(
        self, worker: _Worker, grade: Grade, selector: selectors.BaseSelector, on_done: Callable[[Job], None] | None
    ) -> None:
        selector.unregister(worker.output)
        self._busy.remove(worker)
        self._known[worker.job] = grade
        if on_done is not None:
            on_done(worker.job)


class _Worker:
    """One process, its pipes and the job it is at."""

    def __init__(self, judge: str, memory_mb: int) -> None:
        # the same hash seed everywhere, as the order of sympy's terms can depend on it
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loragate.evaluation.grading.worker", judge, str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.buffer = b""
        self.is_ready = False
        self.jobs = 0
        self.job = Job("", "")
        self.deadline = 0.0

    def assign(self, job: Job, timeout_s: float) -> None:
        """Give it a job; the clock starts when the process is ready."""
        self.job = job
        self.jobs += 1
        self.deadline = time.monotonic() + START_S
        if self.is_ready:
            self.start(timeout_s)

    def start(self, timeout_s: float) -> None:
        self.is_ready = True
        self.deadline = time.monotonic() + timeout_s
        line = json.dumps([self.job.gold, self.job.text, self.job.tolerance, timeout_s]) + "\n"
        with suppress(BrokenPipeError):  # it died while idle; its output will tell
            self.input.write(line.encode())
            self.input.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return its next message, None if the line is not complete yet, {} when it has ended."""
        chunk = os.read(self.output.fileno(), 1 << 16)
        if not chunk:
            return {}
        self.buffer += chunk
        line, found, rest = self.buffer.partition(b"\n")
        if not found:
            return None
        self.buffer = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):  # closing writes out what was not sent
            self.input.close()
        self.output.close()


def _usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores))
