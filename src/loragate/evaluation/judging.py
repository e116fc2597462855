"""From samples to verdicts: which grader a task names, and the pools that it runs in.

Math answers go to worker processes, programs to the sandbox; the rest is a string comparison. Grading reads
stored samples and stored questions only, so it can be repeated with another grader long after the model is gone.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import ConfigError, DataError, nearest
from loragate.evaluation.answers import EXTRACTORS, Grade, grade_text, strip_reasoning
from loragate.evaluation.grading import MATH_GRADERS, GradingPool
from loragate.evaluation.grading.numeric import compile_pattern, grade_last_number, regex_grader
from loragate.evaluation.lm_eval_tasks import grade_by_harness, require_harness
from loragate.evaluation.sandbox import KINDS, Limits, grade_codes, require_sandbox
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import Question, Task
from loragate.evaluation.tasks.task import OwnGrader
from loragate.files import write_text
from loragate.generation import OnProgress, Sample
from loragate.records import package_versions, read_lines
from loragate.validate import validate
from loragate.world.problems import Problem, is_correct_response
from loragate.world.vocabulary import EOS

MATH_GRADER_NAMES = tuple(MATH_GRADERS)
CODE_GRADERS = tuple(KINDS)
REFERENCE_GRADERS = (*MATH_GRADER_NAMES, *EXTRACTORS, "gsm8k", "regex")
"""Graders that compare a response with a right answer."""
ANY_FORMAT_GRADERS = ("gsm8k", "regex")
"""Of those, the graders of any form: they can judge what another one does, and another one what they do."""
GRADERS = (*REFERENCE_GRADERS, *CODE_GRADERS, "tiny")
MEMORY_MB = 2048
"""Of a grading process or a program."""


def resolve_grader(task: Task, name: str = "") -> str:
    """The grader to use: the task's own, or `name` where it can judge the same kind of answer.

    Raises:
        ConfigError: for an unknown grader, or one of another kind.
    """
    if not name or name == task.grader:
        return task.grader
    if name not in GRADERS:
        raise ConfigError(f"unknown grader {name!r}{nearest(name, GRADERS)}; known: {', '.join(GRADERS)}")
    both = {name, task.grader}
    return (
        name
        if both <= set(MATH_GRADER_NAMES) or (both <= set(REFERENCE_GRADERS) and both & set(ANY_FORMAT_GRADERS))
        else task.grader
    )


def pattern_of(task: Task, settings: GradingSettings) -> str:
    """The pattern of the grader regex: that of the settings where they name this grader, else the task's."""
    return settings.pattern if settings.grader == "regex" else task.pattern


def grade_samples(
    task: Task,
    questions: Sequence[Question],
    samples: Sequence[Sample],
    grader: str,
    settings: GradingSettings | None = None,
    on_progress: OnProgress | None = None,
) -> list[Grade]:
    """One grade per sample, in order. A grader that hangs or dies costs one answer, marked so.

    Raises:
        ConfigError: if the sandbox tier is not available here.
    """
    settings = settings or GradingSettings()
    theirs = [questions[sample.question] for sample in samples]
    texts = [sample.text for sample in samples]
    if grader in REFERENCE_GRADERS or task.own_grader is not None:  # a draft is no answer
        texts = list(map(strip_reasoning, texts))
    if task.own_grader is not None:
        return [grade_by_function(task.own_grader, grader, text, question) for text, question in zip(texts, theirs)]
    if grader in (*MATH_GRADER_NAMES, "regex"):
        pairs = [(text, question.gold) for text, question in zip(texts, theirs)]
        tolerances = [question.tolerance for question in theirs] if grader in MATH_GRADER_NAMES else None
        judged = grader if grader in MATH_GRADER_NAMES else regex_grader(pattern_of(task, settings))
        with GradingPool(judged, settings.workers, settings.timeout, MEMORY_MB) as pool:
            return pool.grade(pairs, on_progress, tolerances=tolerances)
    if grader == "gsm8k":
        return [grade_last_number(text, question.gold) for text, question in zip(texts, theirs)]
    if grader in CODE_GRADERS:
        rows, limits = [question.row for question in theirs], Limits(settings.timeout, MEMORY_MB)
        return grade_codes(grader, rows, texts, settings.workers, settings.sandbox, limits, on_progress)
    if grader == "tiny":
        ended = [sample.finish_reason == "stop" for sample in samples]
        return [grade_tiny(question.row, text, end) for question, text, end in zip(theirs, texts, ended)]
    if grader == "lm-eval":
        return grade_by_harness(task, questions, samples)
    return [grade_text(text, question.gold, grader) for question, text in zip(theirs, texts)]


def grade_by_function(function: OwnGrader, name: str, text: str, question: Question) -> Grade:
    """The verdict of a Python caller's function; its errors are no wrong answers (DataError)."""
    try:
        correct = function(text, question.gold, dict(question.row))
    except Exception as error:
        raise DataError(
            f"the grader {name} failed on an answer to question {question.id} ({type(error).__name__}: {error}): {text!r:.200}"
        ) from error
    if not isinstance(correct, bool | np.bool_):
        raise DataError(
            f"the grader {name} returned {correct!r:.80} for an answer to question {question.id}; expected True or False"
        )
    # wrong answers vote where they are spelled alike, as those of the grader exact
    return Grade(bool(correct), text.strip() or None, "ok" if correct else "wrong")


def grade_tiny(row: Mapping[str, Any], response: str, finished: bool) -> Grade:
    """The tiny world's strict verdict on one response.

    Args:
        row: the question's row.
        response: decoded text.
        finished: whether the model ended the response itself.
    """
    problem = Problem(row["prompt"], row["answer"], row["kind"], row["operations"])
    words = response.split(EOS)[0].split()
    # arithmetic ends with "answer" and a digit; all other kinds are the answer as a whole
    extracted = (words[-1] if words[-2:-1] == ["answer"] else None) if problem.kind == "arithmetic" else " ".join(words)
    if not finished:
        return Grade(False, extracted or None, "unfinished")
    correct = is_correct_response(problem, response, finished)
    reason = "ok" if correct else ("wrong" if extracted else "no_answer")
    return Grade(correct, extracted or None, reason)


def require_graders(tasks: Sequence[Task], settings: GradingSettings) -> None:
    """Refuse, before anything is sampled, what could not be judged afterwards.

    Raises:
        ConfigError: for an unknown grader, an absent library, or a sandbox tier that does not work here.
    """
    graders = {resolve_grader(task, settings.grader) for task in tasks}
    if settings.grader and settings.grader not in graders:
        raise ConfigError(f"--grader {settings.grader} has no effect: none of the tasks has answers that it can judge")
    if settings.pattern and settings.grader != "regex":
        raise ConfigError("--pattern has no effect without --grader regex; give both, or leave it out")
    for task in tasks:
        if resolve_grader(task, settings.grader) == "regex":
            place = "--pattern" if settings.grader == "regex" else f"{task.path.name or 'the dev set'}: pattern"
            compile_pattern(pattern_of(task, settings), place)
    if "math_verify" in graders and find_spec("math_verify") is None:
        raise ConfigError(
            'the grader math_verify needs math-verify; pip install ".[math]" in a checkout, or use the grader default'
        )
    if "lm-eval" in graders:
        require_harness()
    if graders & set(CODE_GRADERS):
        require_sandbox(settings.sandbox)


def grader_version(grader: str) -> str:
    """What a verdict depends on beside the answer."""
    libraries = {"math_verify": ("math-verify", "sympy"), "lm-eval": ("lm_eval",)}.get(grader, ())
    packages = ("loragate", *libraries)
    versions = package_versions(packages)
    return ", ".join(f"{package} {versions[package]}" for package in packages)


def grading_fingerprint(
    task: Task, questions: Sequence[Question], grader: str, settings: GradingSettings, samples: Sequence[Sample]
) -> dict[str, Any]:
    """What verdicts on file must share to be used again.

    Grader, versions, limits and, for programs, the sandbox's tier; and "answers", SHA-256 (hex) over what graders see of the
    samples and of the questions: a redrawn answer, or one whose gold or row was mended, must not get the verdict of before.
    """
    kept: dict[str, Any] = {"grader": grader, "version": grader_version(grader)}
    if grader in (*MATH_GRADER_NAMES, *CODE_GRADERS):
        kept |= {"timeout_s": float(settings.timeout), "memory_mb": MEMORY_MB}
    if grader in CODE_GRADERS:
        kept["sandbox"] = settings.sandbox
    if task.own_grader is not None:
        with suppress(OSError, TypeError):  # typed into an interpreter, or built in
            kept["source"] = hashlib.sha256(inspect.getsource(task.own_grader).encode()).hexdigest()
    if grader == "regex":
        kept["pattern"] = pattern_of(task, settings)
    seen = hashlib.sha256()
    for question in questions:
        seen.update(json.dumps([question.gold, question.tolerance, question.row], default=str).encode())
    for sample in samples:
        seen.update(json.dumps([sample.question, sample.sample, sample.text, sample.finish_reason]).encode())
    return kept | {"answers": seen.hexdigest()}


@dataclass(frozen=True, kw_only=True)
class StoredGrade(Grade):
    """A verdict with the sample that it is on, as a line of a file."""

    question: int
    sample: int


def write_grades(path: Path, samples: Sequence[Sample], grades: Sequence[Grade], judge: Mapping[str, Any]) -> None:
    """A line that says who judged (`judged_by`), then one per sample; the file appears whole or not at all."""
    lines: list[dict[str, Any]] = [{"judged_by": dict(judge)}]
    for sample, grade in zip(samples, grades, strict=True):
        lines.append({"question": sample.question, "sample": sample.sample, **asdict(grade)})
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_grades(path: Path, samples: Sequence[Sample], judge: Mapping[str, Any] | None = None) -> list[Grade] | None:
    """The grades of these samples in their order, or None where the file is absent or judges other samples.

    Args:
        judge: given, grades by another than this (`grading_fingerprint`) are left aside too.

    Raises:
        DataError: naming the line that is not a grade.
    """
    if not path.exists():
        return None
    remedy = "delete the file and grade again"
    (where, first), *lines = read_lines(path, remedy)
    if not isinstance(first, dict) or "judged_by" not in first:
        raise DataError(f"{where}: expected judged_by; {remedy}")
    if judge is not None and first["judged_by"] != dict(judge):
        return None
    stored = [validate(StoredGrade, line, where, DataError, remedy) for where, line in lines]
    found = {(one.question, one.sample): Grade(one.correct, one.extracted, one.reason, one.scores) for one in stored}
    keys = [(sample.question, sample.sample) for sample in samples]
    return [found[key] for key in keys] if set(keys) == set(found) else None
