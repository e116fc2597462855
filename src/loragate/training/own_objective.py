"""An objective of one's own in place of a named one: does it fit the stage, and is its loss one per token?

Either stage takes an object of `loragate.losses.objectives.Objective`. Run records hold its name and constants, so that
another one is refused on resume; a changed rule under the same name and constants cannot be seen.
"""

from __future__ import annotations

from typing import Any

import torch

from loragate.data import EncodedRows, Rows
from loragate.errors import ConfigError
from loragate.losses import ObjectiveContext, TokenStatistics, WeightedCrossEntropy
from loragate.losses.objectives import Objective
from loragate.training.settings import GATE_OBJECTIVES, OBJECTIVES, CalibrationSettings, TrainSettings
from loragate.training.trainer import TokenLoss

REQUIREMENTS = ("keep_mask", "reference_kl", "sequence_ids")


def require_own(objective: Objective, settings: TrainSettings) -> None:
    """Refuse what would train or be recorded as something else: a name that is taken, or a need that is not met.

    Raises:
        ConfigError: naming the objective and the setting.
    """
    name, needs, chosen = objective.name, set(objective.requires), settings.objective  # type: ignore[attr-defined]
    if name in OBJECTIVES or name in GATE_OBJECTIVES:
        raise ConfigError(
            f"{name!r} is the name of a built-in objective: choose that one by settings.objective, or give yours another name"
        )
    if chosen != type(settings)().objective:  # type: ignore[attr-defined]
        raise ConfigError(
            f"the objective {name!r} is given, and settings.objective is {chosen!r}; leave one of them out"
        )
    if getattr(settings, "objective_options", None):
        raise ConfigError(f"objective_options are constants of a named objective; leave them out, {name!r} has its own")
    if unknown := sorted(needs - set(REQUIREMENTS)):
        raise ConfigError(f"objective {name!r}: requires names {unknown[0]!r}; known: {', '.join(REQUIREMENTS)}")
    if "reference_kl" in needs and isinstance(settings, CalibrationSettings):
        raise ConfigError(f"objective {name!r} requires 'reference_kl', and Stage II has no reference model")
    if "reference_kl" in needs and (extra := set(objective.outputs) - {"log_prob", "entropy"}):
        raise ConfigError(
            f"objective {name!r} asks for {', '.join(sorted(extra))} beside 'reference_kl', with which there are log_prob, "
            "entropy (in full) and kl only"
        )
    if "sequence_ids" in needs and not settings.packing:
        raise ConfigError(
            f"objective {name!r} requires 'sequence_ids', which only packed rows have: set packing=True, or take each row of "
            "the statistics as a sequence where they are None"
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
        if losses.shape != stats.mask.shape:
            raise ConfigError(
                f"objective {objective.name!r}: loss returned {list(losses.shape)}, expected one value per token, "
                f"{list(stats.mask.shape)} like the statistics, neither summed nor averaged"
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
