"""Settings that a command line offers as they are: what a diagnosis reads, and what a plan is asked, with the GPUs it knows.

Light: `--help` reads this file, so that nothing here may load a model's libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge

from loragate.errors import ConfigError, nearest
from loragate.training.strategy import Launch, impossible
from loragate.training.strategy import Plan as Combination
from loragate.validate import Count, Positive, Size, check


@dataclass(frozen=True)
class DiagnoseSettings:
    """What a diagnosis reads and tries; in brackets those that read a setting.

    Attributes:
        rows: (entropy, alignment) prompts and responses to read, in the formats of calibrate's --data.
        max_rows: (entropy, alignment) first rows, or answers, to read; 256 for entropy, 48 for alignment.
        max_length: (entropy, alignment, tokens) longest row, or answer, in tokens; `tokens` takes at most 512.
        run: (gates, alignment, tokens) folder of `loragate eval` whose stored answers are read: all tasks, or those of --tasks.
        of: (gates, alignment) model whose answers are read; by default gated for gates,
            adapter for alignment.
        answers: (gates, alignment) answers to read per question.
        suppress: (entropy) signs of ΔH at which the delta is switched off: negative and/or positive.
        interventions: (interventions) overrides of λ, separated by commas: noreverse, noextrapolate, unit, off,
            constant=0.5, clip=-1:2; the first four if empty.
        value: (alignment) source of the task value.
        reference: (alignment) with --value reference: base, adapter, or a model with the same vocabulary.
        positions: (alignment) with --value rollouts: positions per answer.
        actions: (alignment) with --value rollouts: likeliest tokens tried at each position.
        rollouts: (alignment) with --value rollouts: completions of each token tried, by the plain adapter.
        k: (alignment) support of the entropy objective, 0 for the whole vocabulary; by default the one that the gates were trained
            with.
        checkpoints: (alignment) run folder of a calibration, whose checkpoints are measured too.
    """

    rows: str = ""
    max_rows: Annotated[int, Ge(2)] | None = None  # intervals are over rows
    max_length: Count = 4096
    run: str = ""
    of: Literal["gated", "adapter", "base"] | None = None
    answers: Count = 4
    suppress: str = "negative,positive"
    interventions: str = ""
    value: Literal["reference", "reward", "rollouts"] = "reference"
    reference: str = "base"
    positions: Count = 4
    actions: Count = 8
    rollouts: Count = 4
    k: int | None = None
    checkpoints: str = ""


@dataclass(frozen=True)
class Request:
    """What is to be trained on what.

    Attributes:
        model: hub id (owner/name[@revision]), model folder or config.json; only the configuration is read, no weights.
        stage: Stage I or Stage II.
        gpus: GPUs, counted over all machines.
        gpu_memory: memory of one GPU in GiB, or its name (h100, a100-80, a100-40, l40s, 4090, ...).
        seq: tokens of the longest rows; memory is planned for passes full of such rows.
        batch: rows per optimiser step over all GPUs.
        micro_batch: rows per pass and GPU; 0 takes the largest number that fits, up to 16.
        rank: LoRA's r.
        target_modules: all-linear, or module names separated by commas.
        precision: autocast in 16 bits, or fp32.
        dtype: dtype of the base; auto is the checkpoint's.
        quantization: of the base; any compares all.
        gradient_checkpointing: any compares both.
        strategy: how the work is spread over GPUs; any compares all.
        k: support of the top-k entropy (Stage II).
        rows: rows of the training; 0 takes the paper's 100,000 (sft) or 20,000 (calibrate).
        num_train_epochs: passes over the rows.
        trust_remote_code: run model code from the hub.
    """

    model: str
    stage: Literal["sft", "calibrate"] = "calibrate"
    gpus: Count = 1
    gpu_memory: str = "a100-80"
    seq: Count = 4096
    batch: Count = 128
    micro_batch: Size = 0
    rank: Count = 16
    target_modules: str = "all-linear"
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["any", "none", "8bit", "4bit"] = "any"
    gradient_checkpointing: Literal["any", "yes", "no"] = "any"
    strategy: Literal["any", "single", "ddp", "fsdp2", "zero3"] = "any"
    k: Size = 100
    rows: Size = 0
    num_train_epochs: Positive = 1.0
    trust_remote_code: bool = False

    def check(self) -> None:
        """Refuse settings that cannot work whatever the model; the ConfigError says what is allowed."""
        check(self)
        if self.strategy not in ("any", "single") and self.gpus < 2:
            raise ConfigError(f"strategy {self.strategy} spreads over GPUs, and there is one: raise gpus")
        if self.batch % (self.gpus * max(1, self.micro_batch)):
            sizes = f"micro_batch {self.micro_batch} × {self.gpus} GPUs" if self.micro_batch else f"{self.gpus} GPUs"
            raise ConfigError(f"batch {self.batch} is not a multiple of {sizes}; change one of them")
        gpu = find_gpu(self.gpu_memory)
        if self.precision == "bf16" and not gpu.bf16:
            raise ConfigError(f"{gpu.name} has no bf16: plan with precision fp16 and dtype float16, or fp32")

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes the activations of each decoder layer."""
        return self.gradient_checkpointing == "yes"

    def launched_with(self, strategy: str) -> str:
        """The precision to train with; ZeRO-3 runs without autocast."""
        return "fp32" if strategy == "zero3" and self.precision == "bf16" else self.precision

    def objections(self, strategy: str, quantization: str) -> list[str]:
        """The trainer's own sentences on a combination that cannot work."""
        launch = Launch(strategy, 1 if strategy == "single" else self.gpus)
        precision = self.launched_with(strategy)
        return impossible(Combination(launch=launch, device="cuda", quantization=quantization, precision=precision))


@dataclass(frozen=True)
class Gpu:
    """One GPU; throughput and link are the vendor's figures, dense and without sparsity.

    Attributes:
        name: as given on the command line.
        memory: GiB that a process can use; the driver takes the rest of the nominal size.
        half, single: TFLOP/s of bf16 matrix products (fp16 where there is no bf16), and of fp32 outside tensor cores.
        link: GB/s to and from the other GPUs of the machine, one direction.
        bf16: whether matrix products run in bf16 (else fp16 only).
    """

    name: str
    memory: float
    half: float
    single: float
    link: float
    bf16: bool = True


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178, 2250, 80, 900),
        Gpu("h200", 139, 989, 67, 450),
        Gpu("h100", 79, 989, 67, 450),
        Gpu("h100-pcie", 79, 756, 51, 64),
        Gpu("mi300x", 191, 1307, 163, 448),
        Gpu("a100-80", 79, 312, 19.5, 300),
        Gpu("a100-40", 39, 312, 19.5, 300),
        Gpu("l40s", 44, 362, 92, 32),
        Gpu("a6000", 47, 155, 39, 56),
        Gpu("a10", 22, 125, 31, 32),
        Gpu("l4", 22, 121, 30, 32),
        Gpu("5090", 31, 210, 105, 64),
        Gpu("4090", 23, 165, 83, 32),
        Gpu("3090", 23, 71, 36, 32),
        Gpu("v100-32", 31, 125, 15.7, 150, bf16=False),
        Gpu("t4", 14.5, 65, 8, 16, bf16=False),
    )
}


def find_gpu(text: str) -> Gpu:
    """A GPU by name, or by its memory in GiB (an A100 otherwise); a ConfigError names the known ones."""
    key = text.strip().lower().replace(" ", "-").removeprefix("nvidia-").removesuffix("gb")
    if key in GPUS:
        return GPUS[key]
    for name, gpu in GPUS.items():  # "a100" is the first of its kind, "h100-80" has one size
        if name.startswith(f"{key}-") or key.startswith(f"{name}-"):
            return gpu
    try:
        memory = float(key.removesuffix("gib").rstrip("-"))
    except ValueError:
        memory = 0.0
    if not 0 < memory < 1e5:
        known = ", ".join(GPUS)
        raise ConfigError(
            f"--gpu-memory must be a number of GiB such as 24, or one of {known}; found {text!r}{nearest(key, GPUS)}"
        )
    return replace(GPUS["a100-80"], name=f"{memory:g} GiB", memory=memory)
