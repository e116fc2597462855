"""One gate: the fp32 parameters of one module, with what may be laid over them while it runs.

A `SignedGate` sits inside a LoRA layer next to lora_A and lora_B, so that PEFT moves, freezes, saves and deletes it with
the adapter. It turns (x, A, B, scaling) into a gated delta and does not know where these come from.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import nn

from loragate.errors import GateError
from loragate.gates.config import GateConfig
from loragate.gates.operation import (
    gate_coefficient_of_input,
    gated_delta,
    gated_delta_reference,
    overridden_coefficient,
)
from loragate.gates.recording import Recorder, Trace


@dataclass(frozen=True)
class Override:
    """λ clipped to [minimum, maximum], or replaced by `constant`.

    Raises:
        GateError: for a contradiction, or a number that is not finite.
    """

    minimum: float | None = None
    maximum: float | None = None
    constant: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in vars(self).values() if value is not None]
        if not all(map(math.isfinite, given)):
            raise GateError(f"an override of λ takes finite numbers, found {given}")
        if self.constant is not None and len(given) > 1:
            raise GateError("an override of λ takes either constant or minimum/maximum, not both")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise GateError(f"an override of λ: minimum {self.minimum:g} is above maximum {self.maximum:g}")


class SignedGate(nn.Module):
    """Gate of one module: g = w·sg(h) + b, λ = signed map of g.

    Attributes:
        weight: [d_in] fp32, or None for module and global granularity.
        bias: [1] fp32; one shared parameter for global granularity.
        override: what is laid over λ at present, None in normal use.
        recorder: what takes note of λ, None when nothing is recorded.
    """

    weight: nn.Parameter | None

    def __init__(self, d_in: int, config: GateConfig, path: str, shared_bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.config = config
        if config.granularity == "token":
            self.weight = nn.Parameter(initial_weight(d_in, config, path))
        else:
            self.register_parameter("weight", None)
        # A bias of zero sits on the U branch; with U = 1 its slope is zero, and without a weight nothing else could
        # move the gate. Starting a hair below zero puts it on the L branch, which is never flat there.
        start = 0.0 if config.granularity == "token" else -config.init_scale
        self.bias = shared_bias if shared_bias is not None else nn.Parameter(torch.full((1,), start))
        self.override: Override | None = None
        self.recorder: Recorder | Trace | None = None

    def _apply(self, fn, recurse: bool = True):
        """Follow moves between devices, but stay fp32 whatever dtype the model is cast to."""

        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_precision, recurse)

    def coefficients(self, x_TD: torch.Tensor) -> torch.Tensor:
        """λ per token, [...], fp32, with the override in force."""
        config, override = self.config, self.override
        lam_T = gate_coefficient_of_input(x_TD, self.weight, self.bias, config.signed_map, config.detach_input)
        if override is None:
            return lam_T
        return overridden_coefficient(lam_T, override.minimum, override.maximum, override.constant)

    def gated_delta(
        self, x_TD: torch.Tensor, lora_a_RD: torch.Tensor, lora_b_OR: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """The layer's gated delta, [..., d_out]."""
        config, override = self.config, self.override
        if self.recorder is not None:
            # without a graph, so that a recomputing forward (gradient checkpointing) saves the same tensors
            with torch.no_grad():
                self.recorder.update(self.coefficients(x_TD))
        operands = (x_TD, lora_a_RD, lora_b_OR, self.weight, self.bias, config.signed_map, scaling)
        if override is None:
            return gated_delta(*operands, detach_input=config.detach_input)
        return gated_delta_reference(*operands, detach_input=config.detach_input, **vars(override))

    def extra_repr(self) -> str:
        config = self.config
        width = "bias only" if self.weight is None else f"d_in={self.weight.numel()}"
        return f"{width}, range={config.range}, granularity={config.granularity}"


def initial_weight(d_in: int, config: GateConfig, path: str) -> torch.Tensor:
    """The deterministic perturbation of one module, [d_in] fp32: depends on seed and module path, on nothing else.

    A generator of its own leaves the global random state untouched and makes the values independent of the order in
    which modules are visited.
    """
    digest = hashlib.sha256(f"{config.seed}:{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(d_in, generator=generator, device="cpu") * config.init_scale
