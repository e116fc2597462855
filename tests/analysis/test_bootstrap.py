"""Intervals over rows."""

import numpy as np
import pytest

from loragate.analysis.bootstrap import Interval, percentiles, ratio, row_weights


def test_weights_draw_whole_rows():
    weights = row_weights(7, 50, seed=1)
    assert weights.shape == (50, 7)
    assert (weights.sum(1) == 7).all()
    assert np.array_equal(weights, row_weights(7, 50, seed=1))


def test_ratio_is_the_mean_over_tokens():
    found = ratio([4.0, 1.0, 9.0], [4, 1, 5])
    assert found.mean == pytest.approx(1.4)
    assert found.low < 1.4 < found.high
    assert ratio([0.0], [0]) is None
    assert ratio([3.0, 0.0], [2, 0]) == Interval(1.5, None, None)
    assert str(found).startswith("1.4 (")


def test_coverage_on_known_rows():
    """About 95 of 100 intervals over 60 rows hold the truth (a wide allowance for 100 repetitions)."""
    generator = np.random.default_rng(0)
    held = 0
    for repetition in range(100):
        sizes = generator.integers(5, 20, 60)
        means = generator.normal(0.3, 0.1, 60)
        found = ratio(means * sizes, sizes, draws=400, seed=repetition)
        held += found.low <= 0.3 <= found.high
    assert 86 <= held <= 100


def test_percentiles_leave_out_what_is_not_finite():
    assert percentiles([np.nan, 1.0]) == (None, None)
    assert percentiles([np.nan, *np.linspace(0, 1, 201)]) == pytest.approx((0.025, 0.975))
