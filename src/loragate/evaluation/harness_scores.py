"""Scores of a retention suite by question, so that two models can be compared on the same ones.

The harness returns samples by task and filter; here they are put back into the order of the questions, with the
harness's own aggregate beside ours as a check. Pure bookkeeping: no model, no harness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loragate.evaluation.harness_answers import Answer
from loragate.evaluation.harness_rows import INDEX, Questions, Suite, task_name
from loragate.evaluation.statistics import Estimate, average_at_k


@dataclass(frozen=True)
class HarnessScores:
    """What one suite gave for one model. Q questions.

    Attributes:
        task: name of the suite; `harness_task` is the harness's task that it builds on, `version` is
            "<the harness's>+loragate.<ours>".
        metric: the main metric, "name,filter" as the harness writes it.
        scores: float64 [Q, 1] of the main metric; the others are in `samples`.
        harness_values: the harness's own aggregate of each metric (over subsets: weighted by size).
        questions: ids in the order of `scores`; `subsets` names each one's subset, "" where the suite has none.
        prompts_hash: SHA-256 over all prompts in order, as the model saw them before tokenising.
        truncated: share of answers that reached the token limit without ending; None where nothing is generated.
        samples: one dict per question: question, subset, prompt, gold, correct and scores (by metric); then text,
            extracted (by filter), tokens and finish_reason, or choices and loglikelihoods.
        settings: everything else that the scores depend on.
        warnings: what a reader must know beside the score, in sentences.
    """

    task: str
    harness_task: str
    version: str
    metric: str
    scores: np.ndarray
    harness_values: dict[str, float]
    questions: tuple[str, ...]
    subsets: tuple[str, ...]
    prompts_hash: str
    truncated: float | None
    samples: list[dict[str, Any]]
    settings: dict[str, Any]
    warnings: tuple[str, ...]

    @property
    def micro(self) -> Estimate:
        """Mean over all questions, with its interval."""
        return average_at_k(self.scores)

    @property
    def by_subset(self) -> dict[str, Estimate]:
        """The mean of each subset, with its interval; empty for a suite without subsets."""
        names = [name for name in dict.fromkeys(self.subsets) if name]
        return {name: average_at_k(self.scores[np.array(self.subsets) == name]) for name in names}

    @property
    def macro(self) -> float:
        """Unweighted mean of the subsets' means; that of all questions for a suite without subsets."""
        means = [estimate.mean for estimate in self.by_subset.values()]
        return float(np.mean(means)) if means else self.micro.mean


def collect_scores(
    suite: Suite,
    questions: Questions,
    results: Mapping[str, Any],
    answers: Mapping[tuple[str, int], Answer],
    settings: Mapping[str, Any],
    cut_choices: int,
) -> HarnessScores:
    """Put what the harness returned by task, filter and question back into the order of the questions.

    Args:
        results: what the harness's `evaluate` returned, with its samples.
        answers: generated answers by (task name, index of the question); empty for log-likelihood suites.
        settings: settings that all suites of the run share.
        cut_choices: options of log-likelihood suites that were cut at the beginning of their prompt.
    """
    names = list(dict.fromkeys(task_name(suite, item.subset) for item in questions.items))
    samples: list[dict[str, Any]] = [{} for _ in questions.items]
    values: dict[str, dict[int, float]] = {}
    for name in names:
        for entry in results["samples"][name]:
            index = entry["doc"][INDEX]
            for metric in entry["metrics"]:
                values.setdefault(f"{metric},{entry['filter']}", {})[index] = float(entry[metric])
            _merge_sample(samples[index], entry, answers.get((name, index)))
    for index, (sample, item) in enumerate(zip(samples, questions.items)):
        sample.update(question=item.id, subset=item.subset, correct=bool(values[suite.metric][index]))
        sample["scores"] = {metric: column[index] for metric, column in values.items()}
    whole = task_name(suite, "")
    aggregates = results["results"][whole] if names == [whole] else results["groups"][whole]
    prompts = hashlib.sha256()
    for sample in samples:
        prompts.update(sample["prompt"].encode() + b"\0")
    finishes = [sample["finish_reason"] for sample in samples if "finish_reason" in sample]
    return HarnessScores(
        task=suite.name,
        harness_task=suite.harness_task,
        version=f"{results['versions'][names[0]]}+loragate.{suite.version}",
        metric=suite.metric,
        scores=np.array([[values[suite.metric][index]] for index in range(len(samples))]),
        harness_values={metric: float(aggregates[metric]) for metric in (suite.metric, *suite.also)},
        questions=tuple(item.id for item in questions.items),
        subsets=tuple(item.subset for item in questions.items),
        prompts_hash=prompts.hexdigest(),
        truncated=finishes.count("length") / len(finishes) if finishes else None,
        samples=samples,
        settings={
            **settings,
            "max_new_tokens": suite.max_new_tokens,
            "until": suite.override.get("generation_kwargs", {}).get("until"),
            "source": questions.source,
            "revision": questions.revision,
            "rows": questions.fingerprints,
        },
        warnings=tuple(_warnings(suite, questions, [a for key, a in answers.items() if key[0] in names], cut_choices)),
    )


def _merge_sample(sample: dict[str, Any], entry: Mapping[str, Any], answer: Answer | None) -> None:
    sample.setdefault("prompt", entry["arguments"][0][0])
    sample.setdefault("gold", entry["target"])
    if answer is None:
        sample["choices"] = [continuation for _, continuation in entry["arguments"]]
        sample["loglikelihoods"] = [float(responses[0][0]) for responses in entry["resps"]]
        return
    sample.update(text=answer.text, tokens=answer.tokens, finish_reason=answer.finish_reason)
    sample.update(budget=answer.budget, prompt_tokens_cut=answer.cut)
    sample.setdefault("extracted", {})[entry["filter"]] = entry["filtered_resps"][0]


def _warnings(suite: Suite, questions: Questions, answers: Sequence[Answer], cut_choices: int) -> Iterator[str]:
    if questions.missing:
        yield (
            f"{suite.name}: {len(questions.missing)} of {len(suite.subsets)} subsets have no question in "
            f"{questions.source} ({', '.join(questions.missing[:4])}{', …' if len(questions.missing) > 4 else ''}); the "
            "score is not that of the whole suite."
        )
    short = [answer.budget for answer in answers if answer.budget < (suite.max_new_tokens or 0)]
    if short:
        yield (
            f"{suite.name}: {len(short)} of {len(answers)} answers had room for {min(short)} to {max(short)} new tokens "
            f"only, not {suite.max_new_tokens}: the model's positions end there."
        )
    cut = sum(answer.cut > 0 for answer in answers) or (cut_choices if suite.max_new_tokens is None else 0)
    if cut:
        yield f"{suite.name}: {cut} prompts were cut at their beginning, as they do not fit the model's positions."
