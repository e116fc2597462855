"""A gate: the settings that decide λ, and the fp32 parameters of one module, with what may be laid over them while it runs.

`GateConfig` is shared by attachment, training and the artifact. A `SignedGate` sits inside a LoRA layer next to lora_A and
lora_B, so that PEFT moves, freezes, saves and deletes it with the adapter. It turns (x, A, B, scaling) into a gated delta and
does not know where these come from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le, Len
from torch import nn

from loragate.errors import GateError
from loragate.gates.operation import gate_coefficient_of_input, gated_delta, gated_delta_reference
from loragate.gates.override import Override
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap
from loragate.validate import STRICT, NonNegativeInt, PositiveFloat, check_fields

if TYPE_CHECKING:
    from loragate.gates.control import Chain, Recorder, Trace


@dataclass(frozen=True)
class GateConfig:
    """Settings of the gates of one adapter.

    Attributes:
        lower: L ≤ 0, the strongest reversal (0 is legal: suppression only).
        upper: U ≥ 1, the strongest extrapolation (1 is legal: no extrapolation).
        tau: gate temperature τ of v = tanh(g/τ); the paper does not state it, 1.0 is ours.
        init_scale: standard deviation of the initial gate weights (the paper's 1e-6 perturbation); also the size of the
            negative initial bias where there is no weight. 0 gives neutral gates, λ = 1 everywhere; where U = 1 too, no gradient
            moves them.
        seed: seeds that perturbation, independently of the global random state.
        detach_input: the gate reads sg(h) (the paper's semi-gradient); False keeps the complete gradient.
        granularity: "token" (w and b per module), "module" (b only) or "global" (one shared b).
        target_modules: None gates every LoRA linear of the adapter; otherwise a regular expression over module paths
            (full match) or a list of module names matched at the end of the path, as in PEFT.

    Raises:
        GateError: for a range that does not contain [0, 1], an unknown granularity, an empty target list, or a setting of
            another type.
    """

    lower: float
    upper: float
    tau: PositiveFloat = 1.0
    init_scale: Annotated[float, Ge(0), Le(1)] = 1e-6
    seed: NonNegativeInt = 0
    detach_input: bool = True
    granularity: Literal["token", "module", "global"] = "token"
    target_modules: Annotated[str, Len(1)] | Annotated[Sequence[str], Len(1)] | None = None

    # an unknown key of an artifact is refused: its meaning cannot be guessed
    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        if self.target_modules is not None and not isinstance(self.target_modules, str):
            # a tuple, so that a frozen setting cannot change and equal ones are equal
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        check_fields(self, GateError)
        # JSON gives 1 for 1.0, and a parameter filled with a whole number would be one of integers
        object.__setattr__(self, "init_scale", float(self.init_scale))
        _ = self.signed_map  # checks range and temperature, and is at hand in every forward pass

    @property
    def range(self) -> Range:
        """[lower, upper] as a value."""
        return self.signed_map.range

    @cached_property
    def signed_map(self) -> SignedMap:
        """From logit to λ."""
        return SignedMap(Range(self.lower, self.upper), self.tau)


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
            # depends on seed and module path, on nothing else
            noise = torch.randn(d_in, generator=seeded_generator(f"{config.seed}:{path}"), device="cpu")
            self.weight = nn.Parameter(noise * config.init_scale)
        else:  # the attribute is there, and no state dict holds it
            self.register_parameter("weight", None)
        # A bias of zero sits on the U branch; with U = 1 its slope is zero, and without a weight nothing else could
        # move the gate. Starting a hair below zero puts it on the L branch, which is never flat there.
        start = 0.0 if config.granularity == "token" else -config.init_scale
        self.bias = shared_bias if shared_bias is not None else nn.Parameter(torch.full((1,), start))
        self.override: Override | None = None
        self.recorder: Recorder | Trace | Chain | None = None

    def _apply(self, fn, recurse: bool = True):
        """Follow moves between devices, but stay fp32 whatever dtype the model is cast to.

        `to`, `half`, `cuda` and the like of every module around it come through here, with `fn` of one tensor.
        """

        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_precision, recurse)

    def coefficients(self, x_TD: torch.Tensor) -> torch.Tensor:
        """λ per token, [...], fp32, with the override in force."""
        config = self.config
        return gate_coefficient_of_input(
            x_TD, self.weight, self.bias, config.signed_map, config.detach_input, self.override
        )

    def gated_delta(
        self, x_TD: torch.Tensor, lora_a_RD: torch.Tensor, lora_b_OR: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """The layer's gated delta, [..., d_out]."""
        config = self.config
        if self.recorder is not None:
            # without a graph, so that a recomputing forward (gradient checkpointing) saves the same tensors
            with torch.no_grad():
                self.recorder.update(self.coefficients(x_TD))
        operands = (x_TD, lora_a_RD, lora_b_OR, self.weight, self.bias, config.signed_map, scaling)
        if self.override is None:
            return gated_delta(*operands, detach_input=config.detach_input)
        return gated_delta_reference(*operands, detach_input=config.detach_input, override=self.override)

    def extra_repr(self) -> str:
        config = self.config
        width = "bias only" if self.weight is None else f"d_in={self.weight.numel()}"
        return f"{width}, range={config.range}, granularity={config.granularity}"


def seeded_generator(name: str) -> torch.Generator:
    """The random stream of a name: the global random state stays untouched, and so does the order of modules."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # 63 bits, a positive int64
