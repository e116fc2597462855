"""The math graders by name, and a pool of grading processes that can be killed.

A grader decides at once what needs no algebra, and names the function that decides the rest in a worker.

Algebra on model output hangs, recurses and eats memory, often inside one uninterruptible call, so signals and threads
cannot bound it. Each worker has a memory limit and is killed at the time limit; either costs one grade, and a new
worker takes its place, and none is left behind.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from loragate.errors import ConfigError, LoragateError, nearest
from loragate.evaluation.answers import Grade, boxed_answer
from loragate.evaluation.grading import dft
from loragate.evaluation.grading.default import UnjudgedError, decide

OnProgress = Callable[[int, int], None]
START_S = 120.0  # seconds until a process is ready; sympy takes two, and much more on a busy machine
JOBS_PER_WORKER = 2000  # after which a fresh process takes its place, as sympy's caches only grow
DEAD = ("timeout", "crashed")


@dataclass(frozen=True)
class Job:
    """A comparison for a worker; equal jobs have equal verdicts and are graded once."""

    gold: str
    text: str
    tolerance: float | None = None


@dataclass(frozen=True)
class MathGrader:
    """A way to judge answers.

    Attributes:
        name: its name in `MATH_GRADERS`.
        begin: (response, gold, tolerance) to a grade, or to the job that a worker must do for it.
        judge: `module:function` that the worker calls.
    """

    name: str
    begin: Callable[[str, str, float | None], Grade | Job]
    judge: str


def math_grader(name: str) -> MathGrader:
    """Return the grader called `name`, or raise `ConfigError`."""
    if name not in MATH_GRADERS:
        raise ConfigError(
            f"unknown math grader {name!r}{nearest(name, MATH_GRADERS)}; known: {', '.join(MATH_GRADERS)}"
        )
    return MATH_GRADERS[name]


def _begin_default(response: str, gold: str, tolerance: float | None) -> Grade | Job:
    answer = boxed_answer(response)
    if answer is None:
        return Grade(False, None, "no_box")
    try:
        verdict = decide(gold, answer, tolerance)
    except (UnjudgedError, RecursionError):
        return Grade(False, answer, "unparsed")
    return Job(gold, answer, tolerance) if verdict is None else Grade(verdict, answer, "ok" if verdict else "wrong")


def _begin_dft(response: str, gold: str, tolerance: float | None) -> Grade | Job:
    answer, stripped = dft.extract(response), dft.strip_string(gold)
    if answer.strip().lower() == stripped.strip().lower():
        return Grade(True, answer, "ok")
    return Job(stripped, answer) if answer else Grade(False, None, "no_box")


_JUDGES = "loragate.evaluation.grading.symbolic"
MATH_GRADERS: dict[str, MathGrader] = {
    grader.name: grader
    for grader in (
        MathGrader("default", _begin_default, "loragate.evaluation.grading.default:judge"),
        MathGrader("math_verify", lambda response, gold, tolerance: Job(gold, response), f"{_JUDGES}:math_verify"),
        MathGrader("dft", _begin_dft, f"{_JUDGES}:dft"),
    )
}


class GradingPool(AbstractContextManager["GradingPool"]):
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
            ConfigError: for an unknown grader.
        """
        self.grader = math_grader(grader) if isinstance(grader, str) else grader
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = min(8, cores) if workers is None else workers
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._known: dict[Job, Grade] = {}
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        self._lock = threading.Lock()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers. The pool may be used again; it then starts new ones."""
        for workers in (self._busy, self._idle):
            while workers:
                workers.pop().kill()

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
        decided = [
            self.grader.begin(response, gold, tolerance)
            for (response, gold), tolerance in zip(pairs, allowed, strict=True)
        ]
        waiting = Counter(item for item in decided if isinstance(item, Job) and item not in self._known)
        done = len(pairs) - waiting.total()

        def report(job: Job | None = None) -> None:
            nonlocal done
            done += 0 if job is None else waiting[job]
            if on_progress is not None:
                on_progress(done, len(pairs))

        report()
        self.run(list(waiting), report)
        return [item if isinstance(item, Grade) else self._known[item] for item in decided]

    def run(self, jobs: Sequence[Job], on_done: Callable[[Job], None] | None = None) -> list[Grade]:
        """Return the grades of `jobs`, from memory or from workers; concurrent calls take turns."""
        with self._lock:
            todo = [job for job in dict.fromkeys(jobs) if job not in self._known][::-1]  # taken from the end
            try:
                while todo or self._busy:
                    while todo and len(self._busy) < self.workers:
                        worker = self._idle.pop() if self._idle else _Worker(self.grader, self.memory_mb)
                        self._busy.append(worker)
                        worker.give(todo.pop(), self.timeout_s)
                    for worker in _due(self._busy):
                        grade = worker.answer()
                        if grade is None:  # it is ready now, or half a line has come
                            continue
                        self._busy.remove(worker)
                        job, used = worker.job, worker.jobs > 1
                        if grade.reason in DEAD or worker.jobs == JOBS_PER_WORKER:
                            worker.kill()
                        else:
                            self._idle.append(worker)
                        if grade.reason == "crashed" and used:
                            todo.append(job)  # earlier jobs may have filled its memory: a fresh one decides
                            continue
                        self._known[job] = grade
                        if on_done is not None:
                            on_done(job)
            except BaseException:  # Ctrl-C above all: what is running now would answer the next call
                self.close()
                raise
            return [self._known[job] for job in jobs]


class _Worker:
    """One process and its pipes."""

    def __init__(self, grader: MathGrader, memory_mb: int) -> None:
        self.grader, self.memory_mb = grader, memory_mb
        # the same hash seed everywhere, as the order of sympy's terms can depend on it
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loragate.evaluation.grading.worker", grader.judge, str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a pipe that nobody reads would fill and stop it
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.is_ready = False
        self.jobs = 0
        self.until, self.line = time.monotonic() + START_S, b""

    def give(self, job: Job, timeout_s: float) -> None:
        """Let it judge a job; the clock starts when the process is ready."""
        self.job, self.timeout_s = job, timeout_s
        self.jobs += 1
        if self.is_ready:
            self._send()

    def answer(self) -> Grade | None:
        """Its grade, also where it has died or is late; None where there is more to wait for.

        Raises:
            LoragateError: for a process that does not become ready.
        """
        message: dict[str, Any] | str = "timeout"
        if _readable([self]):  # also where others kept the caller until after its time
            chunk = os.read(self.output.fileno(), 1 << 16)  # not readline, which would wait for the rest of a line
            self.line += chunk
            if chunk and not self.line.endswith(b"\n"):
                return None
            message, self.line = json.loads(self.line) if chunk else "crashed", b""
        if self.is_ready:
            return Grade(False, self.job.text, message) if isinstance(message, str) else Grade(**message)
        if isinstance(message, str):
            how = "ended before it was ready" if message == "crashed" else f"did not start within {START_S:.0f} s"
            raise LoragateError(
                f"a process of the grader '{self.grader.name}' {how}: {self.grader.judge} with {self.memory_mb} MB. Check the "
                "machine's memory and process limits"
            )
        if "failed" in message:
            raise LoragateError(
                f"the grader '{self.grader.name}' cannot run: {message['failed']}. "
                'Install it with: pip install "math-verify[antlr4_11_0]"'
            )
        self.is_ready = True
        self._send()
        return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):  # closing writes out what was not sent
            self.input.close()
        self.output.close()

    def _send(self) -> None:
        self.until = time.monotonic() + self.timeout_s
        line = json.dumps([self.job.gold, self.job.text, self.job.tolerance, self.timeout_s]) + "\n"
        with suppress(BrokenPipeError):  # it died while idle; its output will tell
            self.input.write(line.encode())
            self.input.flush()


def _readable(workers: Sequence[_Worker], wait_ms: float = 0.0) -> set[int]:
    """The descriptors that have something to read, or have been closed."""
    poll = select.poll()  # as select takes no descriptor beyond 1023
    for worker in workers:
        poll.register(worker.output, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(wait_ms)}


def _due(workers: Sequence[_Worker]) -> list[_Worker]:
    """Workers that have written something or have ended, or whose time is over; waits until there is one."""
    wait = min(worker.until for worker in workers) - time.monotonic()
    readable = _readable(workers, max(0.0, wait) * 1000 + 1)  # one more, so that a time is over where nothing came
    now = time.monotonic()
    return [worker for worker in workers if worker.output.fileno() in readable or now >= worker.until]


_pools: dict[str, GradingPool] = {}
_pools_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a forked child must not end its parent's workers


def grade_math(response: str, gold: str, grader: str = "default", *, tolerance: float | None = None) -> Grade:
    """Judge the answer in `response` against the reference `gold`; algebra runs in a killable process shared by all calls.

    Args:
        response: the whole response of a model; see `answers.py` for where its answer is looked for.
        gold: the reference answer as the data set has it, LaTeX or plain, not boxed.
        grader: a name in `MATH_GRADERS`.
        tolerance: absolute error that the question allows (the `error` column of OlympiadBench); default grader only.

    Raises:
        ConfigError: for an unknown grader.
    """
    found = math_grader(grader).begin(response, gold, tolerance)
    if isinstance(found, Grade):
        return found
    with _pools_lock:
        if grader not in _pools:
            _pools[grader] = GradingPool(grader, workers=1)
        pool = _pools[grader]
    return pool.run([found])[0]


@atexit.register
def close_shared_pools() -> None:
    """End the processes that `grade_math` started; the next call starts them again."""
    with _pools_lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()
