"""The rows of a training: read, chosen, encoded, and put on record in the run folder.

The record holds counts, order and content of the rows: enough to say of a data file that it is the same one when a run goes
on, or how it has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from loragate.data import EncodedRows, Rows, load_rows
from loragate.effects import require_effect
from loragate.errors import DataError
from loragate.files import held, write_json
from loragate.training.settings import RowsSettings, TrainSettings
from loragate.training.strategy import launch_of, process_state

T = TypeVar("T")

ROWS_RECORD = "data.json"
MANY = 10_000  # rows from which on tokenising is kept on disk and spread over processes without being asked for
WORKERS = 8
WAIT_S = 6 * 3600.0


def read_rows(asked: RowsSettings, max_rows: int, seed: int | None = None, begun: Path | None = None) -> Rows:
    """All rows, the first `max_rows` (0: all), or as many of a shuffle.

    Args:
        seed: of the shuffle where `select_seed` names none; None leaves that subset to the caller.
        begun: run folder of a run that goes on, whose record says what is missing.

    Raises:
        ConfigError: for a select_seed without effect.
        DataError: for data that cannot be read.
    """
    require_effect("rows", asked, flags=True, max_rows=max_rows)
    first = max_rows if asked.select == "first" else 0
    try:
        rows = load_rows(asked.data, split=asked.split or None, revision=asked.revision or None, limit=first or None)
    except DataError as error:
        before = None if begun is None else read_record(begun)
        if before is None:
            raise
        raise DataError(
            f"{error} The run in {begun} was begun with {before.get('rows')} rows of {before.get('source')}; a resumed run "
            "needs them again."
        ) from error
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


def keep_rows_record(
    asked: RowsSettings,
    settings: TrainSettings,
    max_rows: int,
    run: Path,
    rows: Rows,
    encoded: EncodedRows,
    resume: bool,
) -> None:
    """Write data.json into a run folder; a resumed run is compared with the one that it began with, which is kept.

    Args:
        rows: as they are trained on, in their order.
        encoded: the same, encoded.

    Raises:
        DataError: if the rows are not those that the run began with, saying what has changed: their number, their content or
            only their order.
    """
    before = read_record(run) if resume else None
    if before is not None:
        if before.get("order_sha256") == rows.fingerprint:
            return
        if before.get("rows") != len(rows):
            change = f"it gave {before.get('rows')} rows then and gives {len(rows)} now"
        elif before.get("content_sha256") == rows.content:
            change = "its rows, or the seed that shuffles them, are in another order now"
        else:
            change = f"its {len(rows)} rows are not the same ones any more"
        raise DataError(
            f"{rows.source} has changed since the run in {run} began: {change}. Put back what was there, with the settings "
            "that chose the rows, or begin a new run in another folder"
        )
    if not process_state().is_main_process:
        return
    summary = encoded.summary
    record = {
        "source": rows.source,
        "split": asked.split,
        "revision": asked.revision,
        "select": asked.select,
        "select_seed": asked.select_seed,
        "max_rows": max_rows,
        "seed": settings.seed,
        "max_length": settings.max_length,
        "format": summary.format,
        "rows": summary.rows,
        "trained": len(encoded),
        "without_response": summary.empty,
        "response_cut": summary.dropped,
        "truncated": summary.truncated,
        "response_tokens": summary.response_tokens,
        "prompt_tokens": summary.prompt_tokens,
        "content_sha256": rows.content,
        "order_sha256": rows.fingerprint,
    }
    write_json(run / ROWS_RECORD, record)


def read_record(run: Path) -> dict[str, Any] | None:
    """The record in a run folder; None where there is none, or none that can be read."""
    try:
        found = json.loads((run / ROWS_RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
