"""What a run is made of, and a thin subclass of TRL's SFTTrainer whose loss comes from the token-statistics head.

It overrides the loss, what is known of a whole batch before it, the log line, the checkpoint format and the telemetry, and
nothing else of the training loop. Both stages use this class, with an objective each. Rows come
tokenised and in their final order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file, save_file
from torch import nn
from trl import SFTConfig, SFTTrainer

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError, DivergenceError, TrainingError
from loragate.files import write_atomically
from loragate.gates import record_gates
from loragate.losses import ObjectiveContext, StatisticsRequest, TokenStatistics, WeightedCrossEntropy
from loragate.losses.divergence import Reference
from loragate.losses.head import IGNORED
from loragate.losses.objectives import Objective
from loragate.losses.objectives.base import within_batch
from loragate.modes import evaluation_mode
from loragate.training.arrangement import arranged_steps
from loragate.training.callbacks import OnStep
from loragate.training.last_layer import LastLayer
from loragate.training.model_state import dropouts, recomputation_argument
from loragate.training.settings import TrainSettings
from loragate.training.sharding import (
    assign,
    average_gradients,
    gathered_values,
    is_sharded,
    load_whole_state,
    whole_state,
)
from loragate.training.strategy import launch_of

ReferenceOf = Callable[[Any, dict[str, Any]], Reference]
"""From (model, inputs) to a frozen reference's distributions at the labelled positions."""
TRAINED, OPTIMIZER, SCHEDULER = "trained.safetensors", "optimizer.pt", "scheduler.pt"
ROWS_AT_A_TIME = 2048  # that are Python lists while a data set is made
# column of a forward pass that holds what is known of its batch, wrapped so that nothing casts it
_BATCH = "loragate_batch"


@dataclass(kw_only=True)
class Job:
    """What every run needs, put together by a stage.

    Attributes:
        model, tokenizer: the model as it will be trained, and its tokenizer.
        encoded, rows: tokenised rows in training order, and the rows they came from (for error messages).
        settings: the stage's settings.
        trained: the parameters that train, by name.
        identity: what makes this run this run; stored in run.json and compared on resume.
        folder: run folder; None keeps nothing (no checkpoints survive then).
        resume: go on from the last checkpoint in `folder`.
        on_step: called after every optimiser step.
        until: the step after which the run pauses, with a checkpoint from which `resume` goes on; None goes to the end.
        adapter_name: of the adapter whose gates train (Stage II); None where an adapter itself trains.
    """

    model: Any
    tokenizer: Any
    encoded: EncodedRows
    rows: Rows
    settings: TrainSettings
    trained: dict[str, nn.Parameter]
    identity: dict[str, Any]
    folder: Path | None
    resume: bool
    on_step: OnStep | None
    until: int | None = None
    adapter_name: str | None = None


@dataclass(frozen=True)
class TrainingOutcome:
    """What a run leaves behind: its log records, steps and wall time, and counts of what it sampled."""

    history: list[dict[str, Any]]
    steps: int
    seconds: float
    fused_head: bool
    sampled: dict[str, float] = field(default_factory=dict)


class StatisticsTrainer(SFTTrainer):
    """SFTTrainer over `model(..., statistics=request)`.

    Loss: sum of the objective's loss over response tokens ÷ number of response tokens of the global batch (all ranks, all
    accumulation steps). With an `over_batch` all forward passes of a step are first made without gradient, in evaluation mode, for
    the statistics named in `batch_reads` (none: not made at all); what it says of each is `ObjectiveContext.batch` in its loss.
    A step of one pass without dropout says as much itself and is made once. A reference's pass is not repeated either.
    """

    loss_is_scaled_for_ga = True  # else the trainer would divide by the number of forward passes once more

    def __init__(
        self, job: Job, objective: Objective, reference: ReferenceOf | None, last_layer: LastLayer, **kwargs: Any
    ) -> None:
        """`reference` is needed by an objective with a KL to one; `kwargs` are SFTTrainer's."""
        self.job, self.objective, self.reference = job, objective, reference
        self.trained, self.last_layer = job.trained, last_layer
        gradients = None if objective.gradients is None else tuple(objective.gradients)
        self.request = StatisticsRequest(objective.k, tuple(objective.outputs), gradients)
        self.over_batch = getattr(objective, "over_batch", None)
        self.batch_reads = tuple(getattr(objective, "batch_reads", ()))
        self.sums: dict[str, torch.Tensor] = {}
        self.gate_summary: dict[str, float] = {}
        self.history: list[dict[str, Any]] = []
        # TRL casts trainable parameters of quantised models to bf16; what is trained here keeps its precision.
        kept = {name: parameter.data for name, parameter in self.trained.items()}
        super().__init__(model=job.model, processing_class=job.tokenizer, **kwargs)
        for name, parameter in self.trained.items():
            if parameter.dtype != kept[name].dtype:
                parameter.data = kept[name].to(parameter.device)
        self.model_accepts_loss_kwargs = True  # then `compute_loss` is told the response tokens of the whole step
        self.sharded = is_sharded(self.model)
        if self.sharded and not hasattr(SFTTrainer, "_defer_fsdp_gradient_reduction"):
            # an older Trainer never calls what this class puts in its place
            raise TrainingError("FSDP2 needs transformers 5.23 or newer; upgrade transformers, or use --strategy ddp")
        # the trainer then leaves placing, wrapping and reducing to the model; set only now, as it would refuse checkpoints
        self.is_distributed_loading_by_transformers = self.sharded

    def _send_telemetry(self) -> None:
        """No telemetry."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The model card is written with the finished artifact, not with checkpoints."""

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The forward passes of an optimiser step, each with what `over_batch` says of it."""
        passes, items = super().get_batch_samples(*args, **kwargs)
        if self.over_batch is not None and passes and not self._is_whole(passes):
            measured, references = zip(*(self._measured(inputs) for inputs in passes), strict=True)
            values = self.over_batch(measured, self._gathered)
            for inputs, value, reference in zip(passes, values, references, strict=True):
                inputs[_BATCH] = SimpleNamespace(value=value, reference=reference)
        return passes, items

    def _is_whole(self, passes: Sequence[Any]) -> bool:
        """Whether the training's own forward pass has what `over_batch` reads: it is the whole step, and drops nothing."""
        if len(passes) > 1 or self.accelerator.num_processes > 1:
            return False
        return set(self.batch_reads) <= set(self.request.outputs) and not any(dropouts(self.model))

    @torch.no_grad()
    def _measured(self, inputs: dict[str, Any]) -> tuple[tuple[TokenStatistics, ObjectiveContext], Reference | None]:
        """A forward pass that trains nothing, and its reference; without `batch_reads` the mask of its labels alone."""
        inputs, _, context, _ = self._unpacked(self._prepare_inputs(inputs))
        if not self.batch_reads:
            mask = inputs["labels"][:, 1:] != IGNORED
            nothing = torch.empty(0, device=mask.device)
            return (TokenStatistics(nothing, nothing, nothing, mask, self.request.k), context), None
        with evaluation_mode(self.model_wrapped), self.compute_loss_context_manager():
            request = replace(self.request, outputs=self.batch_reads, gradients=())
            reference = None if self.reference is None else self.reference(self.model_wrapped, inputs)
            stats = self._statistics(self.model_wrapped, inputs, request, reference)
        # kept until its pass trains, unless it is logits, [T, V]
        kept = reference if reference is not None and reference.head is not None else None
        return (stats, context), kept

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [N, ...] of all processes, in their order; N may differ."""
        # an exchange wants equal shapes: all are padded to the longest, and cut again
        sizes = self.accelerator.gather(torch.tensor([len(rows)], device=rows.device)).tolist()
        whole = self.accelerator.gather(self.accelerator.pad_across_processes(rows))
        parts = whole.split(max(sizes)) if max(sizes) else [whole]
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=False)])

    def _unpacked(
        self, inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], torch.Tensor, ObjectiveContext, Reference | None]:
        """What the model reads, the rows, the context of the loss, and the reference's distributions if they are known."""
        inputs = dict(inputs)
        rows = inputs.pop("row")
        keep = inputs.pop("keep_mask", None)
        known = inputs.pop(_BATCH, None)
        context = ObjectiveContext(
            keep_mask=None if keep is None else keep[:, 1:],
            sequence_ids=rows[:, 1:] if rows.dim() == 2 else None,
            step=self.state.global_step,
            total_steps=self.state.max_steps,
            batch=None if known is None else known.value,
        )
        return inputs, rows, context, None if known is None else known.reference

    def _statistics(
        self, model: Any, inputs: dict[str, Any], request: StatisticsRequest, reference: Reference | None
    ) -> TokenStatistics:
        if self.reference is not None:
            request = replace(request, reference=self.reference(model, inputs) if reference is None else reference)
        with self.last_layer.reading(inputs["labels"]):
            stats: TokenStatistics = model(**inputs, statistics=request)
        return stats

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one forward pass; `num_items_in_batch` are the response tokens of the optimiser step, on all processes."""
        inputs, rows, context, reference = self._unpacked(inputs)
        logged = (self.state.global_step + 1) % self.args.logging_steps == 0
        # the recording ends before the backward pass, in which a recomputed layer would be counted again
        gates = self.job.adapter_name if logged else None
        with nullcontext() if gates is None else record_gates(self.model, gates) as record:
            if record is not None:
                record.token_mask = inputs["labels"].ne(IGNORED)
            stats = self._statistics(model, inputs, self.request, reference)
        if record is not None and (total := record.total()).get("tokens"):
            self.gate_summary = total
        if self.over_batch is not None:
            with torch.no_grad():  # nobody has said what the batch says where this pass is the whole step
                context = within_batch(self.over_batch, stats, context)
        losses = token_losses(self.objective, stats, context)
        if num_items_in_batch is None:  # outside a training step
            num_items_in_batch = stats.mask.sum()
        summed = losses.sum()
        if not bool(torch.isfinite(summed)):
            bad = ~torch.isfinite(losses)
            at_fault = rows[:, 1:][bad].unique() if rows.dim() == 2 else rows[bad.any(-1)]
            named = ", ".join(self.job.rows.where(int(row)) for row in at_fault.tolist())
            raise DivergenceError(
                f"the loss is not finite at step {self.state.global_step + 1}: {named or 'in the sum'}. Nothing was updated in "
                "this step. Look at these rows (empty, extremely long or repeated text?); if they are fine, lower the learning "
                "rate or train in fp32"
            )
        loss = summed / torch.as_tensor(num_items_in_batch, device=summed.device).clamp(min=1)
        # the tokens are those of all processes, and DDP and FSDP average gradients over these
        loss = loss * self.accelerator.num_processes
        with torch.no_grad():
            self._add("tokens", stats.mask.sum())
            for name, key in (("log_prob", "nll"), ("entropy", "entropy"), ("topk_entropy", "topk_entropy")):
                if name in self.request.outputs:
                    self._add(key, getattr(stats, name).detach().double().sum())
            if stats.kl is not None:
                self._add("reference_kl", stats.kl.detach().double().sum())
        return (loss, stats) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.sharded and self.accelerator.sync_gradients:
            average_gradients(self.trained)
        return loss

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Shards are reduced with the last pass of a step; the trainer's own version reads a configuration of its own."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Not here: the gates are reduced together in `training_step`, not one by one as their gradients arrive."""

    def _add(self, name: str, value: torch.Tensor) -> None:
        value = value.double()
        self.sums[name] = value if name not in self.sums else self.sums[name] + value

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.sums:
            names = list(self.sums)
            totals = self.accelerator.reduce(torch.stack([self.sums[name] for name in names]), "sum").tolist()
            values = dict(zip(names, totals, strict=True))
            tokens = max(values.pop("tokens"), 1.0)
            logs["response_tokens"] = tokens
            for name, value in values.items():
                logs[name] = -value / tokens if name == "nll" else value / tokens
            self.sums = {}
        if self.gate_summary:
            logs.update(
                {
                    f"gate_{name}": value
                    for name, value in self.gate_summary.items()
                    if name not in ("tokens", "modules")
                }
            )
            self.gate_summary = {}
        self.history.append({"step": self.state.global_step, **logs})
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """What trains; FSDP's and DeepSpeed's own way would gather the base."""
        self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A checkpoint holds what is trained, the optimiser and the random state: megabytes, not the model."""
        tensors = {name: gathered_values(parameter) for name, parameter in self.trained.items()}
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        write_atomically(folder / TRAINED, lambda path: save_file(tensors, str(path)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint) / TRAINED
        if not path.is_file():
            raise TrainingError(f"{path} is missing; the checkpoint is incomplete, remove its folder and resume again")
        tensors = load_file(str(path))
        if set(tensors) != set(self.trained):
            raise TrainingError(f"{path} holds other parameters than this run trains; it belongs to another run")
        for name, parameter in self.trained.items():
            assign(parameter, tensors[name])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Under FSDP the optimiser's state is written whole, as a single process would write it."""
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = whole_state(self.optimizer)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.sharded or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_whole_state(
            self.optimizer, torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True)
        )
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _save_rng_state(self, output_dir: str) -> None:
        """Every process's state is on disk before the file that marks the checkpoint as complete."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()


def token_losses(objective: Objective, stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
    """The objective's loss, shaped like the statistics; what it says of positions without a label does not count.

    Raises:
        ConfigError: for another shape, and for a negative weight of a `WeightedCrossEntropy`.
    """
    losses = objective.loss(stats, context)
    if losses.shape != stats.mask.shape:
        raise ConfigError(
            f"objective {objective.name!r}: loss returned {list(losses.shape)}, expected one value per token, "
            f"{list(stats.mask.shape)} like the statistics, neither summed nor averaged"
        )
    # the trainer waits for the device at this point in any case, to see whether the loss is finite
    if isinstance(objective, WeightedCrossEntropy) and bool(((losses < 0) & (stats.log_prob < 0)).any()):
        raise ConfigError(
            f"objective {objective.name!r}: its rule gave a negative weight. A weighted cross-entropy has weights of at "
            "least 0; write an objective of your own kind for signed terms"
        )
    return torch.where(stats.mask, losses, losses.new_zeros(()))


def trainer_arguments(settings: TrainSettings, folder: Path, rows: int, device: str) -> SFTConfig:
    """The TRL configuration of a run; every choice of ours is set explicitly."""
    steps = settings.steps(rows)
    deepspeed = launch_of().strategy == "zero3"
    arguments = SFTConfig(
        output_dir=str(folder),
        # packed, an item is a whole forward pass
        per_device_train_batch_size=1 if settings.packing else settings.per_device_train_batch_size,
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
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=None,
        packing=False,
        average_tokens_across_devices=True,
        **recomputation_argument(SFTConfig, settings.gradient_checkpointing),
        activation_offloading=settings.activation_offload,
        bf16=settings.precision == "bf16",
        fp16=settings.precision == "fp16",
        tf32=None,
        # DeepSpeed on the CPU: see `process_state`
        use_cpu=device == "cpu" and not deepspeed,
        ddp_backend="gloo" if device == "cpu" and deepspeed else None,
        dataloader_pin_memory=device != "cpu",
        logging_strategy="steps",
        logging_steps=settings.logging_steps,
        logging_first_step=True,
        save_strategy="steps" if settings.save_steps else "no",
        save_steps=settings.save_steps or 500,
        save_total_limit=settings.save_total_limit or None,
        report_to=[name.strip() for name in settings.report_to.split(",") if name.strip()] or "none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        router_aux_loss_coef=0.0,
    )
    # several visible GPUs without a launcher would mean nn.DataParallel, whose replicas lose the instance's forward
    arguments._n_gpu = min(arguments.n_gpu, 1)
    arguments.gradient_accumulation_steps = settings.accumulation(arguments.world_size)
    return arguments


def as_dataset(rows: Sequence[dict[str, Any]], settings: TrainSettings, processes: int = 1) -> Any:
    """Tokenised rows (input_ids, labels, row, optional keep_mask) as a `datasets.Dataset` in memory, as `arranged_steps` orders
    them."""
    parts, waiting = [], []
    for step in arranged_steps(rows, settings, processes):
        waiting += step
        if len(waiting) >= ROWS_AT_A_TIME:
            parts.append(Dataset.from_list(waiting))
            waiting = []
    return concatenate_datasets([*parts, Dataset.from_list(waiting)] if waiting else parts)
