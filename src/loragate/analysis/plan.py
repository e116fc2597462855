"""What a training needs, how long it may take and how to launch it, from the model's configuration alone.

`make_plan` compares the ways to run a training (strategy × quantised weights × gradient checkpointing), says which fit into a
GPU's memory and takes one. Counts come from `plan_model.py`, the memory of a step from `plan_trace.py`; what is held throughout
and what sharding and quantising change is arithmetic and stands here. What the trainer would refuse is asked of its own rules.
No torch before a plan is made, so that a command line can be checked at once.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loragate.analysis.cost import GPUS, UTILISATION, Gpu, find_gpu
from loragate.errors import ConfigError, nearest
from loragate.training.compatibility import Plan as Combination
from loragate.training.compatibility import impossible
from loragate.training.strategy import Launch, launch_file

if TYPE_CHECKING:
    import torch

    from loragate.analysis.plan_model import Parameters
    from loragate.analysis.plan_trace import Footprint, Workload

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
# assumed of time: what strategies and quantised weights leave of `UTILISATION`
STRATEGIES = {"single": 1.0, "ddp": 0.97, "fsdp2": 0.9, "zero3": 0.8}
QUANTIZATIONS = {"none": 1.0, "8bit": 0.55, "4bit": 0.75}

CHOICES = {
    "stage": tuple(PAPER_ROWS),
    "precision": ("fp32", "bf16", "fp16"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": ("any", *QUANTIZATIONS),
    "gradient_checkpointing": ("any", "yes", "no"),
    "strategy": ("any", *STRATEGIES),
}
LEAST = {"gpus": 1, "seq": 1, "batch": 1, "rank": 1, "micro_batch": 0, "rows": 0, "mean_length": 0}


@dataclass(frozen=True)
class Request:
    """What is to be trained on what.

    Attributes:
        model: hub id, model folder or config.json; only the configuration is read, no weights.
        stage: sft (Stage I) or calibrate (Stage II).
        gpus: GPUs, counted over all machines.
        gpu_memory: memory of one GPU in GiB, or its name (h100, a100-80, a100-40, l40s, 4090, ...).
        seq: tokens of the longest rows; memory is planned for passes full of such rows.
        batch: rows per optimiser step over all GPUs.
        micro_batch: rows per pass and GPU; 0 takes the largest number that fits, up to 16.
        rank: LoRA's r.
        target_modules: all-linear, or module names separated by commas.
        precision: bf16 or fp16 autocast, or fp32.
        dtype: dtype of the base, auto (the checkpoint's), float32, bfloat16 or float16.
        quantization: none, 8bit, 4bit, or any to compare them.
        gradient_checkpointing: yes, no, or any to compare both.
        strategy: single, ddp, fsdp2, zero3, or any to compare them.
        k: support of the top-k entropy (Stage II).
        rows: rows of the training; 0 takes the paper's 100,000 (sft) or 20,000 (calibrate).
        epochs: passes over the rows.
        mean_length: mean tokens of a row, for the time estimate; 0 takes seq.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run model code from the hub.
    """

    model: str
    stage: str = "calibrate"
    gpus: int = 1
    gpu_memory: str = "a100-80"
    seq: int = 4096
    batch: int = 128
    micro_batch: int = 0
    rank: int = 16
    target_modules: str = "all-linear"
    precision: str = "bf16"
    dtype: str = "auto"
    quantization: str = "any"
    gradient_checkpointing: str = "any"
    strategy: str = "any"
    k: int = 100
    rows: int = 0
    epochs: float = 1.0
    mean_length: float = 0
    revision: str = ""
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse settings that cannot work whatever the model.

        Raises:
            ConfigError: naming the setting, what was found and what is allowed.
        """
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, found {getattr(self, name)}")
        for name, known in CHOICES.items():
            found = getattr(self, name)
            if found not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, found {found!r}{nearest(found, known)}")
        if self.epochs <= 0:
            raise ConfigError(f"epochs must be a positive number, found {self.epochs}")
        if self.mean_length > self.seq:
            raise ConfigError(f"mean_length {self.mean_length:g} is more than seq {self.seq}")
        if self.strategy not in ("any", "single") and self.gpus < 2:
            raise ConfigError(f"strategy {self.strategy} spreads over GPUs, and there is one: raise gpus")
        if self.batch % (self.gpus * max(1, self.micro_batch)):
            sizes = f"micro_batch {self.micro_batch} × {self.gpus} GPUs" if self.micro_batch else f"{self.gpus} GPUs"
            raise ConfigError(f"batch {self.batch} is not a multiple of {sizes}; change one of them")

    def launched_with(self, strategy: str) -> str:
        """The precision to train with; ZeRO-3 runs without autocast."""
        return "fp32" if strategy == "zero3" and self.precision == "bf16" else self.precision


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
    from loragate.analysis.plan_model import base_dtype, read_config

    request.check()
    gpu = find_gpu(request.gpu_memory)
    if request.precision == "bf16" and not gpu.bf16:
        raise ConfigError(f"{gpu.name} has no bf16: plan with precision fp16 and dtype float16, or fp32")
    config = config or read_config(request.model, revision=request.revision, trust=request.trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{request.model} is a quantised checkpoint; plan with its unquantised base and --quantization 8bit or 4bit"
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and request.seq > positions:
        raise ConfigError(f"the model has {positions} positions, fewer than seq {request.seq}; lower seq")
    if not list(_ways(request)):
        words = _objections(request, request.strategy, request.quantization)
        raise ConfigError("this combination cannot work: " + "; ".join(words))
    planner = _Planner(request, config, gpu, base_dtype(config, request.dtype))
    options = planner.options(request)
    chosen = _best(options)
    changes = [] if chosen else list(planner.changes(request, options))
    dtype = str(planner.dtype).removeprefix("torch.")
    return Plan(request, gpu, dtype, planner.parameters, options, chosen, changes)


def _objections(request: Request, strategy: str, quantization: str) -> list[str]:
    """The trainer's own sentences on a combination."""
    launch = Launch(strategy, 1 if strategy == "single" else request.gpus)
    precision = request.launched_with(strategy)
    return impossible(
        Combination(request.stage, launch=launch, device="cuda", quantization=quantization, precision=precision)
    )


def _ways(request: Request) -> Iterator[tuple[str, str, bool]]:
    """(strategy, quantization, checkpointing) of all that was asked for and can work."""
    for strategy in STRATEGIES if request.gpus > 1 else ("single",):
        for quantization in QUANTIZATIONS:
            for checkpointing in (False, True):
                if (
                    request.strategy in ("any", strategy)
                    and request.quantization in ("any", quantization)
                    and request.gradient_checkpointing in ("any", "yes" if checkpointing else "no")
                    and not _objections(request, strategy, quantization)
                ):
                    yield strategy, quantization, checkpointing


def _best(options: list[Option]) -> Option | None:
    """Full weights before quantised ones, then the faster, then the simpler."""
    fitting = [option for option in options if option.fits]
    return min(fitting, key=lambda option: (option.quantization != "none", round(option.seconds, 1)), default=None)


class _Planner:
    """The model's counts, and traces as they are asked for."""

    def __init__(self, request: Request, config: Any, gpu: Gpu, dtype: torch.dtype) -> None:
        from loragate.analysis.plan_model import build_on_meta, count_parameters
        from loragate.analysis.plan_trace import Tracer

        self.config, self.gpu, self.dtype = config, gpu, dtype
        model = build_on_meta(config, request.stage, request.rank, request.target_modules, dtype)
        self.parameters = count_parameters(model, config)
        self.tracer = Tracer(config)

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
        from loragate.analysis.plan_trace import Workload

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
        step, seconds = self.time(request, strategy, quantization, checkpointing, gpus, size)
        fits = gib <= self.gpu.memory
        return Option(strategy, quantization, checkpointing, gpus, size, parts, gib, step, seconds, fits)

    def time(
        self, request: Request, strategy: str, quantization: str, checkpointing: bool, gpus: int, size: int
    ) -> tuple[float, float]:
        """Seconds of a step and of the training: FLOPs over the assumed throughput, against the link, which works beside."""
        counts, length = self.parameters, request.mean_length or request.seq
        flops = counts.cost(int(length), k=request.k).per_token(request.stage, checkpointing) * size * length
        peak = self.gpu.half if request.precision != "fp32" or self.dtype.itemsize == 2 else self.gpu.single
        compute = flops / (peak * 1e12 * UTILISATION * STRATEGIES[strategy] * QUANTIZATIONS[quantization])
        # bytes over the link: the base for the forward and again for the backward, gradients once a step
        crossing = 2 * (gpus - 1) / gpus / (self.gpu.link * 1e9)
        moved = crossing * counts.base * self.dtype.itemsize if strategy in ("fsdp2", "zero3") else 0.0
        passes = max(1, request.batch // (size * gpus))
        step = passes * max(compute, moved) + crossing * FP32 * counts.trained(request.stage)
        rows = request.rows or PAPER_ROWS[request.stage]
        return step, math.ceil(math.ceil(rows / request.batch) * request.epochs) * step

    def changes(self, request: Request, options: list[Option]) -> Iterator[str]:
        """Changes of the request that would each make it fit, smallest first."""
        smallest = min(options, key=lambda option: option.gib)
        relaxed = replace(request, strategy="any", quantization="any", gradient_checkpointing="any", micro_batch=0)
        if option := _best(self.options(relaxed)):
            yield f"allow {option}"
        fixed = replace(
            request,
            strategy=smallest.strategy,
            quantization=smallest.quantization,
            gradient_checkpointing="yes" if smallest.checkpointing else "no",
            micro_batch=smallest.micro_batch,
        )
        for eighths in (6, 4, 3, 2, 1):
            length = request.seq * eighths // 8 // 64 * 64
            if length and (option := _best(self.options(replace(fixed, seq=length, mean_length=0)))):
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
