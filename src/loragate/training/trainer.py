"""The one trainer: a subclass of TRL's SFTTrainer whose loss comes from the token-statistics head.

It overrides the loss, what is known of a whole batch before it, the evaluation, the log line, the checkpoint format and the
telemetry, and nothing else of the training loop. Both stages train with this class, with an objective each; `GateTrainer` adds
what gates need. Rows come tokenised and in their final order. Training by settings
and into a run folder is in `run.py`.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput, rotate_checkpoints
from trl import SFTConfig, SFTTrainer

from loragate.data import EncodedRows
from loragate.errors import ConfigError, DivergenceError, SetupError, TrainingError
from loragate.files import require_same_identity, write_atomically
from loragate.gates import record_gates
from loragate.gates.attach import attached_config
from loragate.gates.eligibility import quantization_of
from loragate.losses import (
    ObjectiveContext,
    StatisticsRequest,
    TokenStatistics,
    verify_head,
)
from loragate.losses.causal_head import Reference, causal_model, predicting_mask
from loragate.losses.head import IGNORE_INDEX
from loragate.losses.objectives import Objective
from loragate.losses.objectives.base import Gather, token_losses
from loragate.modes import evaluation_mode
from loragate.training.callbacks import GradientCheck, SkippedStepCheck
from loragate.training.checkpoints import (
    TRAINED_WEIGHTS_FILE,
    TRAINER_STATE_FILE,
    last_checkpoint,
    require_intact_checkpoint,
    write_checksums,
)
from loragate.training.memory import warn_where_memory_is_short
from loragate.training.model_state import iter_dropouts, preserve_model_state, statistics_forward
from loragate.training.rows import (
    TrainingCollator,
    as_dataset,
    check_packing_isolation,
    encoded_fingerprint,
    iter_evaluated_rows,
    iter_step_rows,
    warn_where_rows_change_others,
)
from loragate.training.sharding import (
    average_gradients,
    copy_into_parameter,
    full_optimizer_state,
    gathered_values,
    is_sharded,
    load_whole_state,
    make_sharded_copy,
    move_gates,
    target_device,
    write_back,
)
from loragate.training.strategy import Plan, check_plan, detect_launch

logger = logging.getLogger("loragate")
ReferenceOf = Callable[[Any, dict[str, Any]], Reference]
"""From (model, inputs) to a frozen reference's distributions at the labelled positions."""
Where = Callable[[int], str]
"""From a row's index to the words that name it."""
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
# column of a forward pass that holds what is known of its batch, wrapped so that nothing casts it
_BATCH = "loragate_batch"
# key of a checkpoint's metadata that holds what makes the run this run
_RUN = "run"
# what a resumed optimiser brings with it, whatever the arguments say then
_OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
_LOGGED = {"log_prob": "nll", "entropy": "entropy", "topk_entropy": "topk_entropy", "kl": "reference_kl"}


class StatisticsTrainer(SFTTrainer):
    """SFTTrainer over `model(..., statistics=request)`.

    Loss: sum of the objective's loss over response tokens ÷ number of response tokens of the global batch (all ranks, all
    accumulation steps). With an `over_batch` all forward passes of a step are first made without gradient, in evaluation mode, for
    the statistics named in `batch_reads` (none: not made at all); what it says of each is `ObjectiveContext.batch` in its loss.
    A step of one pass without dropout says as much itself and is made once. A reference's pass is not repeated either.

    What a training switches on in the model it takes back at the end: forward methods, modes, checkpointing.

    Attributes:
        original_model: the model that was given; `model` is its twin under FSDP2.
        trained: the parameters that train, by name.
        fused: whether the fused head serves; known once a training or an evaluation has begun.
    """

    control: Any  # of transformers
    loss_is_scaled_for_ga = True  # else the trainer would divide by the number of forward passes once more

    def __init__(
        self,
        model: Any,
        args: SFTConfig,
        train_dataset: EncodedRows,
        *,
        objective: Objective,
        trained: Mapping[str, nn.Parameter],
        processing_class: Any,
        where: Where,
        eval_dataset: EncodedRows | Mapping[str, EncodedRows] | None = None,
        data_collator: Any = None,
        reference: ReferenceOf | None = None,
        adapter_name: str | None = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        """Rows are in training order; `adapter_name` is that whose gates train (Stage II), None where an adapter itself trains.

        A ConfigError for what cannot work together, a SetupError for an adapter on the output head.
        """
        causal = causal_model(model)
        if isinstance(causal.get_output_embeddings(), BaseTunerLayer):
            raise SetupError(
                "the adapter has a LoRA delta on the output head, which the trainer cannot run: it multiplies by the head's own "
                "weight. Leave the head out of the adapter's target_modules"
            )
        self.objective, self.reference, self.adapter_name, self.where = objective, reference, adapter_name, where
        self.original_model = model
        args = copy.copy(args)
        grouped, self.packing = args.train_sampling_strategy == "group_by_length", bool(args.packing)
        self._refuse_impossible(model, args, grouped)
        if self.packing and data_collator is not None:
            raise ConfigError("packing lays rows end to end in a way of its own; leave out data_collator, or packing")
        batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        dataset = as_dataset(
            iter_step_rows(
                train_dataset,
                batch_size,
                args.per_device_train_batch_size,
                args.world_size,
                packing=self.packing,
                group_by_length=grouped,
            )
        )
        if self.packing or args.per_device_train_batch_size > 1:
            warn_where_rows_change_others(causal, train_dataset)
        lengths = train_dataset.arrays["lengths"]
        if not detect_launch().is_sharded:
            gates, longest = adapter_name is not None, int(lengths.max())
            warn_where_memory_is_short(causal, args, objective, longest, gates)
        if self.packing:
            args.per_device_train_batch_size, args.packing = 1, False  # an item is a whole forward pass
        # rows come prepared: tokenised, cut and in their final order
        args.train_sampling_strategy, args.max_length, args.dataset_kwargs = (
            "sequential", None, {"skip_prepare_dataset": True}
        )  # fmt: skip
        args.remove_unused_columns, args.average_tokens_across_devices = False, True
        args.ddp_find_unused_parameters, args.router_aux_loss_coef = False, 0.0
        args.dataloader_pin_memory &= target_device(model).type != "cpu"
        # several visible GPUs without a launcher would mean nn.DataParallel, whose replicas lose the instance's forward
        args._n_gpu = min(args.n_gpu, 1)

        gradients = None if objective.gradients is None else tuple(objective.gradients)
        self.request = StatisticsRequest(objective.k, tuple(objective.outputs), gradients)
        self.identity = {
            "gate": None if adapter_name is None else asdict(attached_config(model, adapter_name)),
            "objective": objective.name,
            "constants": objective.settings,
            "k": objective.k,
            "tokens": encoded_fingerprint(train_dataset),
            "optimizer": {name: getattr(args, name) for name in _OF_OPTIMIZER} if optimizers[0] is None else None,
        }
        self.over_batch = getattr(objective, "over_batch", None)
        self.batch_reads = tuple(getattr(objective, "batch_reads", None) or ())
        self.sums: dict[str, Any] = defaultdict(float)
        self.gate_summaries: list[dict[str, float]] = []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        twin = make_sharded_copy(model)
        # a stage names what trains in its own words; the twin knows its parameters by the model's
        copies = dict(twin.named_parameters())
        self.trained = {name: copies[names[id(parameter)]] for name, parameter in trained.items()}
        if optimizers[0] is not None:
            self._require_trained_by(optimizers[0])
        # TRL casts trainable parameters of quantised models to bf16; what is trained here keeps its precision.
        kept = {name: parameter.data for name, parameter in self.trained.items()}
        own_forward = causal_model(twin).__dict__.get("forward")
        fp16 = bool(args.fp16)
        checks: list[Any] = [GradientCheck(self.trained, objective.name, uses_loss_scaling=fp16)]
        checks += [SkippedStepCheck()] if fp16 else []
        super().__init__(
            model=twin,
            args=args,
            data_collator=TrainingCollator(processing_class) if data_collator is None else data_collator,
            train_dataset=dataset,
            eval_dataset=self.evaluation_rows(eval_dataset, args),
            processing_class=processing_class,
            callbacks=[*checks, *callbacks],
            optimizers=optimizers,
        )
        # TRL puts a head of its own before the model's forward
        causal_model(twin).__dict__.pop("forward", None)
        if own_forward is not None:
            causal_model(twin).forward = own_forward
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
        self.fused = True

    def _refuse_impossible(self, model: Any, args: SFTConfig, grouped: bool) -> None:
        check_plan(
            Plan(
                launch=detect_launch(),
                device=target_device(model).type,
                quantization=quantization_of(causal_model(model)),
                precision="fp16" if args.fp16 else "bf16" if args.bf16 else "fp32",
                packing=self.packing,
                group_by_length=grouped,
                dora=any(getattr(config, "use_dora", False) for config in model.peft_config.values()),
                reference=self.reference is not None,
            )
        )
        if args.push_to_hub:
            raise ConfigError(
                "push_to_hub would push checkpoints, which no one can load: save the result, then push that"
            )

    def _require_trained_by(self, optimizer: torch.optim.Optimizer) -> None:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if left := [name for name, parameter in self.trained.items() if id(parameter) not in held]:
            raise ConfigError(
                f"the optimizer holds {len(self.trained) - len(left)} of the {len(self.trained)} parameters that train, and not "
                f"{left[0]}, so it would leave them as they are. Gates are no parameters of the model before they are attached: "
                "call attach_gates first, build the optimizer from gate_parameters(model).values(), and leave out gates="
            )

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """What weight decay acts on: of gates all that trains, where transformers would leave out every bias."""
        if self.adapter_name is None:
            found: list[str] = super().get_decay_parameter_names(model)
            return found
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def evaluation_rows(self, rows: EncodedRows | Mapping[str, EncodedRows] | None, args: SFTConfig) -> Any:
        """Tokenised rows as a data set of evaluation batches, filled up with rows that do not count; several by name."""
        if isinstance(rows, Mapping):
            return {name: self.evaluation_rows(one, args) for name, one in rows.items()}
        if rows is None:
            return None
        passes = iter_evaluated_rows(self.original_model, rows, args.per_device_eval_batch_size, args.world_size)
        return as_dataset(passes)

    def _send_telemetry(self) -> None:
        """No telemetry."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The model card is written with the finished artifact, not with checkpoints."""

    @contextmanager
    def _statistics_mode(self, recomputing: bool = False) -> Iterator[None]:
        """The model as a pass with statistics needs it; given back as it came."""
        with preserve_model_state(self.model, recomputing), statistics_forward(self.model) as self.fused:
            yield

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """As in transformers. A run that is resumed at its last step gives its result and takes no step more.

        `resume_from_checkpoint` may be True for the last one that was written to its end in `args.output_dir`. A TrainingError for
        a loss or gradient that is not finite, and for a checkpoint of another run.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_checkpoint(Path(self.args.output_dir)) or "")
            if not resume_from_checkpoint:
                raise SetupError(
                    f"{self.args.output_dir} holds no checkpoint to resume from; leave out resume_from_checkpoint"
                )
        if resume_from_checkpoint:
            require_intact_checkpoint(Path(resume_from_checkpoint))
            state = TrainerState.load_from_json(str(Path(resume_from_checkpoint) / TRAINER_STATE_FILE))
            # of these arguments, which may have more epochs than the run had that wrote the checkpoint
            *_, steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
            # the trainer would take a step more before it looks whether it is to stop
            if state.global_step >= steps:
                self.state, self.fused = state, verify_head(causal_model(self.original_model))
                if self.args.load_best_model_at_end and state.best_model_checkpoint:
                    self._load_best_model()
                else:
                    self._load_from_checkpoint(str(resume_from_checkpoint))
                return TrainOutput(state.global_step, 0.0, {})
            if not (Path(resume_from_checkpoint) / OPTIMIZER).is_file():
                raise SetupError(
                    f"{resume_from_checkpoint} holds no {OPTIMIZER}, as save_only_model leaves it out: the optimiser and "
                    "the schedule would begin anew. Begin anew, without save_only_model where the run is to be resumed"
                )
        self.sums, self.gate_summaries = defaultdict(float), []
        with self._statistics_mode(bool(self.args.gradient_checkpointing)):
            if not self.fused:
                logger.warning("the output head is not one frozen linear map: statistics use full logits (slower)")
            if self.packing:
                check_packing_isolation(self.model, next(self.model.parameters()).device)
            output = super().train(resume_from_checkpoint=resume_from_checkpoint or None, **kwargs)
        if self.model is not self.original_model:
            write_back(self.model, self.original_model)
        return output

    def close(self) -> None:
        """Under FSDP2 the gates, which the model shares with its twin, go back to where the model is; nothing otherwise."""
        if self.sharded:
            frozen = (parameter for parameter in self.original_model.parameters() if not parameter.requires_grad)
            move_gates(self.original_model, next(frozen).device)

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """Mean loss and statistics over the response tokens of a data set, in evaluation mode.

        An `over_batch` sees the whole data set at once, so that its loss does not depend on the evaluation's batch size.
        """
        self.callback_handler.eval_dataloader = dataloader
        sums: dict[str, Any] = defaultdict(float)
        outputs = tuple(dict.fromkeys((*self.request.outputs, *self.batch_reads)))
        request, counted = replace(self.request, outputs=outputs, gradients=()), 0
        kept: list[tuple[TokenStatistics, ObjectiveContext]] = []
        with torch.no_grad(), self._statistics_mode(), evaluation_mode(self.model), self.accelerator.autocast():
            for batch in dataloader:
                inputs, _, context, _ = self._split_inputs(self._prepare_inputs(batch))
                stats = self._statistics(self.model, inputs, request, None)
                if self.over_batch is None:
                    sums["loss"] += token_losses(self.objective, stats, context).double().sum()
                else:
                    kept.append((stats, context))
                self._count(stats, sums)
                counted += int(stats.mask.any(-1).sum())
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            values = self._batch_values(kept, self._gathered) if self.over_batch is not None else ()
            for (stats, context), value in zip(kept, values, strict=True):
                losses = token_losses(self.objective, stats, replace(context, batch=value))
                sums["loss"] += losses.double().sum()
        totals = self._means(sums)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in totals.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=counted)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Not here: logits of every position are never made."""
        raise ConfigError(
            "predict would keep logits over the vocabulary at every position: evaluate(rows) gives their loss, "
            "and generate of the model their answers"
        )

    def _means(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Sums over tokens, `tokens` among them, as means over all processes; what is logged as nll is −log p."""
        totals = self.accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist()
        values = dict(zip(sums, totals, strict=True))
        tokens = max(values.pop("tokens"), 1.0)
        means = {name: -value / tokens if name == "nll" else value / tokens for name, value in values.items()}
        return {"response_tokens": tokens, **means}

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The forward passes of an optimiser step, each with what `over_batch` says of it."""
        passes, items = super().get_batch_samples(*args, **kwargs)
        if self.over_batch is not None and passes and not self._is_whole(passes):
            measured, references = zip(*(self._no_grad_statistics(inputs) for inputs in passes), strict=True)
            values = self._batch_values(measured, self._gathered)
            for inputs, value, reference in zip(passes, values, references, strict=True):
                inputs[_BATCH] = SimpleNamespace(value=value, reference=reference)
        return passes, items

    def _batch_values(self, parts: Sequence[tuple[TokenStatistics, ObjectiveContext]], gather: Gather) -> Sequence[Any]:
        """What `over_batch` says of each part: from `batch_reads` alone, which is all that a first pass makes."""
        assert self.over_batch is not None
        values = self.over_batch([(stats.only(self.batch_reads), context) for stats, context in parts], gather)
        if len(values) != len(parts):
            raise ConfigError(
                f"objective {self.objective.name!r}: over_batch returned {len(values)} values for {len(parts)} forward passes; it "
                "gives one value for each of its parts, in their order"
            )
        return values

    def _is_whole(self, passes: Sequence[Any]) -> bool:
        """Whether the training's own forward pass has what `over_batch` reads: it is the whole step, and drops nothing."""
        if len(passes) > 1 or self.accelerator.num_processes > 1:
            return False
        return set(self.batch_reads) <= set(self.request.outputs) and not any(iter_dropouts(self.model))

    @torch.no_grad()
    def _no_grad_statistics(
        self, inputs: dict[str, Any]
    ) -> tuple[tuple[TokenStatistics, ObjectiveContext], Reference | None]:
        """A forward pass that trains nothing, and its reference; without `batch_reads` the mask of its labels alone."""
        inputs, _, context, _ = self._split_inputs(self._prepare_inputs(inputs))
        if not self.batch_reads:
            mask = inputs["labels"][:, 1:] != IGNORE_INDEX
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

    def _split_inputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], torch.Tensor | None, ObjectiveContext, Reference | None]:
        """What the model reads, the rows, the context of the loss, and the reference's distributions if they are known."""
        inputs = dict(inputs)
        rows = inputs.pop("row", None)  # a collator of the user's own may drop it
        keep = inputs.pop("keep_mask", None)
        known = inputs.pop(_BATCH, None)
        ids = rows
        if rows is not None and rows.dim() == 1:  # not packed: a row is a sequence, and few objectives must be told
            ids = rows[:, None].expand_as(inputs["labels"]) if "sequence_ids" in self.objective.requires else None
        context = ObjectiveContext(
            keep_mask=None if keep is None else keep[:, 1:],
            sequence_ids=None if ids is None else ids[:, 1:],
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
        stats: TokenStatistics = model(**inputs, statistics=request)
        return stats

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of one forward pass; `num_items_in_batch` are the response tokens of the optimiser step, on all processes."""
        inputs, rows, context, reference = self._split_inputs(inputs)
        step = self.state.global_step + 1
        logged = step % self.state.logging_steps == 0 or (step == 1 and self.args.logging_first_step)
        # the recording ends before the backward pass, in which a recomputed layer would be counted again
        gates = self.adapter_name if logged else None
        with nullcontext() if gates is None else record_gates(self.model, gates) as record:
            if record is not None:
                record.token_mask = predicting_mask(inputs)
            stats = self._statistics(model, inputs, self.request, reference)
        if record is not None and (total := record.total()).get("tokens"):
            self.gate_summaries.append(total)
        if self.over_batch is not None and context.batch is None:
            with torch.no_grad():  # nobody has said what the batch says where this pass is the whole step
                context = replace(context, batch=self._batch_values([(stats, context)], lambda rows: rows)[0])
        losses = token_losses(self.objective, stats, context)
        if num_items_in_batch is None:  # outside a training step
            num_items_in_batch = stats.mask.sum()
        summed = losses.sum()
        if not bool(torch.isfinite(summed)):
            raise DivergenceError(
                f"the loss is not finite at step {self.state.global_step + 1}: "
                f"{self._describe_nonfinite_rows(losses, rows) or 'in the sum'}. "
                "Nothing was updated in this step. Look at these rows (empty, extremely long or repeated text?); if they are "
                "fine, lower the learning rate or train in fp32"
            )
        loss = summed / torch.as_tensor(num_items_in_batch, device=summed.device).clamp(min=1)
        # the tokens are those of all processes, and DDP and FSDP average gradients over these
        loss = loss * self.accelerator.num_processes
        self._count(stats, self.sums)
        return (loss, stats) if return_outputs else loss

    def _describe_nonfinite_rows(self, losses: torch.Tensor, rows: torch.Tensor | None) -> str:
        """The rows with a loss that is not finite, by name."""
        if rows is None:
            return ""
        bad = ~torch.isfinite(losses)
        found = rows[:, 1:][bad].unique() if rows.dim() == 2 else rows[bad.any(-1)]
        return ", ".join(self.where(int(row)) for row in found.tolist())

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

    def _count(self, stats: TokenStatistics, sums: dict[str, Any]) -> None:
        """Add what is logged of the response tokens of a pass, in fp64."""
        sums["tokens"] += stats.mask.sum().double()
        for name, key in _LOGGED.items():
            if name in self.request.outputs or (name == "kl" and stats.kl is not None):
                sums[key] += getattr(stats, name).detach().double().sum()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a line about training: means over the response tokens since the last line; λ statistics of the step that it is
        about, gate_*, where its forward passes on this process choose response tokens: at the position before each.
        """
        if self.sums and "loss" in logs:
            logs.update(self._means(self.sums))
            self.sums = defaultdict(float)
        if self.gate_summaries and "loss" in logs:
            logs.update({f"gate_{name}": value for name, value in pooled(self.gate_summaries).items()})
            self.gate_summaries = []
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """What trains; FSDP's own way would gather the base."""
        self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """A checkpoint holds what is trained, the optimiser and the random state: megabytes, not the model."""
        tensors = {name: gathered_values(parameter) for name, parameter in self.trained.items()}
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        run = {_RUN: json.dumps(self.identity)}
        write_atomically(folder / TRAINED_WEIGHTS_FILE, lambda path: save_file(tensors, str(path), run))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in transformers; checksums are written before older checkpoints go, or a kill between the two would leave none."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            folder = self._get_output_dir(trial=trial)
            write_checksums(Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            best = self.state.best_model_checkpoint
            rotate_checkpoints(folder, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint) / TRAINED_WEIGHTS_FILE
        with safe_open(str(path), "pt") as file:
            written = (file.metadata() or {}).get(_RUN)
        if written is not None:  # an earlier version kept nothing to compare
            remedy = "resume with what it was begun with, or begin anew"
            require_same_identity(path, json.loads(written), self.identity, remedy, SetupError)
        tensors = load_file(str(path))
        shapes = [{name: tuple(one.shape) for name, one in held.items()} for held in (tensors, self.trained)]
        if shapes[0] != shapes[1]:
            raise SetupError(f"{path} holds other parameters than this run trains; it belongs to another run")
        for name, parameter in self.trained.items():
            copy_into_parameter(parameter, tensors[name])

    def _load_best_model(self) -> None:
        """`load_best_model_at_end`: from the checkpoint of the best evaluation."""
        require_intact_checkpoint(Path(str(self.state.best_model_checkpoint)))
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Under FSDP the optimiser's state is written whole, as a single process would write it."""
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = full_optimizer_state(self.optimizer)
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

    @property
    def history(self) -> list[dict[str, Any]]:
        """The log records since the run's beginning, each with its step."""
        return [{name: value for name, value in record.items() if name != "epoch"} for record in self.state.log_history]


def pooled(summaries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """λ statistics of several forward passes (`Recording.total`) as those of all their tokens, without the counts."""
    tokens = sum(one["tokens"] for one in summaries)
    names = [name for name in summaries[0] if name not in ("tokens", "modules", "std")]
    means = {name: sum(one["tokens"] * one[name] for one in summaries) / tokens for name in names}
    square = sum(one["tokens"] * (one["std"] ** 2 + one["mean"] ** 2) for one in summaries) / tokens
    return means | {"std": math.sqrt(max(0.0, square - means["mean"] ** 2))}
