"""A small evaluation record and its samples, for the tests of records."""

from __future__ import annotations

from typing import Any

import numpy as np

from loragate.evaluation.results import EvaluationRecord, TaskInfo, TaskResult, task_result
from loragate.generation import SamplingConfig

IDS = ("sum-1", "sum-2", "sum-3")
GATED = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
ADAPTER = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 0]])
ANSWERS = [["4", "4", "4"], ["6", "6", "7"], ["1", "2", None]]
FINISH = ["stop"] * 8 + ["length"]
REASONS = ["ok"] * 5 + ["wrong"] * 3 + ["no_box"]


def make_result(variant: Any, **others: Any) -> TaskResult:
    """Nine samples, three of each of three questions."""
    arguments: dict[str, Any] = {
        "question_ids": IDS,
        "reasons": REASONS,
        "finish_reasons": FINISH,
        "tokens": list(range(10, 19)),
        "answers": ANSWERS,
        "adapter_scores": ADAPTER,
        "entropy": 0.7,
        "seconds": 1.5,
    }
    return task_result("sums", variant, GATED, **(arguments | others))


def make_record() -> EvaluationRecord:
    """Base, adapter, one control and the gated adapter on one task."""
    info = TaskInfo(
        name="sums",
        version="1",
        fingerprint="f" * 64,
        prompt_sha256="a" * 64,
        dataset="sums.jsonl",
        dataset_revision=None,
        grader="default",
        grader_version="1",
        sampling=SamplingConfig(temperature=1.0, top_p=0.95, max_new_tokens=64, samples=3),
    )
    return EvaluationRecord(
        created="2025-01-31T12:00:00+00:00",
        models={"base": "tiny", "adapter": "runs/adapter", "gated": "runs/gated"},
        tasks=(info,),
        results=(
            make_result("base"),
            make_result("adapter", adapter_scores=None),
            make_result("adapter", control="T=0.6", temperature=0.6, answers=None, entropy=None),
            make_result("gated"),
        ),
        seed=7,
        sandbox="bubblewrap",
        versions={"loragate": "0.0.1", "python": "3.11.7"},
        seconds=12.5,
        canary={"adapter_from_base": 0.3},
    )
