"""A process of the run is gone: what the others say instead of a library's traceback.

When a process dies its connections close, and the next exchange of the others fails at once (gloo, TCP) or at the latest
when its time limit passes (NCCL). What they then raise names sockets and collectives; this names the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loragate.errors import TrainingError
from loragate.training.strategy import Launch

_SIGNS = (
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


@contextmanager
def explain_lost_process(launch: Launch, folder: Path | None) -> Iterator[None]:
    """Turns the errors of torch.distributed into one sentence about the lost process.

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
        raise TrainingError(_sentence(error, launch, folder)) from error


def is_lost(error: RuntimeError) -> bool:
    """Whether an error says that an exchange between processes failed."""
    import torch

    known = getattr(torch.distributed, "DistError", None)
    text = str(error).lower()
    return (known is not None and isinstance(error, known)) or any(sign in text for sign in _SIGNS)


def _sentence(error: RuntimeError, launch: Launch, folder: Path | None) -> str:
    from loragate.training.run_folder import last_checkpoint

    first = str(error).strip().splitlines()[0][:200]
    saved = None if folder is None else last_checkpoint(folder)
    again = (
        f"repeat the same command with --resume to go on from {Path(saved).name}"
        if saved
        else "no checkpoint was written yet, so remove the output folder and begin again; set save_steps to keep some"
    )
    return (
        f"a process of this run is gone (this is process {launch.rank} of {launch.processes}, counted from 0; {first}). Look at "
        f"the first error of the other processes: killed, out of memory, or a machine lost? Then {again}"
    )
