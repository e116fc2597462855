"""Means with honest intervals.

Samples of one question resemble one another, so the question, not the sample, is the unit: standard errors are clustered
by question and comparisons are paired by it. This room is arithmetic on arrays of scores; it knows neither tasks nor
models, and says nothing about other bases or training seeds, which no interval over questions can cover.

Shapes: Q questions, K samples per question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit, stdtrit

from loragate.errors import DataError

CONFIDENCE = 0.95
EXACT_QUESTIONS = 12
DRAWS = 10_000
HALVINGS = 10

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error and 95 % interval, from `questions` questions with `samples` samples each."""

    mean: float
    stderr: float
    low: float
    high: float
    questions: int
    samples: int


@dataclass(frozen=True)
class Difference:
    """The mean of a - b with its 95 % interval and the two-sided p-value of no difference, paired by question."""

    mean: float
    low: float
    high: float
    p: float


def average_at_k(scores: ArrayLike) -> Estimate:
    """Return the mean of `scores` [Q, K] (Avg@K) with its 95 % interval over questions.

    The standard error is that of the Q per-question means. For scores in [0, 1] mean and error go to the log-odds scale,
    mean / (1 - mean) (delta method), and back, with the t quantile of Q - 1 degrees of freedom, so that the interval leans
    towards 1/2 and stays inside (0, 1); for all others it is the symmetric t interval.

    When all questions have the same mean, their spread says nothing and either interval would have no width. The
    interval then comes from a bound of Wilson's type on what was not seen: a share of at most t^2 / (Q + t^2) of all
    questions differs from those seen, and may score 0 or 1. With every answer right this is Wilson's lower bound with t
    in place of z (96.8 % for 120 questions, a little wider than the rule of three). A single question gives [0, 1].
    Scores outside [0, 1] have no known limits, so in these cases their interval is infinite.

    Raises `DataError` for an array that is empty, not two-dimensional or not finite.
    """
    array = check_scores(scores, "scores")
    shares = _in_unit_interval(array)
    lower, upper = (0.0, 1.0) if shares else (-math.inf, math.inf)
    mean, stderr, low, high = t_interval(array.mean(axis=1), lower, upper)
    if shares and stderr > 0 and 0 < mean < 1:
        half = stdtrit(len(array) - 1, (1 + CONFIDENCE) / 2) * stderr / (mean * (1 - mean))
        low, high = float(expit(logit(mean) - half)), float(expit(logit(mean) + half))
    return Estimate(mean, stderr, low, high, *array.shape)


def out_of_fold(means_QS: Array, seed: int = 0) -> Array:
    """The score of every question [Q] by the column that is best on the other half of the questions.

    The mean of the best column on the very questions that picked it is flattered; the mean of these is not. Averaged over
    `HALVINGS` random halvings, so that it does not hang on one of them.
    """
    count, generator = len(means_QS), np.random.default_rng(seed)
    found = np.zeros(count)
    for _ in range(HALVINGS):
        order = generator.permutation(count)
        for here, there in ((order[: count // 2], order[count // 2 :]), (order[count // 2 :], order[: count // 2])):
            pick = int(np.argmax(means_QS[here].mean(axis=0))) if len(here) else 0
            found[there] += means_QS[there, pick] / HALVINGS
    return found


def compare(scores_a: ArrayLike, scores_b: ArrayLike, *, seed: int = 0) -> Difference:
    """Return the mean of a - b for two arrays of scores over the same questions, [Q, K] and [Q, M].

    The interval is the 95 % t interval of the per-question mean differences; where they are all equal it is widened as
    in `average_at_k`, with differences limited to [-1, 1]. The p-value is that of a sign-flip permutation test on the
    mean difference, two-sided: exact up to 12 questions, otherwise from 10,000 draws of `seed` as (hits + 1) / 10,001.

    Raises `DataError` as `average_at_k` does, and when the numbers of questions differ.
    """
    differences, limit = paired_differences(scores_a, scores_b)
    mean, _, low, high = t_interval(differences, -limit, limit)
    return Difference(mean, low, high, sign_flip_p(differences, seed))


def paired_differences(scores_a: ArrayLike, scores_b: ArrayLike) -> tuple[Array, float]:
    """Return the per-question differences of mean score [Q], and their limit: 1 for scores in [0, 1], else infinity.

    Raises `DataError` as `compare` does.
    """
    array_a, array_b = check_scores(scores_a, "scores_a"), check_scores(scores_b, "scores_b")
    if len(array_a) != len(array_b):
        raise DataError(
            f"scores_a has {len(array_a)} questions and scores_b has {len(array_b)}; a paired comparison needs the same "
            "questions in the same order on both sides."
        )
    limit = 1.0 if _in_unit_interval(array_a) and _in_unit_interval(array_b) else math.inf
    return array_a.mean(axis=1) - array_b.mean(axis=1), limit


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for multiple comparisons by Holm's step-down method, in the order given.

    Reject where the adjusted value is at most the level: the chance of any false rejection then stays below it.
    """
    values = np.asarray(p_values, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise DataError(f"holm was given {p_values!r}; it needs a flat list of p-values, each in [0, 1].")
    order = np.argsort(values, kind="stable")
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in adjusted]


def check_scores(scores: ArrayLike, name: str) -> Array:
    """Return `scores` as a finite float64 array [Q, K], or raise a `DataError` that calls it `name`."""
    try:
        array = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(
            f"{name} is not a table of numbers; give one row per question, each with the same number of samples."
        ) from None
    if array.ndim != 2 or array.size == 0:
        raise DataError(
            f"{name} has shape {array.shape}; expected [questions, samples] with at least one of each. Scores of one "
            "sample per question go in as a single column, [questions, 1]."
        )
    if not np.isfinite(array).all():
        question, sample = np.argwhere(~np.isfinite(array))[0]
        raise DataError(
            f"{name} holds {array[question, sample]} at question {question}, sample {sample}; grade it first."
        )
    return array


def _in_unit_interval(array: Array) -> bool:
    return bool(((array >= 0) & (array <= 1)).all())


def without_spread(values: Array) -> bool:
    """Whether all values [Q] are equal; means of equal scores can differ in the last bits, which is no spread."""
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def t_interval(values: Array, lower: float, upper: float) -> tuple[float, float, float, float]:
    """Return mean, standard error, low and high of `values` [Q], whose population lies in [lower, upper]."""
    count = len(values)
    mean = float(values.mean())
    t = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) if count > 1 else math.inf
    if without_spread(values):
        unlike = t * t / (count + t * t) if count > 1 else 1.0
        return mean, 0.0, mean + unlike * (lower - mean), mean + unlike * (upper - mean)
    stderr = float(values.std(ddof=1)) / math.sqrt(count)
    return mean, stderr, max(mean - t * stderr, lower), min(mean + t * stderr, upper)


def sign_flip_p(differences: Array, seed: int) -> float:
    """Return the two-sided p-value of a total of zero when every difference [Q] may as well have had the other sign.

    Exact up to 12 questions; otherwise from 10,000 draws of `seed`, as (hits + 1) / 10,001.
    """
    count = len(differences)
    total = float(differences.sum())
    # A sum of flipped signs is 2 * (sum over the questions kept) - total; ties must count in spite of rounding.
    threshold = abs(total) - 1e-9 * float(np.abs(differences).sum())
    if count <= EXACT_QUESTIONS:
        kept = np.arange(2**count)[:, None] >> np.arange(count) & 1
        return float(np.mean(np.abs(2 * (kept @ differences) - total) >= threshold))
    generator = np.random.default_rng(seed)
    hits = 0
    for _ in range(0, DRAWS, 1000):  # in parts, for memory
        bits = np.frombuffer(generator.bytes(1000 * -(-count // 8)), dtype=np.uint8).reshape(1000, -1)
        drawn = np.unpackbits(bits, axis=1, count=count).astype(np.float64)
        hits += int(np.sum(np.abs(2 * (drawn @ differences) - total) >= threshold))
    return (hits + 1) / (DRAWS + 1)
