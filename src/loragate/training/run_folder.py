"""The run folder: what is being trained on what, and the checkpoint to go on from.

A run that was killed, at any moment, goes on from the last checkpoint that was written to its end; what a kill or a full
disk left half-written is passed over. A resumed run must be the same run: `run.json` is compared before anything is
continued, and the package's version with it, since another version may compute something else. What stops a run from
outside, a full disk or a lost process, is told with the checkpoint that is left.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from loragate.errors import ConfigError, TrainingError
from loragate.files import held, read_json, require_same, write_json
from loragate.records import read_object
from loragate.training.strategy import Launch, launch_of, process_state
from loragate.training.trainer import TRAINED
from loragate.version import __version__

VERSION = "loragate"  # key of the package's version in run.json
RECORD, STATE, LOG = "run.json", "trainer_state.json", "metrics.jsonl"
# of an exchange between processes that failed, in the words of gloo, TCP and NCCL
LOST_SIGNS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection refused",
    "timed out waiting",
    "timed out after",
    "wait timeout",
    "nccl",
    "gloo",
    "watchdog",
    "process group",
)
FULL_SIGNS = ("No space left", "disk is full")
STREAM_SIGNS = ("failed writing file", "file write failed", "iostream error", "unexpected pos")
LITTLE = 256 << 20  # bytes
# the optimiser's state by whoever wrote it: the trainer, the on-policy loop, DeepSpeed
OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer.safetensors", "latest")


def run_folder_given(folder: str | Path | None, resume: bool) -> Path | None:
    """The run folder as a path; raises ConfigError for a run that is to go on from nowhere."""
    if resume and folder is None:
        raise ConfigError("resume=True needs run_folder, the folder of the run that is to go on")
    return None if folder is None else Path(folder)


def prepare_folder(identity: dict[str, Any], folder: Path | None, resume: bool) -> Path | None:
    """Write run.json, or on resume compare it with `identity`; nothing without a folder.

    Returns:
        The checkpoint to go on from; None to begin.

    Raises:
        TrainingError: if the folder holds a run that is not to be resumed, finished or not, or another run.
    """
    if folder is None:
        return None
    record = folder / RECORD
    if not resume:
        if work := work_in(folder):
            raise TrainingError(
                f"{folder} holds {work}, which is not overwritten; go on with it, or have its result again, with --resume "
                "(resume=True), or choose another --out (run_folder)"
            )
        state = process_state()
        state.wait_for_everyone()  # a slower process must not take this run's record for that of an earlier one
        if state.is_main_process:
            write_json(record, {**identity, VERSION: __version__})
        return None
    if not record.is_file():
        raise TrainingError(
            f"{record} is missing: there is no run to resume in {folder}; run without --resume (resume=False)"
        )
    stored = read_object(record, "the run cannot be resumed")
    before = stored.pop(VERSION, None)
    if before != __version__:
        raise TrainingError(
            f"{record}: this run was begun with loragate {before or 'of an unknown version'}, and this is {__version__}. Both "
            "could compute the steps differently, so the run is not mixed of the two: go on with that version "
            f"(pip install 'loragate=={before or 'VERSION'}'), or begin again in another --out (run_folder)"
        )
    remedy = "repeat the original settings, on the same rows in the same order, or choose another --out (run_folder)"
    require_same(record, stored, identity, remedy, TrainingError)
    last = last_checkpoint(folder)
    if process_state().is_main_process:
        # half a checkpoint beyond the last whole one would count as the newest, and be kept in place of one written now
        step = 0 if last is None else _step_of(last)
        for torn in checkpoints(folder):
            if _step_of(torn) > step:
                shutil.rmtree(torn, ignore_errors=True)
    return last


@contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """Hold a run folder against another run, a LoragateError; of several processes the first one does, for all."""
    if folder is None or launch_of().rank:
        yield
        return
    with held(folder / "lock", 0.0, f"another run is writing to {folder}; wait for it to end, or stop it"):
        yield


def work_in(folder: Path) -> str:
    """What a run folder holds that another run must not be mixed with, in words; empty where no step was kept yet.

    The log of a finished run ends in the wall time, at the last step; a run that was stopped logs its wall time too, and
    leaves a checkpoint. Random gates take no steps: their run is finished once it is on record.
    """
    last = last_checkpoint(folder)
    finished = (read_json(folder / RECORD).get("settings") or {}).get("objective") == "random"
    with suppress(OSError, ValueError, LookupError, TypeError):
        end = json.loads((folder / LOG).read_text(encoding="utf-8").splitlines()[-1])
        finished |= "train_runtime" in end and (last is None or end["step"] >= read_json(last / STATE)["max_steps"])
    if finished:
        return "the log of a finished run"
    return "" if last is None else f"an unfinished run ({last.name})"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; a killed run may leave a torn one, which is passed over."""
    return next((path for path in reversed(checkpoints(folder)) if is_complete(path)), None)


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in the order of their steps, torn ones too; not a folder of the user's that is called alike."""
    return sorted((path for path in folder.glob("checkpoint-*") if _step_of(path)), key=_step_of)


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end.

    The state file is the last to be written, but not at once: a kill can leave it empty. The weights are checked for their
    length, the optimiser for being there.

    Raises:
        OSError: if a file is there and cannot be read. Such a checkpoint may be whole, and a torn one is removed.
    """
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        # opening compares the header's offsets with the file's length, and reads no tensor
        with safe_open(str(checkpoint / TRAINED), framework="pt") as file:
            names = list(file.keys())
    except (FileNotFoundError, NotADirectoryError, ValueError, SafetensorError):
        return False
    written = any((checkpoint / name).is_file() for name in OPTIMIZERS) or any(checkpoint.glob("global_step*"))
    return bool(names) and written and isinstance(state, dict) and state.get("global_step") == _step_of(checkpoint)


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else 0


@contextmanager
def explain_full_disk(folder: Path | None) -> Iterator[None]:
    """A write that failed for want of space becomes one sentence with the checkpoint that is still good.

    What was half-written is removed, so that it does not take the space that is missing.

    Raises:
        TrainingError: in place of the errors of torch, safetensors and the operating system.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error, folder):
            raise
        if folder is None:
            raise TrainingError("the disk is full; free some space in the temporary folder and run again") from error
        for torn in checkpoints(folder):
            if not is_complete(torn):
                shutil.rmtree(torn, ignore_errors=True)
        last = last_checkpoint(folder)
        kept = f"{last.name} is complete and kept" if last else "no checkpoint had been written yet"
        size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file()) if last else 0
        needs = f"about {max(0.1, size / 1e6):.1f} MB" if last else "a few MB"
        raise TrainingError(
            f"the disk that holds {folder} is full, so training stopped; {kept}. Free some space (a checkpoint needs {needs}, and "
            "two are kept), then run the same command with --resume (resume=True)"
        ) from error


def _is_full(error: BaseException | None, folder: Path | None) -> bool:
    """Whether an error, or what it came from, is a lack of space.

    torch writes through a C++ stream, whose errors do not say why; they count where little space is left indeed.
    """
    # "file write failed" alone may have many causes
    little = folder is not None and folder.is_dir() and shutil.disk_usage(folder).free < LITTLE
    signs = FULL_SIGNS + (STREAM_SIGNS if little else ())
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(sign in str(error) for sign in signs):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def explain_lost_process(launch: Launch, folder: Path | None) -> Iterator[None]:
    """Turns the errors of torch.distributed into one sentence about the lost process.

    When a process dies its connections close, and the next exchange of the others fails at once (gloo, TCP) or at the
    latest when its time limit passes (NCCL).

    Args:
        launch: how the run was launched; errors of a single process pass as they are.
        folder: the run folder, for what there is to go on from; None where nothing is kept.

    Raises:
        TrainingError: naming this process, the library's first line, and what to do.
    """
    try:
        yield
    except RuntimeError as error:
        if launch.processes < 2 or not is_lost(error):
            raise
        first = str(error).strip().splitlines()[0][:200]
        saved = None if folder is None else last_checkpoint(folder)
        again = (
            f"repeat the same command with --resume to go on from {saved.name}"
            if saved
            else "no checkpoint was written yet, so remove the output folder and begin again; set save_steps to keep some"
        )
        raise TrainingError(
            f"a process of this run is gone (this is process {launch.rank} of {launch.processes}, counted from 0; {first}). "
            f"Look at the first error of the other processes: killed, out of memory, or a machine lost? Then {again}"
        ) from error


def is_lost(error: RuntimeError) -> bool:
    """Whether an error says that an exchange between processes failed."""
    known = getattr(torch.distributed, "DistError", None)
    text = str(error).lower()
    return (known is not None and isinstance(error, known)) or any(sign in text for sign in LOST_SIGNS)
