"""Stage I: train a LoRA or DoRA adapter with one of the token objectives."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from loragate.data import EncodedRows, Rows, encode_rows, load_rows
from loragate.errors import ConfigError, nearest
from loragate.gates.fingerprint import base_weight_samples, config_fingerprint
from loragate.losses import StatisticsRequest
from loragate.losses.objectives import FACTORIES, WeightedCrossEntropy
from loragate.training.run import OnStep, TrainingJob, encoded_fingerprint, require_short_enough, run_training
from loragate.training.settings import StageOneSettings


@dataclass(frozen=True)
class StageOneResult:
    """A trained adapter on its base, with the run's log."""

    model: Any
    settings: StageOneSettings
    history: list[dict[str, Any]]
    steps: int
    seconds: float
    rows: int
    response_tokens: int
    data: dict[str, Any]


def objective_of(settings: StageOneSettings) -> WeightedCrossEntropy:
    """The objective with its options.

    Raises:
        ConfigError: for an option the objective does not have, or a value it refuses.
    """
    factory = FACTORIES[settings.objective]
    options = settings.objective_options or {}
    known = list(inspect.signature(factory).parameters)
    for name in options:
        if name not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(
                f"objective {settings.objective!r} has no option {name!r}{nearest(name, known)} (it has {listed})"
            )
    return factory(**options)


def build_adapter(base_model: Any, settings: StageOneSettings, adapter_name: str = "default") -> Any:
    """A fresh adapter on `base_model`; the seed is set immediately before its factors are drawn."""
    targets: str | list[str] = settings.target_modules
    if targets != "all-linear":
        targets = [name.strip() for name in settings.target_modules.split(",") if name.strip()]
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        use_dora=settings.dora,
        use_rslora=settings.rslora,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(settings.seed)
    try:
        return get_peft_model(base_model, config, adapter_name=adapter_name)
    except ValueError as error:
        if "arget modules" not in str(error):
            raise
        names = sorted(
            {name.rsplit(".", 1)[-1] for name, module in base_model.named_modules() if isinstance(module, nn.Linear)}
        )
        raise ConfigError(
            f"target_modules {settings.target_modules!r} matches no module of the base; its linear layers end in "
            + ", ".join(names)
        ) from error


def train_adapter(
    base_model: Any,
    tokenizer: Any,
    rows: Rows | Sequence[dict[str, Any]],
    settings: StageOneSettings | None = None,
    *,
    run_folder: str | Path | None = None,
    resume: bool = False,
    on_step: OnStep | None = None,
    encoded: EncodedRows | None = None,
) -> StageOneResult:
    """Train an adapter on all response tokens of the rows.

    Args:
        base_model: a causal LM without adapters.
        tokenizer: its tokenizer.
        rows: in any of the known formats; objective "mask" needs a keep_mask column.
        settings: the paper's values by default.
        run_folder, resume, on_step: as in `calibrate`.
        encoded: rows already tokenised, in training order.

    Returns:
        The PeftModel with its log; `model.save_pretrained(folder)` writes an ordinary PEFT adapter.

    Raises:
        DataError, TrainingError: as in `calibrate`.
    """
    settings = settings or StageOneSettings()
    source = rows if isinstance(rows, Rows) else load_rows(list(rows))
    if encoded is None:
        source = source.shuffled(settings.seed)
        encoded = encode_rows(source, tokenizer, max_length=settings.max_length)
    objective = objective_of(settings)
    require_short_enough(base_model, encoded, source)
    base = {"config": config_fingerprint(base_model), "weights": base_weight_samples(base_model)}
    model = build_adapter(base_model, settings)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    wanted = ("log_prob", "topk_entropy") if objective.reads_entropy else ("log_prob",)
    job = TrainingJob(
        model=model,
        tokenizer=tokenizer,
        encoded=encoded,
        rows=source,
        settings=settings,
        token_loss=objective.loss,
        request=StatisticsRequest(objective.k, wanted, ("log_prob",)),
        trained=trained,
        identity={
            "stage": "sft",
            "settings": asdict(settings),
            "data": source.fingerprint,
            "tokens": encoded_fingerprint(encoded),
            "base": base,
        },
    )
    outcome = run_training(job, None if run_folder is None else Path(run_folder), resume=resume, on_step=on_step)
    return StageOneResult(
        model=model,
        settings=settings,
        history=outcome.history,
        steps=outcome.steps,
        seconds=outcome.seconds,
        rows=len(encoded),
        response_tokens=encoded.summary.response_tokens,
        data={"source": source.source, "fingerprint": source.fingerprint},
    )
