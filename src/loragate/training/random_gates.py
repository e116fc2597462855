"""Random gates: the control that asks whether a trained gate is better than any gate of its size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from loragate.gates import gate_parameters


def draw_gates(
    model: nn.Module, seed: int, scale: float | Mapping[str, float], adapter_name: str | None = None
) -> dict[str, torch.Tensor]:
    """Overwrite the attached gates with independent normal values; nothing is trained.

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
        digest = hashlib.sha256(f"random:{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        size = scale if isinstance(scale, (int, float)) else scale[name]
        drawn[name] = torch.randn(parameter.shape, generator=generator) * size
        with torch.no_grad():
            parameter.copy_(drawn[name])
    return drawn


def sizes_of(gates: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Root mean square of each gate tensor: the scale at which random gates are as large as these."""
    return {name: float(value.detach().double().pow(2).mean().sqrt()) for name, value in gates.items()}
