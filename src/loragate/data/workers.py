"""Encoding in several processes: batches go out in order and come back in order.

Processes are started afresh (spawn), because a copy of one that has run torch's threads may hang. At most a few batches
wait for each process, so that a data set is never in memory twice.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from loragate.errors import DataError

WAITING = 3  # batches per process

_work: Any = None


def spread(work: Any, batches: Iterable[tuple[Any, ...]], processes: int) -> Iterator[Any]:
    """`work.batch(*batch)` of every batch, in order.

    Raises:
        DataError: what a batch raises, the first one first; or that a process died.
    """
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (work,))
    futures: deque[Future[Any]] = deque()
    try:
        for batch in batches:
            futures.append(pool.submit(_encode, batch))
            if len(futures) >= WAITING * processes:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a process that tokenises rows died, probably for want of memory; use fewer of them (--data-workers 1)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Any) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the others
    _work = work


def _encode(batch: tuple[Any, ...]) -> Any:
    return _work.batch(*batch)
