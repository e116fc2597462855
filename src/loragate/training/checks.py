"""What Stage II checks and measures around its training, whichever objective trains the gates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from loragate.data import Collator
from loragate.errors import ConfigError, TrainingError
from loragate.gates import GateConfig, Parity, record_gates
from loragate.gates.eligibility import output_head
from loragate.losses import StatisticsRequest
from loragate.modes import evaluation_mode
from loragate.training.model_state import statistics_forward

MEASURED_ROWS = 64


def check_callables(objective: str, on_policy: bool, sampler: Any, reward: Any, guard: Any) -> None:
    """Raises ConfigError for a callable that is missing or has no effect, and for a guard that has nothing to read; None is what
    was not given."""
    if objective == "reward" and reward is None:
        raise ConfigError("the objective 'reward' needs a reward: a callable (row, text, finished) -> float")
    if reward is not None and objective != "reward":
        raise ConfigError(f"a reward has no effect on the objective {objective!r}; set objective='reward'")
    if sampler is not None and not on_policy:
        raise ConfigError(f"a sampler has no effect on the objective {objective!r}, which trains on the given rows")
    if guard is not None and not on_policy:
        raise ConfigError(
            f"a guard has no effect on the objective {objective!r}, which samples no answers that it could read"
        )


def check_start(config: GateConfig, objective: str) -> None:
    """Raises ConfigError for gates that training could not move: a logit of zero is on the branch to U, which is flat at U = 1."""
    if config.init_scale == 0 and config.upper == 1 and objective != "random":
        raise ConfigError(
            "init_scale=0 with an upper bound of 1 starts every gate where its gradient is exactly zero, so training would "
            "change nothing: set init_scale above 0 (1e-6 by default), or the upper bound above 1"
        )


def check_parity(parity: Parity, dtype: torch.dtype) -> None:
    """Refuse to train gates that do not start at the adapter.

    The initial gates may move logits by 1e-3 plus 1 % of the adapter's own effect. In half precision, λ may be 0.01 away from
    1: layers carry the rounding of any difference on, and λ − 1 = 6e-5 moves logits of 45 by 1.4 in thirty of them.

    Raises:
        GateError: as in `Parity.require_acting`.
        TrainingError: with the measured figures.
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


def require_causal_model(model: Any) -> None:
    """Raises TrainingError for a model that predicts no next token from logits [batch, sequence, vocabulary]."""
    encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if encoder or output_head(model) is None:
        what = "an encoder and a decoder" if encoder else "no output head over the vocabulary"
        raise TrainingError(
            f"calibrate trains gates of causal language models, and {type(model).__name__} has {what}. attach_gates works on it; "
            "train its gates in a loop of your own"
        )


def require_only_gates_train(model: Any, trained: dict[str, Any]) -> None:
    """Raises TrainingError unless exactly the gates require a gradient, in fp32."""
    # by identity: a parameter has another name inside each wrapper
    allowed = {id(parameter) for parameter in trained.values()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in allowed:
            raise TrainingError(f"{name} would train in Stage II, where only gates may")
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32 or not parameter.requires_grad:
            raise TrainingError(f"gate {name} is {parameter.dtype} or frozen; gates must train in fp32")


@torch.no_grad()
def measure_entropy(
    model: Any, rows: Sequence[dict[str, Any]], collator: Collator, k: int, adapter_name: str
) -> tuple[float, dict[str, dict[str, float]], dict[str, float]]:
    """Normalised top-k entropy over the response tokens of the rows, and λ statistics there.

    Returns:
        (mean entropy, {module: statistics}, statistics over all modules).
    """
    device = next(model.parameters()).device
    total = count = 0.0
    with evaluation_mode(model), statistics_forward(model), record_gates(model, adapter_name) as recording:
        for at in range(0, len(rows), 8):
            batch = {key: value.to(device) for key, value in collator(rows[at : at + 8]).items()}
            recording.token_mask = batch["labels"].ne(-100)
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
