"""Checkpoints of the on-policy loop: what is trained, AdamW's moments, the answers in use. Safetensors and JSON only.

File names are the trainer's own, so that an unfinished run is found in the same way; `trainer_state.json` is written
last and marks a checkpoint as complete. There is no random state: what is sampled follows from seed, refresh and gates.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from loragate.errors import TrainingError
from loragate.files import write_atomically, write_json
from loragate.training.rollouts import Answer
from loragate.training.run_folder import checkpoints
from loragate.training.trainer import TRAINED

STATE, OPTIMIZER, ANSWERS = "trainer_state.json", "optimizer.safetensors", "answers.safetensors"


@dataclass
class LoopState:
    """Where a run stands between two steps.

    Attributes:
        step, total: optimiser steps taken, and in all.
        answers: the answers in use (those of the current refresh).
        before: log-probabilities at sampling time of each answer's tokens; empty where they are not needed.
        history, sampled: log records, counts of what was sampled.
        guard, waiting: guard readings, and answers that wait for the next one.
    """

    step: int = 0
    total: int = 0
    answers: list[Answer] = field(default_factory=list)
    before: list[torch.Tensor] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    sampled: dict[str, float] = field(default_factory=dict)
    guard: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[Answer] = field(default_factory=list)


def save_checkpoint(
    folder: Path, state: LoopState, trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, keep: int
) -> None:
    """Write `folder`/checkpoint-<step> and remove all but the newest `keep`; 0 keeps all."""
    target = folder / f"checkpoint-{state.step}"
    weights = {name: parameter.detach().cpu().contiguous() for name, parameter in trained.items()}
    moments = {
        f"{name}.{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for name, parameter in trained.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    before = {str(index): values.cpu().contiguous() for index, values in enumerate(state.before)}
    write_atomically(target / TRAINED, lambda path: save_file(weights, str(path)))
    write_atomically(target / OPTIMIZER, lambda path: save_file(moments, str(path)))
    write_atomically(target / ANSWERS, lambda path: save_file(before, str(path)))
    write_json(
        target / STATE,
        {
            "global_step": state.step,
            "max_steps": state.total,
            "answers": [asdict(answer) for answer in state.answers],
            "history": state.history,
            "sampled": state.sampled,
            "guard": state.guard,
            "waiting": [asdict(answer) for answer in state.waiting],
        },
    )
    for path in checkpoints(folder)[: -keep if keep else 0]:
        shutil.rmtree(path)


def load_checkpoint(
    folder: Path, trained: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> LoopState:
    """Put a checkpoint's weights and moments in place and return the loop's state.

    Raises:
        TrainingError: if a file is missing, damaged or belongs to another run.
    """
    try:
        record = json.loads((folder / STATE).read_text(encoding="utf-8"))
        weights, moments = load_file(str(folder / TRAINED)), load_file(str(folder / OPTIMIZER))
        before = load_file(str(folder / ANSWERS))
        answers, waiting = (
            [Answer(**{**item, "token_ids": tuple(item["token_ids"])}) for item in record[key]]
            for key in ("answers", "waiting")
        )
    except Exception as error:  # safetensors has its own error types
        raise TrainingError(
            f"{folder} cannot be read ({error}); the checkpoint is incomplete, remove its folder and resume again"
        ) from error
    if set(weights) != set(trained):
        raise TrainingError(
            f"{folder / TRAINED} holds other parameters than this run trains; it belongs to another run"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(weights[name])
            stored = {
                key: moments[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{key}" in moments
            }
            if stored:
                optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in stored.items()
                }
    return LoopState(
        step=record["global_step"],
        total=record["max_steps"],
        answers=answers,
        before=[before[str(index)] for index in range(len(before))],
        history=record["history"],
        sampled=record["sampled"],
        guard=record["guard"],
        waiting=waiting,
    )
