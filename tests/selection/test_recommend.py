"""The simplest setting that nothing more complicated is shown to beat: on made scores with a known truth."""

import json

import numpy as np
import pytest

from loragate.errors import ConfigError
from loragate.gates.range import Range
from loragate.selection.candidate import Candidate
from loragate.selection.recommend import ENOUGH, LEVEL, STRICT, halve, level_for, recommend, shrunk_means

WARM, COOL, GREEDY = (Candidate(None, "adapter", temperature=t) for t in (1.0, 0.3, 0.0))
BASE = Candidate(None, "base", temperature=1.0)
GATES = [Candidate(Range(0, upper), temperature=0.3) for upper in range(2, 12)]


def draw(chances: dict[Candidate, float], questions: int, seed: int) -> dict[Candidate, np.ndarray]:
    """Verdicts: hard questions are hard for all settings; a greedy answer is one sample."""
    generator = np.random.default_rng(seed)
    hardness = generator.uniform(-0.3, 0.3, questions)[:, None]
    return {
        setting: (generator.random((questions, 4 if setting.temperature else 1)) < chance + hardness).astype(float)
        for setting, chance in chances.items()
    }


def test_a_cooler_adapter_is_recommended_where_gates_are_no_better_than_it():
    scores = draw({WARM: 0.3, COOL: 0.6, GREEDY: 0.5, BASE: 0.3, GATES[0]: 0.55}, 128, seed=0)
    found = recommend(scores)
    assert found.setting == COOL
    assert [step.shown for step in found.steps] == [False, False]
    assert found.tried == 5
    assert set(found.scores) == set(scores)


def test_gates_that_help_are_recommended_with_the_temperature_at_which_they_do():
    warm_gates = Candidate(Range(0, 2), temperature=1.0)
    scores = draw({WARM: 0.3, COOL: 0.4, BASE: 0.3, warm_gates: 0.4, GATES[0]: 0.6}, 128, seed=1)
    found = recommend(scores)
    assert found.setting == GATES[0]
    step = found.steps[-1]
    assert (step.kind, step.against, step.shown) == ("gates", "adapter", True)
    assert 0 < step.low < 0.2 < step.high


def test_the_luckiest_of_many_equals_is_seldom_taken_for_better():
    switched = sum(
        recommend(draw({COOL: 0.5, **dict.fromkeys(GATES, 0.5)}, 64, seed)).setting != COOL for seed in range(100)
    )
    lucky = sum(
        max(scores[gates].mean() for gates in GATES) > scores[COOL].mean()
        for scores in (draw({COOL: 0.5, **dict.fromkeys(GATES, 0.5)}, 64, seed) for seed in range(100))
    )
    assert lucky > 80
    assert switched <= 10


def test_the_score_out_of_fold_is_not_flattered():
    honest, best = [], []
    for seed in range(40):
        found = recommend(draw({COOL: 0.5, **dict.fromkeys(GATES, 0.5)}, 64, seed))
        honest.append(found.honest["gates"].mean)
        best.append(max(found.scores[gates].mean for gates in GATES))
    assert np.mean(best) > 0.53
    assert abs(np.mean(honest) - 0.5) < 0.015


def test_halving_asks_the_losers_little_and_keeps_the_best_and_two_of_every_kind():
    chances = {WARM: 0.3, COOL: 0.5, BASE: 0.2, **dict.fromkeys(GATES, 0.3), GATES[3]: 0.8}
    scores = draw(chances, 128, seed=2)
    asked: dict[Candidate, int] = {}

    def ask(setting: Candidate, count: int) -> np.ndarray:
        assert count > asked.get(setting, 0)
        asked[setting] = count
        return scores[setting][:count]

    left = halve(scores, ask, 128, finalists=4)
    assert {WARM, COOL, BASE, GATES[3]} <= set(left), "the adapter stays at every temperature"
    assert len(left) < len(scores)
    assert all(len(left[setting]) == 128 for setting in left)
    assert min(asked.values()) == 16
    assert sum(asked.values()) < 0.6 * 128 * len(scores)
    assert recommend(left, tried=len(scores)).setting == GATES[3]


def test_noisier_means_are_pulled_further_to_the_common_mean():
    generator = np.random.default_rng(3)
    exact, noisy = generator.normal([0.2, 0.4, 0.6], 0.01, (50, 3)), generator.normal(0.9, 2.0, (50, 1))
    means = np.hstack([exact, noisy])
    centre, shrunk = means.mean(), shrunk_means(means)
    pulled = 1 - (shrunk - centre) / (means.mean(axis=0) - centre)
    assert pulled[3] > pulled[0] >= 0


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ConfigError, match="adapter"):
        recommend({BASE: np.ones((4, 1))})
    with pytest.raises(ConfigError, match="same questions"):
        recommend({WARM: np.ones((4, 1)), BASE: np.ones((5, 1))})


def test_what_is_shown_to_be_worse_than_the_adapter_sampled_alike_is_not_recommended():
    harmful, helpful = GATES[0], GATES[1]
    generator = np.random.default_rng(4)
    scores = {COOL: (generator.random((128, 4)) < 0.5).astype(float)}
    scores[helpful] = np.maximum(scores[COOL], generator.random((128, 4)) < 0.4)
    scores[harmful] = np.minimum(scores[COOL], generator.random((128, 4)) < 0.4)
    assert recommend(scores).setting == helpful
    hotter = Candidate(
        Range(0, 2), temperature=1.0
    )  # the highest score, and the adapter at its temperature is better still
    scores = {COOL: np.zeros((128, 1)), WARM: np.ones((128, 1)), hotter: np.ones((128, 1))}
    scores[hotter][:30] = 0
    assert recommend(scores).setting == WARM


def test_uncertainty_about_the_temperature_is_no_reason_to_use_another_kind():
    """The adapter is as good as the base, but only greedily, and out of fold it is not sure of that."""
    nearly = np.ones((128, 4))
    nearly[::40, 0] = 0
    scores = {COOL: nearly, GREEDY: np.ones((128, 1)), BASE: np.ones((128, 4))}
    found = recommend(scores)
    (step,) = found.steps
    assert (step.lead, step.shown) == (0, False)
    assert found.setting == GREEDY


def test_a_small_probe_asks_for_a_wider_interval():
    assert (level_for(ENOUGH), level_for(ENOUGH - 1)) == (LEVEL, STRICT)
    alone, gated = np.zeros((ENOUGH, 1)), np.zeros((ENOUGH, 1))
    gated[:18], alone[18:26] = 1, 1  # 18 questions gained and 8 lost: nearly two standard errors
    scores = {COOL: alone, GATES[0]: gated}
    assert recommend(scores).setting == GATES[0]
    assert recommend({one: values[:-1] for one, values in scores.items()}).setting == COOL


def test_the_record_holds_steps_scores_and_how_many_were_tried():
    record = recommend(draw({COOL: 0.4, BASE: 0.3, GATES[0]: 0.8}, 128, seed=6), tried=40).as_record()
    assert (record["kind"], record["setting"], record["temperature"]) == ("gates", "[0,2] T=0.3", 0.3)
    assert (record["tried"], record["level"]) == (40, LEVEL)
    assert [(step["kind"], step["against"], step["shown"]) for step in record["steps"]] == [
        ("base", "adapter", False),
        ("gates", "adapter", True),
    ]
    assert set(record["out_of_fold"]) == {"adapter", "base", "gates"}
    json.dumps(record, allow_nan=False)
