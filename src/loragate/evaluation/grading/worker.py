"""The process in which algebra runs: reads one job per line, answers one line, and ends itself when a job takes too long.

Started by `pool.py` as `python -m loragate.evaluation.grading.worker MODULE:FUNCTION MEMORY_MB SECONDS`. The time limit is an
alarm that the system delivers, even to native code; the end of standard input ends the process as well, so that it never
outlives its caller.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

START_S = 120  # seconds for imports; sympy takes two, and much more on a busy machine


def main() -> None:
    """Serve jobs from standard input until it ends."""
    judge_name, memory_mb, seconds = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle; it then kills this process
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")  # verdicts go by a copy of standard output
    os.dup2(2, 1)  # whatever a library prints must not look like a verdict
    signal.alarm(START_S)  # SIGALRM without a handler ends the process
    module, _, function = judge_name.partition(":")
    try:
        # and all that it needs, before memory and time count
        judge = getattr(importlib.import_module(module), function)
        logging.disable(logging.CRITICAL)
    except ImportError as error:
        _send(channel, {"failed": str(error)})
        return
    signal.alarm(0)
    _limit_memory(int(memory_mb))
    _send(channel, {})
    for line in sys.stdin:
        gold, text, tolerance = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        try:
            correct, reason, extracted = judge(gold, text, tolerance)
        except MemoryError:
            os._exit(1)  # what is left of the memory may not do for a clean end
        except RecursionError:
            correct, reason, extracted = False, "unparsed", text
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(channel, {"correct": correct, "reason": reason, "extracted": extracted})


def _limit_memory(megabytes: int) -> None:
    """Allow `megabytes` on top of what the process has mapped by now; a no-op where the system cannot tell."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(channel: TextIO, message: dict[str, object]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    main()
