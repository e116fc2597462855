"""All settings of one adapter on one probe, and the record of what is recommended of them.

Gates are trained first: all ranges a quarter of their steps, then the better half of them to the end, unless they are behind
the adapter by then. Every setting is asked a few questions, and those that do well are asked more (`recommend.halve`). What a
setting answered is kept in the store, so that nothing is asked twice, also after an interruption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from loragate.data.rendering import IGNORED
from loragate.errors import DataError, DivergenceError
from loragate.evaluation import average_at_k, compare
from loragate.files import read_json
from loragate.selection.candidate import ADAPTER, BASE, CONSTANT, GATES, Candidate
from loragate.selection.forms import form_of, missing_kinds, other_forms, said_of, said_of_kinds
from loragate.selection.probe import COOL, Probe, Scored, looks_worse, unread
from loragate.selection.recommend import Recommendation, halve, most_answers, recommend
from loragate.selection.rulings import HOPEFUL, LOSS, own_answers, prospects, stopped_of, stronger, vetoes
from loragate.selection.store import PART, TRAINED, Store, TrialResult
from loragate.selection.trial import PART_QUESTIONS, Bench, OnEvent, run_trial, train_part, train_trial

TEMPERATURES = (1.0, 0.6, COOL, 0.0)
ALWAYS = (COOL, 0.0)
"""Temperatures at which what is recommended and the adapter are asked whatever was asked for: there gates have done harm."""

ELSEWHERE = 4
"""At temperatures that are not recommended, one in so many questions tells enough; greedily all are asked once."""

LARGE, CONFIRMING = 512, 256
"""Questions from which a probe keeps the last ones untouched, to confirm on them what the others recommend."""

LABELS = ("choice", "exact")
"""Graders that compare a whole answer with a label."""

RESPONSES = 2000
"""Rows whose responses tell which forms there are."""

SCALES = (0.25, 0.5, 0.75, 1.25, 1.5)


def settings_on(
    probe: Probe, trained: Sequence[Candidate], temperature: float | None = None, *, can_be_off: bool = True
) -> tuple[Candidate, ...]:
    """What is asked on a probe: every model at every temperature, the simpler models first.

    Where the adapter's own cool majority stands in for labels, nothing is known of the base and of one λ, and the cooler the
    adapter is sampled the more it agrees with itself. So gates and adapter are compared at one temperature there, that of the
    probe.

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
    """One comparison of `settings_on` a bench with a probe, from training to the record."""

    def __init__(
        self,
        store: Store,
        bench: Bench,
        settings: Sequence[Candidate],
        on_event: OnEvent | None,
        probe_covers_all: bool = False,
    ) -> None:
        assert bench.probe is not None, "there is evidence"
        self.probe_covers_all = probe_covers_all
        # at which forms of answers are compared; without labels all settings have the probe's
        self.form_heat = 0.0 if bench.probe.kind == "labelled" else bench.probe.sampling.temperature
        self.store, self.bench, self.settings, self.on_event, self.probe = store, bench, settings, on_event, bench.probe
        models = list(dict.fromkeys(one.model for one in settings))
        everything = len(bench.probe.questions)
        self.choosing = everything - CONFIRMING if everything >= LARGE else everything
        self.trained = [one for one in models if one.range is not None]
        cells = [one.cell for one in models]
        self.names = {one: f"{one.cell} seed {one.seed}" if cells.count(one.cell) > 1 else one.cell for one in models}
        self.results: dict[Candidate, TrialResult] = {}
        self.failed: dict[str, str] = {}
        self.parts: dict[Candidate, dict[str, Any]] = {}
        self.stopped: list[Candidate] = []
        self.behind: dict[Candidate, dict[str, float]] = {}
        self.vetoed: dict[str, str] = {}
        self.confirmation: dict[str, Any] = {}
        self.retained: dict[str, np.ndarray] = {}

    def run(self) -> Recommendation:
        """Train, ask and recommend; gates whose training diverges drop out, and are a DivergenceError where all do."""
        self._require_readable()
        out = self._train()
        alive = [one for one in self.settings if one.model not in out]
        self._not_vetoed(halve(alive, self._ask, self.choosing))
        if len(self.probe.questions) > self.choosing and self.found.setting.kind != ADAPTER:
            self._confirm()
        if self.probe.kind == "labelled":
            for heat in ALWAYS:
                for model in (self.found.setting.model, Candidate(None, ADAPTER)):
                    self._ask(replace(model, temperature=heat), self.choosing // (ELSEWHERE if heat else 1))
        return self.found

    def _require_readable(self) -> None:
        """Refuse a probe (DataError) if the grader reads none of the adapter's first answers: all scores would be 0."""
        if self.probe.kind != "labelled":
            return  # a majority was read
        first = Candidate(None, ADAPTER, temperature=min(self._heats()))
        self._ask(first, min(PART_QUESTIONS, self.choosing))
        found = self._probed(first)
        said = [form for form in found.forms if form]
        if found.signs.get("read") == 0 and (said or not found.forms):  # empty answers are read as nothing, rightly
            answer = f", such as {said[0]!r} (numbers as n)" if said else ""
            raise DataError(
                f"the grader {self.probe.task.grader!r} reads nothing in the adapter's first {found.scores.size} answers to the "
                f"probe{answer}; have the prompts ask for the form that it reads, or give the --probe-grader that reads theirs"
            )

    def most_answers(self) -> int:
        """How many answers are asked at most, without the retention probe's and a veto's; known before anything is trained."""
        samples, stopped = self.probe.sampling.samples, stopped_of(len(self.trained))
        # the adapter is asked with them
        parts = (len(self.trained) + 1) * len(self._heats()) * PART_QUESTIONS * samples if stopped else 0
        settings = len(self.settings) - stopped * len({one.temperature for one in self.settings})
        confirming = 2 * (len(self.probe.questions) - self.choosing) * samples
        always = 2 * (self.choosing + self.choosing // ELSEWHERE * samples) if self.probe.kind == "labelled" else 0
        return parts + most_answers(settings, self.choosing, samples) + confirming + always

    def _train(self) -> set[Candidate]:
        """Train gates; those that drop out, because they were stopped or met a value that is not finite, now or earlier."""
        lost = self._lost()
        going, waiting, parts = list(self.trained), list[Candidate](), dict[Candidate, Any]()
        if stopped_of(len(self.trained)):
            # ranges that were lost after their part keep their place, so that a resumed choice is the same
            able = [one for one in self.trained if one not in lost or read_json(self.store.place(one) / PART)]
            parts = self._each(able, partial(train_part, temperatures=self._heats(), most=self.choosing))
            going, waiting = stronger(parts, len(self.trained))
        trained: dict[Candidate, Any] = {}
        for group in (going, waiting):  # those that had been stopped take over where the others are lost
            self.behind |= self._behind({one: parts[one] for one in group if one in parts})
            hopeful = [one for one in group if one not in self.behind]
            trained = self._each([one for one in hopeful if one not in lost], train_trial)
            if trained or not hopeful:
                break
        lost = self._lost()
        self.failed = {self.names[one]: why for one, why in lost.items()}
        if self.failed and not trained and not self.behind:
            raise DivergenceError(list(self.failed.values())[-1])
        self.parts = {one: part for one in self.trained if (part := read_json(self.store.place(one) / PART))}
        self.stopped = [one for one in waiting if one not in trained and one not in lost]
        return {one for one in self.trained if one not in trained}

    def _behind(self, parts: Mapping[Candidate, Mapping[str, Any]]) -> dict[Candidate, dict[str, float]]:
        """{gates that are not trained on: `prospects` of them}; none where agreement stands in for labels: not measured there."""
        if not parts or self.probe.kind != "labelled":
            return {}
        tables = {
            one: {float(heat): np.array(rows) for heat, rows in part["verdicts"].items()} for one, part in parts.items()
        }
        counts = {heat: len(rows) for heat, rows in next(iter(tables.values())).items()}
        alone = {heat: self._ask(Candidate(None, ADAPTER, temperature=heat), count) for heat, count in counts.items()}
        return {one: row for one, row in prospects(tables, alone).items() if row["chance"] < HOPEFUL}

    def _each(self, candidates: Sequence[Candidate], train: Callable[..., Any]) -> dict[Candidate, Any]:
        """{candidate: what its training came to}, without those that met a value that is not finite."""
        found = {}
        for one in candidates:
            with suppress(DivergenceError):
                found[one] = train(self.store, one, self.bench, on_event=self.on_event)
        return found

    def _lost(self) -> dict[Candidate, str]:
        """{gates: why their training could not go on}, in this run or an earlier one."""
        diverged = self.store.diverged()
        return {one.model: diverged[one.slug] for one in self.settings if one.slug in diverged}

    def _heats(self) -> list[float]:
        """The hottest and the coolest temperature of the settings, at which a part of a training is asked."""
        heats = [one.temperature for one in self.settings if one.temperature is not None]
        return list(dict.fromkeys([max(heats), min(heats)]))

    def _ask(self, setting: Candidate, count: int) -> np.ndarray:
        self.results[setting] = run_trial(self.store, setting, lambda: self.bench, self.on_event, questions=count)
        return self._probed(setting).scores[:count]

    def _not_vetoed(self, scores: dict[Candidate, np.ndarray]) -> None:
        """Find the recommendation; one that gives up forms of answers unseen, or clearly forgets, gives way to the next."""
        self.found = recommend(scores)
        self.tried = self.found.tried
        alone = self.found.best[ADAPTER]
        while (setting := self.found.setting).kind != ADAPTER:
            if why := self._given_up(setting):
                self.vetoed[self.names[setting.model]] = why
                out = {one for one in scores if one.model == setting.model}
            elif reasons := self._forgotten(setting, alone):
                self.vetoed |= reasons
                out = {setting}
            else:
                break
            scores = {one: values for one, values in scores.items() if one not in out}
            scores |= {one: self._ask(one, self.choosing) for one in recommend(scores).best.values()}
            self.found = recommend(scores)

    def _given_up(self, setting: Candidate) -> str:
        """Why a setting is not eligible that answers in other forms, on a probe without the kinds that would show the cost."""
        if self.probe_covers_all or setting.kind == BASE:
            return ""
        self._ask(Candidate(None, ADAPTER, temperature=self.form_heat), self.choosing)
        if not self._kinds.get("told"):
            return ""
        self._ask(replace(setting.model, temperature=self.form_heat), self.choosing)
        if not (forms := self._forms(setting)).get("told"):
            return ""
        return (
            f"changes the form of answers, on a probe that seems to lack kinds of questions: {said_of(forms)}. If the probe has "
            "all kinds that will be asked, say so: --probe-covers-all (probe_covers_all=True)"
        )

    def _forgotten(self, setting: Candidate, alone: Candidate) -> dict[str, str]:
        """{setting: why} if it clearly loses on the retention probe against the adapter at its best, `alone`."""
        if self.bench.retention is None:
            return {}
        tables = {}
        for one in (alone, setting):
            result = run_trial(
                self.store, one, lambda: self.bench, self.on_event, questions=self.choosing, retention=True
            )
            self.results[one] = result
            assert result.retention is not None, "it was asked"
            tables[self._label(one)] = result.retention.scores
        self.retained |= tables
        return vetoes(tables, self._label(alone))

    def _confirm(self) -> None:
        """Compare what is recommended with the adapter at its best on untouched questions; without a gain there, it is not."""
        alone, setting = self.found.best[ADAPTER], self.found.setting
        new, own = (self._ask(one, len(self.probe.questions))[self.choosing :] for one in (setting, alone))
        difference = compare(new, own)
        self.confirmation = {
            "questions": len(new),
            "setting": self._label(setting),
            "against": self._label(alone),
            "score": asdict(average_at_k(new)),
            "difference": asdict(difference),
            "confirmed": difference.mean > 0,
        }
        if difference.mean <= 0:
            self.found = replace(self.found, setting=alone)

    def _label(self, setting: Candidate) -> str:
        """As in tables: "[0,6] T=0.3", "adapter greedy"."""
        return self.names[setting.model] + setting.cell.removeprefix(setting.model.cell)

    def _probed(self, setting: Candidate) -> Scored:
        scored = self.results[setting].probe
        assert scored is not None, "it was asked"
        return scored

    def as_record(self) -> dict[str, Any]:
        """What the artifact keeps under "selection"."""
        setting, retention = self.found.setting, self.bench.retention
        whole = [one for one in self.results if len(self._probed(one).scores) >= self.choosing]
        name, bounds = self.names[setting.model], setting.range
        trained = [read_json(self.store.place(one) / TRAINED) for one in self.trained]
        seconds = [result.seconds for result in self.results.values()]
        answers = sum(self._probed(one).scores.size for one in self.results)
        answers += sum(part["answers"] for part in self.parts.values())
        alone = {one.temperature or 0.0: self._probed(one).scores for one in self.results if one.kind == ADAPTER}
        sampled = False
        forms = self._forms(setting)
        best, kept = {one: max(part["scores"].values()) for one, part in self.parts.items()}, {}
        if retention and self.retained:  # the adapter was asked first
            fallback, *others = self.retained
            kept = {
                "probe": retention.as_dict(),
                "rule": f"a candidate that loses more than {100 * LOSS:g} points, its paired 95 % interval below 0, is not picked",
                "evidence": {one: asdict(average_at_k(values)) for one, values in self.retained.items()},
                "against_adapter": {
                    one: asdict(compare(self.retained[one], self.retained[fallback])) for one in others
                },
            }
        optional = {
            "failed": self.failed,
            "stopped": {
                self.names[one]: {
                    "steps": self.parts[one]["steps"],
                    "score": best[one],
                    **self.behind.get(
                        one, {"weakest_kept": min(best[other] for other in best if other not in self.stopped)}
                    ),
                }
                for one in dict.fromkeys((*self.stopped, *self.behind))
            },
            "retention": kept,
            "confirmation": self.confirmation,
            "forms": forms,
            "kinds": self._kinds,
            "own_answers": own_answers(alone) if sampled and self.probe.kind == "labelled" else None,
        }
        return {
            "method": f"the simplest of {self.tried} settings on a {self.probe.kind} probe than which no more complicated one is "
            "probably better; the adapter at each temperature is among them",
            "accepted": setting.kind != ADAPTER,
            "picked": name,
            "range": None if bounds is None else [bounds.lower, bounds.upper],
            "candidates": len(self.trained),
            "n": int(self._probed(setting).scores.size),
            "probe": self.probe.as_dict(),
            "recommendation": {**self.found.as_record(), "setting": self._label(setting), "tried": self.tried},
            "evidence": {self._label(one): asdict(average_at_k(self._probed(one).scores)) for one in whole},
            "settings": [self._row(one, whole) for one in self.results],
            "signs": {self._label(one): self._probed(one).signs for one in whole},
            "warnings": self._warnings(setting, name, forms),
            "vetoed": self.vetoed,
            **{name: told for name, told in optional.items() if told},
            "cost": {
                "trainings": sum(bool(one) for one in trained),
                "training_seconds": round(sum(one.get("seconds", 0.0) for one in (*trained, *self.parts.values())), 1),
                "probing_seconds": round(
                    sum(sum(one.values()) for one in seconds) + sum(one["asking"] for one in self.parts.values()), 1
                ),
                "answers": answers,
                "answers_at_most": self.most_answers(),
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
        if setting != alone and alone in self.results:
            count = min(len(scores), len(self._probed(alone).scores))
            if setting in whole or count >= self.choosing // ELSEWHERE:
                row["against_adapter"] = asdict(compare(scores[:count], self._probed(alone).scores[:count]))
        return row

    def _forms(self, setting: Candidate) -> dict[str, Any]:
        """Whether what is recommended has come to prefer other forms of answers than the adapter.

        Greedily, where that was asked, else at the probe's one temperature; of the questions that chose.
        """
        if setting.kind not in (CONSTANT, GATES):
            return {}
        each = [self._forms_of(one) for one in (setting.model, Candidate(None, ADAPTER))]
        found = other_forms(*each, labels=self.probe.task.grader in LABELS)
        return {"temperature": self.form_heat, **found} if found else {}

    @cached_property
    def _kinds(self) -> dict[str, Any]:
        """Whether the adapter's answers have so few of the rows' forms that the probe seems to lack kinds of questions."""
        _, encoded = self.bench.encode(self.bench.settings(self.trained[0]))
        responses = [[label for label in row["labels"] if label != IGNORED] for row in encoded[:RESPONSES]]
        texts = self.bench.tokenizer.batch_decode(responses, skip_special_tokens=True)
        # one answer to a question, as those to the same one are alike
        forms = self._forms_of(Candidate(None, ADAPTER))[:: self.probe.at(self.form_heat).sampling.samples]
        return missing_kinds(forms, [form_of(text) for text in texts])

    def _forms_of(self, model: Candidate) -> list[str]:
        """The forms of a model's answers to the questions that choose; none where they were not asked or kept."""
        scored = self.results.get(replace(model, temperature=self.form_heat))
        if scored is None or scored.probe is None or len(scored.probe.forms) != scored.probe.scores.size:
            return []
        return scored.probe.forms[: self.choosing * self.probe.at(self.form_heat).sampling.samples]

    def _warnings(self, setting: Candidate, name: str, forms: Mapping[str, Any]) -> dict[str, list[str]]:
        """How the answers of what is recommended look worse than the adapter's sampled alike, and what ended a training.

        Args:
            setting, name: what is recommended.
            forms: what `_forms` says of it.
        """
        alone = self._probed(Candidate(None, ADAPTER, temperature=setting.temperature))
        found = {ADAPTER: unread(alone.signs.get("read", 1.0), self.probe.task.grader)}
        found[ADAPTER] += [said_of_kinds(self._kinds)] if self._kinds.get("told") else []
        if setting.kind != ADAPTER:
            training = read_json(self.store.place(setting.model) / TRAINED).get("training", {})
            stopped = [training["stopped"]] if training.get("stopped") else []
            heat = f"at T = {forms['temperature']:g}" if forms.get("temperature") else "greedily"
            told = [f"on the probe, {heat}, {said_of(forms)}"] if forms.get("told") else []
            now = self._probed(setting)
            worse = looks_worse(now.signs, alone.signs, alike=now.scores.size == alone.scores.size)
            found[name] = [*stopped, *worse, *told]
        return {key: phrases for key, phrases in found.items() if phrases}
