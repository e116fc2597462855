"""What stopping ranges early costs, on made verdicts with known answers, and on the committed ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from loragate.selection.candidate import Candidate
from loragate.selection.comparison import SCALES, TEMPERATURES

from loragate.gates.range import Range
from tiny import scripts_of

ROOT = Path(__file__).parents[2]
LOW, WIDE, HIGH = RANGES = [Candidate(Range(*bounds), seed=42) for bounds in ((0, 1), (-6, 3), (0, 6))]
ADAPTER = Candidate(None, "adapter")
POOL, TEST = 128, 50


@pytest.fixture(scope="module")
def stopping() -> Iterator[ModuleType]:
    with scripts_of(ROOT / "benchmarks" / "real") as load:
        yield load("selection.stopping")


def right(count: int, share: float, samples: int) -> np.ndarray:
    """Scores of which the share is right, spread over the questions."""
    return np.repeat((np.arange(count) * 37 % count < round(share * count)).astype(float)[:, None], samples, axis=1)


@pytest.fixture
def misleading(stopping):
    """[0,6] is best at the end, greedily 20 points above [-6,3], which is best after a quarter; half of the steps tell."""
    ends = {ADAPTER: 0.3, LOW: 0.32, WIDE: 0.6, HIGH: 0.8}
    parts = {0.25: {LOW: 0.3, WIDE: 0.5, HIGH: 0.4}, 0.5: {LOW: 0.3, WIDE: 0.5, HIGH: 0.9}}

    def at(models, count, heats):
        return {
            replace(model, temperature=heat): right(count, share * (1 - 0.5 * heat), stopping.SAMPLES if heat else 1)
            for model, share in models.items()
            for heat in heats
        }

    return stopping.Verdicts(
        "made",
        "tune",
        steps=10,
        dev=at(ends, POOL, TEMPERATURES),
        test=at(ends, TEST, TEMPERATURES),
        parts={share: at(models, POOL, stopping.HEATS) for share, models in parts.items()},
    )


def test_a_part_that_misleads_costs_what_the_stopped_range_was_better(stopping, misleading):
    found = stopping.judge(misleading, [np.arange(POOL)] * 2, TEMPERATURES)
    today, half = (stopping.summary(found[name]) for name in (stopping.TODAY, "the best of three after half"))
    assert today["same_percent"] == 0
    assert today["lost_mean"] == today["lost_where_different"] == today["best_gates_lost"] == pytest.approx(20)
    assert half["same_percent"] == 100
    assert half["lost_worst"] == half["best_gates_lost"] == 0
    assert stopping.summary(found[stopping.ALL])["regret_mean"] == 0


def test_costs_are_steps_and_answers_of_everything_that_was_trained_and_asked(stopping, misleading):
    found = {name: deals[0] for name, deals in stopping.judge(misleading, [np.arange(POOL)], TEMPERATURES).items()}
    assert found[stopping.TODAY]["trainings"] == pytest.approx((3 * 3 + 7) / 10), "ten steps, of which three are a part"
    assert found["the best two after half"]["trainings"] == pytest.approx((3 * 5 + 2 * 5) / 10)
    assert found[stopping.ALL]["trainings"] == 3
    parts = 3 * 2 * stopping.PART_QUESTIONS * stopping.SAMPLES
    assert found[stopping.TODAY]["answers"] - found["always [-6,3]"]["answers"] == parts
    more = found["the same, four times the questions"]["answers"] - found["always [-6,3]"]["answers"]
    assert more == 3 * (96 * stopping.SAMPLES + POOL), "greedily all there are"


def test_a_part_is_asked_the_first_questions_of_the_deal(stopping, misleading):
    """24 of them sampled, 96 greedily: a range that is right on these goes on, and one that is right on the others stops."""
    order = np.random.default_rng(0).permutation(POOL)
    for heat, count in ((1.0, 24), (0.0, 96)):
        deal = stopping.Deal(misleading, order, 0, (heat,))
        scores = misleading.parts[0.25][replace(LOW, temperature=heat)]
        scores[:] = 1
        scores[order[:count]] = 0
        assert stopping.strongest(deal, deal.part(0.25, 1)) == [WIDE]
        scores[:] = 0
        scores[order[:count]] = 1
        assert stopping.strongest(deal, deal.part(0.25, 1)) == [LOW]


def test_what_is_clearly_worse_stops_and_what_may_be_as_good_goes_on(stopping, misleading):
    deal = stopping.Deal(misleading, np.arange(POOL), 0, TEMPERATURES)
    assert stopping.not_clearly_worse(deal, deal.part(0.5, 1)) == [HIGH]
    for setting, scores in misleading.parts[0.25].items():
        scores[:] = misleading.parts[0.25][replace(WIDE, temperature=setting.temperature)]
    assert stopping.not_clearly_worse(deal, deal.part(0.25, 1)) == RANGES


def test_committed_verdicts_are_whole(stopping):
    measured = stopping.unpack(stopping.read(ROOT / stopping.VERDICTS))
    assert len(measured) >= 6
    for one in measured.values():
        assert len(one.dev) == len(one.test) == (2 + len(SCALES) + len(RANGES)) * len(TEMPERATURES)
        assert {len(table) for table in one.dev.values()} == {stopping.POOL}
        assert {len(table) for table in one.test.values()} == {stopping.TEST}
        assert {share: len(tables) for share, tables in one.parts.items()} == dict.fromkeys(stopping.SHARES, 6)
