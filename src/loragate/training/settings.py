"""Settings of a training: of its rows, its processes and the two stages. Fields are configuration keys of the commands."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from annotated_types import Ge, Len, Lt

from loragate.effects import require_effect
from loragate.errors import ConfigError
from loragate.validate import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, check_fields

FineTuningObjective = Literal[
    "sft", "dft", "profit", "eaft", "talr", "mask", "eksft", "forgetting", "entropy", "interleaved"
]
GateObjective = Literal["entropy", "ce"]
Schedule = Literal["cosine", "linear", "constant", "constant_with_warmup"]
Precision = Literal["fp32", "bf16", "fp16"]
Decay = Annotated[float, Ge(0), Lt(1)]  # of one of AdamW's moments
OBJECTIVES: tuple[str, ...] = get_args(FineTuningObjective)
GATE_OBJECTIVES: tuple[str, ...] = get_args(GateObjective)

# the paper's batch, its 157 steps rounded, and the smallest batch that is taken in order to have them
DEFAULT_BATCH_SIZE, TARGET_STEPS, MIN_BATCH_SIZE = 128, 150, 8
MAX_MICRO_BATCH_SIZE = 8

# they change no number, so that a resumed run may have others
_UNRECORDED = ("save_steps", "save_total_limit")


@dataclass(frozen=True)
class RowsSettings:
    """Which rows a training takes, and how they are prepared.

    Attributes:
        data: prompts and responses: .jsonl, .json, .csv, .parquet or a hub id; any chat format.
        split: split of a hub data set.
        revision: branch, tag or commit of a hub data set.
        select: which rows max_rows takes: the first ones, or a subset drawn with a seed.
        select_seed: seed of the shuffled subset; by default seed.
    """

    data: str = ""
    split: str = ""
    revision: str = ""
    select: Literal["first", "shuffled"] = "first"
    select_seed: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class LaunchSettings:
    """On how many processes a training runs.

    Attributes:
        strategy: on several processes; auto follows the launcher, and is one process without a launcher.
        processes: processes on this machine; 0 takes one, or one per GPU if a strategy is given.
    """

    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    processes: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class TrainSettings:
    """What both stages share; the subclasses set the paper's values.

    Attributes:
        learning_rate: peak learning rate of AdamW.
        batch_size: sequences per optimiser step; 0: 128, or fewer for about 150 steps.
        per_device_train_batch_size: sequences per forward pass and process; 0: 8, or fewer where batch_size or memory ask for it.
        num_train_epochs: passes over the rows; 0: one, or more for about 150 steps.
        max_steps: optimiser steps, 0 to follow from epochs.
        max_length: token limit of a row; longer rows are cut on the right.
        lr_scheduler_type: how the learning rate falls.
        warmup_ratio: share of the steps spent warming up.
        weight_decay: AdamW's decoupled weight decay.
        adam_beta1: AdamW's first-moment decay.
        adam_beta2: AdamW's second-moment decay.
        max_grad_norm: gradients are clipped to this norm.
        seed: seed of the data order and of the initialisation.
        logging_steps: number of steps between two log lines.
        save_steps: number of steps between two checkpoints (0: only on Ctrl-C or SIGTERM).
        save_total_limit: number of newest checkpoints to keep (0: all, to inspect the training afterwards).
        packing: join the rows of a forward pass end to end instead of padding them; each step keeps its rows.
        group_by_length: sort the rows of a step by length before they are cut into forward passes; less padding.
        gradient_checkpointing: recompute activations in the backward pass.
        precision: of autocast (fp16 on CUDA only); trained parameters stay fp32.
        report_to: transformers logging integrations, comma separated (tensorboard, wandb, trackio); "none" for JSONL only.
    """

    MAX_EPOCHS: ClassVar[int] = 1

    learning_rate: PositiveFloat = 5e-4
    batch_size: NonNegativeInt = 0
    per_device_train_batch_size: NonNegativeInt = 0
    num_train_epochs: NonNegativeFloat = 0.0
    max_steps: NonNegativeInt = 0
    max_length: PositiveInt = 2048
    lr_scheduler_type: Schedule = "cosine"
    warmup_ratio: Annotated[float, Ge(0), Lt(1)] = 0.0
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.95
    max_grad_norm: PositiveFloat = 1.0
    seed: Seed = 42
    logging_steps: PositiveInt = 10
    save_steps: NonNegativeInt = 50
    save_total_limit: NonNegativeInt = 2
    packing: bool = False
    group_by_length: bool = False
    gradient_checkpointing: bool = False
    precision: Precision = "fp32"
    report_to: str = "none"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup_ratio:  # 0 may be said with any schedule
            require_effect("training", self)

    def as_record(self) -> dict[str, Any]:
        """The settings that numbers depend on: what run.json and the artifact hold, and what a resumed run must share."""
        return {name: value for name, value in asdict(self).items() if name not in _UNRECORDED}

    def accumulation(self, processes: int) -> int:
        """Forward passes per optimiser step on each process; a ConfigError where the batch cannot be split evenly."""
        per_device = self._micro_batch_size(processes)
        per_pass = per_device * processes
        if self.batch_size % per_pass:
            raise ConfigError(
                f"batch_size {self.batch_size} is not a multiple of per_device_train_batch_size "
                f"{per_device} × {processes} process{'es' if processes > 1 else ''}; change one of them"
            )
        return self.batch_size // per_pass

    def _micro_batch_size(self, processes: int) -> int:
        """Sequences per forward pass and process: unless asked for, the most up to `MAX_MICRO_BATCH_SIZE` that fit."""
        fitting = (size for size in range(MAX_MICRO_BATCH_SIZE, 1, -1) if self.batch_size % (size * processes) == 0)
        return self.per_device_train_batch_size or next(fitting, 1)

    def fitted(self, rows: int, processes: int = 1) -> Self:
        """The settings with the batch sizes and the epochs that `rows` rows are given where they were left out (0).

        Few steps hardly move anything. Smaller batches come first, down to `MIN_BATCH_SIZE` rows; then epochs, up to MAX_EPOCHS.
        """
        batch, num_train_epochs = self.batch_size, self.num_train_epochs or 1.0
        if not self.batch_size:
            asked = self.per_device_train_batch_size * processes
            per_pass = asked or MAX_MICRO_BATCH_SIZE
            batch = max(DEFAULT_BATCH_SIZE // per_pass, 1) * per_pass  # the nearest below 128 that can be dealt out
            if not self.max_steps:  # else their number does not follow from the rows
                # the largest batch, of this one halved again and again, that gives enough steps
                half = batch
                while half >= MIN_BATCH_SIZE and math.ceil(rows / batch) * num_train_epochs < TARGET_STEPS:
                    batch, half = half, half // 2 // per_pass * per_pass
                if not self.num_train_epochs:
                    num_train_epochs = float(min(self.MAX_EPOCHS, math.ceil(TARGET_STEPS / math.ceil(rows / batch))))
            batch = -(-batch // processes) * processes  # several processes take the steps of one
        fitted = replace(self, batch_size=batch, num_train_epochs=num_train_epochs)
        return replace(fitted, per_device_train_batch_size=fitted._micro_batch_size(processes))

    def steps(self, rows: int) -> int:
        """Optimiser steps over `rows` rows with `fitted` settings; the last batch of an epoch may be smaller."""
        return self.max_steps or max(1, math.ceil(math.ceil(rows / self.batch_size) * self.num_train_epochs))


@dataclass(frozen=True)
class FineTuningSettings(TrainSettings):
    """Stage I, training a LoRA or DoRA adapter (the paper's values; cutoff, betas and decay are ours).

    Attributes:
        warmup_ratio: share of the steps spent warming up; 0.1, or 0 for a continued adapter or a constant schedule.
        objective: of the tokens; entropy and interleaved are controls.
        objective_options: constants of the objective, e.g. {"threshold": 0.1}.
        adapter: finished adapter to train further, folder or hub id; the folder itself stays as it is.
        rank: LoRA's r.
        alpha: LoRA's α.
        dropout: LoRA's dropout.
        target_modules: all-linear, or module names separated by commas.
        dora: train a DoRA adapter (which cannot be gated).
        rslora: scale by α/√r instead of α/r.
    """

    MAX_EPOCHS: ClassVar[int] = 3  # rows seen more often are learned by heart

    warmup_ratio: Annotated[float, Ge(0), Lt(1)] | None = None  # type: ignore[assignment]
    weight_decay: NonNegativeFloat = 0.01
    objective: FineTuningObjective = "sft"
    objective_options: dict[str, Any] | None = None
    adapter: str = ""
    rank: PositiveInt = 16
    alpha: PositiveFloat = 16
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    target_modules: Annotated[str, Len(1)] = "all-linear"
    dora: bool = False
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.warmup_ratio is None:
            without = bool(self.adapter) or self.lr_scheduler_type == "constant"
            object.__setattr__(self, "warmup_ratio", 0.0 if without else 0.1)
        if not isinstance(self.target_modules, str):  # PEFT and GateConfig take lists
            object.__setattr__(self, "target_modules", ",".join(self.target_modules))
        super().__post_init__()


@dataclass(frozen=True)
class GateTrainingSettings(TrainSettings):
    """Stage II, training the gates (the paper's values; betas, decay and clipping are ours).

    Attributes:
        k: support of the entropy objective; 0, or at least the vocabulary size, means the full entropy.
        max_rows: at most this many rows after a seeded shuffle (0: all).
        objective: entropy is the paper's and ce its ablation.
    """

    MAX_EPOCHS: ClassVar[int] = 10

    max_length: PositiveInt = 4096
    k: NonNegativeInt = 100
    max_rows: NonNegativeInt = 20_000
    objective: GateObjective = "entropy"
    save_steps: NonNegativeInt = 25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k == 1:
            raise ConfigError("k must be at least 2, or 0 for the whole vocabulary, found 1")
