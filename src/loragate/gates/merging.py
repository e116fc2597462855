"""Refusing to merge a gated adapter before the first weight is changed.

A gated layer refuses by itself (`loragate.gates.variant`), but PEFT goes from module to module: embeddings, experts, whole
copies of modules and layers without a gate that come before the first gated one would be merged by then, and
`merge_and_unload` cannot undo it. So the tuner's two merging methods ask first, on the instance; no class is changed.
"""

from __future__ import annotations

import inspect
import weakref
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
                vars(tuner).setdefault(method, _AskFirst(tuner, method))


class _AskFirst:
    """A merging method of one tuner that refuses for gated adapters.

    It knows its tuner weakly: a cycle would keep the weights of a deleted model until the garbage collector runs. It is
    copied and pickled along with the tuner.
    """

    def __init__(self, tuner: Any, method: str) -> None:
        self._tuner, self._method = weakref.ref(tuner), method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tuner: Any = self._tuner()
        if tuner is None:  # a shallow copy that outlived its original
            raise GateError(NO_MERGE)
        merge = getattr(type(tuner), self._method)
        names = inspect.signature(merge).bind(tuner, *args, **kwargs).arguments.get("adapter_names")
        names = tuner.active_adapters if names is None else names
        for module in tuner.modules():
            variants = vars(module).get("lora_variant", {})
            if any(isinstance(variants.get(name), GatedLora) for name in names):
                raise GateError(NO_MERGE)
        return merge(tuner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _AskFirst:
        tuner: Any = self._tuner()
        return _AskFirst(memo.get(id(tuner), tuner), self._method)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AskFirst, (self._tuner(), self._method)
