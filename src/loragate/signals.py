"""What asks a command to stop: Ctrl-C, and SIGTERM, which batch systems and service managers send before they kill.

Both raise KeyboardInterrupt, so that whoever says after the one what was kept and how to go on says it after the other too.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt("SIGTERM") inside the context; another's handler stays, and a launcher's rank has none."""
    main = threading.current_thread() is threading.main_thread()
    # a launcher ends the ranks that are left where one has failed: at once, and without a word on what was kept
    if not main or "LOCAL_RANK" in os.environ or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() == owner:
            raise KeyboardInterrupt(STOP_SIGNALS[signal.SIGTERM])
        # a forked helper, which a library ends so, is to end without a word
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Give SIGTERM back, at the end, to who had it: `ray.init` takes it, and ends the process without a word."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
