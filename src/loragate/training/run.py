"""A training by settings and into a run folder, as both stages make it: arguments, record, log, checkpoints, a stop by signal.

The run folder holds `run.json` (what is being trained on what), `metrics.jsonl` (every log record) and checkpoints. A
resumed run must be the same run: `run.json` is compared before anything is continued.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PrinterCallback
from trl import SFTConfig

from loragate.errors import ConfigError
from loragate.losses.objectives import Objective
from loragate.losses.objectives.base import check_objective
from loragate.models.output_difference import write_tokenizer
from loragate.training.callbacks import JsonlLog, OnStep, StepReporter, StopOnSignal
from loragate.training.checkpoints import METRICS_FILE, TrainingFolder, template_hints
from loragate.training.settings import GATE_OBJECTIVES, OBJECTIVES, TrainSettings
from loragate.training.trainer import StatisticsTrainer

logger = logging.getLogger("loragate")


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


def run_in_folder(
    trainer: StatisticsTrainer, folder: TrainingFolder, identity: Mapping[str, Any], on_step: OnStep | None
) -> TrainingOutcome:
    """Train, with the record (`identity`, which a resumed run must share), the log and the checkpoints of a run folder.

    A TrainingError for a resume that does not fit and for a loss that is not finite; `StoppedError` after Ctrl-C or SIGTERM.
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
    """Refuse (ConfigError) an objective of one's own that would train or be recorded as something else.

    Run records hold its name and constants, so that another one is refused on resume; a changed rule under the same name and
    constants cannot be seen. `settings` are those of the stage, or the arguments of a `GateTrainer`.
    """
    check_objective(objective)
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
    }
    for sentence, holds in wrong.items():
        if holds:
            raise ConfigError(sentence)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """The tokenizer into an adapter's folder, as AutoTokenizer reads it; a warning where that reads other ids."""
    if otherwise := write_tokenizer(tokenizer, folder):
        _warn(f"{otherwise}; give the base's tokenizer wherever the adapter is used")


@cache  # checkpoints have the same tokenizer
def _warn(message: str) -> None:
    logger.warning(message)
