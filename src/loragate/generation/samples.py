"""Samples on disk: one JSON object per line, appended as they are drawn, taken up again where a run was stopped.

A run that is interrupted leaves at most one torn line, the last. The reader skips it and the writer cuts it off before
it appends, so that a resumed run loses one sample and damages none. This file knows the form of a sample and nothing of
what it answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from loragate.errors import DataError, LoragateError
from loragate.generation.engine import Engine, OnProgress, Sample
from loragate.generation.sampling import SamplingConfig
from loragate.validate import validate


class SampleWriter(contextlib.AbstractContextManager["SampleWriter"]):
    """Append samples to a file, each write flushed; a context manager.

    Raises `DataError` when the file holds anything but samples.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():  # read whole, so that nothing is appended to what is no file of samples
            _, sound_bytes = _parse(self.path)
            with self.path.open("r+b") as file:
                file.truncate(sound_bytes)
        self._file = self.path.open("a", encoding="utf-8", newline="\n")

    def write(self, samples: Iterable[Sample]) -> None:
        """Append the samples and flush them to the operating system.

        Raises `LoragateError` when the disk is full; a later run can go on behind the last whole line.
        """
        lines = [json.dumps(dataclasses.asdict(sample), ensure_ascii=False, allow_nan=False) for sample in samples]
        try:
            self._file.write("".join(line + "\n" for line in lines))
            self._file.flush()
        except OSError as error:
            reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise LoragateError(
                f"{self.path} cannot take more samples: {reason}. Those written before are kept: make room, and run the "
                "same command with --resume"
            ) from error

    def __exit__(self, *failure: object) -> None:
        # what could not be written was reported by `write`; a line cut short is cut off by the next writer
        with contextlib.suppress(OSError):
            self._file.close()


def read_samples(path: str | Path) -> list[Sample]:
    """Return the samples of a file, ordered by (question, sample); a torn last line is left out.

    Raises `DataError`, naming the line, for a line that is not a sample or repeats one, and for a file that is absent.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"There is no sample file {path}; draw the samples first.")
    samples, _ = _parse(path)
    seen: dict[tuple[int, int], int] = {}
    for number, sample in enumerate(samples, start=1):
        first = seen.setdefault((sample.question, sample.sample), number)
        if first != number:
            raise DataError(
                f"{path}, lines {first} and {number}: both are sample {sample.sample} of question {sample.question}. "
                "Two runs have written to this file; draw the samples again into a fresh one."
            )
    return sorted(samples, key=lambda sample: (sample.question, sample.sample))


def _parse(path: Path) -> tuple[list[Sample], int]:
    """Return the samples in file order and the number of bytes that they fill."""
    samples: list[Sample] = []
    sound_bytes = 0
    # What follows the last line end is empty, or a line that was being written when the run stopped.
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: not JSON ({error}); restore the file or delete this line."
            ) from None
        # strictly, as a file may be anybody's
        samples.append(validate(Sample, row, f"{path}, line {number}", DataError, "this is not a sample file"))
        sound_bytes += len(line) + 1
    return samples, sound_bytes


def draw_samples(
    engine: Engine,
    prompts: Sequence[str],
    config: SamplingConfig,
    path: Path,
    on_progress: OnProgress | None = None,
) -> None:
    """Draw the samples that `path` does not hold yet.

    Every batch is appended to `path` as soon as it exists, so a killed run loses at most the batch in hand.

    Raises:
        DataError: if the file holds samples of another run.
    """
    have = {(sample.question, sample.sample) for sample in read_samples(path)} if path.exists() else set()
    wanted = {(question, sample) for question in range(len(prompts)) for sample in range(config.samples)}
    if have - wanted:
        question, sample = min(have - wanted)
        raise DataError(
            f"{path} holds sample {sample} of question {question}, but this run has {len(prompts)} questions with "
            f"{config.samples} samples; it belongs to another run, choose another --out"
        )

    def report(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(len(have) + done, len(wanted))

    with SampleWriter(path) as writer:
        engine.generate(prompts, config, report, pending=wanted - have, on_samples=writer.write)
