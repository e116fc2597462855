"""The one rule by which a variant is chosen, from scores alone.

1. Every variant is decoded greedily on the dev set.
2. The best of them and the plain adapter are also sampled at T = 1, 0.6 and 0.3 (`TEMPERATURES`).
3. The highest mean is taken if it beats the greedily decoded adapter with a paired z of at least 1.28; else the adapter stays.

For one comparison a z of 1.28 is an error of 10 %, one-sided; the best of many variants passes by chance more often. A threshold
that knows their number was measured: it missed more gains than it avoided losses. What the rule costs and gains on committed
answers stands in `benchmarks/selection`. It holds for questions like the dev set's, and for no others: a dev set that lacks a
kind of question says nothing about it, which is what a retention set is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loragate.evaluation.statistics import Difference, compare

THRESHOLD = 1.28
TEMPERATURES = (1.0, 0.6, 0.3)
RULE = (
    "all variants greedily; then the best one and the adapter at T = 1, 0.6 and 0.3; the highest mean is taken where it beats the "
    "greedy adapter by a paired z of 1.28 or more, else the adapter greedily"
)


@dataclass(frozen=True)
class Selection:
    """What the rule chose.

    Attributes:
        label: of the chosen variant.
        best: of the variant with the highest mean, which the rule weighed against the baseline.
        z: of the best one against the baseline, paired by question; 0 where it is the baseline.
        difference: best minus baseline, with its 95 % interval; None where it is the baseline.
    """

    label: str
    best: str
    z: float
    difference: Difference | None

    @property
    def accepted(self) -> bool:
        """Whether the best variant was taken, in place of the baseline."""
        return self.difference is not None and self.label == self.best


def paired_z(scores_a: np.ndarray, scores_b: np.ndarray) -> float:
    """Mean difference a - b over questions ÷ its standard error, of scores [Q, K] and [Q, M]; infinite where all Q are equal."""
    differences_Q = np.mean(scores_a, axis=1) - np.mean(scores_b, axis=1)
    mean, error = differences_Q.mean(), differences_Q.std(ddof=1) / math.sqrt(len(differences_Q))
    if error > 0:
        return float(mean / error)
    return 0.0 if mean == 0 else math.copysign(math.inf, mean)


def select(
    scores: Mapping[str, np.ndarray],
    baseline: str = "adapter greedy",
    *,
    excluded: Sequence[str] = (),
    threshold: float = THRESHOLD,
) -> Selection:
    """The variant to use: the highest mean where it beats the baseline by a paired z of `threshold`, else the baseline.

    Args:
        scores: {label: scores [questions, samples]} on the same questions, shares of 1; of equal means the earlier one counts.
        baseline: label of what is used where nothing beats it.
        excluded: labels that are not taken whatever they scored.
    """
    allowed = [label for label in scores if label not in excluded or label == baseline]
    best = max([baseline, *allowed], key=lambda label: float(np.mean(scores[label], axis=1).mean()))
    if best == baseline:
        return Selection(baseline, baseline, 0.0, None)
    z = paired_z(scores[best], scores[baseline])
    difference = compare(scores[best], scores[baseline])
    return Selection(best if z >= threshold else baseline, best, z, difference)
