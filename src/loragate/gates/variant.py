"""What PEFT does with a gated adapter: it runs it, refuses to merge it, and says that its own saving loses the gates.

Running: PEFT's LoRA layers look up `layer.lora_variant[adapter]` at each forward, so an instance placed there after loading
takes effect without patching anything. The mechanism is PEFT's own but documented as private; tests/contract pins what is
relied upon here.

Merging: a gated layer refuses, but PEFT goes from module to module: embeddings, experts, whole copies of modules and layers
without a gate that come before the first gated one would be merged by then, and `merge_and_unload` cannot undo it. So the
tuner is given a subclass of its own class, `GatedTuner`, whose merging methods ask first.

Saving: `save_pretrained` of a gated model writes the gates' numbers beside the adapter's factors, but no range and no hash;
PEFT loads such a folder as the plain adapter and drops the numbers. PEFT and transformers let the adapter's configuration
write itself, so the configuration of a gated adapter is one that warns; this covers selected adapters, natively loaded ones
and the checkpoints of any trainer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from loragate.errors import GateError

logger = logging.getLogger("loragate")

NO_MERGE = (
    "a gated adapter cannot be merged: its strength differs from token to token, so no single weight matrix equals it. "
    "Detach the gates first (loragate.detach_gates) to merge the plain Stage-I adapter, or keep the adapter unmerged."
)
# PEFT's layers over bitsandbytes round a plain delta to the base's dtype before they add it
_ROUNDING = ("Linear4bit", "Linear8bitLt")


class GatedLora(LoraVariant):
    """A LoRA layer whose delta is scaled by the layer's `SignedGate`."""

    def supports_lora_conversion(self) -> bool:
        return False

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        """Nothing to do: `attach_gates` creates the gate before the variant is placed."""
        # PEFT calls it where it makes a variant itself, when an adapter is added

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: torch.Tensor) -> NoReturn:
        raise GateError(NO_MERGE)

    merge_unsafe = unmerge = merge_safe

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`result` (the base output, plus other active adapters) plus this adapter's gated delta.

        LoRA dropout is not applied: the delta is finished, and Stage II must see the function that will be served.
        """
        delta = module.lora_gate[active_adapter].gated_delta(
            x,
            module.lora_A[active_adapter].weight,
            module.lora_B[active_adapter].weight,
            module.scaling[active_adapter],
        )
        if type(module).__name__ in _ROUNDING and not torch.is_autocast_enabled():
            # so that λ = 1 stays equal to the plain adapter bit for bit
            delta = delta.to(result.dtype)
        return add_delta(result, delta, module.base_layer)


def leave_input_uncast(layer: Any, args: Any) -> None:
    """Forward pre-hook of a gated layer: PEFT hands x over as it came where every adapter of the layer is gated.

    PEFT would cast x to the dtype of A, anew in each of the layers that read it (q, k, v; gate, up), and each would keep its
    copy for the backward pass: on a bf16 base with fp32 factors three times four bytes in place of two, once. The gated
    operation casts for itself. A plain adapter needs PEFT's cast, and a mixed batch may call one that is not active.
    """
    # by the variant, not the gate: gates that are switched off for a while leave a plain adapter
    gated = (isinstance(layer.lora_variant.get(name), GatedLora) for name in layer.lora_A)
    layer.cast_input_dtype_enabled = not all(gated)


def cast_input_again(layer: Any) -> None:
    """Take `leave_input_uncast` off a layer."""
    # found by identity: a handle kept on the layer would not survive copying and pickling
    for key, hook in list(layer._forward_pre_hooks.items()):
        if hook is leave_input_uncast:
            del layer._forward_pre_hooks[key]
    layer.cast_input_dtype_enabled = True


def add_delta(result: torch.Tensor, delta: torch.Tensor, base_layer: torch.nn.Module) -> torch.Tensor:
    """`result + delta`, written into `result` where that changes no bit and nobody else can see it.

    The base output was made a moment ago and no linear layer keeps it for its backward, so its memory can be reused; a
    forward hook on the base layer may have kept it.
    """
    # a view's base may be read elsewhere, and a leaf may be a parameter or an input; a compiler reuses memory by itself
    if torch.compiler.is_compiling() or result.dtype != delta.dtype or result._is_view() or result.is_leaf:
        return result + delta
    if base_layer._forward_hooks:
        return result + delta
    return result.add_(delta)


class _RefusesMerging(BaseTuner):
    """A tuner that refuses as a whole to merge adapters that carry gates at that time."""

    def merge_adapter(self, adapter_names: list[str] | None = None, *args: Any, **kwargs: Any) -> None:
        self._refuse_gated(adapter_names)
        super().merge_adapter(adapter_names, *args, **kwargs)

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = False, adapter_names: list[str] | None = None
    ) -> torch.nn.Module:
        self._refuse_gated(adapter_names)
        return super().merge_and_unload(progressbar, safe_merge, adapter_names)

    def _refuse_gated(self, names: list[str] | None) -> None:
        for module in self.modules():
            variants = vars(module).get("lora_variant", {})
            if any(isinstance(variants.get(name), GatedLora) for name in names or self.active_adapters):
                raise GateError(NO_MERGE)


class GatedTuner(_RefusesMerging, LoraModel):
    """PEFT's LoRA tuner that does; with a name of its own, so that a model can be pickled."""


def ask_before_merging(model: nn.Module) -> None:
    """Make every tuner in the model one that refuses."""
    for tuner in model.modules():
        if isinstance(tuner, BaseTuner) and not isinstance(tuner, _RefusesMerging):
            # the object changes its class: a method set on it would be a cycle, which keeps a deleted model in memory
            own = type(tuner)
            tuner.__class__ = GatedTuner if own is LoraModel else type(own.__name__, (_RefusesMerging, own), {})


def warn_on_saving(model: nn.Module, adapter_name: str) -> None:
    """Give the adapter a configuration of its own that warns when it is written."""
    for configs in _config_tables(model, adapter_name):
        # a copy: the caller's object may serve other adapters and models, which carry no gates
        config = copy.copy(configs[adapter_name])
        # on the instance, where it comes before the class's method; a partial of a module's function, not a closure, so that
        # the model can still be copied and pickled
        vars(config)["save_pretrained"] = partial(_save_and_warn, config, adapter_name)
        configs[adapter_name] = config


def warn_no_more(model: nn.Module, adapter_name: str) -> None:
    """Let the configuration be written as PEFT does it."""
    for config in adapter_configs(model, adapter_name):
        vars(config).pop("save_pretrained", None)


def _save_and_warn(config: Any, adapter_name: str, save_directory: str, **kwargs: Any) -> None:
    type(config).save_pretrained(config, save_directory, **kwargs)
    logger.warning(
        "save_pretrained wrote the gated adapter %r to %s in a form that loads as the plain adapter, without its gates; to "
        "keep them, write loragate.save_gates(model, folder) and load that folder with loragate.load_gated",
        adapter_name,
        save_directory,
    )


def adapter_configs(model: nn.Module, adapter_name: str) -> list[Any]:
    """The adapter's configuration, mostly one; a wrapper around the model may hold a table of its own."""
    return [configs[adapter_name] for configs in _config_tables(model, adapter_name)]


def _config_tables(model: nn.Module, adapter_name: str) -> Iterator[dict[str, Any]]:
    """Every {adapter name: configuration} of the model, its wrappers included, that holds the adapter."""
    seen: set[int] = set()
    for module in model.modules():
        # vars, not getattr: a PeftModel's is a property that gives its tuner's
        configs = vars(module).get("peft_config")
        if isinstance(configs, dict) and adapter_name in configs and id(configs) not in seen:
            seen.add(id(configs))
            yield configs
