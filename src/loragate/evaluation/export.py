"""An evaluation in other tools' formats: lm-evaluation-harness results and Inspect logs.

Both are plain dictionaries, ready for `loragate.files.write_json`; neither library is imported. They hold one variant of
a record each, because both formats describe one model. The numbers are the record's own, computed here and not by the
other tool: the standard errors are clustered by question.

A sample is a dictionary with the keys of `SAMPLE_KEYS`: `question_id`, `sample` (its index from 0), `prompt`, `text` (the
answer as generated), `extracted` (the answer found in it, or None), `correct`, `reason` (the grader's), `gold` and
`finish_reason` ("stop" or "length").
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from loragate.errors import DataError, nearest
from loragate.evaluation.results import EvaluationRecord, TaskInfo, TaskResult
from loragate.evaluation.statistics import Estimate

SAMPLE_KEYS = ("question_id", "sample", "prompt", "text", "extracted", "correct", "reason", "gold", "finish_reason")
Samples = Sequence[Mapping[str, Any]]


def to_lm_eval(
    record: EvaluationRecord,
    samples: Mapping[str, Samples] | None = None,
    *,
    variant: str = "gated",
    control: str | None = None,
) -> dict[str, Any]:
    """Return one variant's scores on all its tasks as lm-evaluation-harness writes them to `results_*.json`.

    Args:
        record: the evaluation.
        samples: by task; given, they appear under "samples", one entry per question with its K answers.
        variant, control: which rows of the record.

    The metrics are `avg_at_k`, `pass_at_<k>`, `majority_at_k`, `dft_rounded` and `truncated`, under the filter "none".

    Raises `DataError` where the record has no such variant or the samples are not those of the record.
    """
    results = [found for found in record.results if (found.variant, found.control) == (variant, control)]
    if not results:
        record.find(record.tasks[0].name if record.tasks else "any task", variant, control)
    infos = {info.name: info for info in record.tasks}
    better = {result.task: {name: name != "truncated" for name in _metrics(result)} for result in results}
    exported: dict[str, Any] = {
        "results": {result.task: {"alias": result.task, **_lm_eval_metrics(result)} for result in results},
        "group_subtasks": {result.task: [] for result in results},
        "configs": {result.task: _lm_eval_config(infos[result.task], result) for result in results},
        "versions": {result.task: infos[result.task].version for result in results},
        "n-shot": {result.task: 0 for result in results},
        "higher_is_better": better,
        "n-samples": {
            result.task: {"original": result.avg_at_k.questions, "effective": result.avg_at_k.questions}
            for result in results
        },
        "config": {
            "model": "loragate",
            "model_args": dict(record.models),
            "variant": results[0].name,
            "random_seed": record.seed,
            "numpy_seed": record.seed,
            "torch_seed": record.seed,
            "bootstrap_iters": 0,
            "gen_kwargs": None,
            "limit": None,
        },
        "git_hash": None,
        "date": _timestamp(record),
        "task_hashes": {result.task: infos[result.task].fingerprint for result in results},
        "model_source": "loragate",
        "model_name": _model_name(record, results[0]),
        "total_evaluation_time_seconds": str(record.seconds),
        "versions_of_packages": dict(record.versions),
    }
    if samples is not None:
        for task in samples:
            if task not in better:
                raise DataError(f"samples of the task {task!r} are not of this record{nearest(task, better)}.")
        exported["samples"] = {
            result.task: _lm_eval_samples(infos[result.task], result, samples[result.task])
            for result in results
            if result.task in samples
        }
    return exported


def to_inspect(
    record: EvaluationRecord, samples: Samples, task: str, *, variant: str = "gated", control: str | None = None
) -> dict[str, Any]:
    """Return one variant's evaluation on one task as an Inspect log, for `inspect view` and `read_eval_log`.

    Write it to a file that ends in .json. Samples of one question are epochs of one Inspect sample; the score is called
    "correct" and its explanation is the grader's reason. The record's comparison and versions are in the metadata.

    Raises `DataError` where the record has no such result or the samples are not those of the record.
    """
    result = record.find(task, variant, control)
    info = next(info for info in record.tasks if info.name == task)
    model = _model_name(record, result)
    grouped = _grouped(result, samples)
    created = _timestamp(record, whole=True)
    # the same record gives the same ids, so that an export made twice is one log and not two
    key = hashlib.sha256(f"{record.created}\n{result.name}\n{task}".encode()).hexdigest()
    metrics = {name: {"name": name, "value": value, "params": {}} for name, value in _inspect_metrics(result).items()}
    generation = {
        "temperature": info.sampling.temperature if result.temperature is None else result.temperature,
        "top_p": info.sampling.top_p,
        "max_tokens": info.sampling.max_new_tokens,
        "seed": record.seed,
    }
    count = result.avg_at_k.questions * result.avg_at_k.samples
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": key[:22],
            "run_id": key[22:44],
            "created": created,
            "task": task,
            "task_id": key[42:64],
            "task_version": info.version,
            "dataset": {
                "name": info.dataset,
                "samples": result.avg_at_k.questions,
                "sample_ids": list(result.question_ids),
                "shuffled": False,
            },
            "model": model,
            "model_generate_config": generation,
            "config": {"epochs": result.avg_at_k.samples, "epochs_reducer": ["mean"]},
            "packages": dict(record.versions),
            "metadata": {
                "variant": result.name,
                "models": dict(record.models),
                "task": dataclasses.asdict(info),
                "comparison": None if result.comparison is None else dataclasses.asdict(result.comparison),
                "adjusted_p": result.adjusted_p,
                "canary": dict(record.canary),
                "sandbox": record.sandbox,
            },
        },
        "plan": {"name": "plan", "steps": [{"solver": "generate", "params": {}}], "config": generation},
        "results": {
            "total_samples": count,
            "completed_samples": count,
            "scores": [{"name": "correct", "scorer": info.grader, "reducer": "mean", "params": {}, "metrics": metrics}],
        },
        "stats": {"started_at": created, "completed_at": created, "model_usage": {}},
        "samples": [_inspect_sample(sample, model) for rows in grouped.values() for sample in rows],
    }


def _metrics(result: TaskResult) -> dict[str, Estimate | float]:
    metrics: dict[str, Estimate | float] = {"avg_at_k": result.avg_at_k}
    metrics |= {f"pass_at_{k}": estimate for k, estimate in result.pass_at_k.items()}
    if result.majority_at_k is not None:
        metrics["majority_at_k"] = result.majority_at_k
    return metrics | {"dft_rounded": result.dft_rounded, "truncated": result.truncated}


def _lm_eval_metrics(result: TaskResult) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in _metrics(result).items():
        # the harness's own word for an error that was not computed
        mean, stderr = (value.mean, value.stderr) if isinstance(value, Estimate) else (value, "N/A")
        entries |= {f"{name},none": mean, f"{name}_stderr,none": stderr}
    return entries


def _inspect_metrics(result: TaskResult) -> dict[str, float]:
    average = result.avg_at_k
    values = {"mean": average.mean, "stderr": average.stderr, "ci_low": average.low, "ci_high": average.high}
    others = _metrics(result).items()
    return values | {name: v.mean if isinstance(v, Estimate) else v for name, v in others if name != "avg_at_k"}


def _lm_eval_config(info: TaskInfo, result: TaskResult) -> dict[str, Any]:
    temperature = info.sampling.temperature if result.temperature is None else result.temperature
    return {
        "task": info.name,
        "dataset_path": info.dataset,
        "dataset_kwargs": {"revision": info.dataset_revision},
        "output_type": "generate_until",
        "num_fewshot": 0,
        "repeats": result.avg_at_k.samples,
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": name != "truncated"}
            for name in _metrics(result)
        ],
        "generation_kwargs": {
            "until": [],
            "do_sample": temperature > 0,
            "temperature": temperature,
            "top_p": info.sampling.top_p,
            "max_gen_toks": info.sampling.max_new_tokens,
        },
        "metadata": {
            "version": info.version,
            "fingerprint": info.fingerprint,
            "prompt_sha256": info.prompt_sha256,
            "grader": f"{info.grader} {info.grader_version}",
            "lambda": result.constant,
        },
    }


def _lm_eval_samples(info: TaskInfo, result: TaskResult, samples: Samples) -> list[dict[str, Any]]:
    options = _lm_eval_config(info, result)["generation_kwargs"]
    entries = []
    for index, (question, rows) in enumerate(_grouped(result, samples).items()):
        doc = {"id": question, "prompt": rows[0]["prompt"], "gold": rows[0]["gold"]}
        entries.append(
            {
                "doc_id": index,
                "doc": doc,
                "target": _text(rows[0]["gold"]),
                "arguments": [[row["prompt"], options] for row in rows],
                "resps": [[row["text"]] for row in rows],
                "filtered_resps": [row["extracted"] for row in rows],
                "filter": "none",
                "metrics": ["avg_at_k"],
                "doc_hash": _sha256(repr(sorted(doc.items(), key=lambda item: item[0]))),
                "prompt_hash": _sha256(rows[0]["prompt"]),
                "target_hash": _sha256(_text(rows[0]["gold"])),
                "avg_at_k": result.question_scores[result.question_ids.index(question)],
                "correct": [bool(row["correct"]) for row in rows],
                "reasons": [row["reason"] for row in rows],
                "finish_reasons": [row["finish_reason"] for row in rows],
            }
        )
    return entries


def _inspect_sample(sample: Mapping[str, Any], model: str) -> dict[str, Any]:
    stop = "max_tokens" if sample["finish_reason"] == "length" else "stop"
    message = {"role": "assistant", "content": sample["text"], "source": "generate", "model": model}
    answer = None if sample["extracted"] is None else _text(sample["extracted"])
    return {
        "id": sample["question_id"],
        "epoch": sample["sample"] + 1,
        "input": sample["prompt"],
        "target": _text(sample["gold"]),
        "messages": [{"role": "user", "content": sample["prompt"], "source": "input"}, message],
        "output": {
            "model": model,
            "choices": [{"message": message, "stop_reason": stop}],
            "completion": sample["text"],
        },
        "scores": {"correct": {"value": float(sample["correct"]), "answer": answer, "explanation": sample["reason"]}},
        "metadata": {"reason": sample["reason"], "finish_reason": sample["finish_reason"]},
    }


def _grouped(result: TaskResult, samples: Samples) -> dict[str, list[Mapping[str, Any]]]:
    """Samples by question in the record's order, each question's in theirs, proved to be those of the record."""
    place = f"samples of {result.name} on {result.task}"
    grouped: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for index, sample in enumerate(samples):
        for key in SAMPLE_KEYS:
            if key not in sample:
                raise DataError(f"{place}: entry {index} lacks the key {key!r}; a sample has {', '.join(SAMPLE_KEYS)}.")
        grouped[sample["question_id"]].append(sample)
    for question in grouped:
        if question not in result.question_ids:
            raise DataError(f"{place}: question {question!r} is not in the record; give the samples of the same run.")
    for question, score in zip(result.question_ids, result.question_scores):
        rows = sorted(grouped[question], key=lambda row: row["sample"])
        if [row["sample"] for row in rows] != list(range(result.avg_at_k.samples)):
            raise DataError(
                f"{place}: question {question!r} has the samples {[row['sample'] for row in rows]}, expected 0 to "
                f"{result.avg_at_k.samples - 1}; give all samples of the same run."
            )
        found = sum(bool(row["correct"]) for row in rows) / len(rows)
        if abs(found - score) > 1e-9:
            raise DataError(
                f"{place}: question {question!r} scores {found:g} by its samples and {score:g} in the record; they were "
                "graded differently. Write the record again from these samples."
            )
        grouped[question] = rows
    return {question: grouped[question] for question in result.question_ids}


def _model_name(record: EvaluationRecord, result: TaskResult) -> str:
    return f"loragate/{record.models.get(result.variant, result.variant)}"


def _timestamp(record: EvaluationRecord, whole: bool = False) -> Any:
    """The record's time as seconds since 1970 or, `whole`, as ISO 8601; both formats need a time that can be read."""
    try:
        moment = datetime.fromisoformat(record.created)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise DataError(f"the record's key 'created' is {record.created!r}; expected ISO 8601 with a time zone.")
    return moment.isoformat() if whole else moment.timestamp()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
