"""The probe: a small set of questions on which candidates are compared, with labels or without.

A labelled probe scores against its answers. An unlabelled one first asks the adapter itself, cool, and scores against its
majority (`agreement.py`). Both return one number per question and sample, so that everything after is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from loragate.errors import DataError
from loragate.evaluation import judging
from loragate.evaluation.tasks import Question, Task
from loragate.generation import Engine, OnProgress, Sample, SamplingConfig
from loragate.selection.agreement import Majority, majority, why_unusable

MIN_QUESTIONS = 32
COOL, COOL_SAMPLES = 0.3, 8


@dataclass(frozen=True)
class ProbeScores:
    """What one candidate did on the probe.

    Attributes:
        scores: float64 [questions, samples], 1.0 where the sample counts.
        samples: the samples, ordered by (question, sample).
        extracted: the answer taken from each sample, None where there was none.
    """

    scores: np.ndarray
    samples: list[Sample]
    extracted: list[str | None]

    @property
    def signs(self) -> dict[str, float]:
        """Share of answers that ended, mean length in tokens, share of distinct answers per question."""
        finished = [sample.finish_reason == "stop" for sample in self.samples]
        lengths = [len(sample.token_ids) for sample in self.samples]
        per_question: dict[int, set[str]] = {}
        for sample in self.samples:
            per_question.setdefault(sample.question, set()).add(sample.text)
        each = len(self.samples) / len(per_question)
        distinct = [len(texts) / each for texts in per_question.values()]
        return {
            "finished": float(np.mean(finished)),
            "tokens": float(np.mean(lengths)),
            "distinct": float(np.mean(distinct)),
        }


@dataclass(frozen=True)
class Probe:
    """Questions, how they are asked, and against what they are judged.

    Attributes:
        kind: "labelled", or "agreement" with the adapter's majority.
        task: prompt, grader and sampling of the questions.
        questions: `gold` is the label, or the majority answer.
        prompts: rendered prompts, one per question.
        sampling: how candidates are sampled.
        judging: how answers are judged.
        source: where the questions come from.
        majority: of an "agreement" probe.
    """

    kind: Literal["labelled", "agreement"]
    task: Task
    questions: tuple[Question, ...]
    prompts: tuple[str, ...]
    sampling: SamplingConfig
    judging: judging.JudgeSettings
    source: str
    majority: Majority | None = None

    def score(self, engine: Engine, on_progress: OnProgress | None = None) -> ProbeScores:
        """Sample the model as it stands and judge its answers."""
        samples = engine.generate(self.prompts, self.sampling, on_progress)
        grades = judging.judge(self.task, self.questions, samples, self.task.grader, self.judging)
        scores = np.zeros((len(self.questions), self.sampling.samples))
        for sample, grade in zip(samples, grades, strict=True):
            scores[sample.question, sample.sample] = float(grade.correct)
        return ProbeScores(scores, samples, [grade.extracted for grade in grades])

    @property
    def fingerprint(self) -> str:
        """SHA-256 over prompts, reference answers and sampling."""
        content = [
            list(self.prompts),
            [q.gold for q in self.questions],
            dataclasses.asdict(self.sampling),
            self.task.grader,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """What the artifact records of the probe."""
        record: dict[str, Any] = {
            "kind": self.kind,
            "source": self.source,
            "questions": len(self.questions),
            "samples": self.sampling.samples,
            "temperature": self.sampling.temperature,
            "grader": self.task.grader,
            "task": f"{self.task.name} v{self.task.version}",
        }
        if self.majority is not None:
            record["majority_share"] = self.majority.share
            record["extracted"] = self.majority.extracted
        return record


def labelled_probe(
    task: Task,
    questions: Sequence[Question],
    prompts: Sequence[str],
    sampling: SamplingConfig,
    judge_settings: judging.JudgeSettings,
    source: str,
) -> Probe:
    """A probe with answers; `prompts` are rendered, one per question.

    Raises:
        DataError: for fewer than 32 questions.
    """
    if len(questions) < MIN_QUESTIONS:
        raise DataError(
            f"the probe {source} has {len(questions)} questions; fewer than {MIN_QUESTIONS} cannot tell ranges apart, so "
            "nothing would be picked on them"
        )
    return Probe("labelled", task, tuple(questions), tuple(prompts), sampling, judge_settings, source)


def agreement_probe(
    task: Task,
    questions: Sequence[Question],
    prompts: Sequence[str],
    adapter: Engine,
    sampling: SamplingConfig,
    judge_settings: judging.JudgeSettings,
    source: str,
    on_progress: OnProgress | None = None,
) -> tuple[Probe | None, str]:
    """A probe without answers: the adapter's majority at T = 0.3 stands in for them.

    Args:
        prompts: rendered, one per question.
        adapter: answers as the untouched adapter.

    Returns:
        (the probe, "") or (None, why agreement cannot select here).
    """
    if task.grader in judging.CODE:
        return None, "programs have no extractable answer that could agree"
    cool = dataclasses.replace(sampling, temperature=COOL, samples=COOL_SAMPLES, seed=sampling.seed + 1)
    samples = adapter.generate(prompts, cool, on_progress)
    # an impossible gold: only what can be extracted matters here
    blank = [dataclasses.replace(question, gold=judging.NOTHING) for question in questions]
    extracted: list[list[str | None]] = [[] for _ in questions]
    for sample, grade in zip(samples, judging.judge(task, blank, samples, task.grader, judge_settings), strict=True):
        extracted[sample.question].append(grade.extracted)
    found = majority(extracted)
    why = why_unusable(found)
    if why is not None:
        return None, why
    kept = found.usable
    return (
        Probe(
            "agreement",
            task,
            tuple(judging.with_answer(task, questions[index], str(found.answers[index])) for index in kept),
            tuple(prompts[index] for index in kept),
            sampling,
            judge_settings,
            source,
            found,
        ),
        "",
    )


def require_disjoint(questions: Sequence[Question], others: Sequence[str], what: str) -> None:
    """Refuse a probe that shares prompts with other rows (letters and digits compared, case ignored).

    Raises:
        DataError: naming the first shared question and how many there are.
    """
    seen = {_key(text) for text in others}
    shared = [question for question in questions if _key(question.prompt) in seen]
    if shared:
        raise DataError(
            f"{shared[0].place}: {len(shared)} of {len(questions)} probe questions are also among {what}; a range picked on "
            "questions that were trained on, or that the result is reported on, means nothing. Take other questions"
        )


def _key(text: str) -> str:
    return re.sub(r"\W+", "", text).lower()
