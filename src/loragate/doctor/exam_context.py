"""What every part of an examination is given: the model, the examples and the prompts, and a place to show progress."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from loragate import records
from loragate.analysis.context import ReadsModel
from loragate.analysis.rows import Array, Interval, Row, answer_rows, bootstrap_ratio, distinct, no_progress
from loragate.data import EncodedRows, encode_rows, load_rows, prompt_ids
from loragate.data.chat import active_template
from loragate.data.formats import FORMATS, text_of
from loragate.data.rows import Rows, RowsGiven
from loragate.display import pluralize
from loragate.doctor.record import Measures
from loragate.errors import GateError
from loragate.evaluation.evaluate import evaluate
from loragate.evaluation.statistics import average_at_k
from loragate.evaluation.variants import ModelVariant
from loragate.files import RunFolder, write_json
from loragate.gates.adapter_rules import Finding
from loragate.gates.control import base_unavailable_reason, find_ungated_modules
from loragate.gates.strength import scale_adapter
from loragate.generation import OnProgress, Sample, SamplingConfig, TransformersEngine
from loragate.generation.engine import draw_samples, read_samples
from loragate.losses.head import IGNORE_INDEX
from loragate.models import Loaded, Loading, ModelSource, open_model
from loragate.models.source import Kind
from loragate.selection.dev import RETENTION_TOKENS, read_dev
from loragate.selection.overlap import prompts_of
from loragate.selection.settings import DevSettings

LEAST_ROWS = 8
"""That are read of a text however slow the model is, so that there is an interval."""
ASSUMED_FLOPS_PER_SECOND = {"cpu": 7e10, "other": 3e13}
"""FLOP a second that texts are cut by: two CPU cores with AVX2, and a GPU. Not measured, so that the same call reads the same
text."""
TEXT_PASSES, TEXT_SECONDS = 16, 75.0
"""Passes over each of `ExamContext.scoring_rows`, and what they may take."""
MOST_AT_ONCE = 64
"""Answers in one batch: on a CPU the 48 of a 135M model take 42 s of processor time so, and 58 s in batches of 16."""
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
"""The λ for all modules at which an adapter is tried."""


@dataclass(frozen=True)
class ExamSettings:
    """How an adapter is examined.

    Attributes:
        max_rows: examples that are read at most.
        questions: of the dev set and of the retention set.
        max_length: tokens of an example, cut on the right.
        your_prompts: questions of the examples, or of the dev set, that are asked beside the shipped ones.
        max_new_tokens: of an answer to a prompt.
        batch_size: rows and prompts at a time.
        system: "none" leaves out a default system message that the chat template injects, "keep" keeps it.
        dev_task, dev_grader, dev_pattern: how the dev set is asked and judged; see `DevSettings`.
    """

    max_rows: int = 64
    questions: int = 48
    max_length: int = 512
    your_prompts: int = 8
    max_new_tokens: int = 96
    batch_size: int = 16
    system: str = "none"
    dev_task: str = ""
    dev_grader: str = "default"
    dev_pattern: str = ""

    @property
    def dev(self) -> DevSettings:
        """How the dev set is asked and judged."""
        return DevSettings(dev_task=self.dev_task, dev_grader=self.dev_grader, dev_pattern=self.dev_pattern)


@dataclass(frozen=True)
class Prompt:
    """A question that is asked of base and adapter.

    Attributes:
        kind: "english", "code", "arithmetic", "language", "thinking", or "yours".
        language: ISO 639-1 code of the language that the answer should be in.
        token_ids: what is fed, of a prompt of the examples; empty where it is made from the text.
    """

    text: str
    kind: str
    language: str = "en"
    token_ids: tuple[int, ...] = ()


def all_plain(rows: Sequence[Row]) -> bool:
    """Whether examples are text to complete, a prompt and its completion each, without the chat template."""
    return isinstance(rows, EncodedRows) and rows.summary.all_plain


def is_text_only_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is one text, of which every token is a label."""
    return "text" in row and not any(form.matches(row) for form in FORMATS.values())


@cache
def shipped_prompts() -> tuple[Prompt, ...]:
    """The prompts of `prompts.jsonl`."""
    lines = (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Prompt(**json.loads(line)) for line in lines)


@dataclass(frozen=True)
class Losses:
    """Of N rows: nats summed over a row's tokens [N], tokens [N], and the number of its text (`distinct`) [N]."""

    sums: Array
    tokens: Array
    texts: NDArray[np.int64]

    def mean(self) -> Interval:
        """Nats per token, with its interval over texts: rows that repeat are drawn together."""
        return bootstrap_ratio(np.bincount(self.texts, self.sums), np.bincount(self.texts, self.tokens))

    def paired_difference(self, other: Losses) -> Interval:
        """The difference in nats per token on the same rows, paired, with its interval over texts."""
        return replace(self, sums=self.sums - other.sums).mean()


def low_end(interval: Interval) -> float:
    """The lower end, without limit where rows are too few for one, so that few rows give no warning; `high_end` likewise."""
    return float("-inf") if interval.low is None else interval.low


def high_end(interval: Interval) -> float:
    return float("inf") if interval.high is None else interval.high


def share_right(scores: Array | None) -> Interval | None:
    """The share of the questions that are right, of scores [questions], with its interval; None where none were asked."""
    if scores is None:
        return None
    found = average_at_k(scores[:, None])
    return Interval(found.mean, found.low, found.high)


class OnJob(Protocol):
    """Shows a part of the work: a context that yields what is called with (done, of)."""

    def __call__(self, name: str, total: int = 0, unit: str = "") -> AbstractContextManager[OnProgress]: ...


@contextmanager
def silent_job(name: str, total: int = 0, unit: str = "") -> Iterator[OnProgress]:
    """An `OnJob` for nobody."""
    yield no_progress


@dataclass
class ExamContext(ReadsModel):
    """An adapter under examination; the model is loaded when it is first asked for.

    Attributes:
        model_source: the adapter, gated or plain, with its base.
        folder: where answers are kept for a resumed examination.
        measures: of the parts that are finished.
        data: examples the adapter was trained on; None where none are given.
        dev_data, retention_data: questions with answers of its task, and of abilities to keep.
    """

    model_source: ModelSource
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
    _losses: dict[str, Losses] = field(default_factory=dict)

    @cached_property
    def loaded(self) -> Loaded:
        """The model with its tokenizer, frozen, in eval mode; its plain adapter where gates are off."""
        with self.job("loading the model"):
            return open_model(self.model_source, self.loading).detach_inactive_gates()

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
        return not base_unavailable_reason(self.model)

    @cached_property
    def unscaled_modules(self) -> list[str]:
        """The modules that one λ for the whole adapter, as it is exported and evaluated, does not scale; `scaled` does."""
        return find_ungated_modules(self.model)

    def format_rescale_command(self, strength: str) -> str:
        """How the adapter at another strength, as `scaled` measures it, is made."""
        if self.unscaled_modules:
            keys = (
                "lora_alpha, and what alpha_pattern holds,"
                if self.model_source.adapter_contents.config.get("alpha_pattern")
                else "lora_alpha"
            )
            return f"multiply its {keys} by {strength}, as one λ does not reach {self.unscaled_modules[0]}"
        named = shlex.join([self.model_source.record_name, "--base", str(self.model_source.base)])
        return f"loragate export {named} --constant {strength} --out OUT writes that adapter"

    @cached_property
    def examples(self) -> Rows | None:
        """The first examples, as given."""
        return None if self.data is None else load_rows(self.data, limit=self.settings.max_rows)

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The examples as token ids {input_ids, labels, row}; empty where none are given."""
        return [] if self.examples is None else self.encode_examples(self.examples)

    @property
    def uses_raw_prompts(self) -> bool:
        """Whether questions are text to complete, as the examples are, or for want of a chat template."""
        return active_template(self.tokenizer) is None or all_plain(self.rows)

    def subsample_to_budget(self, rows: Sequence[Row], passes: int, seconds: float) -> list[Row]:
        """Rows spread evenly over all, as many as can be read so many times in about so many seconds; at least `LEAST_ROWS`."""
        if not rows:
            return []
        mean = sum(len(row["input_ids"]) for row in rows) / len(rows)
        count = min(len(rows), max(LEAST_ROWS, int(self.token_budget(seconds / passes) / mean)))
        return [rows[index * len(rows) // count] for index in range(count)]

    def token_budget(self, seconds: float) -> float:
        """Tokens that a model of this size reads in so many seconds, by `ASSUMED_FLOPS_PER_SECOND`."""
        flops = 2 * sum(parameter.numel() for parameter in self.model.parameters())  # a token
        return ASSUMED_FLOPS_PER_SECOND["cpu" if self.reader.device.type == "cpu" else "other"] * seconds / flops

    def encode_examples(self, rows: Rows, system: str = "") -> Sequence[Row]:
        """Examples as token ids; `row` is the index. Of rows that are one text each, every token is a label but the first.

        `system` is "none" or "keep" in place of the settings'.

        What `max_length` leaves out or cuts is said.
        """
        length = min(self.settings.max_length, self.loaded.max_positions or self.settings.max_length)
        if is_text_only_row(rows[0]):
            return [row for row in self._texts(rows, length) if len(row["input_ids"]) > 1]
        encoded = encode_rows(rows, self.tokenizer, max_length=length, system=system or self.settings.system)
        lost = encoded.summary
        if lost.dropped or lost.truncated:
            self.say(
                f"of {pluralize(lost.rows, 'row')} ({rows.source}) {lost.dropped} not read, as the prompt alone takes {length} "
                f"tokens, and {lost.truncated} cut there; --max-length (max_length) reads more"
            )
        return encoded

    def _texts(self, rows: Rows, length: int) -> Iterator[Row]:
        for index, row in enumerate(rows):
            ids = prompt_ids(text_of(row.get("text"), f"{rows.where(index)}: text"), self.tokenizer)[:length]
            yield {"input_ids": ids, "labels": [IGNORE_INDEX, *ids[1:]], "row": index}

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The shipped prompts, then as kind "yours" the first different questions of the dev set, or what stands before the first
        response of the examples: system message, tools and earlier turns included."""
        found: dict[Any, Prompt] = {}
        for one in self._your_prompts():
            if len(found) >= self.settings.your_prompts:
                break
            found.setdefault(one.token_ids or one.text, one)
        return [*shipped_prompts(), *found.values()]

    def _your_prompts(self) -> Iterator[Prompt]:
        if self.dev_data is not None:
            for row in load_rows(self.dev_data):
                yield from (Prompt(text, "yours") for text in prompts_of([row])[:1])
        elif isinstance(self.rows, EncodedRows):  # texts have no question
            for row in self.rows:
                ids = row["input_ids"][: next(at for at, one in enumerate(row["labels"]) if one != IGNORE_INDEX)]
                text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
                yield Prompt(text, "yours", token_ids=tuple(ids))

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """Token ids of each prompt, as the start of a conversation unless questions are `raw`."""

        def made(text: str) -> list[int]:
            prompt = text if self.uses_raw_prompts else [{"role": "user", "content": text}]
            return prompt_ids(prompt, self.tokenizer, system=self.settings.system)

        return [list(one.token_ids) or made(one.text) for one in self.prompts]

    def greedy_answers(self, kind: Kind) -> list[Sample]:
        """Greedy answers of base, adapter or gates to all prompts, in their order; drawn once, and kept in the folder."""
        if kind not in self._drawn:
            self._drawn[kind] = self.generate_greedy(
                kind, self.prompt_ids, self.settings.max_new_tokens, f"answers-{kind}"
            )
        return self._drawn[kind]

    def generate_greedy(
        self, kind: Kind, prompts: Sequence[Sequence[int]], max_new_tokens: int, name: str
    ) -> list[Sample]:
        """Greedy answers to prompts of token ids; a file of this name in the folder keeps them.

        Short answers fit into one batch nearly everywhere; where memory is too small, it is halved.
        """
        config = SamplingConfig(temperature=0.0, samples=1, max_new_tokens=max_new_tokens)
        file, size = self.folder / f"{name}.jsonl", min(len(prompts), MOST_AT_ONCE)
        with self.job(f"answers of the {kind}", len(prompts), "answers") as on_progress, self.acting(kind):
            while True:
                engine = TransformersEngine(self.model, self.tokenizer, size, self.loaded.stop_token_ids)
                try:
                    draw_samples(engine, prompts, config, file, on_progress)
                    return read_samples(file)
                except torch.OutOfMemoryError:
                    if size == 1:
                        raise
                # out here, where the error no longer holds the batch's tensors
                size = (size + 1) // 2
                torch.cuda.empty_cache()

    def greedy_answer_rows(self, kind: Kind) -> list[Row]:
        """The prompts with the answers of `greedy_answers` behind them, which are the labels; `row` is the prompt's index."""
        return answer_rows(self.prompt_ids, self.greedy_answers(kind))

    @cached_property
    def scoring_rows(self) -> dict[str, list[Row]]:
        """What strengths are tried on: "examples" where there are any, and a part of the "base" and "adapter" answers."""
        found: dict[str, Sequence[Row]] = {"examples": self.rows} if self.rows else {}
        found["adapter"] = self.greedy_answer_rows("adapter")
        if self.has_base:
            found["base"] = self.greedy_answer_rows("base")
        return {name: self.subsample_to_budget(rows, TEXT_PASSES, TEXT_SECONDS) for name, rows in found.items()}

    @contextmanager
    def scaled(self, strengths: float | Mapping[str, float]) -> Iterator[None]:
        """The context in which the model is its plain adapter with each module's delta scaled (`scale_adapter`)."""
        with self.acting("adapter"), scale_adapter(self.model, strengths):
            yield

    def cached_losses(self, text: str, label: str, acting: AbstractContextManager[None]) -> Losses:
        """`losses` of one of `scoring_rows` inside a context; read once, and kept in the folder under the label."""
        file = self.folder / "losses.json"
        if not self._losses and file.exists():
            stored = records.read_object(file, "remove the file, and they are read again")
            texts = {name: distinct(rows) for name, rows in self.scoring_rows.items()}
            self._losses = {
                key: Losses(np.array(sums), np.array(tokens), texts[key.partition(" as ")[0]])
                for key, (sums, tokens) in stored.items()
            }
        key = f"{text} as {label}"
        if key not in self._losses:
            with acting:
                self._losses[key] = self.losses(self.scoring_rows[text])
            kept = {key: one for key, one in self._losses.items() if np.isfinite(one.sums).all()}
            write_json(file, {key: [one.sums.tolist(), one.tokens.tolist()] for key, one in kept.items()})
        return self._losses[key]

    def score_questions(self, name: Literal["dev", "retention"], strengths: Sequence[float] = ()) -> dict[str, Array]:
        """Shares right [questions] of greedy answers to the first questions of the dev or retention set, by λ.

        Args:
            strengths: λ for all modules beside "0" (the base, where it can be had) and "1" (the adapter), which are always asked.

        Returns:
            {"0": …, "1": …, "0.5": …}; what is on file is not drawn again. {} where the adapter changes nothing to be compared, or
            cannot be asked at another strength.

        Raises:
            DataError: for a set that cannot be read or judged.
        """
        if strengths and self.unscaled_modules:
            self.say(
                f"the {name} set is not asked: one λ for the whole adapter does not reach {self.unscaled_modules[0]}"
            )
            return {}
        variants = {"1": ModelVariant("adapter"), **({"0": ModelVariant("base")} if self.has_base else {})}
        variants |= {f"{value:g}": ModelVariant.scaled(value) for value in strengths if value not in (0, 1)}
        variants = {label: variant.with_temperature(0) for label, variant in variants.items()}
        folder, settings = self.folder / name, self.settings.dev if name == "dev" else DevSettings()
        dev = read_dev(self.dev_data if name == "dev" else self.retention_data, settings, name)
        longest = max((sum(label != IGNORE_INDEX for label in row["labels"]) for row in self.rows), default=0)
        task = dev.prepare_task(
            self.tokenizer,
            self.loaded.max_positions,
            0,
            system=self.settings.system,
            answer_tokens=2 * longest if longest and name == "dev" else RETENTION_TOKENS,
            raw=self.uses_raw_prompts,
        )
        task = replace(task, questions=task.questions[: self.settings.questions])
        total = len(variants) * len(task.questions)
        done: dict[str, int] = {}
        with self.job(f"the {name} set", total, "answers") as on_progress:

            def on_event(stage: str, variant: ModelVariant, task: str, count: int, of: int) -> None:
                done[variant.label] = count
                on_progress(sum(done.values()), total)

            try:
                record = evaluate(
                    self.model,
                    self.tokenizer,
                    [task],
                    list(variants.values()),
                    folder,
                    batch_size=self.settings.batch_size,
                    resume=RunFolder(folder).record_path.is_file(),
                    on_event=on_event,
                )
            except GateError as error:
                self.say(f"the {name} set is not asked: {error}")
                return {}
        rows = {row.label: np.array(row.question_scores) for row in record.results}
        return {label: rows[variant.label] for label, variant in variants.items()}

    def losses(self, rows: Sequence[Row]) -> Losses:
        """Negative log-likelihood of the labels of rows, under whatever acts on the model at the moment."""
        sums, counts = np.zeros(len(rows)), np.zeros(len(rows))
        for batch, rows_T, _ in self.reader.batches(rows, self.settings.batch_size):
            found = self.reader.label_log_probs(batch).double().cpu().numpy()
            sums += np.bincount(rows_T, -found, minlength=len(rows))
            counts += np.bincount(rows_T, minlength=len(rows))
        return Losses(sums, counts, distinct(rows))


Part = Callable[[ExamContext], tuple[Any, list[Finding]]]
"""A part of the examination: the measures that it makes (a field of `Measures`) and what it found."""
