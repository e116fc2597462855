"""Pick a candidate by its sampled score on a small labelled set; ties go to what needs no change.

Training entropy is never consulted: it falls also where answers get worse. The set must be disjoint from training and
test questions; that is the caller's duty, and its size is recorded with the choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from loragate.errors import ConfigError
from loragate.evaluation import average_at_k

# means over another number of samples round differently; two shares of right answers are further apart than this
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Choice:
    """Which candidate was picked and on what evidence.

    Attributes:
        name: the picked candidate.
        accepted: False if the fallback was picked.
        evidence: {candidate: {mean, low, high, ...}} on the selection questions.
        questions, samples: size of the evidence.
    """

    name: str
    accepted: bool
    evidence: dict[str, dict[str, float]]
    questions: int
    samples: int


def choose(candidates: Mapping[str, np.ndarray], fallback: str) -> Choice:
    """The candidate with the highest mean score; the fallback wins ties, then the earlier candidate.

    Args:
        candidates: {name: scores [questions, samples]}, the fallback among them, all on the same questions.
        fallback: name of the untouched adapter.

    Raises:
        ConfigError: if the fallback is missing, or the shapes differ.
    """
    if fallback not in candidates:
        raise ConfigError(f"the fallback {fallback!r} must be among the candidates ({', '.join(candidates)})")
    shapes = {name: np.shape(scores) for name, scores in candidates.items()}
    if len(set(shapes.values())) != 1:
        raise ConfigError(f"all candidates must be scored on the same questions and samples, found {shapes}")
    best = fallback
    for name, scores in candidates.items():
        if np.mean(scores) > np.mean(candidates[best]) + _ROUNDING:
            best = name
    questions, samples = shapes[fallback]
    return Choice(
        name=best,
        accepted=best != fallback,
        evidence={name: asdict(average_at_k(scores)) for name, scores in candidates.items()},
        questions=int(questions),
        samples=int(samples),
    )
