"""One training run: rows in their order, trainer, callbacks, resume. Both stages go through here.

The run folder holds `run.json` (what is being trained on what), `metrics.jsonl` (every log record) and checkpoints. A
resumed run must be the same run: `run.json` is compared before anything is continued.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PrinterCallback, ProgressCallback

from loragate.errors import ConfigError, TrainingError
from loragate.gates.eligibility import quantization_of
from loragate.losses.causal_head import causal_model
from loragate.losses.objectives import Objective
from loragate.records import read_value
from loragate.training.arrangement import PackedCollator, require_separate_sequences
from loragate.training.callbacks import (
    FiniteGradientCheck,
    FirstGradientCheck,
    JsonlLog,
    PauseAfter,
    SkippedStepCheck,
    StepReporter,
    StopOnInterrupt,
)
from loragate.training.compatibility import Plan, refuse_impossible
from loragate.training.last_layer import read_positions_only
from loragate.training.model_state import restore_state, short_row_attention, statistics_forward
from loragate.training.rows import collator_for
from loragate.training.run_folder import LOG, STATE, alone_in, explain_full_disk, explain_lost_process, prepare_folder
from loragate.training.settings import GATE_OBJECTIVES, OBJECTIVES, GateTrainingSettings, TrainSettings
from loragate.training.sharding import partitioned, target_device
from loragate.training.strategy import launch_of
from loragate.training.trainer import (
    Job,
    ReferenceOf,
    StatisticsTrainer,
    TrainingOutcome,
    as_dataset,
    trainer_arguments,
)

logger = logging.getLogger("loragate")


def run_training(job: Job, objective: Objective, reference: ReferenceOf | None = None) -> TrainingOutcome:
    """Train on the given rows.

    Args:
        job: what every run needs.
        objective: what trains it.
        reference: for an objective with a KL to one.

    Raises:
        TrainingError: non-finite loss, a resume that does not fit, or a stop by Ctrl-C (after writing a checkpoint).
    """
    with ExitStack() as stack:
        stack.enter_context(alone_in(job.folder))
        model, trained = stack.enter_context(partitioned(job.model, job.trained))
        # the trainer wants a folder for files of its own, even where the job keeps nothing
        folder = job.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loragate-")))
        return _run(replace(job, model=model, trained=trained), folder, objective, reference)


def usual_callbacks(job: Job, total: int, begins: bool) -> tuple[StopOnInterrupt, list[Any]]:
    """The callbacks of a run of `total` steps, on given or sampled rows; the first one is also given by itself.

    Args:
        begins: the run does not go on from a checkpoint.
    """
    stopper = StopOnInterrupt()
    callbacks: list[Any] = [stopper]
    if job.folder is not None:
        callbacks.append(JsonlLog(job.folder / LOG))
    if job.on_step is not None:
        callbacks.append(StepReporter(job.on_step))
    if job.until is not None and job.until < total:
        callbacks.append(PauseAfter(job.until))
    # DeepSpeed takes the gradients for itself and steps before they could be looked at
    seen = launch_of().strategy != "zero3"
    if begins and seen and job.adapter_name is not None:
        callbacks.append(FirstGradientCheck(job.trained))
    if job.settings.precision == "fp16":
        callbacks.append(SkippedStepCheck())
    elif seen:
        callbacks.append(FiniteGradientCheck(job.trained))
    return stopper, callbacks


def _run(job: Job, folder: Path, objective: Objective, reference: ReferenceOf | None) -> TrainingOutcome:
    """As `run_training`, with the model that the trainer is given and a folder for its files."""
    if isinstance(causal_model(job.model).get_output_embeddings(), BaseTunerLayer):
        raise TrainingError(
            "the adapter has a LoRA delta on the output head, which the trainer cannot run: it multiplies by the head's own "
            "weight. Leave the head out of the adapter's target_modules"
        )
    launch, device = launch_of(), target_device(job.model)
    plan = Plan.of_settings(
        job.settings,
        launch,
        device.type,
        quantization=quantization_of(causal_model(job.model)),
        reference=reference is not None,
    )
    refuse_impossible(plan)
    # the arguments start the process group, so everything that asks for ranks comes after them
    arguments = trainer_arguments(job.settings, folder, len(job.encoded), device.type)
    checkpoint = prepare_folder(job.identity, job.folder, job.resume)
    past: Any = {} if checkpoint is None else read_value(checkpoint / STATE, "the run cannot be resumed")
    records = past.get("log_history", ())
    # the trainer would take a step more before it looks whether it is to stop
    last = job.until or arguments.max_steps
    ended = past.get("global_step", 0) >= last
    # packed rows are as long as a pass, and their mask is of another kind
    longest = sys.maxsize if job.settings.packing else int(job.encoded.arrays["lengths"].max())
    # a reference must be computed as the trained model is, so that its KL to itself is 0
    plain_bf16 = job.settings.precision == "bf16" and reference is None
    stopper, callbacks = usual_callbacks(job, arguments.max_steps, checkpoint is None)
    with (
        restore_state(job.model, job.settings.gradient_checkpointing),
        short_row_attention(job.model, job.settings.per_device_train_batch_size, longest, plain_bf16),
        statistics_forward(job.model) as fused,
        read_positions_only(job.model, causal_model(job.model)) as last_layer,
    ):
        if not fused:
            logger.warning("the output head is not one frozen linear map: statistics use full logits (slower)")
        if last_layer.reason is not None:
            logger.info("the last layer runs on every position: %s", last_layer.reason)
        trainer = StatisticsTrainer(
            job,
            objective,
            reference,
            last_layer,
            args=arguments,
            train_dataset=as_dataset(job.encoded, job.settings, arguments.world_size),
            data_collator=PackedCollator() if job.settings.packing else collator_for(job.tokenizer),
            callbacks=callbacks,
        )
        for printer in (PrinterCallback, ProgressCallback):  # progress and metrics are shown by our own callbacks
            trainer.remove_callback(printer)
        # a resumed run's result begins at the run's beginning
        trainer.history = [{name: value for name, value in record.items() if name != "epoch"} for record in records]
        if checkpoint is not None and ended:
            trainer._load_from_checkpoint(str(checkpoint))
            return TrainingOutcome(trainer.history, past["global_step"], 0.0, fused)
        if job.settings.packing:
            require_separate_sequences(job.model, next(job.model.parameters()).device)
        try:
            with explain_lost_process(launch, job.folder), explain_full_disk(job.folder):
                output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            stopper.restore()
    stopper.refuse_unfinished(trainer.state.global_step, trainer.state.max_steps, job.folder)
    seconds = float(output.metrics.get("train_runtime", 0.0))
    return TrainingOutcome(trainer.history, trainer.state.global_step, seconds, fused)


def require_own(objective: Objective, settings: TrainSettings) -> None:
    """Refuse an objective of one's own that would train or be recorded as something else.

    Run records hold its name and constants, so that another one is refused on resume; a changed rule under the same name and
    constants cannot be seen.

    Raises:
        ConfigError: naming the objective and the setting.
    """
    name, chosen = objective.name, settings.objective  # type: ignore[attr-defined]
    wrong = {
        f"{name!r} is the name of a built-in objective: choose that one by settings.objective, or give yours another name": (
            name in (*OBJECTIVES, *GATE_OBJECTIVES)
        ),
        f"the objective {name!r} is given, and settings.objective is {chosen!r}; leave one of them out": (
            chosen != type(settings)().objective  # type: ignore[attr-defined]
        ),
        f"objective_options are constants of a named objective; leave them out, {name!r} has its own": bool(
            getattr(settings, "objective_options", None)
        ),
        f"objective {name!r} requires 'reference_kl', and Stage II has no reference model": (
            "reference_kl" in objective.requires and isinstance(settings, GateTrainingSettings)
        ),
        f"objective {name!r} requires 'sequence_ids', which only packed rows have: set packing=True, or take each row of the "
        "statistics as a sequence where they are None": "sequence_ids" in objective.requires and not settings.packing,
    }
    for sentence, holds in wrong.items():
        if holds:
            raise ConfigError(sentence)
