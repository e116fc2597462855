"""One interface for whatever generates, rendered prompts or token ids in and samples out; and samples on file.

`Engine` is what evaluation, training and analysis need of any program that runs a model; `TransformersEngine`, `VllmEngine` and
`ShardedEngine` implement it. They share the functions below, so that all of them accept the same prompts, end an answer at the
same tokens and return the same text for the same token ids. Chat templates, tasks and grading live elsewhere, and nothing here
knows how a token is drawn (`sampling`) or which program runs the model.

A file holds one sample a line, as JSON, appended as they are drawn. A run that is interrupted leaves at most one torn line, the
last. The reader skips it and the writer cuts it off before it appends, so that a resumed run loses one sample and damages none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loragate.data import Endings
from loragate.errors import DataError, LoragateError
from loragate.generation.sampling import SamplingConfig
from loragate.validate import validate

FinishReason = Literal["stop", "stop_text", "length"]
"""Ended by the model (`loragate.data.find_endings`), by a text of `SamplingConfig.stop`, or by the token limit."""
Prompts = Sequence[str] | Sequence[Sequence[int]]
"""Rendered texts, or the token ids of each prompt."""
Continuation = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of what may follow it, neither empty."""
OnProgress = Callable[[int, int], None]
"""Called after every batch with the number of samples drawn so far and the number to draw."""


@dataclass(frozen=True)
class Sample:
    """One sampled answer.

    `question` is the index of its prompt, `sample` the index among the samples of that prompt. `token_ids` holds every
    generated token, the stop token included; `text` is without it and without special tokens. `finish_reason` is "stop"
    when the model ended the answer, "stop_text" when a text of `SamplingConfig.stop` did, which is not part of `text`, and
    "length" when its token limit did: `max_new_tokens`, or what its prompt left of the model's positions. `entropy` is the
    mean over the generated tokens of the full-vocabulary entropy at temperature 1, in nats, or None from an engine that
    does not measure it.
    """

    question: int
    sample: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    entropy: float | None


class Engine:
    """Anything that turns prompts into samples and scores continuations; a subclass defines `draw` and `log_likelihoods`."""

    def generate(
        self,
        prompts: Prompts,
        config: SamplingConfig,
        on_progress: OnProgress | None = None,
        *,
        pending: Collection[tuple[int, int]] | None = None,
        on_samples: Callable[[Sequence[Sample]], None] | None = None,
    ) -> list[Sample]:
        """Return the samples ordered by (question, sample).

        `pending` limits the work to these (question, sample) pairs, as after an interruption; None means all of them.
        `on_samples` receives every finished batch as soon as it exists, in the engine's own order.

        Raises `DataError` for an empty list of prompts, an empty prompt or one that leaves no position, and what the engine's
        `draw` raises.
        """
        every = {(question, sample) for question in range(len(prompts)) for sample in range(config.samples)}
        if foreign := set(pending or ()) - every:
            question, sample = min(foreign)
            raise DataError(
                f"pending names question {question}, sample {sample}, but there are {len(prompts)} prompts with "
                f"{config.samples} samples each; the samples on file belong to another run."
            )
        rows, samples = sorted(every if pending is None else set(pending)), list[Sample]()
        with contextlib.closing(self.draw(prompts, config, rows)) as batches:
            for batch in batches:
                samples += batch
                if on_samples is not None:
                    on_samples(batch)
                if on_progress is not None:
                    on_progress(len(samples), len(rows))
        return sorted(samples, key=lambda sample: (sample.question, sample.sample))

    def draw(
        self, prompts: Prompts, config: SamplingConfig, rows: list[tuple[int, int]]
    ) -> Generator[list[Sample], None, None]:
        """The samples of these (question, sample) pairs, batch by batch."""
        raise NotImplementedError

    def log_likelihoods(
        self, pairs: Sequence[Continuation], on_progress: OnProgress | None = None
    ) -> list[tuple[float, bool]]:
        """Return of each pair the log-probability of the continuation at temperature 1, in nats, and whether it is the greedy one.

        A pair may fill the model's positions and no more.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free what it holds beyond memory of this process."""


def split_by_question(rows: Sequence[tuple[int, int]], questions: int) -> list[list[tuple[int, int]]]:
    """Cut ordered (question, sample) pairs after every `questions` distinct questions; each stays in one piece."""
    groups = [[*own] for _, own in itertools.groupby(rows, lambda row: row[0])]
    return [[*itertools.chain(*groups[at : at + questions])] for at in range(0, len(groups), questions)]


def tokenize_prompts(
    tokenizer: Any, prompts: Prompts, max_new_tokens: int, positions: int | None
) -> tuple[list[list[int]], list[int]]:
    """Return the token ids of each prompt, to which the tokenizer adds nothing, and the token limit of its answers.

    Prompts that are token ids already are taken as they are. The limit is `max_new_tokens`, or what the prompt leaves of the
    model's `positions` (None: unlimited); no prompt lowers that of another.

    Raises `DataError` for an empty list, an empty prompt or one that leaves no position.
    """
    if isinstance(prompts, str) or not len(prompts):
        raise DataError(f"generate was given {prompts!r}; it needs a list with at least one rendered prompt.")
    rows: list[list[int]] = (
        tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        if isinstance(prompts[0], str)
        else [[*ids] for ids in prompts]
    )
    limits: list[int] = []
    for index, ids in enumerate(rows):
        if not ids:
            raise DataError(f"Prompt {index} is empty: the model needs at least one token to continue from.")
        limits.append(max_new_tokens if positions is None else min(max_new_tokens, positions - len(ids)))
        if limits[-1] < 1:
            raise DataError(
                f"Prompt {index} has {len(ids)} tokens and leaves none of the model's {positions} positions to an "
                "answer: drop or shorten it."
            )
    return rows, limits


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first of the texts `stop` begins in `text`, or None where there is none."""
    return min((start for start in map(text.find, stop) if start >= 0), default=None)


def stop_tokens(tokenizer: Any, stop: Sequence[str], endings: Endings) -> frozenset[int]:
    """The tokens that end an answer: those of `endings`, and the texts `stop` that are a special token.

    Decoded answers are without special tokens, so that such a text would never be found.
    """
    added = tokenizer.added_tokens_decoder.items()
    return endings.token_ids | {index for index, token in added if token.special and token.content in stop}


def finish_answers(
    tokenizer: Any,
    token_ids: Sequence[Sequence[int]],
    stopped: Sequence[bool],
    stop: Sequence[str],
    endings: Endings,
) -> list[tuple[tuple[int, ...], str, FinishReason]]:
    """Return (token ids, text, finish reason) of each answer; text and tokens end where the first of all texts does.

    The text is without the text that ended it; the tokens are those up to the one that completes it. A text of `endings`
    ends an answer as its tokens do.
    """
    texts = (*stop, *endings.texts)
    answers: list[tuple[tuple[int, ...], str, FinishReason]] = []
    for ids, ended in zip(token_ids, stopped):
        text = decode_answer(tokenizer, ids[:-1] if ended else ids)
        end = first_stop(text, texts)
        if end is None:
            by: FinishReason = "stop" if ids[-1] in endings.token_ids else "stop_text"
            answers.append((tuple(ids), text, by if ended else "length"))
            continue
        # the fewest tokens that hold the text, by bisection: a longer beginning holds it where a shorter one does
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            complete = first_stop(decode_answer(tokenizer, ids[:middle]), texts) is not None
            low, high = (low, middle) if complete else (middle + 1, high)
        # what the template ends a turn with counts as the model's own end, unless a text of the caller comes first
        reason: FinishReason = "stop" if end == first_stop(text, endings.texts) else "stop_text"
        answers.append((tuple(ids[:low]), text[:end], reason))
    return answers


def decode_answer(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of these tokens without special tokens."""
    # cleaning up would rewrite answers, such as "a . b" in code
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


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
    return samples, sum(len(line) + 1 for line in lines)


def draw_samples(
    engine: Engine,
    prompts: Prompts,
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
