"""Starting a training command on several processes, and refusing at once what cannot work together.

`--strategy` and `--processes` start the same command again under torch's launcher; a command that runs under a launcher
already (`accelerate launch`, torchrun, Slurm) is taken as it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

from loragate.errors import ConfigError
from loragate.training.compatibility import Plan, refuse_impossible
from loragate.training.strategy import ASKED, Launch, launch_of


def begin(options: Any, settings: Any, **more: Any) -> int | None:
    """What a training command does first.

    Args:
        options: the command's options, with `strategy`, `processes`, `device` and `quantization`.
        settings: its training settings.
        more: further fields of the `Plan`, such as sampling=True.

    Returns:
        None to go on in this process; otherwise the run is over, with this exit status.

    Raises:
        ConfigError: for a combination that cannot work, or a strategy that is not the launcher's.
    """
    if options.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    launch = launch_of()
    launched = "LOCAL_RANK" in os.environ or launch.processes > 1
    if launched:
        launch = _agreed(options, launch)
    elif options.strategy != "auto" or options.processes > 1:
        launch = Launch("ddp" if options.strategy == "auto" else options.strategy, _processes(options), cpu=launch.cpu)
    plan = Plan.of_settings(
        settings, launch, _device(options.device), quantization=options.quantization, **{"reference": False, **more}
    )
    refuse_impossible(plan)
    settings.accumulation(launch.processes)
    if launched or launch.processes < 2:
        return None
    return _start(launch)


def loads_into_host() -> bool:
    """Whether the base is loaded into host memory, from where its shards go to the devices."""
    return bool(launch_of().sharded)


def _agreed(options: Any, launch: Launch) -> Launch:
    """The launcher's word; --strategy may add fsdp2 to a bare torchrun, and must not say otherwise."""
    if options.strategy == "fsdp2" and launch.strategy == "ddp":
        os.environ[ASKED] = "fsdp2"
        return launch_of()
    if options.strategy not in ("auto", launch.strategy):
        raise ConfigError(
            f"--strategy {options.strategy}, but the launcher started this run as {launch.strategy}: leave --strategy out, or "
            "start the command without a launcher"
        )
    if options.processes not in (0, launch.processes):
        raise ConfigError(
            f"--processes {options.processes}, but the launcher started {launch.processes}: leave --processes out"
        )
    return launch


def _processes(options: Any) -> int:
    if options.processes:
        return int(options.processes)
    import torch

    found = torch.cuda.device_count() if options.device != "cpu" else 0
    if found < 2:
        raise ConfigError(
            f"--strategy {options.strategy} needs several processes, and this machine has {found or 'no'} CUDA device"
            f"{'' if found == 1 else 's'}; say how many with --processes, or leave --strategy out"
        )
    return found


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted.split(":")[0]
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _start(launch: Launch) -> int:
    """Run this command line again in so many processes of this machine, and wait for them."""
    environment = {**os.environ, ASKED: launch.strategy}
    if launch.strategy == "zero3":
        environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.processes)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.processes}"]
    command += ["-m", "loragate", *sys.argv[1:]]
    return wait_for(subprocess.Popen(command, env=environment))


def wait_for(process: subprocess.Popen[Any]) -> int:
    """The exit status of a child that leads a run; returns when it has ended, whatever signal arrives meanwhile.

    The terminal tells the child of Ctrl-C too, and it takes its time to write a checkpoint and to end its own children; a
    second Ctrl-C asks it to end in any case. The signal of `kill` and of service managers reaches this process alone, so it is
    passed on.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the child has ended.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate()) if main else None
    interrupted = False
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
    if interrupted:
        raise KeyboardInterrupt
    return status
