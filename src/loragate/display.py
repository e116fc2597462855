"""Progress for people: a live display on a terminal, plain lines in a log.

Low, so that the rooms that do a command's work can show how far they are.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from loragate.printable import escape_for_terminal

PLAIN_SECONDS = 10.0  # between two lines of a job in a log
HEARTBEAT_SECONDS = 60.0
"""Seconds that nothing is silent for, not even a job that reports nothing, such as the loading of a model."""
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers shows none then, either
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""What the environment says to libraries, unless it says something else already."""
ALWAYS_SHOWN_WARNINGS = r".*(missing adapter keys|changes the base weights)"
"""PEFT's warnings that an adapter was not loaded whole, or that the base is not the base; they are never hidden."""
FILE_WIDTH = 120  # columns of a table that goes into a file or a pipe: room for names and intervals in one line


_open_heartbeats: list[threading.Event] = []
"""What `heartbeat` watches, the innermost last."""
_open_phases: list[str] = []
_last_print_time = [time.monotonic()]
"""When anything was last printed."""


class _SafeConsole(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        _last_print_time[0] = time.monotonic()
        super().print(*objects, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(escape_for_terminal(text), **how)


def console() -> Console:
    """The console that results are printed to; no text that it is given can move the cursor or set a title."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else FILE_WIDTH  # None: rich asks the terminal, or COLUMNS
    return _SafeConsole(highlight=False, markup=False, soft_wrap=not terminal, width=width, quiet=_is_nonzero_rank())


class _ToStderr(logging.Handler):
    """Writes to the standard error of the moment; a StreamHandler keeps the one that it was made with."""

    def emit(self, record: logging.LogRecord) -> None:
        print(escape_for_terminal(self.format(record)), file=sys.stderr)


def configure_logging() -> None:
    """Our own warnings to stderr, one line each; other libraries' only from error upwards, and no telemetry.

    Libraries that are imported later, as most are when a command begins, are told by the environment, and so are the processes
    that it starts; transformers, which may be there already, is told itself.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if transformers := sys.modules.get("transformers"):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reads its variable at its import alone
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="(transformers|trl|peft|torch)")
    warnings.filterwarnings(
        "default", message=ALWAYS_SHOWN_WARNINGS, category=UserWarning, module="peft"
    )  # the later filter is asked first
    own = logging.getLogger("loragate")
    if own.handlers:  # tests and notebooks call commands one after the other
        return
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("loragate: %(message)s"))
    own.addHandler(handler)
    own.propagate = False


def format_next_command(model: object, out: str, task: str = "", system: str = "none") -> str:
    """The line that says how what a command made is evaluated; without a task, what it is for only its owner knows."""
    asked = ["--tasks", task] if task else ["--suite", "math"]
    kept = [] if system == "none" else ["--system", system]
    command = shlex.join(["loragate", "eval", "--model", str(model), *asked, *kept, "--out", out])
    more = "" if task else ", with the --suite that it is for, or --tasks FILE.yaml with questions of your own"
    return f"next: {command}{more}"


def _is_nonzero_rank() -> bool:
    """Of several processes of a run only the first one talks."""
    return os.environ.get("RANK", "0") not in ("", "0")


def pluralize(number: int, noun: str) -> str:
    """ "1 row", "1,200 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds in words: "8 s", "2 min 05 s", "1 h 03 min"."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def temperature_label(temperature: float) -> str:
    """A sampling temperature as the labels of variants have it: "T=0.3", or "greedy" for 0."""
    return f"T={temperature:g}" if temperature else "greedy"


def percent(share: float) -> str:
    """A share of 1 as a percentage with one decimal, without its sign."""
    return f"{round(100 * share, 1) + 0.0:.1f}"  # adding zero turns -0.0 into 0.0


def format_points(share: float) -> str:
    """A difference of shares in percentage points, signed; what rounds to zero keeps its side of it, which verdicts go by."""
    return f"{round(100 * share, 1):+.1f}" if share else "0.0"


def format_temperature(temperature: float) -> str:
    """A sampling temperature as sentences name it; 0 is greedy."""
    return f"at temperature {temperature:g}" if temperature else "greedily"


def time_left(seconds: float) -> str:
    """An estimate in words, no finer than it is: "about 40 s left", "about 9 min left"."""
    if seconds < 90:
        return f"about {duration(math.ceil(seconds / 10) * 10)} left"
    minutes = math.ceil(seconds / 60)
    return f"about {minutes} min left" if minutes < 60 else f"about {duration(60 * minutes)} left"


class Display:
    """Shows one job after the other: a bar on a terminal, and in a log a line now and then.

    Args:
        out: console to draw on; stderr by default, so that results on stdout stay clean.
    """

    def __init__(self, out: Console | None = None) -> None:
        self.out = out or _SafeConsole(stderr=True, highlight=False, markup=False, quiet=_is_nonzero_rank())

    @contextmanager
    def job(self, name: str, total: int = 0, unit: str = "") -> Iterator[Job]:
        """Show a job; the yielded `Job` is called with (done, of, a note), and `unit` is what it counts ("step", "answer")."""
        job = Job(self.out, name, total, unit)
        with heartbeat(name, self.out):
            if self.out.is_terminal:
                columns = (
                    SpinnerColumn(),
                    TextColumn("{task.description}"),
                    BarColumn(),
                    TextColumn("{task.fields[note]}"),
                )
                with Progress(*columns, TimeElapsedColumn(), console=self.out, transient=True) as progress:
                    job.progress = progress
                    job.task = progress.add_task(name, total=total or None, note="")
                    yield job
            else:
                yield job
        self.out.print(f"{name}: {duration(time.monotonic() - job.began)}", markup=False, soft_wrap=True)


@contextmanager
def heartbeat(name: str, out: Console | None = None) -> Iterator[None]:
    """While it lasts, say that `name` still runs before a minute has passed in which nothing was printed.

    Of several that are open, the innermost one speaks.
    """
    out = out or _SafeConsole(stderr=True, highlight=False, markup=False, quiet=_is_nonzero_rank())
    ended, began = threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(HEARTBEAT_SECONDS / 12):
            now = time.monotonic()
            if _open_heartbeats[-1:] == [ended] and now - _last_print_time[0] >= HEARTBEAT_SECONDS * 5 / 6:
                said = ", ".join([f"{name}: running for {duration(now - began)}", *_open_phases[-1:]])
                out.print(said, markup=False, soft_wrap=True)

    _open_heartbeats.append(ended)
    _last_print_time[0] = began
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        _open_heartbeats.remove(ended)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """While it lasts, a heartbeat says `name` too: a part of a job that has no count of its own. Prints nothing by itself."""
    _open_phases.append(name)
    try:
        yield
    finally:
        _open_phases.remove(name)


@dataclass
class UnitProgress:
    """How far a job is in one unit.

    Attributes:
        total: 0 where it is not known.
        done: so far.
        initial: at the first news, as what was done before a resume gives no pace; -1 before any.
        spent: seconds since then in which this count went on.
    """

    total: int = 0
    done: int = 0
    initial: int = -1
    spent: float = 0.0

    def seconds_left(self) -> float | None:
        """Seconds that the rest takes at the pace so far; None before that is known."""
        if self.done >= self.total:
            return 0.0
        gone = self.done - self.initial
        known = gone > 0.02 * self.total and self.spent > 0.5
        return self.spent / gone * (self.total - self.done) if known else None


class Job:
    """One running job of a `Display`, on one scale: what it counts, of how many in all, and the time left for all of it."""

    def __init__(self, out: Console, name: str, total: int, unit: str) -> None:
        self.out, self.name, self.unit = out, name, unit
        self.counts = {unit: UnitProgress(total)} if total else dict[str, UnitProgress]()
        self.progress: Progress | None = None
        self.task: int | None = None
        self.began = self.printed = self.heard = time.monotonic()

    def __call__(self, done: int, total: int | None = None, note: str = "", unit: str | None = None) -> None:
        """`done` of `total` units are finished in the whole job; `note` says what it is at.

        A job may count several units, such as steps and answers: its time left is that of all of them.
        """
        count, now = self.counts.setdefault(self.unit if unit is None else unit, UnitProgress()), time.monotonic()
        if count.initial < 0:
            count.initial = done
        else:
            count.spent += now - self.heard
        count.done, count.total, self.heard = done, total or count.total, now
        said = [
            f"{name} {one.done:,}".lstrip() + f" of {one.total:,}" * bool(one.total)
            for name, one in self.counts.items()
        ]
        text = " · ".join(filter(None, [*said, note, self.remaining_text()]))
        if self.progress is not None and self.task is not None:
            share = self.share()
            # where no total is known, rich shows a bar that moves to and fro
            self.progress.update(self.task, completed=share, total=1.0 if share else None, note=text)  # type: ignore[arg-type]
        elif now - self.printed >= PLAIN_SECONDS:
            self.printed = now
            self.out.print(f"{self.name}: {text}", markup=False, soft_wrap=True)

    def remaining_text(self) -> str:
        """How long the job will still take, in words; empty before the pace of everything that is left is known."""
        rest = [count.seconds_left() for count in self.counts.values() if count.total]
        seconds = sum(part for part in rest if part is not None)
        return time_left(seconds) if seconds and None not in rest else ""

    def share(self) -> float:
        """The share of the job that is done, each unit counting the same."""
        known = [min(1.0, count.done / count.total) for count in self.counts.values() if count.total]
        return sum(known) / len(known) if known else 0.0
