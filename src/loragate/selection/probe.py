"""The probe: a small set of questions on which candidates are compared, with labels or without.

A labelled probe scores against its answers. An unlabelled one first asks the adapter itself, cool: where its samples agree on
an answer, that stands in for the label. This rests on the adapter being right more often than not wherever it is confident;
where its majority is systematically wrong, agreement rewards the same mistake. Both return one number per question and sample,
so that everything after is the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loragate.errors import ConfigError, DataError
from loragate.evaluation import judging
from loragate.evaluation.answers import why_no_gold
from loragate.evaluation.settings import GradingSettings
from loragate.evaluation.tasks import Question, Task
from loragate.files import read_json, write_json
from loragate.generation import Engine, OnProgress, Sample, SamplingConfig
from loragate.selection.forms import form_of
from loragate.selection.guards import GuardLimits, Reading, as_answers, exceeded, generation_stats

COOL, COOL_SAMPLES = 0.3, 8
MIN_EXTRACTED = 0.5
MIN_QUESTIONS = 32
MIN_VOTES = 2
TINY_COLUMNS = ("kind", "operations")
FEW_READ = 0.5
WARN = GuardLimits(terminated=0.1, length=2.0)
"""How far probe answers may look away from the adapter's before the record says so."""


@dataclass(frozen=True)
class Scored:
    """What a model did on a set of questions.

    Attributes:
        scores: float64 [questions, samples], 1.0 where the sample counts.
        signs: what the answers look like, see `signs_of`.
        answers_sha256: over the tokens of all answers; equal for equal answers.
        questions: fingerprint of questions and sampling.
        about: description of the questions (`Probe.as_dict`).
        forms: `form_of` each answer, in the order of questions and samples, where they are compared: greedily, and by agreement.
    """

    scores: np.ndarray
    signs: dict[str, float]
    answers_sha256: str
    questions: str
    about: dict[str, Any] = field(default_factory=dict)
    forms: list[str] = field(default_factory=list)

    def with_more(self, more: Scored) -> Scored:
        """The same with further questions; signs are means over the answers of both."""
        here, there = self.scores.size, more.scores.size
        return dataclasses.replace(
            self,
            scores=np.concatenate([self.scores, more.scores]),
            signs={
                name: (here * sign + there * more.signs[name]) / (here + there) for name, sign in self.signs.items()
            },
            answers_sha256=digest([self.answers_sha256, more.answers_sha256]),
            forms=[*self.forms, *more.forms],
        )


def signs_of(samples: Sequence[Sample], extracted: Sequence[str | None]) -> dict[str, float]:
    """What answers look like.

    finished: share that ended; tokens: mean length; distinct: share of different ones per question, and varied: over all
    questions; repeated: share that repeat themselves; read: share from which an answer was taken.
    """
    found = generation_stats(as_answers(samples), 0)
    per_question: dict[int, set[str]] = {}
    for sample in samples:
        per_question.setdefault(sample.question, set()).add(sample.text)
    each = len(samples) / len(per_question)
    return {
        "finished": found.terminated,
        "tokens": found.length,
        "distinct": float(np.mean([len(texts) / each for texts in per_question.values()])),
        "varied": found.distinct,
        "repeated": found.repetition,
        "read": float(np.mean([answer is not None for answer in extracted])),
    }


@dataclass(frozen=True)
class Majority:
    """The adapter's majority answers.

    Attributes:
        answers: the most frequent extracted answer of each question, None where no two samples gave the same one.
        share: mean share of samples that gave the majority answer, over the questions that have one.
        extracted: share of all samples from which an answer could be taken.
    """

    answers: list[str | None]
    share: float
    extracted: float

    @property
    def usable(self) -> list[int]:
        """Indices of the questions that have a majority answer."""
        return [index for index, answer in enumerate(self.answers) if answer is not None]


def majority(extracted: Sequence[Sequence[str | None]]) -> Majority:
    """The majority answer of each question, [questions][samples]; of equally frequent ones the first seen.

    An answer that was given once is no majority: free text, which never comes twice, must not pass for agreement. No questions,
    or one without samples, are a DataError.
    """
    if not extracted or not all(len(row) for row in extracted):
        raise DataError("majority needs at least one question, and at least one sample of each")
    counted = [Counter(answer for answer in row if answer is not None) for row in extracted]
    found = [(row.most_common(1) or [("", 0)])[0] for row in counted]
    answers = [answer if votes >= MIN_VOTES else None for answer, votes in found]
    shares = [votes / len(row) for (_, votes), row in zip(found, extracted, strict=True) if votes >= MIN_VOTES]
    share = sum(map(Counter.total, counted)) / sum(map(len, extracted))
    return Majority(answers, sum(shares) / len(shares) if shares else 0.0, share)


def why_unusable(found: Majority) -> str | None:
    """Why agreement with this majority cannot select, or None where it can.

    At least half of the adapter's cool samples must hold an answer, and 32 questions must have a majority.
    """
    if found.extracted < MIN_EXTRACTED:
        return (
            f"an answer could be taken from only {100 * found.extracted:.0f} % of the adapter's samples "
            f"(at least {100 * MIN_EXTRACTED:.0f} % are needed)"
        )
    if len(found.usable) < MIN_QUESTIONS:
        return (
            f"only {len(found.usable)} questions have an answer on which samples of the adapter agree (at least "
            f"{MIN_QUESTIONS} are needed)"
        )
    return None


@dataclass(frozen=True)
class Probe:
    """Questions, how they are asked, and against what they are judged.

    Attributes:
        task: prompt, grader and sampling of the questions.
        questions: `gold` is the label, or the majority answer.
        prompts: rendered prompts, one per question.
        sampling: how candidates are sampled.
        judging: how answers are judged.
        source: where the questions come from.
        majority: whose answers stand in for labels; None where these are known.
    """

    task: Task
    questions: tuple[Question, ...]
    prompts: tuple[str, ...]
    sampling: SamplingConfig
    judging: GradingSettings
    source: str
    majority: Majority | None = None

    @property
    def kind(self) -> str:
        """ "labelled", or "agreement" with the adapter's majority."""
        return "labelled" if self.majority is None else "agreement"

    def score(
        self, engine: Engine, on_progress: OnProgress | None = None, start: int = 0, stop: int | None = None
    ) -> Scored:
        """Sample the model as it stands and judge its answers to the questions from `start` to before `stop`.

        A question's random streams do not depend on which others are asked with it.
        """
        asked = range(start, len(self.questions) if stop is None else stop)
        pending = [(question, sample) for question in asked for sample in range(self.sampling.samples)]
        samples = engine.generate(self.prompts, self.sampling, on_progress, pending=pending)
        grades = judging.judge(self.task, self.questions, samples, self.task.grader, self.judging)
        scores = np.zeros((len(asked), self.sampling.samples))
        for sample, grade in zip(samples, grades, strict=True):
            scores[sample.question - start, sample.sample] = float(grade.correct)
        answers = [[sample.question, sample.sample, list(sample.token_ids)] for sample in samples]
        signs = signs_of(samples, [grade.extracted for grade in grades])
        compared = not self.sampling.temperature or self.majority is not None
        forms = [form_of(sample.text) for sample in samples] if compared else []
        return Scored(scores, signs, digest(answers), self.fingerprint, self.as_dict(), forms)

    def at(self, temperature: float | None) -> Probe:
        """The same questions, sampled at another temperature, greedily once each; None leaves it."""
        if temperature is None:
            return self
        samples = self.sampling.samples if temperature else 1
        return dataclasses.replace(
            self, sampling=dataclasses.replace(self.sampling, temperature=temperature, samples=samples)
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 over prompts, reference answers, rows (tests of programs stand there), task and sampling."""
        asked = [[prompt, q.gold, q.row] for prompt, q in zip(self.prompts, self.questions, strict=True)]
        return digest([asked, dataclasses.asdict(self.sampling), self.task.fingerprint])

    def as_dict(self) -> dict[str, Any]:
        """What the artifact records of the probe."""
        record: dict[str, Any] = {
            "kind": self.kind,
            "source": self.source,
            "questions": len(self.questions),
            "samples": self.sampling.samples,
            "temperature": self.sampling.temperature,
            "max_new_tokens": self.sampling.max_new_tokens,
            "plain_text": self.task.raw,
            "grader": self.task.grader,
            "task": f"{self.task.name} v{self.task.version}",
        }
        if self.majority is not None:
            record["majority_share"] = self.majority.share
            record["extracted"] = self.majority.extracted
        return record


def by_agreement(
    probe: Probe,
    adapter: Engine,
    on_progress: OnProgress | None = None,
    kept: Path | None = None,
    whose: str = "",
) -> Probe:
    """The questions of a probe that have a majority of the adapter's at T = 0.3, which stands in for their answers.

    A ConfigError says why agreement cannot select here.

    Args:
        adapter: answers as the untouched adapter.
        kept: file in which its extracted answers are kept, so that a resumed selection has the same majority though
            another batch rounds differently.
        whose: fingerprint of the adapter; those of another are not taken from `kept`.
    """
    task, questions, prompts = probe.task, probe.questions, probe.prompts
    if task.grader in judging.CODE:
        raise no_evidence("programs have no extractable answer that could agree")
    if why := why_not_judged(task, questions):
        raise no_evidence(why)
    cool = dataclasses.replace(probe.sampling, temperature=COOL, samples=COOL_SAMPLES, seed=probe.sampling.seed + 1)
    made_from = digest([whose, list(prompts), dataclasses.asdict(cool), task.fingerprint])
    before = {} if kept is None else read_json(kept)
    extracted: list[list[str | None]] = before.get("extracted", []) if before.get("made_from") == made_from else []
    if not extracted:
        extracted = [[] for _ in questions]
        samples = adapter.generate(prompts, cool, on_progress)
        # an impossible gold: only what can be extracted matters here
        blank = [judging.with_answer(question, judging.NOTHING) for question in questions]
        grades = judging.judge(task, blank, samples, task.grader, probe.judging)
        for sample, grade in zip(samples, grades, strict=True):
            extracted[sample.question].append(grade.extracted)
        if kept is not None:
            write_json(kept, {"made_from": made_from, "extracted": extracted})
    found = majority(extracted)
    if why := why_unusable(found):
        raise no_evidence(why)
    answered = tuple(judging.with_answer(questions[index], str(found.answers[index])) for index in found.usable)
    asked = tuple(prompts[index] for index in found.usable)
    return dataclasses.replace(probe, questions=answered, prompts=asked, majority=found)


def no_evidence(why: str) -> ConfigError:
    """The error of a choice for which there are no questions; it says what to do instead."""
    return ConfigError(
        f"no evidence can be had here: {why}. Give --probe FILE with at least {MIN_QUESTIONS} prompts and answers, or take the "
        "gates of one range as they come, with nothing to show that they help: --range=0,1 --unverified (unverified=True)"
    )


def looks_worse(signs: Mapping[str, float], own: Mapping[str, float], *, alike: bool = True) -> list[str]:
    """How answers look worse than the adapter's by their signs, each as a phrase; nothing where a record lacks a sign.

    `alike` says whether both gave as many answers: the more there are, the smaller is the share of different ones.
    """
    if not {"varied", "repeated"} <= signs.keys() & own.keys():
        return []
    signs = signs if alike else {**signs, "varied": own["varied"]}
    found, start = (Reading(0, 0, s["repeated"], s["tokens"], s["finished"], s["varied"]) for s in (signs, own))
    return [f"on the probe {phrase} (the adapter)" for phrase in exceeded(start, found, WARN)]


def unread(share: float, grader: str) -> list[str]:
    """A warning where the grader finds no answer in most of the adapter's samples, so that the probe measures its form."""
    if share >= FEW_READ:
        return []
    return [
        f"an answer could be read from only {100 * share:.0f} % of the adapter's samples by the grader {grader!r}; does the "
        "probe's prompt ask for the form that it reads, or does another --probe-grader fit?"
    ]


def why_not_judged(task: Task, questions: Sequence[Question]) -> str | None:
    """What a row lacks that its grader reads, or None."""
    for question in questions if task.grader == "tiny" else ():
        if missing := [name for name in ("prompt", *TINY_COLUMNS) if name not in question.row]:
            return f"{question.place}: the grader tiny reads the column {missing[0]!r}, which this row has not"
    return None


def why_never_right(task: Task, questions: Sequence[Question]) -> str | None:
    """Why no answer to a question could be found right, whose answer is known; None where there is none."""
    for question in questions if task.grader in (*judging.MATH, *judging.TEXT) else ():
        if why := why_no_gold(question.gold, task.grader):
            return f"{question.place}: {why}"
    return None


def digest(value: Any) -> str:
    """SHA-256 over a JSON-able value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
