"""What lm-evaluation-harness measured, as rows of the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from loragate.evaluation.harness import HarnessScores
from loragate.evaluation.results import SuiteResult, TaskInfo, TaskResult, task_result
from loragate.evaluation.statistics import compare_suites, suite_average
from loragate.evaluation.tasks import load_task
from loragate.evaluation.variants import Kind
from loragate.generation import SamplingConfig


def retention_info(kept: HarnessScores, seed: int) -> TaskInfo:
    """What a suite was when it was asked."""
    settings = kept.settings
    return TaskInfo(
        name=kept.task,
        version=kept.version,
        fingerprint=settings["rows"],
        prompt_sha256=kept.prompts_hash,
        dataset=settings["source"],
        dataset_revision=settings["revision"],
        grader=f"lm-eval {kept.metric}",
        grader_version=settings["lm_eval"],
        sampling=SamplingConfig(temperature=0.0, max_new_tokens=settings["max_new_tokens"] or 1, samples=1, seed=seed),
    )


def retention_result(task: str, row: Kind, kept: HarnessScores, adapter: HarnessScores | None) -> TaskResult:
    """What a row scored on a suite, compared with the plain adapter."""
    return task_result(
        task,
        row,
        _table(kept),
        question_ids=kept.questions,
        reasons=["ok" if sample["correct"] else "wrong" for sample in kept.samples],
        finish_reasons=[sample.get("finish_reason", "stop") for sample in kept.samples],
        tokens=[int(sample.get("tokens", 0)) for sample in kept.samples],
        adapter_scores=None if adapter is None or row == "adapter" else _table(adapter),
    )


def retention_averages(found: Mapping[str, Mapping[Kind, HarnessScores]]) -> list[SuiteResult]:
    """The averages of each row: over the subsets of a suite that is averaged so, and over all suites where there are several.

    In the second every suite counts the same: by the mean over its subsets, or over its questions, as its definition says.

    Args:
        found: by suite, then by the row's name.
    """
    strata = {suite: {name: _strata(suite, one) for name, one in rows.items()} for suite, rows in found.items()}
    averages: list[tuple[str, int, list[str]]] = [
        (f"{suite}/subsets", len(next(iter(rows.values()))), [suite])
        for suite, rows in strata.items()
        if len(next(iter(rows.values()))) > 1
    ]
    if len(found) > 1:
        averages.append(("retention", len(found), list(found)))
    results = []
    for title, count, suites in averages:
        for name in found[suites[0]]:
            tables = {
                row: [table for suite in suites for table in strata[suite][row]]
                for row in {name, "adapter"} & {*found[suites[0]]}
            }
            weights = [1 / len(suites) / len(strata[suite][name]) for suite in suites for _ in strata[suite][name]]
            comparison = None
            if name != "adapter" and "adapter" in tables:
                comparison = compare_suites(tables[name], tables["adapter"], weights=weights)
            average = replace(suite_average(tables[name], weights=weights), tasks=count)
            results.append(SuiteResult(name, average, title, None, comparison))
    return results


def _table(kept: HarnessScores) -> np.ndarray:
    """Scores [Q, 1]."""
    return np.array(kept.scores, dtype=float)[:, None]


def _strata(suite: str, kept: HarnessScores) -> list[np.ndarray]:
    """Tables of scores that count the same in the suite's score: one for each subset, or one of all questions."""
    harness = load_task(suite).harness
    if harness is None or harness.average == "questions":
        return [_table(kept)]
    names = np.array(kept.subsets)
    return [_table(kept)[names == name] for name in dict.fromkeys(kept.subsets)]
