"""Sampled scores of one model on one list of questions, with what must stand beside every score.

The engine, the prompts and the verdict on one sample arrive from outside; this file only counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from loragate.evaluation.statistics import Estimate, average_at_k
from loragate.generation import Engine, OnProgress, Sample, SamplingConfig


@dataclass(frozen=True)
class SuiteScores:
    """What sampling a suite gave.

    Attributes:
        scores: float64 [questions, samples], 1.0 where the sample is right.
        truncated: share of samples that reached the token limit without ending.
        entropy: mean predictive entropy along the sampled answers, nats per token; None where no sample carries one.
        tokens: mean length of an answer in tokens, the stop token included.
        samples: the samples themselves, ordered by (question, sample).
    """

    scores: np.ndarray
    truncated: float
    entropy: float | None
    tokens: float
    samples: list[Sample]

    @property
    def accuracy(self) -> Estimate:
        """Avg@k with its question-level interval."""
        return average_at_k(self.scores)


def run_suite(
    engine: Engine,
    prompts: Sequence[str],
    is_right: Callable[[int, Sample], bool],
    config: SamplingConfig,
    on_progress: OnProgress | None = None,
) -> SuiteScores:
    """Sample every prompt `config.samples` times and grade each answer.

    Args:
        engine: where the samples come from.
        prompts: rendered prompts.
        is_right: verdict on (question index, sample).
        config: sampling settings; their seed makes runs comparable sample by sample.
        on_progress: called with (samples done, samples in all).
    """
    samples = engine.generate(prompts, config, on_progress)
    scores = np.zeros((len(prompts), config.samples))
    for sample in samples:
        scores[sample.question, sample.sample] = float(is_right(sample.question, sample))
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=float)
    return SuiteScores(
        scores=scores,
        truncated=float(np.mean([sample.finish_reason == "length" for sample in samples])),
        entropy=mean_entropy(samples),
        tokens=float(lengths.mean()),
        samples=samples,
    )


def mean_entropy(samples: Sequence[Sample]) -> float | None:
    """Mean over all generated tokens of the samples whose engine measured it, nats; None where none did."""
    measured = [(sample.entropy, len(sample.token_ids)) for sample in samples if sample.entropy is not None]
    if not measured:
        return None
    return sum(entropy * tokens for entropy, tokens in measured) / max(sum(tokens for _, tokens in measured), 1)
