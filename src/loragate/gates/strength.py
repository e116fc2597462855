"""How strongly each module's delta acts: bands of layers, kinds of modules, and a constant for each inside a context.

A constant λ on a delta is the same as a scale of its LoRA layer times λ, which PEFT's own code computes for every kind of
layer, gated or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from loragate.errors import GateError, nearest
from loragate.gates.attach import GatedLora
from loragate.gates.eligibility import active_adapter, lora_layers
from loragate.gates.override import BANDS, FAMILIES, Override

# how the blocks of a layer are called in transformers: self_attn, attention, mlp, feed_forward, and OPT's fc1 without a block
_FAMILY_OF = {
    "attention": ("attn", "attention"),
    "mlp": ("mlp", "ffn", "feed_forward", "feedforward", "moe", "experts", "fc1", "fc2"),
}


def layer_of(path: str) -> int | None:
    """Index of the layer in a module path; None for a module outside the layers, such as an embedding.

    A number at the end is the module's own, in a Sequential such as that between a vision tower and its language model.
    """
    return next((int(part) for part in path.split(".")[:-1] if part.isdecimal()), None)


def kind_of(path: str) -> str:
    """What people call a kind of module, the last part of its path: q_proj, up_proj."""
    return path.rpartition(".")[2]


def family_of(path: str) -> str | None:
    """One of `FAMILIES` by the names of the blocks in a path; None for a module of another kind, such as a recurrent one."""
    blocks = path.lower().split(".")
    return next(
        (family for family in FAMILIES if any(word in block for word in _FAMILY_OF[family] for block in blocks)), None
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


def modules_of_part(part: str, paths: Iterable[str]) -> list[str]:
    """The module paths of a part: a band, a family, or a kind; a GateError where there is none."""
    paths = list(paths)
    if part in BANDS:
        found = layer_bands(paths).get(part, [])
    elif part in FAMILIES:
        found = [path for path in paths if family_of(path) == part]
    else:
        found = [path for path in paths if kind_of(path) == part]
    if not found:
        kinds = dict.fromkeys(map(kind_of, paths))
        there = [*layer_bands(paths), *dict.fromkeys(filter(None, map(family_of, paths))), *kinds]
        raise GateError(
            f"λ for {part} would have no effect: the adapter touches no such module{nearest(part, there)}; it has "
            f"{', '.join(there)}"
        )
    return found


def overrides_by_module(override: Override, paths: Iterable[str]) -> dict[str, Override]:
    """{module path: what is laid over its λ}; outside of an override's part λ is 1, as of the plain adapter."""
    paths = list(paths)
    if override.part is None:
        return dict.fromkeys(paths, override)
    inside = set(modules_of_part(override.part, paths))
    return {path: Override(constant=override.constant if path in inside else 1.0) for path in paths}


def describe_unreached(kept: Sequence[str]) -> str:
    """The one sentence on what no λ reaches; empty where it reaches all that an adapter changes.

    Args:
        kept: module paths, or parts of the adapter in words.
    """
    if not kept:
        return ""
    more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    return (
        f"no strength reaches {kept[0]}{more}: the adapter keeps its full strength there, so that λ = 0 is not the base"
    )


def lora_paths(peft_model: Any, adapter_name: str | None = None) -> list[str]:
    """Module paths of the adapter's LoRA layers, in the base's own names and order."""
    return [path for path, _ in lora_layers(peft_model, active_adapter(peft_model, adapter_name))]


@contextmanager
def scale_adapter(
    peft_model: Any, strengths: float | Mapping[str, float], adapter_name: str | None = None
) -> Iterator[None]:
    """Each LoRA layer's delta times a constant inside the context; contexts multiply when they nest.

    With 0 a layer is the base's own, of every kind of LoRA. Otherwise a DoRA layer (see `scales_exactly`) keeps its trained
    magnitudes, so that what is scaled is the part of its delta that turns the weights. `strengths` are one for all layers, or
    {module path: constant}: others keep their strength, and a path that is no LoRA layer of the adapter is refused (GateError).
    """
    name = active_adapter(peft_model, adapter_name)
    layers = list(lora_layers(peft_model, name))
    if not isinstance(strengths, Mapping):
        strengths = dict.fromkeys((path for path, _ in layers), strengths)
    if unknown := sorted(set(strengths) - {path for path, _ in layers}):
        raise GateError(f"the adapter has no module {unknown[0]} to be scaled; it has {layers[0][0]}, …")
    factors = [(layer, float(strengths[path])) for path, layer in layers if path in strengths]
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
    """Whether `scale_adapter` multiplies the whole delta of every LoRA layer, as it does unless one is DoRA."""
    name = active_adapter(peft_model, adapter_name)
    variants = [layer.lora_variant.get(name) for _, layer in lora_layers(peft_model, name)]
    return all(variant is None or isinstance(variant, GatedLora) for variant in variants)
