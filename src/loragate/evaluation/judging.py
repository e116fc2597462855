"""From samples to verdicts: which grader a task names, and the pools that it runs in.

Math answers go to killable worker processes, programs to the sandbox; the rest is a string comparison. Grading reads
stored samples and stored questions only, so it can be repeated with another grader long after the model is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.grade import Grade
from loragate.evaluation.tasks import Question, Task
from loragate.files import write_text
from loragate.generation import Sample
from loragate.records import package_versions

OnProgress = Callable[[int, int], None]
MATH = ("default", "math_verify", "dft")
CODE = ("humaneval", "mbpp")
TEXT = ("choice", "exact", "tiny")
GRADERS = (*MATH, *CODE, *TEXT)
NOTHING = "\\text{no answer}"
"""A gold that no answer equals, for when only the extracted answers matter."""


@dataclass(frozen=True)
class JudgeSettings:
    """How answers are judged.

    Attributes:
        workers: grading processes.
        timeout_s: seconds after which an answer is given up (math) or a program killed (code).
        memory_mb: memory of a worker or program.
        sandbox: tier in which programs run: bubblewrap or rlimits.
    """

    workers: int = 2
    timeout_s: float = 10.0
    memory_mb: int = 2048
    sandbox: str = "bubblewrap"


def grader_for(task: Task, name: str = "") -> str:
    """The grader to use: the task's own, or `name` where it can judge the same kind of answer.

    Raises:
        ConfigError: for an unknown grader, or one of another kind.
    """
    if not name or name == task.grader:
        return task.grader
    if name not in GRADERS:
        raise ConfigError(f"unknown grader {name!r}{nearest(name, GRADERS)}; known: {', '.join(GRADERS)}")
    return name if {name, task.grader} <= set(MATH) else task.grader


def judge(
    task: Task,
    questions: Sequence[Question],
    samples: Sequence[Sample],
    grader: str,
    settings: JudgeSettings | None = None,
    on_progress: OnProgress | None = None,
) -> list[Grade]:
    """One grade per sample, in order. A grader that hangs or dies costs one answer, marked so.

    Raises:
        ConfigError: if the sandbox tier is not available here.
    """
    settings = settings or JudgeSettings()
    if grader in MATH:
        return _judge_math(questions, samples, grader, settings, on_progress)
    if grader in CODE:
        return _judge_code(questions, samples, grader, settings, on_progress)
    return [_judge_text(task, grader, questions[sample.question], sample) for sample in samples]


def require_graders(tasks: Sequence[Task], name: str, settings: JudgeSettings) -> None:
    """Refuse, before anything is sampled, what could not be judged afterwards.

    Raises:
        ConfigError: for an unknown grader, an absent library, or a sandbox tier that does not work here.
    """
    graders = {grader_for(task, name) for task in tasks}
    if name and not graders & {name}:
        raise ConfigError(f"--grader {name} has no effect: none of the tasks has math answers")
    if graders & set(MATH):
        try:
            import_module("math_verify")
        except ImportError as error:
            raise ConfigError(f'math answers need math-verify ({error}); pip install "loragate[math]"') from error
    if graders & set(CODE):
        from loragate.evaluation.sandbox.programs import root_style_of

        root_style_of(settings.sandbox)


def grader_version(grader: str) -> str:
    """What a verdict depends on beside the answer."""
    packages = ("loragate", "math-verify", "sympy") if grader in MATH else ("loragate",)
    return ", ".join(
        f"{package} {version}" for package, version in package_versions(packages).items() if package in packages
    )


def judged_by(grader: str, settings: JudgeSettings) -> dict[str, Any]:
    """What verdicts on file must share to be used again: grader, versions, limits and, for programs, the sandbox's tier."""
    kept: dict[str, Any] = {"grader": grader, "version": grader_version(grader)}
    if grader in (*MATH, *CODE):
        kept |= {"timeout_s": float(settings.timeout_s), "memory_mb": settings.memory_mb}
    return kept | ({"sandbox": settings.sandbox} if grader in CODE else {})


def answers_hash(samples: Sequence[Sample]) -> str:
    """SHA-256 (hex) over what graders see of the samples: a redrawn answer must not get the verdict of the one before."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps([sample.question, sample.sample, sample.text, sample.finish_reason]).encode())
    return digest.hexdigest()


def with_answer(question: Question, answer: str) -> Question:
    """The question with another reference answer, for graders that read it from the gold or from the row."""
    return replace(question, gold=answer, row={**question.row, "answer": answer})


def _judge_math(
    questions: Sequence[Question],
    samples: Sequence[Sample],
    grader: str,
    settings: JudgeSettings,
    on_progress: OnProgress | None,
) -> list[Grade]:
    from loragate.evaluation.grading import GradingPool

    pairs = [(sample.text, questions[sample.question].gold) for sample in samples]
    with GradingPool(grader, settings.workers, settings.timeout_s, settings.memory_mb) as pool:
        tolerances = [_tolerance(questions[sample.question]) for sample in samples]
        return pool.grade(pairs, on_progress, tolerances=tolerances)


def _tolerance(question: Question) -> float | None:
    """The absolute error that a data set allows, as OlympiadBench does in its column `error`."""
    stated = question.row.get("error")
    try:
        return float(stated) if stated else None
    except (TypeError, ValueError):
        raise DataError(
            f"{question.place}: the column 'error' holds {stated!r}; expected a number, such as 1e-1"
        ) from None


def _judge_code(
    questions: Sequence[Question],
    samples: Sequence[Sample],
    grader: str,
    settings: JudgeSettings,
    on_progress: OnProgress | None,
) -> list[Grade]:
    from loragate.evaluation.sandbox import Limits
    from loragate.evaluation.sandbox.code import grade_codes

    rows = [questions[sample.question].row for sample in samples]
    limits = Limits(seconds=settings.timeout_s, memory_mb=settings.memory_mb)
    texts = [sample.text for sample in samples]
    return grade_codes(grader, rows, texts, settings.workers, settings.sandbox, limits, on_progress)


def _judge_text(task: Task, grader: str, question: Question, sample: Sample) -> Grade:
    from loragate.evaluation.tasks.extractors import grade_choice, grade_exact
    from loragate.evaluation.tasks.tiny import grade_tiny

    if grader == "tiny":
        return grade_tiny(question.row, sample.text, sample.finish_reason == "stop")
    if grader == "choice":
        return grade_choice(sample.text, question.gold)
    return grade_exact(sample.text, question.gold, task.extractor)


def write_grades(path: Path, samples: Sequence[Sample], grades: Sequence[Grade], judge: Mapping[str, Any]) -> None:
    """A line that says who judged (`judged_by`), then one per sample: question, sample, correct, extracted, reason.

    The file appears whole or not at all.
    """
    lines = (
        json.dumps(
            {
                "question": sample.question,
                "sample": sample.sample,
                "correct": grade.correct,
                "extracted": grade.extracted,
                "reason": grade.reason,
            },
            ensure_ascii=False,
        )
        for sample, grade in zip(samples, grades, strict=True)
    )
    write_text(path, "".join(line + "\n" for line in (json.dumps({"judged_by": judge}), *lines)))


def read_grades(path: Path, samples: Sequence[Sample], judge: Mapping[str, Any] | None = None) -> list[Grade] | None:
    """The grades of these samples in their order, or None where the file is absent or judges other samples.

    Args:
        judge: given, grades by another than this (`judged_by`) are left aside too.

    Raises:
        DataError: naming the line that is not a grade.
    """
    if not path.exists():
        return None
    found: dict[tuple[int, int], Grade] = {}
    # not splitlines: an extracted answer may hold unusual line separators, which JSON leaves as they are
    for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
        try:
            row: Mapping[str, Any] = json.loads(line)
            if number == 1 and "judged_by" in row:
                if judge is not None and row["judged_by"] != dict(judge):
                    return None
                continue
            found[row["question"], row["sample"]] = Grade(bool(row["correct"]), row["extracted"], str(row["reason"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a grade ({error}); delete the file and grade again") from None
    keys = [(sample.question, sample.sample) for sample in samples]
    return [found[key] for key in keys] if set(keys) == set(found) else None
