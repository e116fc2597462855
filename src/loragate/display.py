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
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from loragate.printable import printable

PLAIN_SECONDS = 10.0  # between two lines of a job in a log
SILENT_SECONDS = (
    60.0  # after which a job that reports nothing, such as the loading of a large model, is said to run still
)
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers shows none then, either
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""What the environment says to libraries, unless it says something else already."""
TOLD = r".*(missing adapter keys|changes the base weights)"
"""PEFT's warnings that an adapter was not loaded whole, or that the base is not the base; they are never hidden."""
FILE_WIDTH = 120  # columns of a table that goes into a file or a pipe: room for names and intervals in one line


class _Plain(Console):
    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text), **how)


def console() -> Console:
    """The console that results are printed to; no text that it is given can move the cursor or set a title."""
    terminal = sys.stdout.isatty()
    width = None if terminal or "COLUMNS" in os.environ else FILE_WIDTH  # None: rich asks the terminal, or COLUMNS
    return _Plain(highlight=False, markup=False, soft_wrap=not terminal, width=width, quiet=_is_other_process())


class _ToStderr(logging.Handler):
    """Writes to the standard error of the moment; a StreamHandler keeps the one that it was made with."""

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(self.format(record)), file=sys.stderr)


def quiet_logging() -> None:
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
        "default", message=TOLD, category=UserWarning, module="peft"
    )  # the later filter is asked first
    own = logging.getLogger("loragate")
    if own.handlers:  # tests and notebooks call commands one after the other
        return
    handler = _ToStderr()
    handler.setFormatter(logging.Formatter("loragate: %(message)s"))
    own.addHandler(handler)
    own.propagate = False


def next_evaluation(model: object, out: str) -> str:
    """The line that says how what a command made is evaluated; what it is for, only its owner knows."""
    command = shlex.join(["loragate", "eval", "--model", str(model), "--suite", "math", "--out", out])
    return f"next: {command}, with the --suite that it is for, or --tasks FILE.yaml with questions of your own"


def _is_other_process() -> bool:
    """Of several processes of a run only the first one talks."""
    return os.environ.get("RANK", "0") not in ("", "0")


def duration(seconds: float) -> str:
    """Seconds in words: "8 s", "2 min 05 s", "1 h 03 min"."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def percent(share: float) -> str:
    """A share of 1 as a percentage with one decimal, without its sign."""
    return f"{round(100 * share, 1) + 0.0:.1f}"  # adding zero turns -0.0 into 0.0


def points(share: float) -> str:
    """A difference of shares in percentage points, signed; what rounds to zero keeps its side of it, which verdicts go by."""
    return f"{round(100 * share, 1):+.1f}" if share else "0.0"


def at(temperature: float) -> str:
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
        self.out = out or Console(stderr=True, highlight=False, markup=False, quiet=_is_other_process())

    @contextmanager
    def job(self, name: str, total: int = 0, unit: str = "") -> Iterator[Job]:
        """Show a job; the yielded `Job` takes `advance_to(done, note=...)`, and `unit` is what it counts ("step", "answer")."""
        job, ended = Job(self.out, name, total, unit), threading.Event()
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
            threading.Thread(target=job.keep_talking, args=(ended,), daemon=True).start()
            try:
                yield job
            finally:
                ended.set()
        self.out.print(f"{name}: {duration(time.monotonic() - job.began)}", markup=False, soft_wrap=True)


class Job:
    """One running job of a `Display`."""

    def __init__(self, out: Console, name: str, total: int, unit: str) -> None:
        self.out, self.name, self.total, self.unit = out, name, total, unit
        self.progress: Progress | None = None
        self.task: int | None = None
        self.first: tuple[float, float] | None = None  # when the job was first heard of, and its share then
        self.began = self.printed = time.monotonic()

    def advance_to(self, done: int, total: int | None = None, note: str = "") -> None:
        """`done` of `total` units are finished; `note` is shown beside the bar."""
        self.total = total or self.total
        share = done / self.total if self.total else 0.0
        count = f"{self.unit} {done:,}".lstrip() + (f" of {self.total:,}" if self.total else "")
        self.show(share, count, note, self.left(share))

    def left(self, share: float) -> str:
        """How long the job will still take at its pace so far; empty before that is known.

        The first news of a job says how far it was: what was done before a resume gives no pace.
        """
        now = time.monotonic()
        since, before = self.first = self.first or (now, share)
        known = share - before > 0.02 and now - since > 2
        return time_left((now - since) / (share - before) * (1 - share)) if known else ""

    def show(self, share: float, *parts: str) -> None:
        """`share` of the job is done; the parts say what it is at, empty ones are left out."""
        text = " · ".join(part for part in parts if part)
        if self.progress is not None and self.task is not None:
            # where no total is known, rich shows a bar that moves to and fro
            self.progress.update(self.task, completed=share, total=1.0 if share else None, note=text)  # type: ignore[arg-type]
        elif time.monotonic() - self.printed >= PLAIN_SECONDS:
            self.printed = time.monotonic()
            self.out.print(f"{self.name}: {text}", markup=False, soft_wrap=True)

    def keep_talking(self, ended: threading.Event) -> None:
        """Say in a log that the job still runs, where nothing else was said for a while, until it has ended."""
        while not ended.wait(SILENT_SECONDS / 4):
            now = time.monotonic()
            if now - self.printed >= SILENT_SECONDS:
                self.printed = now
                self.out.print(f"{self.name}: running for {duration(now - self.began)}", markup=False, soft_wrap=True)
