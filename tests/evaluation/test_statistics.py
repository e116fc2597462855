"""Intervals that cover what they claim to, p-values that are uniform when nothing differs, and known values."""

from __future__ import annotations

import dataclasses
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import stdtrit

from loragate.errors import DataError
from loragate.evaluation.statistics import Difference, Estimate, average_at_k, compare, holm, out_of_fold, t_interval


def tables() -> st.SearchStrategy[list[list[int]]]:
    """Verdicts, 1 to 12 questions with 1 to 6 samples."""
    bits = st.integers(0, 1)
    return st.integers(1, 6).flatmap(
        lambda k: st.lists(st.lists(bits, min_size=k, max_size=k), min_size=1, max_size=12)
    )


def symmetric_of(scores: np.ndarray) -> Estimate:
    return Estimate(*t_interval(scores.mean(axis=1), 0.0, 1.0), *scores.shape)


def test_average_at_k_by_hand() -> None:
    """Question means 1, 0.5, 0: sd 0.5, standard error 0.5 / sqrt(3), t with 2 degrees of freedom."""
    estimate = average_at_k([[1, 1], [1, 0], [0, 0]])
    assert estimate.mean == 0.5
    assert estimate.stderr == pytest.approx(0.5 / math.sqrt(3))
    # on the log-odds scale the mean 1/2 lies at 0 and its error is 4 times as large
    half = 4.302653 * 4 * 0.5 / math.sqrt(3)
    assert estimate.high == pytest.approx(1 / (1 + math.exp(-half)), rel=1e-6)
    assert estimate.low == pytest.approx(1 - estimate.high)
    assert (estimate.questions, estimate.samples) == (3, 2)
    wide = average_at_k([[10, 10], [10, 0], [0, 0]])
    assert wide.high - 5 == pytest.approx(4.302653 * 5 / math.sqrt(3), rel=1e-6)
    assert 5 - wide.low == pytest.approx(wide.high - 5)


def test_logit_interval_leans_towards_the_middle_and_stays_inside() -> None:
    """30 questions, 2 of them always right: the t interval is cut at zero, the logit interval is not."""
    scores = np.repeat([[1.0]] * 2 + [[0.0]] * 28, 16, axis=1)
    logit, symmetric = average_at_k(scores), symmetric_of(scores)
    stderr = math.sqrt(2 * 28 / 30 / 29) / math.sqrt(30)
    assert logit.stderr == symmetric.stderr == pytest.approx(stderr)
    odds, half = math.log(2 / 28), 2.045230 * stderr / (2 / 30 * 28 / 30)
    for bound, sign in ((logit.low, -1), (logit.high, 1)):
        assert math.log(bound / (1 - bound)) == pytest.approx(odds + sign * half, rel=1e-5)
    assert symmetric.low == 0 < logit.low
    assert logit.high > symmetric.high
    mirrored = average_at_k(1 - scores)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - logit.high, 1 - logit.low))


def test_both_intervals_agree_on_many_questions() -> None:
    scores = np.random.default_rng(5).random((5000, 4)) < 0.4
    logit, symmetric = average_at_k(scores), symmetric_of(scores)
    assert (logit.low, logit.high) == pytest.approx((symmetric.low, symmetric.high), abs=2e-5)


@settings(max_examples=60)
@given(tables(), st.randoms(use_true_random=False))
def test_order_of_questions_and_samples_does_not_matter(table: list[list[int]], random: Random) -> None:
    shuffled = [random.sample(row, len(row)) for row in random.sample(table, len(table))]
    there, back = average_at_k(table), average_at_k(shuffled)
    assert dataclasses.astuple(back) == pytest.approx(dataclasses.astuple(there), abs=1e-9)


@settings(max_examples=60)
@given(tables())
def test_intervals_hold_their_mean_and_mirror(table: list[list[int]]) -> None:
    estimate, mirrored = average_at_k(table), average_at_k(1 - np.array(table))
    assert 0 <= estimate.low <= estimate.mean + 1e-12
    assert estimate.mean - 1e-12 <= estimate.high <= 1
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - estimate.high, 1 - estimate.low), abs=1e-9)


def test_clustering_ignores_repeated_samples() -> None:
    """Sixteen copies of one sample are no more evidence than one."""
    once = np.random.default_rng(0).integers(0, 2, (40, 1))
    repeated = average_at_k(np.repeat(once, 16, axis=1))
    assert (repeated.stderr, repeated.low) == pytest.approx((average_at_k(once).stderr, average_at_k(once).low))


def test_booleans_are_scores() -> None:
    assert average_at_k(np.array([[True], [False], [True]])) == average_at_k([[1], [0], [1]])


@pytest.mark.parametrize("questions", [2, 5, 120])
def test_all_right_or_all_wrong_is_not_certain(questions: int) -> None:
    right = average_at_k(np.ones((questions, 16)))
    assert (right.mean, right.stderr, right.high) == (1, 0, 1)
    # At least as cautious as the exact two-sided bound for `questions` successes out of as many.
    assert 0 < right.low <= 0.025 ** (1 / questions)
    wrong = average_at_k(np.zeros((questions, 16)))
    assert (wrong.mean, wrong.low) == (0, 0)
    assert wrong.high == pytest.approx(1 - right.low)


def test_wilson_value_of_the_docstring() -> None:
    assert average_at_k(np.ones((120, 1))).low == pytest.approx(120 / (120 + stdtrit(119, 0.975) ** 2))
    assert round(100 * average_at_k(np.ones((120, 1))).low, 1) == 96.8


def test_equal_questions_inside_the_range_and_a_single_question() -> None:
    level = average_at_k([[1, 0]] * 30)
    assert level.low < 0.5 < level.high
    assert level.high - 0.5 == pytest.approx(0.5 - level.low)
    assert average_at_k([[1, 0, 0]]) == Estimate(pytest.approx(1 / 3), 0, 0, 1, 1, 3)
    assert average_at_k([[1, 1, 1]]).low == 0


def test_unbounded_scores_without_spread_have_no_bound() -> None:
    for scores in ([[7.0]], [[7.0], [7.0]]):
        estimate = average_at_k(scores)
        assert (estimate.low, estimate.high) == (-math.inf, math.inf)


def test_rounding_does_not_pass_for_spread() -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit only."""
    estimate = average_at_k([[0.1 + 0.2], [0.3]] * 20)
    assert estimate.stderr == 0
    assert estimate.high - estimate.low > 0.05


def test_interval_covers_the_truth() -> None:
    """Questions of differing difficulty, 60 at a time with 8 samples each: mean 0.3, 600 data sets; test_coverage.py has more."""
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(600):
        difficulty = generator.beta(0.9, 2.1, size=(60, 1))
        estimate = average_at_k(generator.random((60, 8)) < difficulty)
        covered += estimate.low <= 0.3 <= estimate.high
    assert 0.92 <= covered / 600 <= 0.98


def test_paired_interval_covers_the_truth() -> None:
    """Ten questions that differ far more from one another than a does from b, by 0.2 on average; 2,000 data sets."""
    generator = np.random.default_rng(2)
    covered = 0
    for _ in range(2000):
        question = generator.normal(scale=5, size=(10, 1))
        difference = compare(question + generator.normal(0.2, 1, (10, 3)), question + generator.normal(0, 1, (10, 2)))
        covered += difference.low <= 0.2 <= difference.high
    assert 0.93 <= covered / 2000 <= 0.97


def test_out_of_fold_is_not_flattered_by_the_pick() -> None:
    draws = [np.random.default_rng(seed).binomial(1, 0.5, (60, 4)).astype(float) for seed in range(300)]
    assert np.mean([table.mean(0).max() for table in draws]) > 0.55
    assert abs(np.mean([out_of_fold(table).mean() for table in draws]) - 0.5) < 0.01
    clear = np.stack([np.zeros(20), np.arange(20) / 20], axis=1)
    assert out_of_fold(clear) == pytest.approx(clear[:, 1])


def test_compare_by_hand() -> None:
    """Differences 0.5, 0.5, 0: of 8 sign patterns, 4 reach a total of 1 in size (0 counts on either side)."""
    difference = compare([[1, 1], [1, 0], [0, 0]], [[1, 0], [0, 0], [0, 0]])
    assert difference.mean == pytest.approx(1 / 3)
    half = 4.302653 * np.std([0.5, 0.5, 0], ddof=1) / math.sqrt(3)
    assert difference.low == pytest.approx(1 / 3 - half, rel=1e-6)
    assert difference.high == pytest.approx(min(1, 1 / 3 + half))
    assert difference.p == 0.5


def test_compare_takes_different_numbers_of_samples_and_is_antisymmetric() -> None:
    generator = np.random.default_rng(3)
    scores_a, scores_b = generator.random((30, 4)) < 0.6, generator.random((30, 16)) < 0.4
    there, back = compare(scores_a, scores_b), compare(scores_b, scores_a)
    assert (back.mean, back.low, back.high, back.p) == pytest.approx((-there.mean, -there.high, -there.low, there.p))
    assert compare(scores_a, scores_b) == there
    assert compare(scores_a, scores_b, seed=1).p == pytest.approx(there.p, abs=0.02)


def test_exact_and_drawn_p_values() -> None:
    """Twelve wins are exact, 2 / 2^12; with thirteen the smallest p-value that draws can give is 1 / 10,001."""
    assert compare(np.ones((12, 1)), np.zeros((12, 1))).p == 2 / 2**12
    assert compare(np.ones((40, 1)), np.zeros((40, 1))).p == 1 / 10_001
    thirteen = compare(np.ones((13, 1)), np.zeros((13, 1))).p
    assert 1 / 10_001 <= thirteen <= 8 / 10_001


def test_equal_sides_differ_by_nothing_but_not_with_certainty() -> None:
    same = compare(np.ones((120, 4)), np.ones((120, 4)))
    assert (same.mean, same.p) == (0, 1)
    assert -0.04 < same.low < 0 < same.high < 0.04
    assert compare([[1.0]], [[0.0]]) == Difference(1, -1, 1, 1)


def test_p_is_uniform_under_the_null() -> None:
    generator = np.random.default_rng(4)
    values = [compare(generator.normal(size=(20, 1)), generator.normal(size=(20, 1)), seed=i).p for i in range(400)]
    ranks = np.sort(values)
    distance = np.max(np.abs(ranks - (np.arange(400) + 0.5) / 400)) + 0.5 / 400
    assert distance < 1.63 / math.sqrt(400)  # Kolmogorov-Smirnov at the 1 % level
    exact = [compare(generator.normal(size=(8, 1)), np.zeros((8, 1))).p for _ in range(1000)]
    assert np.mean(np.array(exact) <= 0.05) == pytest.approx(12 / 256, abs=0.02)


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
    for bad in ([1.2], [-0.1], [math.nan], [[0.1]]):
        with pytest.raises(DataError, match="needs a flat list of p-values"):
            holm(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ([1, 0, 1], r"shape \(3,\).*single column"),
        (np.zeros((0, 4)), r"shape \(0, 4\)"),
        ([[1, 0], [1]], "same number of samples"),
        ([["right"]], "not a table of numbers"),
        ([[1, math.nan]], "nan at question 0, sample 1"),
    ],
)
def test_scores_that_are_no_scores(scores: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        average_at_k(scores)  # type: ignore[arg-type]


def test_compare_needs_the_same_questions() -> None:
    with pytest.raises(DataError, match="scores_a has 3 questions and scores_b has 2"):
        compare(np.zeros((3, 1)), np.zeros((2, 1)))
    with pytest.raises(DataError, match="scores_b has shape"):
        compare(np.zeros((3, 1)), np.zeros(3))  # type: ignore[arg-type]
