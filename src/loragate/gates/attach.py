"""Putting gates onto an adapter that is already loaded, and taking them off again.

Attachment sets PEFT's per-instance extension points (`lora_variant`, `adapter_layer_names`,
`frozen_peft_weight_names`) and changes no class, so that freezing, `set_adapter`, `disable_adapter`, mixed batches and
deletion keep working as PEFT does them. What PEFT itself writes of a gated adapter lacks what makes its gates act, and says
so (`loragate.gates.variant`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from loragate.errors import GateError
from loragate.gates.eligibility import active_adapter, examine_adapter, lora_layers, require_gateable
from loragate.gates.fingerprint import FACTORS
from loragate.gates.gate import GateConfig, SignedGate, stream_of
from loragate.gates.quantised import keep_unpacked
from loragate.gates.schema import GLOBAL_BIAS
from loragate.gates.variant import (
    GatedLora,
    ask_before_merging,
    cast_input_again,
    leave_input_uncast,
    warn_no_more,
    warn_on_saving,
)


def attach_gates(peft_model: nn.Module, config: GateConfig, adapter_name: str | None = None) -> nn.Module:
    """Gate a loaded LoRA adapter in place; only its gate parameters train afterwards.

    Where the named adapter is not the active one, its gates are all that is set to train but no forward pass reads
    them, so a training loop finds no gradient: make it active first (`model.set_adapter`). `model.save_pretrained`
    writes what loads as the plain adapter, and warns; `loragate.save_gates` keeps the gates. PEFT's
    `add_weighted_adapter` combines the plain adapters and leaves gates out without a word, `hotswap_adapter` zeroes them
    (λ = 1), and `load_adapter` under the name of a gated adapter leaves its gates on, where they act on the new one: detach
    them first.

    Gates that were loaded (`load_gates`, `load_gated`) are frozen until `loragate.gates.train_gates_only(model)`, which is
    also to be called after `disable_adapter` where the adapter holds modules_to_save: PEFT sets these to train again.

    Args:
        peft_model: a PeftModel, or a transformers model with a LoRA adapter loaded natively.
        config: range, temperature, granularity and target modules.
        adapter_name: the adapter to gate; None for the active one.

    Returns:
        The same model. The adapter's output changes by no bit at zero gates and by about 1e-4 in logits at the default
        initialisation (fp32).

    Raises:
        GateError: where a gate would have no effect or be wrong (see `loragate.gates.eligibility`); nothing is changed.
    """
    name = active_adapter(peft_model, adapter_name)
    # all that can refuse comes before the first change
    verdicts = require_gateable(examine_adapter(peft_model, name, config.target_modules))
    chosen = {verdict.path for verdict in verdicts}
    layers = list(lora_layers(peft_model, name))
    devices = {layer.lora_A[name].weight.device for path, layer in layers if path in chosen}
    if any(device.type == "meta" for device in devices):
        raise GateError(
            "the adapter's weights are not in memory (offloaded or never loaded), so gates could not act on them; load the "
            "model without offloading"
        )
    if config.granularity == "global" and len(devices) > 1:
        raise GateError(
            "granularity 'global' needs the adapter on one device, found "
            + ", ".join(sorted(str(device) for device in devices))
            + "; use 'module' or 'token' for a model split over devices"
        )
    keep_unpacked(peft_model)
    shared_bias = None
    if config.granularity == "global":
        shared_bias = nn.Parameter(torch.full((1,), -config.init_scale, device=next(iter(devices))))
    for path, layer in layers:
        if path in chosen:
            gate_layer(layer, path, config, name, shared_bias)
        # A new dictionary on the instance: the one that PEFT starts with is the class's, and all layers' of all models.
        # PEFT would train A and B again after `disable_adapter` or `set_adapter`, in ungated layers too
        groups = tuple(group for group in FACTORS if hasattr(layer, group))
        layer.frozen_peft_weight_names = {**layer.frozen_peft_weight_names, name: groups}
        layer._freeze_non_trainable_peft_weights(name)
    train_gates_only(peft_model, name)
    warn_on_saving(peft_model, name)
    ask_before_merging(peft_model)
    return peft_model


def gate_layer(
    layer: Any, path: str, config: GateConfig, adapter_name: str, shared_bias: nn.Parameter | None = None
) -> None:
    """Put a fresh gate into one LoRA layer, on the device of its factors; what trains is left as it is."""
    if not hasattr(layer, "lora_gate"):
        layer.lora_gate = nn.ModuleDict({})
        layer.register_forward_pre_hook(leave_input_uncast)
    # PEFT moves, freezes, switches and deletes what these names hold, by adapter; set on the instance, the class stays as it is
    if "lora_gate" not in layer.adapter_layer_names:
        layer.adapter_layer_names = (*layer.adapter_layer_names, "lora_gate")
    reference = layer.lora_A[adapter_name].weight
    gate = SignedGate(reference.shape[-1], config, path, shared_bias)
    layer.lora_gate[adapter_name] = gate if shared_bias is not None else gate.to(reference.device)
    layer.lora_gate.train(layer.training)
    layer.lora_variant[adapter_name] = GatedLora()


def train_gates_only(model: nn.Module, adapter_name: str | None = None) -> None:
    """Freeze every parameter of the model but the gates of `adapter_name` (None: the active one).

    `attach_gates` does it. Call it before you train gates that were loaded, which are frozen, and again after
    `disable_adapter` where the adapter holds modules_to_save: PEFT sets these to train again.

    Raises:
        GateError: if the adapter carries no gates.
    """
    # by identity: a shared bias has a name in every module
    trainable = {id(parameter) for parameter in gate_parameters(model, adapter_name).values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trainable)


def detach_gates(peft_model: nn.Module, adapter_name: str | None = None) -> nn.Module:
    """Remove the gates of an adapter in place; the adapter acts at full strength again and its factors stay frozen.

    Args:
        peft_model: the gated model.
        adapter_name: the adapter to take them off; None for the active one.

    Raises:
        GateError: if the adapter carries no gates.
    """
    name = active_adapter(peft_model, adapter_name)
    gate_modules(peft_model, name)  # refuses an adapter without any
    for _, layer in lora_layers(peft_model, name):
        layer.frozen_peft_weight_names = {
            other: frozen for other, frozen in layer.frozen_peft_weight_names.items() if other != name
        }
        if not _is_gated(layer, name):
            continue
        del layer.lora_variant[name]
        del layer.lora_gate[name]
        if len(layer.lora_gate) == 0:
            layer.adapter_layer_names = tuple(group for group in layer.adapter_layer_names if group != "lora_gate")
            del layer.lora_gate
            cast_input_again(layer)
    warn_no_more(peft_model, name)
    return peft_model


def is_gated(model: nn.Module, adapter_name: str) -> bool:
    """Whether an adapter carries gates."""
    return any(_is_gated(layer, adapter_name) for _, layer in lora_layers(model, adapter_name))


def gate_modules(model: nn.Module, adapter_name: str | None = None) -> dict[str, SignedGate]:
    """{module path: gate} of one adapter, in model order.

    Raises:
        GateError: if the adapter carries no gates, so that nothing silently acts on an ungated model.
    """
    name = active_adapter(model, adapter_name)
    found = {path: layer.lora_gate[name] for path, layer in lora_layers(model, name) if _is_gated(layer, name)}
    if not found:
        raise GateError(f"adapter {name!r} carries no gates; attach them with loragate.attach_gates or load_gates")
    return found


def gate_parameters(peft_model: nn.Module, adapter_name: str | None = None) -> dict[str, nn.Parameter]:
    """All that Stage II trains.

    Returns:
        {"<module path>.weight": [d_in], "<module path>.bias": [1]}, fp32; module granularity has biases only, and
        global granularity the one entry "global.bias".

    Raises:
        GateError: if the adapter carries no gates.
    """
    parameters: dict[str, nn.Parameter] = {}
    for path, gate in gate_modules(peft_model, adapter_name).items():
        if gate.config.granularity == "global":
            return {GLOBAL_BIAS: gate.bias}
        if gate.weight is not None:
            parameters[f"{path}.weight"] = gate.weight
        parameters[f"{path}.bias"] = gate.bias
    return parameters


def attached_config(model: nn.Module, adapter_name: str | None = None) -> GateConfig:
    """The `GateConfig` the adapter's gates were made with."""
    return next(iter(gate_modules(model, adapter_name).values())).config


def _is_gated(layer: Any, adapter_name: str) -> bool:
    return isinstance(getattr(layer, "lora_variant", {}).get(adapter_name), GatedLora)


def draw_gates(
    model: nn.Module, seed: int, scale: float | Mapping[str, float], adapter_name: str | None = None
) -> dict[str, torch.Tensor]:
    """Overwrite the attached gates with independent normal values: is a trained gate better than any gate of its size?

    Each tensor has a random stream of its own, seeded by `seed` and its name, so the values depend neither on the order of
    the modules nor on the global random state.

    Args:
        model: a model with gates attached.
        seed: of the draw.
        scale: standard deviation of all values, or of each tensor by its name in `gate_parameters`.
        adapter_name: None for the active adapter.

    Returns:
        The values, by name.
    """
    drawn = {}
    for name, parameter in gate_parameters(model, adapter_name).items():
        size = scale if isinstance(scale, (int, float)) else scale[name]
        drawn[name] = torch.randn(parameter.shape, generator=stream_of(f"random:{seed}:{name}")) * size
        with torch.no_grad():
            parameter.copy_(drawn[name])
    return drawn


def sizes_of(gates: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Root mean square of each gate tensor: the scale at which random gates are as large as these."""
    return {name: float(value.detach().double().pow(2).mean().sqrt()) for name, value in gates.items()}
