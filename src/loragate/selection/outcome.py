"""From the finished trials of a sweep to an answer: cells, the choice on the probe, and the record of both.

All cells are asked at one temperature, and the choice holds there; what `loragate calibrate` recommends over all temperatures
is in `comparison.py`. A cell is what is compared: an adapter, objective and range, its seeds averaged within each question, so
that the question stays the unit of every interval. The choice is made on the probe alone: training entropy is never consulted,
because it falls also where answers get worse. On whole suites cells are rows of an evaluation (`SweptCells`, which is what
`loragate eval --sweep` asks). The best one there (the oracle, `suite_record`) shows what choosing on the probe cost; no choice
may rest upon it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import ConfigError, DataError
from loragate.evaluation import average_at_k, compare
from loragate.evaluation.evaluate import Evaluation
from loragate.evaluation.results import EvaluationRecord, TaskResult
from loragate.evaluation.session import Request, Session
from loragate.evaluation.statistics import compare_suites, holm, suite_average
from loragate.evaluation.tasks import Task
from loragate.evaluation.variants import Variant
from loragate.gates.schema import read_gate_config
from loragate.selection.candidate import ADAPTER, Candidate
from loragate.selection.probe import Scored, looks_worse, unread
from loragate.selection.store import GATED, Store, Study, TrialResult

LEVEL = 0.05
_ROUNDING = (
    1e-9  # means over another number of samples round differently; two shares of right answers are further apart
)


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


def grouped(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """{name of the cell: its candidates}."""
    groups: dict[str, list[Candidate]] = {}
    for one in candidates:
        groups.setdefault(one.cell, []).append(one)
    return groups


def summarise(study: Study, results: Mapping[str, TrialResult]) -> dict[str, Any]:
    """The content of sweep_results.json: every cell that has a finished trial, and what was chosen of the complete ones."""
    done = {
        name: [results[one.slug] for one in trials if one.slug in results]
        for name, trials in grouped(study.candidates).items()
    }
    # every seed has as many samples, so that the mean over them is that over seeds
    tables = {name: np.concatenate([_probe(r).scores for r in found], axis=1) for name, found in done.items() if found}
    own = tables.get(ADAPTER)
    cells = [
        _cell_record(trials, done[name], tables[name], own)
        for name, trials in grouped(study.candidates).items()
        if name in tables and name != ADAPTER
    ]
    compared = [cell for cell in cells if cell["complete"] and own is not None]
    _tell_apart(compared)
    choices = []
    if own is not None:  # without the adapter's own scores there is no choice
        signs = _mean([_probe(result).signs for result in done[ADAPTER]])
        choices = [_choice_record(study.candidates[0].adapter, compared, tables, signs)]
    questions, samples = next((_probe(result).scores.shape for result in results.values()), (0, 0))
    return {
        "format": "loragate sweep results",
        "version": 1,
        "sweep": study.fingerprint,
        "seeds": list(dict.fromkeys(one.seed for one in study.candidates if one.range is not None)),
        "questions": questions,
        "samples": samples,
        "comparisons": len(compared),
        "choices": choices,
        "cells": cells,
        "missing": [one.slug for one in study.candidates if one.slug not in results],
        "seconds": {
            stage: round(sum(result.seconds.get(stage, 0.0) for result in results.values()), 1)
            for stage in ("training", "probing")
        },
    }


@dataclass(frozen=True)
class SweptCells:
    """The finished cells of a sweep, which are rows of one evaluation beside its adapter.

    Attributes:
        study: of the sweep.
        trials: the gated folder of every finished cell.
        request: of the evaluation: its model is the adapter of the cells.
        tasks: what is asked.
        stop_token_ids: that end an answer, as the cells record them.
        choice: what the sweep chose on its probe, as `summarise` records it; empty where it chose nothing.
    """

    study: Study
    trials: dict[Candidate, Path]
    request: Request
    tasks: list[Task]
    stop_token_ids: tuple[int, ...]
    choice: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, sweep: Path, request: Request) -> SweptCells:
        """Those of a sweep with a finished cell (DataError); ConfigErrors as of `Request.check`, and for retention suites."""
        store = Store.open(sweep)
        done = store.finished()
        trials = {
            one: store.place(one) / GATED
            for one in store.study.candidates
            if one.range is not None and one.slug in done
        }
        if not trials:
            raise DataError(f"{sweep} has no finished cell yet; go on with the sweep first (loragate sweep … --resume)")
        # without a probe nothing was chosen
        choices = summarise(store.study, done)["choices"] if store.study.identity.get("probe") else []
        first = next(iter(trials.values()))
        gates = read_gate_config(first)
        base, revision = gates["base"]["id"], gates["base"].get("revision")
        own = replace(
            request,
            model=str(first / "adapter"),
            base=request.base or (f"{base}@{revision}" if revision else base),
        )
        tasks = own.check()
        if asked := [task.name for task in tasks if task.harness is not None]:
            raise ConfigError(f"--sweep: {', '.join(asked)} are retention suites, which are scored one model at a time")
        endings = tuple(gates.get("stop_token_ids") or ())
        return cls(store.study, trials, own, tasks, endings, choices[0] if choices else {})

    def evaluation(self, session: Session) -> Evaluation:
        """The adapter and a row for each cell."""
        expected = [one for one in self.study.candidates if one.range is not None]
        left = [trial.name for trial in expected if trial not in self.trials]
        notes = [f"cells that are not finished, and not scored: {', '.join(left)}"] if left else []
        rows = [Variant("gated", trial.name, gates=str(place)) for trial, place in self.trials.items()]
        return session.evaluation([Variant("adapter"), *rows], notes=notes, kind="sweep", sweep=self.study.fingerprint)


def suite_record(
    record: EvaluationRecord, study: Study, suite: str, tasks: Sequence[str], chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """The cells on one suite, in the form that `report.selection` draws.

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
    tables: dict[str, list[np.ndarray]] = {}
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
    every = {ADAPTER: own, **tables}
    best = max(every, key=lambda name: suite_average(every[name]).mean)
    picked, regret = str(chosen.get("picked", "")) if chosen.get("accepted") else "", None
    if picked in tables:
        # a model does not differ from itself, which the test cannot know
        alike = {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
        regret = alike if best == picked else asdict(compare_suites(every[best], every[picked]))
    choice = {
        "adapter": study.candidates[0].adapter,
        "picked": picked,
        "accepted": picked in tables,
        "candidates": len(tables),
        "adapter_score": asdict(suite_average(own)),
        "oracle": {"name": best, "score": asdict(suite_average(every[best])), "regret": regret},
    }
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
        "choices": [choice],
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


def _cell_record(
    trials: Sequence[Candidate], done: Sequence[TrialResult], scores: np.ndarray, own: np.ndarray | None
) -> dict[str, Any]:
    entropies = {
        key: [one.training[key] for one in done if one.training.get(key) is not None]
        for key in ("entropy_before", "entropy_after")
    }
    return {
        **_cell_head(trials, [result.candidate for result in done]),
        "answers": int(scores.size),
        "probe": asdict(average_at_k(scores)),
        "by_seed": [float(_probe(result).scores.mean()) for result in done],
        "difference": None if own is None else asdict(compare(scores, own)),
        "differs": False,
        "signs": _mean([_probe(result).signs for result in done]),
        **{key: float(np.mean(values)) if values else None for key, values in entropies.items()},
        "gates": _mean([result.training.get("gates", {}) for result in done]),
    }


def _choice_record(
    label: str, cells: Sequence[dict[str, Any]], tables: Mapping[str, np.ndarray], signs: dict[str, float]
) -> dict[str, Any]:
    """What is picked out of the adapter and complete cells; `seed` is the first one that beats the adapter."""
    # the mean over seeds and samples of each question: one column, so that all shapes agree
    means = {name: tables[name].mean(axis=1, keepdims=True) for name in (ADAPTER, *(cell["name"] for cell in cells))}
    choice, own = choose(means, ADAPTER), float(tables[ADAPTER].mean())
    picked: dict[str, Any] = next((cell for cell in cells if cell["name"] == choice.name), {})
    by_seed = zip(picked.get("seeds", ()), picked.get("by_seed", ()), strict=True)
    return {
        "adapter": label,
        "picked": choice.name,
        "accepted": choice.accepted,
        **{key: picked.get(key) for key in ("lower", "upper", "objective")},
        "seed": next((seed for seed, score in by_seed if score > own), None),
        "candidates": len(cells),
        "adapter_probe": asdict(average_at_k(tables[ADAPTER])),
        "adapter_signs": signs,
    }


def written_of(study: Study, choice: Mapping[str, Any]) -> Candidate | None:
    """The trial whose gates are taken by the choice's record in `summarise`; None where the adapter remains."""
    trials = {(one.cell, one.seed): one for one in study.candidates}
    return trials[choice["picked"], choice["seed"]] if choice["accepted"] else None


def best_record(
    study: Study, summary: Mapping[str, Any], choice: Mapping[str, Any], about: dict[str, Any]
) -> dict[str, Any]:
    """What the artifact of the best cell keeps under "selection"; `choice` is of gates, `about` describes the probe."""
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


def _means(results: Sequence[TaskResult]) -> np.ndarray:
    """[questions, 1]: the mean over seeds of each question's mean; all seeds are asked the same questions."""
    return np.mean([result.question_scores for result in results], axis=0)[:, None]


def _probe(result: TrialResult) -> Scored:
    assert result.probe is not None, "a study without a probe has no outcome"
    return result.probe


def _mean(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [name for name in records[0] if all(isinstance(r.get(name), int | float) for r in records)]
    return {name: float(np.mean([record[name] for record in records])) for name in names}
