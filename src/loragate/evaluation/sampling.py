"""Samples of one variant on one task: drawn, streamed to disk, taken up again where a run was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loragate.errors import DataError
from loragate.generation import Engine, OnProgress, Sample, SampleWriter, SamplingConfig, read_samples


def draw_samples(
    engine: Engine,
    prompts: Sequence[str],
    config: SamplingConfig,
    path: Path,
    on_progress: OnProgress | None = None,
) -> list[Sample]:
    """Return all samples, ordered by (question, sample); only those that `path` does not hold yet are generated.

    Every batch is appended to `path` as soon as it exists, so a killed run loses at most the batch in hand.

    Raises:
        DataError: if the file holds samples of another run.
    """
    found = read_samples(path) if path.exists() else []
    wanted = {(question, sample) for question in range(len(prompts)) for sample in range(config.samples)}
    have = {(sample.question, sample.sample) for sample in found}
    if have - wanted:
        question, sample = min(have - wanted)
        raise DataError(
            f"{path} holds sample {sample} of question {question}, but this run has {len(prompts)} questions with "
            f"{config.samples} samples; it belongs to another run, choose another --out"
        )
    pending = sorted(wanted - have)
    if not pending:
        return found

    def report(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(len(have) + done, len(wanted))

    with SampleWriter(path) as writer:
        drawn = engine.generate(prompts, config, report, pending=pending, on_samples=writer.write)
    return sorted([*found, *drawn], key=lambda sample: (sample.question, sample.sample))
