"""The signed map from a gate logit to the coefficient λ: pure mathematics, no model.

Everything that needs λ (the layer, its fused backward, serving, export, the tests) takes it from here, so that the branch at the
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
        tau: gate temperature; a GateError where it is no positive number.
    """

    range: Range
    tau: float = 1.0

    def __post_init__(self) -> None:
        # `gate_coefficient` takes a temperature from any caller; that of a `GateConfig` has been checked
        if not 0 < self.tau < math.inf:
            raise GateError(f"the gate temperature tau must be positive and finite, found {self.tau!r}")

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
        working = gate_logit if gate_logit.dtype == torch.float64 else gate_logit.float()
        return torch.tanh(working if self.tau == 1.0 else working / self.tau)  # τ = 1 costs no kernel

    def slope(self, response: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """dλ/dv on the branch that holds at v, times `factor`; same shape.

        A choice is the only form with the right one-sided slope everywhere: `clamp` adds both slopes at v = 0, `relu`
        gives 0 there (a gate that starts at zero would never move) and `minimum`/`maximum` the mean.
        """
        # not `torch.where` of two numbers, which would wait for a copy from the host to the device
        return torch.full_like(response, self.above * factor).masked_fill_(response < 0, self.below * factor)

    def of_response(self, response: torch.Tensor) -> torch.Tensor:
        """λ of v, same shape and dtype; exactly 1 at v = 0."""
        below = torch.rsub(response, 1.0, alpha=-self.below)  # 1 + (1−L)·v in one operator
        above = torch.rsub(response, 1.0, alpha=-self.above)
        if torch.is_grad_enabled():
            # v = 0 takes the upper branch; its value is 1 on both, its slope is not
            return torch.where(response < 0, below, above)
        # the same bits in one operator less: of two lines through (0, 1) the lower one left and right, or the upper one
        return torch.minimum(below, above) if self.below >= self.above else torch.maximum(below, above)

    def __call__(self, gate_logit: torch.Tensor) -> torch.Tensor:
        """λ of a logit, same shape, fp32 (fp64 for fp64)."""
        return self.of_response(self.response(gate_logit))

    def logit(self, lam: float) -> float:
        """g whose λ this is; at an end of the range one at which tanh is 1 in fp32. A GateError for a λ outside of the range."""
        reach = self.above if lam > 1 else self.below
        response = (lam - 1.0) / reach if lam != 1 else 0.0
        if abs(response) > 1:
            raise GateError(f"λ = {lam:g} lies outside of {self.range}")
        return self.tau * (math.atanh(response) if abs(response) < 1 else math.copysign(SATURATED, response))


CONSTANT_RANGE = Range(-1, 2)
"""In which one λ for all tokens is written, or wider where λ lies outside."""
SATURATED = 20.0


def range_around(constant: float) -> Range:
    """The range in which a constant is written as the bias of a gate without weights."""
    return Range(min(CONSTANT_RANGE.lower, constant), max(CONSTANT_RANGE.upper, constant))


def gate_coefficient(gate_logit: torch.Tensor, lower: float, upper: float, tau: float = 1.0) -> torch.Tensor:
    """The signed map of eq:rw-transform: λ(g) in [lower, upper], identity-centred.

    Args:
        gate_logit: g = w·h + b, any shape and floating dtype.
        lower: L ≤ 0, reached as v → −1.
        upper: U ≥ 1, reached as v → +1.
        tau: gate temperature τ > 0.

    Returns:
        λ, same shape, fp32 (fp64 for an fp64 input). The image is the open interval in exact arithmetic and the closed
        one in fp32. λ = 1 at g = 0, and λ = 0 where v = −1/(1−L).

    Raises:
        GateError: for numbers that are no range or temperature (see `Range`).
    """
    return SignedMap(Range(lower, upper), tau)(gate_logit)
