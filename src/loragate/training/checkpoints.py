"""The folder of a training: what is being trained on what, and the checkpoint to go on from.

A run that was killed, at any moment, goes on from the last checkpoint that was written to its end. The last file of a checkpoint
holds the checksums of all others: without it a kill or a full disk left the checkpoint half-written, and a file that differs was
damaged afterwards. Both are passed over aloud, and a run that has damaged checkpoints alone is not begun anew unasked. The record,
the lock and the comparison on resume are those of every job that can be resumed (`loragate.files.RunFolder`).
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loragate.data.chat import active_template
from loragate.errors import ConfigError, SetupError
from loragate.files import RunFolder, file_sha256, read_json, write_json
from loragate.training.strategy import detect_launch, process_state

logger = logging.getLogger("loragate")

TRAINER_STATE_FILE, METRICS_FILE = "trainer_state.json", "metrics.jsonl"
TRAINED_WEIGHTS_FILE, CHECKSUMS = "trained.safetensors", "checksums.json"
PASS_ROWS = "per_device_train_batch_size"
UNFINISHED = "it was not written to its end"


@dataclass(frozen=True)
class TrainingFolder:
    """Where a training writes; `resume` goes on with the run that is there, `overwrite` removes it and begins anew."""

    path: Path  # of the run folder, or of a temporary one
    is_persistent: bool = False  # whether it outlives the training; else there is no record, no log, no checkpoint
    resume: bool = False
    overwrite: bool = False

    @property
    def recorded_pass_rows(self) -> int:
        """Rows of a pass of the run that is to be resumed on as many processes; 0 where none is."""
        notes = (read_json(self.path / RunFolder.RECORD) if self.resume else {}).get(RunFolder.NOTES)
        if not isinstance(notes, dict) or notes.get("processes") != detect_launch().processes:
            return 0
        rows = notes.get(PASS_ROWS)
        return rows if isinstance(rows, int) and rows > 0 else 0

    def begin(self, identity: Mapping[str, Any], hints: Mapping[str, str] | None = None) -> Path | None:
        """Write run.json, or on resume compare it with `identity`, but for the rows of a pass, on which only rounding depends.

        The checkpoint to go on from; None to begin. A SetupError for a run that is neither to be resumed nor overwritten, another
        run, or damaged checkpoints alone.
        """
        if not self.is_persistent:
            return None
        run, state = RunFolder(self.path, SetupError), process_state()
        settings = dict(identity.get("settings", {}))
        notes = {PASS_ROWS: settings.pop(PASS_ROWS, 0), "processes": detect_launch().processes}
        identity = {**identity, "settings": settings}
        if not self.resume:
            if self.overwrite and state.is_main_process:
                remove_run(self.path)
            state.wait_for_everyone()
            holds, exists = describe_existing_run(self.path), run.record_path.exists()
            # a slower process must not take this run's record for that of an earlier one
            state.wait_for_everyone()
            # a refusal is every process's, the record the first one's
            if holds or exists or state.is_main_process:
                run.begin(identity, existing_work=holds, notes=notes)
            return None
        run.begin(identity, resume=True, hints=hints)
        last, faults = None, []
        for checkpoint in reversed(list_checkpoints(self.path)):
            if not (fault := find_checkpoint_fault(checkpoint)):
                last = checkpoint
                break
            faults.append((checkpoint, fault))
        damaged = [f"{torn.name} is damaged ({fault})" for torn, fault in faults if fault != UNFINISHED]
        if damaged and last is None:
            raise SetupError(
                f"{self.path}: {', '.join(damaged)}, and no checkpoint is whole, so there is nothing to go on from. Bring its "
                "files back, or remove that folder: --resume then begins this training at step 0"
            )
        state.wait_for_everyone()  # until all have looked
        if state.is_main_process:
            for torn, fault in faults:
                logger.warning("%s is passed over: %s", torn, fault)
            where = f"step {_step_of(last)}, from {last}" if last else "step 0: no checkpoint had been written"
            logger.warning("resuming at %s", where)
            # half a checkpoint beyond the last whole one would count as the newest, and be kept in place of one written now
            for torn, _ in faults:
                shutil.rmtree(torn, ignore_errors=True)
        return last


@contextmanager
def training_folder(path: str | Path | None, resume: bool, overwrite: bool = False) -> Iterator[TrainingFolder]:
    """The folder of a training, held against other processes (LoragateError where one writes to it); a temporary one for None."""
    if resume and overwrite:
        raise ConfigError("resume goes on with the run in the folder and overwrite removes it; leave one of them out")
    if path is None:
        if resume or overwrite:
            raise ConfigError(f"{'resume' if resume else 'overwrite'}=True needs run_folder, the folder of the run")
        # the trainer wants a folder for files of its own, even where nothing is kept
        with tempfile.TemporaryDirectory(prefix="loragate-") as place:
            yield TrainingFolder(Path(place))
        return
    # of several processes the first one holds the lock, for all
    with nullcontext() if detect_launch().rank else RunFolder(Path(path)).locked():
        yield TrainingFolder(Path(path), True, resume, overwrite)


def template_hints(tokenizer: Any) -> dict[str, str]:
    """What a refusal to resume with other tokens should say where the chat template writes the date into every row.

    Args:
        tokenizer: of the training; None for one without.
    """
    if tokenizer is None or "strftime_now" not in (active_template(tokenizer) or ""):
        return {}
    hint = (
        "The chat template writes today's date into the rows (strftime_now), so they have other tokens every day: where the "
        "run began on another day, go on with --chat-template FILE, a copy of the template with the date of that day in place of "
        "the call"
    )
    return dict.fromkeys(("tokens", "data.tokens"), hint)


def remove_run(folder: Path) -> None:
    """Remove what a training has written to its folder, and nothing else."""
    for name in (RunFolder.RECORD, METRICS_FILE):
        (folder / name).unlink(missing_ok=True)
    for checkpoint in list_checkpoints(folder):
        shutil.rmtree(checkpoint)


def describe_existing_run(folder: Path) -> str:
    """What a run folder holds that another run must not be mixed with, in words; empty where no step was kept yet.

    The log of a finished run ends in the wall time, at the last step; a run that was stopped logs its wall time too, and
    leaves a checkpoint.
    """
    last = last_checkpoint(folder)
    finished = False
    with suppress(OSError, ValueError, LookupError, TypeError):
        end = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()[-1])
        finished = "train_runtime" in end and (
            last is None or end["step"] >= read_json(last / TRAINER_STATE_FILE)["max_steps"]
        )
    if finished:
        return "the log of a finished run"
    return "" if last is None else f"an unfinished run ({last.name})"


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; a killed run may leave a torn one, which is passed over."""
    return next((path for path in reversed(list_checkpoints(folder)) if not find_checkpoint_fault(path)), None)


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in the order of their steps, torn ones too; not a folder of the user's that is called alike."""
    return sorted((path for path in folder.glob("checkpoint-*") if _step_of(path)), key=_step_of)


def find_checkpoint_fault(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, in words: `UNFINISHED`, or which file differs; empty where it is whole.

    An OSError where a file is there and cannot be read: such a checkpoint may be whole, and a torn one is removed.
    """
    try:
        written = json.loads((checkpoint / CHECKSUMS).read_text(encoding="utf-8"))
        for name, checksum in written.items():
            if file_sha256(checkpoint / name) != checksum:
                return f"{name} is not what was written"
    except (FileNotFoundError, NotADirectoryError) as error:
        name = Path(str(error.filename)).relative_to(checkpoint)
        return UNFINISHED if str(name) == CHECKSUMS else f"{name} is missing"
    except (ValueError, AttributeError):
        return f"{CHECKSUMS} cannot be read"
    return ""


def require_intact_checkpoint(checkpoint: Path) -> None:
    """Raises SetupError for a checkpoint that was not written to its end, or has changed since."""
    if fault := find_checkpoint_fault(checkpoint):
        raise SetupError(f"{checkpoint} cannot be resumed: {fault}. Choose an earlier checkpoint, or begin anew")


def write_checksums(checkpoint: Path) -> None:
    """Mark a checkpoint as written to its end: the checksum of every file in it."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    write_json(checkpoint / CHECKSUMS, {path.relative_to(checkpoint).as_posix(): file_sha256(path) for path in files})


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.removeprefix("checkpoint-")
    return int(number) if number.isdigit() else 0
