"""From finished trials to an answer: cells, the choice on the probe, and what the test set says of it.

A cell is one adapter, objective and range; its seeds are averaged within each question, so that the question stays the unit of
every interval. The choice is made on the probe alone. The best cell on the test set (the oracle) is worked out apart, to show
what choosing on the probe cost; it is never an input to anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from loragate.evaluation import average_at_k, compare
from loragate.evaluation.statistics import holm
from loragate.gates.range import Range
from loragate.selection import choose
from loragate.sweep.plan import UNTOUCHED, SweepPlan, Trial
from loragate.sweep.records import Scored, TrialResult

LEVEL = 0.05
Cell = dict[str, Any]


def summarise(plan: SweepPlan, results: Mapping[str, TrialResult]) -> dict[str, Any]:
    """The content of sweep_results.json.

    Args:
        results: {slug: result}; those of trials that are not finished are absent.
    """
    adapters = list(dict.fromkeys(trial.adapter for trial in plan.trials))
    cells = [cell for cell in (_cell(key, trials, results) for key, trials in _grouped(plan).items()) if cell]
    # a cell that lacks a seed is shown and not compared
    compared = [cell for cell in cells if cell["complete"] and cell["difference"] is not None]
    for cell, p in zip(compared, holm([cell["difference"]["p"] for cell in compared]) if compared else [], strict=True):
        cell["difference"]["p_holm"] = p
        cell["differs"] = _differs(cell["difference"])
    per_adapter = [_choice(adapter, cells, results) for adapter in adapters]
    missing = [trial.slug for trial in plan.trials if trial.slug not in results]
    any_result = next(iter(results.values()), None)
    return {
        "format": "loragate sweep results",
        "version": 1,
        "sweep": plan.fingerprint,
        "seeds": list(dict.fromkeys(trial.seed for trial in plan.trials if trial.kind == "gates")),
        "questions": 0 if any_result is None else len(_probe(any_result).scores),
        "samples": 0 if any_result is None else _probe(any_result).scores.shape[1],
        "comparisons": len(compared),
        "choices": [choice for choice in per_adapter if choice],
        "cells": [{name: value for name, value in cell.items() if not name.startswith("_")} for cell in cells],
        "missing": missing,
        "seconds": {
            stage: round(sum(result.seconds.get(stage, 0.0) for result in results.values()), 1)
            for stage in ("training", "probing", "testing")
        },
    }


def _grouped(plan: SweepPlan) -> dict[tuple[str, str, float, float], list[Trial]]:
    groups: dict[tuple[str, str, float, float], list[Trial]] = {}
    for trial in plan.trials:
        if trial.kind == "gates":
            groups.setdefault((trial.adapter, trial.objective, trial.lower, trial.upper), []).append(trial)
    return groups


def _cell(key: tuple[str, str, float, float], trials: list[Trial], results: Mapping[str, TrialResult]) -> Cell | None:
    found = [results[trial.slug] for trial in trials if trial.slug in results]
    if not found:
        return None
    adapter, objective, lower, upper = key
    probe = _by_question(found, "probe")
    test = _by_question(found, "test") if all(result.test is not None for result in found) else None
    own = results.get(Trial.untouched(adapter).slug)
    return {
        "name": str(Range(lower, upper)) + ("" if objective == "entropy" else f" {objective}"),
        "adapter": adapter,
        "objective": objective,
        "lower": lower,
        "upper": upper,
        "seeds": [result.trial.seed for result in found],
        "complete": len(found) == len(trials),
        "answers": int(probe.size),
        "probe": asdict(average_at_k(probe)),
        "by_seed": [float(_probe(result).scores.mean()) for result in found],
        "difference": None if own is None else asdict(compare(probe, _probe(own).scores)),
        "differs": False,
        "test": None if test is None else asdict(average_at_k(test)),
        "signs": _mean([_probe(result).signs for result in found]),
        "entropy_before": _of_training(found, "entropy_before"),
        "entropy_after": _of_training(found, "entropy_after"),
        "gates": _mean([result.training.get("gates", {}) for result in found]),
        "_probe": probe,
        "_test": test,
    }


def _choice(adapter: str, cells: list[Cell], results: Mapping[str, TrialResult]) -> dict[str, Any] | None:
    """What was picked for one adapter, and the oracle beside it; None while the adapter itself is not scored."""
    own = results.get(Trial.untouched(adapter).slug)
    if own is None:
        return None
    # a cell that lacks a seed is not compared on the same footing
    mine = {cell["name"]: cell for cell in cells if cell["adapter"] == adapter and cell["complete"]}
    # one column: the mean over seeds and samples, so that all shapes agree
    scores = {UNTOUCHED: _probe(own).scores.mean(axis=1, keepdims=True)}
    scores |= {name: cell["_probe"].mean(axis=1, keepdims=True) for name, cell in mine.items()}
    choice = choose(scores, UNTOUCHED)
    picked = mine.get(choice.name)
    record: dict[str, Any] = {
        "adapter": adapter,
        "picked": choice.name,
        "accepted": choice.accepted,
        "lower": None if picked is None else picked["lower"],
        "upper": None if picked is None else picked["upper"],
        "objective": None if picked is None else picked["objective"],
        "seed": None if picked is None else _written_seed(picked, float(_probe(own).scores.mean())),
        "candidates": len(mine),
        "adapter_probe": asdict(average_at_k(_probe(own).scores)),
        "adapter_signs": _probe(own).signs,
        "adapter_test": None if own.test is None else asdict(average_at_k(own.test.scores)),
        "oracle": None,
    }
    if own.test is not None and all(cell["_test"] is not None for cell in mine.values()):
        tests = {UNTOUCHED: own.test.scores, **{name: cell["_test"] for name, cell in mine.items()}}
        best = max(tests, key=lambda name: float(tests[name].mean()))
        record["oracle"] = {
            "name": best,
            "test": asdict(average_at_k(tests[best])),
            "chosen_test": asdict(average_at_k(tests[choice.name])),
            "regret": _difference(tests, best, choice.name),
            "chosen_minus_adapter": _difference(tests, choice.name, UNTOUCHED),
        }
    return record


def _written_seed(cell: Cell, adapter: float) -> int:
    """The first seed whose gates beat the adapter on the probe; a cell that beats it on average has one."""
    return next(seed for seed, score in zip(cell["seeds"], cell["by_seed"], strict=True) if score > adapter)


def selection_record(summary: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """What the artifact of a chosen cell keeps under "selection"."""
    cell = next(c for c in summary["cells"] if c["adapter"] == choice["adapter"] and c["name"] == choice["picked"])
    return {
        "method": f"sweep: best of {choice['candidates']} cells on a labelled probe, the adapter among the candidates",
        "accepted": True,
        "picked": choice["picked"],
        "range": [choice["lower"], choice["upper"]],
        "cells": choice["candidates"],
        "seeds": cell["seeds"],
        "written_seed": choice["seed"],
        "n": cell["answers"],
        "evidence": {
            UNTOUCHED: choice["adapter_probe"],
            choice["picked"]: cell["probe"],
            "difference": cell["difference"],
            "comparisons": summary["comparisons"],
        },
        "note": "the mean of the picked cell is optimistic, because it was picked for it",
    }


def _probe(result: TrialResult) -> Scored:
    assert result.probe is not None, "a sweep without a probe has no summary"
    return result.probe


def _by_question(results: list[TrialResult], kind: str) -> np.ndarray:
    """[questions, seeds × samples]; every seed has the same number of samples, so its mean is that over seeds."""
    return np.concatenate([getattr(result, kind).scores for result in results], axis=1)


def _difference(scores: Mapping[str, np.ndarray], one: str, other: str) -> dict[str, float]:
    """One minus the other; a model does not differ from itself, which `compare` cannot know."""
    if one == other:
        return {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    return asdict(compare(scores[one], scores[other]))


def _differs(difference: Mapping[str, float]) -> bool:
    return difference["p_holm"] <= LEVEL and (difference["low"] > 0 or difference["high"] < 0)


def _of_training(results: list[TrialResult], key: str) -> float | None:
    values = [result.training[key] for result in results if result.training.get(key) is not None]
    return float(np.mean(values)) if values else None


def _mean(records: list[dict[str, float]]) -> dict[str, float]:
    names = (
        [name for name in records[0] if all(isinstance(r.get(name), int | float) for r in records)] if records else []
    )
    return {name: float(np.mean([record[name] for record in records])) for name in names}
