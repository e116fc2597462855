"""What a command does before it loads anything: it refuses at once what cannot work, and starts itself on several processes.

Refused are an output folder that is taken, a package that is missing, and settings that cannot go together. `--strategy` and
`--processes` start the same command again under torch's launcher; a command that runs under a launcher already (`accelerate
launch`, torchrun, Slurm) is taken as it is. Nothing here imports torch before it must.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from loragate import models
from loragate.errors import ConfigError
from loragate.files import require_empty_folder
from loragate.models.settings import Loading
from loragate.signals import STOP_SIGNALS
from loragate.training.settings import LaunchSettings, TrainSettings
from loragate.training.strategy import STRATEGY_ENV_VAR, Launch, Plan, check_plan, detect_launch
from loragate.validate import comma_list


def require_free_out(folder: Path, resume: bool, overwrite: bool = False, start: str = "") -> None:
    """Refuse (ConfigError) an output folder that holds anything but an unfinished run of ours, or a run that is to be overwritten.

    `start` is the adapter that is trained on, which must not lie where the new one is written; empty for none.
    """
    if start and Path(start).exists() and (own := Path(start).resolve()).is_relative_to(folder.resolve()):
        where = "is" if own == folder.resolve() else "holds"
        raise ConfigError(
            f"--out {folder} {where} the adapter that is trained on (--adapter {start}), which is only read: what is written "
            "there would take its place. Choose another --out"
        )
    if resume and overwrite:
        raise ConfigError("--resume goes on with the run in --out and --overwrite removes it; leave one of them out")
    if (folder / "gate_config.json").is_file():
        raise ConfigError(f"--out {folder} already holds a gated adapter; choose another folder or remove it first")
    began = any((folder / "run" / name).is_file() for name in ("run.json", "config.yaml"))
    if overwrite and began:
        return
    require_empty_folder(folder, "run")
    if not resume and (folder / "run").is_dir():
        from loragate.training.checkpoints import describe_existing_run

        kept = (folder / "run" / "trials").is_dir()
        if work := "the trials of an earlier run" if kept else describe_existing_run(folder / "run"):
            raise ConfigError(f"--out {folder} holds {work}; continue it with --resume, or choose another folder")
    if resume and not began:
        raise ConfigError(f"--resume: there is no unfinished run in {folder}; run the command without --resume")


def require_reporters(names: str) -> None:
    """Refuse a logging integration that is not installed, before anything is loaded."""
    for name in comma_list(names):
        if name not in ("none", "all") and importlib.util.find_spec(name) is None:
            raise ConfigError(f"--report-to {name}: the package is not installed; pip install {name}")


def check_loading(how: Loading, engine: str = "") -> None:
    """Refuse (ConfigError) a loading that is impossible here."""
    if how.quantization != "none" and engine == "vllm":
        raise ConfigError(
            f"--quantization {how.quantization} has no effect with vLLM, which loads the base itself; leave it out, or use "
            "--engine transformers"
        )
    how.check_supported()
    if how.quantization != "none":
        device = models.torch_device(how).partition(":")[0]
        check_plan(Plan(launch=detect_launch(), device=device, quantization=how.quantization))


def relaunch_if_requested(
    settings: TrainSettings, launch_settings: LaunchSettings, loading: Loading, **more: bool
) -> int | None:
    """What a training command does first; `more` are further fields of the `Plan`, such as sampling=True.

    None to go on in this process; otherwise the run is over, with this exit status. A ConfigError for a combination that cannot
    work, or a strategy that is not the launcher's.
    """
    if loading.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    launch = detect_launch()
    launched = "LOCAL_RANK" in os.environ or launch.processes > 1
    if launched and launch_settings.strategy == "fsdp2" and launch.strategy == "ddp":
        os.environ[STRATEGY_ENV_VAR] = "fsdp2"  # of a bare torchrun
        launch = detect_launch()
    elif launched:
        if launch_settings.strategy not in ("auto", launch.strategy):
            raise ConfigError(
                f"--strategy {launch_settings.strategy}, but the launcher started this run as {launch.strategy}: leave "
                "--strategy out, or start the command without a launcher"
            )
        if launch_settings.processes not in (0, launch.processes):
            raise ConfigError(
                f"--processes {launch_settings.processes}, but the launcher started {launch.processes}: leave --processes out"
            )
    elif launch_settings.strategy != "auto" or launch_settings.processes > 1:
        strategy = "ddp" if launch_settings.strategy == "auto" else launch_settings.strategy
        processes = launch_settings.processes
        if not processes:  # one for each GPU of this machine
            import torch

            processes = torch.cuda.device_count() if loading.device != "cpu" else 0
            if processes < 2:
                raise ConfigError(
                    f"--strategy {strategy} needs several processes, and this machine has {processes or 'no'} CUDA device"
                    f"{'' if processes == 1 else 's'}; say how many with --processes, or leave --strategy out"
                )
        launch = Launch(strategy, processes, cpu=launch.cpu)
    # a GPU that is named is not looked at here: this process may only start the others
    device = (models.torch_device(loading) if loading.device == "auto" else loading.device).partition(":")[0]
    known: dict[str, Any] = {name: getattr(settings, name) for name in ("precision", "packing", "group_by_length")}
    known["dora"], known["reference"] = getattr(settings, "dora", False), getattr(settings, "objective", "") == "eksft"
    known |= more
    check_plan(Plan(launch=launch, device=device, quantization=loading.quantization, **known))
    settings.accumulation(launch.processes)
    if launched or launch.processes < 2:
        return None
    environment = {**os.environ, STRATEGY_ENV_VAR: launch.strategy}  # which torch's launcher does not know
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.processes)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.processes}"]
    return wait_for_child(subprocess.Popen([*command, "-m", "loragate", *sys.argv[1:]], env=environment))


def wait_for_child(process: subprocess.Popen[Any]) -> int:
    """The exit status of a child that leads a run; returns when it has ended, whatever signal arrives meanwhile.

    The terminal tells the child of Ctrl-C too, and it takes its time to write a checkpoint and to end its own children; a
    second Ctrl-C asks it to end in any case. The signal of `kill` and of service managers reaches this process alone, so it is
    passed on. A KeyboardInterrupt after either, once the child has ended.
    """
    main, interrupted, terminated = threading.current_thread() is threading.main_thread(), False, False

    def pass_on(number: int, frame: Any) -> None:
        nonlocal terminated
        terminated = True
        process.terminate()

    before = signal.signal(signal.SIGTERM, pass_on) if main else None
    try:
        while True:
            try:
                status = process.wait()
                break
            except KeyboardInterrupt:
                if interrupted:
                    process.terminate()  # a stop button may tell this process alone
                interrupted = True
    finally:
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
    if interrupted or terminated:
        raise KeyboardInterrupt(STOP_SIGNALS[signal.SIGTERM if terminated else signal.SIGINT])
    return status
