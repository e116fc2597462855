"""Settings of the two training stages: frozen dataclasses whose fields are the configuration keys of the commands."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loragate.errors import ConfigError, nearest

OBJECTIVES = ("sft", "dft", "profit", "eaft", "talr", "mask")
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class TrainSettings:
    """What both stages share; the subclasses set the paper's values.

    Attributes:
        learning_rate: peak learning rate of AdamW.
        batch_size: sequences per optimiser step over all processes and accumulation steps.
        micro_batch_size: sequences per forward pass and process.
        epochs: passes over the rows; ignored when max_steps is set.
        max_steps: optimiser steps, 0 to follow from epochs.
        max_length: token limit of a row; longer rows are cut on the right.
        schedule: cosine, linear, constant or constant_with_warmup.
        warmup: share of the steps spent warming up.
        weight_decay: AdamW's decoupled weight decay.
        beta1: AdamW's first-moment decay.
        beta2: AdamW's second-moment decay.
        max_grad_norm: gradients are clipped to this norm.
        seed: data order, and the initialisation of what is trained.
        logging_steps: log every so many steps.
        save_steps: write a checkpoint every so many steps (0: only on Ctrl-C).
        gradient_checkpointing: recompute activations in the backward pass.
        precision: "fp32", or "bf16" for bf16 autocast (gates stay fp32).
        report_to: transformers logging integrations, comma separated (tensorboard, wandb, trackio); "none" for JSONL only.
    """

    learning_rate: float = 5e-4
    batch_size: int = 128
    micro_batch_size: int = 8
    epochs: float = 1.0
    max_steps: int = 0
    max_length: int = 2048
    schedule: str = "cosine"
    warmup: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 42
    logging_steps: int = 10
    save_steps: int = 0
    gradient_checkpointing: bool = False
    precision: str = "fp32"
    report_to: str = "none"

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch_size", "logging_steps", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("max_steps", "save_steps", "weight_decay", "warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, found {getattr(self, name)}")
        for name in ("learning_rate", "epochs", "max_grad_norm"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} must be a positive number, found {value}")
        if self.warmup >= 1:
            raise ConfigError(f"warmup is a share of the steps in [0, 1), found {self.warmup}")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, found {self.schedule!r}")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}, found {self.precision!r}")

    def accumulation(self, processes: int) -> int:
        """Forward passes per optimiser step on each process.

        Raises:
            ConfigError: if the batch cannot be split evenly.
        """
        per_pass = self.micro_batch_size * processes
        if self.batch_size % per_pass:
            raise ConfigError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size} × "
                f"{processes} process{'es' if processes > 1 else ''}; change one of them"
            )
        return self.batch_size // per_pass

    def steps(self, rows: int) -> int:
        """Optimiser steps over `rows` rows; the last batch of an epoch may be smaller."""
        return self.max_steps or max(1, math.ceil(math.ceil(rows / self.batch_size) * self.epochs))


@dataclass(frozen=True)
class StageOneSettings(TrainSettings):
    """Stage I, training a LoRA or DoRA adapter (the paper's values; cutoff, betas and decay are ours).

    Attributes:
        objective: sft, dft, profit, eaft, talr or mask.
        objective_options: constants of the objective, e.g. {"threshold": 0.1}.
        rank: LoRA's r.
        alpha: LoRA's α.
        dropout: LoRA's dropout.
        target_modules: "all-linear", or module names separated by commas.
        dora: train a DoRA adapter (which cannot be gated).
        rslora: scale by α/√r instead of α/r.
    """

    warmup: float = 0.1
    weight_decay: float = 0.01
    objective: str = "sft"
    objective_options: dict[str, float] | None = None
    rank: int = 16
    alpha: float = 16
    dropout: float = 0.0
    target_modules: str = "all-linear"
    dora: bool = False
    rslora: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"objective must be one of {', '.join(OBJECTIVES)}, found {self.objective!r}"
                + nearest(self.objective, OBJECTIVES)
            )
        if self.rank < 1:
            raise ConfigError(f"rank must be at least 1, found {self.rank}")


@dataclass(frozen=True)
class CalibrationSettings(TrainSettings):
    """Stage II, training the gates by top-k entropy (the paper's values; betas, decay and clipping are ours).

    Attributes:
        k: support of the entropy objective; at least the vocabulary size means the full entropy.
        max_rows: use at most this many rows after a seeded shuffle (0: all).
    """

    max_length: int = 4096
    k: int = 100
    max_rows: int = 20_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 2:
            raise ConfigError(f"k must be at least 2, found {self.k}")
        if self.max_rows < 0:
            raise ConfigError(f"max_rows must not be negative, found {self.max_rows}")
