"""One gate: the fp32 parameters of one module, with what may be laid over them while it runs.

A `SignedGate` sits inside a LoRA layer next to lora_A and lora_B, so that PEFT moves, freezes, saves and deletes it with
the adapter. It turns (x, A, B, scaling) into a gated delta and does not know where these come from.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Override:
    """λ clipped to [minimum, maximum], or replaced by `constant`."""

    minimum: float | None = None
    maximum: float | None = None
    constant: float | None = None


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
        config = self.config
        lam_T = gate_coefficient_of_input(
            x_TD, self.weight, self.bias, config.lower, config.upper, config.tau, config.detach_input
        )
        override = self.override
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
        tensors = (x_TD, lora_a_RD, lora_b_OR, self.weight, self.bias)
        settings: dict[str, Any] = {
            "lower": config.lower,
            "upper": config.upper,
            "tau": config.tau,
            "scaling": scaling,
            "detach_input": config.detach_input,
        }
        if override is None:
            return gated_delta(*tensors, **settings)
        settings |= {"minimum": override.minimum, "maximum": override.maximum, "constant": override.constant}
        return gated_delta_reference(*tensors, **settings)

    def extra_repr(self) -> str:
        config = self.config
        width = "bias only" if self.weight is None else f"d_in={self.weight.numel()}"
        return f"{width}, range=[{config.lower:g}, {config.upper:g}], granularity={config.granularity}"


class Recorder:
    """Sums over the λ of one module: counts per region, moments and extremes; no per-token tensor is kept."""

    def __init__(self, lower: float, upper: float) -> None:
        self.lower, self.upper = lower, upper
        self.owner: Recording | None = None
        self.positions: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None

    def update(self, lam_T: torch.Tensor) -> None:
        """Add the λ of one forward pass, [...]; positions outside the owner's token mask are left out.

        A module that is run on some positions only is matched by `positions`, flat indices into the mask. One whose tokens
        are laid out in another way, as an expert's routed tokens [tokens] are, records nothing under a mask unless their
        number is that of the mask.

        Raises:
            GateError: for a mask of another shape than the [batch, sequence] of the forward pass.
        """
        values = lam_T.reshape(-1)
        mask = None if self.owner is None else self.owner.token_mask
        if mask is not None:
            if self.positions is not None and self.positions.numel() == values.numel():
                mask = mask.reshape(-1)[self.positions.to(mask.device)]
            elif lam_T.dim() == 2 and lam_T.shape != mask.shape:
                raise GateError(
                    f"token_mask has shape {list(mask.shape)}, but the forward pass has {list(lam_T.shape)} tokens; set a mask "
                    "of the batch's own shape before each forward pass, or None to count every token"
                )
            elif mask.numel() != values.numel():
                return
            mask = mask.reshape(-1)
            values = values[mask.to(values.device)]
        if values.device.type == "mps":
            values = values.cpu()  # Apple's GPUs have no float64
        # One tenth of a per cent of the range from an end counts as saturated: tanh has no gradient left there.
        margin_low, margin_high = 1e-3 * (1.0 - self.lower), 1e-3 * (self.upper - 1.0)
        saturated = (values <= self.lower + margin_low) | ((values >= self.upper - margin_high) & (self.upper > 1.0))
        doubles = values.double()
        parts = [
            torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device),
            (values < 0).sum().double(),
            (values > 1).sum().double(),
            saturated.sum().double(),
            doubles.sum(),
            (doubles * doubles).sum(),
        ]
        added = torch.stack(parts)
        self.sums = added if self.sums is None else self.sums + added


class Trace:
    """Every λ of one module, one tensor per forward pass."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []

    def update(self, lam_T: torch.Tensor) -> None:
        """Keep the λ of one forward pass, [...]."""
        self.values.append(lam_T.detach().float().cpu())


class Recording:
    """What `record_gates` yields: per-module λ statistics of the forward passes made inside the context.

    `statistics()` is {module path: summary}, without the modules that recorded nothing; `total()` is one summary over all of
    them, empty when nothing was recorded. Both add up all forward passes so far, weighing every token and module the same:

    - "tokens": values counted, one for each token and module; when it is 0 nothing else stands there;
    - "mean", "std": of λ;
    - "below_zero", "zero_to_one", "above_one": shares of the values with λ < 0, 0 ≤ λ ≤ 1 and λ > 1, which sum to 1;
    - "saturated": share of the values that have gone at least 99.9 % of the way from 1 to a bound, where the gate has all but
      no slope left; there is no way to go to an upper bound of 1, which is not counted.

    `token_mask` says which tokens the next forward passes count.
    """

    __slots__ = ("_token_mask", "recorders")  # a misspelt token_mask is an error

    def __init__(self, recorders: dict[str, Recorder]) -> None:
        self._token_mask: torch.Tensor | None = None
        self.recorders = recorders
        for recorder in recorders.values():
            recorder.owner = self

    @property
    def token_mask(self) -> torch.Tensor | None:
        """Bool [batch, sequence], True for the tokens to count, in the shape of the next forward pass; None counts all.

        It stays until it is set again. A mask of another shape is refused with a GateError in the forward pass, one that is
        not bool or not of two dimensions when it is set. A module that sees routed tokens (an expert) records nothing under
        a mask.
        """
        return self._token_mask

    @token_mask.setter
    def token_mask(self, mask: torch.Tensor | None) -> None:
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool):
            found = f"dtype {mask.dtype}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise GateError(f"token_mask must be a bool tensor (labels.ne(-100), mask.bool()) or None, found {found}")
        if mask is not None and mask.dim() != 2:
            raise GateError(f"token_mask must have the shape [batch, sequence] of the batch, found {list(mask.shape)}")
        self._token_mask = mask

    def statistics(self) -> dict[str, dict[str, float]]:
        """{module path: {tokens, mean, std, below_zero, zero_to_one, above_one, saturated}}; the three shares sum to 1."""
        return {path: _summary(recorder.sums) for path, recorder in self.recorders.items() if recorder.sums is not None}

    def total(self) -> dict[str, float]:
        """The same summary over all modules together; empty when nothing was recorded."""
        sums = [recorder.sums.cpu() for recorder in self.recorders.values() if recorder.sums is not None]
        return _summary(torch.stack(sums).sum(0)) if sums else {}


def _summary(sums: torch.Tensor) -> dict[str, float]:
    count, below, above, saturated, total, squares = sums.tolist()
    if count == 0:
        return {"tokens": 0.0}
    mean = total / count
    return {
        "tokens": count,
        "mean": mean,
        "std": max(squares / count - mean * mean, 0.0) ** 0.5,
        "below_zero": below / count,
        "zero_to_one": 1.0 - (below + above) / count,
        "above_one": above / count,
        "saturated": saturated / count,
    }


def initial_weight(d_in: int, config: GateConfig, path: str) -> torch.Tensor:
    """The deterministic perturbation of one module, [d_in] fp32: depends on seed and module path, on nothing else.

    A generator of its own leaves the global random state untouched and makes the values independent of the order in
    which modules are visited.
    """
    digest = hashlib.sha256(f"{config.seed}:{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(d_in, generator=generator, device="cpu") * config.init_scale
