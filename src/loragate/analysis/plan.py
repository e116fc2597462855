"""What a training will need and how to launch it: every strategy with its memory and time, and the one to take.

Puts the parts together: the model on the meta device (`plan_model.py`), the traced step (`plan_trace.py`), memory per GPU
(`plan_memory.py`) and time (`plan_time.py`). What cannot be combined is asked of the trainer's own rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from loragate.analysis.cost import StepCost
from loragate.analysis.plan_machines import Gpu, find_gpu
from loragate.analysis.plan_memory import QUANTIZATIONS, STRATEGIES, Memory, gpu_memory
from loragate.analysis.plan_model import STAGES, Parameters, base_dtype, build_on_meta, count_parameters, read_config
from loragate.analysis.plan_time import UTILISATION, Time, cost_of, estimate_time
from loragate.analysis.plan_trace import Traces, Workload, quiet
from loragate.errors import ConfigError, nearest
from loragate.training.compatibility import Plan as Combination
from loragate.training.compatibility import impossible
from loragate.training.strategy import Launch

PRECISIONS = ("fp32", "bf16", "fp16")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LARGEST_PASS = 16  # rows; more does not make a GPU faster at these lengths
PAPER_ROWS = {"sft": 100_000, "calibrate": 20_000}


@dataclass(frozen=True)
class Request:
    """What is to be trained on what.

    Attributes:
        model: hub id, model folder or config.json; only the configuration is read.
        stage: sft (Stage I) or calibrate (Stage II).
        gpus: GPUs, counted over all machines.
        gpu_memory: memory of one GPU in GiB, or its name (h100, a100-80, l40s, 4090, ...).
        seq: tokens of the longest rows; memory is planned for passes full of such rows.
        batch: rows per optimiser step over all GPUs.
        micro_batch: rows per pass and GPU (0: the most that fit, at most 16).
        rank: LoRA's r.
        target_modules: all-linear, or module names separated by commas.
        precision: bf16 or fp16 autocast, or fp32.
        dtype: dtype of the base: auto (the checkpoint's), float32, bfloat16 or float16.
        quantization: none, 8bit, 4bit, or any to compare them.
        gradient_checkpointing: yes, no, or any to compare both.
        strategy: single, ddp, fsdp2, zero3, or any to compare them.
        response_share: share of the tokens that are response tokens.
        padding: plan for rows of different lengths in one pass, which needs an attention mask.
        k: support of the top-k entropy (Stage II).
        rows: rows of the training (0: the paper's 100,000 for sft and 20,000 for calibrate).
        epochs: passes over the rows.
        mean_length: mean tokens of a row, for time (0: as long as seq).
        utilisation: share of the GPU's peak throughput that the time estimate assumes.
    """

    model: str = ""
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
    response_share: float = 0.75
    padding: bool = True
    k: int = 100
    rows: int = 0
    epochs: float = 1.0
    mean_length: float = 0
    utilisation: float = UTILISATION

    def __post_init__(self) -> None:
        for name in ("gpus", "seq", "batch", "rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("micro_batch", "rows", "mean_length"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, found {getattr(self, name)}")
        choices = (
            ("stage", STAGES),
            ("precision", PRECISIONS),
            ("dtype", DTYPES),
            ("quantization", ("any", *QUANTIZATIONS)),
            ("gradient_checkpointing", ("any", "yes", "no")),
            ("strategy", ("any", *STRATEGIES)),
        )
        for name, known in choices:
            found = getattr(self, name)
            if found not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, found {found!r}{nearest(found, known)}")
        for name in ("response_share", "utilisation"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} lies in (0, 1], found {getattr(self, name)}")
        if self.epochs <= 0:
            raise ConfigError(f"epochs must be a positive number, found {self.epochs}")
        if self.mean_length > self.seq:
            raise ConfigError(f"mean_length {self.mean_length:g} is more than seq {self.seq}")
        if self.strategy in ("ddp", "fsdp2", "zero3") and self.gpus < 2:
            raise ConfigError(f"strategy {self.strategy} spreads over GPUs, and there is one: raise gpus")


@dataclass(frozen=True)
class Option:
    """One way to run the training, with its memory per GPU and its time."""

    strategy: str
    quantization: str
    checkpointing: bool
    gpus: int
    micro_batch: int
    accumulation: int
    memory: Memory
    time: Time
    fits: bool

    def as_record(self) -> dict[str, Any]:
        """Plain data for JSON; memory in GiB, times in seconds."""
        record = asdict(self)
        del record["memory"]
        return {**record, "memory_gib": self.memory.as_gib()}


@dataclass(frozen=True)
class Plan:
    """All options of a request, and the one to take (None if none fits)."""

    request: Request
    gpu: Gpu
    dtype: str
    parameters: Parameters
    cost: StepCost
    options: list[Option]
    chosen: Option | None
    changes: list[str] = field(default_factory=list)


def make_plan(request: Request, *, revision: str = "", trust: bool = False, config: Any = None) -> Plan:
    """Plan a training; see `Request`.

    Args:
        config: the model's transformers configuration where it is at hand; `request.model` is then a name only.

    Raises:
        ConfigError: for settings that cannot work on any number of such GPUs.
        LoragateError: if the configuration cannot be read.
    """
    if not request.model:
        raise ConfigError("a plan needs a model: a hub id, a model folder or a config.json")
    with quiet():
        return _Planner(request, lambda: config or read_config(request.model, revision=revision, trust=trust)).plan()


class _Planner:
    """The state of one planning: the model's counts, and traces as they are asked for."""

    def __init__(self, request: Request, config: Callable[[], Any]) -> None:
        self.request = request
        self.gpu = find_gpu(request.gpu_memory)
        if request.precision == "bf16" and not self.gpu.bf16:
            raise ConfigError(f"{self.gpu.name} has no bf16: plan with precision fp16 and dtype float16, or fp32")
        self.config = config()  # perhaps from the hub, so after the request alone was looked at
        if getattr(self.config, "quantization_config", None) is not None:
            raise ConfigError(
                f"{request.model} is a quantised checkpoint; plan with its unquantised base and --quantization 8bit or 4bit"
            )
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and request.seq > positions:
            raise ConfigError(
                f"the model has {positions} positions, fewer than seq {request.seq}; set seq to {positions} or less"
            )
        self.dtype = base_dtype(self.config, request.dtype)
        self.traces: dict[tuple[bool, bool, bool], Traces] = {}

    @cached_property
    def parameters(self) -> Parameters:
        model = build_on_meta(
            self.config,
            stage=self.request.stage,
            rank=self.request.rank,
            targets=self.request.target_modules,
            dtype=self.dtype,
        )
        return count_parameters(model, self.config)

    def plan(self) -> Plan:
        request = self.request
        cost = cost_of(self.parameters, request.seq, request.response_share, request.k)
        possible = [
            (strategy, quantization, checkpointing)
            for strategy in STRATEGIES
            for quantization in QUANTIZATIONS
            for checkpointing in (False, True)
            if self.possible(strategy, quantization, self.gpus_of(strategy))
        ]
        asked = [self.option(*choice) for choice in possible if self.asked_for(*choice)]
        if not asked:
            raise ConfigError("this combination cannot work: " + "; ".join(self.refusals()))
        fitting = [option for option in asked if option.fits]
        chosen = min(fitting, key=_preference) if fitting else None
        changes = [] if chosen else self.what_to_change(asked, [self.option(*choice) for choice in possible])
        dtype = str(self.dtype).removeprefix("torch.")
        return Plan(request, self.gpu, dtype, self.parameters, cost, asked, chosen, changes)

    def refusals(self) -> list[str]:
        """Why nothing that was asked for can work at all."""
        request = self.request
        if request.batch % request.gpus:
            return [f"batch {request.batch} is not a multiple of {request.gpus} GPUs; change one of them"]
        return self.objections(request.strategy, request.quantization, self.gpus_of(request.strategy))

    def gpus_of(self, strategy: str) -> int:
        return 1 if strategy == "single" else self.request.gpus

    def objections(self, strategy: str, quantization: str, gpus: int) -> list[str]:
        """The trainer's own sentences on a combination; ZeRO-3 runs without autocast there."""
        launch = Launch(strategy, gpus)
        precision = "fp32" if strategy == "zero3" and self.request.precision == "bf16" else self.request.precision
        return impossible(
            Combination(
                stage=self.request.stage, launch=launch, device="cuda", quantization=quantization, precision=precision
            )
        )

    def possible(self, strategy: str, quantization: str, gpus: int) -> bool:
        if (strategy == "single") != (gpus == 1):
            return False
        return not self.objections(strategy, quantization, gpus) and self.request.batch % gpus == 0

    def asked_for(self, strategy: str, quantization: str, checkpointing: bool) -> bool:
        request = self.request
        return (
            request.strategy in ("any", strategy)
            and request.quantization in ("any", quantization)
            and request.gradient_checkpointing in ("any", "yes" if checkpointing else "no")
        )

    def option(self, strategy: str, quantization: str, checkpointing: bool) -> Option:
        """The option with the asked or the largest fitting micro-batch, or the smallest if none fits."""
        request, gpus = self.request, self.gpus_of(strategy)
        share = request.batch // gpus
        if request.micro_batch and share % request.micro_batch:
            raise ConfigError(
                f"batch {request.batch} is not a multiple of micro_batch {request.micro_batch} × {gpus} GPUs; change one of them"
            )
        sizes = [size for size in (16, 8, 4, 2, 1) if share % size == 0 and size <= LARGEST_PASS]
        made = None
        for size in [request.micro_batch] if request.micro_batch else sizes:
            made = self.option_of(strategy, quantization, checkpointing, gpus, size)
            if made.fits:
                break
        assert made is not None
        return made

    def option_of(self, strategy: str, quantization: str, checkpointing: bool, gpus: int, size: int) -> Option:
        request = self.request
        accumulation = max(1, request.batch // (gpus * size))
        memory = gpu_memory(
            self.parameters,
            self.traced(checkpointing, size, accumulation > 1).at(size),
            stage=request.stage,
            strategy=strategy,
            gpus=gpus,
            dtype=self.dtype,
            quantization=quantization,
            accumulating=accumulation > 1,
            tokens=size * request.seq,
        )
        time = estimate_time(
            self.parameters,
            cost_of(self.parameters, int(request.mean_length or request.seq), request.response_share, request.k),
            self.gpu,
            stage=request.stage,
            strategy=strategy,
            gpus=gpus,
            rows_per_pass=size,
            batch=request.batch,
            mean_length=request.mean_length or request.seq,
            rows=request.rows or PAPER_ROWS[request.stage],
            epochs=request.epochs,
            checkpointing=checkpointing,
            quantization=quantization,
            dtype=self.dtype,
            half=request.precision != "fp32" or self.dtype.itemsize == 2,
            utilisation=request.utilisation,
        )
        fits = memory.total <= self.gpu.memory * 2**30
        return Option(strategy, quantization, checkpointing, gpus, size, accumulation, memory, time, fits)

    def traced(self, checkpointing: bool, size: int, accumulating: bool) -> Traces:
        request = self.request
        padded = request.padding and size > 1
        key = (checkpointing, padded, accumulating)
        if key not in self.traces:
            workload = Workload(
                stage=request.stage,
                sequence=request.seq,
                response_share=request.response_share,
                rank=request.rank,
                targets=request.target_modules,
                k=request.k,
                dtype=self.dtype,
                autocast=request.precision if request.precision != "fp32" else "",
                checkpointing=checkpointing,
                padded=padded,
                accumulating=accumulating,
            )
            self.traces[key] = Traces(self.config, workload)
        return self.traces[key]

    def what_to_change(self, asked: list[Option], every: list[Option]) -> list[str]:
        """Ways to make it fit, smallest change first."""
        smallest = min(asked, key=lambda option: option.memory.total)
        found = []
        relaxed = [option for option in every if option.fits]
        if relaxed:
            found.append(f"allow {_named(min(relaxed, key=_preference))}")
        if self.request.micro_batch > 1:
            one = self.option_of(smallest.strategy, smallest.quantization, smallest.checkpointing, smallest.gpus, 1)
            if one.fits:
                found.append(f"micro_batch 1 ({_named(one)})")
        room = self.gpu.memory * 2**30
        moving = smallest.memory.activations + max(smallest.memory.head, smallest.memory.temporary)
        fixed = smallest.memory.total - 1.04 * moving
        if fixed < room and moving > 0:
            length = int((room - fixed) / (1.04 * moving) * self.request.seq) // 128 * 128
            if 256 <= length < self.request.seq:
                found.append(f"rows of at most {length} tokens (--seq {length}) with {_named(smallest)}")
        for gpus in (2**power for power in range(1, 11)):
            if gpus <= self.request.gpus or not self.possible("fsdp2", "none", gpus):
                continue
            if self.option_of("fsdp2", "none", True, gpus, 1).fits:
                found.append(f"{gpus} such GPUs with fsdp2 and gradient checkpointing, micro-batch 1")
                break
        found.append(f"GPUs of at least {smallest.memory.total / 2**30:.0f} GiB ({_named(smallest)})")
        return found


def _preference(option: Option) -> tuple[bool, float, int]:
    """Full weights before quantised ones, then the faster, then the simpler."""
    return option.quantization != "none", round(option.time.total, 1), STRATEGIES.index(option.strategy)


def _named(option: Option) -> str:
    words = [option.strategy]
    if option.quantization != "none":
        words.append(option.quantization)
    if option.checkpointing:
        words.append("gradient checkpointing")
    return " + ".join(words) + f", micro-batch {option.micro_batch}"
