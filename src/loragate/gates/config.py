"""What a set of gates is: the frozen settings that decide λ, shared by attachment, training and the artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, Len

from loragate.errors import GateError
from loragate.gates.range import Range
from loragate.validate import STRICT, Positive, Size, check


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
    tau: Positive = 1.0
    init_scale: Annotated[float, Ge(0), Le(1)] = 1e-6
    seed: Size = 0
    detach_input: bool = True
    granularity: Literal["token", "module", "global"] = "token"
    target_modules: Annotated[str, Len(1)] | Annotated[Sequence[str], Len(1)] | None = None

    # an unknown key of an artifact is refused: its meaning cannot be guessed
    __pydantic_config__: ClassVar = STRICT

    def __post_init__(self) -> None:
        if self.target_modules is not None and not isinstance(self.target_modules, str):
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
        check(self, GateError)
        _ = self.range

    @property
    def range(self) -> Range:
        """[lower, upper] as a value."""
        return Range(self.lower, self.upper)
