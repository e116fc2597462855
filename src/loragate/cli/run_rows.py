"""The rows of a training command: read, chosen, encoded, and put on record in the run folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loragate.effects import require_effect
from loragate.errors import ConfigError, DataError
from loragate.training.strategy import launch_of, process_state

MANY = 10_000  # rows from which on tokenising is kept on disk and spread over processes without being asked for
WORKERS = 8
WAIT_S = 6 * 3600.0


def read_rows(options: Any, seed: int | None = None) -> Any:
    """The rows of --data: all of them, the first --max-rows, or as many of a shuffle.

    Args:
        options: with the fields of `RunOptions` and `max_rows`.
        seed: of the shuffle where --select-seed names none; None leaves that subset to the caller.

    Raises:
        ConfigError: for a --select-seed without effect.
        DataError: for data that cannot be read; on a resumed run it says what the run had.
    """
    from loragate.data import load_rows

    how = options.select
    require_effect("rows", options, flags=True)
    first = options.max_rows if how == "first" else 0
    where = {"split": options.split or None, "revision": options.revision or None}
    try:
        rows = load_rows(options.data, **where, limit=first or None)
    except DataError as error:
        if not options.resume:
            raise
        from loragate.data.record import describe_missing

        raise describe_missing(Path(options.out) / "run", error) from error
    chosen_by = seed if options.select_seed is None else options.select_seed
    if first or not options.max_rows or chosen_by is None:
        return rows
    return rows.shuffled(chosen_by).take(options.max_rows)


def encode_run(options: Any, rows: Any, job: Any, encode: Callable[..., Any]) -> Any:
    """`encode(cache=…, processes=…, on_progress=…)`, which make long preparation quick and visible.

    Several processes of one training need the same tokens: with a cache the first one makes them and the others read.

    Args:
        job: of the display; advanced with every batch.
    """
    many, ranks = len(rows) >= MANY, launch_of().processes
    if options.data_workers < 0:
        raise ConfigError(f"--data-workers must not be negative, found {options.data_workers}")
    cache = cache_folder(options.cache, many)
    processes = options.data_workers or (min(WORKERS, _cpus()) if many and (ranks == 1 or cache) else 1)

    arguments: dict[str, Any] = {"cache": cache, "processes": processes, "on_progress": job.advance_to}
    if ranks == 1 or cache is None:
        return encode(**arguments)
    from loragate.files import held

    name = hashlib.sha256(str(Path(options.out).resolve()).encode()).hexdigest()[:16]
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


def keep_rows_record(options: Any, folder: Path, rows: Any, encoded: Any, max_rows: int) -> None:
    """Write run/data.json; a resumed run is compared with the one that it began with, which is kept.

    Raises:
        DataError: if the rows are not those that the run began with.
    """
    from loragate.data.record import NAME, read_record, require_same_rows, rows_record
    from loragate.files import write_json

    if options.resume:
        require_same_rows(folder / "run", rows)
        if read_record(folder / "run") is not None:
            return
    if process_state().is_main_process:
        given = {
            "split": options.split,
            "revision": options.revision,
            "select": options.select,
            "select_seed": options.select_seed,
            "max_rows": max_rows,
            "seed": options.seed,
            "max_length": options.max_length,
        }
        write_json(folder / "run" / NAME, rows_record(rows, encoded, **given))


def keep_configuration(options: Any, folder: Path) -> None:
    """The resolved settings, as a file that `--config` reads; a run that goes on keeps the file that it began with."""
    from loragate.cli.arguments import resolved_yaml
    from loragate.files import write_text

    path = folder / "run" / "config.yaml"
    if process_state().is_main_process and not (options.resume and path.is_file()):
        write_text(path, resolved_yaml(options))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
