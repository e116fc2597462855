"""What a command checks and sets before it loads anything: its output folder, what is installed, what cannot go together."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from loragate import models
from loragate.errors import ConfigError
from loragate.files import require_new
from loragate.models.settings import Loading
from loragate.training.compatibility import Plan, refuse_impossible
from loragate.training.strategy import launch_of
from loragate.validate import comma_list


def require_free_out(folder: Path, resume: bool) -> None:
    """Refuse an output folder that holds anything but an unfinished run of ours; nothing is ever overwritten.

    Args:
        folder: --out.
        resume: --resume.

    Raises:
        ConfigError: naming the folder, what is in it, and what to do.
    """
    if (folder / "gate_config.json").is_file():
        raise ConfigError(f"--out {folder} already holds a gated adapter; choose another folder or remove it first")
    require_new(folder, "run")
    if not resume and (folder / "run").is_dir():
        from loragate.training.run_folder import work_in

        kept = (folder / "run" / "candidates" / "sweep.json").is_file()
        if work := "candidates of an earlier run" if kept else work_in(folder / "run"):
            raise ConfigError(f"--out {folder} holds {work}; continue it with --resume, or choose another folder")
    if resume and not any((folder / "run" / name).is_file() for name in ("run.json", "config.yaml")):
        raise ConfigError(f"--resume: there is no unfinished run in {folder}; run the command without --resume")


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
    how.require_possible()
    if how.quantization != "none":
        device = models.torch_device(how).partition(":")[0]
        refuse_impossible(Plan(launch=launch_of(), device=device, quantization=how.quantization))
