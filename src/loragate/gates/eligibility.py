"""What of a loaded model can be gated: which modules of an adapter, which not, and why; and how the base under it is stored.

Verdicts are made from the module's class and state alone, before anything is changed. "gate" modules get a gate,
"leave" modules keep their delta at full strength, and one "refuse" stops the whole attachment, because the gates there
would silently have no effect or a wrong one.

Gates read activations and scale the adapter's delta, so they work on a quantised base as on a plain one. What differs is the
activations: gates are recorded with the storage they were trained on, and a reader is told when it is another. One
instruction set would change more than that. On a CPU with AVX512-BF16, bitsandbytes repacks a 4-bit weight at the first
forward in evaluation mode, for a kernel that rounds to bf16 and has no backward; `keep_unpacked` prevents it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from loragate.errors import GateError, nearest
from loragate.gates.adapter_rules import base_change_reason

# Linear LoRA layers of PEFT that consult `lora_variant`, in mixed batches too; tests/contract checks each against its source.
GATEABLE_CLASSES = frozenset(
    ("Linear", "Linear4bit", "Linear8bitLt", "GPTQLoraLinear", "TorchaoLoraLinear", "IncLoraLinear")
)
# LoRA layers that are not linear maps from one token's features: λ per token is not defined for them here.
LEFT_CLASSES = {
    "Embedding": "an adapter on an embedding has no input features to read; its delta keeps full strength",
    "Conv1d": "convolutions mix positions; its delta keeps full strength",
    "Conv2d": "convolutions mix positions; its delta keeps full strength",
    "Conv3d": "convolutions mix positions; its delta keeps full strength",
    "ParamWrapper": "fused expert weights (target_parameters) see routed tokens; their delta keeps full strength",
}
NONE, EIGHT_BIT, FOUR_BIT = "none", "8bit", "4bit"
"""Storage of a base; another method has its own name (gptq, awq)."""
GATEABLE_STORAGE = frozenset((NONE, EIGHT_BIT, FOUR_BIT, "gptq", "torchao"))
"""Storage whose LoRA layers are among `GATEABLE_CLASSES`."""
UNGATEABLE_STORAGE = {
    "awq": "AwqLoraLinear",
    "hqq": "HqqLoraLinear",
    "aqlm": "AqlmLoraLinear",
    "eetq": "EetqLoraLinear",
}
"""Storage whose LoRA layers are not: {method: PEFT's class}. Of all other methods it shows when the base is loaded."""
LM_HEAD_REASON = "an adapter on the output head is part of the distribution itself; it keeps full strength"

# What torch.compile, activation checkpointing and FSDP put around single layers; module paths go without it.
_WRAPPERS = re.compile(r"(?:^|\.)(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")


@dataclass(frozen=True)
class Verdict:
    """What happens to one adapted module; sizes are those of the LoRA delta, 0 where they do not apply."""

    path: str  # the base model's own name of the module
    status: str  # "gate", "leave" or "refuse"
    reason: str = ""  # why, in plain words; empty for "gate"
    d_in: int = 0
    d_out: int = 0
    rank: int = 0


def adapter_configs(model: nn.Module, adapter_name: str) -> list[Any]:
    """The adapter's configuration, mostly one; a wrapper around the model may hold a table of its own."""
    return [configs[adapter_name] for configs in config_tables(model, adapter_name)]


def config_tables(model: nn.Module, adapter_name: str) -> Iterator[dict[str, Any]]:
    """Every {adapter name: configuration} of the model, its wrappers included, that holds the adapter."""
    seen: set[int] = set()
    for module in model.modules():
        # vars, not getattr: a PeftModel's is a property that gives its tuner's
        configs = vars(module).get("peft_config")
        if isinstance(configs, dict) and adapter_name in configs and id(configs) not in seen:
            seen.add(id(configs))
            yield configs


def changed_base_of(model: nn.Module, adapter_name: str) -> str:
    """`base_change_reason` of an adapter that is loaded."""
    for config in adapter_configs(model, adapter_name):
        if why := base_change_reason(getattr(config, "init_lora_weights", None)):
            return why
        if getattr(config, "kasa_config", None):
            return "kasa_config takes the smallest singular values out of the base's weights, so λ = 0 is not the base"
    return ""


def lora_layers(model: nn.Module, adapter_name: str) -> Iterator[tuple[str, Any]]:
    """(module path in the base model's own names, LoRA layer) of every layer that holds `adapter_name`."""
    for name, module in model.named_modules():
        if not _is_lora(module):
            continue
        # an embedding's factors are in dictionaries of their own
        if adapter_name in module.lora_A or adapter_name in getattr(module, "lora_embedding_A", {}):
            yield base_module_name(name), module


def base_module_name(name: str) -> str:
    """`name` without the prefixes that PEFT puts before the base model's own module names, and without wrappers."""
    name = strip_wrapper_names(name)
    for prefix in ("module.", "base_model.model."):  # DistributedDataParallel around a PeftModel
        name = name.removeprefix(prefix)
    # PEFT moves the layer that it adapts one step down
    return re.sub(r"\.base_layer(?=\.|$)", "", name)


def strip_wrapper_names(name: str) -> str:
    """`name` without the wrappers of torch.compile, activation checkpointing and FSDP, wherever they are."""
    return _WRAPPERS.sub("", name).removeprefix(".")


_LOADED = "load the adapter onto its base first, e.g. peft.PeftModel.from_pretrained(base, adapter_folder)"


def active_adapter(model: nn.Module, adapter_name: str | None = None) -> str:
    """`adapter_name`, or the one active adapter when it is None; a GateError where the model has none of that name, or no one."""
    if not isinstance(model, nn.Module):
        raise GateError(f"expected a loaded model, found {model!r:.200}; {_LOADED}")
    layers: list[Any] = [module for module in model.modules() if _is_lora(module)]
    known = sorted({name for layer in layers for name in (*layer.lora_A, *getattr(layer, "lora_embedding_A", {}))})
    if not known:
        raise GateError(f"the model carries no LoRA layers; {_LOADED}")
    names: Any = [adapter_name]
    if adapter_name is None:
        active: Any = getattr(model, "active_adapters", None)
        try:
            active = active() if callable(active) else active
        except ValueError:  # a transformers model whose adapter was put on by peft itself knows of none
            active = None
        if active is None:  # nor does a wrapper, such as DistributedDataParallel
            active = layers[0].active_adapters
        names = [active] if isinstance(active, str) else list(active)
    if len(names) != 1:
        which = f"{len(names)} adapters are active ({', '.join(names)})" if names else "no adapter is active"
        raise GateError(f"{which}; say which with adapter_name (the model has {', '.join(known)})")
    if names[0] not in known:
        raise GateError(
            f"the model has no LoRA adapter named {names[0]!r}{nearest(names[0], known)} (it has {', '.join(known)})"
        )
    return str(names[0])


def _is_lora(module: Any) -> TypeGuard[Any]:
    return isinstance(module, BaseTunerLayer) and hasattr(module, "lora_A")


def classify_layer(path: str, layer: Any, adapter_name: str, is_head: bool = False) -> Verdict:
    """The verdict on one LoRA layer, disregarding target lists."""
    if type(layer).__name__ in LEFT_CLASSES:
        return Verdict(path, "leave", LEFT_CLASSES[type(layer).__name__])
    if is_head:
        return Verdict(path, "leave", LM_HEAD_REASON)
    reason = _refusal(layer, adapter_name)
    sizes = (int(layer.in_features or 0), int(layer.out_features or 0), int(layer.r.get(adapter_name, 0)))
    return Verdict(path, "refuse" if reason else "gate", reason, *sizes)


def _refusal(layer: Any, adapter_name: str) -> str:
    """Why a gate would do nothing, or something wrong, on a linear LoRA layer; empty where it can be gated."""
    kind = type(layer).__name__
    # by name: the classes of optional libraries cannot be imported; of another module, one may override `forward`
    if kind not in GATEABLE_CLASSES or not type(layer).__module__.startswith("peft."):
        return no_variant_reason(kind)
    variant = layer.lora_variant.get(adapter_name)
    if variant is not None:
        name = type(variant).__name__
        if name == "GatedLora":  # of gates.attach, which stands above this module
            return "it already carries gates; detach them first"
        name = name.removesuffix("LinearVariant").removesuffix("Variant")
        return (
            f"the adapter is a {name} variant of LoRA, which computes its delta in another way than B·A·x. Gate a plain LoRA "
            "adapter"
        )
    if layer.lora_bias.get(adapter_name, False):
        return "lora_bias=True adds a term outside B·A·x that λ would not scale; retrain without it"
    if layer.merged:
        return "the adapter is merged into the base weights, where a gate has no effect; call unmerge_adapter() first"
    base = layer.get_base_layer()
    if getattr(base, "_hf_tp_plan", None) or getattr(base, "_is_tensor_parallel", False):
        return "tensor-parallel layers hold a shard of the input, so w·h would be wrong; load without a tp_plan"
    return ""


def no_variant_reason(kind: str) -> str:
    """Why layers of a class of PEFT's take no gate."""
    return (
        f"{kind} layers do not consult a LoRA variant, or not in mixed batches, so a gate there would have no effect. Load "
        "the base without that quantisation or parallel layer where one is the reason; else gate a plain LoRA adapter, or "
        "leave the module out of target_modules"
    )


def examine_adapter(model: nn.Module, adapter_name: str | None = None, target_modules: Any = None) -> list[Verdict]:
    """Verdicts on every module of the adapter (None: the active one), in model order.

    Raises:
        GateError: if the model has no such adapter, or a target list or pattern matches nothing it could gate.
    """
    name = active_adapter(model, adapter_name)
    head = output_head(model)
    verdicts = [classify_layer(path, layer, name, layer is head) for path, layer in lora_layers(model, name)]
    # one reason for all that could be gated; what is left stays left
    if reason := changed_base_of(model, name):
        verdicts = [replace(v, status="refuse", reason=reason) if v.status == "gate" else v for v in verdicts]
    if target_modules is None:
        return verdicts
    chosen = _chosen_paths([verdict.path for verdict in verdicts], target_modules)
    hopeless = [v for v in verdicts if v.path in chosen and v.status == "leave"]
    if hopeless:
        raise GateError(f"target_modules selects {hopeless[0].path}, which cannot be gated: {hopeless[0].reason}")
    return [
        v if v.path in chosen else replace(v, status="leave", reason="not selected by target_modules") for v in verdicts
    ]


def require_gateable(verdicts: list[Verdict]) -> list[Verdict]:
    """The "gate" verdicts; a GateError with every reason once if any module must be refused or none is left to gate."""
    refused = [verdict for verdict in verdicts if verdict.status == "refuse"]
    if refused:
        reasons: dict[str, list[str]] = {}
        for verdict in refused:
            reasons.setdefault(verdict.reason, []).append(verdict.path)
        lines = [
            f"- {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") + f": {reason}"
            for reason, paths in reasons.items()
        ]
        raise GateError("this adapter cannot be gated:\n" + "\n".join(lines))
    chosen = [verdict for verdict in verdicts if verdict.status == "gate"]
    if not chosen:
        reasons_left = sorted({verdict.reason for verdict in verdicts})
        raise GateError("no module of this adapter can be gated: " + "; ".join(reasons_left))
    return chosen


def require_trainable(verdicts: list[Verdict]) -> None:
    """Refuse (GateError) a delta on the output head: the losses that train gates multiply by the head's own weight."""
    head = next((verdict.path for verdict in verdicts if verdict.reason == LM_HEAD_REASON), None)
    if head is not None:
        raise GateError(
            f"the adapter has a delta on the output head ({head}), and gates cannot be trained beside one: the entropy is "
            "computed from the head's own weight. Train the adapter without the head in its target_modules"
        )


def _chosen_paths(paths: list[str], target_modules: Any) -> set[str]:
    if isinstance(target_modules, str):
        try:
            chosen = {path for path in paths if re.fullmatch(target_modules, path)}
        except re.error as error:
            raise GateError(
                f"target_modules is not a valid regular expression: {target_modules!r} ({error})"
            ) from error
        if not chosen:
            raise GateError(
                f"target_modules pattern {target_modules!r} matches no LoRA module of the adapter; "
                f"the first of its {len(paths)} modules is {paths[0]!r} (the pattern must match the full path)"
            )
        return chosen
    chosen = set()
    for target in target_modules:
        matches = {path for path in paths if path == target or path.endswith("." + target)}
        if not matches:
            names = sorted({path.rsplit(".", 1)[-1] for path in paths})
            raise GateError(
                f"target_modules names {target!r}, which is no LoRA module of the adapter"
                f"{nearest(target, names)} (its modules end in {', '.join(names)})"
            )
        chosen |= matches
    return chosen


def output_head(model: nn.Module) -> nn.Module | None:
    """The layer that gives the logits over the vocabulary, where the model says which."""
    getter = getattr(model, "get_output_embeddings", None)
    try:
        return getter() if getter is not None else None
    except (AttributeError, NotImplementedError):
        return None


def quantization_of(model: nn.Module) -> str:
    """ "none", "8bit", "4bit", or the name of another method ("gptq", "awq", …), from the model's configuration."""
    return quantization_of_config(getattr(model, "config", None))


def quantization_of_config(config: Any) -> str:
    """The same of a configuration, before anything is loaded."""
    record = getattr(config, "quantization_config", None)
    if record is None:
        return NONE
    record = record if isinstance(record, dict) else record.to_dict()  # of a file; of a model in memory
    method = record.get("quant_method") or ""
    method = str(getattr(method, "value", method)).lower()
    # bitsandbytes' own, whose configuration in memory has the keys with an underscore before them
    for key, name in (("load_in_8bit", EIGHT_BIT), ("load_in_4bit", FOUR_BIT)):
        if record.get(key) or record.get(f"_{key}"):
            return name
    return method or "an unnamed method"


def keep_unpacked(model: nn.Module) -> None:
    """Keep the 4-bit weights of a model in the form that trains, in place; it then computes the same on every processor.

    `load_gated`, `attach_gates`, `calibrate`, `train_adapter` and every command do it. Call it right after loading a 4-bit
    base that runs before one of these. Other models are left as they are.

    Raises:
        GateError: if weights were packed by then: the scales of their blocks are rounded to bf16 for good.
    """
    # of bitsandbytes.nn.Linear4bit, which is not imported to look for it
    layers: list[Any] = [layer for layer in model.modules() if "support_avx512bf16_for_cpu" in vars(layer)]
    packed = sum(hasattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu") for layer in layers)
    if packed:
        raise GateError(
            f"{packed} 4-bit layers ran before gates or a training came to them: on this processor bitsandbytes packed their "
            "weights for inference and rounded the scales to bf16. Load the base again, and call "
            "loragate.gates.keep_unpacked(model) before it runs"
        )
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False


def describe_storage(name: str) -> str:
    """ "an unquantised base", "a 4bit base", …"""
    if name == NONE:
        return "an unquantised base"
    return f"{'an' if name[:1] in '8aeiou' else 'a'} {name} base"


def storage_warning(recorded: str | None, found: str) -> str | None:
    """What to tell who loads gates on a base that is stored in another way; None where there is nothing to tell."""
    if recorded is None or recorded == found:
        return None
    return (
        f"these gates were calibrated on {describe_storage(recorded)} and are loaded on {describe_storage(found)}: they read "
        "slightly other activations, so answers differ a little. Evaluate again before you rely on earlier scores"
    )
