"""The simplest way of using an adapter that nothing more complicated is shown to beat.

A setting is a model (the adapter, the base, the adapter under one λ, the adapter with gates) and the temperature at which
it is sampled. All are asked the same questions. Two things make the best of many look better than it is: the temperature
and the candidate are picked on the very scores that are reported, and the more candidates, the luckier the luckiest. So
each kind of model stands for comparison with scores out of fold: what is best on one half of the questions answers for
the kind on the other half, and back. A kind takes the place of the simpler one before it only where the paired difference
of these scores is shown to be above zero. Knows arrays only: no model, no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import stdtrit

from loragate.errors import ConfigError
from loragate.evaluation import Estimate, average_at_k
from loragate.selection.candidate import ADAPTER, KINDS, Candidate

LEVEL, STRICT = 0.9, 0.98
"""Two-sided level of the interval that must lie above zero, and that of a probe with fewer than `ENOUGH` questions; chosen
by simulation (benchmarks/selection/recommending.py)."""

ENOUGH = 128
FOLDS = 10  # random halvings that are averaged, so that the result does not hang on one of them
FIRST, FINALISTS, OF_KIND = 16, 10, 2


@dataclass(frozen=True)
class Step:
    """One kind against the best of the simpler ones.

    Attributes:
        kind, against: the two.
        mean, low, high: of the paired difference out of fold, kind minus against, with its interval at `level_for` so many
            questions.
        lead: difference between the settings that would be recommended of the two, on all questions. Out of fold a kind pays
            for not being sure of its best temperature, and that alone is no reason to use another.
    """

    kind: str
    against: str
    mean: float
    low: float
    high: float
    lead: float

    @property
    def shown(self) -> bool:
        """Whether the kind is shown to be better."""
        return self.low > 0 and self.lead > 0


@dataclass(frozen=True)
class Recommendation:
    """What to use, and on what evidence.

    Attributes:
        setting: the recommended one.
        steps: the comparisons, from the simplest kind on.
        scores: every setting that was asked all questions; the best of them is flattered by having been picked.
        honest: {kind: score out of fold}, which is not.
        tried: settings that were asked anything.
    """

    setting: Candidate
    steps: tuple[Step, ...]
    scores: dict[Candidate, Estimate]
    honest: dict[str, Estimate]
    tried: int

    def as_record(self) -> dict[str, Any]:
        """What the artifact keeps of it, beside the scores; differences and scores are shares of right answers."""
        questions = self.honest[ADAPTER].questions
        return {
            "kind": self.setting.kind,
            "setting": self.setting.cell,
            "temperature": self.setting.temperature,
            "steps": [{**asdict(step), "shown": step.shown} for step in self.steps],
            "level": level_for(questions),
            "out_of_fold": {kind: asdict(score) for kind, score in self.honest.items()},
            "tried": self.tried,
        }


def recommend(scores: Mapping[Candidate, np.ndarray], *, tried: int | None = None, seed: int = 0) -> Recommendation:
    """The simplest setting that no more complicated one is shown to beat.

    What is recommended beside the adapter is also not shown to be worse than the adapter at the same temperature.

    Args:
        scores: {setting: scores [questions, samples]} on the same questions; the number of samples may differ, as
            greedy answers need only one.
        tried: settings that were asked anything, where some were dropped before (`halve`).
        seed: of the random halves.

    Raises:
        ConfigError: if the adapter is missing, or the questions differ in number.
    """
    settings = sorted(scores, key=lambda setting: KINDS.index(setting.kind))
    if not any(setting.kind == ADAPTER for setting in settings):
        raise ConfigError("the adapter itself must be among the settings; without it nothing can be called better")
    if len({len(scores[setting]) for setting in settings}) != 1:
        raise ConfigError(f"all settings must be asked the same questions, found {[len(s) for s in scores.values()]}")
    means_QS = np.stack([np.mean(scores[setting], axis=1) for setting in settings], axis=1)
    columns = {kind: found for kind in KINDS if (found := [i for i, one in enumerate(settings) if one.kind == kind])}
    honest = _out_of_fold(means_QS, columns, seed)
    alone = {settings[i].temperature: means_QS[:, i] for i in columns[ADAPTER]}
    picks = {}
    for kind, found in columns.items():
        # where all are worse than the adapter sampled alike, none of them leads
        allowed = [i for i in found if not _is_worse(means_QS[:, i], alone.get(settings[i].temperature))] or found
        picks[kind] = allowed[int(np.argmax(shrunk_means(means_QS[:, allowed])))]
    best, steps = ADAPTER, []
    for kind in list(columns)[1:]:
        lead = float(means_QS[:, picks[kind]].mean() - means_QS[:, picks[best]].mean())
        steps.append(Step(kind, best, *_interval(honest[kind] - honest[best]), lead))
        best = kind if steps[-1].shown else best
    return Recommendation(
        setting=settings[picks[best]],
        steps=tuple(steps),
        scores={setting: average_at_k(scores[setting]) for setting in settings},
        honest={kind: average_at_k(values[:, None]) for kind, values in honest.items()},
        tried=tried or len(settings),
    )


def halve(
    settings: Iterable[Candidate],
    ask: Callable[[Candidate, int], np.ndarray],
    questions: int,
    *,
    first: int = FIRST,
    finalists: int = FINALISTS,
) -> dict[Candidate, np.ndarray]:
    """Sequential halving: all settings on a few questions, the better half on twice as many, `finalists` on all.

    The adapter stays at every temperature, because whatever is recommended must beat the best of them, and so do the two
    best settings of every other kind.

    Args:
        ask: (setting, n) -> its scores [n, samples] on the first n questions; called again with a larger n it need only
            answer the new ones.
        questions: how many there are.

    Returns:
        {setting: scores [questions, samples]} of those that were asked all.
    """
    alive, asked = list(settings), min(first, questions)
    while len(alive) > finalists and asked < questions:
        shrunk = _shrunk_within(np.stack([np.mean(ask(setting, asked), axis=1) for setting in alive], axis=1), alive)
        order = sorted(range(len(alive)), key=lambda i: -shrunk[i])
        chosen = set(order[: max(finalists, len(alive) // 2)])
        for kind in KINDS:
            own = [i for i in order if alive[i].kind == kind]
            chosen.update(own if kind == ADAPTER else own[:OF_KIND])
        if len(chosen) == len(alive):
            break
        alive, asked = [alive[i] for i in sorted(chosen)], min(2 * asked, questions)
    return {setting: ask(setting, questions) for setting in alive}


def level_for(questions: int) -> float:
    """Level of the interval by which a kind is shown to be better on so many questions."""
    return LEVEL if questions >= ENOUGH else STRICT


def shrunk_means(means_QS: np.ndarray) -> np.ndarray:
    """Means of settings pulled to their common mean by as much as chance alone spreads them [S] (James and Stein).

    What is uncertain of a setting is its difference from the others on the same questions, so questions that are hard
    for all do not count as noise. Settings with fewer samples are noisier and are pulled further.
    """
    means_S = means_QS.mean(axis=0)
    if means_QS.shape[1] < 3:
        return means_S
    beside = means_QS - means_QS.mean(axis=1, keepdims=True)
    noise_S = beside.var(axis=0, ddof=1) / len(means_QS)
    spread = max(float(means_S.var(ddof=1) - noise_S.mean()), 0.0)
    weight_S = spread / np.maximum(spread + noise_S, 1e-12)
    return means_S.mean() + weight_S * (means_S - means_S.mean())


def _shrunk_within(means_QS: np.ndarray, settings: Sequence[Candidate]) -> np.ndarray:
    shrunk = np.empty(len(settings))
    for kind in KINDS:
        if columns := [i for i, setting in enumerate(settings) if setting.kind == kind]:
            shrunk[columns] = shrunk_means(means_QS[:, columns])
    return shrunk


def _out_of_fold(means_QS: np.ndarray, columns: Mapping[str, list[int]], seed: int) -> dict[str, np.ndarray]:
    """{kind: score of every question [Q]}, each by the setting that is best of the kind on the other half."""
    count, generator = len(means_QS), np.random.default_rng(seed)
    honest = {kind: np.zeros(count) for kind in columns}
    for _ in range(FOLDS):
        order = generator.permutation(count)
        for here, there in ((order[: count // 2], order[count // 2 :]), (order[count // 2 :], order[: count // 2])):
            for kind, found in columns.items():
                pick = found[int(np.argmax(shrunk_means(means_QS[here][:, found])))] if len(here) else found[0]
                honest[kind][there] += means_QS[there, pick] / FOLDS
    return honest


def _is_worse(mean_Q: np.ndarray, alone_Q: np.ndarray | None) -> bool:
    """Whether a setting is shown to be worse than the adapter at the same temperature; not where that was not asked."""
    return alone_Q is not None and _interval(mean_Q - alone_Q)[2] < 0


def _interval(difference_Q: np.ndarray) -> tuple[float, float, float]:
    """Mean, low and high of a paired difference."""
    count, mean = len(difference_Q), float(difference_Q.mean())
    if count < 2 or np.ptp(difference_Q) < 1e-12:
        return mean, min(mean, 0.0), max(mean, 0.0)  # no spread: nothing is shown
    half = float(stdtrit(count - 1, (1 + level_for(count)) / 2) * difference_Q.std(ddof=1) / np.sqrt(count))
    return mean, mean - half, mean + half
