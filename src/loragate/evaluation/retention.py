"""What lm-evaluation-harness measured, as rows of the record, kept on disk so that a resumed run repeats none of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import DataError
from loragate.evaluation.harness_rows import load_questions, load_suite
from loragate.evaluation.harness_scores import HarnessScores
from loragate.evaluation.results import TaskInfo, TaskResult, task_result
from loragate.evaluation.variants import Variant
from loragate.files import write_json
from loragate.generation import SamplingConfig


def retention_result(
    name: str,
    variant: Variant,
    folder: Path,
    measure: Callable[[], HarnessScores] | None,
    adapter_scores: np.ndarray | None = None,
) -> tuple[TaskInfo, TaskResult, np.ndarray, list[str]]:
    """One variant on one retention suite: read from `folder` if it was measured before, else measured and kept.

    What is on file belongs to this run: `describe_suite` is part of what a resumed run must share.

    Args:
        name: of our task.
        folder: run folder of the evaluation.
        measure: asks the harness; None where it cannot be asked.
        adapter_scores: the plain adapter's scores [Q, 1], to be compared with.

    Returns:
        (task, row, scores [Q, 1], warnings).

    Raises:
        DataError: for a file that this version does not write, or an absent one where the harness cannot be asked.
    """
    path = _path(folder, variant, name)
    if not path.exists():
        if measure is None:
            raise DataError(f"found no {path}; finish the evaluation with --resume first")
        write_json(path, _stored(measure()))
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        scores = np.array(kept["scores"], dtype=float)
        samples = kept["samples"]
        limit = kept["settings"]["max_new_tokens"]
        seed = kept["settings"]["seed"]
        warnings = [str(warning) for warning in kept["warnings"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not what this version writes ({error}); delete it and resume") from None
    info = TaskInfo(
        name=name,
        version=kept["version"],
        fingerprint=str(kept["settings"].get("rows")),
        prompt_sha256=kept["prompts_hash"],
        dataset=str(kept["settings"].get("source")),
        dataset_revision=kept["settings"].get("revision"),
        grader=f"lm-eval {kept['metric']}",
        grader_version=kept["settings"]["lm_eval"],
        sampling=SamplingConfig(temperature=0.0, max_new_tokens=limit or 1, samples=1, seed=seed),
    )
    row = task_result(
        name,
        variant.acts,
        scores,
        question_ids=kept["questions"],
        reasons=["ok" if sample["correct"] else "wrong" for sample in samples],
        finish_reasons=[sample.get("finish_reason", "stop") for sample in samples],
        tokens=[int(sample.get("tokens", 0)) for sample in samples],
        adapter_scores=adapter_scores,
    )
    return info, row, scores, warnings


def describe_suite(
    name: str,
    file: str | None = None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    revision: str | None = None,
) -> dict[str, Any]:
    """What scores of a retention suite depend on beside the model; its rows are read and checked for it.

    Args:
        file: local rows in place of the hub's.
        limit: the first questions of each subset only.
        revision: of the hub data set, in place of the pinned one.

    Raises:
        DataError: for rows that cannot be read or used.
    """
    suite = load_suite(name, max_new_tokens)
    questions = load_questions(suite, file, limit, revision)
    return {
        "version": suite.version,
        "source": questions.source,
        "revision": questions.revision,
        "rows": questions.fingerprints,
        "limit": limit,
        "max_new_tokens": suite.max_new_tokens,
    }


def all_measured(folder: Path, name: str, variants: Sequence[Variant]) -> bool:
    """Whether every row that is no control has been measured on a suite."""
    return all(_path(folder, variant, name).is_file() for variant in variants if variant.control is None)


def _path(folder: Path, variant: Variant, name: str) -> Path:
    return folder / "harness" / variant.slug / f"{name}.json"


def _stored(found: HarnessScores) -> dict[str, Any]:
    return {
        "version": found.version,
        "metric": found.metric,
        "scores": found.scores.tolist(),
        "harness_values": found.harness_values,
        "by_subset": {name: estimate.mean for name, estimate in found.by_subset.items()},
        "macro": found.macro,
        "questions": list(found.questions),
        "subsets": list(found.subsets),
        "prompts_hash": found.prompts_hash,
        "settings": found.settings,
        "warnings": list(found.warnings),
        "samples": found.samples,
    }
