"""The rule that chooses, by hand and against plain numpy; what it does with ties, exclusions and scores that do not fit."""

import math

import numpy as np
import pytest

from loragate.selection import select
from loragate.selection.select import paired_z

BASELINE = "adapter greedy"


def column(*values):
    return np.array(values, dtype=float)[:, None]


def reference(scores, baseline=BASELINE, threshold=1.28):
    """The rule in five lines, over a table of question means."""
    means = {label: table.mean(axis=1) for label, table in scores.items()}
    best = max([baseline, *means], key=lambda label: means[label].mean())
    difference = means[best] - means[baseline]
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    return best if error > 0 and difference.mean() / error >= threshold else baseline


def test_it_is_the_plain_rule():
    draw = np.random.default_rng(5)
    taken = 0
    for _ in range(300):
        shift = draw.uniform(0, 0.25)
        scores = {BASELINE: draw.binomial(1, 0.4, (40, 1)).astype(float)}
        scores |= {name: draw.binomial(1, 0.4 + shift, (40, 3)).astype(float) for name in ("gated", "base")}
        found = select(scores)
        assert found.label == reference(scores)
        taken += found.accepted
    assert 50 < taken < 250, "both outcomes are met"


def test_what_beats_the_adapter_is_taken_and_a_gain_that_may_be_chance_is_not():
    own = column(*[0] * 20, *[1] * 20)
    better, hardly = own.copy(), own.copy()
    better[:8] = 1
    hardly[:1] = 1
    found = select({BASELINE: own, "gated [0,1] T=0.3": better})
    assert (found.label, found.accepted) == ("gated [0,1] T=0.3", True)
    assert found.difference.mean == pytest.approx(0.2)
    assert found.z == pytest.approx(0.2 / (np.std(better - own, ddof=1) / math.sqrt(40)))
    found = select({BASELINE: own, "base greedy": hardly})
    assert (found.label, found.best, found.accepted) == (BASELINE, "base greedy", False)
    assert 0.9 < found.z < 1.28


def test_ties_stay_with_the_adapter_and_what_is_excluded_is_not_taken():
    own, best = column(0, 1, 0, 1), column(1, 1, 1, 1)
    assert select({"base greedy": own, BASELINE: own}).label == BASELINE
    scores = {BASELINE: own, "a": best, "b": best}
    assert select(scores).label == "a", "of equal ones the earlier"
    assert select(scores, excluded=["a"]).label == "b"
    assert select(scores, excluded=["a", "b"]).label == BASELINE


def test_a_gain_on_every_question_has_no_spread():
    assert paired_z(column(1, 1), column(0, 0)) == math.inf
    assert paired_z(column(0, 0), column(1, 1)) == -math.inf
    assert paired_z(column(1, 0), column(1, 0)) == 0
    assert select({BASELINE: column(0, 0), "gated": column(1, 1)}).accepted
