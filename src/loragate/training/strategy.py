"""How a run is launched, alone or by `accelerate launch` or torchrun on several processes, and what cannot work together.

The launch is read from the environment that the launchers set, before torch is imported. Combinations that cannot work are a
table: each rule is a test over the plan of a run and a sentence that says what to change. It is consulted when a command starts,
before a model is loaded, and again by the trainer. What is slow or untested but right is not refused;
docs/training.md says what was tested. The launch configurations that the package ships lie beside this file in `accelerate/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError

STRATEGIES = ("ddp", "fsdp2")
STRATEGY_ENV_VAR = "LORAGATE_STRATEGY"


@dataclass(frozen=True)
class Launch:
    """How a run was launched."""

    strategy: str = "single"  # or "ddp" or "fsdp2"; "fsdp1" and "deepspeed" are recognised to be refused
    processes: int = 1  # of all machines together
    rank: int = 0  # this process among them
    local_rank: int = 0  # this process on its machine
    cpu: bool = False  # the launcher was told to stay on the CPU
    offload: bool = False  # the launch configuration asks FSDP to keep its shards in host memory

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole base while it trains."""
        return self.strategy not in ("single", "ddp")


def detect_launch(environment: Mapping[str, str] | None = None) -> Launch:
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
        strategy = "deepspeed"
    strategy = known.get(STRATEGY_ENV_VAR) or strategy
    offload = strategy.startswith("fsdp") and flag("FSDP_OFFLOAD_PARAMS")
    local = max(0, number("LOCAL_RANK", 0))
    return Launch(strategy, processes, number("RANK", 0), local, flag("ACCELERATE_USE_CPU"), offload)


def process_state() -> Any:
    """Accelerate's `PartialState`: rank, barrier, main process. The first call starts the process group.

    Accelerate would take a process of a group on the CPU for a single one unless it is told.
    """
    import torch
    from accelerate import PartialState

    launch = detect_launch()
    # with FSDP2 the model is sharded by loragate, before Accelerate sees it; the wish is noted under a name of our own
    if launch.strategy == "fsdp2" and os.environ.pop("ACCELERATE_USE_FSDP", None) is not None:
        os.environ[STRATEGY_ENV_VAR] = launch.strategy
    on_cpu = launch.cpu or not (torch.cuda.is_available() or torch.backends.mps.is_available())
    return PartialState(cpu=on_cpu and launch.processes > 1)


def launch_file(strategy: str) -> Path:
    """The `accelerate launch --config_file` of a strategy that the package ships."""
    return Path(__file__).parent / "accelerate" / f"{strategy}.yaml"


@dataclass(frozen=True)
class Plan:
    """A run before it begins; what is not known is left at its default, and no rule then speaks of it."""

    launch: Launch = field(default_factory=Launch)
    device: str = ""  # "cuda", "cpu" or "mps"
    quantization: str = "none"  # or "8bit" or "4bit"
    precision: str = "fp32"
    packing: bool = False
    group_by_length: bool = False
    dora: bool = False
    reference: bool = False  # the objective has a KL to a frozen reference
    sampling: bool = False  # the run samples answers, to choose a range


# by name: whether a plan is forbidden, and what to change, with fields of the plan `p` in braces
INCOMPATIBILITIES: dict[str, tuple[Callable[[Plan], bool], str]] = {
    "other sharding": (
        lambda p: p.launch.strategy not in ("single", *STRATEGIES),
        "{p.launch.strategy} is not supported: shard with FSDP2 (fsdp_version: 2 in the launch configuration), or launch with ddp",
    ),
    "sharding needs processes": (
        lambda p: p.launch.is_sharded and p.launch.processes < 2,
        "{p.launch.strategy} shards over processes, and there is one: raise --num_processes, or leave it out",
    ),
    "FSDP offload": (
        lambda p: p.launch.offload,
        "fsdp_offload_params is not supported: set it to false in the launch configuration, or use more processes",
    ),
    "sharding × quantised base": (
        lambda p: p.launch.is_sharded and p.quantization != "none",
        "a {p.quantization} base cannot be sharded with {p.launch.strategy}: launch with ddp (a quantised base is small enough to "
        "be whole on each GPU), or leave the quantisation out",
    ),
    "sharding × selection": (
        lambda p: p.launch.is_sharded and p.sampling,
        "under {p.launch.strategy} no process holds a model that could sample answers, so a range cannot be chosen on a dev "
        "set here: add --skip-selection and compare with the plain adapter afterwards (loragate eval), or choose in one process",
    ),
    "sharding × reference": (
        lambda p: p.launch.is_sharded and p.reference,
        "an objective with a KL to a reference is not sharded with {p.launch.strategy}: launch with ddp",
    ),
    "sharding × DoRA": (
        lambda p: p.launch.is_sharded and p.dora,
        "DoRA reads whole weight matrices, which {p.launch.strategy} shards: launch with ddp, or train LoRA",
    ),
    "sharding × fp16": (
        lambda p: p.launch.is_sharded and p.precision == "fp16",
        "fp16 with its loss scaling is not combined with {p.launch.strategy}: use precision bf16, or ddp",
    ),
    "fp16 needs CUDA": (
        lambda p: p.precision == "fp16" and p.device not in ("", "cuda"),
        "precision fp16 needs CUDA's loss scaling, and this run is on {p.device}: use fp32 or bf16",
    ),
    "several processes × mps": (
        lambda p: p.launch.processes > 1 and p.device == "mps",
        "there is no exchange between processes on mps: run in one process",
    ),
    "packing × grouping": (
        lambda p: p.packing and p.group_by_length,
        "packing pads nothing, so group_by_length has no effect beside it: leave one of them out",
    ),
    "quantised base × mps": (
        lambda p: p.quantization != "none" and p.device == "mps",
        "a {p.quantization} base is not supported on mps: use cuda or cpu, or leave the quantisation out",
    ),
}


def check_plan(plan: Plan) -> None:
    """Refuse a run that cannot work: a ConfigError with everything that must change, one line each."""
    if found := [sentence.format(p=plan) for forbids, sentence in INCOMPATIBILITIES.values() if forbids(plan)]:
        raise ConfigError("\n".join(found))
