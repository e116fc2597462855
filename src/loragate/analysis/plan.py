"""What a training needs, how long it may take and how to launch it, from the model's configuration alone.

`make_plan` compares the ways to run a training (strategy × quantised weights × gradient checkpointing), says which fit into a
GPU's memory and takes one. Counts come from `plan_model.py`, the memory of a step from `plan_trace.py`; what is held throughout
and what sharding and quantising change is arithmetic and stands here. What the trainer would refuse is asked of its own rules.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from loragate.analysis.plan_model import Parameters, base_dtype, build_on_meta, count_parameters, read_config
from loragate.analysis.plan_request import GPUS, Gpu, Request, find_gpu
from loragate.analysis.plan_trace import Footprint, Tracer, Workload
from loragate.errors import ConfigError
from loragate.training.strategy import launch_file

GIB = 2**30
FP32 = 4
PAPER_ROWS = {"sft": 100_000, "calibrate": 20_000}
SIZES = (16, 8, 4, 2, 1)  # rows of a pass; more than 16 does not make a GPU faster at these lengths
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
DRAWN, FILLED = 256, 0.9  # answers drawn together, and the share of the memory that is filled: vLLM's defaults


@dataclass(frozen=True)
class Option:
    """One way to run the training: GiB of each GPU by part and at the peak, estimated seconds of a step and of the whole."""

    strategy: str
    quantization: str
    checkpointing: bool
    gpus: int
    micro_batch: int
    parts: dict[str, float]
    gib: float
    step: float
    seconds: float
    fits: bool

    def __str__(self) -> str:
        quantised = [self.quantization] if self.quantization != "none" else []
        words = [self.strategy, *quantised, *["gradient checkpointing"] * self.checkpointing]
        return " + ".join(words) + f", micro-batch {self.micro_batch}"


@dataclass(frozen=True)
class Plan:
    """All options of a request, and the one to take; if none fits, `changes` that would each do."""

    request: Request
    gpu: Gpu
    dtype: str
    parameters: Parameters
    options: list[Option]
    chosen: Option | None
    changes: list[str] = field(default_factory=list)

    @property
    def least(self) -> Option:
        """The chosen option, or the one that needs the least memory."""
        return self.chosen or min(self.options, key=lambda option: option.gib)

    def command(self, option: Option) -> str:
        """The command line that runs `option`; capital words stand for the user's own files."""
        request, words = self.request, ["loragate"]
        if option.gpus > 1:
            words = ["accelerate", "launch", "--config_file", str(launch_file(option.strategy))]
            words += ["--num_processes", str(option.gpus), "-m", "loragate"]
        if request.stage == "sft":
            words += ["sft", "--model", "MODEL" if request.model.endswith(".json") else request.model]
            words += ["--rank", str(request.rank), "--target-modules", request.target_modules]
        else:
            words += ["calibrate", "--adapter", "ADAPTER", "--k", str(request.k)]
            # a range is chosen in one process
            words += ["--range=L,U", "--unverified"] if option.gpus > 1 else ["--probe", "PROBE"]
        words += ["--data", "DATA", "--out", "OUT", "--max-length", str(request.seq)]
        words += ["--batch-size", str(request.batch), "--micro-batch-size", str(option.micro_batch)]
        words += ["--max-rows", str(request.rows)] if request.rows else []
        words += ["--epochs", f"{request.epochs:g}"] if request.epochs != 1 else []
        words += ["--dtype", self.dtype, "--precision", request.launched_with(option.strategy)]
        words += ["--quantization", option.quantization] if option.quantization != "none" else []
        words += ["--gradient-checkpointing"] if option.checkpointing else []
        return " ".join(shlex.quote(word) for word in words)


def make_plan(request: Request, config: Any = None) -> Plan:
    """Plan a training.

    Args:
        config: the model's transformers configuration where it is at hand; `request.model` is then a name only.

    Raises:
        ConfigError: for settings that cannot work on any number of such GPUs.
        LoragateError: if the configuration cannot be read.
    """
    request.check()
    config = config or read_config(request.model, revision=request.revision, trust=request.trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{request.model} is a quantised checkpoint; plan with its unquantised base and --quantization 8bit or 4bit"
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and request.seq > positions:
        raise ConfigError(f"the model has {positions} positions, fewer than seq {request.seq}; lower seq")
    if not list(_ways(request)):
        words = request.objections(request.strategy, request.quantization)
        raise ConfigError("this combination cannot work: " + "; ".join(words))
    planner = _Planner(request, config)
    options = planner.options(request)
    plan = Plan(
        request,
        planner.gpu,
        str(planner.dtype).removeprefix("torch."),
        planner.parameters,
        options,
        _best(options),
    )
    return plan if plan.chosen else replace(plan, changes=list(planner.changes(plan)))


def _ways(request: Request) -> Iterator[tuple[str, str, bool]]:
    """(strategy, quantization, checkpointing) of all that was asked for and can work."""
    for strategy in STRATEGIES if request.gpus > 1 else ("single",):
        for quantization in QUANTIZATIONS:
            for checkpointing in (False, True):
                if (
                    request.strategy in ("any", strategy)
                    and request.quantization in ("any", quantization)
                    and request.gradient_checkpointing in ("any", "yes" if checkpointing else "no")
                    and not request.objections(strategy, quantization)
                ):
                    yield strategy, quantization, checkpointing


def _best(options: list[Option]) -> Option | None:
    """Full weights before quantised ones, then the faster, then the simpler."""
    fitting = [option for option in options if option.fits]
    return min(fitting, key=lambda option: (option.quantization != "none", round(option.seconds, 1)), default=None)


class _Planner:
    """The model's counts, and traces as they are asked for."""

    def __init__(self, request: Request, config: Any) -> None:
        self.gpu, self.dtype = find_gpu(request.gpu_memory), base_dtype(config, request.dtype)
        model = build_on_meta(config, request.stage, request.rank, request.target_modules, self.dtype)
        self.parameters, self.tracer = count_parameters(model, config), Tracer(config)

    def options(self, request: Request) -> list[Option]:
        """Each way with the asked or the largest fitting micro-batch, or with the smallest if none fits."""
        found = []
        for way in _ways(request):
            share = request.batch // (1 if way[0] == "single" else request.gpus)
            sizes = [request.micro_batch] if request.micro_batch else [size for size in SIZES if share % size == 0]
            for size in sizes:
                option = self.option(request, *way, size)
                if option.fits:
                    break
            found.append(option)
        return found

    def option(self, request: Request, strategy: str, quantization: str, checkpointing: bool, size: int) -> Option:
        gpus = 1 if strategy == "single" else request.gpus
        workload = Workload(
            stage=request.stage,
            sequence=request.seq,
            rows=size,
            rank=request.rank,
            targets=request.target_modules,
            k=request.k,
            dtype=self.dtype,
            autocast=request.precision if request.precision != "fp32" else "",
            checkpointing=checkpointing,
            padded=size > 1,  # rows of different lengths in one pass need a mask
            accumulating=request.batch > gpus * size,
        )
        footprint = self.tracer.footprint(workload)
        memory = gpu_memory(
            self.parameters, footprint, workload, strategy=strategy, gpus=gpus, quantization=quantization
        )
        parts = {name: count / GIB for name, count in memory.items()}
        gib = sum(parts.values())
        # seconds: FLOPs over the assumed throughput, against the link, which works beside
        length = request.mean_length or request.seq
        flops = self.parameters.flops(request.stage, int(length), k=request.k, recompute=checkpointing) * size * length
        peak = self.gpu.half if request.precision != "fp32" or self.dtype.itemsize == 2 else self.gpu.single
        compute = flops / (peak * 1e12 * UTILISATION * STRATEGIES[strategy] * QUANTIZATIONS[quantization])
        # bytes over the link: the base for the forward and again for the backward, gradients once a step
        crossing = 2 * (gpus - 1) / gpus / (self.gpu.link * 1e9)
        moved = crossing * self.parameters.base * self.dtype.itemsize if strategy in ("fsdp2", "zero3") else 0.0
        passes = max(1, request.batch // (size * gpus))
        step = passes * max(compute, moved) + crossing * FP32 * self.parameters.trained(request.stage)
        rows = request.rows or PAPER_ROWS[request.stage]
        seconds = math.ceil(math.ceil(rows / request.batch) * request.epochs) * step
        fits = gib <= self.gpu.memory
        return Option(strategy, quantization, checkpointing, gpus, size, parts, gib, step, seconds, fits)

    def changes(self, plan: Plan) -> Iterator[str]:
        """Changes of the request that would each make it fit, smallest first."""
        request, smallest = plan.request, plan.least
        relaxed = replace(request, strategy="any", quantization="any", gradient_checkpointing="any", micro_batch=0)
        if option := _best(self.options(relaxed)):
            yield f"allow {option}"
        fixed: dict[str, Any] = {
            "strategy": smallest.strategy,
            "quantization": smallest.quantization,
            "gradient_checkpointing": "yes" if smallest.checkpointing else "no",
            "micro_batch": smallest.micro_batch,
        }
        for eighths in (6, 4, 3, 2, 1):
            length = request.seq * eighths // 8 // 64 * 64
            if length and (option := _best(self.options(replace(request, **fixed, seq=length, mean_length=0)))):
                yield f"rows of at most {length} tokens (--seq {length}) with {option}"
                break
        wide = replace(request, strategy="fsdp2", quantization="none", gradient_checkpointing="yes", micro_batch=1)
        for gpus in (2**power for power in range(1, 11)):
            if gpus > request.gpus and request.batch % gpus == 0 and _best(self.options(replace(wide, gpus=gpus))):
                yield f"{gpus} such GPUs with fsdp2 and gradient checkpointing, micro-batch 1"
                break
        large = sorted((gpu.memory, gpu.name) for gpu in GPUS.values() if gpu.memory >= smallest.gib)
        named = ", such as " + " or ".join(name for _, name in large[:2]) if large else ""
        yield f"GPUs of at least {math.ceil(smallest.gib)} GiB{named} ({smallest})"


def gpu_memory(
    parameters: Parameters,
    footprint: Footprint,
    workload: Workload,
    *,
    strategy: str = "single",
    gpus: int = 1,
    quantization: str = "none",
) -> dict[str, float]:
    """Bytes of one of `gpus` GPUs at the worst moment of a pass of `workload`, whose `footprint` was traced, by part.

    - weights: this GPU's share of the base; quantised are the linear layers but the head, as bitsandbytes does it.
    - adapter: LoRA factors and gates, fp32. optimizer: AdamW's two moments of what trains, fp32.
    - gradients: of what trains, with DDP's buckets.
    - gathered: whole weights that sharding puts together for a moment.
    - activations: kept from the forward for the backward pass.
    - temporary: what the worst moment of forward, head and backward needs beyond that.
    - overhead: context, communication buffers, fragmentation (assumed).
    """
    size = workload.dtype.itemsize
    sharded = strategy in ("fsdp2", "zero3")
    per_weight = {"8bit": 1.0, "4bit": NF4_BYTES}.get(quantization, size)
    weights = (parameters.base - parameters.linear) * size + parameters.linear * per_weight
    # gates stay whole on every GPU; LoRA factors are sharded with the base
    lora = parameters.lora / gpus if sharded else parameters.lora
    own = parameters.gates if workload.stage == "calibrate" else lora
    gathered = 0.0
    if strategy == "fsdp2":
        # the root group (embeddings, head) is whole while the model runs, and two layers: this one and the next
        gathered = size * (parameters.root + 2 * min(parameters.block, parameters.base - parameters.root))
    elif strategy == "zero3":
        gathered = size * min(float(parameters.base), max(ZERO3_LIVE, parameters.root + parameters.block))
    widened = 0.0 if quantization == "none" else size * parameters.largest_linear
    if quantization == "8bit":  # or the input in 8 bits beside an int32 product
        widest = max((d_in + FP32 * d_out for d_in, d_out, _ in parameters.modules), default=0)
        widened = max(widened, workload.rows * workload.sequence * widest)
    parts = {
        "weights": weights / gpus if sharded else weights,
        "adapter": FP32 * (lora + parameters.gates),
        "optimizer": 2.0 * FP32 * own,
        # those of the first pass are in the trace
        "gradients": FP32 * (own * workload.accumulating + parameters.trained(workload.stage) * (strategy == "ddp")),
        "gathered": gathered,
        "activations": footprint.saved,
        "temporary": footprint.temporary + widened,
    }
    return parts | {"overhead": CONTEXT + COMMUNICATION * (gpus > 1) + FRAGMENTATION * sum(parts.values())}


def decoding(
    parameters: Parameters, config: Any, gpu: Gpu, dtype: torch.dtype, answers: int, tokens: int
) -> tuple[float, float]:
    """(bytes, seconds) of `answers` answers of `tokens` tokens each on one GPU; prompts are not counted.

    A step adds one token to each answer of a batch. It reads every weight and the keys and values of all contexts, and sends
    as many tokens as there are answers through the weights; the longer of the two is its time. That is an engine which keeps
    its batch full, as vLLM does; batches that wait for their longest answer take longer.

    Args:
        config: of the model; its key and value heads give the size of a context.
        dtype: of weights, keys and values.
    """
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads  # GPT-2 has no fewer of the former
    context = 2 * text.num_hidden_layers * heads * size * dtype.itemsize * tokens
    weights = (parameters.base + parameters.lora) * dtype.itemsize
    batch = max(1, min(DRAWN, answers, int((FILLED * gpu.memory * GIB - weights) // context)))
    # a context is half full on average
    reading = (weights + batch * context / 2) / (gpu.bandwidth * 1e9)
    multiplying = 2 * batch * (parameters.active + parameters.head + parameters.lora) / (gpu.half * 1e12)
    return weights + batch * context, math.ceil(answers / batch) * tokens * max(reading, multiplying) / UTILISATION
