"""All settings of one adapter on one probe, and the record of what is recommended of them.

Gates are trained first. Then every setting is asked a few questions, and those that do well are asked more (`recommend.halve`).
A setting's answers are kept in the store, so that nothing is asked twice, also after an interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from loragate.errors import DivergenceError
from loragate.evaluation import average_at_k, compare
from loragate.selection.candidate import ADAPTER, BASE, CONSTANT, Candidate
from loragate.selection.outcome import WARN, unread
from loragate.selection.probe import COOL, Probe
from loragate.selection.recommend import Recommendation, halve, recommend
from loragate.selection.retention import retention_record, vetoes
from loragate.selection.store import TRAINED, Scored, Store, TrialResult, read_json
from loragate.selection.trial import Bench, OnEvent, run_trial, train_trial
from loragate.training.guards import breaches

TEMPERATURES = (1.0, 0.6, COOL, 0.0)
ALWAYS = (COOL, 0.0)
"""Temperatures at which what is recommended and the adapter are asked whatever was asked for: there gates have done harm."""

SCALES = (0.25, 0.5, 0.75, 1.25, 1.5)


def settings_on(
    probe: Probe, trained: Sequence[Candidate], temperature: float | None = None, *, can_be_off: bool = True
) -> tuple[Candidate, ...]:
    """What is asked on a probe: every model at every temperature, the simpler models first.

    Where the adapter's own cool majority stands in for labels, nothing is known of the base and of one λ, and the cooler the
    adapter is sampled the more it agrees with itself. So gates and adapter are compared at one temperature there.

    Args:
        trained: gates.
        temperature: the only one at which anything is recommended; None for all of `TEMPERATURES`.
        can_be_off: λ = 0 gives the base; not so where the adapter trained more than what gates scale.
    """
    models = [Candidate(None, ADAPTER)]
    if probe.kind == "labelled":
        models += [Candidate(None, BASE)] if can_be_off else []
        models += [Candidate(None, CONSTANT, scale=scale) for scale in SCALES]
    one = temperature is not None or probe.kind != "labelled"
    heats = (probe.sampling.temperature,) if one else TEMPERATURES
    return tuple(replace(model, temperature=heat) for model in (*models, *trained) for heat in heats)


class Comparison:
    """One comparison, from training to the record.

    Args:
        store: of the trials.
        bench: what they work on, with the probe.
        settings: see `settings_on`.
        on_event: see `trial.OnEvent`.
    """

    def __init__(self, store: Store, bench: Bench, settings: Sequence[Candidate], on_event: OnEvent | None) -> None:
        assert bench.probe is not None, "there is evidence"
        self.store, self.bench, self.settings, self.on_event, self.probe = store, bench, settings, on_event, bench.probe
        models = list(dict.fromkeys(one.model for one in settings))
        self.trained = [one for one in models if one.range is not None]
        cells = [one.cell for one in models]
        self.names = {one: f"{one.cell} seed {one.seed}" if cells.count(one.cell) > 1 else one.cell for one in models}
        self.results: dict[Candidate, TrialResult] = {}
        self.failed: dict[str, str] = {}
        self.vetoed: dict[str, str] = {}
        self.retained: dict[str, np.ndarray] = {}

    def run(self) -> Recommendation:
        """Train, ask and recommend.

        Raises:
            DivergenceError: if no gates' training stayed finite; one that did not only drops out.
        """
        lost = self._train()
        alive = [one for one in self.settings if one.model not in lost]
        scores = halve(alive, self._ask, len(self.probe.questions))
        self.found = self._not_vetoed(scores, len(alive))
        if self.probe.kind == "labelled":
            for heat in ALWAYS:
                for model in (self.found.setting.model, Candidate(None, ADAPTER)):
                    self._ask(replace(model, temperature=heat), len(self.probe.questions))
        return self.found

    def _train(self) -> set[Candidate]:
        """Train all gates; those whose training met a value that is not finite, in this run or an earlier one."""
        diverged = self.store.diverged()
        lost = {one.model for one in self.settings if one.slug in diverged}
        for one in self.trained:
            if one not in lost:
                try:
                    train_trial(self.store, one, self.bench, self.on_event)
                except DivergenceError:
                    lost.add(one)
        diverged = self.store.diverged()
        self.failed = {self.names[one.model]: diverged[one.slug] for one in self.settings if one.slug in diverged}
        if self.failed and len(lost) == len(self.trained):
            raise DivergenceError(list(self.failed.values())[-1])
        return lost

    def _ask(self, setting: Candidate, count: int) -> np.ndarray:
        self.results[setting] = run_trial(self.store, setting, self._bench, self.on_event, questions=count)
        return self._probed(setting).scores[:count]

    def _bench(self, _: str) -> Bench:
        return self.bench

    def _not_vetoed(self, scores: dict[Candidate, np.ndarray], tried: int) -> Recommendation:
        """The recommendation; one that clearly loses on the retention probe gives way to the next."""
        found = recommend(scores, tried=tried)
        alone = recommend({one: values for one, values in scores.items() if one.kind == ADAPTER}).setting
        while self.bench.retention is not None and found.setting.kind != ADAPTER:
            tables = {self._label(one): self._retention(one) for one in (alone, found.setting)}
            self.retained |= tables
            if not (reasons := vetoes(tables, self._label(alone))):
                break
            self.vetoed |= reasons
            scores = {one: values for one, values in scores.items() if one != found.setting}
            found = recommend(scores, tried=tried)
        return found

    def _retention(self, setting: Candidate) -> np.ndarray:
        questions = len(self.probe.questions)
        result = run_trial(self.store, setting, self._bench, self.on_event, questions=questions, retention=True)
        assert result.retention is not None, "it was asked"
        self.results[setting] = result
        return result.retention.scores

    def _label(self, setting: Candidate) -> str:
        """As in tables: "[0,6] T=0.3", "adapter greedy"."""
        return self.names[setting.model] + setting.cell.removeprefix(setting.model.cell)

    def _probed(self, setting: Candidate) -> Scored:
        scored = self.results[setting].probe
        assert scored is not None, "it was asked"
        return scored

    def as_record(self) -> dict[str, Any]:
        """What the artifact keeps under "selection"."""
        setting, questions = self.found.setting, len(self.probe.questions)
        whole = [one for one in self.results if len(self._probed(one).scores) == questions]
        name, bounds = self.names[setting.model], setting.range
        trained = [read_json(self.store.place(one) / TRAINED) for one in self.trained]
        seconds = [result.seconds for result in self.results.values()]
        return {
            "method": f"the simplest of {self.found.tried} settings on a {self.probe.kind} probe that no more complicated one is "
            "shown to beat; the adapter at each temperature is among them",
            "accepted": setting.kind != ADAPTER,
            "picked": name,
            "range": None if bounds is None else [bounds.lower, bounds.upper],
            "candidates": len(self.trained),
            "n": int(self._probed(setting).scores.size),
            "probe": self.probe.as_dict(),
            "recommendation": {**self.found.as_record(), "setting": self._label(setting)},
            "evidence": {self._label(one): asdict(average_at_k(self._probed(one).scores)) for one in whole},
            "settings": [self._row(one, whole) for one in self.results],
            "signs": {self._label(one): self._probed(one).signs for one in whole},
            "warnings": self._warnings(setting, name),
            "vetoed": self.vetoed,
            **({"failed": self.failed} if self.failed else {}),
            **({"retention": self._retention_record()} if self.retained else {}),
            "cost": {
                "trainings": sum(bool(one) for one in trained),
                "training_seconds": round(sum(one.get("seconds", 0.0) for one in trained), 1),
                "probing_seconds": round(sum(sum(one.values()) for one in seconds), 1),
                "answers": sum(self._probed(one).scores.size for one in self.results),
            },
        }

    def _row(self, setting: Candidate, whole: Sequence[Candidate]) -> dict[str, Any]:
        """One setting's score, on as many questions as it was asked, and its difference from the adapter sampled alike."""
        scores, alone = self._probed(setting).scores, Candidate(None, ADAPTER, temperature=setting.temperature)
        row: dict[str, Any] = {
            "name": self.names[setting.model],
            "kind": setting.kind,
            "temperature": setting.temperature,
        }
        row |= asdict(average_at_k(scores))
        if setting != alone and setting in whole and alone in whole:
            row["against_adapter"] = asdict(compare(scores, self._probed(alone).scores))
        return row

    def _warnings(self, setting: Candidate, name: str) -> dict[str, list[str]]:
        """How the answers of what is recommended look worse than the adapter's sampled alike, and what ended a training."""
        alone = self._probed(Candidate(None, ADAPTER, temperature=setting.temperature))
        found = {ADAPTER: unread(alone.signs.get("read", 1.0), self.probe.task.grader)}
        if setting.kind != ADAPTER:
            one, own = self._probed(setting).reading, alone.reading
            training = read_json(self.store.place(setting.model) / TRAINED).get("training", {})
            stopped = [training["stopped"]] if training.get("stopped") else []
            looks = [] if one is None or own is None else breaches(own, one, WARN)
            found[name] = [*stopped, *(f"on the probe {phrase} (the adapter)" for phrase in looks)]
        return {key: phrases for key, phrases in found.items() if phrases}

    def _retention_record(self) -> dict[str, Any]:
        assert self.bench.retention is not None, "it was asked"
        return retention_record(self.retained, next(iter(self.retained)), self.bench.retention.as_dict())
