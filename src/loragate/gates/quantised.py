"""How the base under an adapter is stored: in plain floats, in 8 or 4 bits, or by another method.

Gates read activations and scale the adapter's delta, so they work on a quantised base as on a plain one. What differs is the
activations: gates are recorded with the storage they were trained on, and a reader is told when it is another.

One instruction set would change more than that. On a CPU with AVX512-BF16, bitsandbytes repacks a 4-bit weight at the first
forward in evaluation mode, for a kernel that rounds to bf16 and has no backward; `keep_unpacked` prevents it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("loragate")

NONE, EIGHT_BIT, FOUR_BIT = "none", "8bit", "4bit"
# bitsandbytes layers of PEFT, which round a plain delta to the base's dtype before it is added
_ROUNDING_LAYERS = ("Linear4bit", "Linear8bitLt")


def quantization_of(model: nn.Module) -> str:
    """ "none", "8bit", "4bit", or the name of another method ("gptq", "awq", …), from the model's configuration."""
    return quantization_of_config(getattr(model, "config", None))


def quantization_of_config(config: Any) -> str:
    """The same of a configuration, before anything is loaded."""
    record = getattr(config, "quantization_config", None)
    if record is None:
        return NONE
    record = record if isinstance(record, dict) else record.to_dict()
    method = record.get("quant_method") or ""
    method = str(getattr(method, "value", method)).lower()
    for key, name in (("load_in_8bit", EIGHT_BIT), ("load_in_4bit", FOUR_BIT)):
        if record.get(key) or record.get(f"_{key}"):
            return name
    return method or "an unnamed method"


def rounds_delta(layer: nn.Module) -> bool:
    """Whether PEFT rounds this layer's delta to the output's dtype before adding it."""
    return type(layer).__name__ in _ROUNDING_LAYERS


def keep_unpacked(model: nn.Module) -> None:
    """Keep the 4-bit weights of a model in the form that trains, in place; it then computes the same on every processor.

    `load_gated`, `attach_gates`, `calibrate`, `train_adapter` and every command do it. Call it right after loading a 4-bit
    base that runs before one of these: a weight that was packed is unpacked here, but the scales of its blocks stay rounded
    to bf16, and a warning says so. Other models are left as they are.
    """
    rounded = 0
    layers: Iterator[Any] = model.modules()
    for layer in layers:
        # of bitsandbytes.nn.Linear4bit, which is not imported to look for it
        if "support_avx512bf16_for_cpu" not in vars(layer):
            continue
        layer.support_avx512bf16_for_cpu = False
        if hasattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu"):
            _unpack(layer.weight)
            rounded += 1
    if rounded:
        logger.warning(
            "%d 4-bit layers ran before gates or a training came to them: on this processor bitsandbytes packed their weights "
            "for inference and rounded the scales to bf16. They train as they are now, and on the base loaded anew the same "
            "gates or adapter give slightly other logits. To avoid it, load the base again and call "
            "loragate.gates.keep_unpacked(model) before it runs",
            rounded,
        )


def _unpack(weight: Any) -> None:
    """Restore a weight that is packed, or that bitsandbytes unpacked, as any `state_dict()` makes it do."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

    state = weight.quant_state
    if state.packing_format_for_cpu:
        state.original_nested = False  # or the inverse would quantise the rounded scales once more
        weight.data, _ = _convert_weight_packed_for_cpu_inverse(weight.data, state)
        state.offset = state.state2 = None
    if not state.nested:
        # the inverse leaves plain scales as a packed weight has them: transposed, in bf16
        state.absmax = state.absmax.T.reshape(-1).to(torch.float32)
    del state.packing_format_for_cpu


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
