"""Intervals that cover what they claim to, p-values that are uniform when nothing differs, and known values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit, stdtr, stdtrit

from loragate.errors import DataError
from loragate.evaluation.statistics import (
    Estimate,
    average_at_k,
    compare,
    compare_out_of_fold,
    compare_suites,
    dft_rounded_mean,
    holm,
    majority_at_k,
    out_of_fold,
    pass_at_k,
    simultaneous,
    suite_average,
    t_interval,
)

GENERATOR = np.random.default_rng(0)
EASY = (GENERATOR.random((30, 4)) < GENERATOR.random((30, 1))).astype(float)
LONG = (GENERATOR.random((200, 16)) < 0.3 * GENERATOR.random((200, 1))).astype(float)


def tables() -> st.SearchStrategy[list[list[int]]]:
    """Verdicts, 1 to 12 questions with 1 to 6 samples."""
    bits = st.integers(0, 1)
    return st.integers(1, 6).flatmap(
        lambda k: st.lists(st.lists(bits, min_size=k, max_size=k), min_size=1, max_size=12)
    )


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
    logit, symmetric = average_at_k(scores), Estimate(*t_interval(scores.mean(axis=1), 0.0, 1.0), *scores.shape)
    stderr = math.sqrt(2 * 28 / 30 / 29) / math.sqrt(30)
    assert logit.stderr == symmetric.stderr == pytest.approx(stderr)
    odds, half = math.log(2 / 28), 2.045230 * stderr / (2 / 30 * 28 / 30)
    for bound, sign in ((logit.low, -1), (logit.high, 1)):
        assert math.log(bound / (1 - bound)) == pytest.approx(odds + sign * half, rel=1e-5)
    assert symmetric.low == 0 < logit.low
    assert logit.high > symmetric.high
    mirrored = average_at_k(1 - scores)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - logit.high, 1 - logit.low))


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


@pytest.mark.parametrize("questions", [2, 5, 120])
def test_all_right_or_all_wrong_is_not_certain(questions: int) -> None:
    right = average_at_k(np.ones((questions, 16)))
    assert (right.mean, right.stderr, right.high) == (1, 0, 1)
    # At least as cautious as the exact two-sided bound for `questions` successes out of as many.
    assert 0 < right.low <= 0.025 ** (1 / questions)
    wrong = average_at_k(np.zeros((questions, 16)))
    assert (wrong.mean, wrong.low) == (0, 0)
    assert wrong.high == pytest.approx(1 - right.low)


def test_rounding_does_not_pass_for_spread() -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit only."""
    estimate = average_at_k([[0.1 + 0.2], [0.3]] * 20)
    assert estimate.stderr == 0
    assert estimate.high - estimate.low > 0.05


def test_out_of_fold_is_not_flattered_by_the_pick() -> None:
    draws = [np.random.default_rng(seed).binomial(1, 0.5, (60, 4)).astype(float) for seed in range(300)]
    assert np.mean([table.mean(0).max() for table in draws]) > 0.55
    assert abs(np.mean([out_of_fold(table).mean() for table in draws]) - 0.5) < 0.01
    clear = np.stack([np.zeros(20), np.arange(20) / 20], axis=1)
    assert out_of_fold(clear) == pytest.approx(clear[:, 1])


def test_compare_by_hand() -> None:
    """Differences 0.5, 0.5, 0 about 1/3, and two unseen ones at 0.5 and -0.5."""
    difference = compare([[1, 1], [1, 0], [0, 0]], [[1, 0], [0, 0], [0, 0]])
    assert difference.mean == pytest.approx(1 / 3)
    squares = 3 * (1 / 6) ** 2 + (1 / 3) ** 2 + (5 / 6) ** 2
    assert difference.stderr == pytest.approx(math.sqrt(squares / (3 * 2)))
    assert (difference.low, difference.high) == (-1, 1), "cut at what a share can differ by"
    assert difference.p == pytest.approx(2 * (1 - stdtr(2, 1 / 3 / difference.stderr)))
    long = compare(LONG[:, :8], LONG[:, 8:])
    assert long.high - long.mean == pytest.approx(1.971957 * long.stderr, rel=1e-5)


def test_compare_takes_different_numbers_of_samples_and_is_antisymmetric() -> None:
    generator = np.random.default_rng(3)
    scores_a, scores_b = generator.random((30, 4)) < 0.6, generator.random((30, 16)) < 0.4
    there, back = compare(scores_a, scores_b), compare(scores_b, scores_a)
    assert (back.mean, back.low, back.high, back.p) == pytest.approx((-there.mean, -there.high, -there.low, there.p))
    assert compare(scores_a, scores_b) == there


@pytest.mark.parametrize(
    ("wins", "significant"), [(1, False), (2, False), (5, False), (6, True), (12, True), (40, True)]
)
def test_wins_alone_need_six_questions(wins: int, significant: bool) -> None:
    """As the exact sign test has it, whose p is 2 / 2^wins."""
    found = compare(np.ones((wins, 1)), np.zeros((wins, 1)))
    assert (found.p <= 0.05, found.low > 0) == (significant, significant)


def test_equal_sides_differ_by_nothing_but_not_with_certainty() -> None:
    same = compare(np.ones((120, 4)), np.ones((120, 4)))
    assert (same.mean, same.p) == (0, 1)
    assert -0.04 < same.low < 0 < same.high < 0.04
    alone = compare([[1.0]], [[0.0]])
    assert (alone.mean, alone.low, alone.high) == (1, -1, 1)
    assert alone.p > 0.5
    unbounded = compare([[7.0]] * 9, [[5.0]] * 9)
    assert (unbounded.low, unbounded.high, unbounded.p) == (-math.inf, math.inf, 1)


@pytest.mark.parametrize("rare", [0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("count", [12, 30, 128])
def test_a_rare_large_gain_and_many_small_losses_are_no_loss(rare: float, count: int) -> None:
    """Nothing differs on average; a plain t test finds a loss up to half of the time, as the rare gain was not drawn."""
    generator = np.random.default_rng(8)
    gains = np.where(generator.random((1000, count)) < rare, 1 - rare, -rare)
    found = [compare(row[:, None], np.zeros((count, 1))) for row in gains]
    assert np.mean([one.p <= 0.05 for one in found]) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)
    assert all((one.p <= 0.05) == (one.low > 0 or one.high < 0) for one in found), "one decides the other"


def test_p_is_uniform_under_the_null() -> None:
    generator = np.random.default_rng(4)
    values = [compare(generator.normal(size=(200, 1)), generator.normal(size=(200, 1))).p for _ in range(400)]
    distance = np.max(np.abs(np.sort(values) - (np.arange(400) + 0.5) / 400)) + 0.5 / 400
    assert distance < 1.63 / math.sqrt(400)  # Kolmogorov-Smirnov at the 1 % level


def test_the_intervals_of_a_family_agree_with_holms_method() -> None:
    generator = np.random.default_rng(5)
    seen = set()
    for size in range(1, 9):
        for _ in range(40):
            sides = [generator.random((2, 40, 1)) < np.array([0.5 + 0.04 * i, 0.4])[:, None, None] for i in range(size)]
            family, adjusted = simultaneous([compare(*map(np.asarray, side)) for side in sides])
            assert adjusted == holm([one.p for one in family])
            for one, p in zip(family, adjusted, strict=True):
                assert (p <= 0.05) == (one.low > 0 or one.high < 0)
                assert one.confidence >= 0.95
                seen.add((one.p <= 0.05, p <= 0.05))
    assert seen == {(True, True), (True, False), (False, False)}
    assert simultaneous([]) == ([], [])


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


# suites, pass@k, majority votes


def test_suite_average_by_hand() -> None:
    suite = suite_average([EASY, LONG])
    easy, long = average_at_k(EASY), average_at_k(LONG)
    assert suite.mean == pytest.approx((easy.mean + long.mean) / 2)
    assert suite.stderr == pytest.approx(math.hypot(easy.stderr, long.stderr) / 2)
    assert (suite.tasks, suite.questions) == (2, 230)
    assert suite.high - suite.low == pytest.approx(2 * 1.96 * suite.stderr, rel=0.08)
    alone = suite_average([EASY])
    assert (alone.mean, alone.stderr, alone.low, alone.high) == (easy.mean, easy.stderr, easy.low, easy.high)


def test_a_task_without_spread_keeps_its_bound() -> None:
    alone = suite_average([np.zeros((30, 4))])
    bound = average_at_k(np.zeros((30, 4)))
    assert (alone.mean, alone.stderr, alone.low) == (0, 0, 0)
    assert alone.high == pytest.approx(bound.high)
    both = suite_average([EASY, np.zeros((30, 4))])
    own = suite_average([EASY])
    assert both.mean == pytest.approx(own.mean / 2)
    # the other task's error on the log-odds scale, and beside it what was not seen of the one without spread
    half = stdtrit(29, 0.975) * own.stderr / 2 / (both.mean * (1 - both.mean))
    seen = expit(logit(both.mean) + half) - both.mean
    assert both.high - both.mean == pytest.approx(math.hypot(seen, bound.high / 2))
    assert both.low == pytest.approx(expit(logit(both.mean) - half))
    assert suite_average([[[1]]]).low == 0


def test_compare_suites_by_hand() -> None:
    """A suite of one task is the task; of two, errors add by their squares, and the rarer degrees of freedom count."""
    one = compare(LONG[:, :1], LONG[:, 1:2])
    assert compare_suites([LONG[:, :1]], [LONG[:, 1:2]]) == dataclasses.replace(one, df=pytest.approx(one.df))
    other = compare(EASY[:, :2], EASY[:, 2:])
    both = compare_suites([LONG[:, :1], EASY[:, :2]], [LONG[:, 1:2], EASY[:, 2:]])
    assert both.mean == pytest.approx((one.mean + other.mean) / 2)
    assert both.stderr == pytest.approx(math.hypot(one.stderr, other.stderr) / 2)
    parts = one.stderr**2, other.stderr**2
    assert both.df == pytest.approx(sum(parts) ** 2 / (parts[0] ** 2 / 199 + parts[1] ** 2 / 29))
    assert compare_suites([[[1], [1]], [[1]]], [[[0], [0]], [[0]]]).p > 0.05, "three questions show nothing"


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=5, max_size=5), min_size=2, max_size=8))
def test_pass_at_k_equals_enumeration(table: list[list[int]]) -> None:
    for k in range(1, 6):
        every = [np.mean([max(subset) for subset in itertools.combinations(row, k)]) for row in table]
        estimate = pass_at_k(table, k)
        assert estimate.mean == pytest.approx(np.mean(every))
        assert estimate.stderr == pytest.approx(np.std(every, ddof=1) / math.sqrt(len(table)), abs=1e-9)
        assert (estimate.questions, estimate.samples) == (len(table), 5)


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


def test_dft_rounding_by_hand() -> None:
    """Columns 1/3 and 2/3 become 33.3 and 66.7 %; 17 of 272 is 6.25 %, which rounds to the even 6.2."""
    assert dft_rounded_mean([[1, 1], [0, 1], [0, 0]]) == pytest.approx(0.5)
    assert dft_rounded_mean([[1], [0], [0]]) == pytest.approx(0.333)
    assert dft_rounded_mean(np.arange(272)[:, None] < 17) == pytest.approx(0.062)
    scores = np.random.default_rng(3).random((30, 16)) < 0.08
    assert dft_rounded_mean(scores) == pytest.approx(average_at_k(scores).mean, abs=0.0005)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: average_at_k([1, 0, 1]), r"shape \(3,\).*single column"),
        (lambda: average_at_k(np.zeros((0, 4))), r"shape \(0, 4\)"),
        (lambda: average_at_k([[1, 0], [1]]), "same number of samples"),
        (lambda: average_at_k([[1, math.nan]]), "nan at question 0, sample 1"),
        (lambda: compare(np.zeros((3, 1)), np.zeros((2, 1))), "scores_a has 3 questions and scores_b has 2"),
        (lambda: compare(np.zeros((3, 1)), np.zeros(3)), "scores_b has shape"),
        (lambda: suite_average([EASY, [1, 0]]), r"task 1 has shape \(2,\)"),
        (lambda: compare_suites([EASY, LONG], [EASY, LONG[:9]]), "scores_a has 200 questions and scores_b has 9"),
        (lambda: pass_at_k(EASY, 5), "k is 5.*1 to the 4 samples"),
        (lambda: pass_at_k(EASY, 0), "k is 0"),
        (lambda: pass_at_k(EASY / 2, 1), "holds 0.5 at question"),
        (lambda: dft_rounded_mean([[0.5]]), "expected 1 for a right answer"),
    ],
    ids=range(12),
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


def test_a_task_averaged_with_a_copy_of_itself_is_itself():
    names, order = [f"q{place}" for place in range(len(LONG))], np.random.default_rng(0).permutation(len(LONG))
    shuffled = [names[place] for place in order]
    alone, twice = suite_average([LONG]), suite_average([LONG, LONG[order]], names=[names, shuffled])
    assert dataclasses.astuple(twice)[:4] == pytest.approx(dataclasses.astuple(alone)[:4])
    assert (twice.tasks, twice.questions) == (2, 200)
    one = compare_suites([LONG[:, :8]], [LONG[:, 8:]])
    two = compare_suites([LONG[:, :8], LONG[order, :8]], [LONG[:, 8:], LONG[order, 8:]], names=[names, shuffled])
    assert (two.mean, two.stderr, two.df, two.p) == pytest.approx((one.mean, one.stderr, one.df, one.p))
    assert suite_average([LONG, LONG]).stderr < 0.8 * alone.stderr, "as strata they would count twice"
    apart = suite_average([LONG, EASY], names=[names, [f"e{place}" for place in range(30)]])
    assert apart == suite_average([LONG, EASY]), "tasks that share no question are strata as before"


def test_tasks_that_share_some_questions():
    """The standard error is that of sums of what each question adds to the average."""
    names = [list(range(200)), list(range(100, 160))]
    tables = [LONG, LONG[100:160]]
    found = suite_average(tables, names=names)
    adds = np.zeros(200)
    for table, own in zip(tables, names):
        means = table.mean(axis=1)
        adds[own] += (means - means.mean()) / len(own) / 2
    assert found.mean == pytest.approx((LONG.mean() + LONG[100:160].mean()) / 2)
    assert found.stderr == pytest.approx(math.sqrt(np.sum(adds**2) * 200 / 199))
    assert found.questions == 200
    same = compare_suites(tables, tables, names=names)
    assert same.p == 1
    assert -0.1 < same.low < 0 < same.high < 0.1, "without any difference the bound is that of shares"


def test_the_interval_of_best_against_best_is_wide_enough():
    """Four settings against four, none of which is better: a plain paired interval misses 0 twice as often as it says."""
    generator, missed, narrow = np.random.default_rng(0), 0, 0
    for _ in range(300):
        one, other = (out_of_fold((generator.random((60, 4)) < 0.5).astype(float)) for _ in range(2))
        found, plain = compare_out_of_fold(one, other), compare(one[:, None], other[:, None])
        assert (found.p <= 0.05) == (found.low > 0 or found.high < 0)
        missed += found.p <= 0.05
        narrow += plain.p <= 0.05
    assert missed <= 21 < narrow
