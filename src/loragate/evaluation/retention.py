"""What lm-evaluation-harness measured, as rows of the record, kept on disk so that a resumed run repeats none of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loragate.data import template_hash
from loragate.errors import DataError
from loragate.evaluation.aggregates import compare_suites, suite_average
from loragate.evaluation.harness import HarnessScores, answer_limit
from loragate.evaluation.results import SuiteResult, TaskInfo, TaskResult, task_result
from loragate.evaluation.tasks import Questions, Task, load_task
from loragate.evaluation.variants import Variant
from loragate.files import write_json
from loragate.generation import SamplingConfig
from loragate.records import read, to_json


@dataclass(frozen=True)
class Measured:
    """One row on one suite: task, row of the record, scores [Q, 1], each question's subset, what a reader should know."""

    info: TaskInfo
    row: TaskResult
    scores: np.ndarray
    subsets: tuple[str, ...]
    warnings: tuple[str, ...]


def keep_measured(folder: Path, variant: Variant, name: str, measure: Callable[[], HarnessScores]) -> None:
    """Measure a row on a suite and write it down, unless it is on file.

    What is on file belongs to this run: `describe_suite` is part of what a resumed run must share.
    """
    if not all_measured(folder, name, [variant]):
        write_json(_path(folder, variant, name), to_json(measure()))


def read_measured(folder: Path, variant: Variant, name: str, seed: int, adapter: Measured | None = None) -> Measured:
    """What `keep_measured` wrote, compared with the plain adapter's.

    Raises:
        DataError: for an absent file, or one that this version does not write.
    """
    path = _path(folder, variant, name)
    if not path.exists():
        raise DataError(f"found no {path}; finish the evaluation with --resume first")
    kept = read(HarnessScores, path, "delete it and resume")
    settings, scores = kept.settings, np.array(kept.scores)[:, None]
    info = TaskInfo(
        name=name,
        version=kept.version,
        fingerprint=settings["rows"],
        prompt_sha256=kept.prompts_hash,
        dataset=settings["source"],
        dataset_revision=settings["revision"],
        grader=f"lm-eval {kept.metric}",
        grader_version=settings["lm_eval"],
        sampling=SamplingConfig(temperature=0.0, max_new_tokens=settings["max_new_tokens"] or 1, samples=1, seed=seed),
    )
    row = task_result(
        name,
        variant.acts,
        scores,
        question_ids=kept.questions,
        reasons=["ok" if sample["correct"] else "wrong" for sample in kept.samples],
        finish_reasons=[sample.get("finish_reason", "stop") for sample in kept.samples],
        tokens=[int(sample.get("tokens", 0)) for sample in kept.samples],
        adapter_scores=None if adapter is None else adapter.scores,
    )
    return Measured(info, row, scores, kept.subsets, kept.warnings)


def retention_averages(found: Mapping[str, Mapping[str, Measured]]) -> list[SuiteResult]:
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
        for name, one in found[suites[0]].items():
            tables = {
                row: [table for suite in suites for table in strata[suite][row]]
                for row in {name, "adapter"} & {*found[suites[0]]}
            }
            weights = [1 / len(suites) / len(strata[suite][name]) for suite in suites for _ in strata[suite][name]]
            comparison = None
            if name != "adapter" and "adapter" in tables:
                comparison = compare_suites(tables[name], tables["adapter"], weights=weights)
            average = replace(suite_average(tables[name], weights=weights), tasks=count)
            results.append(SuiteResult(one.row.variant, average, title, None, comparison))
    return results


def _strata(suite: str, measured: Measured) -> list[np.ndarray]:
    """Tables of scores that count the same in the suite's score: one for each subset, or one of all questions."""
    harness = load_task(suite).harness
    if harness is None or harness.average == "questions":
        return [measured.scores]
    names = np.array(measured.subsets)
    return [measured.scores[names == name] for name in dict.fromkeys(measured.subsets)]


def describe_suite(
    task: Task, questions: Questions, tokenizer: Any, limit: int | None, max_new_tokens: int | None, system: str
) -> dict[str, Any]:
    """What scores of a retention suite depend on beside the model."""
    assert task.harness is not None, f"{task.name} is no task of the harness"
    asked = {
        "version": task.version,
        "source": questions.source,
        "revision": questions.revision,
        "rows": questions.fingerprint,
        "limit": limit,
        "max_new_tokens": answer_limit(task.harness, max_new_tokens),
        "chat_template": template_hash(tokenizer),
    }
    return asked if system == "none" else {**asked, "system": system}


def all_measured(folder: Path, name: str, variants: Sequence[Variant]) -> bool:
    """Whether every row that is no control has been measured on a suite."""
    return all(_path(folder, variant, name).is_file() for variant in variants if variant.control is None)


def _path(folder: Path, variant: Variant, name: str) -> Path:
    return folder / "harness" / variant.slug / f"{name}.json"
