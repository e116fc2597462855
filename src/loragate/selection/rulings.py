"""What follows from scores, before anything is recommended: which gates are trained on, which settings are not eligible, and
whether own answers can teach anything. Tables of verdicts in, no model and no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from scipy.special import ndtr

from loragate.evaluation import compare
from loragate.evaluation.statistics import pass_where_greedy_fails
from loragate.selection.candidate import ADAPTER, Candidate
from loragate.selection.recommend import believe

HOPEFUL = 0.5
"""Probability of being better than the adapter from which gates are trained on after a part of their steps. On committed answers
with labels (benchmarks/selection/stopping.py) 0.2 to 0.5 lost nothing."""

LOSS = 0.02
"""What a setting may lose on the retention probe; a clear loss rules it out, a gain counts for nothing."""

LITTLE = 0.1
"""Of the questions whose greedy answer is wrong, the share with a right sampled one below which own answers teach nothing."""


def stopped_of(ranges: int) -> int:
    """How many of so many ranges stop after a part of their steps: the weaker half, rounded up, but never all."""
    return 0 if ranges < 2 else ranges - ranges // 2


def stronger(parts: Mapping[Candidate, Mapping[str, Any]], ranges: int) -> tuple[list[Candidate], list[Candidate]]:
    """The gates that are trained on, and those that stop, the better ones first in both.

    Args:
        parts: {gates: what `train_part` gave}, in the order of the ranges, which decides between equals.
        ranges: how many there are, those included whose part was lost.
    """
    ranked = sorted(parts, key=lambda one: -max(parts[one]["scores"].values()))
    kept = ranges - stopped_of(ranges)
    return ranked[:kept], ranked[kept:]


def prospects(
    parts: Mapping[Candidate, Mapping[float, np.ndarray]], alone: Mapping[float, np.ndarray]
) -> dict[Candidate, dict[str, float]]:
    """How gates compare with the adapter after a part of their training, each at the better of the temperatures asked.

    Args:
        parts: {gates: {temperature: scores [questions, samples]}}.
        alone: the adapter's at the same temperatures, on the same questions.

    Returns:
        {gates: expected, adapter: their expected scores; chance: probability that the gates are better}.
    """
    models = {Candidate(None, ADAPTER): alone, **parts}
    tables = {replace(one, temperature=heat): rows for one, found in models.items() for heat, rows in found.items()}
    belief = believe(tables)
    best = {
        model: max((i for i, one in enumerate(belief.settings) if one.model == model), key=lambda i: belief.mean[i])
        for model in models
    }
    top = best.pop(Candidate(None, ADAPTER))
    return {
        one: {
            "expected": float(belief.mean[i]),
            "adapter": float(belief.mean[top]),
            "chance": float(ndtr(np.divide(*belief.difference(i, top)))),
        }
        for one, i in best.items()
    }


def own_answers(scores: Mapping[float, np.ndarray]) -> dict[str, Any]:
    """How many questions whose greedy answer is wrong have a right one among their sampled answers.

    An objective that learns from its own answers makes some of them likelier; what is never sampled it cannot teach.

    Args:
        scores: {temperature: scores [questions, samples]} of the adapter, 0 being greedy, on the first of the same questions.

    Returns:
        sampled: for each temperature pass@k where greedy fails, with its 95 % interval, k (samples) and the number of these
        questions; nothing_to_learn: whether that is shown to be below `LITTLE`, by the whole interval of the temperature with
        the most questions, and contradicted by the mean of none.
    """
    rows = []
    for heat in sorted(heat for heat in scores if heat):
        count = min(len(scores[0.0]), len(scores[heat]))
        if found := pass_where_greedy_fails(scores[0.0][:count], scores[heat][:count]):
            rows.append({"temperature": heat, **asdict(found)})
    shown = bool(rows) and max(rows, key=lambda row: row["questions"])["high"] < LITTLE
    return {"sampled": rows, "nothing_to_learn": shown and all(row["mean"] < LITTLE for row in rows)}


def vetoes(scores: Mapping[str, np.ndarray], fallback: str) -> dict[str, str]:
    """{candidate: reason} of those that on the retention probe lose more than 2 points, their 95 % interval below 0."""
    found = {}
    for name, values in scores.items():
        if name == fallback:
            continue
        difference = compare(values, scores[fallback])
        if difference.mean < -LOSS and difference.high < 0:
            found[name] = (
                f"loses {-100 * difference.mean:.1f} points on the retention probe (95 % interval "
                f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f})"
            )
    return found
