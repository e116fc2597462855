"""`--quantization`: what 8- and 4-bit bases need when they are loaded, and which wishes cannot go together with them.

The storage is bitsandbytes' (NF4 with double quantisation for 4 bits). Gates and LoRA factors stay fp32 whatever the base is.
Wishes are checked when a command starts, before anything is loaded.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from loragate.errors import ConfigError, nearest

NONE, EIGHT_BIT, FOUR_BIT = "none", "8bit", "4bit"
QUANTIZATIONS = (NONE, EIGHT_BIT, FOUR_BIT)


def check_quantization(options: Any) -> None:
    """Refuse a quantisation that is unknown, not installed, or impossible with the other options of a command.

    Args:
        options: of any command with quantization, dtype and device; engine where it has one.

    Raises:
        ConfigError: naming the flag, and what to change.
    """
    wanted = options.quantization
    if wanted not in QUANTIZATIONS:
        raise ConfigError(
            f"--quantization {wanted}: expected {', '.join(QUANTIZATIONS)}{nearest(wanted, QUANTIZATIONS)}"
        )
    if wanted == NONE:
        return
    if getattr(options, "engine", "") == "vllm":
        raise ConfigError(
            f"--quantization {wanted} has no effect with vLLM, which loads the base itself; leave it out, or use --engine "
            "transformers"
        )
    if wanted == EIGHT_BIT and options.dtype == "float32":
        raise ConfigError(
            "--quantization 8bit with --dtype float32: 8-bit layers multiply in float16, so float32 would be a false promise; "
            "leave --dtype out, or use --quantization 4bit"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"--quantization {wanted} needs bitsandbytes, which is not installed; pip install bitsandbytes"
        )
    from loragate.cli.models import pick_device
    from loragate.training.compatibility import Plan, refuse_impossible
    from loragate.training.strategy import launch_of

    device = pick_device(options.device).partition(":")[0]
    refuse_impossible(Plan(launch=launch_of(), device=device, quantization=wanted))


def dtype_for(quantization: str, device: str) -> Any:
    """The dtype of `--dtype auto` for what stays unquantised, which is also what 4-bit layers compute in.

    bfloat16, or float16 on GPUs without it; float32 for 4 bits on a CPU, as everywhere else on a CPU.
    """
    import torch

    if device == "cpu":
        return torch.float32 if quantization == FOUR_BIT else torch.bfloat16
    return torch.bfloat16 if not device.startswith("cuda") or torch.cuda.is_bf16_supported() else torch.float16


def base_arguments(
    name: str, *, dtype: Any, device: str, quantization: str = NONE, revision: str | None = None, trust: bool = False
) -> dict[str, Any]:
    """Keywords of `AutoModelForCausalLM.from_pretrained` for a base, plain or quantised.

    Quantised weights are put on their device while they are loaded and are not moved afterwards; `device_map` says so.

    Raises:
        ConfigError: if a quantisation is asked for and the checkpoint is quantised already.
    """
    from transformers import AutoConfig

    from loragate.gates.quantised import describe_storage, quantization_of_config

    found: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust}
    stored = quantization_of_config(
        AutoConfig.from_pretrained(name, revision=revision or None, trust_remote_code=trust)
    )
    if stored != NONE and quantization != NONE:
        raise ConfigError(f"{name} is {describe_storage(stored)} already; leave --quantization out")
    if quantization != NONE:
        found["quantization_config"] = _bitsandbytes(quantization, dtype)
    if stored != NONE or quantization != NONE:
        found["device_map"] = {"": _exact(device)}
    return found


def _bitsandbytes(quantization: str, dtype: Any) -> Any:
    from transformers import BitsAndBytesConfig

    if quantization == EIGHT_BIT:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _exact(device: str) -> Any:
    """ "cuda" means the process's own GPU, as it does elsewhere in torch; a device map would read it as the first."""
    import torch

    return torch.cuda.current_device() if device == "cuda" else device
