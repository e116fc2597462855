"""The cells of a sweep on whole suites: what `loragate eval --sweep` makes of its record, and what its heat maps are drawn from.

A cell is a range; its seeds are averaged within each question. Its score on a suite is the mean over the suite's tasks, each
counting the same, as in the paper's maps. The cell that the sweep chose on its probe is marked; the best cell here is the
oracle, which no choice may rest upon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import ConfigError, DataError
from loragate.evaluation.evaluate import Evaluation
from loragate.evaluation.results import EvaluationRecord, TaskResult
from loragate.evaluation.session import Request, Session
from loragate.evaluation.statistics import compare_suites, holm, suite_average
from loragate.evaluation.tasks import Task
from loragate.evaluation.variants import Variant, sampled
from loragate.gates.schema import read_gate_config
from loragate.selection.candidate import Candidate
from loragate.selection.outcome import LEVEL, selections
from loragate.selection.store import GATED, Store, TrialResult
from loragate.selection.study import Study

Tables = list[np.ndarray]


@dataclass(frozen=True)
class SweptCells:
    """The finished cells of one adapter of a sweep, which are rows of one evaluation beside it.

    Attributes:
        study: of the sweep.
        label: of the adapter.
        trials: the gated folder of every finished cell.
        request: of the evaluation: its model is the adapter of the cells, its folder this adapter's.
        tasks: what is asked.
        stop_token_ids: that end an answer, as the cells record them.
        written: the trial whose gates the sweep recommends, at the temperature of its probe; None where the adapter remains.
    """

    study: Study
    label: str
    trials: dict[Candidate, Path]
    request: Request
    tasks: list[Task]
    stop_token_ids: tuple[int, ...]
    written: TrialResult | None = None

    @classmethod
    def of(cls, sweep: Path, request: Request) -> list[SweptCells]:
        """Those of every adapter of a sweep, each in a folder of its own where there are several.

        Raises:
            ConfigError: as `Request.check`, and for retention suites.
            DataError: for a sweep without a finished cell.
        """
        store, cells = Store.open(sweep), dict[str, dict[Candidate, Path]]()
        done = store.finished()
        # without a probe nothing was chosen
        chosen = selections(store.study, done) if store.study.identity.get("probe") else {}
        for one in store.study.candidates:
            if one.range is not None and one.slug in done:
                cells.setdefault(one.adapter, {})[one] = store.place(one) / GATED
        if not cells:
            raise DataError(f"{sweep} has no finished cell yet; go on with the sweep first (loragate sweep … --resume)")
        folders = {label: request.out if len(cells) == 1 else request.out / label for label in cells}
        begun = [folder for folder in folders.values() if (folder / "eval.json").is_file()]
        found = []
        for label, trials in cells.items():
            folder, first = folders[label], next(iter(trials.values()))
            gates = read_gate_config(first)
            base, revision = gates["base"]["id"], gates["base"].get("revision")
            own = replace(
                request,
                model=str(first / "adapter"),
                base=request.base or (f"{base}@{revision}" if revision else base),
                out=folder,
                resume=request.resume and (folder in begun or not begun),
            )
            tasks = own.check()
            if asked := [task.name for task in tasks if task.harness is not None]:
                raise ConfigError(
                    f"--sweep: {', '.join(asked)} are retention suites, which are scored one model at a time"
                )
            written = chosen[label].written if label in chosen else None
            endings = tuple(gates.get("stop_token_ids") or ())
            found.append(cls(store.study, label, trials, own, tasks, endings, written))
        return found

    def evaluation(self, session: Session) -> Evaluation:
        """The adapter and a row for each cell; at the recommended temperature the recommended gates and the adapter as well."""
        expected = [one for one in self.study.candidates if one.range is not None and one.adapter == self.label]
        left = [trial.name for trial in expected if trial not in self.trials]
        notes = [f"cells that are not finished, and not scored: {', '.join(left)}"] if left else []
        rows = [Variant("gated", trial.name, gates=str(place)) for trial, place in self.trials.items()]
        if self.written is not None and self.written.probe is not None:
            heat = session.added(self.written.probe.about.get("temperature"))
            if heat is not None:
                cooler, one = sampled("adapter", heat), self.written.candidate
                name = f"{one.name} {cooler.control}"
                rows += [cooler, Variant("gated", name, temperature=heat, gates=str(self.trials[one]))]
        return session.evaluation([Variant("adapter"), *rows], notes=notes, kind="sweep", sweep=self.study.fingerprint)


def suite_record(
    record: EvaluationRecord, study: Study, label: str, suite: str, tasks: Sequence[str], chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """The cells of one adapter on one suite, in the form that `report.heatmap` draws.

    Args:
        record: of an evaluation with the row "adapter" and one row per finished trial, whose control is `Candidate.name`.
        label: of the adapter.
        tasks: names of the suite's tasks in the record.
        chosen: the sweep's choice for this adapter; empty where it has none.
    """
    rows = {(row.task, row.name): row for row in record.results}
    own = [_means([rows[task, "adapter"]]) for task in tasks]
    groups: dict[str, list[Candidate]] = {}
    for one in study.candidates:
        if one.range is not None and one.adapter == label:
            groups.setdefault(one.cell, []).append(one)
    cells: list[dict[str, Any]] = []
    tables: dict[str, Tables] = {}
    for name, trials in groups.items():
        found = [trial for trial in trials if (tasks[0], f"gated {trial.name}") in rows]
        if not found:
            continue
        bounds = trials[0].range
        assert bounds is not None, "a cell is trained"
        scored = [_means([rows[task, f"gated {trial.name}"] for trial in found]) for task in tasks]
        complete = len(found) == len(trials)
        if complete:
            tables[name] = scored
        cells.append(
            {
                "name": name,
                "adapter": label,
                "objective": trials[0].objective,
                "lower": bounds.lower,
                "upper": bounds.upper,
                "seeds": [trial.seed for trial in found],
                "complete": complete,
                "score": asdict(suite_average(scored)),
                "difference": asdict(compare_suites(scored, own)),
                "differs": False,
            }
        )
    for cell, p in zip(cells, holm([cell["difference"]["p"] for cell in cells]), strict=True):
        versus = cell["difference"]
        versus["p_holm"] = p
        cell["differs"] = p <= LEVEL and (versus["low"] > 0 or versus["high"] < 0)
    first = rows[tasks[0], "adapter"].avg_at_k
    return {
        "format": "loragate sweep evaluation",
        "version": 1,
        "sweep": study.fingerprint,
        "suite": suite,
        "tasks": list(tasks),
        "questions": sum(len(table) for table in own),
        "samples": first.samples,
        "seeds": list(dict.fromkeys(trial.seed for trials in groups.values() for trial in trials)),
        "comparisons": len(cells),
        "cells": cells,
        "choices": [_choice(label, own, tables, chosen)],
    }


def _choice(label: str, own: Tables, tables: Mapping[str, Tables], chosen: Mapping[str, Any]) -> dict[str, Any]:
    every = {"adapter": own, **tables}
    best = max(every, key=lambda name: suite_average(every[name]).mean)
    picked = str(chosen.get("picked", "")) if chosen.get("accepted") else ""
    regret = None
    if picked in tables:
        alike = best == picked  # a model does not differ from itself, which the test cannot know
        regret = {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0} if alike else None
        regret = regret or asdict(compare_suites(every[best], every[picked]))
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
