"""Stage II: train gates on a frozen base and adapter by minimising top-k predictive entropy (eq:rw-topk).

Guarded on both sides: parity with the Stage-I model is measured before the first step, everything but the gates is
hashed before and after, and the training loss is never taken as evidence of success.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loragate.data import Collator, EncodedRows, Rows, encode_rows, load_rows
from loragate.errors import ConfigError, TrainingError
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
    train_gates_only,
    weights_checksum,
)
from loragate.losses import ObjectiveContext, StatisticsRequest, TokenStatistics
from loragate.training.run import (
    OnStep,
    TrainingJob,
    collator_for,
    encoded_fingerprint,
    require_short_enough,
    run_training,
)
from loragate.training.settings import CalibrationSettings
from loragate.training.trainer import causal_model, statistics_forward

MEASURED_ROWS = 64
PARITY_ROWS, PARITY_TOKENS = 4, 256


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration did, in numbers.

    Attributes:
        config, settings: as asked for.
        parity: gated model against adapter and base before the first step.
        entropy_before, entropy_after: normalised top-k entropy (0 to 1) on the first rows, teacher-forced. A fall says
            that the objective was met, not that answers improved.
        gates: {module path: λ statistics} over the response tokens of those rows, after training.
        gates_total: the same over all modules.
        history: log records of the run.
        steps, seconds, parameters, rows, response_tokens: size and cost.
        data: source and fingerprint of the rows.
        fused_head: whether the fused head served (False: full logits).
    """

    config: GateConfig
    settings: CalibrationSettings
    parity: Parity
    entropy_before: float
    entropy_after: float
    gates: dict[str, dict[str, float]]
    gates_total: dict[str, float]
    history: list[dict[str, Any]]
    steps: int
    seconds: float
    parameters: int
    rows: int
    response_tokens: int
    data: dict[str, Any]
    fused_head: bool

    def evidence(self) -> dict[str, Any]:
        """The JSON-able record that goes into the artifact."""
        return {
            "parity": self.parity.as_dict(),
            "training": {
                "settings": asdict(self.settings),
                "entropy_before": self.entropy_before,
                "entropy_after": self.entropy_after,
                "gates": self.gates_total,
                "steps": self.steps,
                "seconds": round(self.seconds, 1),
                "parameters": self.parameters,
                "rows": self.rows,
                "response_tokens": self.response_tokens,
                "data": self.data,
            },
        }


def entropy_loss(stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
    """Normalised top-k entropy per response token, the whole Stage-II objective."""
    return stats.topk_entropy


def calibrate(
    peft_model: Any,
    tokenizer: Any,
    rows: Rows | Sequence[dict[str, Any]],
    config: GateConfig,
    settings: CalibrationSettings | None = None,
    *,
    adapter_name: str | None = None,
    run_folder: str | Path | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
    encoded: EncodedRows | None = None,
) -> CalibrationResult:
    """Attach gates to a loaded adapter and train them.

    Args:
        peft_model: base with a plain LoRA adapter; gated in place. On an error the gates are taken off again.
        tokenizer: the base's tokenizer, with a chat template if the rows are conversations.
        rows: prompts and responses in any of the known formats; nothing about right and wrong is needed.
        config: the gates.
        settings: the training; the paper's values by default.
        adapter_name: None for the active adapter.
        run_folder: for the log and checkpoints; None keeps nothing but the result.
        resume: continue the run in `run_folder`.
        on_step: progress callback.
        encoded: rows already tokenised in the order and number to be used, to share the work between calibrations.

    Returns:
        The result; `loragate.save_gates` writes the model as an artifact.

    Raises:
        GateError: if the adapter cannot be gated.
        DataError: if a row cannot be used.
        TrainingError: if parity fails, a frozen weight changed, or the loss is not finite.
    """
    settings = settings or CalibrationSettings()
    name = active_adapter(peft_model, adapter_name)
    source = rows if isinstance(rows, Rows) else load_rows(list(rows))
    if encoded is None:
        source, encoded = calibration_rows(source, tokenizer, settings)
    attach_gates(peft_model, config, name)
    try:
        return _calibrate(peft_model, tokenizer, source, encoded, config, settings, name, run_folder, resume, on_step)
    except BaseException:
        detach_gates(peft_model, name)
        raise


def calibration_rows(
    source: Rows, tokenizer: Any, settings: CalibrationSettings, system: str = "none"
) -> tuple[Rows, EncodedRows]:
    """The rows of a calibration in training order: seeded shuffle, first `max_rows`, tokenised."""
    chosen = source.shuffled(settings.seed)
    if settings.max_rows:
        chosen = chosen.take(settings.max_rows)
    return chosen, encode_rows(chosen, tokenizer, max_length=settings.max_length, system=system)


def _calibrate(
    model: Any,
    tokenizer: Any,
    rows: Rows,
    encoded: EncodedRows,
    config: GateConfig,
    settings: CalibrationSettings,
    name: str,
    run_folder: str | Path | None,
    resume: bool,
    on_step: OnStep | None,
) -> CalibrationResult:
    began = time.monotonic()
    require_short_enough(model, encoded, rows)
    collator = collator_for(tokenizer)
    batch = collator([_cut(row, PARITY_TOKENS) for row in list(encoded)[:PARITY_ROWS]])
    device = next(model.parameters()).device
    parity = measure_parity(model, batch["input_ids"].to(device), batch["attention_mask"].to(device), name)
    check_parity(parity, causal_model(model).dtype)
    vocabulary = causal_model(model).get_output_embeddings().weight.shape[0]
    request = StatisticsRequest(min(settings.k, vocabulary), ("topk_entropy",), ("topk_entropy",))
    before, _, _ = measure_entropy(model, encoded, collator, request.k, name)

    train_gates_only(model, name)
    trained: dict[str, Any] = dict(gate_parameters(model, name))
    require_only_gates_train(model, trained)
    frozen = weights_checksum(_frozen(model))
    job = TrainingJob(
        model=model,
        tokenizer=tokenizer,
        encoded=encoded,
        rows=rows,
        settings=settings,
        token_loss=entropy_loss,
        request=request,
        trained=trained,
        identity={
            "stage": "calibrate",
            "settings": asdict(settings),
            "gate": asdict(config),
            "data": rows.fingerprint,
            "tokens": encoded_fingerprint(encoded),
            "adapter_sha256": adapter_fingerprint(model, name),
            "frozen_weights": frozen,
        },
        recorder=lambda: record_gates(model, name),
        check_gradient=True,
    )
    with without_dropout(model):
        outcome = run_training(job, None if run_folder is None else Path(run_folder), resume=resume, on_step=on_step)
    if weights_checksum(_frozen(model)) != frozen:
        raise TrainingError(
            "a frozen weight of the base or the adapter changed during calibration; the result is not used"
        )
    after, statistics, total = measure_entropy(model, encoded, collator, request.k, name)
    return CalibrationResult(
        config=config,
        settings=settings,
        parity=parity,
        entropy_before=before,
        entropy_after=after,
        gates=statistics,
        gates_total=total,
        history=outcome.history,
        steps=outcome.steps,
        seconds=time.monotonic() - began,
        parameters=sum(parameter.numel() for parameter in trained.values()),
        rows=len(encoded),
        response_tokens=encoded.summary.response_tokens,
        data={"source": rows.source, "fingerprint": rows.fingerprint},
        fused_head=outcome.fused_head,
    )


def check_parity(parity: Parity, dtype: torch.dtype) -> None:
    """Refuse to train gates that do not start at the adapter.

    In fp32, λ ≡ 1 must give the adapter and λ ≡ 0 the base up to 1e-6 of the logits, and the initial gates may move
    logits by 1e-3 plus 1 % of the adapter's own effect. Half precision is judged against its own rounding.

    Raises:
        TrainingError: with the measured figures.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    rounding = (2.0**-6 if half else 1e-6) * max(parity.logit_scale, 1.0)
    if not (parity.at_one <= rounding and parity.at_zero <= rounding):
        raise TrainingError(
            f"the gates do not act as they must: λ = 1 differs from the adapter by {parity.at_one:.2g} and λ = 0 from the "
            f"base by {parity.at_zero:.2g} in logits (limit {rounding:.2g}). Another library may run LoRA layers through its "
            "own kernels; load the model without them"
        )
    limit = 1e-3 + 0.01 * parity.delta + (rounding if half else 0.0)
    if not parity.initial <= limit:
        raise TrainingError(
            f"the gated model does not start at the adapter: logits differ by {parity.initial:.2g} (limit {limit:.2g}); "
            "make init_scale smaller"
        )


def require_only_gates_train(model: Any, trained: dict[str, Any]) -> None:
    """Raises TrainingError unless exactly the gates require a gradient, in fp32."""
    allowed = {id(parameter) for parameter in trained.values()}
    extra = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in allowed
    ]
    if extra:
        raise TrainingError(f"{extra[0]} would train in Stage II, where only gates may")
    wrong = [
        name for name, parameter in trained.items() if parameter.dtype != torch.float32 or not parameter.requires_grad
    ]
    if wrong:
        raise TrainingError(f"gate {wrong[0]} is {trained[wrong[0]].dtype} or frozen; gates must train in fp32")


@torch.no_grad()
def measure_entropy(
    model: Any, encoded: EncodedRows, collator: Collator, k: int, adapter_name: str, limit: int = MEASURED_ROWS
) -> tuple[float, dict[str, dict[str, float]], dict[str, float]]:
    """Normalised top-k entropy over the response tokens of the first rows, and λ statistics there.

    Returns:
        (mean entropy, {module: statistics}, statistics over all modules).
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = count = 0.0
    chosen = list(encoded)[:limit]
    try:
        with statistics_forward(model), record_gates(model, adapter_name) as recording:
            for at in range(0, len(chosen), 8):
                batch = {key: value.to(device) for key, value in collator(chosen[at : at + 8]).items()}
                recording.token_mask = batch["labels"].ne(-100)
                stats = model(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    labels=batch["labels"],
                    statistics=StatisticsRequest(k, ("topk_entropy",), ()),
                )
                total += float(stats.topk_entropy.sum())
                count += float(stats.mask.sum())
    finally:
        model.train(was_training)
    if count == 0:
        raise ConfigError("no response token in the measured rows; the responses are empty or cut by max_length")
    return total / count, recording.statistics(), recording.total()


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """No dropout inside the context: Stage II trains on the function that will be served."""
    changed: list[tuple[torch.nn.Module, str, float]] = []
    for module in model.modules():
        # attention dropout is a plain number on the attention modules of transformers
        for name in ("p", "attention_dropout"):
            value = getattr(module, name, None)
            if (isinstance(module, torch.nn.Dropout) or name != "p") and isinstance(value, float) and value > 0:
                changed.append((module, name, value))
                setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def _cut(row: dict[str, Any], length: int) -> dict[str, Any]:
    return {key: value[:length] if isinstance(value, list) else value for key, value in row.items()}


def _frozen(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if not parameter.requires_grad]
