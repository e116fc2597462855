"""What every Stage-I objective is: an object with `loss(stats, context)`, and the weighted cross-entropies among them.

A weighted cross-entropy is −w_t · log p_t with a detached w_t ≥ 0 (eq:rw-weighted); the trainer divides the sum by the
response tokens of the global batch, so masked or down-weighted tokens stay in the denominator (the paper's 1/|T| for every
baseline).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch

from loragate.errors import ConfigError, nearest
from loragate.losses.entropy import support_size
from loragate.losses.head import STATISTICS, TokenStatistics

LACKING = {
    "keep_mask": "give the data a column 'keep_mask' (0/1 per response token), for example with loragate mask",
    "reference_kl": "statistics with a KL to a reference model",
}


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective may need beside the statistics; tensors are shaped like them.

    Attributes:
        keep_mask: bool, the precomputed token mask of "mask" and "forgetting".
        sequence_ids: int64, which sequence a token belongs to, for packed rows; None means one sequence per row.
        step: optimiser steps done so far.
        total_steps: optimiser steps of the run; 0 where it is unknown.
        batch: what the objective's `over_batch` says of this forward pass; None where the statistics at hand are the
            whole batch.
    """

    keep_mask: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    step: int = 0
    total_steps: int = 0
    batch: Any = None

    @property
    def progress(self) -> float:
        """Share of the run that is done, in [0, 1]; 1 where its length is unknown."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else 1.0


class Objective(Protocol):
    """A per-token training objective.

    Any object that has these will do, such as a class of your own; it is given to `train_adapter`, `train_gates` or
    `GateTrainer` as `objective=`. Its name is then none of the built-in ones.

    Attributes:
        name: what records call it.
        k: support of the top-k entropy it reads; 0 for the whole vocabulary, 2 where it reads none.
        requires: what the context or the statistics must hold: "keep_mask", "reference_kl" (`stats.kl`, to the base: the model
            with its adapter off), "sequence_ids" (of rows that are not packed the same throughout a row).
        outputs: the statistics it reads, of "log_prob", "entropy" (in full) and "topk_entropy".
        gradients: those it differentiates, the others come detached; None for all, recomputed in the backward as they are
            needed.
        settings: its constants, for run records; JSON-able.

    An objective whose loss depends on the whole batch (a median, a set of tokens) also has `over_batch`, an `OverBatch`, and
    `batch_reads`, the statistics that it needs of every forward pass (a tuple; empty where labels and masks will do), beside a
    KL where there is a reference. `over_batch` is given no others, so that what it says does not depend on the passes. The
    trainer then makes these in a first pass without gradient over all rows of an optimiser step, so that the loss depends
    neither on the size of a forward pass nor on the number of processes; where one pass is the whole step, it is made once.
    """

    @property
    def name(self) -> str: ...
    @property
    def k(self) -> int: ...
    @property
    def requires(self) -> frozenset[str]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def gradients(self) -> tuple[str, ...] | None: ...
    @property
    def settings(self) -> dict[str, Any]: ...

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """Loss per token, shaped like the statistics, zero where the label is ignored."""
        ...


class DataclassSettings:
    """An objective that is a dataclass of its constants."""

    @property
    def settings(self) -> dict[str, Any]:
        """The constants, for run records."""
        return asdict(self)  # type: ignore[call-overload]


Rule = Callable[[TokenStatistics, ObjectiveContext], torch.Tensor]
# concatenates rows [N, ...] of all processes
Gather = Callable[[torch.Tensor], torch.Tensor]
# from the forward passes of this process in one optimiser step to `ObjectiveContext.batch` of each
OverBatch = Callable[[Sequence[tuple[TokenStatistics, ObjectiveContext]], Gather], Sequence[Any]]


def within_batch(
    over_batch: OverBatch, stats: TokenStatistics, context: ObjectiveContext | None = None
) -> ObjectiveContext:
    """The context with `batch` filled in; where nobody has done so, the statistics at hand are the whole batch."""
    context = context or ObjectiveContext()
    if context.batch is not None:
        return context
    (value,) = over_batch([(stats, context)], lambda values: values)
    return replace(context, batch=value)


def require(objective: Objective, stats: TokenStatistics, context: ObjectiveContext) -> None:
    """Refuse (ConfigError) a call that lacks what the objective needs."""
    for name in sorted(objective.requires):
        found = stats.kl if name == "reference_kl" else getattr(context, name)
        if found is None:
            more = f"; {LACKING[name]}" if name in LACKING else ""
            raise ConfigError(f"objective {objective.name!r} needs {name}{more}")


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """−w_t · log p_t with w_t from a rule under no_grad.

    Attributes:
        name: what records call it.
        rule: gives w_t ≥ 0 for every position, from (stats, context). Training with an objective of one's own refuses a
            negative weight, and a weight that is not finite where a token counts.
        k: support of the top-k entropy the rule reads (2 where it reads none).
        requires: names of `ObjectiveContext` fields the rule needs.
        reads: what the rule reads beside `stats.log_prob`: "topk_entropy", "entropy" (over the whole vocabulary) or both.
        settings: the rule's constants, for run records.
        over_batch, batch_reads: see `Objective`; the rule finds the value in `context.batch`.
    """

    name: str
    rule: Rule
    k: int = 2
    requires: frozenset[str] = frozenset()
    reads: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    over_batch: OverBatch | None = None
    batch_reads: tuple[str, ...] | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The statistics it reads."""
        return ("log_prob", *self.reads)

    @property
    def gradients(self) -> tuple[str, ...]:
        """The statistics it differentiates."""
        return ("log_prob",)

    def weights(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """Detached CE coefficients w_t, shaped like the statistics, zero where the label is ignored.

        Raises:
            ConfigError: if the context lacks something the rule needs.
        """
        context = context or ObjectiveContext()
        require(self, stats, context)
        with torch.no_grad():
            if self.over_batch is not None:
                context = within_batch(self.over_batch, stats, context)
            # a rule may give anything where no label is
            return torch.where(stats.mask, self.rule(stats, context), torch.zeros_like(stats.log_prob)).detach()

    def loss(self, stats: TokenStatistics, context: ObjectiveContext | None = None) -> torch.Tensor:
        """−w_t · log p_t."""
        return -self.weights(stats, context) * stats.log_prob


def token_losses(objective: Objective, stats: TokenStatistics, context: ObjectiveContext) -> torch.Tensor:
    """The objective's loss, shaped like the statistics; what it says of positions without a label does not count.

    A ConfigError for another shape, a statistic that is read and not named, a loss without a gradient where one is asked for, and
    a negative weight of a `WeightedCrossEntropy`.
    """
    try:
        losses = objective.loss(stats, context)
    except RuntimeError as error:
        if "must match" not in str(error):  # what a device lacks, say
            raise
        raise ConfigError(f"objective {objective.name!r}: {error}. {_describe_outputs(objective)}") from error
    found = list(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
    if found == [0] != list(stats.mask.shape):
        raise ConfigError(
            f"objective {objective.name!r}: loss returned an empty tensor. {_describe_outputs(objective)}"
        )
    if found != list(stats.mask.shape):
        raise ConfigError(
            f"objective {objective.name!r}: loss returned {found}, expected one value per token, "
            f"{list(stats.mask.shape)} like the statistics, neither summed nor averaged"
        )
    carried = any(getattr(stats, name).requires_grad for name in STATISTICS)
    if torch.is_grad_enabled() and carried and not losses.requires_grad:
        named = ", ".join(objective.outputs if objective.gradients is None else objective.gradients)
        raise ConfigError(
            f"objective {objective.name!r}: its loss has no gradient, so nothing could train. Of the statistics {named} carry "
            "one, as its gradients say (None: all of outputs), and the others come detached: name there what the loss "
            "differentiates, and keep that out of detach() and no_grad()"
        )
    # the trainer waits for the device at this point in any case, to see whether the loss is finite
    if isinstance(objective, WeightedCrossEntropy) and bool(((losses < 0) & (stats.log_prob < 0)).any()):
        raise ConfigError(
            f"objective {objective.name!r}: its rule gave a negative weight. A weighted cross-entropy has weights of at "
            "least 0; write an objective of your own kind for signed terms"
        )
    return torch.where(stats.mask, losses, losses.new_zeros(()))


def _describe_outputs(objective: Objective) -> str:
    """What its loss is given, and what it may have read beside that: such a statistic is empty, and fails on its shape."""
    others = " or ".join(name for name in STATISTICS if name not in objective.outputs)
    return (
        f"It is given {', '.join(objective.outputs)}: whatever else its loss reads ({others or 'something'}, perhaps) must be "
        "named, in outputs, or in reads= of a WeightedCrossEntropy"
    )


def check_objective(objective: Any) -> None:
    """Refuse (ConfigError) an objective of one's own that lacks something, or holds what no training could follow."""
    needed = ("name", "k", "requires", "outputs", "gradients", "settings", "loss")
    if isinstance(objective, type):
        raise ConfigError(
            f"objective is the class {objective.__name__}: give an instance of it, {objective.__name__}()"
        )
    if lacking := [name for name in needed if not hasattr(objective, name)]:
        named = " A built-in objective is chosen by the setting objective" if isinstance(objective, str) else ""
        raise ConfigError(
            f"objective {objective!r:.80} has no {', '.join(lacking)}: give WeightedCrossEntropy(name, rule), or an object with "
            f"{', '.join(needed)} (loragate.losses.objectives.Objective).{named}"
        )
    what = f"objective {objective.name!r}"
    _require_names(what, objective, "reads", STATISTICS)
    _require_names(what, objective, "outputs", STATISTICS)
    _require_names(what, objective, "requires", (*LACKING, "sequence_ids"))
    _require_names(what, objective, "batch_reads", STATISTICS)
    if not isinstance(objective.name, str) or not objective.name or not objective.outputs:
        raise ConfigError(f"{what} needs a name, a text, and outputs, the statistics that it reads")
    if objective.gradients is not None:
        _require_names(what, objective, "gradients", tuple(objective.outputs))
        if not objective.gradients:
            raise ConfigError(
                f"{what}: gradients is empty, so nothing would train; name what the loss differentiates, or None for all"
            )
    support_size(objective.k, 1 << 30)
    if not isinstance(objective.settings, Mapping):
        raise ConfigError(f"{what}: settings must be a dictionary of its constants, found {objective.settings!r:.80}")
    try:
        json.dumps(dict(objective.settings))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: settings go into the record of the run as JSON; {error}") from error
    if getattr(objective, "over_batch", None) is not None and getattr(objective, "batch_reads", None) is None:
        raise ConfigError(
            f"{what} has over_batch and no batch_reads: name the statistics that over_batch reads of every forward pass, of "
            f"{', '.join(STATISTICS)}; () where labels and masks will do"
        )


def _require_names(what: str, objective: Any, attribute: str, known: Sequence[str]) -> None:
    """Refuse an attribute that is no list of known names; one that is missing or None says nothing."""
    found = getattr(objective, attribute, None)
    if found is None:
        return
    if not isinstance(found, tuple | list | set | frozenset):
        raise ConfigError(f"{what}: {attribute} must be names in a tuple, such as ({known[0]!r},), found {found!r:.80}")
    for name in found:
        if name not in known:
            raise ConfigError(
                f"{what}: {attribute} names {name!r}{nearest(str(name), known) or ';'} known are {', '.join(known)}"
            )
