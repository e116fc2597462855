"""The record of an evaluation: what was measured, on what, with what, and what follows from it.

One JSON file holds everything that a report, a comparison or a later regrade needs, except the samples themselves. It is
read strictly: an unknown key, a missing one or a value of the wrong kind is an error that names it, because a record that
is read halfway gives a table that looks whole. Scores and shares are shares of 1, entropy is in nats per token.
"""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from loragate import records
from loragate.display import temperature_label
from loragate.errors import DataError
from loragate.evaluation.answers import Grade
from loragate.evaluation.statistics import (
    Difference,
    Estimate,
    SuiteEstimate,
    average_at_k,
    compare,
    compare_out_of_fold,
    dft_rounded_mean,
    majority_at_k,
    out_of_fold,
    pass_at_k,
    simultaneous,
)
from loragate.files import write_json
from loragate.generation import Sample, SamplingConfig
from loragate.models.source import Kind

Verdict = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True)
class TaskInfo:
    """What a task was when it was run: enough to tell whether two records may be compared.

    `fingerprint` is over the rows of the data set and `prompt_sha256` over the prompts as the model read them, chat template
    included; `sampling` is the task's own, from which a control may depart in temperature.
    """

    name: str
    version: str
    fingerprint: str
    prompt_sha256: str
    dataset: str
    dataset_revision: str | None
    grader: str
    grader_version: str
    sampling: SamplingConfig


@dataclass(frozen=True)
class VariantAgreement:
    """How far the log-probs of an engine, as a variant, lie from transformers'; absolute differences in nats.

    Attributes:
        mean, largest: over the tokens that were compared; None where one is no number.
        tokens: how many.
        limit: of `mean`.
        nearest: the model that explains what was served: the variant, or "base", "adapter" or "gated" where it is much nearer.
        agrees: whether `mean` is within the limit, and no other model is much nearer.
    """

    mean: float | None
    largest: float | None
    tokens: int
    limit: float
    nearest: str
    agrees: bool


@dataclass(frozen=True)
class BestTemperatureScore:
    """A variant at its best temperature.

    Attributes:
        temperature: the best on all questions, 0 for greedy.
        score: out of fold (`statistics.out_of_fold`), so that picking the temperature has not flattered it.
        comparison: difference to the adapter at its best temperature by `statistics.compare_out_of_fold`, with the interval that
            agrees with `verdict`; None for the adapter itself, and where there is none.
        verdict: what the comparison shows, with its p after Holm's adjustment over all such comparisons of the record.
    """

    temperature: float
    score: Estimate
    comparison: Difference | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True)
class TaskResult:
    """What one variant scored on one task.

    Attributes:
        task: its name.
        variant: the weights that acted.
        control: label of an untrained control ("T=0.6", "λ=0.5"), None for the variant itself.
        temperature, scale, part: what the control changed: sampling temperature, one λ, and where it holds if not everywhere.
        avg_at_k: the score.
        dft_rounded: the score as the DFT evaluation code rounds it; for comparison with numbers published from it.
        pass_at_k: by k.
        majority_at_k: None where answers cannot vote, as with programs.
        truncated: share of answers that met the length limit.
        no_eos: share of answers that did not end with an end-of-sequence token; above `truncated` where answers ended at
            a stop text.
        tokens: mean length of an answer.
        entropy: mean along the answers; None where it was not measured.
        reasons: number of samples by the grader's reason ("ok", "wrong", "no_box", ...).
        question_ids, question_scores: per-question mean scores, in the same order in every variant.
        comparison: difference to the plain adapter, paired by question (at another temperature to the adapter
            there), with the interval that agrees with `verdict`; None for the adapter itself.
        adjusted_p: the comparison's p after Holm's adjustment over all comparisons of the record.
        verdict: what the comparison shows, by `verdict` with the adjusted p.
        seconds: sampling and grading.
        at_best: the variant at the best of its temperatures; None at any but that of the task, and where there is one.
    """

    task: str
    variant: Kind
    avg_at_k: Estimate
    dft_rounded: float
    pass_at_k: dict[int, Estimate]
    majority_at_k: Estimate | None
    truncated: float
    no_eos: float
    tokens: float
    entropy: float | None
    reasons: dict[str, int]
    question_ids: tuple[str, ...]
    question_scores: tuple[float, ...]
    control: str | None = None
    temperature: float | None = None
    scale: float | None = None
    part: str | None = None
    comparison: Difference | None = None
    adjusted_p: float | None = None
    verdict: Verdict | None = None
    seconds: float = 0.0
    at_best: BestTemperatureScore | None = None

    @property
    def label(self) -> str:
        """ModelVariant and control as printed: "gated", "adapter T=0.6"."""
        return self.variant if self.control is None else f"{self.variant} {self.control}"

    @property
    def means_Q1(self) -> np.ndarray:
        """Per-question mean scores, float64 [Q, 1].

        Comparisons and averages of suites take a question's samples by their mean alone, so that this serves them as the
        table [Q, K] of all verdicts would.
        """
        return np.array(self.question_scores)[:, None]


@dataclass(frozen=True)
class SuiteResult:
    """The average of one variant over a suite's tasks, those of the harness aside, and its paired difference to the adapter's.

    `adjusted_p` and `verdict` are those of `TaskResult`, adjusted over the record's averages. Tasks of different suites are not
    averaged. `tasks` names those that are; records of earlier versions do not.
    """

    variant: Kind
    average: SuiteEstimate
    suite: str
    control: str | None = None
    comparison: Difference | None = None
    adjusted_p: float | None = None
    verdict: Verdict | None = None
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class EvaluationRecord:
    """All of an evaluation but its samples.

    Attributes:
        created: time of the evaluation's end, ISO 8601 with time zone.
        models: {"base": id or path, "adapter": ..., "gated": ...}, as far as there were any.
        tasks, results, suites: what was run and what came out.
        seed: of sampling.
        sandbox: tier in which programs ran; None if none did.
        versions: of the packages and the machine's system; see `loragate.records.package_versions`.
        seconds: of the whole evaluation.
        canary: differences in logits that show that adapter and gates acted.
        warnings: what a reader of the scores should know, in sentences.
        left_out: {variant: why the model cannot be it}, such as one λ in place of the gates that DoRA does not take.
        agreement: {variant: how far vLLM lies from transformers}, one variant for each model; empty where transformers answered.
        range: [L, U] of the variant "gated"; None where there is none, and where an override of λ was laid over it.
        schema: of this file.
    """

    created: str
    models: dict[str, str]
    tasks: tuple[TaskInfo, ...]
    results: tuple[TaskResult, ...]
    seed: int
    sandbox: str | None
    versions: dict[str, str]
    seconds: float
    canary: dict[str, float]
    suites: tuple[SuiteResult, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    agreement: dict[str, VariantAgreement] = field(default_factory=dict)
    range: tuple[float, float] | None = None
    schema: Literal[1] = 1

    def find(self, task: str, variant: str = "gated", control: str | None = None) -> TaskResult:
        """Return a result, named as it is printed ("base T=0.7") or in two parts ("base", "T=0.7").

        Raises:
            DataError: naming those there are, when it is absent.
        """
        name = variant if control is None else f"{variant} {control}"
        for result in self.results:
            if (result.task, result.label) == (task, name):
                return result
        found = ", ".join(f"{result.label} on {result.task}" for result in self.results) or "none"
        raise DataError(f"the record has no result of {name} on {task}; it has: {found}.")

    def with_adjusted_p(self) -> EvaluationRecord:
        """Return the record with Holm-adjusted p-values and verdicts: over all its results, and over all its averages."""
        return dataclasses.replace(self, results=_adjusted(self.results), suites=_adjusted(self.suites))

    def with_best_temperatures(self) -> EvaluationRecord:
        """Return the record with what every variant scores at its best temperature, where it was scored at several."""
        own = {task.name: task.sampling.temperature for task in self.tasks}
        by_temperature: dict[tuple[str, str], dict[float, TaskResult]] = {}
        for result in self.results:
            temperature, label = own[result.task], result.label
            if result.temperature is not None:
                temperature = result.temperature
                label = label.removesuffix(f" {temperature_label(temperature)}")
            # results that differ in temperature alone
            by_temperature.setdefault((result.task, label), {})[temperature] = result
        columns = {
            key: np.array([one.question_scores for one in found.values()]).T for key, found in by_temperature.items()
        }
        bests = {key: out_of_fold(means_QS) for key, means_QS in columns.items()}  # the same halvings for all
        results = list(self.results)
        for index, result in enumerate(results):
            key = (result.task, result.label)
            if result.temperature is None and len(by_temperature.get(key, {})) > 1:
                best = list(by_temperature[key])[int(np.argmax(columns[key].mean(axis=0)))]
                adapter = bests.get((result.task, "adapter")) if result.label != "adapter" else None
                versus = None if adapter is None else compare_out_of_fold(bests[key], adapter)
                at_best = BestTemperatureScore(best, average_at_k(bests[key][:, None]), versus)
                results[index] = dataclasses.replace(result, at_best=at_best)
        compared = [
            (index, one.at_best, one.at_best.comparison)
            for index, one in enumerate(results)
            if one.at_best is not None and one.at_best.comparison is not None
        ]
        family = simultaneous([versus for *_, versus in compared])
        for (index, at_best, _), versus, p in zip(compared, *family, strict=True):
            at_best = dataclasses.replace(at_best, comparison=versus, verdict=verdict(versus, p))
            results[index] = dataclasses.replace(results[index], at_best=at_best)
        return dataclasses.replace(self, results=tuple(results))

    def to_json(self) -> dict[str, Any]:
        """Return what the file holds."""
        return typing.cast(dict[str, Any], records.to_json(self))


Compared = TypeVar("Compared", TaskResult, SuiteResult)


def write_record(record: EvaluationRecord, path: str | Path) -> None:
    """Write the record to `path` as JSON, atomically."""
    write_json(Path(path), record.to_json())


def read_record(path: str | Path) -> EvaluationRecord:
    """Return the record in a file; raises `DataError`, naming file and key, for anything else."""
    return records.read(EvaluationRecord, Path(path), "make a record with `loragate eval`")


def task_result(
    task: str,
    variant: Kind,
    question_ids: Sequence[str],
    samples: Sequence[Sample],
    grades: Sequence[Grade],
    *,
    votes: bool = True,
    adapter: TaskResult | None = None,
    **others: Any,
) -> TaskResult:
    """Return what K answers to each of Q questions and their verdicts amount to.

    Args:
        question_ids: [Q].
        samples, grades: of all answers, ordered by question and sample.
        votes: whether answers can vote; right ones count as one, however they are written.
        adapter: the plain adapter's result on the same questions, to be compared with.
        others: further fields of `TaskResult`: control, temperature, scale, part, seconds.
    """
    shape = len(question_ids), len(samples) // len(question_ids)
    scores = np.array([float(grade.correct) for grade in grades]).reshape(shape)  # [Q, K] of 0 and 1
    # as a right answer may be written in many ways, all right ones are one candidate of the vote
    answers = np.array(["✓" if grade.correct else grade.extracted for grade in grades], dtype=object).reshape(shape)
    return TaskResult(
        task=task,
        variant=variant,
        avg_at_k=average_at_k(scores),
        dft_rounded=dft_rounded_mean(scores),
        # at the powers of two up to K, and at K
        pass_at_k={k: pass_at_k(scores, k) for k in sorted({*(2**i for i in range(shape[1].bit_length())), shape[1]})},
        majority_at_k=majority_at_k(answers.tolist(), scores) if votes else None,
        truncated=float(np.mean([sample.finish_reason == "length" for sample in samples])),
        no_eos=float(np.mean([sample.finish_reason != "stop" for sample in samples])),
        tokens=float(np.mean([len(sample.token_ids) for sample in samples])),
        entropy=mean_entropy(samples),
        reasons=dict(sorted(Counter(grade.reason for grade in grades).items())),
        question_ids=tuple(question_ids),
        question_scores=tuple(scores.mean(axis=1).tolist()),
        comparison=None if adapter is None else compare(scores, adapter.means_Q1),
        **others,
    )


def verdict(difference: Difference, p: float | None = None) -> Verdict:
    """Return what a comparison shows: "better" or "worse" only where p, at 5 %, and the interval both say so.

    `p` takes the place of the difference's own, as after Holm's adjustment; the interval is then that of `simultaneous`, so that
    the two agree. "no difference shown" does not mean equal.
    """
    if (difference.p if p is None else p) > 0.05:
        return "no difference shown"
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "no difference shown"


def _adjusted(results: tuple[Compared, ...]) -> tuple[Compared, ...]:
    """The results with p-values and intervals adjusted over their comparisons, and what each comparison then shows."""
    compared = [index for index, one in enumerate(results) if one.comparison is not None]
    changed = list(results)
    family = simultaneous([one.comparison for one in results if one.comparison is not None])
    for index, difference, p in zip(compared, *family, strict=True):
        shown = verdict(difference, p=p)
        changed[index] = dataclasses.replace(results[index], comparison=difference, adjusted_p=p, verdict=shown)
    return tuple(changed)


def mean_entropy(samples: Sequence[Sample]) -> float | None:
    """Mean over all generated tokens of the samples whose engine measured it, nats; None where none did."""
    measured = [(sample.entropy, len(sample.token_ids)) for sample in samples if sample.entropy is not None]
    if not measured:
        return None
    return sum(entropy * tokens for entropy, tokens in measured) / max(sum(tokens for _, tokens in measured), 1)
