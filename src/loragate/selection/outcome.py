"""From the finished trials of a sweep to an answer: cells, the choice on the probe, and the record of both.

All cells are asked at one temperature, and the choice holds there; what `loragate calibrate` recommends over all temperatures
is in `comparison.py`. A cell is what is compared: an adapter, objective and range, its seeds averaged within each question, so
that the question stays the unit of every interval. The choice is made on the probe alone. The best cell on a test set (the
oracle) is worked out apart, to show what choosing on the probe cost; it is never an input to anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from loragate.evaluation import average_at_k, compare
from loragate.evaluation.statistics import holm
from loragate.selection.candidate import ADAPTER, Candidate
from loragate.selection.choice import Choice, choose
from loragate.selection.store import Scored, TrialResult
from loragate.selection.study import Study
from loragate.training.guards import GuardLimits, Reading, breaches

LEVEL = 0.05
FEW_READ = 0.5
WARN = GuardLimits(terminated=0.1, length=2.0)
"""How far a candidate's probe answers may look away from the adapter's before the record says so."""


@dataclass(frozen=True)
class Cell:
    """The trials that are compared as one: all seeds of a candidate.

    Attributes:
        candidates: of all its seeds.
        results: of those that are finished; at least one.
    """

    candidates: tuple[Candidate, ...]
    results: tuple[TrialResult, ...]

    @property
    def name(self) -> str:
        """As printed: "[-3,1]", "[-3,1] anchored", "adapter"."""
        return self.candidates[0].cell

    @property
    def complete(self) -> bool:
        """Whether no seed is missing; a cell that lacks one is shown and not compared."""
        return len(self.results) == len(self.candidates)

    @cached_property
    def probe(self) -> np.ndarray:
        """[questions, seeds × samples] on the probe."""
        scores = self.scores("probe")
        assert scores is not None, "a study without a probe has no outcome"
        return scores

    def scores(self, kind: str) -> np.ndarray | None:
        """[questions, seeds × samples] on "probe" or "test"; None where a seed was not asked.

        Every seed has the same number of samples, so the mean over them is that over seeds.
        """
        found: list[Scored | None] = [getattr(result, kind) for result in self.results]
        tables = [scored.scores for scored in found if scored is not None]
        return np.concatenate(tables, axis=1) if len(tables) == len(found) else None

    @property
    def by_seed(self) -> list[float]:
        """Mean probe score of each seed."""
        return [float(_probe(result).scores.mean()) for result in self.results]

    @property
    def signs(self) -> dict[str, float]:
        """What its probe answers look like (`ProbeScores.signs`)."""
        return _mean([_probe(result).signs for result in self.results])

    @property
    def reading(self) -> Reading | None:
        """The same as a guard sees them; None where the records do not hold it."""
        found = [asdict(reading) for result in self.results if (reading := _probe(result).reading) is not None]
        return Reading(**_mean(found)) if found else None  # type: ignore[arg-type]

    def against(self, adapter: Cell) -> dict[str, float]:
        """Its difference from the adapter, paired by question."""
        return asdict(compare(self.probe, adapter.probe))


@dataclass(frozen=True)
class Selection:
    """What was chosen for one adapter, and everything it was chosen from.

    Attributes:
        adapter: the untouched adapter.
        cells: complete cells by name; those that lack a seed are not compared on the same footing.
        failed: {cell: why its training could not go on}; these are no cells.
        comparisons: number of cells that are told apart from an adapter in the whole study.
    """

    adapter: Cell
    cells: dict[str, Cell]
    failed: dict[str, str]
    comparisons: int = 1

    @cached_property
    def choice(self) -> Choice:
        """The pick and its evidence, on the mean over seeds and samples of each question."""
        compared = {ADAPTER: self.adapter, **self.cells}
        # one column, so that all shapes agree
        return choose({name: cell.probe.mean(axis=1, keepdims=True) for name, cell in compared.items()}, ADAPTER)

    @property
    def picked(self) -> Cell:
        """What was picked: a cell, or the adapter."""
        return self.cells.get(self.choice.name, self.adapter)

    @cached_property
    def written(self) -> TrialResult | None:
        """The trial whose gates are taken: the first seed that beats the adapter; None where the adapter remains.

        A cell that beats the adapter on average has such a seed.
        """
        if not self.choice.accepted:
            return None
        own = float(self.adapter.probe.mean())
        seeds = zip(self.picked.results, self.picked.by_seed, strict=True)
        return next(result for result, score in seeds if score > own)

    def warnings(self, name: str) -> list[str]:
        """How the answers of a candidate look worse than the adapter's, and whether its training was stopped."""
        if name == ADAPTER:
            about = _probe(self.adapter.results[0]).about
            return unread(self.adapter.signs.get("read", 1.0), str(about.get("grader", "")))
        cell, own = self.cells[name], self.adapter.reading
        stopped = [result.training["stopped"] for result in cell.results if result.training.get("stopped")]
        found = [] if own is None or cell.reading is None else breaches(own, cell.reading, WARN)
        return [*stopped, *(f"on the probe {phrase} (the adapter)" for phrase in found)]

    def as_record(self) -> dict[str, Any]:
        """What the artifact keeps under "selection"."""
        about = _probe(self.adapter.results[0]).about
        compared = {ADAPTER: self.adapter, **self.cells}
        results = [result for cell in compared.values() for result in cell.results]
        trainings = [result for result in results if result.training]
        picked, bounds = self.picked, self.picked.candidates[0].range
        record: dict[str, Any] = {
            "method": f"best of {len(self.cells)} on a {about.get('kind', 'labelled')} probe, the adapter among the candidates",
            "accepted": self.choice.accepted,
            "picked": self.choice.name,
            "range": None if bounds is None else [bounds.lower, bounds.upper],
            "candidates": len(self.cells),
            "seeds": [result.candidate.seed for result in picked.results],
            "written_seed": None if self.written is None else self.written.candidate.seed,
            "n": int(picked.probe.size),
            "probe": about,
            "evidence": {name: asdict(average_at_k(cell.probe)) for name, cell in compared.items()},
            "signs": {name: cell.signs for name, cell in compared.items()},
            "warnings": {name: found for name in compared if (found := self.warnings(name))},
        }
        if self.choice.accepted:
            record["difference"] = {**picked.against(self.adapter), "comparisons": self.comparisons}
            record["note"] = "the mean of what was picked is optimistic, because it was picked for it"
        if self.failed:
            record["failed"] = self.failed
        record["cost"] = {
            "trainings": len(trainings),
            "training_seconds": round(_seconds(results, "training"), 1),
            "probing_seconds": round(_seconds(results, "probing"), 1),
        }
        return record


def unread(share: float, grader: str) -> list[str]:
    """A warning where the grader finds no answer in most of the adapter's samples, so that the probe measures its form."""
    if share >= FEW_READ:
        return []
    return [
        f"an answer could be read from only {100 * share:.0f} % of the adapter's samples by the grader {grader!r}; does the "
        "probe's prompt ask for the form that it reads, or does another --probe-grader fit?"
    ]


def cells_of(study: Study, results: Mapping[str, TrialResult]) -> dict[str, list[Cell]]:
    """{adapter: its cells}, in the study's order; of trials that are not finished nothing is there."""
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for one in study.candidates:
        groups.setdefault((one.adapter, one.cell), []).append(one)
    found: dict[str, list[Cell]] = {one.adapter: [] for one in study.candidates}
    for (adapter, _), candidates in groups.items():
        done = [results[one.slug] for one in candidates if one.slug in results]
        if done:
            found[adapter].append(Cell(tuple(candidates), tuple(done)))
    return found


def selections(
    study: Study, results: Mapping[str, TrialResult], diverged: Mapping[str, str] | None = None
) -> dict[str, Selection]:
    """{adapter: what is chosen}; without those that are not scored themselves yet.

    Args:
        results: {slug: result}; those of trials that are not finished are absent.
        diverged: {slug: reason} of trials whose training could not go on.
    """
    found = {}
    names = {one.slug: one for one in study.candidates}
    every = cells_of(study, results)
    comparisons = sum(_is_compared(cell, _own(cells)) for cells in every.values() for cell in cells)
    for adapter, cells in every.items():
        own = _own(cells)
        if own is None:
            continue
        trained = {cell.name: cell for cell in cells if cell.candidates[0].range is not None and cell.complete}
        failed = {names[slug].cell: why for slug, why in (diverged or {}).items() if names[slug].adapter == adapter}
        found[adapter] = Selection(own, trained, failed, comparisons)
    return found


def summarise(study: Study, results: Mapping[str, TrialResult]) -> dict[str, Any]:
    """The content of sweep_results.json: every cell, and what was chosen of them."""
    every, chosen = cells_of(study, results), selections(study, results)
    cells = [
        _cell_record(cell, _own(mine))
        for mine in every.values()
        for cell in mine
        if cell.candidates[0].range is not None
    ]
    compared = [cell for cell in cells if cell["complete"] and cell["difference"] is not None]
    for cell, p in zip(compared, holm([cell["difference"]["p"] for cell in compared]) if compared else [], strict=True):
        versus = cell["difference"]
        versus["p_holm"] = p
        cell["differs"] = p <= LEVEL and (versus["low"] > 0 or versus["high"] < 0)
    first = next(iter(results.values()), None)
    shape = (0, 0) if first is None else _probe(first).scores.shape
    return {
        "format": "loragate sweep results",
        "version": 1,
        "sweep": study.fingerprint,
        "seeds": list(dict.fromkeys(one.seed for one in study.candidates if one.range is not None)),
        "questions": shape[0],
        "samples": shape[1],
        "comparisons": len(compared),
        "choices": [_choice_record(adapter, selection) for adapter, selection in chosen.items()],
        "cells": cells,
        "missing": [one.slug for one in study.candidates if one.slug not in results],
        "seconds": {
            stage: round(_seconds(list(results.values()), stage), 1) for stage in ("training", "probing", "testing")
        },
    }


def _own(cells: Sequence[Cell]) -> Cell | None:
    return next((cell for cell in cells if cell.name == ADAPTER), None)


def _is_compared(cell: Cell, own: Cell | None) -> bool:
    return cell.candidates[0].range is not None and cell.complete and own is not None


def _cell_record(cell: Cell, own: Cell | None) -> dict[str, Any]:
    one, test = cell.candidates[0], cell.scores("test")
    assert one.range is not None, "a cell of a grid is trained"
    return {
        "name": cell.name,
        "adapter": one.adapter,
        "objective": one.objective,
        "lower": one.range.lower,
        "upper": one.range.upper,
        "seeds": [result.candidate.seed for result in cell.results],
        "complete": cell.complete,
        "answers": int(cell.probe.size),
        "probe": asdict(average_at_k(cell.probe)),
        "by_seed": cell.by_seed,
        "difference": None if own is None else cell.against(own),
        "differs": False,
        "test": None if test is None else asdict(average_at_k(test)),
        "signs": cell.signs,
        "entropy_before": _of_training(cell.results, "entropy_before"),
        "entropy_after": _of_training(cell.results, "entropy_after"),
        "gates": _mean([result.training.get("gates", {}) for result in cell.results]),
    }


def _choice_record(adapter: str, selection: Selection) -> dict[str, Any]:
    """What was picked for one adapter, and the oracle beside it."""
    one, own = selection.picked.candidates[0], selection.adapter
    trained, test = one.range is not None, own.scores("test")
    return {
        "adapter": adapter,
        "picked": selection.choice.name,
        "accepted": selection.choice.accepted,
        "lower": one.range.lower if one.range is not None else None,
        "upper": one.range.upper if one.range is not None else None,
        "objective": one.objective if trained else None,
        "seed": None if selection.written is None else selection.written.candidate.seed,
        "candidates": len(selection.cells),
        "adapter_probe": asdict(average_at_k(own.probe)),
        "adapter_signs": own.signs,
        "adapter_test": None if test is None else asdict(average_at_k(test)),
        "oracle": _oracle(selection),
    }


def _oracle(selection: Selection) -> dict[str, Any] | None:
    """The best cell on the test set; None where one was not asked."""
    asked = {name: cell.scores("test") for name, cell in {ADAPTER: selection.adapter, **selection.cells}.items()}
    tests = {name: scores for name, scores in asked.items() if scores is not None}
    if len(tests) < len(asked):
        return None
    picked = selection.choice.name
    best = max(tests, key=lambda name: float(tests[name].mean()))
    return {
        "name": best,
        "test": asdict(average_at_k(tests[best])),
        "chosen_test": asdict(average_at_k(tests[picked])),
        "regret": _difference(tests, best, picked),
        "chosen_minus_adapter": _difference(tests, picked, ADAPTER),
    }


def _difference(scores: Mapping[str, np.ndarray], one: str, other: str) -> dict[str, float]:
    """One minus the other; a model does not differ from itself, which `compare` cannot know."""
    if one == other:
        return {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    return asdict(compare(scores[one], scores[other]))


def _probe(result: TrialResult) -> Scored:
    assert result.probe is not None, "a study without a probe has no outcome"
    return result.probe


def _seconds(results: Sequence[TrialResult], stage: str) -> float:
    return sum(result.seconds.get(stage, 0.0) for result in results)


def _of_training(results: Sequence[TrialResult], key: str) -> float | None:
    values = [result.training[key] for result in results if result.training.get(key) is not None]
    return float(np.mean(values)) if values else None


def _mean(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = (
        [name for name in records[0] if all(isinstance(r.get(name), int | float) for r in records)] if records else []
    )
    return {name: float(np.mean([record[name] for record in records])) for name in names}
