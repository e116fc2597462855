"""Rows: classes of their tokens, intervals over them."""

import numpy as np
import pytest

from loragate.analysis.rows import Interval, bootstrap_ratio, class_of_text, row_weights


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 12", "digits"),
        ("+", "operators"),
        (" ≤", "operators"),
        ("don't", "words"),
        ("Ärger", "words"),
        ("x2", "mixed"),
        ("}$", "punctuation"),
        ("\n\n", "space"),
        ("", "mixed"),
        ("\ufffd", "mixed"),
        ("\\frac", "mixed"),
        ("数", "words"),
    ],
)
def test_text(text, expected):
    assert class_of_text(text) == expected


def test_weights_draw_whole_rows():
    weights = row_weights(7, 50, seed=1)
    assert weights.shape == (50, 7)
    assert (weights.sum(1) == 7).all()
    assert np.array_equal(weights, row_weights(7, 50, seed=1))


def test_ratio_is_the_mean_over_tokens():
    found = bootstrap_ratio([4.0, 1.0, 9.0], [4, 1, 5])
    assert found.mean == pytest.approx(1.4)
    assert found.low < 1.4 < found.high
    assert bootstrap_ratio([3.0, 0.0], [2, 0]) == Interval(1.5, None, None)
    assert (found.ends(), bootstrap_ratio([3.0], [2]).ends()) == (f" ({found.low:.2f} to {found.high:.2f})", "")


def test_coverage_on_known_rows():
    """About 95 of 100 intervals over 60 rows hold the truth (a wide allowance for 100 repetitions)."""
    generator = np.random.default_rng(0)
    held = 0
    for repetition in range(100):
        sizes = generator.integers(5, 20, 60)
        means = generator.normal(0.3, 0.1, 60)
        found = bootstrap_ratio(means * sizes, sizes, seed=repetition)
        held += found.low <= 0.3 <= found.high
    assert 86 <= held <= 100
