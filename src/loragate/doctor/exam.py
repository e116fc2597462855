"""What every part of an examination is given: the model, the examples and the prompts, and a place to show progress."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from loragate.analysis.rows import Array, Interval, Reader, Row, TokenClasses, no_progress, ratio
from loragate.data import encode_rows, load_rows, prompt_ids
from loragate.data.chat import active_template
from loragate.data.formats import FORMATS, text_of
from loragate.data.rows import Rows, RowsGiven
from loragate.doctor.record import Measures
from loragate.evaluation.variants import ModelVariant, acting
from loragate.gates.adapter_rules import Finding
from loragate.gates.control import why_no_base
from loragate.generation import OnProgress, Sample, SamplingConfig, TransformersEngine
from loragate.generation.engine import draw_samples, read_samples
from loragate.losses.head import IGNORED
from loragate.models import Loaded, Loading, ModelSource, open_model
from loragate.models.source import Kind
from loragate.selection.dev import prompts_of

PROBED = 2
"""Rows that are read to see how fast the machine is."""


@dataclass(frozen=True)
class ExamSettings:
    """How an adapter is examined.

    Attributes:
        max_rows: examples that are read.
        max_length: tokens of an example, cut on the right.
        your_prompts: questions of the examples, or of the dev set, that are asked beside the shipped ones.
        max_new_tokens: of an answer to a prompt.
        batch_size: rows and prompts at a time.
        system: "none" leaves out a default system message that the chat template injects, "keep" keeps it.
    """

    max_rows: int = 64
    max_length: int = 512
    your_prompts: int = 8
    max_new_tokens: int = 96
    batch_size: int = 16
    system: str = "none"


@dataclass(frozen=True)
class Prompt:
    """A question that is asked of base and adapter.

    Attributes:
        kind: "english", "code", "arithmetic", "language", "thinking", or "yours".
        language: ISO 639-1 code of the language that the answer should be in.
    """

    text: str
    kind: str
    language: str = "en"


@cache
def shipped_prompts() -> tuple[Prompt, ...]:
    """The prompts of `prompts.jsonl`."""
    lines = (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Prompt(**json.loads(line)) for line in lines)


@dataclass(frozen=True)
class Losses:
    """Of N rows: nats summed over a row's tokens [N], and tokens [N]."""

    sums: Array
    tokens: Array

    def mean(self) -> Interval:
        """Nats per token, with its interval over rows."""
        return ratio(self.sums, self.tokens)

    def minus(self, other: Losses) -> Interval:
        """The difference in nats per token on the same rows, paired, with its interval over rows."""
        return ratio(self.sums - other.sums, self.tokens)


class OnJob(Protocol):
    """Shows a part of the work: a context that yields what is called with (done, of)."""

    def __call__(self, name: str, total: int = 0, unit: str = "") -> AbstractContextManager[OnProgress]: ...


@contextmanager
def silent_job(name: str, total: int = 0, unit: str = "") -> Iterator[OnProgress]:
    """An `OnJob` for nobody."""
    yield no_progress


@dataclass
class Exam:
    """An adapter under examination; the model is loaded when it is first asked for.

    Attributes:
        place: the adapter, gated or plain, with its base.
        folder: where answers are kept for a resumed examination.
        measures: of the parts that are finished.
        data: examples the adapter was trained on; None where none are given.
        dev_data, retention_data: questions with answers of its task, and of abilities to keep.
    """

    place: ModelSource
    folder: Path
    measures: Measures
    settings: ExamSettings = field(default_factory=ExamSettings)
    loading: Loading = field(default_factory=Loading)
    data: RowsGiven | None = None
    dev_data: RowsGiven | None = None
    retention_data: RowsGiven | None = None
    job: OnJob = silent_job
    say: Callable[[str], None] = lambda line: None
    _drawn: dict[str, list[Sample]] = field(default_factory=dict)
    _tokens_per_second: float | None = None

    @cached_property
    def loaded(self) -> Loaded:
        """The model with its tokenizer, frozen, in eval mode; its plain adapter where gates are off."""
        with self.job("loading the model"):
            return open_model(self.place, self.loading).without_idle_gates()

    @property
    def model(self) -> Any:
        """The PeftModel in memory, as what it came as."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any:
        """With its chat template."""
        return self.loaded.tokenizer

    @cached_property
    def has_base(self) -> bool:
        """Whether the base can be had by switching the adapter off."""
        return not why_no_base(self.model)

    @cached_property
    def reader(self) -> Reader:
        """Reads rows with whatever acts at the moment."""
        return Reader(self.model, self.tokenizer)

    @cached_property
    def classes(self) -> TokenClasses:
        """Token classes, with the ids that end an answer."""
        return TokenClasses(self.tokenizer, self.loaded.endings.token_ids)

    def acting(self, kind: Kind) -> AbstractContextManager[None]:
        """The context in which the model is its base, its plain adapter or its gates."""
        return acting(self.model, ModelVariant(kind), self.loaded.kind)

    @cached_property
    def examples(self) -> Rows | None:
        """The first examples, as given."""
        return None if self.data is None else load_rows(self.data, limit=self.settings.max_rows)

    @cached_property
    def rows(self) -> list[Row]:
        """The examples as token ids {input_ids, labels, row}; empty where none are given."""
        return [] if self.examples is None else self.encoded(self.examples)

    def encoded(self, rows: Rows) -> list[Row]:
        """Examples as token ids; `row` is the index. Of rows that are one text each, every token is a label but the first."""
        length = min(self.settings.max_length, self.loaded.positions or self.settings.max_length)
        if "text" in rows[0] and not any(form.matches(rows[0]) for form in FORMATS.values()):
            return [row for row in self._texts(rows, length) if len(row["input_ids"]) > 1]
        return list(encode_rows(rows, self.tokenizer, max_length=length, system=self.settings.system))

    def _texts(self, rows: Rows, length: int) -> Iterator[Row]:
        for index, row in enumerate(rows):
            ids = self.tokenizer(text_of(row.get("text"), f"{rows.where(index)}: text"))["input_ids"][:length]
            yield {"input_ids": ids, "labels": [IGNORED, *ids[1:]], "row": index}

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The shipped prompts, then the first questions of the examples or the dev set as kind "yours"."""
        yours = self.dev_data if self.dev_data is not None else self.data
        asked = [] if yours is None else prompts_of(load_rows(yours, limit=self.settings.your_prompts))
        return [*shipped_prompts(), *(Prompt(text, "yours") for text in asked)]

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """Token ids of each prompt, as the start of a conversation where there is a chat template."""
        chat = active_template(self.tokenizer) is not None
        messages = [[{"role": "user", "content": one.text}] if chat else one.text for one in self.prompts]
        return [prompt_ids(message, self.tokenizer, system=self.settings.system) for message in messages]

    def drawn(self, kind: Kind) -> list[Sample]:
        """Greedy answers of base, adapter or gates to all prompts, in their order; drawn once, and kept in the folder."""
        if kind not in self._drawn:
            config = SamplingConfig(temperature=0.0, samples=1, max_new_tokens=self.settings.max_new_tokens)
            file = self.folder / f"answers-{kind}.jsonl"
            engine = TransformersEngine(
                self.model, self.tokenizer, self.settings.batch_size, self.loaded.stop_token_ids
            )
            with self.job(f"answers of the {kind}", len(self.prompts), "answers") as on_progress, self.acting(kind):
                draw_samples(engine, self.prompt_ids, config, file, on_progress)
            self._drawn[kind] = read_samples(file)
        return self._drawn[kind]

    def own_rows(self, kind: Kind) -> list[Row]:
        """The prompts with the answers of `drawn` behind them, which are the labels; `row` is the prompt's index."""
        rows = []
        for sample in self.drawn(kind):
            head, answer = self.prompt_ids[sample.question], list(sample.token_ids)
            if answer:
                labels = [*[IGNORED] * len(head), *answer]
                rows.append({"input_ids": [*head, *answer], "labels": labels, "row": sample.question})
        return rows

    def losses(self, rows: Sequence[Row], on_progress: OnProgress = no_progress) -> Losses:
        """Negative log-likelihood of the labels of rows, under whatever acts on the model at the moment."""
        sums, counts = np.zeros(len(rows)), np.zeros(len(rows))
        for batch, rows_T, _ in self.reader.batches(rows, self.settings.batch_size, on_progress):
            found = self.reader.read(batch).log_prob.double().cpu().numpy()
            sums += np.bincount(rows_T, -found, minlength=len(rows))
            counts += np.bincount(rows_T, minlength=len(rows))
        return Losses(sums, counts)

    def affordable(self, rows: Sequence[Row], passes: int, seconds: float, least: int = 1) -> list[Row]:
        """The first rows, `least` of them in any case, that can be read so many times in about so many seconds."""
        if self._tokens_per_second is None:
            for _ in range(2):  # the first time memory is laid out and kernels are built
                began = time.monotonic()
                self.losses(rows[:PROBED])
            tokens = sum(len(row["input_ids"]) for row in rows[:PROBED])
            self._tokens_per_second = tokens / (time.monotonic() - began)
        read = np.cumsum([len(row["input_ids"]) for row in rows])
        return list(rows[: max(least, int((read <= self._tokens_per_second * seconds / passes).sum()))])


Part = Callable[[Exam], tuple[Any, list[Finding]]]
"""A part of the examination: the measures that it makes (a field of `Measures`) and what it found."""
