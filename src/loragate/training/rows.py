"""The rows of a training: read, chosen and encoded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from loragate.data import Rows, load_rows
from loragate.effects import require_effect
from loragate.files import held
from loragate.training.settings import RowsSettings
from loragate.training.strategy import launch_of

T = TypeVar("T")

MANY = 10_000  # rows from which on tokenising is kept on disk and spread over processes without being asked for
WORKERS = 8
WAIT_S = 6 * 3600.0


def read_rows(asked: RowsSettings, max_rows: int, seed: int | None = None) -> Rows:
    """All rows, the first `max_rows` (0: all), or as many of a shuffle.

    Args:
        seed: of the shuffle where `select_seed` names none; None leaves that subset to the caller.

    Raises:
        ConfigError: for a select_seed without effect.
        DataError: for data that cannot be read.
    """
    require_effect("rows", asked, flags=True, max_rows=max_rows)
    first = max_rows if asked.select == "first" else 0
    rows = load_rows(asked.data, split=asked.split or None, revision=asked.revision or None, limit=first or None)
    chosen_by = seed if asked.select_seed is None else asked.select_seed
    if first or not max_rows or chosen_by is None:
        return rows
    return rows.shuffled(chosen_by).take(max_rows)


def encode_run(
    asked: RowsSettings, out: Path, rows: Rows, encode: Callable[..., T], on_progress: Callable[[int, int], None] | None
) -> T:
    """`encode(cache=…, processes=…, on_progress=…)`, which make long preparation quick and visible.

    Several processes of one training need the same tokens: with a cache the first one makes them and the others read.

    Args:
        out: folder of the training, which its processes share.
    """
    many, ranks = len(rows) >= MANY, launch_of().processes
    cache = cache_folder(asked.cache, many)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = asked.data_workers or (min(WORKERS, cpus) if many and (ranks == 1 or cache) else 1)
    arguments: dict[str, Any] = {"cache": cache, "processes": processes, "on_progress": on_progress}
    if ranks == 1 or cache is None:
        return encode(**arguments)
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
    with held(cache / f"{name}.lock", WAIT_S, f"another process has been tokenising for hours; is {cache} writable?"):
        return encode(**arguments)


def cache_folder(wanted: str, many: bool) -> Path | None:
    """Where tokenised rows are kept: `wanted`, or the user's cache for many rows, or nowhere."""
    if wanted == "none" or (wanted == "auto" and not many):
        return None
    if wanted != "auto":
        return Path(wanted).expanduser()
    home = os.environ.get("LORAGATE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "loragate"
    return Path(home).expanduser() / "encoded"
