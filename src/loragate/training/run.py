"""One training run: rows in their order, trainer, callbacks, resume. Both stages go through here.

The run folder holds `run.json` (what is being trained on what), `metrics.jsonl` (every log record) and checkpoints. A
resumed run must be the same run: `run.json` is compared before anything is continued.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PrinterCallback, ProgressCallback

from loragate.data import Collator, EncodedRows, Rows
from loragate.errors import ConfigError, DataError, TrainingError
from loragate.gates.quantised import quantization_of
from loragate.losses.head import IGNORED
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
from loragate.training.guards import READING
from loragate.training.last_layer import read_positions_only
from loragate.training.model_state import as_found, short_row_attention, statistics_forward
from loragate.training.run_folder import LOG, STATE, explain_full_disk, explain_lost_process, prepare_folder
from loragate.training.settings import GATE_OBJECTIVES, OBJECTIVES, CalibrationSettings, TrainSettings
from loragate.training.sharding import causal_model, partitioned, target_device
from loragate.training.strategy import launch_of
from loragate.training.trainer import StatisticsTrainer, TrainingJob, TrainingOutcome, as_dataset, trainer_arguments

logger = logging.getLogger("loragate")


def run_training(job: TrainingJob) -> TrainingOutcome:
    """Train; see `TrainingJob`.

    Raises:
        TrainingError: non-finite loss, a resume that does not fit, or a stop by Ctrl-C (after writing a checkpoint).
    """
    with partitioned(job.model, job.trained) as (model, trained):
        job = replace(job, model=model, trained=trained)
        if job.folder is not None:
            return _run(job, job.folder)
        with tempfile.TemporaryDirectory(prefix="loragate-") as name:
            return _run(job, Path(name))


def _run(job: TrainingJob, folder: Path) -> TrainingOutcome:
    """Train with `folder` for the trainer's own files, a temporary one where the job keeps nothing."""
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
        reference=job.reference is not None,
    )
    refuse_impossible(plan)
    # the arguments start the process group, so everything that asks for ranks comes after them
    arguments = trainer_arguments(job.settings, folder, len(job.encoded), device.type)
    checkpoint = prepare_folder(job.identity, job.folder, job.resume)
    past: Any = {} if checkpoint is None else read_value(Path(checkpoint) / STATE, "the run cannot be resumed")
    records = past.get("log_history", ())
    # the trainer would take a step more before it looks whether it is to stop
    last = job.until or arguments.max_steps
    ended = past.get("global_step", 0) >= last
    # packed rows are as long as a pass, and their mask is of another kind
    longest = sys.maxsize if job.settings.packing else int(job.encoded.arrays["lengths"].max())
    # a reference must be computed as the trained model is, so that its KL to itself is 0
    plain_bf16 = job.settings.precision == "bf16" and job.reference is None
    stopper = StopOnInterrupt()
    callbacks: list[Any] = [stopper]
    if job.guard is not None:
        job.guard.restore(records)
        ended = ended or job.guard.guard.verdict is not None
        callbacks.append(job.guard)
    if job.folder is not None:
        callbacks.append(JsonlLog(job.folder / LOG))
    if job.on_step is not None:
        callbacks.append(StepReporter(job.on_step))
    if last < arguments.max_steps:
        callbacks.append(PauseAfter(last))
    # DeepSpeed takes the gradients for itself and steps before they could be looked at
    if job.check_gradient and checkpoint is None and launch.strategy != "zero3":
        callbacks.append(FirstGradientCheck(job.trained))
    if job.settings.precision == "fp16":
        callbacks.append(SkippedStepCheck())
    elif launch.strategy != "zero3":
        callbacks.append(FiniteGradientCheck(job.trained))
    with (
        as_found(job.model, job.settings.gradient_checkpointing),
        short_row_attention(job.model, job.settings.micro_batch_size, longest, plain_bf16),
        statistics_forward(job.model) as fused,
        read_positions_only(job.model, causal_model(job.model)) as last_layer,
    ):
        if not fused:
            logger.warning("the output head is not one frozen linear map: statistics use full logits (slower)")
        if last_layer.reason is not None:
            logger.info("the last layer runs on every position: %s", last_layer.reason)
        trainer = StatisticsTrainer(
            job,
            last_layer,
            args=arguments,
            train_dataset=as_dataset(job.encoded, job.settings, arguments.world_size),
            data_collator=PackedCollator() if job.settings.packing else collator_for(job.tokenizer),
            callbacks=callbacks,
        )
        for printer in (PrinterCallback, ProgressCallback):  # progress and metrics are shown by our own callbacks
            trainer.remove_callback(printer)
        trainer.history = [
            {name: value for name, value in record.items() if name != "epoch"}
            for record in records
            if READING not in record
        ]
        if checkpoint is not None and ended:
            trainer._load_from_checkpoint(checkpoint)
            return TrainingOutcome(trainer.history, past["global_step"], 0.0, fused)
        if job.settings.packing:
            require_separate_sequences(job.model, next(job.model.parameters()).device)
        try:
            with explain_lost_process(launch, job.folder), explain_full_disk(job.folder):
                output = trainer.train(resume_from_checkpoint=checkpoint)
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
            "reference_kl" in objective.requires and isinstance(settings, CalibrationSettings)
        ),
        f"objective {name!r} requires 'sequence_ids', which only packed rows have: set packing=True, or take each row of the "
        "statistics as a sequence where they are None": "sequence_ids" in objective.requires and not settings.packing,
    }
    for sentence, holds in wrong.items():
        if holds:
            raise ConfigError(sentence)


def require_mask_column(objective: Objective, encoded: EncodedRows, source: Rows) -> None:
    """Refuse rows without the column that the objective reads.

    Raises:
        ConfigError: naming the data and the ways to a keep_mask.
    """
    if "keep_mask" in objective.requires and "keep_mask" not in encoded[0]:
        raise ConfigError(
            f"objective {objective.name!r} needs a keep_mask, and {source.source} has no such column: a list of 0 and 1, one "
            "per response token. Make one with loragate mask --model BASE --reference MODEL --data IN --out OUT"
        )


def require_encoded(encoded: EncodedRows | None, rows: Rows) -> None:
    """Refuse tokenised rows that are not of `rows`; None is for the stage to tokenise.

    Raises:
        DataError: for more encoded rows than rows, or an index beyond them.
    """
    if encoded is None:
        return
    last = max(encoded.arrays["rows"], default=-1)
    if len(encoded) > len(rows) or last >= len(rows):
        raise DataError(
            f"encoded holds {len(encoded)} rows up to index {last}, and rows has {len(rows)} ({rows.source}): they do not "
            "belong together. Give the rows that were encoded, in their order"
        )


def require_short_enough(model: Any, encoded: EncodedRows, where: Callable[[int], str]) -> None:
    """Refuse rows that are longer than the model has positions, or that hold tokens which it does not have.

    Args:
        where: from a row's index to the words that name it.

    Raises:
        TrainingError: naming the longest row.
        DataError: naming the row with the largest token id.
    """
    positions = getattr(causal_model(model).config.get_text_config(), "max_position_embeddings", None)
    lengths, ids, places = (encoded.arrays[name] for name in ("lengths", "ids", "rows"))
    longest = int(lengths.argmax())
    if positions is not None and lengths[longest] > positions:
        raise TrainingError(
            f"{where(int(places[longest]))} has {lengths[longest]} tokens, but the model has {positions} positions; "
            f"set max_length to {positions} or less"
        )
    weight = getattr(causal_model(model).get_input_embeddings(), "weight", None)
    # ZeRO-3 leaves an empty tensor in the place of a weight that it has spread
    shape = tuple(getattr(weight, "ds_shape", getattr(weight, "shape", ())))
    embedded = int(shape[0]) if len(shape) == 2 else None
    largest = int(ids.argmax())
    if embedded is not None and ids[largest] >= embedded:
        at = int(places[lengths.cumsum().searchsorted(largest, side="right")])
        raise DataError(
            f"{where(at)} has the token id {ids[largest]}, but the base embeds {embedded} tokens: the tokenizer belongs to "
            "another base. Load the base's own, or give the base more embeddings (resize_token_embeddings)"
        )


def encoded_fingerprint(encoded: EncodedRows) -> str:
    """sha256 over token ids and labels in training order."""
    digest = hashlib.sha256()
    ids, learned = encoded.arrays["ids"].astype(np.int64), encoded.arrays["learned"]
    columns = [ids, np.where(learned, ids, IGNORED)]
    if "kept" in encoded.arrays:
        columns.append(encoded.arrays["kept"].astype(np.int64))
    ends = np.cumsum(encoded.arrays["lengths"])
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        for column in columns:
            digest.update(column[begin:end].tobytes())
    return digest.hexdigest()


def collator_for(tokenizer: Any) -> Collator:
    """Right-padding batches; a tokenizer without a pad token pads with EOS, which the attention mask hides."""
    pad = tokenizer.pad_token_id
    return Collator(int(pad if pad is not None else tokenizer.eos_token_id or 0))
