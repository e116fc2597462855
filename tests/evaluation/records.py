"""A small evaluation record and its samples, for the tests of records."""

from __future__ import annotations

from typing import Any

import numpy as np

from loragate.evaluation.answers import Grade
from loragate.evaluation.results import EvaluationRecord, TaskInfo, TaskResult, task_result
from loragate.generation import Sample, SamplingConfig

IDS = ("sum-1", "sum-2", "sum-3")
GATED = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
ADAPTER = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 0]])
ANSWERS = [["4", "4", "4"], ["6", "6", "7"], ["1", "2", None]]
FINISH = ["stop"] * 8 + ["length"]
REASONS = ["ok"] * 5 + ["wrong"] * 3 + ["no_box"]


def answered(scores: Any, finish: Any = "stop", answers: Any = None, reasons: Any = None) -> tuple[Any, Any]:
    """Answers to questions with these verdicts [Q, K], which grow longer from 10 tokens on, and the verdicts."""
    table = np.array(scores)
    samples, grades = [], []
    for place, (question, sample) in enumerate(np.ndindex(*table.shape)):
        right, end = bool(table[question, sample]), finish if isinstance(finish, str) else finish[place]
        samples.append(Sample(question, sample, "", tuple(range(10 + place)), end, 0.7))
        reason = ("ok" if right else "wrong") if reasons is None else reasons[place]
        grades.append(Grade(right, answers and answers[question][sample], reason))
    return samples, grades


def make_result(variant: Any, compared: bool = True, votes: bool = True, **others: Any) -> TaskResult:
    """Nine samples, three of each of three questions, compared with those of `ADAPTER`."""
    adapter = task_result("sums", "adapter", IDS, *answered(ADAPTER)) if compared else None
    told = {"votes": votes, "adapter": adapter, "seconds": 1.5, **others}
    return task_result("sums", variant, IDS, *answered(GATED, FINISH, ANSWERS, REASONS), **told)


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
            make_result("adapter", compared=False),
            make_result("adapter", control="T=0.6", temperature=0.6, votes=False),
            make_result("gated"),
        ),
        seed=7,
        sandbox="bubblewrap",
        versions={"loragate": "0.0.1", "python": "3.11.7"},
        seconds=12.5,
        canary={"adapter_from_base": 0.3},
    )
