"""What a command checks and sets before it loads anything: its output folder, what is installed, what cannot go together."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from loragate import models
from loragate.errors import ConfigError
from loragate.training.compatibility import Plan, refuse_impossible
from loragate.training.strategy import launch_of
from loragate.validate import comma_list

if TYPE_CHECKING:
    from loragate.models.settings import Loading


def require_free_out(folder: Path, resume: bool) -> None:
    """Refuse an output folder that holds anything but an unfinished run of ours; nothing is ever overwritten.

    Args:
        folder: --out.
        resume: --resume.

    Raises:
        ConfigError: naming the folder, what is in it, and what to do.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give a folder")
    present = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if "gate_config.json" in present:
        raise ConfigError(f"--out {folder} already holds a gated adapter; choose another folder or remove it first")
    foreign = [name for name in present if name != "run"]
    if foreign:
        raise ConfigError(f"--out {folder} is not empty (it holds {', '.join(foreign[:3])}); choose another folder")
    if not resume and present and (work := _work_in(folder / "run")):
        raise ConfigError(f"--out {folder} holds {work}; continue it with --resume, or choose another folder")
    if resume and not any((folder / "run" / name).is_file() for name in ("run.json", "config.yaml")):
        raise ConfigError(f"--resume: there is no unfinished run in {folder}; run the command without --resume")


def _work_in(run: Path) -> str:
    """What a run folder holds that another run must not be mixed with, in words; empty where no step was kept yet."""
    if any((run / "candidates").glob("*.json")):
        return "candidates of an earlier run"
    from loragate.training.run_folder import is_finished, last_checkpoint

    last = last_checkpoint(run)
    if is_finished(run, last):
        return "the log of a finished run"
    return f"an unfinished run ({Path(last).name})" if last is not None else ""


def require_reporters(names: str) -> None:
    """Refuse a logging integration that is not installed, before anything is loaded."""
    for name in comma_list(names):
        if name not in ("none", "all") and importlib.util.find_spec(name) is None:
            raise ConfigError(f"--report-to {name}: the package is not installed; pip install {name}")


def check_loading(how: Loading, engine: str = "") -> None:
    """Refuse a loading that is impossible here.

    Args:
        engine: "vllm" where that loads the model.

    Raises:
        ConfigError: naming the flag, and what to change.
    """
    if how.quantization != "none" and engine == "vllm":
        raise ConfigError(
            f"--quantization {how.quantization} has no effect with vLLM, which loads the base itself; leave it out, or use "
            "--engine transformers"
        )
    how.check()
    if how.quantization != "none":
        device = models.torch_device(how).partition(":")[0]
        refuse_impossible(Plan(launch=launch_of(), device=device, quantization=how.quantization))
