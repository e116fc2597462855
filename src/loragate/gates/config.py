"""What a set of gates is: the frozen settings that decide λ, shared by attachment, training and the artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from loragate.errors import GateError, nearest
from loragate.gates.range import Range
from loragate.gates.signed_map import GRANULARITIES, SignedMap


@dataclass(frozen=True)
class GateConfig:
    """Settings of the gates of one adapter.

    Attributes:
        lower: L ≤ 0, the strongest reversal (0 is legal: suppression only).
        upper: U ≥ 1, the strongest extrapolation (1 is legal: no extrapolation).
        tau: gate temperature τ of v = tanh(g/τ); the paper does not state it, 1.0 is ours.
        init_scale: standard deviation of the initial gate weights (the paper's 1e-6 perturbation); also the size of the
            negative initial bias where there is no weight.
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
    tau: float = 1.0
    init_scale: float = 1e-6
    seed: int = 0
    detach_input: bool = True
    granularity: str = "token"
    target_modules: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        _ = self.signed_map  # checks range and temperature, and is at hand in every forward pass
        if self.granularity not in GRANULARITIES:
            raise GateError(
                f"granularity must be one of {', '.join(GRANULARITIES)}, found {self.granularity!r}"
                + nearest(str(self.granularity), GRANULARITIES)
            )
        if isinstance(self.init_scale, bool) or not isinstance(self.init_scale, (int, float)):
            raise GateError(f"init_scale must be a number, found {self.init_scale!r}")
        if not 0 <= self.init_scale <= 1:
            raise GateError(f"init_scale must lie in [0, 1], found {self.init_scale!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise GateError(f"seed must be an integer of at least 0, found {self.seed!r}")
        if not isinstance(self.detach_input, bool):
            raise GateError(f"detach_input must be True or False, found {self.detach_input!r}")
        if self.target_modules is not None and not isinstance(self.target_modules, str):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        if self.target_modules is not None and len(self.target_modules) == 0:
            raise GateError("target_modules is empty: give a pattern or a list of names, or None for every LoRA linear")

    @property
    def range(self) -> Range:
        """[lower, upper] as a value."""
        return self.signed_map.range

    @cached_property
    def signed_map(self) -> SignedMap:
        """From logit to λ."""
        return SignedMap(Range(self.lower, self.upper), self.tau)
