"""The staged rule that chooses a variant and its temperature, from nothing but scores.

1. Every variant is evaluated greedily on the dev set.
2. The best one and the adapter alone are evaluated at T = 1, 0.6 and 0.3 as well (`second_stage`).
3. The highest mean of everything evaluated is the candidate. It is taken if its paired difference by question from the greedy
   adapter is at least `Z` standard errors; otherwise the adapter alone, greedily (`select`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Label = tuple[str, float]
"""(variant, temperature); 0.0 is greedy."""

ADAPTER = "adapter"
TEMPERATURES = (1.0, 0.6, 0.3)
Z = 1.28


def second_stage(greedy: Mapping[Label, np.ndarray]) -> list[Label]:
    """What is evaluated after the greedy answers of all variants: the best by mean and the adapter, at every other T."""
    best = max(greedy, key=lambda label: float(greedy[label].mean()))[0]
    return [(name, temperature) for name in dict.fromkeys((best, ADAPTER)) for temperature in TEMPERATURES]


def select(scores: Mapping[Label, np.ndarray], fallback: Label = (ADAPTER, 0.0)) -> Label:
    """The label with the highest mean of `scores` ([questions, samples] each), or `fallback` if the gain may be chance."""
    candidate = max(scores, key=lambda label: (float(scores[label].mean()), label == fallback))
    gain = scores[candidate].mean(axis=1) - scores[fallback].mean(axis=1)
    error = gain.std(ddof=1) / np.sqrt(len(gain))
    return candidate if gain.mean() > 0 and gain.mean() >= Z * error else fallback
