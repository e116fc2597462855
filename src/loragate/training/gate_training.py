"""Stage II: train gates on a frozen base and adapter by minimising top-k predictive entropy (eq:rw-topk).

`GateTrainer` is the trainer for those who know TRL: its arguments are transformers', its loop is `StatisticsTrainer`'s.
`train_gates` is the same training from settings, into a run folder. Guarded on both sides: parity with the Stage-I model is
measured before the first step, everything but the gates is hashed before and after, and the training loss is never taken as
evidence of success.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.trainer_utils import TrainOutput

from loragate.data import EncodedRows, Rows, encode_rows, find_endings, load_rows
from loragate.data.rows import RowsGiven
from loragate.display import phase
from loragate.errors import ConfigError, GateError, TrainingError
from loragate.gates import (
    GateConfig,
    Parity,
    active_adapter,
    adapter_fingerprint,
    attach_gates,
    detach_gates,
    gate_parameters,
    measure_parity,
    record_gates,
    save_gates,
    train_gates_only,
    weights_checksum,
)
from loragate.gates.attach import attached_config, is_gated
from loragate.gates.control import base_unavailable_reason
from loragate.losses import StatisticsRequest
from loragate.losses.causal_head import causal_model, predicting_mask
from loragate.losses.objectives import EntropyMinimisation, Objective, sft
from loragate.models.passes import iter_passes
from loragate.modes import evaluation_mode
from loragate.training.arguments import GateTrainingArguments, build_trainer_arguments, recorded_arguments
from loragate.training.callbacks import OnStep
from loragate.training.checkpoints import training_folder
from loragate.training.fine_tuning import base_reference
from loragate.training.memory import fit_passes
from loragate.training.model_state import require_causal_model, statistics_forward, without_dropout
from loragate.training.rows import (
    TrainingCollator,
    check_encoded_matches_rows,
    check_fits_model,
    encoded_fingerprint,
    require_mask_column,
    training_rows,
)
from loragate.training.run import (
    TrainingOutcome,
    check_custom_objective,
    run_in_folder,
    save_tokenizer,
)
from loragate.training.settings import GATE_OBJECTIVES, GateTrainingSettings
from loragate.training.sharding import target_device
from loragate.training.trainer import StatisticsTrainer, Where

PARITY_ROWS, PARITY_TOKENS = 4, 64
MEASURED_ROWS = 64
_OWN_LOOP = "attach_gates works on it; train its gates in a loop of your own"


@dataclass(frozen=True, kw_only=True)
class GateTrainingResult(TrainingOutcome):
    """What a training of gates did, in numbers.

    Attributes:
        config: the gates.
        settings: of the training, as they are recorded.
        parity: gated model against adapter and base before the first step.
        entropy_before, entropy_after: normalised top-k entropy (0 to 1) on the first rows, teacher-forced. A fall says
            that the objective was met, not that answers improved.
        gates: {module path: λ statistics} where the response tokens of those rows are chosen, after training.
        gates_total: the same over all modules.
        history, steps, fused_head: see `TrainingOutcome`.
        seconds: of everything; `training_seconds`: of the training loop alone, and since the last resume.
        parameters, rows, response_tokens: size and cost.
        heldout: rows of `heldout`, and the entropy on them before and after; empty without.
        data: source and fingerprint of the rows.
        objective: what trained the gates: `settings.objective`, or the name of an objective of one's own.
        constants: those of an objective of one's own.
        own_k: its support of the top-k entropy; None where it reads none.
        best_step: of the checkpoint that `load_best_model_at_end` took the gates from; None for those of the last step.
    """

    config: GateConfig
    settings: dict[str, Any]
    parity: Parity
    entropy_before: float
    entropy_after: float
    gates: dict[str, dict[str, float]]
    gates_total: dict[str, float]
    parameters: int
    rows: int
    response_tokens: int
    data: dict[str, Any]
    training_seconds: float
    objective: str
    heldout: dict[str, float] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    own_k: int | None = None
    best_step: int | None = None

    def evidence(self) -> dict[str, Any]:
        """The JSON-able record that goes into the artifact."""
        return {
            "parity": asdict(self.parity),
            "training": {
                "settings": self.settings,
                **({"constants": self.constants} if self.constants else {}),
                **({} if self.objective in GATE_OBJECTIVES else {"k": self.own_k}),
                "entropy_before": self.entropy_before,
                "entropy_after": self.entropy_after,
                "gates": self.gates_total,
                "steps": self.steps,
                **({} if self.best_step is None else {"best_step": self.best_step}),
                "seconds": round(self.seconds, 1),
                "training_seconds": round(self.training_seconds, 1),
                "parameters": self.parameters,
                "rows": self.rows,
                "response_tokens": self.response_tokens,
                "data": self.data,
                **({"heldout": self.heldout} if self.heldout else {}),
            },
        }


class GateEntropy(EntropyMinimisation):
    """Normalised top-k entropy per response token, the whole Stage-II objective.

    Stage I's control of this objective reads log-probabilities too, for its log. They need the normaliser over the whole
    vocabulary, and are left out here.
    """

    outputs = ("topk_entropy",)


class GateTrainer(StatisticsTrainer):
    """Trains the gates of a LoRA adapter, and nothing else; a subclass of TRL's SFTTrainer.

    `train` checks that the gates start at the adapter, trains, checks that nothing but gates has changed, and leaves a `result`.
    `evaluate` reports the mean loss and top-k entropy over the response tokens of `eval_dataset`. `save_model` writes the gated
    adapter as an artifact (`loragate.save_gates`), and replaces one that it wrote itself. Callbacks, `report_to`, logging,
    checkpoints and `resume_from_checkpoint` work as in transformers; a checkpoint holds the gates, the optimiser and the random
    state.

    Args:
        model: a PeftModel with a plain LoRA adapter, which is gated in place, or one with gates already.
        args: `GateTrainingArguments`.
        data_collator: from rows with input_ids, labels and row to input_ids, attention_mask and labels; None pads on the
            right.
        train_dataset: a `datasets.Dataset` (or list of dicts, or path) with prompt and completion, messages, or another format
            that `loragate.data` knows; or tokenised rows of `loragate.data.encode_rows`, in their order. Nothing about right and
            wrong is needed.
        eval_dataset: the same, or several of them by name.
        processing_class: the tokenizer; None loads that of the base.
        callbacks, optimizers: as in transformers. An optimizer needs the gates before it is made: `attach_gates`, then one over
            `gate_parameters(model).values()`, and no `gates`.
        gates: the gates to attach; None for a model that carries gates, which train on.
        objective: one of your own in place of `args.objective`: a `loragate.losses.WeightedCrossEntropy`, or an object of the
            protocol `loragate.losses.objectives.Objective`.
        adapter_name: of the adapter to gate; None for the active one.
        where: from the index of a tokenised row to the words that name it in messages.

    Attributes:
        result: a `GateTrainingResult` after `train`, else None.

    Raises:
        GateError: if the adapter cannot be gated.
        DataError: if a row cannot be used.
        ConfigError: for gates that start where no gradient moves them, and for what cannot work together.
        TrainingError: if the base is no causal language model.
    """

    def __init__(
        self,
        model: Any,
        args: GateTrainingArguments | None = None,
        data_collator: Callable[[Sequence[Any]], Mapping[str, torch.Tensor]] | None = None,
        train_dataset: RowsGiven | EncodedRows | None = None,
        eval_dataset: RowsGiven | EncodedRows | Mapping[str, Any] | None = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] = (),
        optimizers: tuple[Any, Any] = (None, None),
        *,
        gates: GateConfig | None = None,
        objective: Objective | None = None,
        adapter_name: str | None = None,
        where: Where = "row {}".format,
    ) -> None:
        args = GateTrainingArguments() if args is None else args
        name = active_adapter(model, adapter_name)
        require_causal_model(model, "gates", _OWN_LOOP)
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(causal_model(model).config.name_or_path)
        if gates is not None:
            check_start(gates)
        elif not is_gated(model, name):
            raise ConfigError("the model carries no gates to train: give their range, as in gates=GateConfig(-6, 3)")
        if objective is None:
            # "ce", the paper's ablation, reads the entropy for its log alone
            ablation = replace(sft(), name="ce", k=args.k, reads=("topk_entropy",))
            objective = ablation if args.objective == "ce" else GateEntropy(args.k)
        else:
            check_custom_objective(objective, args)
        rows: Rows | None = None
        if not isinstance(train_dataset, EncodedRows):
            if train_dataset is None:
                raise ConfigError("train_dataset is missing: give rows with prompt and completion, or messages")
            rows = load_rows(train_dataset).shuffled(args.seed if args.data_seed is None else args.data_seed)
            train_dataset, where = encode_rows(rows, processing_class, max_length=args.max_length), rows.where
        self.encoded, self.max_row_tokens = train_dataset, args.max_length
        self.data = {
            "source": "tokenised rows" if rows is None else rows.source,
            "fingerprint": encoded_fingerprint(train_dataset) if rows is None else rows.fingerprint,
        }
        require_mask_column(objective, train_dataset, self.data["source"])
        self.recorded = recorded_arguments(args) | {"objective": objective.name}
        self.k, self.gates_newly_attached = args.k, gates is not None
        self.result: GateTrainingResult | None = None
        self.saved_to: set[Path] = set()
        self.parity: Parity | None = None
        refers = "reference_kl" in objective.requires  # no objective of the paper's
        if refers and (reason := base_unavailable_reason(model, name)):
            raise GateError(f"objective {objective.name!r} needs the base as its reference: {reason}")
        if gates is not None:
            attach_gates(model, gates, name)
        try:
            train_gates_only(model, name)
            trained: dict[str, Any] = dict(gate_parameters(model, name))
            for path, parameter in trained.items():
                if parameter.dtype != torch.float32:
                    raise TrainingError(f"gate {path} is {parameter.dtype}; gates must train in fp32")
            check_fits_model(model, train_dataset, where)
            self.processing_class = processing_class
            super().__init__(
                model,
                args,
                train_dataset,
                objective=objective,
                trained=trained,
                processing_class=processing_class,
                where=where,
                eval_dataset=self._encoded_evaluation(eval_dataset, model, objective),
                data_collator=data_collator,
                reference=base_reference if refers else None,
                adapter_name=name,
                callbacks=callbacks or (),
                optimizers=optimizers,
            )
        except BaseException:
            if gates is not None:
                detach_gates(model, name)
            raise

    def _encoded_evaluation(self, given: Any, model: Any, objective: Objective) -> Any:
        """Evaluation rows tokenised, by name where they have names; None for none. Raises as for rows to train on."""
        if isinstance(given, Mapping):
            return {name: self._encoded_evaluation(rows, model, objective) for name, rows in given.items()}
        source = "eval_dataset"
        if given is not None and not isinstance(given, EncodedRows):
            rows = load_rows(given)
            source = rows.source
            given = encode_rows(rows, self.processing_class, max_length=self.max_row_tokens)
        if given is not None:
            require_mask_column(objective, given, source)
            check_fits_model(model, given, "held-out row {}".format)
        return given

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Mean loss and statistics over the response tokens of `eval_dataset`; None takes that of the trainer.

        Returns:
            {eval_loss, eval_topk_entropy (0 to 1), eval_response_tokens, …}.
        """
        # transformers calls this method with each set of a dict, and with the name of one that the trainer has
        if isinstance(eval_dataset, Mapping):
            eval_dataset = dict(eval_dataset)
        elif eval_dataset is not None and not isinstance(eval_dataset, str):
            encoded = self._encoded_evaluation(eval_dataset, self.original_model, self.objective)
            eval_dataset = self.evaluation_rows(encoded, self.args)
        found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return found

    def measure(self, rows: Sequence[dict[str, Any]]) -> tuple[float, dict[str, dict[str, float]], dict[str, float]]:
        """Normalised top-k entropy over the response tokens of tokenised rows, and λ statistics; see `measure_entropy`."""
        with phase(f"measuring entropy on {len(rows)} examples"), self.accelerator.autocast():
            return measure_entropy(
                self.model, rows, TrainingCollator(self.processing_class), self.k, self.adapter_name or ""
            )

    def check_initial_parity(self) -> None:
        """Measure how the gated model starts, which `train` does before its first step.

        Raises:
            GateError: if λ ≡ 0 and λ ≡ 1 do not act as they must.
            TrainingError: if gates that were attached here do not start at the adapter.
        """
        if self.parity is not None:
            return
        # a few short rows: parity keeps whole logits [rows, tokens, vocabulary] of five forward passes
        few = [
            {key: row[key][:PARITY_TOKENS] for key in ("input_ids", "labels")} | {"row": row["row"]}
            for row in self.encoded[:PARITY_ROWS]
        ]
        batch = TrainingCollator(self.processing_class)(few)
        device = next(self.model.parameters()).device
        parity = measure_parity(
            self.model, batch["input_ids"].to(device), batch["attention_mask"].to(device), self.adapter_name
        )
        if self.gates_newly_attached:
            check_parity(parity, causal_model(self.model).dtype)
        else:
            parity.require_acting(parity.rounding(causal_model(self.model).dtype))
        self.parity = parity
        self.entropy_before, _, _ = self.measure(self.encoded[:MEASURED_ROWS])
        self.frozen_checksum = self._frozen_checksum()

    def _frozen_checksum(self) -> str:
        return weights_checksum(
            (name, parameter) for name, parameter in self.model.named_parameters() if not parameter.requires_grad
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> TrainOutput:
        """Train the gates, without dropout: on the function that will be served. Arguments as in `StatisticsTrainer.train`.

        Raises:
            GateError, TrainingError: as in `check_initial_parity`; also if a frozen weight changed, or a loss or gradient is not
                finite.
        """
        began = time.monotonic()
        if self.state.global_step and not resume_from_checkpoint:  # an earlier training has moved the gates
            self.parity, self.gates_newly_attached = None, False
        self.result = None
        self.check_initial_parity()
        with without_dropout(self.model):
            output = super().train(resume_from_checkpoint, **kwargs)
        # the gates are not in it, but everything that they act through: bit for bit
        if self._frozen_checksum() != self.frozen_checksum:
            raise TrainingError(
                "a frozen weight of the base or the adapter changed during training; the result is not used"
            )
        after, gates, total = self.measure(self.encoded[:MEASURED_ROWS])
        own = None if self.objective.name in GATE_OBJECTIVES else self.objective
        assert self.parity is not None
        self.result = GateTrainingResult(
            history=self.history,
            steps=self.state.global_step,
            seconds=time.monotonic() - began,
            training_seconds=float(output.metrics.get("train_runtime", 0.0)),
            fused_head=self.fused,
            config=attached_config(self.original_model, self.adapter_name),
            settings=self.recorded,
            parity=self.parity,
            entropy_before=self.entropy_before,
            entropy_after=after,
            gates=gates,
            gates_total=total,
            parameters=sum(parameter.numel() for parameter in self.trained.values()),
            rows=len(self.encoded),
            response_tokens=self.encoded.summary.response_tokens,
            data=self.data,
            objective=self.objective.name,
            constants={} if own is None else dict(own.settings),
            own_k=own.k if own is not None and "topk_entropy" in own.outputs else None,
            best_step=self.state.best_global_step if self.args.load_best_model_at_end else None,
        )
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the gated adapter as an artifact (`loragate.save_gates`) with the tokenizer and the record of the training.

        What this trainer wrote into the folder before is replaced, as in transformers; an artifact of anybody else is not.

        Raises:
            ArtifactError: if the folder holds an artifact that this trainer did not write. The gates stay in the model: save them
                to another folder.
        """
        if _internal_call:  # of a checkpoint
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            folder = Path(output_dir or self.args.output_dir).resolve()
            save_gates(
                self.original_model,
                folder,
                self.adapter_name,
                stop_token_ids=find_endings(self.processing_class, self.original_model.generation_config).token_ids,
                evidence=None if self.result is None else self.result.evidence(),
                overwrite=folder in self.saved_to,
            )
            self.saved_to.add(folder)
            save_tokenizer(self.processing_class, folder / "adapter" / "tokenizer")


def train_gates(
    peft_model: Any,
    tokenizer: Any,
    rows: RowsGiven,
    config: GateConfig,
    settings: GateTrainingSettings | None = None,
    *,
    objective: Objective | None = None,
    adapter_name: str | None = None,
    run_folder: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    encoded: EncodedRows | None = None,
    heldout: EncodedRows | None = None,
) -> GateTrainingResult:
    """Attach gates to a loaded adapter and train them, with a `GateTrainer` and a run folder.

    Args:
        peft_model: base with a plain LoRA adapter; gated in place. On an error the gates are taken off again.
        tokenizer: the base's tokenizer, with a chat template if the rows are conversations.
        rows: prompts and responses in any of the known formats, or the path or hub id of a file with them; nothing about right
            and wrong is needed.
        config: the gates.
        settings: the training; the paper's values by default.
        objective: one of your own in place of `settings.objective`: a `loragate.losses.WeightedCrossEntropy`, or an object of
            the protocol `loragate.losses.objectives.Objective`. It reads the rows' responses; where it requires "reference_kl",
            also the KL to the base, which is the model with the adapter off. `settings.k` stays the support of the entropies
            before and after.
        adapter_name: None for the active adapter.
        run_folder: for the record, the log and checkpoints; None keeps nothing but the result.
        resume: continue the run in `run_folder`.
        overwrite: remove an earlier run in `run_folder`, finished or not, and begin anew.
        on_step: progress callback, after every optimiser step.
        encoded: rows already tokenised (`loragate.data.encode_rows`) in the order and number to be used, to share the work
            between trainings.
        heldout: tokenised rows that are not trained on; entropy is measured on all of them too, before and after.

    Returns:
        The result; `loragate.save_gates` writes the model as an artifact.

    Raises:
        GateError: if the adapter cannot be gated, or λ ≡ 0 and λ ≡ 1 do not act as they must.
        DataError: if a row cannot be used.
        ConfigError: for an objective of one's own that the settings contradict; gates that start where no gradient moves them.
        TrainingError: if the base is no causal language model, the gates do not start at the adapter, a frozen weight
            changed, or the loss is not finite.
    """
    began, settings = time.monotonic(), settings or GateTrainingSettings()
    if objective is not None:
        check_custom_objective(objective, settings)
    name = active_adapter(peft_model, adapter_name)
    require_causal_model(peft_model, "gates", _OWN_LOOP)
    check_start(config)
    with training_folder(run_folder, resume, overwrite) as folder:
        source = load_rows(rows)
        check_encoded_matches_rows(encoded, source)
        if encoded is None:
            source, encoded = training_rows(source, tokenizer, settings)
        if objective is not None:
            require_mask_column(objective, encoded, source.source)
        # run.json and the artifact get what was done
        base, lengths = causal_model(peft_model), encoded.arrays["lengths"]
        support = settings.k if objective is None else objective.k
        settings = fit_passes(settings, lengths, base, objective, support, folder.recorded_pass_rows)
        chosen = {"k": settings.k, "objective": settings.objective}
        device = target_device(peft_model).type
        arguments = build_trainer_arguments(
            GateTrainingArguments, settings, folder, len(encoded), device, max_length=settings.max_length, **chosen
        )
        trainer = GateTrainer(
            peft_model,
            arguments,
            train_dataset=encoded,
            eval_dataset=heldout,
            processing_class=tokenizer,
            gates=config,
            objective=objective,
            adapter_name=name,
            where=source.where,
        )
        try:
            trainer.check_initial_parity()
            trainer.recorded = {**settings.as_record(), "objective": trainer.objective.name}
            trainer.data = {"source": source.source, "fingerprint": source.fingerprint}
            before = math.nan if heldout is None else trainer.measure(heldout[:])[0]
            identity = {
                "stage": "gates",
                "settings": trainer.recorded,
                "gate": asdict(config),
                "data": source.as_record(),
                "tokens": encoded_fingerprint(encoded),
                "adapter_sha256": adapter_fingerprint(trainer.model, name),
                "frozen_weights": trainer.frozen_checksum,  # also what tells one base, with its adapter, from another
                **({} if objective is None else {"constants": objective.settings}),
                **({} if trainer.reference is None else {"reference": "base"}),
            }
            run_in_folder(trainer, folder, identity, on_step)
            assert trainer.result is not None
            apart: dict[str, float] = {}
            if heldout is not None:
                after = trainer.measure(heldout[:])[0]
                apart = {"rows": len(heldout), "entropy_before": before, "entropy_after": after}
            return replace(trainer.result, seconds=time.monotonic() - began, heldout=apart)
        except BaseException:
            detach_gates(peft_model, name)
            raise
        finally:
            trainer.close()


def check_start(config: GateConfig) -> None:
    """Raises ConfigError for gates that training could not move: a logit of zero is on the branch to U, which is flat at U = 1."""
    if config.init_scale == 0 and config.upper == 1:
        raise ConfigError(
            "init_scale=0 with an upper bound of 1 starts every gate where its gradient is exactly zero, so training would "
            "change nothing: set init_scale above 0 (1e-6 by default), or the upper bound above 1"
        )


def check_parity(parity: Parity, dtype: torch.dtype) -> None:
    """Refuse (GateError, TrainingError) to train gates that do not start at the adapter.

    The initial gates may move logits by 1e-3 plus 1 % of the adapter's own effect. In half precision, λ may be 0.01 away from
    1: layers carry the rounding of any difference on, and λ − 1 = 6e-5 moves logits of 45 by 1.4 in thirty of them.
    """
    parity.require_acting(parity.rounding(dtype))
    # `initial` is the largest difference of a logit, `delta` the same between adapter and base
    found, limit, what = parity.initial, 1e-3 + 0.01 * parity.delta, "logits differ by"
    if dtype in (torch.bfloat16, torch.float16) and math.isfinite(found):
        found, limit, what = parity.apart, 0.01, "λ differs from 1 by"
    if not found <= limit:  # NaN is not below the limit either
        raise TrainingError(
            f"the gated model does not start at the adapter: {what} {found:.2g} (limit {limit:.2g}); make init_scale smaller"
        )


@torch.no_grad()
def measure_entropy(
    model: Any,
    rows: Sequence[dict[str, Any]],
    collator: Callable[[Sequence[Any]], Mapping[str, torch.Tensor]],
    k: int,
    adapter_name: str,
) -> tuple[float, dict[str, dict[str, float]], dict[str, float]]:
    """Normalised top-k entropy over the response tokens of the rows, and λ statistics at the positions that predict them.

    Returns:
        (mean entropy, {module: statistics}, statistics over all modules).
    """
    device = next(model.parameters()).device
    rows = sorted(rows, key=lambda row: len(row["input_ids"]))  # rows of about one length waste no pass on padding
    total = count = 0.0
    with evaluation_mode(model), statistics_forward(model), record_gates(model, adapter_name) as recording:
        for members in iter_passes(causal_model(model), [len(row["input_ids"]) for row in rows], 8):
            batch = {key: value.to(device) for key, value in collator([rows[index] for index in members]).items()}
            recording.token_mask = predicting_mask(batch)
            stats = model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                labels=batch["labels"],
                statistics=StatisticsRequest(k, ("topk_entropy",), ()),
            )
            # zero where no label is
            total += float(stats.topk_entropy.sum())
            count += float(stats.mask.sum())
    if count == 0:
        raise ConfigError("no response token in the measured rows; the responses are empty or cut by max_length")
    return total / count, recording.statistics(), recording.total()
