"""The math graders by name, and a pool of processes for what they cannot decide at once.

Algebra on model output hangs, recurses and eats memory, often inside one uninterruptible call. So it runs in processes
(`worker.py`) with a memory limit that end themselves at the time limit; either costs one grade, and a new process takes
its place.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from loragate.errors import ConfigError, LoragateError, nearest
from loragate.evaluation.answers import Grade, extract_boxed_answers
from loragate.evaluation.grading.default import UnjudgedError, verify_answer

if TYPE_CHECKING:
    from loragate.generation import OnProgress


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


def _begin_default(response: str, gold: str, tolerance: float | None) -> Grade | Job:
    parts = extract_boxed_answers(response)
    if not parts:
        return Grade(False, None, "no_box")
    answer = ", ".join(parts)
    try:
        # one value may be boxed in two notations: 15 39/40, or 639/40
        same = len(parts) > 1 and all(verify_answer(gold, one, tolerance) for one in parts)
        verdict = same or verify_answer(gold, answer, tolerance)
    except (UnjudgedError, RecursionError):
        return Grade(False, answer, "unparsed")
    return Job(gold, answer, tolerance) if verdict is None else Grade(verdict, answer, "ok" if verdict else "wrong")


MATH_GRADERS: dict[str, MathGrader] = {
    "default": MathGrader("default", _begin_default, "loragate.evaluation.grading.default:judge"),
    "math_verify": MathGrader(
        "math_verify",
        lambda response, gold, tolerance: Job(gold, response),
        "loragate.evaluation.grading.math_verify_grader:judge",
    ),
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
            timeout_s: seconds for one answer, after which its worker ends.
            memory_mb: memory for one answer, on top of what the worker has at start (Linux).

        Raises:
            ConfigError: for an unknown grader.
        """
        if isinstance(grader, str):
            if grader not in MATH_GRADERS:
                known = ", ".join(MATH_GRADERS)
                raise ConfigError(f"unknown math grader {grader!r}{nearest(grader, MATH_GRADERS)}; known: {known}")
            grader = MATH_GRADERS[grader]
        self.grader = grader
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = min(8, cores) if workers is None else workers
        self.command = [sys.executable, "-m", "loragate.evaluation.grading.worker"]
        self.command += [grader.judge, str(memory_mb), str(timeout_s)]
        self._known: dict[Job, Grade] = {}
        self._alive: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all workers. The pool may be used again; it then starts new ones."""
        self._stopped.set()
        self._idle.clear()
        while self._alive:
            self._alive.pop().kill()

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

        Raises:
            LoragateError: for a grader whose process does not start.
        """
        allowed = [None] * len(pairs) if tolerances is None else tolerances
        decided = [
            self.grader.begin(response, gold, tolerance)
            for (response, gold), tolerance in zip(pairs, allowed, strict=True)
        ]
        waiting = Counter(item for item in decided if isinstance(item, Job) and item not in self._known)
        done = len(pairs) - waiting.total()
        report = on_progress or (lambda done, total: None)
        report(done, len(pairs))
        # concurrent calls take turns
        with self._lock, ThreadPoolExecutor(max(self.workers, 1)) as threads:
            self._stopped.clear()
            running = {threads.submit(self._judge, job): job for job in waiting}
            try:
                for one in as_completed(running):
                    job = running[one]
                    self._known[job] = one.result()
                    done += waiting[job]
                    report(done, len(pairs))
            except BaseException:  # Ctrl-C above all
                threads.shutdown(wait=False, cancel_futures=True)
                self.close()  # which ends what the threads wait for
                raise
        return [item if isinstance(item, Grade) else self._known[item] for item in decided]

    def _judge(self, job: Job) -> Grade:
        """The grade of a worker that is idle, or of a new one."""
        try:
            worker, used = self._idle.pop(), True
        except IndexError:
            worker, used = _Worker(self.grader.name, self.command, self._alive), False
        grade = worker.ask(job)
        if grade.reason not in ("timeout", "crashed"):
            self._idle.append(worker)
            return grade
        worker.kill()
        with suppress(ValueError):  # closed
            self._alive.remove(worker)
        # earlier jobs may have filled its memory: a fresh one decides
        return self._judge(job) if used and grade.reason == "crashed" and not self._stopped.is_set() else grade


class _Worker:
    """One process and its pipes; enters itself into `alive` before anything is waited for."""

    def __init__(self, name: str, command: Sequence[str], alive: list[_Worker]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a pipe that nobody reads would fill and stop it
            text=True,
            encoding="utf-8",
            # the same hash seed everywhere, as the order of sympy's terms can depend on it
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        alive.append(self)
        greeting = self.output.readline()
        if failed := json.loads(greeting or '{"failed": "it ended before it was ready"}').get("failed"):
            raise LoragateError(
                f"a process of the grader '{name}' cannot run: {failed}. Check that its packages are installed "
                f'(pip install ".[math]" in a checkout), and the limits of the machine; the command was {" ".join(command)}'
            )

    def ask(self, job: Job) -> Grade:
        """Its grade, "timeout" or "crashed" where it ended without one."""
        answer = ""
        with suppress(OSError, ValueError):  # it has died while idle, or was killed by `close`
            self.input.write(json.dumps([job.gold, job.text, job.tolerance]) + "\n")
            self.input.flush()
            answer = self.output.readline()
        if answer.endswith("\n"):
            return Grade(**json.loads(answer))
        timeout = self.process.wait() == -signal.SIGALRM
        return Grade(False, job.text, "timeout" if timeout else "crashed")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        with suppress(OSError):  # closing writes out what was not sent
            self.input.close()
        self.output.close()


@cache
def _shared_pool(grader: str, process: int) -> GradingPool:
    """The pool of `grade_math` in a process: a forked child must not use its parent's workers."""
    return GradingPool(grader, workers=1)


def grade_math(response: str, gold: str, grader: str = "default", *, tolerance: float | None = None) -> Grade:
    """Judge the answer in `response` against the reference `gold`; algebra runs in a process shared by all calls.

    Args:
        response: the whole response of a model; see `answers.py` for where its answer is looked for.
        gold: the reference answer as the data set has it, LaTeX or plain, not boxed.
        grader: a name in `MATH_GRADERS`.
        tolerance: absolute error that the question allows; default grader only.

    Raises:
        ConfigError: for an unknown grader.
    """
    return _shared_pool(grader, os.getpid()).grade([(response, gold)], tolerances=[tolerance])[0]
