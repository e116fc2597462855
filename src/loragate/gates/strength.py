"""How strongly each module's delta acts: bands of layers, kinds of modules, and a constant for each inside a context.

A constant λ on a delta is the same as a scale of its LoRA layer times λ, which PEFT's own code computes for every kind of
layer, gated or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from loragate.errors import GateError
from loragate.gates.attach import GatedLora
from loragate.gates.eligibility import active_adapter, lora_layers

BANDS = ("lower", "middle", "upper")
"""Thirds of the layers that an adapter touches, the first ones lower."""


def layer_of(path: str) -> int | None:
    """Index of the layer in a module path; None for a module outside the layers, such as an embedding."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def kind_of(path: str) -> str:
    """What people call a kind of module, the last part of its path: q_proj, up_proj."""
    return path.rpartition(".")[2]


def part_of(path: str) -> str:
    """ "attention" or "mlp", by the name of the module around it; other modules are "other"."""
    around = path.rpartition(".")[0].rpartition(".")[2].lower()
    if "att" in around:
        return "attention"
    return (
        "mlp" if any(name in around for name in ("mlp", "ffn", "feed_forward", "expert", "block_sparse")) else "other"
    )


def layer_bands(paths: Iterable[str]) -> dict[str, list[str]]:
    """{band: module paths} in the order of `BANDS`; bands without a module are left out, as are modules outside the layers."""
    paths = list(paths)
    layers = sorted({layer for path in paths if (layer := layer_of(path)) is not None})
    band = {layer: BANDS[3 * place // len(layers)] for place, layer in enumerate(layers)}
    found: dict[str, list[str]] = {name: [] for name in BANDS}
    for path in paths:
        if (layer := layer_of(path)) is not None:
            found[band[layer]].append(path)
    return {name: members for name, members in found.items() if members}


def lora_paths(peft_model: Any, adapter_name: str | None = None) -> list[str]:
    """Module paths of the adapter's LoRA layers, in the base's own names and order."""
    return [path for path, _ in lora_layers(peft_model, active_adapter(peft_model, adapter_name))]


@contextmanager
def scaled(peft_model: Any, strengths: float | Mapping[str, float], adapter_name: str | None = None) -> Iterator[None]:
    """Each LoRA layer's delta times a constant inside the context; contexts multiply when they nest.

    With 0 a layer is the base's own, of every kind of LoRA. Otherwise a DoRA layer (see `scales_exactly`) keeps its trained
    magnitudes, so that what is scaled is the part of its delta that turns the weights.

    Args:
        peft_model: with LoRA layers, gated or plain.
        strengths: one for all layers, or {module path: constant}; a module that is not named keeps its strength.

    Raises:
        GateError: for a path that is no LoRA layer of the adapter.
    """
    name = active_adapter(peft_model, adapter_name)
    layers = list(lora_layers(peft_model, name))
    if isinstance(strengths, Mapping):
        if unknown := sorted(set(strengths) - {path for path, _ in layers}):
            raise GateError(f"the adapter has no module {unknown[0]} to be scaled; it has {layers[0][0]}, …")
        factors = [(layer, float(strengths[path])) for path, layer in layers if path in strengths]
    else:
        factors = [(layer, float(strengths)) for _, layer in layers]
    before = [(layer, layer.scaling[name], layer.lora_variant.get(name)) for layer, _ in factors]
    try:
        for layer, factor in factors:
            layer.scaling[name] *= factor
            if factor == 0:  # plain LoRA times 0; a variant may do more than add a delta
                layer.lora_variant.pop(name, None)
        yield
    finally:
        for layer, scale, variant in before:
            layer.scaling[name] = scale
            if variant is not None:
                layer.lora_variant[name] = variant


def scales_exactly(peft_model: Any, adapter_name: str | None = None) -> bool:
    """Whether `scaled` multiplies the whole delta of every LoRA layer, as it does unless one is DoRA."""
    name = active_adapter(peft_model, adapter_name)
    variants = [layer.lora_variant.get(name) for _, layer in lora_layers(peft_model, name)]
    return all(variant is None or isinstance(variant, GatedLora) for variant in variants)
