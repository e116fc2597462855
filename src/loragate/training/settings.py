"""Settings of the two training stages: frozen dataclasses whose fields are the configuration keys of the commands."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from loragate.errors import ConfigError, nearest

OBJECTIVES = ("sft", "dft", "profit", "eaft", "talr", "mask", "eksft", "forgetting", "entropy", "interleaved")
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup")
PRECISIONS = ("fp32", "bf16", "fp16")
GATE_OBJECTIVES = ("entropy", "ce", "anchored", "reward", "random")
TRAINED = ("entropy", "ce", "anchored", "reward")
ON_POLICY = ("anchored", "reward")
ANCHORS = ("base", "adapter", "mixture", "product")
ADVANTAGES = ("mean", "std")
# settings that only some gate objectives read; given to another they would have no effect, which is an error
_READ_BY = {
    "anchor": ("anchored", "reward"),
    "beta": ("anchored",),
    "refresh": ON_POLICY,
    "samples_per_prompt": ON_POLICY,
    "max_new_tokens": ON_POLICY,
    "temperature": ("anchored",),
    "sampling_batch_size": ON_POLICY,
    "reward_kl": ("reward",),
    "advantage": ("reward",),
    "clip_ratio": ("reward",),
    "random_scale": ("random",),
}


# they change no number, so that a resumed run may have others
_UNRECORDED = ("keep_checkpoints",)


def _joined(modules: Any) -> str:
    """Module names as the command line writes them; PEFT and GateConfig take lists."""
    if isinstance(modules, str):
        return modules
    if not isinstance(modules, (list, tuple)) or not modules or not all(isinstance(name, str) for name in modules):
        raise ConfigError(f"target_modules is 'all-linear' or names of modules, found {modules!r}")
    return ",".join(modules)


def recorded(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that no number depends on: what records hold, and what a resumed run must share."""
    return {name: value for name, value in values.items() if name not in _UNRECORDED}


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
        seed: seed of the data order and of the initialisation.
        logging_steps: number of steps between two log lines.
        save_steps: number of steps between two checkpoints (0: only on Ctrl-C).
        keep_checkpoints: number of newest checkpoints to keep (0: all, to inspect the training afterwards).
        packing: join the rows of a forward pass end to end instead of padding them; each step keeps its rows.
        group_by_length: sort the rows of a step by length before they are cut into forward passes; less padding.
        gradient_checkpointing: recompute activations in the backward pass.
        activation_offload: keep activations in host memory between the forward and the backward pass (GPU only).
        precision: "fp32", or "bf16" or "fp16" for autocast (fp16 on CUDA only; trained parameters stay fp32).
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
    keep_checkpoints: int = 2
    packing: bool = False
    group_by_length: bool = False
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    precision: str = "fp32"
    report_to: str = "none"

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be an integer, found {self.seed!r}")
        for name in ("batch_size", "micro_batch_size", "logging_steps", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name in ("max_steps", "save_steps", "keep_checkpoints", "weight_decay", "warmup"):
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
        warmup: share of the steps spent warming up; 0.1, or 0 where a finished adapter is continued.
        objective: sft, dft, profit, eaft, talr, mask, eksft or forgetting; entropy and interleaved are controls.
        objective_options: constants of the objective, e.g. {"threshold": 0.1}.
        adapter: finished adapter to train further, folder or hub id; it is not changed, and its rank, α and modules are
            kept.
        rank: LoRA's r.
        alpha: LoRA's α.
        dropout: LoRA's dropout.
        target_modules: "all-linear", or module names separated by commas (in Python also a list of names).
        dora: train a DoRA adapter (which cannot be gated).
        rslora: scale by α/√r instead of α/r.
    """

    warmup: float | None = None  # type: ignore[assignment]
    weight_decay: float = 0.01
    objective: str = "sft"
    objective_options: dict[str, Any] | None = None
    adapter: str = ""
    rank: int = 16
    alpha: float = 16
    dropout: float = 0.0
    target_modules: str = "all-linear"
    dora: bool = False
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.warmup is None:
            object.__setattr__(self, "warmup", 0.0 if self.adapter else 0.1)
        super().__post_init__()
        object.__setattr__(self, "target_modules", _joined(self.target_modules))
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"objective must be one of {', '.join(OBJECTIVES)}, found {self.objective!r}"
                + nearest(str(self.objective), OBJECTIVES)
            )
        if self.rank < 1:
            raise ConfigError(f"rank must be at least 1, found {self.rank}")


@dataclass(frozen=True)
class CalibrationSettings(TrainSettings):
    """Stage II, training the gates (the paper's values; betas, decay and clipping are ours).

    "entropy" is the paper's objective and "ce" its ablation; both read the given responses. "anchored" and "reward" are
    extensions of ours, not SCALE: they read the prompts only and train on answers sampled from the gated model itself.
    "random" trains nothing: it draws gates, a control.

    Attributes:
        k: support of the entropy objective; 0, or at least the vocabulary size, means the full entropy.
        max_rows: use at most this many rows after a seeded shuffle (0: all).
        objective: entropy (the paper's), ce (its ablation), random (untrained gates, a control), anchored or reward
            (extensions on sampled answers).
        anchor: what KL pulls towards: base (λ = 0), adapter (λ = 1), mixture (half of each) or product (geometric mean).
        beta: weight of KL(gated, anchor) in the objective anchored; 1 gives the cross-entropy to the anchor.
        refresh: number of steps between two samplings of answers (0: 20 for anchored, 1 for reward).
        samples_per_prompt: answers sampled per prompt to train on (0: 1 for anchored, 8 for reward).
        max_new_tokens: token limit of an answer sampled for training (anchored and reward); the probe has its own
            limit.
        temperature: sampling temperature of the training answers of anchored; reward always samples at 1, as its
            gradient requires.
        sampling_batch_size: sequences generated at a time, in training and for a probe.
        reward_kl: weight of KL(gated, anchor) per token in the objective reward; 0 leaves the anchor out.
        advantage: reward minus the group's mean (mean), or that divided by the group's deviation (std).
        clip_ratio: clipping of the probability ratio where answers serve several steps (refresh above 1).
        random_scale: standard deviation of the gate weights and biases that random draws.
    """

    max_length: int = 4096
    k: int = 100
    max_rows: int = 20_000
    objective: str = "entropy"
    anchor: str = "product"
    beta: float = 1.0
    refresh: int = 0
    samples_per_prompt: int = 0
    max_new_tokens: int = 1024
    temperature: float = 1.0
    sampling_batch_size: int = 64
    reward_kl: float = 0.0
    advantage: str = "mean"
    clip_ratio: float = 0.2
    random_scale: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 2 and self.k != 0:
            raise ConfigError(f"k must be at least 2, or 0 for the whole vocabulary, found {self.k}")
        for name in ("max_rows", "refresh", "samples_per_prompt", "beta", "reward_kl"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, found {getattr(self, name)}")
        for name in ("max_new_tokens", "sampling_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        for name, known in (("objective", GATE_OBJECTIVES), ("anchor", ANCHORS), ("advantage", ADVANTAGES)):
            found = getattr(self, name)
            if found not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, found {found!r}{nearest(str(found), known)}"
                )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"temperature must be a positive number, found {self.temperature}")
        if not (math.isfinite(self.random_scale) and self.random_scale > 0):
            raise ConfigError(f"random_scale must be a positive number, found {self.random_scale}")
        if not 0 < self.clip_ratio < 1:
            raise ConfigError(f"clip_ratio lies between 0 and 1, found {self.clip_ratio}")
        defaults = {field.name: field.default for field in fields(CalibrationSettings)}
        for name, readers in _READ_BY.items():
            # a probe is answered with sampling_batch_size, whatever the objective
            unread = self.objective not in readers and name != "sampling_batch_size"
            if unread and getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"{name} has no effect on the objective {self.objective!r}, only on {' and '.join(readers)}; "
                    f"leave it out, or set the objective"
                )
        if self.on_policy:
            self._check_on_policy()

    @property
    def on_policy(self) -> bool:
        """Whether the gates train on answers sampled from the gated model."""
        return self.objective in ON_POLICY

    @property
    def answers_per_prompt(self) -> int:
        """`samples_per_prompt` with the objective's default filled in."""
        return self.samples_per_prompt or (8 if self.objective == "reward" else 1)

    @property
    def steps_per_refresh(self) -> int:
        """`refresh` with the objective's default filled in."""
        return self.refresh or (1 if self.objective == "reward" else 20)

    def as_record(self) -> dict[str, Any]:
        """The settings that the objective reads, for run.json and the artifact."""
        return recorded({name: getattr(self, name) for name in self.read_by(self.objective)})

    @staticmethod
    def read_by(objective: str) -> tuple[str, ...]:
        """The settings that an objective reads."""
        # random gates are not trained: they read the rows and the seed, and no setting of an optimiser
        training = {field.name for field in fields(TrainSettings)} - {"seed", "max_length"}
        readers = {**dict.fromkeys(training, TRAINED), **_READ_BY}
        names = [field.name for field in fields(CalibrationSettings)]
        return tuple(name for name in names if objective in readers.get(name, GATE_OBJECTIVES))

    def _check_on_policy(self) -> None:
        if self.objective == "reward" and self.answers_per_prompt < 2:
            raise ConfigError(
                f"samples_per_prompt is {self.answers_per_prompt}; the objective 'reward' compares the answers of one "
                "prompt with each other and needs at least 2"
            )
        if self.batch_size % self.answers_per_prompt:
            raise ConfigError(
                f"batch_size {self.batch_size} is not a multiple of samples_per_prompt {self.answers_per_prompt}; "
                "the answers to one prompt belong into one step"
            )
        if self.report_to.strip() not in ("", "none"):
            raise ConfigError(
                f"report_to={self.report_to!r} works with the objectives entropy and ce; {self.objective!r} writes "
                "metrics.jsonl only"
            )
