"""The rows of a training command: read, chosen, encoded, and put on record in the run folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from loragate.cli.arguments import resolved_yaml
from loragate.cli.options import RunOptions
from loragate.data import Rows, load_rows
from loragate.data.record import NAME, describe_missing, read_record, require_same_rows, rows_record
from loragate.display import Job
from loragate.effects import require_effect
from loragate.errors import DataError
from loragate.files import held, write_json, write_text
from loragate.training.settings import STEPS
from loragate.training.strategy import launch_of, process_state

MANY = 10_000  # rows from which on tokenising is kept on disk and spread over processes without being asked for
WORKERS = 8
WAIT_S = 6 * 3600.0
FEW_STEPS = 20


def read_rows(options: Any, seed: int | None = None) -> Any:
    """The rows of --data: all of them, the first --max-rows, or as many of a shuffle.

    Args:
        options: with the fields of `RunOptions` and `max_rows`.
        seed: of the shuffle where --select-seed names none; None leaves that subset to the caller.

    Raises:
        ConfigError: for a --select-seed without effect.
        DataError: for data that cannot be read; on a resumed run it says what the run had.
    """
    how = options.select
    require_effect("rows", options, flags=True)
    first = options.max_rows if how == "first" else 0
    where = {"split": options.split or None, "revision": options.revision or None}
    try:
        rows = load_rows(options.data, **where, limit=first or None)
    except DataError as error:
        if not options.resume:
            raise
        raise describe_missing(Path(options.out) / "run", error) from error
    chosen_by = seed if options.select_seed is None else options.select_seed
    if first or not options.max_rows or chosen_by is None:
        return rows
    return rows.shuffled(chosen_by).take(options.max_rows)


def say_steps(out: Console, asked: Any, rows: int, of: str = "") -> None:
    """How many steps `rows` rows give, and what was chosen where the settings `asked` leave it to the rows."""
    settings = asked.fitted(rows, launch_of().processes)
    times = "one epoch" if settings.epochs == 1 else f"{settings.epochs:g} epochs"
    steps = settings.steps(rows)
    text = f"{rows:,} rows in batches of {min(settings.batch_size, rows)}, {times}: {steps:,} steps{of}"
    if settings.max_steps:
        text = f"{rows:,} rows in batches of {min(settings.batch_size, rows)}: {steps:,} steps{of}, as --max-steps asks"
    elif not asked.batch_size:
        set_by = "--batch-size" if asked.epochs else "--batch-size and --epochs"
        text += f" (chosen for about {STEPS} steps or more; {set_by} change it)"
    out.print(text, markup=False)
    if steps < FEW_STEPS:
        out.print(
            f"note: fewer than {FEW_STEPS} steps hardly change a model; more rows, more --epochs or a smaller --batch-size help",
            markup=False,
        )


def encode_run(options: RunOptions, rows: Rows, job: Job, encode: Callable[..., Any]) -> Any:
    """`encode(cache=…, processes=…, on_progress=…)`, which make long preparation quick and visible.

    Several processes of one training need the same tokens: with a cache the first one makes them and the others read.

    Args:
        job: of the display; advanced with every batch.
    """
    many, ranks = len(rows) >= MANY, launch_of().processes
    cache = cache_folder(options.cache, many)
    processes = options.data_workers or (min(WORKERS, _cpus()) if many and (ranks == 1 or cache) else 1)

    arguments: dict[str, Any] = {"cache": cache, "processes": processes, "on_progress": job.advance_to}
    if ranks == 1 or cache is None:
        return encode(**arguments)
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


def keep_rows_record(options: Any, folder: Path, rows: Rows, encoded: Any, max_rows: int) -> None:
    """Write run/data.json; a resumed run is compared with the one that it began with, which is kept.

    Raises:
        DataError: if the rows are not those that the run began with.
    """
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


def keep_configuration(options: RunOptions, folder: Path) -> None:
    """The resolved settings, as a file that `--config` reads; a run that goes on keeps the file that it began with."""
    path = folder / "run" / "config.yaml"
    if process_state().is_main_process and not (options.resume and path.is_file()):
        write_text(path, resolved_yaml(options))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
