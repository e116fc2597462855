"""Which way of using an adapter to recommend, and whom to ask next.

A setting is a model (the adapter, the base, the adapter under one λ, the adapter with gates) and the temperature at which it
is sampled. All are asked the same questions, the first ones of a list, some more of them than others. What the answers say
of all scores together is one normal distribution (`believe`): settings that share a model or a temperature are expected to
score alike, and cooler ones somewhat better, so each is also judged by its relatives, and the luckiest of many is pulled
back to them. That belief decides who is asked more (`halve`) and what is recommended (`recommend`): the best setting of a
kind takes the place of the simpler one before it only where it is better with a probability of at least `SURE`. Knows
arrays only: no model, no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from loragate.errors import ConfigError
from loragate.selection.candidate import ADAPTER, KINDS, Candidate

SURE = 0.8
"""Probability of being better from which a more complicated kind is recommended; this and what follows were chosen by
simulation (benchmarks/selection/recommending.py)."""

LEVEL = 0.9  # of the intervals that are recorded
FINALISTS, PARTS, FEWEST, HOPE = 4, 32, 4, 1.0
STAYING = 2  # settings of the adapter that may stay beside the best: its most promising one and its coolest

# how far scores are expected to lie apart, as standard deviations of shares: the common level, of which nothing is known,
# models, kinds, temperatures, and what is left of a single setting
_LEVEL, _MODEL, _KIND, _HEAT, _OWN = 1.0, 0.15, 0.05, 0.03, 0.02

# Cooler sampling usually gains, most of it by T = 0.3: the part of the gain from T = 1 to greedy that each temperature has, what
# that gain is expected to be, and how much it differs between adapters, between kinds and between models. It was 1 to 85 points in
# 47 of 49 fine-tunes of small worlds and 2 to 15 in nine of a real model; gates by entropy have had some of it already.
_COOLED = ((0.0, 0.3, 0.6, 1.0), (1.0, 0.9, 0.5, 0.0))
_GAIN, _GAINS, _KIND_GAINS, _MODEL_GAINS = 0.15, 0.15, 0.05, 0.05

# of the variance of one verdict: what the question, the model's way with it, the setting's way with it, and chance each have;
# where there are few questions, it stands in for what they show, with the weight of so many of them
_QUESTION, _WAY, _SETTING, _CHANCE, _WEIGHT = 0.40, 0.08, 0.10, 0.42, 16


@dataclass(frozen=True)
class Belief:
    """The scores of settings after the answers so far.

    Attributes:
        settings: whose scores.
        mean: expected scores [S], shares of right answers.
        covariance: of what is uncertain of them [S, S].
    """

    settings: tuple[Candidate, ...]
    mean: np.ndarray
    covariance: np.ndarray

    def difference(self, one: int, other: int) -> tuple[float, float]:
        """Expected difference of two settings, and its standard deviation."""
        c = self.covariance
        spread = max(float(c[one, one] + c[other, other] - 2 * c[one, other]), 1e-12)
        return float(self.mean[one] - self.mean[other]), spread**0.5

    def interval(self, one: int) -> dict[str, float]:
        """A setting's expected score with its interval at `LEVEL`."""
        mean, half = float(self.mean[one]), _HALF * float(self.covariance[one, one]) ** 0.5
        return {"mean": mean, "low": max(mean - half, 0.0), "high": min(mean + half, 1.0)}


_HALF = float(ndtri((1 + LEVEL) / 2))


@dataclass(frozen=True)
class Step:
    """One kind against the best of the simpler ones.

    Attributes:
        kind, against: the two.
        mean, low, high: of the difference of their best settings, kind minus against, with its interval at `LEVEL`.
        chance: probability that the kind is better.
        taken: whether it takes the other's place.
    """

    kind: str
    against: str
    mean: float
    low: float
    high: float
    chance: float
    taken: bool


@dataclass(frozen=True)
class Recommendation:
    """What to use, and on what evidence.

    Attributes:
        setting: the recommended one.
        steps: the comparisons, from the simplest kind on.
        best: {kind: its best setting}.
        scores: {kind: expected score of that, with its interval}.
        tried: settings that were asked anything.
    """

    setting: Candidate
    steps: tuple[Step, ...]
    best: dict[str, Candidate]
    scores: dict[str, dict[str, float]]
    tried: int

    def as_record(self) -> dict[str, Any]:
        """What the artifact keeps of it; differences and scores are shares of right answers."""
        return {
            "kind": self.setting.kind,
            "setting": self.setting.cell,
            "temperature": self.setting.temperature,
            "steps": [asdict(step) for step in self.steps],
            "level": LEVEL,
            "sure": SURE,
            "expected": {kind: {"setting": self.best[kind].cell, **score} for kind, score in self.scores.items()},
            "tried": self.tried,
        }


def recommend(scores: Mapping[Candidate, np.ndarray]) -> Recommendation:
    """The simplest setting than which no more complicated one is probably better, of those that were asked everything.

    Args:
        scores: {setting: scores [questions, samples]} on the first of the same questions, the adapter's on all of them
            (ConfigError); greedy answers need one sample.
    """
    questions = max(map(len, scores.values()), default=0)
    if not any(one.kind == ADAPTER and len(asked) == questions for one, asked in scores.items()):
        raise ConfigError("the adapter itself must be asked all questions; without it nothing can be called better")
    belief = believe(scores)
    whole = [len(scores[one]) == questions for one in belief.settings]
    best: dict[str, int] = {}
    for kind in KINDS:
        own = [i for i, one in enumerate(belief.settings) if one.kind == kind]
        if own := [i for i in own if whole[i]] or own:
            best[kind] = max(own, key=lambda i: belief.mean[i])
    held, steps = ADAPTER, []
    for kind in list(best)[1:]:
        mean, spread = belief.difference(best[kind], best[held])
        chance = float(ndtr(mean / spread))
        taken = chance >= SURE and whole[best[kind]]
        steps.append(Step(kind, held, mean, mean - _HALF * spread, mean + _HALF * spread, chance, taken))
        held = kind if taken else held
    return Recommendation(
        setting=belief.settings[best[held]],
        steps=tuple(steps),
        best={kind: belief.settings[i] for kind, i in best.items()},
        scores={kind: belief.interval(i) for kind, i in best.items()},
        tried=len(scores),
    )


def halve(
    settings: Sequence[Candidate], ask: Callable[[Candidate, int], np.ndarray], questions: int
) -> dict[Candidate, np.ndarray]:
    """Sequential halving: all settings on a few questions, the more promising half on twice as many, `FINALISTS` on all.

    A greedy setting, which gives one answer, is asked as many questions more as the others give answers. The adapter stays
    where it is most promising and where it is coolest, because whatever is recommended must beat it.

    Args:
        ask: (setting, n) -> its scores [n, samples] on the first n questions; called again with a larger n it need only
            answer the new ones.
        questions: how many there are.

    Returns:
        {setting: scores [n, samples]}, the finalists with all questions.
    """
    alive, scores = list(settings), {}
    samples = 1
    for asked, staying in rungs(len(settings), questions):
        models = list(dict.fromkeys(one.model for one in alive))  # the temperatures of one follow one another
        for one in sorted(alive, key=lambda one: (models.index(one.model), one.temperature == 0)):
            count = asked * samples if one.temperature == 0 else asked
            scores[one] = ask(one, min(count, questions))
            samples = max(samples, scores[one].shape[1])
        if asked == questions:
            break
        alive = _promising(believe(scores), staying)
    return scores


def rungs(settings: int, questions: int) -> Iterator[tuple[int, int]]:
    """(questions asked by now, settings that are asked more) of each round of `halve`, the last one with all questions."""
    asked = min(max(FEWEST, -(-questions // PARTS)), questions)
    while True:
        settings = min(settings, max(FINALISTS, settings // 2))
        yield asked, settings
        if asked == questions:
            return
        asked = min(2 * asked, questions)


def most_answers(settings: int, questions: int, samples: int) -> int:
    """How many answers `halve` asks of so many settings at most: as if none were greedy, and none asked in two rounds running."""
    total, alive = 0, settings
    for asked, staying in rungs(settings, questions):
        total += alive * asked * samples
        alive = min(staying + STAYING, settings)
    return min(total, settings * questions * samples)


def _promising(belief: Belief, count: int) -> list[Candidate]:
    """The settings that may well be the best, the adapter among them; what had been left may come back."""
    top = int(np.argmax(belief.mean))
    hope = [belief.mean[i] + HOPE * belief.difference(i, top)[1] for i in range(len(belief.settings))]
    order = sorted(range(len(hope)), key=lambda i: -hope[i])
    alone = [i for i in order if belief.settings[i].kind == ADAPTER]
    # the greedy adapter is what everyone can have, costs one answer a question, and is asked everything in the end anyway
    coolest = min(alone, key=lambda i: belief.settings[i].temperature or 0.0)
    chosen = dict.fromkeys([*order[:count], alone[0], coolest])
    return [belief.settings[i] for i in chosen]


def believe(scores: Mapping[Candidate, np.ndarray]) -> Belief:
    """What answers say of the scores of all settings, each also judged by those that share its model, kind or temperature.

    Before any answer, cooler sampling is expected to gain (`_GAIN`); a few dozen answers outweigh that.

    A mean of few answers is uncertain by its noise: of the questions that happen to be asked, of how each model gets along
    with them, and of chance. Questions that are hard for all do not count against anyone.
    """
    settings = tuple(sorted(scores, key=lambda one: KINDS.index(one.kind)))
    means_S = np.array([scores[one].mean() for one in settings])
    counts_S = np.array([len(scores[one]) for one in settings])
    same_model, same_heat, same_kind = (
        np.equal.outer(labels, labels)
        for labels in (
            _numbered([one.model for one in settings]),
            _numbered([one.temperature for one in settings]),
            _numbered([one.kind for one in settings]),
        )
    )
    cooled_S = np.interp([1.0 if one.temperature is None else one.temperature for one in settings], *_COOLED)
    levels = _LEVEL**2 + _MODEL**2 * same_model + _KIND**2 * same_kind + _HEAT**2 * same_heat
    gains = _GAINS**2 + _KIND_GAINS**2 * same_kind + _MODEL_GAINS**2 * same_model
    prior = levels + np.outer(cooled_S, cooled_S) * gains + _OWN**2 * np.eye(len(settings))
    question, way, own_S = _noise([scores[one] for one in settings], means_S, same_model)
    noise = (question + way * same_model) / np.maximum.outer(counts_S, counts_S) + np.diag(own_S / counts_S)
    weights = np.linalg.solve(prior + noise, prior)
    # around their own level, which the answers show; only the expected gain of cooling is put in
    expected_S = _GAIN * cooled_S + (means_S - _GAIN * cooled_S).mean()
    return Belief(settings, expected_S + weights.T @ (means_S - expected_S), prior - prior @ weights)


def _noise(
    tables: Sequence[np.ndarray], means_S: np.ndarray, same_model: np.ndarray
) -> tuple[float, float, np.ndarray]:
    """Variances of one question's mean score: common to all settings, common to a model's, and a setting's own [S].

    Estimated where several settings answered the same questions, and drawn towards the usual shares where these are few.
    """
    samples_S = np.array([table.shape[1] for table in tables])
    clipped = np.clip(means_S, 0.05, 0.95)
    verdict_S = clipped * (1 - clipped)
    question, way = _QUESTION * float(np.median(verdict_S)), _WAY * float(np.median(verdict_S))
    own_S = verdict_S * (_SETTING + _CHANCE / samples_S)
    # greedy settings are ahead in questions; of the others, those that are still asked have the most
    sampled = [len(table) for table in tables if table.shape[1] > 1] or [len(table) for table in tables]
    count = sorted(sampled)[-min(FINALISTS, len(sampled))]
    rows = [i for i, table in enumerate(tables) if len(table) >= count]
    if count < FEWEST or len(rows) < 2:
        return question, way, own_S
    found = np.cov(np.stack([tables[i][:count].mean(axis=1) for i in rows]))
    alike = same_model[np.ix_(rows, rows)]
    apart = ~np.eye(len(rows), dtype=bool)
    weight = count / (count + _WEIGHT)
    common = max(float(found[~alike].mean()), 0.0) if not alike.all() else question
    shared = max(float(found[alike & apart].mean()) - common, 0.0) if (alike & apart).any() else way
    rest = np.maximum(np.diag(found) - common - shared, 0.005).sum() / own_S[rows].sum()
    return (
        weight * common + (1 - weight) * question,
        weight * shared + (1 - weight) * way,
        own_S * (weight * rest + 1 - weight),
    )


def _numbered(labels: Sequence[Any]) -> np.ndarray:
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return np.array([numbers[label] for label in labels])
