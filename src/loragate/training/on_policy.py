"""Stage II on the gated model's own answers, as a plain loop: sample, score, step. Extensions of ours, not SCALE.

The trainer's data set is fixed before training and these objectives make theirs on the way, so they have a loop of their
own; AdamW, schedules, clipping, log records, progress and Ctrl-C are those of the trainer. One process: several would
have to share the sampling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerControl, TrainerState

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError, DivergenceError
from loragate.gates import record_gates
from loragate.generation import TransformersEngine
from loragate.training.callbacks import FirstGradientCheck, JsonlLog, StepReporter, StopOnInterrupt, not_finite
from loragate.training.checkpoint import LoopState, load_checkpoint, save_checkpoint
from loragate.training.guards import Guard, Reading, saturation
from loragate.training.model_state import as_found, start_recomputing
from loragate.training.on_policy_loss import Terms, losses
from loragate.training.reference import cosine_factor
from loragate.training.rollouts import (
    Answer,
    Reward,
    Sampler,
    as_training_row,
    draw_answers,
    rewarded,
    training_prompts,
)
from loragate.training.run import OnStep, TrainingOutcome, collator_for, prepare_folder
from loragate.training.scoring import ResponseScorer
from loragate.training.settings import CalibrationSettings
from loragate.training.sharding import causal_model
from loragate.training.strategy import launch_of

BEFORE_TRAINING = -1  # number of the refresh whose answers are the guard's start
SATURATION_ANSWERS = 64


@dataclass
class OnPolicyJob:
    """Everything one run needs; see `TrainingJob` for the shared fields.

    Attributes:
        sampler: None samples with transformers from the model in memory.
        reward: needed by the objective "reward".
        guard: watches the sampled answers; None watches nothing.
        sampled: filled by the run: answers, tokens and seconds of sampling.
    """

    model: Any
    tokenizer: Any
    encoded: EncodedRows
    rows: Rows
    settings: CalibrationSettings
    adapter_name: str
    trained: dict[str, nn.Parameter]
    identity: dict[str, Any]
    sampler: Sampler | None = None
    reward: Reward | None = None
    guard: Guard | None = None
    sampled: dict[str, float] = field(default_factory=dict)


def run_on_policy(
    job: OnPolicyJob, folder: Path | None, *, resume: bool = False, on_step: OnStep | None = None
) -> TrainingOutcome:
    """Train; see `OnPolicyJob` and `run_training`, whose files and errors are the same.

    Raises:
        ConfigError: under several processes, or without a reward where one is needed.
        TrainingError: non-finite loss or reward, a resume that does not fit, or a stop by Ctrl-C.
    """
    if launch_of().processes > 1:
        raise ConfigError(
            f"the objective {job.settings.objective!r} runs in one process; start it without a distributed launcher"
        )
    if job.settings.objective == "reward" and job.reward is None:
        raise ConfigError("the objective 'reward' needs a reward: a callable (row, text, finished) -> float")
    checkpoint = prepare_folder(job.identity, folder, resume) if folder is not None else None
    stopper = StopOnInterrupt()
    callbacks: list[Any] = [stopper]
    if folder is not None:
        callbacks.append(JsonlLog(folder / "metrics.jsonl"))
    if on_step is not None:
        callbacks.append(StepReporter(on_step))
    with ExitStack() as stack:
        stack.callback(stopper.restore)
        stack.enter_context(as_found(job.model, job.settings.gradient_checkpointing))
        if job.settings.gradient_checkpointing:
            job.model.enable_input_require_grads()
            start_recomputing(job.model)
        loop = _Loop(job, folder, callbacks)
        if checkpoint is not None:
            loop.restore(Path(checkpoint))
        outcome = loop.run()
    stopper.refuse_unfinished(outcome.steps, loop.total, folder)
    return outcome


def learning_rate_factor(schedule: str, step: int, warmup: int, total: int) -> float:
    """Learning-rate factor of optimiser step `step` (from 0), as transformers' schedulers have it."""
    if schedule == "cosine":
        return cosine_factor(step, warmup, total)
    if schedule != "constant" and step < warmup:
        return step / max(1, warmup)
    return max(0.0, (total - step) / max(1, total - warmup)) if schedule == "linear" else 1.0


class _Loop:
    def __init__(self, job: OnPolicyJob, folder: Path | None, callbacks: Sequence[Any]) -> None:
        self.job, self.folder, self.callbacks, self.settings = job, folder, callbacks, job.settings
        settings = job.settings
        self.device = next(job.model.parameters()).device
        self.collate = collator_for(job.tokenizer)
        self.scorer = ResponseScorer(job.model, job.adapter_name, settings.precision)
        self.loss = losses[settings.objective](settings)
        engine = TransformersEngine(job.model, job.tokenizer, batch_size=settings.sampling_batch_size)
        self.sampler = job.sampler or engine.generate
        positions = getattr(causal_model(job.model).config.get_text_config(), "max_position_embeddings", None)
        self.prompts = training_prompts(job.encoded, job.rows, job.tokenizer, settings.max_new_tokens, positions)
        self.optimizer = torch.optim.AdamW(
            list(job.trained.values()),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=1e-8,
            weight_decay=settings.weight_decay,
        )
        self.total = settings.steps(len(job.encoded))
        self.warmup = round(settings.warmup * self.total)
        self.state = LoopState(total=self.total)
        self.first_gradient: FirstGradientCheck | None = FirstGradientCheck(job.trained)
        self.sums: dict[str, float] = {}
        self.gate_summary: dict[str, float] = {}

    def restore(self, checkpoint: Path) -> None:
        self.state = load_checkpoint(checkpoint, self.job.trained, self.optimizer)
        self.first_gradient = None
        if self.job.guard is not None:
            self.job.guard.readings = [Reading(**record) for record in self.state.guard]
            self.job.guard.waiting = list(self.state.waiting)

    def run(self) -> TrainingOutcome:
        state, settings, began = self.state, self.settings, time.monotonic()
        first = state.step
        shown, control = TrainerState(global_step=state.step, max_steps=self.total), TrainerControl()
        self._tell("on_train_begin", shown, control)
        self.job.model.train()
        while state.step < self.total and not control.should_training_stop:
            if state.step % settings.steps_per_refresh == 0 and self._refresh() is not None:
                break
            logged = self._logged(state.step + 1)
            loss, norm, rate = self._step(logged)
            state.step += 1
            shown.global_step = state.step
            self._tell("on_step_end", shown, control)
            if logged:
                record = {"loss": loss, "grad_norm": norm, "learning_rate": rate, **self._log_values()}
                state.history.append({"step": state.step, **record})
                self._tell("on_log", shown, control, logs=record)
            due = settings.save_steps > 0 and state.step % settings.save_steps == 0
            if self.folder is not None and (due or control.should_save):
                self._save(self.folder)
                control.should_save = False
        seconds = time.monotonic() - began
        if state.step > first:
            # the last line of the log, as the trainer writes it: it tells a run that ended from one that was killed
            self._tell("on_log", shown, control, logs={"train_runtime": round(seconds, 4)})
        self._tell("on_train_end", shown, control)
        self.job.sampled.update(state.sampled)
        return TrainingOutcome(state.history, state.step, seconds, self.scorer.fused)

    def _tell(self, event: str, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(None, state, control, **more)

    def _logged(self, step: int) -> bool:
        return step == 1 or step % self.settings.logging_steps == 0

    def _save(self, folder: Path) -> None:
        guard = self.job.guard
        if guard is not None:
            self.state.guard, self.state.waiting = guard.as_records(), list(guard.waiting)  # type: ignore[arg-type]
        save_checkpoint(folder, self.state, self.job.trained, self.optimizer, self.settings.keep_checkpoints)

    # sampling

    def _refresh(self) -> str | None:
        """Sample the answers of the next steps; returns the guard's verdict."""
        state, settings, guard = self.state, self.settings, self.job.guard
        steps = min(settings.steps_per_refresh, self.total - state.step)
        needed = steps * settings.batch_size // settings.answers_per_prompt
        per_step = settings.batch_size // settings.answers_per_prompt
        if guard is not None and state.step == 0 and needed * settings.answers_per_prompt < guard.limits.answers:
            count = math.ceil(guard.limits.answers / settings.answers_per_prompt)
            self._watch(guard, self._draw(range(count), BEFORE_TRAINING))
        chosen = range(state.step * per_step, state.step * per_step + needed)
        state.answers = self._draw(chosen, state.step // settings.steps_per_refresh)
        if self.job.reward is not None:
            group = settings.answers_per_prompt
            state.answers = rewarded(
                state.answers, self.prompts, self.job.rows, self.job.reward, group, settings.advantage
            )
        if guard is not None and self._watch(guard, state.answers) is not None:
            return guard.verdict
        state.before = []
        if settings.objective == "reward" and steps > 1:
            state.before = self._log_probs(state.answers)
        return None

    def _draw(self, chosen: Sequence[int], refresh: int) -> list[Answer]:
        began = time.monotonic()
        indices = [index % len(self.prompts) for index in chosen]
        answers = draw_answers(self.prompts, indices, self.sampler, self.settings, refresh)
        sampled = self.state.sampled
        for name, value in (
            ("answers", len(answers)),
            ("tokens", sum(len(answer.token_ids) for answer in answers)),
            ("seconds", time.monotonic() - began),
        ):
            sampled[name] = sampled.get(name, 0) + value
        return answers

    def _watch(self, guard: Guard, answers: Sequence[Answer]) -> str | None:
        def saturated() -> float | None:
            few = list(answers[:SATURATION_ANSWERS])
            return saturation(self.job.model, [batch for batch, _ in self._batches(few)], self.job.adapter_name)

        return guard.observe(self.state.step, answers, saturated)

    @torch.no_grad()
    def _log_probs(self, answers: Sequence[Answer]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = [torch.empty(0)] * len(answers)
        for batch, indices in self._batches(answers):
            log_prob_T = self.scorer.statistics(self.scorer.states(batch), batch, self._k).log_prob
            parts = log_prob_T.split([len(answers[index].token_ids) for index in indices])
            for index, part in zip(indices, parts, strict=True):
                found[index] = part.clone()
        return found

    # one step

    def _step(self, logged: bool) -> tuple[float, float, float]:
        """One optimiser step; returns (loss, gradient norm, learning rate)."""
        state, settings = self.state, self.settings
        at = state.step % settings.steps_per_refresh * settings.batch_size
        answers = state.answers[at : at + settings.batch_size]
        before = state.before[at : at + settings.batch_size]
        denominator = self.loss.denominator(answers)
        loss = 0.0
        useful = self.loss.useful(answers)
        for batch, indices in self._batches([answers[index] for index in useful]):
            members = [useful[index] for index in indices]
            earlier = [before[index] for index in members] if before else []
            terms = self._terms(batch, [answers[index] for index in members], earlier, logged)
            summed = terms.losses_T.sum()
            if not bool(torch.isfinite(summed)):
                named = ", ".join(self.job.rows.where(self.prompts[answers[index].prompt].row) for index in members)
                raise DivergenceError(
                    f"the loss is not finite at step {state.step + 1}, on answers to {named}. Nothing was updated in this "
                    "step. Lower the learning rate or train in fp32"
                )
            (summed / denominator).backward()
            loss += float(summed.detach()) / denominator
        self._count(answers)
        parameters = list(self.job.trained.values())
        if self.first_gradient is not None and useful:
            self.first_gradient.on_pre_optimizer_step(None, None, None)
            self.first_gradient = None
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm))
        if not math.isfinite(norm):
            raise DivergenceError(not_finite(state.step + 1))
        rate = settings.learning_rate * learning_rate_factor(settings.schedule, state.step, self.warmup, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm, rate

    def _terms(
        self, batch: dict[str, torch.Tensor], answers: list[Answer], before: list[torch.Tensor], logged: bool
    ) -> Terms:
        before_T = torch.cat(before) if before else None
        terms = self.loss.terms(self.scorer, batch, answers, before_T)
        for name, value in terms.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.sums["scored"] = self.sums.get("scored", 0.0) + terms.losses_T.numel()
        if logged and not self.gate_summary:
            with torch.no_grad(), record_gates(self.job.model, self.job.adapter_name) as recording:
                recording.token_mask = batch["labels"].ne(-100)
                self.scorer.states(batch)
            self.gate_summary = recording.total()
        return terms

    def _batches(self, answers: Sequence[Answer]) -> list[tuple[dict[str, torch.Tensor], list[int]]]:
        """Collated passes of similar lengths with the indices of their answers; order does not change a summed loss."""
        order = sorted(range(len(answers)), key=lambda index: (-self._width(answers[index]), index))
        size = self.settings.micro_batch_size
        passes = []
        for at in range(0, len(order), size):
            indices = order[at : at + size]
            batch = self.collate([as_training_row(answers[index], self.prompts) for index in indices])
            passes.append(({key: value.to(self.device) for key, value in batch.items()}, indices))
        return passes

    def _width(self, answer: Answer) -> int:
        return len(self.prompts[answer.prompt].ids) + len(answer.token_ids)

    @property
    def _k(self) -> int:
        return min(self.settings.k, causal_model(self.job.model).get_output_embeddings().weight.shape[0])

    def _count(self, answers: Sequence[Answer]) -> None:
        for name, value in (
            ("answers", len(answers)),
            ("tokens", sum(len(answer.token_ids) for answer in answers)),
            ("finished", sum(answer.finished for answer in answers)),
            ("reward", sum(answer.reward for answer in answers)),
        ):
            self.sums[name] = self.sums.get(name, 0.0) + value

    def _log_values(self) -> dict[str, float]:
        sums, self.sums = self.sums, {}
        answers, scored = max(sums.pop("answers"), 1.0), max(sums.pop("scored", 0.0), 1.0)
        tokens = sums.pop("tokens")
        values = {
            "response_tokens": tokens,
            "answer_length": tokens / answers,
            "finished": sums.pop("finished") / answers,
        }
        reward = sums.pop("reward")
        if self.job.reward is not None:
            values["reward"] = reward / answers
        values |= {name: value / scored for name, value in sums.items()}
        values |= {f"gate_{name}": value for name, value in self.gate_summary.items() if name != "tokens"}
        self.gate_summary = {}
        return values
