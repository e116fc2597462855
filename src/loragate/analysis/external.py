"""λ supplied from outside: the paper's intervention coordinates, where every gate value is a control and not a function.

`supplied_coefficients` runs an adapter, gated or not, with a tensor of λ per position that the caller gives (hard
suppression) or with leaves to differentiate by (eq:rw-causal-jacobian: the logits G_t(λ; θ0, φ*) as a function of λ).
Nothing is attached: PEFT's per-layer variant is set for the time being and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor

from loragate.errors import GateError
from loragate.gates import active_adapter, examine_adapter, require_gateable
from loragate.gates.eligibility import lora_layers
from loragate.gates.operation import scale_tokens, up_project
from loragate.gates.variant import GatedLora, add_delta

Coefficients = Callable[[str, Any, Tensor], Tensor | None]
"""(module path, LoRA layer, module input [..., D]) to λ [...], or None for full strength."""


class SuppliedLora(LoraVariant):
    """A LoRA layer whose delta is scaled by λ from a callable."""

    def __init__(self, path: str, coefficients: Coefficients) -> None:
        self.path, self.coefficients = path, coefficients

    def forward(self, module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        """`result` plus λ times the adapter's delta; LoRA dropout is left out, as in a gated layer."""
        reduced = torch.nn.functional.linear(x, module.lora_A[active_adapter].weight)
        lam = self.coefficients(self.path, module, x)
        if lam is not None:
            if lam.shape != x.shape[:-1]:
                raise GateError(
                    f"{self.path} was given λ of shape {tuple(lam.shape)} for {tuple(x.shape[:-1])} tokens; modules that see "
                    "routed tokens (experts) have no λ per position"
                )
            reduced = scale_tokens(lam, reduced)
        delta = up_project(reduced, module.lora_B[active_adapter].weight, module.scaling[active_adapter])
        return add_delta(result, delta, module.base_layer)


@contextmanager
def supplied_coefficients(peft_model: Any, coefficients: Coefficients) -> Iterator[list[str]]:
    """Run the active adapter with λ from `coefficients` inside the context; gates that are attached are not consulted.

    Yields:
        The paths of the modules that are scaled: those that could be gated. Other deltas (embeddings, the output head)
        keep full strength.

    Raises:
        GateError: for an adapter whose delta is not linear in one scale, such as DoRA.
    """
    name = active_adapter(peft_model)
    layers = list(lora_layers(peft_model, name))
    held = {}
    for path, layer in layers:
        if isinstance(layer.lora_variant.get(name), GatedLora):
            held[path] = layer.lora_variant.pop(name)
    paths: list[str] = []
    try:
        paths = [verdict.path for verdict in require_gateable(examine_adapter(peft_model, name))]
        for path, layer in layers:
            if path in paths:
                layer.lora_variant[name] = SuppliedLora(path, coefficients)
        yield paths
    finally:
        for path, layer in layers:
            if path in held:
                layer.lora_variant[name] = held[path]
            elif path in paths:
                layer.lora_variant.pop(name, None)
