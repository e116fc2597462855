"""How this run was launched: alone, or by `accelerate launch` or torchrun on several processes, and who holds the weights.

Read from the environment that the launchers set, before torch is imported, so that a combination that cannot work is
refused at once. The launch configurations that the package ships lie beside this file in `accelerate/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRATEGIES = ("ddp", "fsdp2", "zero3")
ASKED = "LORAGATE_STRATEGY"


@dataclass(frozen=True)
class Launch:
    """How a run was launched.

    Attributes:
        strategy: "single", "ddp", "fsdp2" or "zero3"; "fsdp1", "zero0", "zero1" and "zero2" are recognised to be refused.
        processes: processes of all machines together.
        rank: this process among them.
        local_rank: this process on its machine.
        cpu: the launcher was told to stay on the CPU.
        offload: the launch configuration asks FSDP to keep its shards in host memory.
    """

    strategy: str = "single"
    processes: int = 1
    rank: int = 0
    local_rank: int = 0
    cpu: bool = False
    offload: bool = False

    @property
    def sharded(self) -> bool:
        """Whether no process holds the whole base while it trains."""
        return self.strategy not in ("single", "ddp")


def launch_of(environment: Mapping[str, str] | None = None) -> Launch:
    """The launch that an environment (by default this process's) describes."""
    known = os.environ if environment is None else environment

    def number(name: str, default: int) -> int:
        text = known.get(name, "")
        return int(text) if text.lstrip("-").isdigit() else default

    def flag(name: str) -> bool:
        return known.get(name, "").lower() in ("1", "true", "yes")

    # the names are torchrun's (WORLD_SIZE, RANK, LOCAL_RANK), Accelerate's, and one of ours
    processes = number("WORLD_SIZE", 1)
    strategy = "ddp" if processes > 1 else "single"
    if flag("ACCELERATE_USE_FSDP"):
        strategy = f"fsdp{number('FSDP_VERSION', 1)}"
    elif flag("ACCELERATE_USE_DEEPSPEED"):
        stage = number("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)
        with suppress(OSError, ValueError, LookupError, TypeError):  # a DeepSpeed configuration of the user's own
            own = json.loads(Path(known.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")).read_text(encoding="utf-8"))
            stage = int(own["zero_optimization"]["stage"])
        strategy = f"zero{stage}"
    strategy = known.get(ASKED) or strategy
    offload = strategy.startswith("fsdp") and flag("FSDP_OFFLOAD_PARAMS")
    local = max(0, number("LOCAL_RANK", 0))
    return Launch(strategy, processes, number("RANK", 0), local, flag("ACCELERATE_USE_CPU"), offload)


def process_state() -> Any:
    """Accelerate's `PartialState`: rank, barrier, main process. The first call starts the process group.

    Accelerate would take a process of a group on the CPU for a single one unless it is told.
    """
    import torch
    from accelerate import PartialState

    launch = launch_of()
    # with FSDP2 the model is sharded by loragate, before Accelerate sees it; the wish is noted under a name of our own
    if launch.strategy == "fsdp2" and os.environ.pop("ACCELERATE_USE_FSDP", None) is not None:
        os.environ[ASKED] = launch.strategy
    on_cpu = launch.cpu or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    if launch.strategy == "zero3":
        # Accelerate gives DeepSpeed no process of a group on the CPU; with a backend named it does
        return PartialState(backend="gloo") if on_cpu else PartialState()
    return PartialState(cpu=on_cpu and launch.processes > 1)


def launch_file(strategy: str) -> Path:
    """The `accelerate launch --config_file` of a strategy that the package ships."""
    return Path(__file__).parent / "accelerate" / f"{strategy}.yaml"
