"""What is noted of λ while a model runs: counts by region and moments for each module, or every single value.

One definition of the regions serves the log lines of a training, its guard and the analysis of generated answers: λ < 0
reverses the delta, 0 ≤ λ ≤ 1 suppresses or keeps it, λ > 1 extrapolates it, and near an end of the range tanh has all but no
slope left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loragate.errors import GateError
from loragate.gates.range import Range

STATISTICS = ("count", "below", "above", "at_lower", "at_upper", "sum", "squares")
SATURATED = 1e-3  # λ this near to an end, as a share of the way there from 1, is at it


@dataclass(frozen=True)
class Shares:
    """λ over some coefficients; shares of 1."""

    count: int  # number of coefficients (one per module and token)
    mean: float
    std: float
    below_zero: float
    zero_to_one: float  # both ends among them
    above_one: float
    at_lower: float  # within a thousandth of the way from 1 to the end
    at_upper: float  # 0 where U = 1

    @classmethod
    def of(cls, sums: Sequence[float]) -> Shares:
        """From the sums of `STATISTICS`, of at least one coefficient."""
        count, below, above, lower, upper, total, squares = map(float, sums)
        mean = total / count
        return cls(
            count=int(count),
            mean=mean,
            std=max(squares / count - mean * mean, 0.0) ** 0.5,  # rounding may bring the difference below 0
            below_zero=below / count,
            zero_to_one=1.0 - (below + above) / count,
            above_one=above / count,
            at_lower=lower / count,
            at_upper=upper / count,
        )


def regions(lam: torch.Tensor, bounds: Range, margin: float = SATURATED) -> list[torch.Tensor]:
    """What each λ adds to the sums of `STATISTICS`, in their order: tensors of the shape of `lam`, fp64.

    λ is at a bound when it has gone at least 1 − `margin` of the way there from 1; to an upper bound of 1 there is no way.
    """
    at_lower = lam <= bounds.lower + margin * (1.0 - bounds.lower)
    at_upper = (lam >= bounds.upper - margin * (bounds.upper - 1.0)) & (bounds.upper > 1.0)
    doubles = lam.double()
    shares = (torch.ones_like(lam, dtype=torch.bool), lam < 0, lam > 1, at_lower, at_upper)
    return [*(share.double() for share in shares), doubles, doubles * doubles]  # seven, as `STATISTICS` says


class Recorder:
    """Sums over the λ of one module: counts per region, moments and extremes; no per-token tensor is kept."""

    def __init__(self, bounds: Range, margin: float = SATURATED) -> None:
        self.bounds, self.margin = bounds, margin
        self.owner: Recording | None = None
        self.positions: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None

    def update(self, lam_T: torch.Tensor) -> None:
        """Add the λ of one forward pass, [...]; positions outside the owner's token mask are left out.

        A module that is run on some positions only is matched by `positions`, flat indices into the mask. One whose tokens
        are laid out in another way, as an expert's routed tokens [tokens] are, records nothing under a mask unless their
        number is that of the mask.

        Raises:
            GateError: for a mask that is not bool, or of another shape than the [batch, sequence] of the forward pass.
        """
        values = lam_T.reshape(-1)
        mask = None if self.owner is None else self.owner.token_mask
        if mask is not None:
            if mask.dtype != torch.bool:  # whole numbers would choose tokens by their index
                raise GateError(f"token_mask must be a bool tensor (labels.ne(-100), mask.bool()), found {mask.dtype}")
            if self.positions is not None and self.positions.numel() == values.numel():
                mask = mask.reshape(-1)[self.positions.to(mask.device)]
            elif lam_T.dim() == 2 and lam_T.shape != mask.shape:
                raise GateError(
                    f"token_mask has shape {list(mask.shape)}, but the forward pass has {list(lam_T.shape)} tokens; set a mask "
                    "of the batch's own shape before each forward pass, or None to count every token"
                )
            elif mask.numel() != values.numel():
                return  # an expert's routed tokens, of which nothing says where they stand
            mask = mask.reshape(-1)
            values = values[mask.to(values.device)]
        if values.device.type == "mps":
            values = values.cpu()  # Apple's GPUs have no float64
        # [7], left on its device: a copy to the host at every layer would stall a GPU
        added = torch.stack([part.sum() for part in regions(values, self.bounds, self.margin)])
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
    - "saturated": share of the values that have gone at least 99.9 % of the way from 1 to a bound (or 1 − `margin` of it), where
      the gate has all but no slope left; there is no way to go to an upper bound of 1, which is not counted.

    `token_mask` says which tokens the next forward passes count: bool [batch, sequence] in the shape of the pass, True for the
    tokens to count; None counts all. It stays until it is set again. Another shape or dtype is refused in the forward pass. A
    module that sees routed tokens (an expert) records nothing under a mask.
    """

    __slots__ = ("recorders", "token_mask")  # a misspelt token_mask is an error

    def __init__(self, recorders: dict[str, Recorder]) -> None:
        self.token_mask: torch.Tensor | None = None
        self.recorders = recorders
        for recorder in recorders.values():
            recorder.owner = self

    def statistics(self) -> dict[str, dict[str, float]]:
        """{module path: {tokens, mean, std, below_zero, zero_to_one, above_one, saturated}}; the three shares sum to 1."""
        return {path: _summary(recorder.sums) for path, recorder in self.recorders.items() if recorder.sums is not None}

    def total(self) -> dict[str, float]:
        """The same summary over all modules together; empty when nothing was recorded."""
        sums = [recorder.sums.cpu() for recorder in self.recorders.values() if recorder.sums is not None]
        return _summary(torch.stack(sums).sum(0)) if sums else {}


def _summary(sums: torch.Tensor) -> dict[str, float]:
    values = sums.tolist()
    if values[0] == 0:
        return {"tokens": 0.0}
    shares = Shares.of(values)
    kept = {name: getattr(shares, name) for name in ("mean", "std", "below_zero", "zero_to_one", "above_one")}
    # a λ is at one end at most, so that the two counts add up
    return {"tokens": values[0], **kept, "saturated": (values[3] + values[4]) / values[0]}
