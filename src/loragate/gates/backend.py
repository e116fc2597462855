"""Which code runs the gated LoRA operation: plain PyTorch, or Triton kernels on a CUDA device.

The environment variable LORAGATE_KERNEL is read once, when the first gate runs:

- `torch` (default): plain PyTorch.
- `auto`: on a CUDA device with Triton, the gate and the backward pass run in kernels; A x stays with the BLAS library, so
  that λ = 1 is the plain adapter bit for bit. Plain PyTorch elsewhere.
- `triton`: as `auto`, and A x is computed in the pass that reads x for the gate; λ = 1 is then the adapter up to the rounding
  of A x. An error where Triton is missing.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

from loragate.errors import ConfigError, nearest

VARIABLE = "LORAGATE_KERNEL"
CHOICES = ("torch", "auto", "triton")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@functools.cache
def chosen() -> str:
    """The setting.

    Raises:
        ConfigError: if it is none of `CHOICES`, or asks for Triton where Triton is missing.
    """
    choice = os.environ.get(VARIABLE) or CHOICES[0]
    if choice not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {choice!r}; it must be one of {', '.join(CHOICES)}{nearest(choice, CHOICES)}")
    if choice == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{VARIABLE}=triton needs Triton, which is not installed; install it, or use {VARIABLE}=auto")
    return choice


@functools.cache
def _kernels() -> Any:
    """`loragate.gates.kernel`, or None where Triton cannot be imported."""
    try:
        from loragate.gates import kernel
    except ImportError:
        return None
    return kernel


def kernels_for(x_TD: torch.Tensor, lora_a_RD: torch.Tensor, bias_1: torch.Tensor) -> Any:
    """`loragate.gates.kernel` where the setting, the device, the dtypes and the rank allow it, else None."""
    # asked first: a compiler must not trace into the setting
    if torch.compiler.is_compiling() or chosen() == "torch":
        return None
    # Triton's interpreter, which tests use, runs kernels on the CPU
    if x_TD.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    found = _kernels()
    if found is None or lora_a_RD.shape[0] > found.MAX_RANK:
        return None
    # fp64, and a gate that somebody cast, are left to PyTorch
    if x_TD.dtype not in _DTYPES or lora_a_RD.dtype not in _DTYPES or bias_1.dtype != torch.float32:
        return None
    return found


def projects(x_TD: torch.Tensor, lora_a_RD: torch.Tensor) -> bool:
    """Whether the kernel computes A x too."""
    autocast = torch.is_autocast_enabled(x_TD.device.type)  # under which F.linear would round A x to half precision
    return chosen() == "triton" and x_TD.dtype == lora_a_RD.dtype and not autocast
