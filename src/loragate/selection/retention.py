"""What a candidate must not lose: a second labelled probe, on which it may veto but never win.

A range picked on one task can cost another. The rule is one-sided and paired by question: a clear loss rules a candidate
out, a gain counts for nothing, and what cannot be told apart from the adapter passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from loragate.evaluation import average_at_k, compare

LOSS = 0.02


def vetoes(scores: Mapping[str, np.ndarray], fallback: str) -> dict[str, str]:
    """{candidate: reason} of those that lose more than 2 points with a 95 % interval entirely below 0.

    Args:
        scores: {name: scores [questions, samples]} on the retention probe, the fallback among them.
        fallback: the untouched adapter.
    """
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


def retention_record(scores: Mapping[str, np.ndarray], fallback: str, probe: dict[str, Any]) -> dict[str, Any]:
    """The evidence for the artifact: each score, and each difference from the adapter."""
    return {
        "probe": probe,
        "rule": f"a candidate that loses more than {100 * LOSS:g} points, its paired 95 % interval below 0, is not picked",
        "evidence": {name: asdict(average_at_k(values)) for name, values in scores.items()},
        "against_adapter": {
            name: asdict(compare(values, scores[fallback])) for name, values in scores.items() if name != fallback
        },
    }
