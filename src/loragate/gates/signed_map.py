"""The signed map from a gate logit to the coefficient λ: pure mathematics, no model.

Everything that needs λ (the layer, its fused backward, serving, the tests) takes it from here, so that the branch at the
join is written once. It knows nothing of LoRA, PEFT or modules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from loragate.errors import GateError
from loragate.gates.range import Range


@dataclass(frozen=True)
class SignedMap:
    """λ(g) = 1 + (1−L)·min(v,0) + (U−1)·max(v,0) with v = tanh(g/τ) (eq:rw-gate-logit, eq:rw-transform).

    Attributes:
        range: [L, U], reached as v → ∓1.
        tau: gate temperature τ > 0.

    Raises:
        GateError: for a temperature that is no positive number.
    """

    range: Range
    tau: float = 1.0

    def __post_init__(self) -> None:
        _check_tau(self.tau)

    @property
    def below(self) -> float:
        """dλ/dv for v < 0: 1−L."""
        return 1.0 - self.range.lower

    @property
    def above(self) -> float:
        """dλ/dv for v ≥ 0: U−1."""
        return self.range.upper - 1.0

    def response(self, gate_logit: torch.Tensor) -> torch.Tensor:
        """v of a logit, in fp32 (fp64 stays fp64), same shape."""
        return _response(gate_logit, self.tau)

    def slope(self, response: torch.Tensor) -> torch.Tensor:
        """dλ/dv on the branch that holds at v, same shape.

        A choice is the only form with the right one-sided slope everywhere: `clamp` adds both slopes at v = 0, `relu`
        gives 0 there (a gate that starts at zero would never move) and `minimum`/`maximum` the mean.
        """
        # not `torch.where` of two numbers, which would wait for a copy from the host to the device
        return torch.full_like(response, self.above).masked_fill_(response < 0, self.below)

    def of_response(self, response: torch.Tensor) -> torch.Tensor:
        """λ of v, same shape and dtype; exactly 1 at v = 0."""
        return _coefficient(response, self.below, self.above)

    def __call__(self, gate_logit: torch.Tensor) -> torch.Tensor:
        """λ of a logit, same shape, fp32 (fp64 for fp64)."""
        return self.of_response(self.response(gate_logit))


def gate_coefficient(
    gate_logit: torch.Tensor,
    lower: float | torch.Tensor,
    upper: float | torch.Tensor,
    tau: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """The signed map of eq:rw-transform: λ(g) in [lower, upper], identity-centred.

    Args:
        gate_logit: g = w·h + b, any shape and floating dtype.
        lower: L ≤ 0, reached as v → −1. A number, or a tensor that broadcasts against `gate_logit`.
        upper: U ≥ 1, reached as v → +1.
        tau: gate temperature τ > 0.

    Returns:
        λ, same shape, fp32 (fp64 for an fp64 input). The image is the open interval in exact arithmetic and the closed
        one in fp32. λ = 1 at g = 0, and λ = 0 where v = −1/(1−L).

    Raises:
        GateError: for numbers that are no range or temperature (see `Range`). Tensors are not looked into.
    """
    Range(0.0 if isinstance(lower, torch.Tensor) else lower, 1.0 if isinstance(upper, torch.Tensor) else upper)
    _check_tau(1.0 if isinstance(tau, torch.Tensor) else tau)
    return _coefficient(_response(gate_logit, tau), 1.0 - lower, upper - 1.0)


def _response(gate_logit: torch.Tensor, tau: float | torch.Tensor) -> torch.Tensor:
    working = gate_logit if gate_logit.dtype == torch.float64 else gate_logit.float()
    if not isinstance(tau, torch.Tensor) and tau == 1.0:
        return torch.tanh(working)
    return torch.tanh(working / tau)


def _coefficient(response: torch.Tensor, below: float | torch.Tensor, above: float | torch.Tensor) -> torch.Tensor:
    below, above = (slope.to(response) if isinstance(slope, torch.Tensor) else slope for slope in (below, above))
    return 1.0 + torch.where(response < 0, response * below, response * above)


def _check_tau(tau: float) -> None:
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not math.isfinite(tau):
        raise GateError(f"gate tau must be a finite number, found {tau!r}")
    if tau <= 0:
        raise GateError(f"the gate temperature tau must be positive, found {tau:g}")
