"""What cannot work together, as a table: each rule is a test over the plan of a run and a sentence that says what to change.

Checked when a command starts, before a model is loaded, and again by the trainer for those who call it from Python. A
combination that is slow or untested but right is not refused here; docs/scaling.md lists those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from loragate.errors import ConfigError
from loragate.training.settings import ON_POLICY, TrainSettings
from loragate.training.strategy import STRATEGIES, Launch


@dataclass(frozen=True)
class Plan:
    """A run before it begins; what is not known is left at its default, and no rule then speaks of it.

    Attributes:
        objective: of the training.
        launch: how the processes were started.
        device: "cuda", "cpu" or "mps".
        quantization: "none", "8bit" or "4bit".
        precision, packing, group_by_length, activation_offload: as in the settings.
        dora: a DoRA adapter is trained.
        reference: a frozen reference model of its own is loaded beside the trained one.
        sampling: the run samples answers, to choose a range or to guard the gates.
    """

    objective: str = ""
    launch: Launch = field(default_factory=Launch)
    device: str = ""
    quantization: str = "none"
    precision: str = "fp32"
    packing: bool = False
    group_by_length: bool = False
    activation_offload: bool = False
    dora: bool = False
    reference: bool = False
    sampling: bool = False

    @classmethod
    def of_settings(cls, settings: TrainSettings, launch: Launch, device: str, **more: Any) -> Plan:
        """The plan that training settings describe; `more` overrides or adds."""
        known = {one.name for one in fields(cls)} - {"launch", "device"}
        read = {name: getattr(settings, name) for name in known if hasattr(settings, name)}
        return cls(**{**read, "launch": launch, "device": device, **more})


_WITH_REFERENCE = ("eksft",)

# by name: whether a plan is forbidden, and what to change, with fields of the plan `p` in braces
RULES: dict[str, tuple[Callable[[Plan], bool], str]] = {
    "FSDP version": (
        lambda p: p.launch.strategy.startswith("fsdp") and p.launch.strategy not in STRATEGIES,
        "FSDP version 1 is not supported: set fsdp_version: 2 in the launch configuration",
    ),
    "ZeRO stage": (
        lambda p: p.launch.strategy.startswith("zero") and p.launch.strategy not in STRATEGIES,
        "DeepSpeed ZeRO is not supported as {p.launch.strategy}: gates and LoRA factors are small, so that sharding their "
        "optimiser alone saves nothing. Launch with ddp, or set zero_stage: 3",
    ),
    "sharding needs processes": (
        lambda p: p.launch.sharded and p.launch.processes < 2,
        "{p.launch.strategy} shards over processes, and there is one: raise --num_processes, or leave it out",
    ),
    "FSDP offload": (
        lambda p: p.launch.offload,
        "fsdp_offload_params is not supported: set it to false in the launch configuration, or use more processes",
    ),
    "sharding × quantised base": (
        lambda p: p.launch.sharded and p.quantization != "none",
        "a {p.quantization} base cannot be sharded with {p.launch.strategy}: launch with ddp (a quantised base is small enough to "
        "be whole on each GPU), or leave the quantisation out",
    ),
    "several processes × sampled answers": (
        lambda p: p.launch.processes > 1 and p.objective in ON_POLICY,
        "the objective {p.objective!r} runs in one process: start it without a distributed launcher",
    ),
    "sharding × probe": (
        lambda p: p.launch.sharded and p.sampling and p.objective not in ON_POLICY,
        "under {p.launch.strategy} no process holds a model that could sample answers, so a range cannot be chosen on a probe "
        "here: add --unverified and compare with the plain adapter afterwards (loragate eval), or choose in one process",
    ),
    "sharding × reference": (
        lambda p: p.launch.sharded and (p.reference or p.objective in _WITH_REFERENCE),
        "an objective with a reference model is not sharded with {p.launch.strategy}: launch with ddp",
    ),
    "sharding × DoRA": (
        lambda p: p.launch.sharded and p.dora,
        "DoRA reads whole weight matrices, which {p.launch.strategy} shards: launch with ddp, or train LoRA",
    ),
    "sharding × fp16": (
        lambda p: p.launch.sharded and p.precision == "fp16",
        "fp16 with its loss scaling is not combined with {p.launch.strategy}: use precision bf16, or ddp",
    ),
    "ZeRO-3 × autocast": (
        lambda p: p.launch.strategy == "zero3" and p.precision == "bf16",
        "under DeepSpeed, precision bf16 would cast everything that trains to bf16, and gates train in fp32: leave precision at "
        "fp32 and load the base with --dtype bfloat16, or launch with fsdp2",
    ),
    "fp16 needs CUDA": (
        lambda p: p.precision == "fp16" and p.device not in ("", "cuda"),
        "precision fp16 needs CUDA's loss scaling, and this run is on {p.device}: use fp32 or bf16",
    ),
    "several processes × mps": (
        lambda p: p.launch.processes > 1 and p.device == "mps",
        "there is no exchange between processes on mps: run in one process",
    ),
    "offload needs a GPU": (
        lambda p: p.activation_offload and p.device not in ("", "cuda"),
        "activation_offload moves activations from a CUDA device to host memory and has no effect on {p.device}: leave it out",
    ),
    "packing × grouping": (
        lambda p: p.packing and p.group_by_length,
        "packing pads nothing, so group_by_length has no effect beside it: leave one of them out",
    ),
    "arrangement × sampled answers": (
        lambda p: (p.packing or p.group_by_length or p.activation_offload) and p.objective in ON_POLICY,
        "packing, group_by_length and activation_offload belong to training on the given rows, and the objective {p.objective!r} "
        "trains on answers that it samples: leave them out",
    ),
    "fp16 × sampled answers": (
        lambda p: p.precision == "fp16" and p.objective in ON_POLICY,
        "the objective {p.objective!r} has no loss scaling: use precision fp32 or bf16",
    ),
    "quantised base × mps": (
        lambda p: p.quantization != "none" and p.device == "mps",
        "a {p.quantization} base is not supported on mps: use cuda or cpu, or leave the quantisation out",
    ),
}


def impossible(plan: Plan) -> list[str]:
    """The sentences of all rules that forbid a plan."""
    return [sentence.format(p=plan) for forbids, sentence in RULES.values() if forbids(plan)]


def refuse_impossible(plan: Plan) -> None:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: with everything that must change, one line each.
    """
    if found := impossible(plan):
        raise ConfigError("\n".join(found))
