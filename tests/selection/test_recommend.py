"""The simplest setting than which no more complicated one is probably better: on made scores with a known truth."""

import json

import numpy as np
import pytest

from loragate.errors import ConfigError
from loragate.gates.range import Range
from loragate.selection.candidate import Candidate
from loragate.selection.recommend import FEWEST, FINALISTS, LEVEL, SURE, believe, halve, most_answers, recommend, rungs

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
    assert [step.taken for step in found.steps] == [False, False]
    assert found.tried == 5


def test_gates_that_help_are_recommended_with_the_temperature_at_which_they_do():
    warm_gates = Candidate(Range(0, 2), temperature=1.0)
    scores = draw({WARM: 0.3, COOL: 0.4, BASE: 0.3, warm_gates: 0.4, GATES[0]: 0.6}, 128, seed=1)
    found = recommend(scores)
    assert found.setting == found.best["gates"] == GATES[0]
    step = found.steps[-1]
    assert (step.kind, step.against, step.taken) == ("gates", "adapter", True)
    assert 0 < step.low < 0.2 < step.high


def test_more_complicated_than_the_adapter_needs_a_probability_and_all_questions():
    alone, gated = np.zeros((128, 1)), np.zeros((128, 1))
    gated[:20], alone[20:38] = 1, 1  # 20 questions gained and 18 lost
    found = recommend({COOL: alone, GATES[0]: gated})
    assert (found.setting, found.steps[0].taken) == (COOL, False)
    assert 0.5 < found.steps[0].chance < SURE
    gated[:] = 1
    assert recommend({COOL: alone, GATES[0]: gated}).setting == GATES[0]
    partly = recommend({COOL: alone, GATES[0]: gated[:64]})
    assert partly.steps[0].chance > 0.99
    assert partly.setting == COOL, "nothing is recommended that was not asked everything"


def test_the_luckiest_of_many_equals_is_pulled_back():
    expected, luckiest = [], []
    for seed in range(20):
        scores = draw({COOL: 0.5, **dict.fromkeys(GATES, 0.5)}, 32, seed)
        expected.append(recommend(scores).scores["gates"]["mean"])
        luckiest.append(max(scores[gates].mean() for gates in GATES))
    assert np.all(np.array(expected) < luckiest)


def test_few_answers_are_pulled_further_to_those_of_relatives():
    """One model at two temperatures, the second one asked little: it is expected near the first, and less certainly."""
    generator = np.random.default_rng(3)
    first, second = GATES[0], Candidate(Range(0, 2), temperature=0.6)
    scores = {
        WARM: (generator.random((128, 4)) < 0.3).astype(float),
        first: np.ones((128, 4)),
        second: np.zeros((4, 4)),
    }
    belief = believe(scores)
    place = {one: i for i, one in enumerate(belief.settings)}
    assert belief.mean[place[first]] > 0.95
    assert 0.2 < belief.mean[place[second]] < 0.95
    assert belief.covariance[place[second], place[second]] > belief.covariance[place[first], place[first]]


def test_halving_asks_the_losers_little_and_the_best_everything():
    chances = {WARM: 0.3, COOL: 0.5, GREEDY: 0.5, BASE: 0.2, **dict.fromkeys(GATES, 0.3), GATES[3]: 0.8}
    scores = draw(chances, 128, seed=2)
    asked: dict[Candidate, int] = {}

    def ask(setting: Candidate, count: int) -> np.ndarray:
        asked[setting] = max(count, asked.get(setting, 0))
        return scores[setting][:count]

    left = halve(list(scores), ask, 128)
    assert {setting: len(values) for setting, values in left.items()} == asked
    assert len(left[GATES[3]]) == 128
    assert any(len(left[one]) == 128 for one in (WARM, COOL, GREEDY)), "the adapter stays"
    assert asked[BASE] < 32
    assert len(left[GREEDY]) >= 4 * FEWEST, "as many answers as the others"
    answers = sum(count * scores[setting].shape[1] for setting, count in asked.items())
    assert answers <= most_answers(len(scores), 128, 4)
    assert answers < 0.6 * 128 * 4 * len(scores)
    assert recommend(left).setting == GATES[3]


@pytest.mark.parametrize("questions", [3, 32, 33, 128, 1000])
def test_the_last_round_asks_everything(questions):
    rounds = list(rungs(40, questions))
    assert rounds[-1][0] == questions
    assert [asked for asked, _ in rounds] == sorted({asked for asked, _ in rounds})
    if questions > 32:
        assert rounds[-1][1] == FINALISTS
    assert most_answers(40, questions, 4) <= 40 * questions * 4


def test_without_the_adapter_nothing_is_compared():
    for scores in ({BASE: np.ones((4, 1))}, {WARM: np.ones((4, 1)), BASE: np.ones((5, 1))}):
        with pytest.raises(ConfigError, match="the adapter itself"):
            recommend(scores)


def test_the_record_holds_steps_scores_and_how_many_were_tried():
    record = recommend(draw({COOL: 0.4, BASE: 0.3, GATES[0]: 0.8}, 128, seed=6)).as_record()
    assert (record["kind"], record["setting"], record["temperature"]) == ("gates", "[0,2] T=0.3", 0.3)
    assert (record["tried"], record["level"], record["sure"]) == (3, LEVEL, SURE)
    assert [(step["kind"], step["against"], step["taken"]) for step in record["steps"]] == [
        ("base", "adapter", False),
        ("gates", "adapter", True),
    ]
    assert {kind: row["setting"] for kind, row in record["expected"].items()} == {
        "adapter": "adapter T=0.3",
        "base": "base T=1",
        "gates": "[0,2] T=0.3",
    }
    json.dumps(record, allow_nan=False)


def test_cooler_sampling_is_expected_to_gain_until_answers_say_otherwise():
    """With equal scores on few questions the cooler setting is ahead; many questions leave nothing of that."""
    belief = believe({one: np.tile([[1.0], [0.0]], (2, 1)) for one in (WARM, GREEDY)})
    few = belief.difference(belief.settings.index(GREEDY), belief.settings.index(WARM))[0]
    assert 0.05 < few < 0.15
    belief = believe({one: np.tile([[1.0], [0.0]], (2000, 1)) for one in (WARM, GREEDY)})
    many = belief.difference(belief.settings.index(GREEDY), belief.settings.index(WARM))[0]
    assert abs(many) < 0.01


def test_the_adapter_stays_greedily_and_answers_are_bounded_with_it():
    """Gates at ten temperatures and the warm adapter do better: the greedy adapter is asked everything all the same."""
    scores = draw({WARM: 0.5, COOL: 0.3, GREEDY: 0.1, BASE: 0.2, **dict.fromkeys(GATES, 0.8)}, 128, seed=4)
    asked: dict[Candidate, int] = {}

    def ask(setting: Candidate, count: int) -> np.ndarray:
        asked[setting] = max(count, asked.get(setting, 0))
        return scores[setting][:count]

    left = halve(list(scores), ask, 128)
    assert len(left[GREEDY]) == 128
    whole = [one for one in left if len(left[one]) == 128]
    assert sum(one.kind == "gates" for one in whole) >= FINALISTS
    assert sum(one.kind == "adapter" for one in whole) == 2
    assert recommend(left).setting.kind == "gates"
    answers = sum(count * scores[one].shape[1] for one, count in asked.items())
    assert answers <= most_answers(len(scores), 128, 4)
