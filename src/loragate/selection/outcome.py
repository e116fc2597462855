"""From the finished trials of a sweep to an answer: cells, the choice on the probe, and the record of both.

All cells are asked at one temperature, and the choice holds there; what `loragate calibrate` recommends over all temperatures
is in `comparison.py`. A cell is what is compared: an adapter, objective and range, its seeds averaged within each question, so
that the question stays the unit of every interval. The choice is made on the probe alone: training entropy is never consulted,
because it falls also where answers get worse. The best cell on a suite (the oracle, `suite_record`) shows what choosing on the
probe cost; no choice may rest upon it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from loragate.errors import ConfigError
from loragate.evaluation import average_at_k, compare
from loragate.evaluation.results import EvaluationRecord, TaskResult
from loragate.evaluation.statistics import compare_suites, holm, suite_average
from loragate.selection.candidate import ADAPTER, Candidate
from loragate.selection.probe import Scored, looks_worse, unread
from loragate.selection.store import TrialResult
from loragate.selection.study import Study

LEVEL = 0.05
_ROUNDING = (
    1e-9  # means over another number of samples round differently; two shares of right answers are further apart
)

Tables = list[np.ndarray]


@dataclass(frozen=True)
class Choice:
    """Which candidate was picked and on what evidence.

    Attributes:
        name: the picked candidate.
        accepted: False if the fallback was picked.
        evidence: {candidate: {mean, low, high, ...}} on the selection questions.
        questions, samples: size of the evidence.
    """

    name: str
    accepted: bool
    evidence: dict[str, dict[str, float]]
    questions: int
    samples: int


def choose(candidates: Mapping[str, np.ndarray], fallback: str) -> Choice:
    """The candidate with the highest mean score; the fallback wins ties, then the earlier candidate.

    The questions must be disjoint from those of training and test; that is the caller's duty.

    Args:
        candidates: {name: scores [questions, samples]}, the fallback among them, all on the same questions.
        fallback: name of the untouched adapter.

    Raises:
        ConfigError: if the fallback is missing, or the shapes differ.
    """
    if fallback not in candidates:
        raise ConfigError(f"the fallback {fallback!r} must be among the candidates ({', '.join(candidates)})")
    shapes = {name: np.shape(scores) for name, scores in candidates.items()}
    if len(set(shapes.values())) != 1:
        raise ConfigError(f"all candidates must be scored on the same questions and samples, found {shapes}")
    best = fallback
    for name, scores in candidates.items():
        if np.mean(scores) > np.mean(candidates[best]) + _ROUNDING:
            best = name
    evidence = {name: asdict(average_at_k(scores)) for name, scores in candidates.items()}
    return Choice(best, best != fallback, evidence, *map(int, shapes[fallback]))


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
        """[questions, seeds × samples]; every seed has as many samples, so the mean over them is that over seeds."""
        return np.concatenate([_probe(result).scores for result in self.results], axis=1)

    @property
    def by_seed(self) -> list[float]:
        """Mean probe score of each seed."""
        return [float(_probe(result).scores.mean()) for result in self.results]

    @property
    def signs(self) -> dict[str, float]:
        """What its probe answers look like (`signs_of`)."""
        return _mean([_probe(result).signs for result in self.results])

    def against(self, adapter: Cell) -> dict[str, float]:
        """Its difference from the adapter, paired by question."""
        return asdict(compare(self.probe, adapter.probe))


def cells_of(study: Study, results: Mapping[str, TrialResult]) -> list[Cell]:
    """The cells, in the study's order; of trials that are not finished nothing is there."""
    found = []
    for candidates in grouped(study.candidates).values():
        done = [results[one.slug] for one in candidates if one.slug in results]
        if done:
            found.append(Cell(tuple(candidates), tuple(done)))
    return found


def grouped(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """{name of the cell: its candidates}."""
    groups: dict[str, list[Candidate]] = {}
    for one in candidates:
        groups.setdefault(one.cell, []).append(one)
    return groups


def summarise(study: Study, results: Mapping[str, TrialResult]) -> dict[str, Any]:
    """The content of sweep_results.json: every cell, and what was chosen of them."""
    found = cells_of(study, results)
    own = found[0] if found and found[0].name == ADAPTER else None
    cells = [_cell_record(cell, own) for cell in found if cell.name != ADAPTER]
    # without the adapter's own scores there is no choice
    choices = [] if own is None else [_choice_record([own, *(cell for cell in found[1:] if cell.complete)])]
    compared = [cell for cell in cells if cell["complete"] and cell["difference"] is not None]
    _tell_apart(compared)
    shape = next((_probe(result).scores.shape for result in results.values()), (0, 0))
    return {
        "format": "loragate sweep results",
        "version": 1,
        "sweep": study.fingerprint,
        "seeds": list(dict.fromkeys(one.seed for one in study.candidates if one.range is not None)),
        "questions": shape[0],
        "samples": shape[1],
        "comparisons": len(compared),
        "choices": choices,
        "cells": cells,
        "missing": [one.slug for one in study.candidates if one.slug not in results],
        "seconds": {stage: round(_seconds(list(results.values()), stage), 1) for stage in ("training", "probing")},
    }


def suite_record(
    record: EvaluationRecord, study: Study, suite: str, tasks: Sequence[str], chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """The cells on one suite, in the form that `report.heatmap` draws.

    A score is the mean over the suite's tasks, each counting the same, as in the paper's maps.

    Args:
        record: of an evaluation with the row "adapter" and one row per finished trial, whose control is `Candidate.name`.
        tasks: names of the suite's tasks in the record.
        chosen: the sweep's choice; empty where it has none.
    """
    rows = {(row.task, row.name): row for row in record.results}
    own = [_means([rows[task, "adapter"]]) for task in tasks]
    mine = [one for one in study.candidates if one.range is not None]
    cells: list[dict[str, Any]] = []
    tables: dict[str, Tables] = {}
    for name, trials in grouped(mine).items():
        found = [trial for trial in trials if (tasks[0], f"gated {trial.name}") in rows]
        if not found:
            continue
        scored = [_means([rows[task, f"gated {trial.name}"] for trial in found]) for task in tasks]
        head = _cell_head(trials, found)
        if head["complete"]:
            tables[name] = scored
        more = {"score": asdict(suite_average(scored)), "difference": asdict(compare_suites(scored, own))}
        cells.append({**head, **more, "differs": False})
    _tell_apart(cells)
    return {
        "format": "loragate sweep evaluation",
        "version": 1,
        "sweep": study.fingerprint,
        "suite": suite,
        "tasks": list(tasks),
        "questions": sum(len(table) for table in own),
        "samples": rows[tasks[0], "adapter"].avg_at_k.samples,
        "seeds": list(dict.fromkeys(trial.seed for trial in mine)),
        "comparisons": len(cells),
        "cells": cells,
        "choices": [_suite_choice(study.candidates[0].adapter, own, tables, chosen)],
    }


def _cell_head(trials: Sequence[Candidate], found: Sequence[Candidate]) -> dict[str, Any]:
    """What a cell of a grid is; `found` are those of its seeds that were scored."""
    one = trials[0]
    assert one.range is not None, "a cell of a grid is trained"
    return {
        "name": one.cell,
        "adapter": one.adapter,
        "objective": one.objective,
        "lower": one.range.lower,
        "upper": one.range.upper,
        "seeds": [trial.seed for trial in found],
        "complete": len(found) == len(trials),
    }


def _tell_apart(cells: Sequence[dict[str, Any]]) -> None:
    """Say in records of cells which differ from the adapter, by Holm's method over all of them."""
    adjusted = holm([cell["difference"]["p"] for cell in cells]) if cells else []
    for cell, p in zip(cells, adjusted, strict=True):
        versus = cell["difference"]
        versus["p_holm"] = p
        cell["differs"] = p <= LEVEL and (versus["low"] > 0 or versus["high"] < 0)


def _cell_record(cell: Cell, own: Cell | None) -> dict[str, Any]:
    return {
        **_cell_head(cell.candidates, [result.candidate for result in cell.results]),
        "answers": int(cell.probe.size),
        "probe": asdict(average_at_k(cell.probe)),
        "by_seed": cell.by_seed,
        "difference": None if own is None else cell.against(own),
        "differs": False,
        "signs": cell.signs,
        "entropy_before": _of_training(cell.results, "entropy_before"),
        "entropy_after": _of_training(cell.results, "entropy_after"),
        "gates": _mean([result.training.get("gates", {}) for result in cell.results]),
    }


def _choice_record(cells: Sequence[Cell]) -> dict[str, Any]:
    """What is picked out of the complete cells, the adapter the first; `seed` is the first one that beats it."""
    own = cells[0]
    # the mean over seeds and samples of each question: one column, so that all shapes agree
    choice = choose({cell.name: cell.probe.mean(axis=1, keepdims=True) for cell in cells}, ADAPTER)
    picked = next(cell for cell in cells if cell.name == choice.name)
    one, mean = picked.candidates[0], float(own.probe.mean())
    better = [r.candidate.seed for r, score in zip(picked.results, picked.by_seed, strict=True) if score > mean]
    return {
        "adapter": one.adapter,
        "picked": choice.name,
        "accepted": choice.accepted,
        "lower": None if one.range is None else one.range.lower,
        "upper": None if one.range is None else one.range.upper,
        "objective": None if one.range is None else one.objective,
        "seed": better[0] if choice.accepted else None,
        "candidates": len(cells) - 1,
        "adapter_probe": asdict(average_at_k(own.probe)),
        "adapter_signs": own.signs,
    }


def written_of(study: Study, choice: Mapping[str, Any]) -> Candidate | None:
    """The trial whose gates are taken by the choice's record in `summarise`; None where the adapter remains."""
    trials = {(one.cell, one.seed): one for one in study.candidates}
    return trials[choice["picked"], choice["seed"]] if choice["accepted"] else None


def best_record(
    study: Study, summary: Mapping[str, Any], choice: Mapping[str, Any], about: dict[str, Any]
) -> dict[str, Any]:
    """What the artifact of the best cell keeps under "selection".

    Args:
        summary: of `summarise`, with the reasons of what diverged.
        choice: its choice, of gates.
        about: description of the probe.
    """
    own = choice["adapter_signs"]
    cells = {cell["name"]: cell for cell in summary["cells"] if cell["complete"]}
    picked = cells[choice["picked"]]
    names = {one.slug: one.cell for one in study.candidates}
    failed = {names[slug]: why for slug, why in summary.get("diverged", {}).items()}
    warnings = {
        ADAPTER: unread(own.get("read", 1.0), str(about.get("grader", ""))),
        choice["picked"]: looks_worse(picked["signs"], own),
    }
    return {
        "method": f"best of {len(cells)} on a {about.get('kind', 'labelled')} probe, the adapter among the candidates",
        "accepted": True,
        "picked": choice["picked"],
        "range": [picked["lower"], picked["upper"]],
        "candidates": len(cells),
        "seeds": picked["seeds"],
        "written_seed": choice["seed"],
        "n": picked["answers"],
        "probe": about,
        "evidence": {ADAPTER: choice["adapter_probe"], **{name: cell["probe"] for name, cell in cells.items()}},
        "signs": {ADAPTER: own, **{name: cell["signs"] for name, cell in cells.items()}},
        "warnings": {name: found for name, found in warnings.items() if found},
        "difference": {**picked["difference"], "comparisons": summary["comparisons"]},
        "note": "the mean of what was picked is optimistic, because it was picked for it",
        **({"failed": failed} if failed else {}),
    }


def _suite_choice(label: str, own: Tables, tables: Mapping[str, Tables], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What the probe had chosen, with the best cell of the suite beside it."""
    every = {"adapter": own, **tables}
    best = max(every, key=lambda name: suite_average(every[name]).mean)
    picked = str(chosen.get("picked", "")) if chosen.get("accepted") else ""
    regret = None
    if picked in tables:
        # a model does not differ from itself, which the test cannot know
        alike = {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
        regret = alike if best == picked else asdict(compare_suites(every[best], every[picked]))
    return {
        "adapter": label,
        "picked": picked,
        "accepted": picked in tables,
        "candidates": len(tables),
        "adapter_score": asdict(suite_average(own)),
        "oracle": {"name": best, "score": asdict(suite_average(every[best])), "regret": regret},
    }


def _means(results: Sequence[TaskResult]) -> np.ndarray:
    """[questions, 1]: the mean over seeds of each question's mean; all seeds are asked the same questions."""
    return np.mean([result.question_scores for result in results], axis=0)[:, None]


def _probe(result: TrialResult) -> Scored:
    assert result.probe is not None, "a study without a probe has no outcome"
    return result.probe


def _seconds(results: Sequence[TrialResult], stage: str) -> float:
    return sum(result.seconds.get(stage, 0.0) for result in results)


def _of_training(results: Sequence[TrialResult], key: str) -> float | None:
    values = [result.training[key] for result in results if result.training.get(key) is not None]
    return float(np.mean(values)) if values else None


def _mean(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [name for name in records[0] if all(isinstance(r.get(name), int | float) for r in records)]
    return {name: float(np.mean([record[name] for record in records])) for name in names}
