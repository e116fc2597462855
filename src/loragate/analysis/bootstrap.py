"""Intervals over rows: the rows are drawn again with replacement, whole rows at a time.

Tokens of one row resemble one another, so the row is the unit. Pure arithmetic on arrays; shapes: N rows, D draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
DRAWS = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % percentile interval over rows; the ends are None where rows are too few to say."""

    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        """With its interval, three digits."""
        ends = "" if self.low is None or self.high is None else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.mean:.3g}{ends}"


def row_weights(rows: int, draws: int = DRAWS, seed: int = 0) -> Array:
    """How often each row was drawn, [D, N]; every line sums to N."""
    return np.random.default_rng(seed).multinomial(rows, [1 / rows] * rows, size=draws).astype(np.float64)


def percentiles(values: ArrayLike) -> tuple[float | None, float | None]:
    """Low and high of bootstrap values [D]; values that are not finite (empty draws) are left out."""
    array = np.asarray(values, dtype=np.float64)
    array = array[np.isfinite(array)]
    if len(array) < 2:
        return None, None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(array, [tail, 1 - tail])
    return float(low), float(high)


def ratio(numerators: ArrayLike, denominators: ArrayLike, draws: int = DRAWS, seed: int = 0) -> Interval | None:
    """Σ numerators / Σ denominators over rows [N] with its interval; None where the denominators sum to zero.

    The mean over tokens of rows of unequal length is such a ratio (sum over tokens ÷ number of tokens).
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if bottom.sum() == 0:
        return None
    mean = float(top.sum() / bottom.sum())
    if (bottom != 0).sum() < 2:
        return Interval(mean, None, None)
    weights = row_weights(len(top), draws, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        low, high = percentiles((weights @ top) / (weights @ bottom))
    return Interval(mean, low, high)
