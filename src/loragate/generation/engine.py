"""From rendered prompts to samples.

`Engine` is what evaluation needs of any program that generates; `TransformersEngine` is the one that runs everywhere.
It decides what goes into a batch and leaves the loop to `decoding.py`, or to `transformers.generate` for models that
this does not know; how a token is drawn is in `sampling.py` either way. Prompts arrive as finished strings: chat
templates, tasks and grading live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from loragate.data import find_endings
from loragate.errors import ConfigError
from loragate.generation.decoding import (
    KeptPrompts,
    decode,
    keeps_prompts,
    padded,
    plain_decoder,
    takes_positions,
)
from loragate.generation.requests import (
    FinishReason,
    Prompts,
    batches,
    finish_answers,
    pending_rows,
    positions_end,
    stop_detector,
    tokenize_prompts,
)
from loragate.generation.sampling import SamplingConfig, SeededSampler
from loragate.modes import evaluation_mode

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


Continuation = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of what may follow it, neither empty."""


class Engine:
    """Anything that turns prompts into samples and says how likely continuations are; an engine defines the other two methods."""

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
        rows, samples = pending_rows(len(prompts), config.samples, pending), list[Sample]()
        with closing(self.draw(prompts, config, rows)) as batches:
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


class TransformersEngine(Engine):
    """Sample from a causal language model held in memory, with or without adapter and gates.

    The model's own generation settings (temperature, top-k, repetition penalty and so on) are not used: a sample depends
    on the `SamplingConfig` alone. A row ends where `loragate.data.find_endings` says, at one of `stop_token_ids`, or at the
    model's last position. The model is put in evaluation mode while it samples and restored afterwards.

    The distinct prompts of a batch are read once for all their samples, and rows that have ended leave the batch, where
    `decoding.plain_decoder` finds the model fit for it; `reuse_prompts=False` leaves every model to
    `transformers.generate`, which draws the same samples in more time.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        batch_size: int = 64,
        stop_token_ids: Collection[int] | None = None,
        *,
        reuse_prompts: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; give at least 1.")
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.reuse_prompts = reuse_prompts
        self.endings = find_endings(tokenizer, model.generation_config, stop_token_ids or ())
        self._kept, self._keeping = KeptPrompts(), False

    @contextmanager
    def keeping_prompts(self, weights: Hashable) -> Iterator[None]:
        """Within, what is read of prompts is kept for later calls within contexts of the same weights (up to 1 GiB, on a CPU).

        The same questions at four temperatures are then read once. The caller knows what acts: `weights` is any name of it,
        another one whenever adapter, gates or λ are others.
        """
        self._kept.begin(weights)
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False

    def draw(
        self, prompts: Prompts, config: SamplingConfig, rows: list[tuple[int, int]]
    ) -> Generator[list[Sample], None, None]:
        """See `Engine.draw`."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        prompt_ids, limits = tokenize_prompts(self.tokenizer, prompts, config.max_new_tokens, positions)
        # Neighbours of similar length waste little padding; the longest come first, so that memory fails early if at all.
        rows = sorted(rows, key=lambda row: (-len(prompt_ids[row[0]]), row))
        # asked anew at each call: an adapter may have been put on since, or taken off
        causal = plain_decoder(self.model) if self.reuse_prompts else None
        # `decode` keeps rows that have ended within a table of positions where it may say what their positions are
        end = None if takes_positions(causal) or not positions_end(self.model) else positions
        lengths, room = [len(prompt_ids[question]) for question, _ in rows], [limits[question] for question, _ in rows]
        with torch.no_grad(), evaluation_mode(self.model):
            for places in batches(lengths, room, self.batch_size, end):
                yield self._generate_batch(causal, prompt_ids, [rows[place] for place in places], config, limits)

    def log_likelihoods(
        self, pairs: Sequence[Continuation], on_progress: OnProgress | None = None
    ) -> list[tuple[float, bool]]:
        """See `Engine.log_likelihoods`; log-probabilities are taken in fp32, as bf16 would decide close choices."""
        order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
        found: dict[int, tuple[float, bool]] = {}
        pad_id = self._pad_token_id()
        with torch.no_grad(), evaluation_mode(self.model):
            for start in range(0, len(order), self.batch_size):
                batch = order[start : start + self.batch_size]
                # without the last token, as position t scores token t + 1
                rows = [[*before, *after][:-1] for before, after in (pairs[index] for index in batch)]
                # padding stands behind, where a causal model does not see it
                input_ids, mask = padded(rows, pad_id, "right")
                device = self.model.device
                logits_BTV = self.model(input_ids=input_ids.to(device), attention_mask=mask.to(device)).logits
                for index, row, logits_TV in zip(batch, rows, logits_BTV):
                    after = torch.tensor(pairs[index][1], device=logits_TV.device)
                    # the last positions of the row, one for each token of the continuation
                    scores_TV = logits_TV[len(row) - len(after) : len(row)].float().log_softmax(-1)
                    likelihood = float(scores_TV.gather(-1, after[:, None]).sum())
                    found[index] = likelihood, bool((scores_TV.argmax(-1) == after).all())
                if on_progress is not None:
                    on_progress(len(found), len(pairs))
        return [found[index] for index in range(len(pairs))]

    def _generate_batch(
        self,
        causal: Any | None,
        prompt_ids: list[list[int]],
        rows: Sequence[tuple[int, int]],
        config: SamplingConfig,
        limits: Sequence[int],
    ) -> list[Sample]:
        pad_id = self._pad_token_id()
        prompts = [prompt_ids[question] for question, _ in rows]
        counters = torch.tensor(rows, dtype=torch.int64)  # [B, 2]: question and sample, which choose the random stream
        limits_B = torch.tensor([limits[question] for question, _ in rows])
        sampler = SeededSampler(
            config,
            counters[:, 0],
            counters[:, 1],
            max(map(len, prompts)),
            self.endings.token_ids,
            stop_detector(self.tokenizer, (*config.stop, *self.endings.texts)),
            limits_B,
        )
        longest = int(limits_B.max())
        if causal is not None:
            kept = self._kept if self._keeping and keeps_prompts(causal) else None
            new_ids = decode(causal, prompts, sampler, longest, pad_id, kept)
        else:
            new_ids = self._leave_to_generate(prompts, sampler, longest, pad_id)
        token_ids = [row[:count] for row, count in zip(new_ids, sampler.tokens_B.tolist())]
        stopped = sampler.ended_by_token_B.tolist()  # the last token is a stop token, and no part of the text
        answers = finish_answers(self.tokenizer, token_ids, stopped, config.stop, self.endings.texts)
        return [
            Sample(question, index, text, ids, reason, entropy)
            for (question, index), (ids, text, reason), entropy in zip(rows, answers, sampler.mean_entropy().tolist())
        ]

    def _leave_to_generate(
        self, prompts: list[list[int]], sampler: SeededSampler, max_new_tokens: int, pad_id: int
    ) -> list[list[int]]:
        input_ids, attention_mask = padded(prompts, pad_id, "left")
        # `generate` fills in all that is left open here from the model's own settings, so they are hidden meanwhile. A
        # `PeftModel` keeps its own reference and copies it onto the model that it wraps, so both are set and restored.
        owners = [self.model]
        if hasattr(self.model, "get_base_model"):
            owners.append(self.model.get_base_model())
        kept = [owner.generation_config for owner in owners]
        for owner in owners:
            owner.generation_config = GenerationConfig()
        try:
            output_ids = self.model.generate(
                input_ids=input_ids.to(self.model.device),
                attention_mask=attention_mask.to(self.model.device),
                logits_processor=LogitsProcessorList([sampler]),
                generation_config=GenerationConfig(
                    do_sample=False,  # the sampler leaves one token to choose from
                    max_new_tokens=max_new_tokens,
                    eos_token_id=sorted(self.endings.token_ids),
                    pad_token_id=pad_id,
                    use_cache=True,
                ),
            )
        finally:
            for owner, settings in zip(owners, kept):
                owner.generation_config = settings
        new_ids: list[list[int]] = output_ids[:, input_ids.shape[1] :].tolist()
        return new_ids

    def _pad_token_id(self) -> int:
        """The tokenizer's padding token or, as padding is masked and cut off again, any token that ends a row."""
        for declared in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if declared is not None:
                return int(declared)
        return min(self.endings.token_ids)
