"""Stage II on the gated model's own answers, as a plain loop: sample, score, step. Extensions of ours, not SCALE.

The trainer's data set is fixed before training and these objectives make theirs on the way, so they have a loop of their
own; AdamW, schedules, clipping, log records, progress and Ctrl-C are those of the trainer. One process: several would
have to share the sampling.

A checkpoint holds what is trained, AdamW's moments and the answers in use, in safetensors and JSON under the trainer's own file
names; `trainer_state.json` is written last and marks it as complete. There is no random state: what is sampled follows from
seed, refresh and gates.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerControl, TrainerState, get_scheduler

from loragate.errors import DivergenceError, TrainingError
from loragate.files import write_atomically, write_json
from loragate.gates import record_gates
from loragate.generation import TransformersEngine
from loragate.losses.causal_head import ResponseScorer
from loragate.training.callbacks import not_finite
from loragate.training.compatibility import Plan, refuse_impossible
from loragate.training.guards import Guard, Reading, saturation
from loragate.training.model_state import restore_state, start_recomputing
from loragate.training.rollouts import (
    Answer,
    Reward,
    Sampler,
    as_training_row,
    draw_answers,
    losses,
    rewarded,
    sampled_request,
    training_prompts,
)
from loragate.training.rows import collator_for, positions_of
from loragate.training.run import usual_callbacks
from loragate.training.run_folder import STATE, alone_in, checkpoints, prepare_folder
from loragate.training.settings import GateTrainingSettings
from loragate.training.strategy import launch_of
from loragate.training.trainer import TRAINED, Job, TrainingOutcome

OPTIMIZER, ANSWERS = "optimizer.safetensors", "answers.safetensors"
BEFORE_TRAINING = -1  # number of the refresh whose answers are the guard's start
SATURATION_ANSWERS = 64


def run_on_policy(job: Job, sampler: Sampler | None, reward: Reward | None, guard: Guard | None) -> TrainingOutcome:
    """Train on sampled answers; files and errors are those of `run_training`.

    Args:
        job: with `GateTrainingSettings`, and the adapter whose gates train.
        sampler: None samples with transformers from the model in memory.
        reward: needed by the objective "reward".
        guard: watches the sampled answers; None watches nothing.

    Raises:
        ConfigError: under several processes.
        TrainingError: non-finite loss or reward, a resume that does not fit, or a stop by Ctrl-C.
    """
    refuse_impossible(Plan.of_settings(job.settings, launch_of(), next(job.model.parameters()).device.type))
    with alone_in(job.folder), restore_state(job.model, job.settings.gradient_checkpointing):
        checkpoint = prepare_folder(job.identity, job.folder, job.resume)
        if job.settings.gradient_checkpointing:
            # the inputs of the first layer come from a frozen embedding, and recomputation wants one that has a gradient
            job.model.enable_input_require_grads()
            start_recomputing(job.model)
        loop = _Loop(job, sampler, reward, guard)
        if checkpoint is not None:
            loop.restore(checkpoint)
        stopper, callbacks = usual_callbacks(job, loop.total, checkpoint is None)
        try:
            outcome = loop.run(callbacks)
        finally:
            stopper.restore()
    stopper.refuse_unfinished(outcome.steps, loop.total, job.folder)
    return outcome


class _Loop:
    """Where a run stands between two steps: `step` of `total`, the answers of the current refresh, the log probabilities of their
    tokens at sampling time (`before`; empty where they are not needed), log records, and counts of what was sampled."""

    def __init__(self, job: Job, sampler: Sampler | None, reward: Reward | None, guard: Guard | None) -> None:
        assert isinstance(job.settings, GateTrainingSettings)
        assert job.adapter_name is not None
        self.job, self.reward, self.guard = job, reward, guard
        self.settings = settings = job.settings
        self.adapter_name = job.adapter_name
        self.device = next(job.model.parameters()).device
        self.collate = collator_for(job.tokenizer)
        self.scorer = ResponseScorer(job.model, settings.precision)
        self.loss = losses[settings.objective](settings, self.adapter_name)
        engine = TransformersEngine(job.model, job.tokenizer, batch_size=settings.sampling_batch_size)
        self.sampler = sampler or engine.generate
        self.prompts = training_prompts(
            job.encoded, job.rows, job.tokenizer, settings.max_new_tokens, positions_of(job.model)
        )
        self.optimizer = torch.optim.AdamW(
            list(job.trained.values()),
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=1e-8,
            weight_decay=settings.weight_decay,
        )
        self.step, self.total = 0, settings.steps(len(job.encoded))
        self.last = job.until or self.total
        self.answers: list[Answer] = []
        self.before: list[torch.Tensor] = []
        self.history: list[dict[str, Any]] = []
        self.sampled: Any = Counter()
        warmup = round(settings.warmup_ratio * self.total)
        # a factor by step, so that there is no state of the schedule to keep
        (self.rate_factor,) = get_scheduler(settings.lr_scheduler_type, self.optimizer, warmup, self.total).lr_lambdas
        self.sums: Any = Counter()
        self.gate_summary: dict[str, float] = {}

    def run(self, callbacks: Sequence[Any]) -> TrainingOutcome:
        settings, began, first = self.settings, time.monotonic(), self.step
        shown, control = TrainerState(global_step=self.step, max_steps=self.total), TrainerControl()

        def tell(event: str, **more: Any) -> None:
            """As the trainer does; its arguments, which come first, are those of a run on several processes."""
            for callback in callbacks:
                getattr(callback, event)(None, shown, control, **more)

        tell("on_train_begin")
        self.job.model.train()
        while self.step < self.last and not control.should_training_stop:
            if self.step % settings.steps_per_refresh == 0 and self._refresh() is not None:
                break
            logged = self.step == 0 or (self.step + 1) % settings.logging_steps == 0
            loss = self._gradient(logged)
            if loss is not None:  # without one there is no gradient to look at
                tell("on_pre_optimizer_step")
            norm, rate = self._update()
            self.step += 1
            shown.global_step = self.step
            tell("on_step_end")
            if logged:
                record = {"loss": loss or 0.0, "grad_norm": norm, "learning_rate": rate, **self._log_values()}
                self.history.append({"step": self.step, **record})
                tell("on_log", logs=record)
            due = settings.save_steps > 0 and self.step % settings.save_steps == 0
            if self.job.folder is not None and (due or control.should_save):
                self._save(self.job.folder)
                control.should_save = False
        seconds = time.monotonic() - began
        if self.step > first:
            # the last line of the log, as the trainer writes it: it tells a run that ended from one that was killed
            tell("on_log", logs={"train_runtime": round(seconds, 4)})
        tell("on_train_end")
        return TrainingOutcome(self.history, self.step, seconds, self.scorer.fused, dict(self.sampled))

    # checkpoints

    def _save(self, folder: Path) -> None:
        """Write `folder`/checkpoint-<step> and remove all but the newest `save_total_limit`; 0 keeps all."""
        keep, guard = self.settings.save_total_limit, self.guard or Guard()
        target = folder / f"checkpoint-{self.step}"
        tensors: dict[str, dict[str, Any]] = {
            TRAINED: self.job.trained,
            OPTIMIZER: {
                f"{name}.{key}": torch.as_tensor(value)
                for name, parameter in self.job.trained.items()
                for key, value in self.optimizer.state.get(parameter, {}).items()
            },
            ANSWERS: {str(index): values for index, values in enumerate(self.before)},
        }
        for file, values in tensors.items():
            held = {name: value.detach().cpu().contiguous() for name, value in values.items()}
            write_atomically(target / file, lambda path, held=held: save_file(held, str(path)))  # type: ignore[misc]
        record = {
            "global_step": self.step,
            "max_steps": self.total,
            "history": self.history,
            "guard": guard.as_records(),
            "sampled": self.sampled,
            "answers": [asdict(answer) for answer in self.answers],
            "waiting": [asdict(answer) for answer in guard.waiting],
        }
        write_json(target / STATE, record)
        for path in checkpoints(folder)[: -keep if keep else 0]:
            shutil.rmtree(path)

    def restore(self, checkpoint: Path) -> None:
        """Put a checkpoint's weights, moments, answers and guard in place.

        Raises:
            TrainingError: if a file is missing, damaged or belongs to another run.
        """
        try:
            record = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
            weights, moments, before = (load_file(str(checkpoint / name)) for name in (TRAINED, OPTIMIZER, ANSWERS))
            answers, waiting = (
                [Answer(**{**item, "token_ids": tuple(item["token_ids"])}) for item in record[key]]
                for key in ("answers", "waiting")
            )
            self.step, self.answers = record["global_step"], answers
            self.before = [before[str(index)] for index in range(len(before))]
            self.history, self.sampled = record["history"], Counter(record["sampled"])
            readings = [Reading(**reading) for reading in record["guard"]]
        except Exception as error:  # safetensors has its own error types
            raise TrainingError(
                f"{checkpoint} cannot be read ({error}); the checkpoint is incomplete, remove its folder and resume again"
            ) from error
        if set(weights) != set(self.job.trained):
            raise TrainingError(
                f"{checkpoint / TRAINED} holds other parameters than this run trains; it belongs to another run"
            )
        with torch.no_grad():
            for name, parameter in self.job.trained.items():
                parameter.copy_(weights[name])
                stored = {
                    # AdamW counts its steps on the CPU, so that it need not wait for the device
                    key: moments[f"{name}.{key}"].to("cpu" if key == "step" else parameter.device)
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{name}.{key}" in moments
                }
                if stored:
                    self.optimizer.state[parameter] = stored
        if self.guard is not None:
            self.guard.readings, self.guard.waiting = readings, waiting

    # sampling

    def _refresh(self) -> str | None:
        """Sample the answers of the next steps; returns the guard's verdict."""
        settings, guard, group = self.settings, self.guard, self.settings.answers_per_prompt
        steps = min(settings.steps_per_refresh, self.total - self.step)
        per_step = settings.batch_size // group  # prompts
        needed = steps * per_step
        # the first reading must be of the adapter; answers that fill it up over several steps would be of changed gates
        if guard is not None and self.step == 0 and needed * group < guard.limits.answers:
            self._watch(guard, self._draw(range(math.ceil(guard.limits.answers / group)), BEFORE_TRAINING))
        # step s always takes the prompts from s · per_step on, around the end, however long a refresh is
        chosen = range(self.step * per_step, self.step * per_step + needed)
        self.answers = self._draw(chosen, self.step // settings.steps_per_refresh)
        if self.reward is not None:
            self.answers = rewarded(self.answers, self.prompts, self.job.rows, self.reward, settings)
        if guard is not None and self._watch(guard, self.answers) is not None:
            return guard.verdict
        # answers that serve several steps are scored once by the gates that they were sampled with
        self.before = self._log_probs(self.answers) if settings.objective == "reward" and steps > 1 else []
        return None

    def _draw(self, chosen: Sequence[int], refresh: int) -> list[Answer]:
        began = time.monotonic()
        indices = [index % len(self.prompts) for index in chosen]
        answers = draw_answers(self.prompts, indices, self.sampler, self.settings, refresh)
        tokens = sum(len(answer.token_ids) for answer in answers)
        self.sampled.update(answers=len(answers), tokens=tokens, seconds=time.monotonic() - began)
        return answers

    def _watch(self, guard: Guard, answers: Sequence[Answer]) -> str | None:
        def saturated() -> float | None:
            few = list(answers[:SATURATION_ANSWERS])
            return saturation(self.job.model, [batch for batch, _ in self._batches(few)], self.adapter_name)

        return guard.observe(self.step, answers, saturated)

    @torch.no_grad()
    def _log_probs(self, answers: Sequence[Answer]) -> list[torch.Tensor]:
        """log p of each answer's tokens, [tokens]."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(answers)
        for batch, indices in self._batches(answers):
            request = sampled_request(self.settings.k)
            log_prob_T = self.scorer.statistics(self.scorer.states(batch), batch, request).log_prob
            parts = log_prob_T.split([len(answers[index].token_ids) for index in indices])
            for index, part in zip(indices, parts, strict=True):
                found[index] = part.clone()  # a view would keep the whole batch's
        return found

    # one step

    def _gradient(self, logged: bool) -> float | None:
        """The step's gradient; returns its loss, None where no answer has a gradient."""
        size = self.settings.batch_size
        at = self.step % self.settings.steps_per_refresh * size
        answers, before = self.answers[at : at + size], self.before[at : at + size]
        denominator = self.loss.denominator(answers)
        loss = 0.0
        useful = self.loss.useful(answers)
        for batch, indices in self._batches([answers[index] for index in useful]):
            members = [useful[index] for index in indices]
            before_T = torch.cat([before[index] for index in members]) if before else None
            losses_T, sums = self.loss.terms(self.scorer, batch, [answers[index] for index in members], before_T)
            summed = losses_T.sum()
            if not bool(torch.isfinite(summed)):
                named = ", ".join(self.job.rows.where(self.prompts[answers[index].prompt].row) for index in members)
                raise DivergenceError(
                    f"the loss is not finite at step {self.step + 1}, on answers to {named}. Nothing was updated in this "
                    "step. Lower the learning rate or train in fp32"
                )
            self.sums.update(sums, scored=losses_T.numel())
            if logged and not self.gate_summary:
                # a pass of its own: the loss's passes also run under the anchor's constant λ
                with torch.no_grad(), record_gates(self.job.model, self.adapter_name) as recording:
                    recording.token_mask = batch["labels"].ne(-100)
                    self.scorer.states(batch)
                self.gate_summary = recording.total()
            # of the whole step, so that the size of a pass does not matter
            (summed / denominator).backward()
            loss += float(summed.detach()) / denominator
        self.sums.update(
            answers=len(answers),
            tokens=sum(len(answer.token_ids) for answer in answers),
            finished=sum(answer.finished for answer in answers),
            reward=sum(answer.reward for answer in answers),
        )
        return loss if useful else None

    def _update(self) -> tuple[float, float]:
        """Apply the gradient; returns (gradient norm, learning rate)."""
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.job.trained.values()), self.settings.max_grad_norm))
        # finite gradients can have a norm that overflows: clipping has made zeros of them then, a step that trains nothing
        if not math.isfinite(norm):
            raise DivergenceError(not_finite(self.step + 1))
        rate = self.settings.learning_rate * self.rate_factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, rate

    def _batches(self, answers: Sequence[Answer]) -> list[tuple[dict[str, torch.Tensor], list[int]]]:
        """Collated passes of similar lengths with the indices of their answers; order does not change a summed loss."""
        rows = [as_training_row(answer, self.prompts) for answer in answers]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]["input_ids"]))
        passes = []
        for at in range(0, len(order), self.settings.per_device_train_batch_size):
            indices = order[at : at + self.settings.per_device_train_batch_size]
            batch = self.collate([rows[index] for index in indices])
            passes.append(({key: value.to(self.device) for key, value in batch.items()}, indices))
        return passes

    def _log_values(self) -> dict[str, float]:
        sums, self.sums = self.sums, Counter()
        answers, scored, tokens, finished, reward = (
            sums.pop(name, 0.0) for name in ("answers", "scored", "tokens", "finished", "reward")
        )
        values = {"response_tokens": float(tokens), "answer_length": tokens / answers, "finished": finished / answers}
        if self.reward is not None:
            values["reward"] = reward / answers
        values |= {name: value / scored for name, value in sums.items()}
        values |= {f"gate_{name}": value for name, value in self.gate_summary.items() if name != "tokens"}
        self.gate_summary = {}
        return values
