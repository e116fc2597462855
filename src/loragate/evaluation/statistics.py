"""Means with honest intervals.

Samples of one question resemble one another, so the question, not the sample, is the unit: standard errors are clustered
by question and comparisons are paired by it. No interval over questions covers other bases or training seeds. In an average
over several tasks, the tasks are strata: their questions are drawn apart, so nothing is pooled across them and each task counts
the same. Only tasks that ask the same questions are one stratum. All is arithmetic on arrays of scores; tasks and models are
not known here.

Shapes: B tasks, Q questions (of each task its own), K samples per question.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit, stdtr, stdtrit

from loragate.errors import DataError

CONFIDENCE = 0.95
HALVINGS = 10  # of the questions, in `out_of_fold`
WIDER = 1.2  # of the standard error of best against best, see `compare_out_of_fold`

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
    """The mean of a - b with its interval and two-sided p-value, paired by question.

    Interval and p come from one t statistic: the interval of level 1 - α leaves 0 out exactly where p is at most α.

    Attributes:
        mean: of a - b.
        low, high: ends of the interval of level `confidence`.
        p: of no difference.
        stderr, df: standard error and degrees of freedom of the statistic; None where scores without limits give none.
        limit: largest size of a difference; None for scores that are no shares.
        confidence: 0.95, or more where the interval is one of a family (`simultaneous`).
    """

    mean: float
    low: float
    high: float
    p: float
    stderr: float | None = None
    df: float | None = None
    limit: float | None = None
    confidence: float = CONFIDENCE

    def at(self, confidence: float) -> Difference:
        """The same with the interval of another level, 0 to 1."""
        if self.stderr is None or self.df is None:
            return self
        half = float(stdtrit(self.df, (1 + confidence) / 2)) * self.stderr
        limit = math.inf if self.limit is None else self.limit
        low, high = max(self.mean - half, -limit), min(self.mean + half, limit)
        return replace(self, low=low, high=high, confidence=confidence)


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
    return Estimate(*_stratified_mean([array.mean(axis=1)], [_limits(array)], [1.0]), *array.shape)


def _stratified_mean(
    values: Sequence[Array], limits: Sequence[tuple[float, float]], weights: Sequence[float]
) -> tuple[float, float, float, float]:
    """Weighted mean of strata [B][Q], its standard error, and low and high of its 95 % interval; see `average_at_k`.

    The degrees of freedom are Welch and Satterthwaite's, Q - 1 for a single stratum.

    Args:
        limits: (lowest, highest) that a question of the stratum can score.
        weights: of the strata, which sum to 1.
    """
    strata = [t_interval(stratum, *limit) for stratum, limit in zip(values, limits, strict=True)]
    mean = sum(weight * own for weight, (own, *_) in zip(weights, strata, strict=True))
    errors = [weight * own for weight, (_, own, *_) in zip(weights, strata)]
    stderr, low, high, shares = math.hypot(*errors), mean, mean, all(limit == (0, 1) for limit in limits)
    if stderr > 0:
        df = stderr**4 / sum(error**4 / max(len(stratum) - 1, 1) for error, stratum in zip(errors, values))
        half = float(stdtrit(df, (1 + CONFIDENCE) / 2)) * stderr
        low, high = mean - half, mean + half
        if shares and 0 < mean < 1:
            half /= mean * (1 - mean)
            low, high = float(expit(logit(mean) - half)), float(expit(logit(mean) + half))
    # what is not seen of strata without spread is independent of the others' error
    flat = [(weight, one) for weight, one, error in zip(weights, strata, errors) if not error]
    low = mean - math.hypot(mean - low, *(weight * (own - below) for weight, (own, _, below, _) in flat))
    high = mean + math.hypot(high - mean, *(weight * (above - own) for weight, (own, _, _, above) in flat))
    return mean, stderr, max(low, 0.0) if shares else low, min(high, 1.0) if shares else high


def out_of_fold(means_QS: Array) -> Array:
    """The score of every question [Q] by the column that is best on the other half of the questions.

    The mean of the best column on the very questions that picked it is flattered; the mean of these is not. Averaged over
    `HALVINGS` random halvings, so that it does not hang on one of them.
    """
    count, generator = len(means_QS), np.random.default_rng(0)
    found = np.zeros(count)
    for _ in range(HALVINGS):
        order = generator.permutation(count)
        for here, there in ((order[: count // 2], order[count // 2 :]), (order[count // 2 :], order[: count // 2])):
            pick = int(np.argmax(means_QS[here].mean(axis=0))) if len(here) else 0
            found[there] += means_QS[there, pick] / HALVINGS
    return found


def compare_out_of_fold(one_Q: Array, other_Q: Array) -> Difference:
    """Compare two scores of `out_of_fold`, best against best, [Q] each; as `compare`, with 1.2 times its standard error.

    What lifts a column on one half has it picked for the other, so the halves hang together: in simulations without an effect a
    paired standard error was too small by 8 to 18 %.
    """
    found = compare(one_Q[:, None], other_Q[:, None])
    if found.stderr is None or found.df is None:
        return found
    stderr = WIDER * found.stderr
    p = float(2 * stdtr(found.df, -abs(found.mean) / stderr))
    return replace(found, stderr=stderr, p=p).at(found.confidence)


def compare(scores_a: ArrayLike, scores_b: ArrayLike) -> Difference:
    """Return the mean of a - b for two arrays of scores over the same questions, [Q, K] and [Q, M].

    Interval and p are those of a paired t test on the per-question means, whose variance also counts two questions that nobody
    asked: see `_variance`.

    Raises `DataError` as `average_at_k` does, and when the numbers of questions differ.
    """
    return _stratified_t_test([paired_differences(scores_a, scores_b)], [1.0])


def _stratified_t_test(pairs: Sequence[tuple[Array, float]], weights: Sequence[float]) -> Difference:
    """The weighted mean of strata of differences with its t test; pairs are (differences [Q], their limit), each with its own Q.

    The degrees of freedom are Welch and Satterthwaite's, Q - 1 for a single stratum.
    """
    mean = float(sum(weight * values.mean() for weight, (values, _) in zip(weights, pairs, strict=True)))
    variances = [weight**2 * _variance(values, limit) for weight, (values, limit) in zip(weights, pairs)]
    total, limit = sum(variances), max(limit for _, limit in pairs)
    if math.isinf(total):
        return Difference(mean, -math.inf, math.inf, 1.0)
    df = total**2 / sum(part**2 / max(len(values) - 1, 1) for part, (values, _) in zip(variances, pairs))
    stderr = math.sqrt(total)
    p = float(2 * stdtr(df, -abs(mean) / stderr))
    return Difference(mean, 0.0, 0.0, p, stderr, df, None if math.isinf(limit) else limit).at(CONFIDENCE)


def _variance(differences: Array, limit: float) -> float:
    """Squared standard error of the mean of differences [Q], as if two questions that nobody asked spread it as well.

    One lies as far above 0 as any that was asked lies from it, the other as far below. Differences may be skewed: many small
    losses and a rare large gain, which 30 questions need not hold. Where nothing differs on average, a plain t test calls
    what is then seen significant up to half of the time, a sign-flip test a fifth. Of verdicts on single answers the two are what
    the adjusted Wald interval of Bonett and Price (2012) adds: a question on which either side alone is right. Where all
    differ alike, the spread is unknown and the two lie at the limit.
    """
    count, mean = len(differences), differences.mean()
    reach = limit if has_no_spread(differences) else np.abs(differences).max()
    squares = np.sum((differences - mean) ** 2) + (reach - mean) ** 2 + (reach + mean) ** 2
    return float(squares) / (count * max(count - 1, 1))


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
    # the smallest of m times m, the next times m - 1, …, and none below one before it
    order = np.argsort(values, kind="stable")
    scaled = values[order] * np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in adjusted]


def simultaneous(differences: Sequence[Difference]) -> tuple[list[Difference], list[float]]:
    """The differences of a family with intervals that agree with Holm's method at 5 %, and the adjusted p-values.

    Each interval has the level at which Holm's method judged its p: it leaves 0 out exactly where the adjusted p is at most 0.05.
    """
    adjusted = holm([one.p for one in differences])
    order = np.argsort([one.p for one in differences], kind="stable")
    rejected = sum(p <= 1 - CONFIDENCE for p in adjusted)
    levels = np.empty(len(differences))
    # the smallest p of m is judged at α / m, the next at α / (m - 1), …, and all from the first that is kept on as that one is
    steps = np.minimum(np.arange(len(differences)), rejected)
    levels[order] = 1 - (1 - CONFIDENCE) / (len(differences) - np.minimum(steps, len(differences) - 1))
    return [one.at(float(level)) for one, level in zip(differences, levels)], adjusted


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


def _limits(array: Array) -> tuple[float, float]:
    """(lowest, highest) that a question can score; infinite where scores are no shares, as then nothing is known."""
    return (0.0, 1.0) if _in_unit_interval(array) else (-math.inf, math.inf)


def has_no_spread(values: Array) -> bool:
    """Whether all values [Q] are equal; means of equal scores can differ in the last bits, which is no spread."""
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def t_interval(values: Array, lower: float, upper: float) -> tuple[float, float, float, float]:
    """Return mean, standard error, low and high of `values` [Q], whose population lies in [lower, upper]."""
    count = len(values)
    mean = float(values.mean())
    t = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) if count > 1 else math.inf
    if has_no_spread(values):
        unlike = t * t / (count + t * t) if count > 1 else 1.0
        return mean, 0.0, mean + unlike * (lower - mean), mean + unlike * (upper - mean)
    stderr = float(values.std(ddof=1)) / math.sqrt(count)
    return mean, stderr, max(mean - t * stderr, lower), min(mean + t * stderr, upper)


@dataclass(frozen=True)
class SuiteEstimate:
    """The mean over `tasks` tasks of their means, with standard error and 95 % interval; `questions` in all, each counted once."""

    mean: float
    stderr: float
    low: float
    high: float
    tasks: int
    questions: int


Names = Sequence[Sequence[Hashable]]
"""[B][Q]: what tells the questions of several tasks apart; equal ones are one question, asked by each."""


def suite_average(
    tasks: Sequence[ArrayLike],
    *,
    weights: Sequence[float] | None = None,
    names: Names | None = None,
) -> SuiteEstimate:
    """Return the mean of the task means of B tables [Q, K], weighted by `weights` [B] that sum to 1; None: all count the same.

    The standard error is the root of the sum of the tasks' squared standard errors, each times its weight; the 95 % interval is
    that of `average_at_k` with this error and Welch and Satterthwaite's degrees of freedom. A task whose questions all have the
    same mean would add no width; the bounds that `average_at_k` gives it are added in quadrature. Tasks that share questions by
    `names` are one task in this, so that a copy of a task adds no certainty.

    Raises `DataError` for a table that is empty, not two-dimensional or not finite.
    """
    tables = [check_scores(table, f"task {index}") for index, table in enumerate(tasks)]
    means = [table.mean(axis=1) for table in tables]
    values, limits, shared = _merge_shared_strata(means, list(map(_limits, tables)), weights, names)
    return SuiteEstimate(*_stratified_mean(values, limits, shared), len(tables), sum(map(len, values)))


def compare_suites(
    tasks_a: Sequence[ArrayLike],
    tasks_b: Sequence[ArrayLike],
    *,
    weights: Sequence[float] | None = None,
    names: Names | None = None,
) -> Difference:
    """Return the difference of the suite averages, a - b, of B pairs of tables [Q, K] and [Q, M], paired by question.

    Interval and p are those of `compare`, with the tasks as strata, each weighted and those that share questions merged as in
    the average.

    Raises `DataError` as `compare` does.
    """
    pairs = [paired_differences(table_a, table_b) for table_a, table_b in zip(tasks_a, tasks_b, strict=True)]
    values, limits, shared = _merge_shared_strata(
        [one for one, _ in pairs], [(-limit, limit) for _, limit in pairs], weights, names
    )
    return _stratified_t_test([(one, limit) for one, (_, limit) in zip(values, limits)], shared)


def _merge_shared_strata(
    values: Sequence[Array],
    limits: Sequence[tuple[float, float]],
    weights: Sequence[float] | None,
    names: Names | None,
) -> tuple[list[Array], list[tuple[float, float]], list[float]]:
    """Strata [B][Q] with their limits and weights, those that share questions made one of all their questions.

    The value of a question is then the weighted mean over the strata; one that does not ask it stands at its own mean.
    """
    shares = [1 / len(values)] * len(values) if weights is None else list(weights)
    asked = [set(own) for own in names] if names is not None else [{(index,)} for index in range(len(values))]
    groups: list[list[int]] = []
    for index in range(len(values)):
        met = [group for group in groups if any(not asked[index].isdisjoint(asked[other]) for other in group)]
        groups = [group for group in groups if group not in met] + [[*(one for group in met for one in group), index]]
    found, bounds, sums = list[Array](), list[tuple[float, float]](), list[float]()
    for group in groups:
        total, merged = sum(shares[one] for one in group), values[group[0]]
        if names is not None and len(group) > 1:
            places = {name: place for place, name in enumerate(dict.fromkeys(n for one in group for n in names[one]))}
            merged = np.full(len(places), sum(shares[one] * values[one].mean() for one in group) / total)
            for one in group:
                part = shares[one] / total * len(places) / len(values[one])
                np.add.at(merged, [places[name] for name in names[one]], part * (values[one] - values[one].mean()))
        found.append(merged)
        bounds.append((min(limits[one][0] for one in group), max(limits[one][1] for one in group)))
        sums.append(total)
    return found, bounds, sums


def pass_at_k(scores: ArrayLike, k: int) -> Estimate:
    """Return pass@k, the chance that at least one of `k` samples is right, from `scores` [Q, K] of 0 and 1.

    Per question the unbiased estimate 1 - C(K - c, k) / C(K, k) for c right samples of K (Chen et al. 2021, eq. 1); their
    mean and its interval over questions as in `average_at_k`.

    Raises `DataError` for scores that are not 0 or 1 and for a `k` outside 1..K.
    """
    array = _verdicts(scores)
    samples = array.shape[1]
    if not 1 <= k <= samples:
        raise DataError(f"k is {k}; pass@k needs a whole number from 1 to the {samples} samples of each question.")
    # by c = 0 … K; whole numbers of Python, as binomials pass a float's range
    chance = np.array([1 - math.comb(samples - right, k) / math.comb(samples, k) for right in range(samples + 1)])
    return replace(average_at_k(chance[array.sum(axis=1).astype(int)][:, None]), samples=samples)


def majority_at_k(answers: Sequence[Sequence[Hashable | None]], scores: ArrayLike) -> Estimate:
    """Return majority@K: how often the most frequent answer of a question's K samples is right.

    Args:
        answers: the extracted answers, [Q, K]; equal answers vote together and None, no answer found, does not vote.
        scores: verdicts 0 or 1 on the same samples, [Q, K].

    Where several answers are equally frequent, the question scores the chance that one of them, picked at random, is
    right, so the order of the samples does not matter. A question without any vote scores 0. Should a grader have judged
    equal answers differently (after a timeout, say), the answer scores the mean of its verdicts.

    Raises `DataError` for scores that are not 0 or 1.
    """
    array = _verdicts(scores)
    means = np.zeros((len(array), 1))
    for question, (row, verdicts) in enumerate(zip(answers, array, strict=True)):
        votes: dict[Hashable, list[float]] = defaultdict(list)
        for answer, verdict in zip(row, verdicts, strict=True):
            if answer is not None:
                votes[answer].append(float(verdict))
        most = max(map(len, votes.values()), default=0)
        # fsum, so that the order in which tied answers appeared cannot change the last bit
        tied = [math.fsum(found) / most for found in votes.values() if len(found) == most]
        means[question] = math.fsum(tied) / len(tied) if tied else 0.0
    return replace(average_at_k(means), samples=array.shape[1])


def dft_rounded_mean(scores: ArrayLike) -> float:
    """Return Avg@K of `scores` [Q, K] of 0 and 1 as the DFT evaluation code computes it, as a share of 1.

    That code rounds the accuracy of each of the K sample columns to one decimal in percent and averages what is left.
    For comparison with numbers published from it only: it is off by up to 0.05 points, and `average_at_k` is exact.
    """
    columns = 100 * _verdicts(scores).mean(axis=0)
    return float(np.round(columns, 1).mean()) / 100


def _verdicts(scores: ArrayLike) -> Array:
    array = check_scores(scores, "scores")
    strange = np.argwhere((array != 0) & (array != 1))
    if len(strange):
        question, sample = strange[0]
        raise DataError(
            f"scores holds {array[question, sample]} at question {question}, sample {sample}; expected 1 for a right "
            "answer and 0 for a wrong one."
        )
    return array
