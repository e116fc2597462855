"""Suites, pass@k, majority votes and the variance split: by hand, by enumeration, and what must not change them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loragate.errors import DataError
from loragate.evaluation.statistics import (
    average_at_k,
    compare,
    compare_suites,
    dft_rounded_mean,
    majority_at_k,
    pass_at_k,
    suite_average,
)

GENERATOR = np.random.default_rng(0)
EASY = (GENERATOR.random((30, 4)) < GENERATOR.random((30, 1))).astype(float)
LONG = (GENERATOR.random((200, 16)) < 0.3 * GENERATOR.random((200, 1))).astype(float)


def test_suite_average_by_hand() -> None:
    suite = suite_average([EASY, LONG])
    easy, long = average_at_k(EASY), average_at_k(LONG)
    assert suite.mean == pytest.approx((easy.mean + long.mean) / 2)
    assert suite.stderr == pytest.approx(math.hypot(easy.stderr, long.stderr) / 2)
    assert (suite.tasks, suite.questions) == (2, 230)
    assert suite.high - suite.low == pytest.approx(2 * 1.96 * suite.stderr, rel=0.08)
    assert suite_average([EASY, LONG]) == suite
    assert suite_average([EASY, LONG], seed=1).low == pytest.approx(suite.low, abs=0.005)


def test_bootstrap_in_parts_equals_its_normal_limit() -> None:
    """5,000 questions take several parts of draws."""
    scores = GENERATOR.random((5000, 1)) < 0.5
    suite = suite_average([scores])
    assert suite.high - suite.low == pytest.approx(2 * 1.96 * suite.stderr, rel=0.05)


def test_a_task_without_spread_keeps_its_bound() -> None:
    alone = suite_average([np.zeros((30, 4))])
    bound = average_at_k(np.zeros((30, 4)))
    assert (alone.mean, alone.stderr, alone.low) == (0, 0, 0)
    assert alone.high == pytest.approx(bound.high)
    both = suite_average([EASY, np.zeros((30, 4))])
    own = suite_average([EASY])
    assert both.mean == pytest.approx(own.mean / 2)
    assert both.high - both.mean == pytest.approx(math.hypot(own.high - own.mean, bound.high) / 2)
    assert both.mean - both.low == pytest.approx((own.mean - own.low) / 2)
    assert suite_average([[[1]]]).low == 0


def test_compare_suites_by_hand() -> None:
    """Weighted differences 1/4, 1/4 and 1/2: the total 1 or -1 in 2 of 8 sign patterns."""
    difference = compare_suites([[[1], [1]], [[1]]], [[[0], [0]], [[0]]])
    assert (difference.mean, difference.p) == (1, 0.25)
    # neither task has spread: of two questions t^2 / (2 + t^2) may differ from those seen, of one question all
    unseen = 2 * 12.7062**2 / (2 + 12.7062**2)
    assert (difference.low, difference.high) == (pytest.approx(1 - math.hypot(unseen, 2) / 2, rel=1e-5), 1)


def test_one_task_is_compared_as_by_compare() -> None:
    other = np.random.default_rng(1).random((200, 16)) < 0.2
    suite, single = compare_suites([LONG], [other]), compare(LONG, other)
    assert (suite.mean, suite.p) == (pytest.approx(single.mean), single.p)
    assert (suite.low, suite.high) == pytest.approx((single.low, single.high), abs=0.004)
    back = compare_suites([other], [LONG])
    assert (back.mean, back.low, back.high) == pytest.approx((-suite.mean, -suite.high, -suite.low), abs=0.004)


def test_compare_suites_cancels_what_both_share() -> None:
    """A small gain that the spread of difficulties would hide is seen because questions are paired."""
    difficulty = np.random.default_rng(2).random((100, 1))
    better = np.minimum(difficulty + 0.02, 1)
    difference = compare_suites([better, better], [difficulty, difficulty])
    assert 0 < difference.low < 0.02 == pytest.approx(difference.high, abs=1e-3)
    same = compare_suites([EASY, LONG], [EASY, LONG])
    assert (same.mean, same.p) == (0, 1)
    assert same.low < 0 < same.high


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_equals_enumeration(k: int) -> None:
    scores = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 1]])
    every = [np.mean([max(subset) for subset in itertools.combinations(row, k)]) for row in scores.tolist()]
    estimate = pass_at_k(scores, k)
    assert estimate.mean == pytest.approx(np.mean(every))
    assert estimate.stderr == pytest.approx(np.std(every, ddof=1) / 2)
    assert (estimate.questions, estimate.samples) == (4, 5)


def test_pass_at_one_is_the_average() -> None:
    assert dataclasses.astuple(pass_at_k(EASY, 1)) == pytest.approx(dataclasses.astuple(average_at_k(EASY)))
    assert pass_at_k(EASY, 4).mean == EASY.max(axis=1).mean()
    assert pass_at_k(np.eye(2000)[:2], 1000).mean == pytest.approx(0.5)  # binomials far beyond a float


def test_majority_by_hand() -> None:
    answers = [["7", "7", "3"], ["1", "2", "3"], [None, None, "4"], [None, None, None], ["1", "1", "2"]]
    right = [[1, 1, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1]]
    estimate = majority_at_k(answers, right)
    assert estimate.mean == pytest.approx((1 + 1 / 3 + 1 + 0 + 0) / 5)
    assert (estimate.questions, estimate.samples) == (5, 3)
    assert majority_at_k([["a", "a"]], [[1, 0]]).mean == 0.5


def brute_force_majority(answers: list[str | None], right: list[int]) -> float:
    """The mean over all ways to pick among the answers that no other outnumbers."""
    votes = [answer for answer in answers if answer is not None]
    modal = [answer for answer in sorted(set(votes)) if all(votes.count(answer) >= votes.count(o) for o in votes)]
    picks = [right[answers.index(answer)] for answer in modal]
    return sum(picks) / len(picks) if picks else 0.0


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_majority_equals_brute_force_in_any_order(answers: list[str | None], random: Random) -> None:
    right = [int(answer == "b") for answer in answers]
    expected = brute_force_majority(answers, right)
    order = random.sample(range(len(answers)), len(answers))
    for indices in (range(len(answers)), order):
        found = majority_at_k([[answers[i] for i in indices]], [[right[i] for i in indices]])
        assert found.mean == pytest.approx(expected)
    # every sample twice changes no majority
    assert majority_at_k([answers * 2], [right * 2]).mean == pytest.approx(expected)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=1, max_size=8))
def test_pass_at_k_grows_with_k_and_ignores_order(table: list[list[int]]) -> None:
    means = [pass_at_k(table, k).mean for k in range(1, 6)]
    assert means == sorted(means)
    assert [pass_at_k([sorted(row) for row in table[::-1]], k).mean for k in range(1, 6)] == pytest.approx(means)


def test_dft_rounding_by_hand() -> None:
    """Columns 1/3 and 2/3 become 33.3 and 66.7 %; 17 of 272 is 6.25 %, which rounds to the even 6.2."""
    assert dft_rounded_mean([[1, 1], [0, 1], [0, 0]]) == pytest.approx(0.5)
    assert dft_rounded_mean([[1], [0], [0]]) == pytest.approx(0.333)
    assert dft_rounded_mean(np.arange(272)[:, None] < 17) == pytest.approx(0.062)
    scores = np.random.default_rng(3).random((30, 16)) < 0.08
    assert dft_rounded_mean(scores) == pytest.approx(average_at_k(scores).mean, abs=0.0005)


def test_dft_rounding_reaches_a_score_that_no_exact_mean_can_be() -> None:
    """8.34 % of 30 x 16 answers is no multiple of 1 / 480, yet the rounded columns give it."""
    assert not any(round(100 * right / 480, 2) == 8.34 for right in range(481))
    counts = [1] + [2] * 6 + [3] * 9  # right answers by column: 3.3, 6.7 and 10.0 %
    scores = np.arange(30)[:, None] < np.array(counts)
    assert average_at_k(scores).mean == pytest.approx(40 / 480)
    assert 100 * dft_rounded_mean(scores) == pytest.approx((3.3 + 6 * 6.7 + 9 * 10) / 16)
    assert round(100 * dft_rounded_mean(scores), 2) == 8.34


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: suite_average([EASY, [1, 0]]), r"task 1 has shape \(2,\)"),
        (
            lambda: compare_suites([EASY, LONG], [EASY, LONG[:9]]),
            "scores_a has 200 questions and scores_b has 9",
        ),
        (lambda: pass_at_k(EASY, 5), "k is 5.*1 to the 4 samples"),
        (lambda: pass_at_k(EASY, 0), "k is 0"),
        (lambda: pass_at_k(EASY / 2, 1), "holds 0.5 at question"),
        (lambda: dft_rounded_mean([[0.5]]), "expected 1 for a right answer"),
    ],
    ids=range(6),
)
def test_tables_that_do_not_fit(call, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_weights_nest_averages_and_equal_ones_change_nothing():
    draw = np.random.default_rng(0)
    tables = [draw.integers(0, 2, (size, 1)).astype(float) for size in (200, 30, 50, 90)]
    others = [draw.integers(0, 2, table.shape).astype(float) for table in tables]
    even = suite_average(tables, weights=[0.25] * 4)
    assert even.mean == pytest.approx(suite_average(tables).mean)
    assert (even.low, even.high) == pytest.approx((suite_average(tables).low, suite_average(tables).high))
    weights = [1 / 2, 1 / 6, 1 / 6, 1 / 6]  # one task, and one of three subtasks
    nested = suite_average(tables, weights=weights)
    means = [float(table.mean()) for table in tables]
    assert nested.mean == pytest.approx((means[0] + sum(means[1:]) / 3) / 2)
    errors = [average_at_k(table).stderr for table in tables]
    assert nested.stderr == pytest.approx(math.hypot(*(w * e for w, e in zip(weights, errors))))
    assert nested.high - nested.low == pytest.approx(2 * 1.96 * nested.stderr, rel=0.05)
    difference = compare_suites(tables, others, weights=weights)
    assert difference.mean == pytest.approx(nested.mean - suite_average(others, weights=weights).mean)
