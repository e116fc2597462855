"""From the modules of an artifact to the slots of vLLM's layers.

vLLM renames modules and packs several into one layer. Each gate is given its layer and slice before the adapter is
activated; a gate that finds none is refused, because the adapter would then act there at full strength.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.lora.utils import parse_fine_tuned_lora_name

from loragate.errors import ArtifactError
from loragate.gates.identity import compare_base_samples, config_fingerprint, is_norm, rope_settings, rope_warning
from loragate.gates.schema import CONFIG
from loragate.gates.signed_map import SignedMap
from loragate.models.folder_gates import FolderGates
from loragate.serving.layers import GateMixin


@dataclass(frozen=True)
class PlacedGates:
    """Where each gate goes: (layer name, slice, weight or None, bias), with the map for all."""

    entries: tuple[tuple[str, int, torch.Tensor | None, float], ...]
    signed_map: SignedMap

    def fill(self, modules: dict[str, Any], index: int) -> None:
        """Put the gates into slot `index`, which the layers have just reset; what has no gate stays at λ = 1."""
        for module in modules.values():
            if isinstance(module, GateMixin):
                module.pin_slot_to_one(index)
        for layer, piece, weight, bias in self.entries:
            modules[layer].set_gate(index, piece, weight, bias, self.signed_map)


def place_gates(gates: FolderGates, manager: Any) -> PlacedGates:
    """The gates of a folder, laid out over the layers of a LoRA manager.

    Args:
        gates: checked gates.
        manager: vLLM's `LoRAModelManager`, its layers gated.

    Raises:
        ArtifactError: for a gate without a layer, of another width, or made on another base.
    """
    where = gates.folder / CONFIG
    _check_base(gates, manager)
    slots = _slices(manager)
    # every gated module has a bias; weights are there for gates that read the token alone
    entries: list[tuple[str, int, torch.Tensor | None, float]] = []
    for path, bias in gates.biases.items():
        name = _vllm_name(path, manager)
        found = slots.get(name)
        if found is None:
            if get_pp_group().world_size == 1:  # else another process may hold the layer
                parent = next((layer for layer, parts in manager.packed_modules.items() if name in parts), name)
                module, why = manager.modules.get(parent), f"vLLM has no LoRA layer called {name} in this model"
                why += " (or its --lora-target-modules leave it out)"
                if module is not None:
                    why = f"its layer is a {type(module).__name__}, which has no gates"
                raise ArtifactError(f"{where}: {path} cannot be gated in vLLM: {why}")
            continue
        layer, pieces = found
        weight = gates.weights.get(path)
        width = manager.modules[layer].gate_width()
        if weight is not None and weight.numel() != width:
            raise ArtifactError(
                f"{where}: the gate of {path} reads {weight.numel()} features, the base has {width} there"
            )
        entries += [(layer, piece, weight, float(bias)) for piece in pieces]
    return PlacedGates(tuple(entries), gates.config.signed_map)


def _slices(manager: Any) -> dict[str, tuple[str, range]]:
    """{name of an adapted module: (its layer, the slices of it)}."""
    found: dict[str, tuple[str, range]] = {}
    for name, module in manager.modules.items():
        if not isinstance(module, GateMixin):
            continue
        count = module.gate_weight.shape[1]
        parts = manager.packed_modules.get(name)
        if parts is None:  # adapted under the layer's own name: the gate is that of every slice
            found[name] = (name, range(count))
        elif len(parts) == count:
            found |= {part: (name, range(piece, piece + 1)) for piece, part in enumerate(parts)}
    return found


def _check_base(gates: FolderGates, manager: Any) -> None:
    where, base = gates.folder / CONFIG, gates.base
    if not base:
        return
    named = base.get("id") or "unnamed"
    config = getattr(manager.model, "config", None)
    if config is not None and config_fingerprint(SimpleNamespace(config=config)) != base["config_sha256"]:  # type: ignore[arg-type]
        raise ArtifactError(f"{where}: these gates were made on a base of another architecture ({named})")
    if warning := rope_warning(base.get("rope"), rope_settings(SimpleNamespace(config=config))):  # type: ignore[arg-type]
        logging.getLogger("loragate").warning("%s: %s", where, warning)
    # norms are the weights that vLLM neither packs, shards, pads nor quantises
    served = dict(manager.model.named_parameters())
    recorded, known = base["weights"]["values"], {}
    for name in recorded:
        module, _, last = name.rpartition(".")
        parameter = served.get(f"{_vllm_name(module, manager)}.{last}")
        if parameter is not None and is_norm(name, parameter):
            known[name] = parameter
    if not known:
        logging.getLogger("loragate").warning(
            "%s: only the architecture of the base was checked: its record holds no norm weight that vLLM has here under that "
            "name. Earlier versions recorded none of many models; load the gates and save them again to record some",
            where,
        )
        return
    model: Any = SimpleNamespace(named_parameters=known.items)
    stored = {"dtype": base["weights"]["dtype"], "values": {name: recorded[name] for name in known}}
    if (difference := compare_base_samples(model, stored)) is not None:
        raise ArtifactError(f"{where}: these gates were made on another base ({named}): {difference}")


def _vllm_name(path: str, manager: Any) -> str:
    """vLLM's name of a module of the base."""
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = mapper.get_rename_mapper() if mapper is not None else None
    name: str = parse_fine_tuned_lora_name(f"base_model.model.{path}.lora_A.weight", mapper)[0]
    return name
