"""The math graders by name, and a pool of grading processes that can be killed.

A grader decides at once what needs no algebra, and names the function that decides the rest in a worker.

Algebra on model output hangs, recurses and eats memory, often inside one uninterruptible call, so signals and threads
cannot bound it. Each worker has a memory limit and is killed at the time limit; either costs one grade, and a new
worker takes its place. A thread waits for each worker while answers are graded, and none is left behind.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from loragate.errors import ConfigError, LoragateError, nearest
from loragate.evaluation.answers import Grade, last_boxed
from loragate.evaluation.grading import dft
from loragate.evaluation.grading.default import UnjudgedError, decide

OnProgress = Callable[[int, int], None]
START_S = 120.0
JOBS_PER_WORKER = 2000


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
    answer = last_boxed(response)
    if answer is None:
        return Grade(False, None, "no_box")
    try:
        verdict = decide(gold, answer, tolerance, lambda *_: None)
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
        MathGrader("default", _begin_default, f"{_JUDGES}:default"),
        MathGrader("math_verify", lambda response, gold, tolerance: Job(gold, response), f"{_JUDGES}:math_verify"),
        MathGrader("dft", _begin_dft, f"{_JUDGES}:dft"),
    )
}


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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = min(8, cores) if workers is None else workers
        for name, value in (("workers", self.workers), ("timeout_s", timeout_s), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}; it must be positive")
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._known: dict[Job, Grade] = {}
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        self._lock = threading.Lock()
        self._ended = False  # before its jobs were done

    def __enter__(self) -> GradingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers. The pool may be used again; it then starts new ones."""
        for worker in self._busy:  # whose threads see it end, and put it away
            worker.process.kill()
        while self._idle:
            self._idle.pop().kill()

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
            self._ended = False
            todo = [job for job in dict.fromkeys(jobs) if job not in self._known]
            with ThreadPoolExecutor(self.workers) as threads:
                running = {threads.submit(self._judge, job): job for job in todo}
                try:
                    for done in as_completed(running):
                        self._known[running[done]] = done.result()
                        if on_done is not None:
                            on_done(running[done])
                except BaseException:  # Ctrl-C above all: what is running now would answer the next call
                    threads.shutdown(wait=False, cancel_futures=True)
                    self._ended = True
                    self.close()
                    raise
            return [self._known[job] for job in jobs]

    def _judge(self, job: Job) -> Grade:
        """The grade of one job, by a worker of this thread's own for as long as it takes."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self.grader, self.memory_mb)
        self._busy.append(worker)
        if self._ended:
            worker.process.kill()
        try:
            found = worker.answer(job, self.timeout_s)
        finally:
            self._busy.remove(worker)
        if isinstance(found, Grade):
            if worker.jobs < JOBS_PER_WORKER:
                self._idle.append(worker)
            else:
                worker.kill()
            return found
        worker.kill()
        # earlier jobs may have filled its memory: a fresh one decides
        if found == "crashed" and worker.jobs > 1 and not self._ended:
            return self._judge(job)
        return Grade(False, job.text, found)


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
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.is_ready = False
        self.jobs = 0

    def answer(self, job: Job, timeout_s: float) -> Grade | str:
        """Its grade, or why there is none, "timeout" or "crashed"; the clock starts when the process is ready.

        Raises:
            LoragateError: for a process that does not become ready.
        """
        self.jobs += 1
        if not self.is_ready:
            self._start()
        line = json.dumps([job.gold, job.text, job.tolerance, timeout_s]) + "\n"
        with suppress(BrokenPipeError):  # it died while idle; its output will tell
            self.input.write(line.encode())
            self.input.flush()
        message = self._receive(timeout_s)
        return message if isinstance(message, str) else Grade(**message)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):  # closing writes out what was not sent
            self.input.close()
        self.output.close()

    def _start(self) -> None:
        said = self._receive(START_S)
        if isinstance(said, str):
            self.kill()
            how = "ended before it was ready" if said == "crashed" else f"did not start within {START_S:.0f} s"
            raise LoragateError(
                f"a process of the grader '{self.grader.name}' {how}: {self.grader.judge} with {self.memory_mb} MB. Check the "
                "machine's memory and process limits"
            )
        if "failed" in said:
            self.kill()
            raise LoragateError(
                f"the grader '{self.grader.name}' cannot run: {said['failed']}. "
                'Install it with: pip install "math-verify[antlr4_11_0]"'
            )
        self.is_ready = True

    def _receive(self, seconds: float) -> dict[str, Any] | str:
        """Its next line, or "timeout" or "crashed"."""
        until, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            # poll, as select takes no descriptor beyond 1023
            poll = select.poll()
            poll.register(self.output, select.POLLIN)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                return "timeout"
            chunk = os.read(self.output.fileno(), 1 << 16)
            if not chunk:
                return "crashed"
            line += chunk
        message: dict[str, Any] = json.loads(line)
        return message


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
    begun = math_grader(grader).begin(response, gold, tolerance)
    if isinstance(begun, Grade):
        return begun
    with _pools_lock:
        if grader not in _pools:
            _pools[grader] = GradingPool(grader, workers=1)
        pool = _pools[grader]
    return pool.run([begun])[0]


@atexit.register
def close_shared_pools() -> None:
    """End the processes that `grade_math` started; the next call starts them again."""
    with _pools_lock:
        for pool in _pools.values():
            pool.close()
        _pools.clear()
