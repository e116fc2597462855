"""Refusing to merge a gated adapter before the first weight is changed.

A gated layer refuses by itself (`loragate.gates.variant`), but PEFT goes from module to module: embeddings, experts, whole
copies of modules and layers without a gate that come before the first gated one would be merged by then, and
`merge_and_unload` cannot undo it. So the tuner's two merging methods ask first, on the instance; no class is changed.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from loragate.errors import GateError
from loragate.gates.variant import NO_MERGE, GatedLora

_METHODS = ("merge_adapter", "merge_and_unload")


def ask_before_merging(model: nn.Module) -> None:
    """Have every tuner in the model refuse, as a whole, to merge adapters that carry gates at that time."""
    for tuner in model.modules():
        if isinstance(tuner, BaseTuner):
            for method in _METHODS:
                # partial of a module's function, not a closure, so that the model can still be copied and pickled
                vars(tuner).setdefault(method, partial(_ask_first, tuner, method))


def _ask_first(tuner: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    merge = getattr(type(tuner), method)
    names = inspect.signature(merge).bind(tuner, *args, **kwargs).arguments.get("adapter_names")
    names = tuner.active_adapters if names is None else names
    for module in tuner.modules():
        variants = vars(module).get("lora_variant", {})
        if any(isinstance(variants.get(name), GatedLora) for name in names):
            raise GateError(NO_MERGE)
    return merge(tuner, *args, **kwargs)
