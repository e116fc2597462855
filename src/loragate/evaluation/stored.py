"""An evaluation read back from its folder: to judge it again with another grader, or to hand its samples on.

Neither the model nor the data set is needed: questions, prompts, task files and samples lie in the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loragate.errors import DataError
from loragate.evaluation.evaluate import Evaluation
from loragate.evaluation.judging import JudgeSettings, grader_for, read_grades
from loragate.evaluation.prepared import Prepared, read_questions
from loragate.evaluation.results import EvaluationRecord, read_record
from loragate.evaluation.tasks import Questions, load_task
from loragate.evaluation.variants import Variant
from loragate.generation import SamplingConfig, read_samples


def open_evaluation(folder: Path, grader: str = "", judging: JudgeSettings | None = None) -> Evaluation:
    """The evaluation of a folder, ready to be judged again.

    Raises:
        DataError: if the folder holds none, or what it holds cannot be read.
    """
    path = folder / "eval.json"
    if not path.is_file():
        raise DataError(f"{folder} is not the folder of an evaluation: it has no eval.json")
    try:
        identity: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        variants = [Variant(**row) for row in identity["variants"]]
        prepared = [_prepared(folder, row) for row in identity["tasks"]]
        # a record holds the canary; a run that was stopped before its end has none yet
        kept = folder / "results.json"
        return Evaluation(
            folder,
            prepared,
            variants,
            models=identity["models"],
            canary=read_record(kept).canary if kept.is_file() else {},
            seed=identity["seed"],
            judging=judging,
            grader=grader,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not what this version writes ({error}); run the evaluation again") from None


def _prepared(folder: Path, row: dict[str, Any]) -> Prepared:
    task = load_task(folder / "tasks" / f"{row['task']}.yaml")
    questions = read_questions(folder, row["task"])
    return Prepared(
        task,
        Questions(questions, row["source"], row["revision"], row["questions"]),
        tuple(question.prompt for question in questions),
        SamplingConfig(**row["sampling"]),
    )


def graded_samples(folder: Path, record: EvaluationRecord, task: str, variant: Variant) -> list[dict[str, Any]]:
    """The samples of one row on one task with their verdicts, as `export.py` wants them.

    Raises:
        DataError: if samples or grades are missing.
    """
    info = next(info for info in record.tasks if info.name == task)
    questions = read_questions(folder, task)
    samples = read_samples(folder / "samples" / variant.slug / f"{task}.jsonl")
    grades = read_grades(folder / "grades" / info.grader / variant.slug / f"{task}.jsonl", samples)
    if grades is None:
        raise DataError(f"{folder}: the answers of {variant.name} to {task} are not judged by {info.grader} yet")
    return [
        {
            "question_id": questions[sample.question].id,
            "sample": sample.sample,
            "prompt": questions[sample.question].prompt,
            "text": sample.text,
            "extracted": grade.extracted,
            "correct": grade.correct,
            "reason": grade.reason,
            "gold": questions[sample.question].gold,
            "finish_reason": sample.finish_reason,
        }
        for sample, grade in zip(samples, grades, strict=True)
    ]


def changed_verdicts(folder: Path, evaluation: Evaluation, before: EvaluationRecord) -> list[dict[str, Any]]:
    """Answers that the evaluation's grader and the earlier record's grader judge differently."""
    changes: list[dict[str, Any]] = []
    graders = {info.name: info.grader for info in before.tasks}
    for prepared in evaluation.tasks:
        name, questions = prepared.task.name, prepared.questions.questions
        new = grader_for(prepared.task, evaluation.grader)
        for variant in evaluation.variants:
            samples = read_samples(folder / "samples" / variant.slug / f"{name}.jsonl")
            before_path, now_path = (
                folder / "grades" / grader / variant.slug / f"{name}.jsonl" for grader in (graders[name], new)
            )
            earlier, later = read_grades(before_path, samples), read_grades(now_path, samples)
            if earlier is None or later is None:
                continue
            for sample, old, now in zip(samples, earlier, later, strict=True):
                if old.correct != now.correct:
                    question = questions[sample.question]
                    changes.append(
                        {
                            "task": name,
                            "variant": variant.name,
                            "question": question.id,
                            "sample": sample.sample,
                            "gold": question.gold,
                            graders[name]: {"correct": old.correct, "extracted": old.extracted, "reason": old.reason},
                            new: {"correct": now.correct, "extracted": now.extracted, "reason": now.reason},
                        }
                    )
    return changes
