"""Stage-I token objectives by name, small objects over token statistics; docs/method.md derives each.

weighted   sft, dft, profit, eaft, talr, mask: cross-entropies with a detached weight w_t ≥ 0
signed     eksft, forgetting: with terms that no nonnegative weight gives; entropy, interleaved: the adapter itself trained
           on entropy, as controls

The names are fixed and `objectives` is read-only. An objective of one's own is given to the training itself:
`train_adapter(..., objective=WeightedCrossEntropy("mine", rule))`, and likewise to `train_gates` and `GateTrainer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from loragate.errors import ConfigError, nearest
from loragate.losses.objectives.base import Objective
from loragate.losses.objectives.base import ObjectiveContext as ObjectiveContext
from loragate.losses.objectives.base import WeightedCrossEntropy as WeightedCrossEntropy
from loragate.losses.objectives.signed import EntropyKLSelective, EntropyMinimisation, Forgetting, Interleaved
from loragate.losses.objectives.weighted import dft, eaft, mask, profit, sft, talr

FACTORIES: dict[str, Callable[..., Objective]] = {
    "sft": sft,
    "dft": dft,
    "profit": profit,
    "eaft": eaft,
    "talr": talr,
    "mask": mask,
    "eksft": EntropyKLSelective,
    "forgetting": Forgetting,
    "entropy": EntropyMinimisation,
    "interleaved": Interleaved,
}
# read-only, as training reads the names from its settings; an objective of one's own goes to the training call itself
objectives: Mapping[str, Objective] = MappingProxyType({name: make() for name, make in FACTORIES.items()})


def make_objective(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """A named objective with its options; a ConfigError for one that it does not have, or a value that it refuses."""
    factory, given = FACTORIES[name], dict(options or {})
    known = list(inspect.signature(factory).parameters)
    for option in given:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise ConfigError(f"objective {name!r} has no option {option!r}{nearest(option, known)} (it has {listed})")
    try:
        return factory(**given)
    except TypeError as error:
        raise ConfigError(f"objective {name!r}: an option has the wrong type in {given!r} ({error})") from error
