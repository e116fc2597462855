"""How the base under an adapter is stored: in plain floats, in 8 or 4 bits, or by another method.

Gates read activations and scale the adapter's delta, so they work on a quantised base as on a plain one. What differs is the
activations: gates are recorded with the storage they were trained on, and a reader is told when it is another.

One instruction set would change more than that. On a CPU with AVX512-BF16, bitsandbytes repacks a 4-bit weight at the first
forward in evaluation mode, for a kernel that rounds to bf16 and has no backward; `keep_unpacked` prevents it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from loragate.errors import GateError

NONE, EIGHT_BIT, FOUR_BIT = "none", "8bit", "4bit"


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
