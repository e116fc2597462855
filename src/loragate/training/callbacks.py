"""What happens around the training loop: the JSONL log, progress reports, checks of the gradient, stopping when asked to.

All through the transformers callback contract; nothing here computes a loss.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from loragate.errors import DivergenceError, StoppedError, TrainingError
from loragate.files import describe_os_error, write_text
from loragate.signals import STOP_SIGNALS
from loragate.training.settings import GATE_OBJECTIVES


@dataclass(frozen=True)
class StepReport:
    """Progress of a run after one optimiser step; `values` is empty between log lines."""

    step: int
    total: int
    seconds: float
    values: dict[str, Any]


OnStep = Callable[[StepReport], Any]
"""Called after every optimiser step; what it returns is not looked at."""


class JsonlLog(TrainerCallback):
    """Appends every log record to a JSONL file; when a run resumes, records of repeated steps are dropped first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if state.global_step > 0 and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the torn last line of a killed run
                if record.get("step", 0) <= state.global_step:
                    kept.append(line)
        # at once: a kill here must not cost the log of the steps before
        write_text(self.path, "".join(line + "\n" for line in kept))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        record = {"step": state.global_step, "time": round(time.time(), 3), **logs}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, default=float) + "\n")
        except OSError as error:
            raise TrainingError(describe_os_error(self.path, error)) from error


class StepReporter(TrainerCallback):
    """Calls `on_step` after every optimiser step of the main process."""

    def __init__(self, on_step: OnStep) -> None:
        self.on_step = on_step
        self.began = 0.0
        self.values: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # a step that is logged is reported twice: by `on_step_end`, and here with its values
        self.values = dict(logs or {})
        self._report(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.values = {}
        self._report(state)

    def _report(self, state: Any) -> None:
        if state.is_world_process_zero:
            self.on_step(StepReport(state.global_step, state.max_steps, time.monotonic() - self.began, self.values))


class GradientCheck(TrainerCallback):
    """Refuses a gradient that is not finite before it is applied: after it, every weight that trains would be NaN.

    Also refuses a training whose gradients are exactly zero everywhere from its beginning on, as nothing would ever move: at the
    first step of the objectives of gates, which act on every token; at step `MOST_ZERO_STEPS`, or the last, of others, which may
    begin at zero or wait for tokens of a kind. What is not finite is left to `SkippedStepCheck` under loss scaling (fp16).
    """

    MOST_ZERO_STEPS = 10

    def __init__(self, parameters: dict[str, nn.Parameter], objective: str, *, uses_loss_scaling: bool) -> None:
        self.parameters, self.objective, self.uses_loss_scaling = parameters, objective, uses_loss_scaling
        self.moved = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.moved = state.global_step > 0  # what goes on from a checkpoint has moved

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        found: list[torch.Tensor] = []
        for parameter in self.parameters.values():
            gradient: Any = parameter.grad
            if gradient is not None and hasattr(gradient, "to_local"):
                gradient = gradient.to_local()  # FSDP2: each process looks at its own shard
            if gradient is not None and gradient.numel():
                largest = torch.linalg.vector_norm(gradient, math.inf).float()
                found.append(largest.to(found[0].device if found else largest.device))
        # the device is waited for once, not for each of hundreds of gates; NaN is the largest
        largest_of_all = float(torch.stack(found).max()) if found else 0.0
        self.moved = self.moved or not found or largest_of_all != 0  # a process may hold no shard
        step, allowed = state.global_step + 1, 1 if self.objective in GATE_OBJECTIVES else self.MOST_ZERO_STEPS
        if not self.moved and step >= min(allowed, state.max_steps):
            raise TrainingError(
                f"the gradient of all that trains is exactly zero up to step {step}, so training would change nothing. See "
                f"whether the objective {self.objective!r} gives any token of these rows a weight. Of gates: check that the "
                "adapter acts at all; with an upper bound of 1 a gate with a positive logit has no slope, so start it below zero, "
                "or widen the range"
            )
        if not self.uses_loss_scaling and not math.isfinite(largest_of_all):
            raise DivergenceError(
                f"the gradient is not finite at step {state.global_step + 1}, though the loss is. Nothing was updated in this "
                "step. Lower the learning rate or train in fp32; if the objective is your own, look for a slope that is infinite "
                "somewhere (a root or logarithm at 0)"
            )


class SkippedStepCheck(TrainerCallback):
    """Ends an fp16 run whose steps are all skipped: loss scaling drops a gradient that is not finite without a word.

    A few skipped steps at the start are the scale finding its size: from 2^16 it is halved at each. After
    `MAX_CONSECUTIVE_SKIPS` in a row it is below 1, and the gradient itself is at fault.
    """

    MAX_CONSECUTIVE_SKIPS = 25

    def __init__(self) -> None:
        self.skipped = 0

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.skipped = self.skipped + 1 if getattr(optimizer, "step_was_skipped", False) else 0
        if self.skipped == self.MAX_CONSECUTIVE_SKIPS:
            raise DivergenceError(
                f"the gradient was not finite in the last {self.skipped} steps, up to step {state.global_step}, and fp16's loss "
                "scaling skipped them all. Train in bf16 or fp32"
            )
        # an optimiser has no state before its first step; asked before the last checkpoint is written
        if self.skipped and state.global_step >= state.max_steps and not optimizer.state:
            raise DivergenceError(
                f"fp16's loss scaling skipped all {state.global_step} steps because their gradients were not finite, so nothing "
                "was trained. Train in bf16 or fp32, or for more steps than the scale needs to find its size (about 16)"
            )


class StopOnSignal(TrainerCallback):
    """First Ctrl-C or SIGTERM: finish the step, write a checkpoint and stop. Second: stop at once."""

    def __init__(self) -> None:
        self.stop_requested = False
        self.asked_by = STOP_SIGNALS[signal.SIGINT]
        self.previous: dict[signal.Signals, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not self.previous:
            self.previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}

    def _handle(self, number: int, frame: Any) -> None:
        name = STOP_SIGNALS[signal.Signals(number)]
        if self.stop_requested:
            raise KeyboardInterrupt(name)
        self.stop_requested, self.asked_by = True, name

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:
            # processes get the signal at different moments, and must stop after the same step
            flag = torch.tensor(int(self.stop_requested), device=args.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            self.stop_requested = bool(flag)
        if self.stop_requested:
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore()

    def raise_if_stopped_early(self, step: int, total: int, folder: Path | None) -> None:
        """Raises StoppedError for a run that was asked to stop before its last step, with the way to go on."""
        if self.stop_requested and step < total:
            again = (
                "nothing was kept"
                if folder is None
                else f"run the same command with --resume (resume=True) to go on from {folder}"
            )
            raise StoppedError(f"stopped by {self.asked_by} at step {step} of {total}; {again}")

    def restore(self) -> None:
        """Give the signals back to their former handlers."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self.previous.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self.previous = {}
