"""What lm-evaluation-harness measured, as rows of the record, kept on disk so that a resumed run repeats none of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import DataError
from loragate.evaluation.harness_scores import HarnessScores
from loragate.evaluation.results import TaskInfo, TaskResult, task_result
from loragate.evaluation.variants import Variant
from loragate.files import write_json
from loragate.generation import SamplingConfig


def retention_result(
    name: str,
    variant: Variant,
    folder: Path,
    measure: Callable[[], HarnessScores],
    adapter_scores: np.ndarray | None = None,
) -> tuple[TaskInfo, TaskResult, np.ndarray]:
    """One variant on one retention suite: read from `folder` if it was measured before, else measured and kept.

    Args:
        name: of our task.
        folder: run folder of the evaluation.
        measure: asks the harness.
        adapter_scores: the plain adapter's scores [Q, 1], to be compared with.

    Returns:
        (task, row, scores [Q, 1]).
    """
    path = folder / "harness" / variant.slug / f"{name}.json"
    if not path.exists():
        write_json(path, _stored(measure()))
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        scores = np.array(kept["scores"], dtype=float)
        samples = kept["samples"]
        limit = kept["settings"]["max_new_tokens"]
        seed = kept["settings"]["seed"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not what this version writes ({error}); delete it and resume") from None
    info = TaskInfo(
        name=name,
        version=kept["version"],
        fingerprint=str(kept["settings"].get("rows")),
        prompt_sha256=kept["prompts_hash"],
        dataset=str(kept["settings"].get("source")),
        dataset_revision=None,
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
    return info, row, scores


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
