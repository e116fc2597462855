"""Stage II: train gates on a frozen base and adapter by minimising top-k predictive entropy (eq:rw-topk).

Guarded on both sides: parity with the Stage-I model is measured before the first step, everything but the gates is
hashed before and after, and the training loss is never taken as evidence of success. The objectives "anchored" and
"reward" are extensions of ours: they share all of this, but train on sampled answers (`on_policy.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loragate.data import EncodedRows, Rows, encode_rows, load_rows
from loragate.data.loading import RowsGiven
from loragate.errors import ConfigError, TrainingError
from loragate.gates import (
    GateConfig,
    Parity,
    active_adapter,
    adapter_fingerprint,
    attach_gates,
    detach_gates,
    draw_gates,
    gate_parameters,
    measure_parity,
    train_gates_only,
    weights_checksum,
)
from loragate.losses import verify_head
from loragate.losses.causal_head import causal_model
from loragate.losses.objectives import EntropyMinimisation, Objective, sft
from loragate.training.callbacks import OnStep
from loragate.training.checks import (
    MEASURED_ROWS,
    check_callables,
    check_parity,
    check_start,
    measure_entropy,
    require_causal_model,
    require_only_gates_train,
)
from loragate.training.guards import Guard, GuardLimits
from loragate.training.model_state import without_dropout
from loragate.training.on_policy import run_on_policy
from loragate.training.rollouts import Reward, Sampler
from loragate.training.rows import (
    collator_for,
    encoded_fingerprint,
    require_encoded,
    require_mask_column,
    require_short_enough,
)
from loragate.training.run import require_own, run_training
from loragate.training.run_folder import prepare_folder, run_folder_given
from loragate.training.settings import GATE_OBJECTIVES, GateTrainingSettings
from loragate.training.sharding import spread
from loragate.training.strategy import launch_of
from loragate.training.trainer import Job, TrainingOutcome

PARITY_ROWS, PARITY_TOKENS = 4, 256


@dataclass(frozen=True, kw_only=True)
class GateTrainingResult(TrainingOutcome):
    """What a calibration did, in numbers.

    Attributes:
        config, settings: as asked for.
        parity: gated model against adapter and base before the first step.
        entropy_before, entropy_after: normalised top-k entropy (0 to 1) on the first rows, teacher-forced. A fall says
            that the objective was met, not that answers improved. After a run that paused at its `share` it is not measured:
            NaN, and there are no λ statistics.
        gates: {module path: λ statistics} over the response tokens of those rows, after training.
        gates_total: the same over all modules.
        history: log records of the run.
        steps, seconds, parameters, rows, response_tokens: size and cost.
        training_seconds: of the training loop alone, as Stage I's `seconds` are, and since the last resume.
        heldout: rows of `heldout`, and the entropy on them before and after; empty without.
        data: source and fingerprint of the rows.
        fused_head: whether the fused head served (False: full logits).
        stopped: None, or the guard's sentence that says why training ended early; the gates are those of that step.
        guard: readings of the guard, the first one of the starting adapter.
        sampled: answers, tokens and seconds of sampling, where the objective samples.
        objective: what trained the gates: `settings.objective`, or the name of an objective of one's own.
        constants: those of an objective of one's own.
        own_k: its support of the top-k entropy; None where it reads none.
    """

    config: GateConfig
    settings: GateTrainingSettings
    parity: Parity
    entropy_before: float
    entropy_after: float
    gates: dict[str, dict[str, float]]
    gates_total: dict[str, float]
    parameters: int
    rows: int
    response_tokens: int
    data: dict[str, Any]
    stopped: str | None
    guard: list[dict[str, Any]]
    training_seconds: float
    heldout: dict[str, float]
    objective: str
    constants: dict[str, Any]
    own_k: int | None

    def evidence(self) -> dict[str, Any]:
        """The JSON-able record that goes into the artifact."""
        watched = {"stopped": self.stopped, "guard": self.guard} if self.guard else {}
        return {
            "parity": asdict(self.parity),
            "training": {
                "settings": {**self.settings.as_record(), "objective": self.objective},
                **({"constants": self.constants} if self.constants else {}),
                **({} if self.objective in GATE_OBJECTIVES else {"k": self.own_k}),
                "entropy_before": self.entropy_before,
                "entropy_after": self.entropy_after,
                "gates": self.gates_total,
                "steps": self.steps,
                "seconds": round(self.seconds, 1),
                "training_seconds": round(self.training_seconds, 1),
                "parameters": self.parameters,
                "rows": self.rows,
                "response_tokens": self.response_tokens,
                "data": self.data,
                **({"heldout": self.heldout} if self.heldout else {}),
                **({"sampled": self.sampled} if self.sampled else {}),
                **watched,
            },
        }


class GateEntropy(EntropyMinimisation):
    """Normalised top-k entropy per response token, the whole Stage-II objective.

    Stage I's control of this objective reads log-probabilities too, for its log. They need the normaliser over the whole
    vocabulary, and are left out here.
    """

    outputs = ("topk_entropy",)


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
    on_step: OnStep | None = None,
    share: float = 1.0,
    encoded: EncodedRows | None = None,
    heldout: EncodedRows | None = None,
    sampler: Sampler | None = None,
    reward: Reward | None = None,
    guard: GuardLimits | None = None,
) -> GateTrainingResult:
    """Attach gates to a loaded adapter and train them.

    Args:
        peft_model: base with a plain LoRA adapter; gated in place. On an error the gates are taken off again.
        tokenizer: the base's tokenizer, with a chat template if the rows are conversations.
        rows: prompts and responses in any of the known formats, or the path or hub id of a file with them; nothing about right
            and wrong is needed.
        config: the gates.
        settings: the training; the paper's values by default.
        objective: one of your own in place of `settings.objective`: a `loragate.losses.WeightedCrossEntropy`, or an object of
            the protocol `loragate.losses.objectives.Objective`. It reads the rows' responses and no reference model;
            `settings.k` stays the support of the entropies before and after.
        adapter_name: None for the active adapter.
        run_folder: for the log and checkpoints; None keeps nothing but the result.
        resume: continue the run in `run_folder`.
        on_step: progress callback, after every optimiser step.
        share: of the steps to take, above 0; below 1 the run pauses then, and `resume` goes on from its `run_folder`.
        encoded: rows already tokenised (`loragate.data.encode_rows`) in the order and number to be used, to share the work
            between calibrations.
        heldout: tokenised rows that are not trained on; entropy is measured on all of them too, before and after.
        sampler: draws the answers of the objectives anchored and reward with the gates as they are at the call; None
            samples with transformers from the model in memory.
        reward: (row, answer text, finished) to a number, for the objective reward.
        guard: limits on what the answers that anchored and reward sample may come to look like; training ends early beyond
            them, see `GateTrainingResult.stopped`.

    Returns:
        The result; `loragate.save_gates` writes the model as an artifact.

    Raises:
        GateError: if the adapter cannot be gated, or λ ≡ 0 and λ ≡ 1 do not act as they must.
        DataError: if a row cannot be used.
        ConfigError: for a callable that the objective would not use, or one that it lacks; an objective of one's own that
            the settings contradict; gates that start where no gradient moves them.
        TrainingError: if the base is no causal language model, the gates do not start at the adapter, a frozen weight
            changed, or the loss is not finite.
    """
    began, settings = time.monotonic(), settings or GateTrainingSettings()
    folder = run_folder_given(run_folder, resume)
    if objective is not None:
        require_own(objective, settings)
    trained_by = settings.objective if objective is None else objective.name
    if not 0 < share <= 1 or (share < 1 and folder is None):
        raise ConfigError(
            f"share={share} must be above 0 and at most 1, and below 1 it needs run_folder, to go on from"
        )
    check_callables(trained_by, settings.on_policy, sampler, reward, guard)
    check_start(config, trained_by)
    watch = None if guard is None else Guard(guard)
    name = active_adapter(peft_model, adapter_name)
    require_causal_model(causal_model(peft_model))
    source = load_rows(rows)
    require_encoded(encoded, source)
    if encoded is None:
        source, encoded = training_rows(source, tokenizer, settings)
    settings = settings.fitted(len(encoded), launch_of().processes)  # run.json and the artifact get what was done
    if objective is not None:
        require_mask_column(objective, encoded, source)
    with _gated(peft_model, config, name) as model:
        require_short_enough(model, encoded, source.where)
        if heldout is not None:
            require_short_enough(model, heldout, "held-out row {}".format)
        collator = collator_for(tokenizer)
        # a few short rows: parity keeps whole logits [rows, tokens, vocabulary] of five forward passes
        few = [
            {key: row[key][:PARITY_TOKENS] for key in ("input_ids", "labels")} | {"row": row["row"]}
            for row in encoded[:PARITY_ROWS]
        ]
        batch, device = collator(few), next(model.parameters()).device
        parity = measure_parity(model, batch["input_ids"].to(device), batch["attention_mask"].to(device), name)
        check_parity(parity, causal_model(model).dtype)
        measured = partial(measure_entropy, model, collator=collator, k=settings.k, adapter_name=name)
        before, _, _ = measured(encoded[:MEASURED_ROWS])
        apart = {} if heldout is None else {"rows": len(heldout), "entropy_before": measured(heldout[:])[0]}

        train_gates_only(model, name)
        trained: dict[str, Any] = dict(gate_parameters(model, name))
        require_only_gates_train(model, trained)
        frozen = _frozen_checksum(model)  # also what tells one base, with its adapter, from another on resume
        identity = {
            "stage": "calibrate",
            "settings": {**settings.as_record(), "objective": trained_by},
            "gate": asdict(config),
            "data": source.as_record(),
            "tokens": encoded_fingerprint(encoded),
            "adapter_sha256": adapter_fingerprint(model, name),
            "frozen_weights": frozen,
            **({} if guard is None else {"guard": asdict(guard)}),
            **({} if objective is None else {"constants": objective.settings}),
        }
        steps = settings.steps(len(encoded))
        until = math.ceil(share * steps)
        job = Job(
            model=model,
            tokenizer=tokenizer,
            encoded=encoded,
            rows=source,
            settings=settings,
            trained=trained,
            identity=identity,
            folder=folder,
            resume=resume,
            on_step=on_step,
            until=until,
            adapter_name=name,
        )
        with without_dropout(model):
            if settings.objective == "random":
                prepare_folder(identity, folder, resume)
                draw_gates(model, settings.seed, settings.random_scale, name)
                outcome = TrainingOutcome([], 0, 0.0, verify_head(causal_model(model)))
            elif settings.on_policy:
                outcome = run_on_policy(job, sampler, reward, watch)
            else:
                # "ce", the paper's ablation, reads the entropy for its log alone
                named = replace(sft(), name="ce", k=settings.k, reads=("topk_entropy",))
                chosen = objective or (named if settings.objective == "ce" else GateEntropy(settings.k))
                outcome = run_training(job, chosen)
        # the gates are not in it, but everything that they act through: bit for bit
        if _frozen_checksum(model) != frozen:
            raise TrainingError(
                "a frozen weight of the base or the adapter changed during calibration; the result is not used"
            )
        paused = outcome.steps == until < steps
        after, statistics, total = (math.nan, {}, {}) if paused else measured(encoded[:MEASURED_ROWS])
        if heldout is not None:
            apart["entropy_after"] = math.nan if paused else measured(heldout[:])[0]
        return GateTrainingResult(
            **{**vars(outcome), "seconds": time.monotonic() - began},
            config=config,
            settings=settings,
            parity=parity,
            entropy_before=before,
            entropy_after=after,
            gates=statistics,
            gates_total=total,
            parameters=sum(parameter.numel() for parameter in trained.values()),
            rows=len(encoded),
            response_tokens=encoded.summary.response_tokens,
            data={"source": source.source, "fingerprint": source.fingerprint},
            stopped=None if watch is None else watch.verdict,
            guard=[] if watch is None else watch.as_records(),
            training_seconds=outcome.seconds,
            heldout=apart,
            objective=trained_by,
            constants={} if objective is None else dict(objective.settings),
            own_k=objective.k if objective is not None and "topk_entropy" in objective.outputs else None,
        )


@contextmanager
def _gated(peft_model: Any, config: GateConfig, name: str) -> Iterator[Any]:
    """The model to train, with gates; on an error they are taken off again."""
    attach_gates(peft_model, config, name)
    try:
        # under FSDP2 every forward pass, those of the measurements too, runs on the sharded twin
        with spread(peft_model) as model:
            yield model
    except BaseException:
        detach_gates(peft_model, name)
        raise


def _frozen_checksum(model: Any) -> str:
    return weights_checksum(
        (name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad
    )


def training_rows(
    source: Rows, tokenizer: Any, settings: GateTrainingSettings, system: str = "none", **how: Any
) -> tuple[Rows, EncodedRows]:
    """The rows of a calibration in training order: seeded shuffle, first `max_rows`, tokenised.

    `how` goes on to `encode_rows`: on_progress.
    """
    chosen = source.shuffled(settings.seed)
    if settings.max_rows:
        chosen = chosen.take(settings.max_rows)
    return chosen, encode_rows(chosen, tokenizer, max_length=settings.max_length, system=system, **how)
