"""What a training needs, how long it may take and how to launch it, from the model's configuration alone.

`make_plan` compares the ways to run a training (strategy × quantised weights × gradient checkpointing), says which fit into a
GPU's memory and takes one. Counts and the memory of a step come from `plan_step.py`; what is held throughout and what sharding
and quantising change is arithmetic and stands here. What the trainer would refuse is asked of its own rules.
"""

from __future__ import annotations

import functools
import itertools
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from loragate.analysis.counts import Parameters, base_dtype, build_on_meta, count_parameters
from loragate.analysis.plan_step import Step
from loragate.analysis.settings import GPUS, Gpu, Request, find_gpu
from loragate.errors import ConfigError
from loragate.models import read_config
from loragate.training.strategy import launch_file

GIB = 2**30
FP32 = 4
PAPER_ROWS = {"sft": 100_000, "calibrate": 20_000}
SIZES = (16, 8, 4, 2, 1)  # rows of a pass; more than 16 does not make a GPU faster at these lengths
MOST = 8  # rows that are traced
# assumed of memory
CONTEXT = 0.8 * GIB  # CUDA context, cuBLAS workspaces
COMMUNICATION = 0.5 * GIB  # NCCL buffers, with several GPUs
FRAGMENTATION = 0.04  # of everything that is allocated
ZERO3_LIVE = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters: gathered parameters kept for reuse
NF4_BYTES = 1 / 2 + 1 / 64 + FP32 / (64 * 256)  # per weight: double quantisation in blocks of 64, and of 256 blocks
# assumed of time
UTILISATION = 0.4  # share of a GPU's peak that is taken to be reached
STRATEGIES = {"single": 1.0, "ddp": 0.97, "fsdp2": 0.9, "zero3": 0.8}  # what they leave of it
QUANTIZATIONS = {"none": 1.0, "8bit": 0.55, "4bit": 0.75}


@dataclass(frozen=True)
class Option:
    """One way to run the training, as a request that leaves nothing open, and what it takes.

    `parts` and `gib` are GiB of each GPU at the peak, `step` and `seconds` those of a step and of the whole, an estimate.
    """

    way: Request
    parts: dict[str, float]
    gib: float
    step: float
    seconds: float
    fits: bool

    def __str__(self) -> str:
        quantised = [self.way.quantization] if self.way.quantization != "none" else []
        words = [self.way.strategy, *quantised, *["gradient checkpointing"] * self.way.recomputes]
        return " + ".join(words) + f", micro-batch {self.way.micro_batch}"


@dataclass(frozen=True)
class Plan:
    """All options of a request, the one to take and its command; if none fits, `changes` that would each do."""

    request: Request
    gpu: Gpu
    dtype: str
    parameters: Parameters
    options: list[Option]
    chosen: Option | None
    command: str
    changes: list[str]

    @property
    def least(self) -> Option:
        """The chosen option, or the one that needs the least memory."""
        return self.chosen or min(self.options, key=lambda option: option.gib)


def make_plan(request: Request, config: Any = None) -> Plan:
    """Plan a training.

    Args:
        config: the model's transformers configuration where it is at hand; `request.model` is then a name only.

    Raises:
        ConfigError: for settings that cannot work on any number of such GPUs.
        LoragateError: if the configuration cannot be read.
    """
    request.check()
    config = config or read_config(request.model, trust=request.trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{request.model} is a quantised checkpoint; plan with its unquantised base and --quantization 8bit or 4bit"
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and request.seq > positions:
        raise ConfigError(f"the model has {positions} positions, fewer than seq {request.seq}; lower seq")
    if not list(_ways(request)):
        objections = request.objections(request.strategy, request.quantization)
        raise ConfigError("this combination cannot work: " + "; ".join(objections))
    gpu, dtype = find_gpu(request.gpu_memory), base_dtype(config, request.dtype)
    counts = count_parameters(build_on_meta(config, request.stage, request.rank, request.target_modules, dtype), config)

    @functools.cache
    def peak(seq: int, rows: int, recompute: str) -> float:
        if rows > MOST:  # a line from there on, as by then one moment is the worst
            half, most = (peak(seq, few, recompute) for few in (MOST // 2, MOST))
            return most + (most - half) * (rows - MOST) / (MOST // 2)
        traced: dict[str, Any] = {"seq": seq, "micro_batch": rows, "gradient_checkpointing": recompute}
        # rows of different lengths in one pass need a mask
        return Step(config, replace(request, **traced), padded=rows > 1).peak()

    def options(asked: Request) -> list[Option]:
        """Each way with the asked or the largest fitting micro-batch, or with the smallest if none fits."""
        found = []
        for way in _ways(asked):
            for size in [way.micro_batch] if way.micro_batch else [n for n in SIZES if way.batch // way.gpus % n == 0]:
                one = replace(way, micro_batch=size)
                activations = peak(one.seq, size, one.gradient_checkpointing)
                memory = gpu_memory(counts, activations, one, dtype.itemsize)
                parts = {name: count / GIB for name, count in memory.items()}
                gib, step = sum(parts.values()), step_seconds(counts, one, gpu, dtype.itemsize)
                if gib <= gpu.memory:
                    break
            steps = math.ceil(math.ceil((one.rows or PAPER_ROWS[one.stage]) / one.batch) * one.epochs)
            found.append(Option(one, parts, gib, step, steps * step, gib <= gpu.memory))
        return found

    found, name = options(request), str(dtype).removeprefix("torch.")
    if chosen := _best(found):
        return Plan(request, gpu, name, counts, found, chosen, launch_command(chosen.way, name), [])
    plan = Plan(request, gpu, name, counts, found, None, "", [])
    # changes that would each do, smallest first
    least = plan.least
    relaxed = replace(request, strategy="any", quantization="any", gradient_checkpointing="any", micro_batch=0)
    lengths = [request.seq * eighths // 8 // 64 * 64 for eighths in (6, 4, 3, 2, 1)]
    wide = replace(request, strategy="fsdp2", quantization="none", gradient_checkpointing="yes", micro_batch=1)
    more = [2**power for power in range(1, 11) if 2**power > request.gpus and request.batch % 2**power == 0]
    for words, tried in (
        ("allow {option}", [relaxed]),
        (
            "rows of at most {one.seq} tokens (--seq {one.seq}) with {option}",
            [replace(least.way, seq=length) for length in lengths if length],
        ),
        ("{one.gpus} such GPUs with {option}", [replace(wide, gpus=gpus) for gpus in more]),
    ):
        for one in tried:
            if option := _best(options(one)):
                plan.changes.append(words.format(one=one, option=option))
                break
    large = sorted((gpu.memory, gpu.name) for gpu in GPUS.values() if gpu.memory >= least.gib)
    named = ", such as " + " or ".join(name for _, name in large[:2]) if large else ""
    plan.changes.append(f"GPUs of at least {math.ceil(least.gib)} GiB{named} ({least})")
    return plan


def _ways(request: Request) -> Iterator[Request]:
    """All that was asked for and can work, with strategy, quantisation and checkpointing settled."""
    strategies = STRATEGIES if request.gpus > 1 else ("single",)
    for strategy, quantization, recompute in itertools.product(strategies, QUANTIZATIONS, ("no", "yes")):
        if (
            request.strategy in ("any", strategy)
            and request.quantization in ("any", quantization)
            and request.gradient_checkpointing in ("any", recompute)
            and not request.objections(strategy, quantization)
        ):
            gpus = 1 if strategy == "single" else request.gpus
            settled: dict[str, Any] = {"strategy": strategy, "quantization": quantization, "gpus": gpus}
            yield replace(request, **settled | {"gradient_checkpointing": recompute})


def _best(options: list[Option]) -> Option | None:
    """Full weights before quantised ones, then the faster, then the simpler."""
    fitting = [option for option in options if option.fits]
    return min(fitting, key=lambda option: (option.way.quantization != "none", round(option.seconds, 1)), default=None)


def launch_command(way: Request, dtype: str) -> str:
    """The command line that trains this way; capital words stand for the user's own files."""
    words = ["loragate"]
    if way.gpus > 1:
        words = ["accelerate", "launch", "--config_file", str(launch_file(way.strategy))]
        words += ["--num_processes", str(way.gpus), "-m", "loragate"]
    if way.stage == "sft":
        words += ["sft", "--model", "MODEL" if way.model.endswith(".json") else way.model]
        words += ["--rank", str(way.rank), "--target-modules", way.target_modules]
    else:
        words += ["calibrate", "--adapter", "ADAPTER", "--k", str(way.k)]
        # a range is chosen in one process
        words += ["--range=L,U", "--unverified"] if way.gpus > 1 else ["--probe", "PROBE"]
    words += ["--data", "DATA", "--out", "OUT", "--max-length", str(way.seq)]
    words += ["--batch-size", str(way.batch), "--per-device-train-batch-size", str(way.micro_batch)]
    words += ["--max-rows", str(way.rows)] if way.rows else []
    words += ["--num-train-epochs", f"{way.epochs:g}"] if way.epochs != 1 else []
    words += ["--dtype", dtype, "--precision", way.launched_with(way.strategy)]
    words += ["--quantization", way.quantization] if way.quantization != "none" else []
    words += ["--gradient-checkpointing"] if way.recomputes else []
    return " ".join(shlex.quote(word) for word in words)


def step_seconds(counts: Parameters, way: Request, gpu: Gpu, itemsize: int) -> float:
    """Of an optimiser step: FLOPs over the assumed throughput, or the link's time, which works beside."""
    tokens = way.micro_batch * way.seq
    flops = tokens * counts.flops(way.stage, way.seq, k=way.k, recompute=way.recomputes)
    peak = gpu.half if way.precision != "fp32" or itemsize == 2 else gpu.single
    compute = flops / (peak * 1e12 * UTILISATION * STRATEGIES[way.strategy] * QUANTIZATIONS[way.quantization])
    # bytes over the link: the base for the forward and again for the backward, gradients once a step
    crossing = 2 * (way.gpus - 1) / way.gpus / (gpu.link * 1e9)
    moved = crossing * counts.base * itemsize if way.strategy in ("fsdp2", "zero3") else 0.0
    passes = max(1, way.batch // (way.micro_batch * way.gpus))
    return passes * max(compute, moved) + crossing * FP32 * counts.trained(way.stage)


def gpu_memory(counts: Parameters, peak: float, way: Request, itemsize: int) -> dict[str, float]:
    """Bytes of one GPU, by part, at the worst moment of a pass that was traced (`Step.peak`); `itemsize` is the base's.

    Quantised are the linear layers but the head, as bitsandbytes does it. LoRA factors, gates and AdamW's two moments are fp32.
    `gathered` are whole weights that sharding puts together for a moment, `overhead` is assumed.
    """
    sharded = way.strategy in ("fsdp2", "zero3")
    per_weight = {"8bit": 1.0, "4bit": NF4_BYTES}.get(way.quantization, itemsize)
    weights = (counts.base - counts.linear) * itemsize + counts.linear * per_weight
    # gates stay whole on every GPU; LoRA factors are sharded with the base
    lora = counts.lora / way.gpus if sharded else counts.lora
    own = counts.gates if way.stage == "calibrate" else lora
    gathered = 0.0
    if way.strategy == "fsdp2":
        # the root group (embeddings, head) is whole while the model runs, and two layers: this one and the next
        gathered = itemsize * (counts.root + 2 * min(counts.block, counts.base - counts.root))
    elif way.strategy == "zero3":
        gathered = itemsize * min(float(counts.base), max(ZERO3_LIVE, counts.root + counts.block))
    widened = 0.0 if way.quantization == "none" else itemsize * counts.largest_linear
    if way.quantization == "8bit":  # or the input in 8 bits beside an int32 product
        widened = max(widened, way.micro_batch * way.seq * counts.widest)
    parts = {
        "weights": weights / way.gpus if sharded else weights,
        "adapter": FP32 * (lora + counts.gates),
        "optimizer": 2.0 * FP32 * own,
        "gradients": FP32 * (own + counts.trained(way.stage) * (way.strategy == "ddp")),
        "gathered": gathered,
        "activations": peak + widened,
    }
    return parts | {"overhead": CONTEXT + COMMUNICATION * (way.gpus > 1) + FRAGMENTATION * sum(parts.values())}
