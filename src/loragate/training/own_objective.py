"""An objective of one's own in place of a named one: is it whole, does it fit the stage, and is its loss one per token?

Either stage takes an object of `loragate.losses.objectives.Objective`. Run records hold its name and constants, so that
another one is refused on resume; a changed rule under the same name and constants cannot be seen.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError
from loragate.losses import ObjectiveContext, TokenStatistics, WeightedCrossEntropy
from loragate.losses.entropy import support_size
from loragate.losses.head import STATISTICS
from loragate.losses.objectives import Objective
from loragate.training.settings import GATE_OBJECTIVES, OBJECTIVES, CalibrationSettings, TrainSettings
from loragate.training.trainer import TokenLoss

ATTRIBUTES = ("name", "k", "requires", "outputs", "gradients", "settings", "loss")
REQUIREMENTS = ("keep_mask", "reference_kl", "sequence_ids")


def require_own(objective: Any, settings: TrainSettings) -> None:
    """Refuse what is no objective, and one that the settings contradict; None is no objective of one's own.

    Raises:
        ConfigError: naming the attribute or the setting.
    """
    if objective is None:
        return
    if isinstance(objective, (str, type)):
        raise ConfigError(
            f"objective is an object here, found {objective!r}: "
            + ("a name goes into the settings" if isinstance(objective, str) else f"give {objective.__name__}()")
        )
    lacking = [name for name in ATTRIBUTES if not hasattr(objective, name)]
    if lacking:
        raise ConfigError(
            f"the objective {type(objective).__name__} has no attribute {', '.join(map(repr, lacking))}; an objective has "
            f"{', '.join(ATTRIBUTES)} (loragate.losses.objectives.Objective). From a rule for the weights of the "
            "cross-entropy, loragate.losses.WeightedCrossEntropy(name, rule) makes one"
        )
    _require_name(objective.name)
    _require_values(objective)
    _require_alone(objective, settings)
    needs = set(objective.requires)
    if "reference_kl" in needs and isinstance(settings, CalibrationSettings):
        raise ConfigError(f"objective {objective.name!r} requires 'reference_kl', and Stage II has no reference model")
    if "reference_kl" in needs and (extra := set(objective.outputs) - {"log_prob", "entropy"}):
        raise ConfigError(
            f"objective {objective.name!r} asks for {', '.join(sorted(extra))} beside 'reference_kl', with which there are "
            "log_prob, entropy (in full) and kl only"
        )
    if "sequence_ids" in needs and not settings.packing:
        raise ConfigError(
            f"objective {objective.name!r} requires 'sequence_ids', which only packed rows have: set packing=True, or take "
            "each row of the statistics as a sequence where they are None"
        )


def _require_name(name: Any) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"an objective's name is a text for run records, found {name!r}")
    if name in OBJECTIVES or name in GATE_OBJECTIVES:
        raise ConfigError(
            f"{name!r} is the name of a built-in objective: choose that one by settings.objective, or give yours another name"
        )


def _require_values(objective: Any) -> None:
    name = objective.name
    support_size(objective.k, 1 << 30)
    checked = {"requires": REQUIREMENTS, "outputs": STATISTICS, "gradients": STATISTICS, "batch_reads": STATISTICS}
    for attribute, known in checked.items():
        values = getattr(objective, attribute, ())
        if attribute == "gradients" and values is None:
            continue
        if isinstance(values, str) or not isinstance(values, (tuple, list, set, frozenset)):
            raise ConfigError(f"objective {name!r}: {attribute} is a collection of names, found {values!r}")
        for value in values:
            if value not in known:
                raise ConfigError(f"objective {name!r}: {attribute} names {value!r}; known: {', '.join(known)}")
    if objective.gradients is not None and (absent := set(objective.gradients) - set(objective.outputs)):
        raise ConfigError(f"objective {name!r}: gradients names {min(absent)!r}, which is not among its outputs")
    try:
        json.dumps(objective.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"objective {name!r}: its settings cannot be kept as JSON in a run record ({error})"
        ) from error
    if not isinstance(objective.settings, dict):
        raise ConfigError(f"objective {name!r}: settings is a dict of its constants, found {objective.settings!r}")
    if not callable(objective.loss):
        raise ConfigError(f"objective {name!r}: loss is a method (stats, context), found {objective.loss!r}")


def _require_alone(objective: Any, settings: TrainSettings) -> None:
    chosen = getattr(settings, "objective", None)
    if chosen != type(settings)().objective:  # type: ignore[attr-defined]
        raise ConfigError(
            f"the objective {objective.name!r} is given, and settings.objective is {chosen!r}; leave one of them out"
        )
    if getattr(settings, "objective_options", None):
        raise ConfigError(
            f"objective_options are constants of a named objective; leave them out, {objective.name!r} has its own"
        )


def require_mask_column(objective: Objective, encoded: EncodedRows, source: Rows) -> None:
    """Refuse rows without the column that the objective reads.

    Raises:
        ConfigError: naming the data and the ways to a keep_mask.
    """
    if "keep_mask" in objective.requires and "keep_mask" not in encoded[0]:
        raise ConfigError(
            f"objective {objective.name!r} needs a keep_mask, and {source.source} has no such column: a list of 0 and 1, one "
            "per response token. Make one with loragate mask --model BASE --reference MODEL --data IN --out OUT"
        )


def batch_needs(objective: Objective) -> dict[str, Any]:
    """The fields of a `TrainingJob` for an objective that depends on the whole batch; none for the others."""
    over_batch = getattr(objective, "over_batch", None)
    if over_batch is None:
        return {}
    return {"over_batch": over_batch, "batch_reads": tuple(getattr(objective, "batch_reads", ()))}


def per_token(objective: Objective) -> TokenLoss:
    """The objective's loss, held to its contract; what it says of positions without a label does not count.

    The loss raises ConfigError for another shape than that of the statistics, for one that nothing can be learnt from, and
    for a negative weight of a `WeightedCrossEntropy`. The trainer refuses values that are not finite.
    """

    def token_loss(stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
        losses = objective.loss(stats, context)
        wanted = tuple(stats.mask.shape)
        if not isinstance(losses, torch.Tensor) or tuple(losses.shape) != wanted:
            found = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ConfigError(
                f"objective {objective.name!r}: loss returned {found}, expected one value per token, {list(wanted)} like the "
                "statistics, neither summed nor averaged"
            )
        if torch.is_grad_enabled() and not losses.requires_grad:
            raise ConfigError(
                f"objective {objective.name!r}: its loss does not depend on what trains. Name the statistics that it "
                "differentiates in `gradients`, and do not detach them"
            )
        # the trainer waits for the device at this point in any case, to see whether the loss is finite
        if isinstance(objective, WeightedCrossEntropy) and bool(((losses < 0) & (stats.log_prob < 0)).any()):
            raise ConfigError(
                f"objective {objective.name!r}: its rule gave a negative weight. A weighted cross-entropy has weights of at "
                "least 0; write an objective of your own kind for signed terms"
            )
        return torch.where(stats.mask, losses, losses.new_zeros(()))

    return token_loss
