"""A training by settings and into a run folder, as both stages make it: arguments, record, log, checkpoints, a stop by signal.

The run folder holds `run.json` (what is being trained on what), `metrics.jsonl` (every log record) and checkpoints. A
resumed run must be the same run: `run.json` is compared before anything is continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from transformers import PrinterCallback
from trl import SFTConfig

from loragate.errors import ConfigError
from loragate.losses.objectives import Objective
from loragate.training.callbacks import JsonlLog, OnStep, StepReporter, StopOnSignal
from loragate.training.checkpoints import METRICS_FILE, TrainingFolder, template_hints
from loragate.training.model_state import checkpointing_argument
from loragate.training.settings import GATE_OBJECTIVES, OBJECTIVES, FineTuningSettings, TrainSettings
from loragate.training.strategy import detect_launch, process_state
from loragate.training.trainer import StatisticsTrainer


@dataclass(frozen=True)
class TrainingOutcome:
    """What a run leaves behind.

    Attributes:
        history: log records from the run's beginning, each with its step.
        steps: optimiser steps.
        seconds: wall time of the training loop, since the last resume.
        fused_head: whether the fused head served (False: full logits).
    """

    history: list[dict[str, Any]]
    steps: int
    seconds: float
    fused_head: bool


def build_trainer_arguments(
    kind: type[SFTConfig], settings: TrainSettings, folder: TrainingFolder, rows: int, device: str, **more: Any
) -> Any:
    """The arguments of a run by its `fitted` settings; every choice of ours is set explicitly."""
    steps = settings.steps(rows)
    if detect_launch().strategy == "fsdp2":
        process_state()  # before Accelerate reads the launcher's wish: the sharding is loragate's
    arguments = kind(
        output_dir=str(folder.path),
        per_device_train_batch_size=settings.per_device_train_batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        warmup_steps=round(settings.warmup_ratio * steps),
        max_steps=steps,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.max_grad_norm,
        optim="adamw_torch",
        seed=settings.seed,
        data_seed=settings.seed,
        packing=settings.packing,
        train_sampling_strategy="group_by_length" if settings.group_by_length else "sequential",
        **checkpointing_argument(SFTConfig, settings.gradient_checkpointing),
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        tf32=None,
        use_cpu=device == "cpu",
        dataloader_pin_memory=device != "cpu",
        logging_strategy="steps",
        logging_steps=settings.logging_steps,
        logging_first_step=True,
        save_strategy="steps" if settings.save_steps and folder.is_persistent else "no",
        save_steps=settings.save_steps or 500,
        save_total_limit=settings.save_total_limit or None,
        report_to=[name.strip() for name in settings.report_to.split(",") if name.strip()] or "none",
        disable_tqdm=True,
        **more,
    )
    arguments.gradient_accumulation_steps = settings.accumulation(arguments.world_size)
    return arguments


# arguments of SFTConfig that a training of gates would pass over: why, and which values beside the default agree with it
IGNORED_SFT_ARGUMENTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "chat_template_path": ("rows get the tokenizer's own template: set processing_class.chat_template", ()),
    "eos_token": ("rows end in the tokenizer's own: set processing_class.eos_token", ()),
    "loss_type": ("the loss is that of the argument objective, 'entropy' or 'ce', or of an objective of your own", ()),
    "completion_only_loss": ("gates train on responses alone", (True,)),
    "truncation_mode": ("a row longer than max_length is cut on the right", ()),
    "label_smoothing_factor": ("no objective smooths labels; give one of your own that does", ()),
    "packing_strategy": ("packing lays the rows of a forward pass end to end, and cuts none", ()),
    "eval_packing": ("rows are packed for the training alone", (False,)),
    "router_aux_loss_coef": ("the loss is that of the response tokens, without a router's", (0,)),
}


def reject_ignored_arguments(arguments: SFTConfig) -> None:
    """Raises ConfigError for an argument of `IGNORED_SFT_ARGUMENTS` that was set to something the training would not do."""
    defaults = {field.name: field.default for field in fields(SFTConfig)}  # an older TRL may lack one
    for name, (reason, agreeing) in IGNORED_SFT_ARGUMENTS.items():
        found = getattr(arguments, name, defaults.get(name))
        if found not in (defaults.get(name), *agreeing):
            raise ConfigError(f"{name}={found!r} would have no effect: {reason}. Leave it out")


def run_in_folder(
    trainer: StatisticsTrainer, folder: TrainingFolder, identity: Mapping[str, Any], on_step: OnStep | None
) -> TrainingOutcome:
    """Train, with the record (`identity`, which a resumed run must share), the log and the checkpoints of a run folder.

    Raises:
        TrainingError: non-finite loss, a resume that does not fit, or a stop by Ctrl-C or SIGTERM (after writing a checkpoint).
    """
    checkpoint = folder.begin(identity, template_hints(trainer.processing_class))
    kept = folder.path if folder.is_persistent else None
    stopper = StopOnSignal()
    trainer.remove_callback(PrinterCallback)  # progress is the caller's, and metrics go to the log
    trainer.add_callback(stopper)
    if kept is not None:
        trainer.add_callback(JsonlLog(kept / METRICS_FILE))
    if on_step is not None:
        trainer.add_callback(StepReporter(on_step))
    try:
        output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        stopper.restore()
    stopper.raise_if_stopped_early(trainer.state.global_step, trainer.state.max_steps, kept)
    seconds = float(output.metrics.get("train_runtime", 0.0))
    return TrainingOutcome(trainer.history, trainer.state.global_step, seconds, trainer.fused)


def check_custom_objective(objective: Objective, settings: TrainSettings | SFTConfig) -> None:
    """Refuse an objective of one's own that would train or be recorded as something else.

    Run records hold its name and constants, so that another one is refused on resume; a changed rule under the same name and
    constants cannot be seen.

    Args:
        settings: of the stage, or the arguments of a `GateTrainer`.

    Raises:
        ConfigError: naming the objective and the setting.
    """
    name, chosen = objective.name, settings.objective  # type: ignore[union-attr]
    wrong = {
        f"{name!r} is the name of a built-in objective: choose that one by the setting objective, or give yours another name": (
            name in (*OBJECTIVES, *GATE_OBJECTIVES)
        ),
        f"the objective {name!r} is given, and the setting objective is {chosen!r}; leave one of them out": (
            chosen != type(settings).objective  # type: ignore[union-attr]
        ),
        f"objective_options are constants of a named objective; leave them out, {name!r} has its own": bool(
            getattr(settings, "objective_options", None)
        ),
        f"objective {name!r} requires 'reference_kl', and Stage II has no reference model": (
            "reference_kl" in objective.requires and not isinstance(settings, FineTuningSettings)
        ),
        f"objective {name!r} requires 'sequence_ids', which only packed rows have: set packing=True, or take each row of the "
        "statistics as a sequence where they are None": "sequence_ids" in objective.requires and not settings.packing,
    }
    for sentence, holds in wrong.items():
        if holds:
            raise ConfigError(sentence)
