"""Samples from a causal language model in memory: base, PeftModel or gated PeftModel.

`TransformersEngine` decides what goes into a batch. Its own loop, `generate_tokens`, reads a prompt once for all its samples and
drops rows from the batch when they end; `transformers.generate` reads a prompt anew for every sample and feeds rows that have
ended until the longest is done. `find_supported_decoder` says for which models the loop is known to be right; every other model
is left to `generate`. How a token is drawn is in `sampling` either way.

Shapes: U distinct prompts, B rows, b rows still in the batch, T positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from loragate.data import find_endings
from loragate.generation.engine import (
    Continuation,
    Engine,
    OnProgress,
    Prompts,
    Sample,
    decode_answer,
    finish_answers,
    first_stop,
    stop_tokens,
    tokenize_prompts,
)
from loragate.generation.sampling import SamplingConfig, SeededSampler
from loragate.models.passes import iter_passes
from loragate.modes import evaluation_mode

DROP_SHARE = 1 / 8
"""The batch is cut down once this share of its rows has ended.

Cutting copies the cache of the rows that stay, which costs about what one step of a growing cache costs anyway; with this
share a batch of B rows is cut at most about ln(B) / ln(8/7) times.
"""
GROWTH = 64
"""Positions by which a cache grows at a time."""


class TransformersEngine(Engine):
    """Sample from a causal language model held in memory, with or without adapter and gates.

    The model's own generation settings (temperature, top-k, repetition penalty and so on) are not used: a sample depends
    on the `SamplingConfig` alone. A row ends where `loragate.data.find_endings` says, at one of `stop_token_ids`, or at the
    model's last position. The model is put in evaluation mode while it samples and restored afterwards.

    The distinct prompts of a batch are read once for all their samples, and rows that have ended leave the batch, where
    `find_supported_decoder` finds the model fit for it; `reuse_prompts=False` leaves every model to `transformers.generate`, which
    draws the same samples in more time.
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
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.reuse_prompts = reuse_prompts
        self.endings = find_endings(tokenizer, model.generation_config, stop_token_ids or ())

    def draw(
        self, prompts: Prompts, config: SamplingConfig, rows: list[tuple[int, int]]
    ) -> Generator[list[Sample], None, None]:
        """See `Engine.draw`."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        prompt_ids, limits = tokenize_prompts(self.tokenizer, prompts, config.max_new_tokens, positions)
        # Neighbours of similar length waste little padding; the longest come first, so that memory fails early if at all.
        rows = sorted(rows, key=lambda row: (-len(prompt_ids[row[0]]), row))
        # asked anew at each call: an adapter may have been put on since, or taken off
        causal = find_supported_decoder(self.model) if self.reuse_prompts else None
        # `generate_tokens` keeps rows that have ended within a table of positions where it may say what their positions are
        end = None if _takes_positions(causal) or not _has_position_table(self.model) else positions
        lengths = [len(prompt_ids[question]) for question, _ in rows]
        answer_limits = [limits[question] for question, _ in rows]
        with torch.no_grad(), evaluation_mode(self.model):
            for batch in iter_passes(self.model, lengths, self.batch_size, answer_limits, end):
                yield self._generate_batch(causal, prompt_ids, [rows[index] for index in batch], config, limits)

    def log_likelihoods(
        self, pairs: Sequence[Continuation], on_progress: OnProgress | None = None
    ) -> list[tuple[float, bool]]:
        """See `Engine.log_likelihoods`; log-probabilities are taken in fp32, as bf16 would decide close choices."""
        order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
        # without the last token, as position t scores token t + 1
        scored = [[*before, *after][:-1] for before, after in (pairs[index] for index in order)]
        lengths = [len(row) for row in scored]
        passes = iter_passes(self.model, lengths, self.batch_size)
        found: dict[int, tuple[float, bool]] = {}
        pad_id = self._pad_token_id()
        with torch.no_grad(), evaluation_mode(self.model):
            for places in passes:
                batch, rows = [order[place] for place in places], [scored[place] for place in places]
                # padding stands behind, where a causal model does not see it
                input_ids, mask = pad_rows(rows, pad_id, "right")
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
            stop_tokens(self.tokenizer, config.stop, self.endings),
            _stop_detector(self.tokenizer, (*config.stop, *self.endings.texts)),
            limits_B,
        )
        longest = int(limits_B.max())
        if causal is not None:
            new_ids = generate_tokens(causal, prompts, sampler, longest, pad_id)
        else:
            new_ids = self._generate_by_transformers(prompts, sampler, longest, pad_id)
        token_ids = [row[:count] for row, count in zip(new_ids, sampler.tokens_B.tolist())]
        stopped = sampler.ended_by_token_B.tolist()  # the last token is a stop token, and no part of the text
        answers = finish_answers(self.tokenizer, token_ids, stopped, config.stop, self.endings)
        return [
            Sample(question, index, text, ids, reason, entropy)
            for (question, index), (ids, text, reason), entropy in zip(rows, answers, sampler.mean_entropy().tolist())
        ]

    def _generate_by_transformers(
        self, prompts: list[list[int]], sampler: SeededSampler, max_new_tokens: int, pad_id: int
    ) -> list[list[int]]:
        input_ids, attention_mask = pad_rows(prompts, pad_id, "left")
        # `generate` fills in all that is left open here from the model's own settings, so they are hidden meanwhile. A
        # `PeftModel` keeps its own reference and copies it onto the model that it wraps, so both are set and restored.
        owners = [self.model]
        if hasattr(self.model, "get_base_model"):
            owners.append(self.model.get_base_model())
        own_settings = [owner.generation_config for owner in owners]
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
                    eos_token_id=sampler.stop_ids.tolist(),
                    pad_token_id=pad_id,
                    use_cache=True,
                ),
            )
        finally:
            for owner, settings in zip(owners, own_settings):
                owner.generation_config = settings
        new_ids: list[list[int]] = output_ids[:, input_ids.shape[1] :].tolist()
        return new_ids

    def _pad_token_id(self) -> int:
        """The tokenizer's padding token or, as padding is masked and cut off again, any token that ends a row."""
        for declared in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if declared is not None:
                return int(declared)
        return min(self.endings.token_ids)


def find_supported_decoder(model: Any) -> Any | None:
    """Return the causal language model inside `model` if `generate_tokens` may run it, else None.

    It may where nothing but a key-value cache is carried from step to step, so that rows can be copied and dropped: a
    decoder without recurrent states that prepares its inputs as `GenerationMixin` does, with no adapter or LoRA alone.
    Not a model whose weights are sharded, as its processes must call it equally often, nor one whose forward pass was
    replaced by one with a state of its own per row (it says so by an attribute `state_per_row`).
    """
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapters = (getattr(model, "peft_config", None) or {}).values()
    plain = (
        isinstance(causal, GenerationMixin)
        # a model with its own way of preparing inputs may need what this loop does not know
        and type(causal).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        and not getattr(causal, "_is_stateful", False)
        and not getattr(causal.config, "is_encoder_decoder", False)
        and "past_key_values" in inspect.signature(causal.forward).parameters
        and not getattr(causal.forward, "state_per_row", False)
        and all(getattr(adapter.peft_type, "value", adapter.peft_type) == "LORA" for adapter in adapters)
        # activated LoRA looks for its invocation tokens in the prompt, which a step does not show
        and not any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters)
        # shards of FSDP2 and of DeepSpeed's ZeRO-3
        and not any(hasattr(weight, "full_tensor") or hasattr(weight, "ds_id") for weight in causal.parameters())
    )
    if not plain or not {type(layer) for layer in _new_cache(causal).layers} <= {
        DynamicLayer,
        DynamicSlidingWindowLayer,
    }:
        return None
    return causal


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer in buffers with free positions, where a step writes its token.

    `DynamicLayer` copies all keys and values at every step.
    """

    buffers: dict[str, Tensor]  # [B, heads, at least T, width]; `keys` and `values` are their first T positions

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer.update`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = {}
        held = self.get_seq_length()  # T positions are written; states are [B, heads, new positions, width]
        end = held + key_states.shape[-2]
        for name, states in (("keys", key_states), ("values", value_states)):
            buffer = self.buffers.get(name)
            if buffer is None or buffer.shape[-2] < end:
                buffer = states.new_empty(*states.shape[:-2], end + GROWTH, states.shape[-1])
                if held:
                    buffer[..., :held, :] = getattr(self, name)
                self.buffers[name] = buffer
            buffer[..., held:end, :] = states
            setattr(self, name, buffer[..., :end, :])  # a view: attention reads it, and nothing is copied
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """See `DynamicLayer.batch_select_indices`; the buffers are made anew when the rows grow."""
        super().batch_select_indices(indices)
        self.buffers = {}


def generate_tokens(
    causal: Any,
    prompts: Sequence[Sequence[int]],
    sampler: SeededSampler,
    max_new_tokens: int,
    pad_id: int,
) -> list[list[int]]:
    """Return the generated tokens of every row, [B, T]; `sampler.tokens_B` says how many of them count.

    `causal` is what `find_supported_decoder` returned, in evaluation mode; equal prompts are read once.
    """
    distinct: dict[tuple[int, ...], int] = {}
    # which of the U distinct prompts each row has; the dictionary keeps them in the order in which they come
    prompt_B = torch.tensor([distinct.setdefault(tuple(prompt), len(distinct)) for prompt in prompts])
    ids_UT, mask_UT = pad_rows(distinct, pad_id, "left")
    width, lengths_b = ids_UT.shape[1], mask_UT.sum(-1)
    # what is masked stands in front of a prompt; behind it every position will hold a token
    mask_bT = torch.cat([mask_UT, mask_UT.new_ones(len(distinct), max_new_tokens)], dim=-1).to(causal.device)
    cache = _new_cache(causal)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    forward = _reader(causal, cache)
    # positions count real tokens from 0; padding has some position, which the mask hides
    logits_bV = forward(ids_UT, mask_bT[:, :width], (mask_UT.cumsum(-1) - 1).clamp(min=0))
    if len(distinct) < len(prompts):  # from U rows to B
        cache.batch_select_indices(prompt_B)
        logits_bV, lengths_b, mask_bT = logits_bV[prompt_B], lengths_b[prompt_B], mask_bT[prompt_B]

    tokens_BT = torch.full((len(prompts), max_new_tokens), pad_id)
    # mixtures of experts decode with another kernel than they read with, where transformers has one
    with getattr(causal, "_optimize_model_for_decode", nullcontext)():
        for step in range(max_new_tokens):
            chosen_b = sampler.choose(tokens_BT[sampler.rows_b, :step], logits_bV).cpu()
            tokens_BT[sampler.rows_b, step] = chosen_b
            # which rows have ended, as the sampler knows on the CPU, decides what is fed next
            stopped_b = sampler.stopped_B[sampler.rows_b]
            if step + 1 == max_new_tokens or bool(stopped_b.all()):
                break
            if int(stopped_b.sum()) >= DROP_SHARE * len(stopped_b):
                running = (~stopped_b).nonzero()[:, 0]
                cache.batch_select_indices(running)
                sampler.keep(running)
                chosen_b, lengths_b, mask_bT = chosen_b[running], lengths_b[running], mask_bT[running]
            # a row that has ended and is still fed must not pass the end of a table of positions
            fed_b = torch.minimum(sampler.limits_B[sampler.rows_b] - 1, torch.tensor(step))
            logits_bV = forward(chosen_b[:, None], mask_bT[:, : width + step + 1], (lengths_b + fed_b)[:, None])
    rows: list[list[int]] = tokens_BT.tolist()
    return rows


def _takes_positions(causal: Any | None) -> bool:
    """Whether `causal` is a model that `generate_tokens` runs and tells the positions of its tokens."""
    return causal is not None and "position_ids" in inspect.signature(causal.forward).parameters


def pad_rows(rows: Iterable[Sequence[int]], pad_id: int, side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Return the rows as one tensor and the mask of real tokens, both [B, T] int64; padding stands on the left or the right."""
    ids = [torch.tensor(row) for row in rows]
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    return pad(ids, padding_value=pad_id), pad([torch.ones_like(row) for row in ids])


def _new_cache(causal: Any) -> DynamicCache:
    return DynamicCache(config=causal.config.get_text_config(decoder=True))


def _reader(causal: Any, cache: DynamicCache) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A forward pass on top of `cache`: (ids, mask, positions) to the last position's logits, [rows, V] fp32."""
    taken = inspect.signature(causal.forward).parameters
    # the same inputs as `generate` gives, and the same precision of what it hands to its processors
    fixed = {"past_key_values": cache, "use_cache": True, "return_dict": True}
    keep = taken.get("logits_to_keep")
    indexed = keep is not None and "Tensor" in str(keep.annotation)
    if keep is not None and not indexed:
        fixed["logits_to_keep"] = 1

    def forward(ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask}
        if indexed:
            # An index copies the last positions. A slice of them is no contiguous tensor, for which PyTorch's linear layer lays
            # out the head's weight once for each row: gigabytes, and on a CPU a fifth of the time of reading.
            inputs["logits_to_keep"] = torch.tensor([ids.shape[1] - 1])
        if _takes_positions(causal):
            inputs["position_ids"] = positions
        output = causal(**{name: value.to(causal.device) for name, value in inputs.items()}, **fixed)
        logits: Tensor = output.logits[:, -1].float()  # [rows, 1 or T, V]: of the last position in any case
        return logits

    return forward


def _has_position_table(model: Any) -> bool:
    """Whether positions are a table that ends somewhere (GPT-2, GPT-J, OPT, MPT, …).

    Rotary angles, whose frequencies are a buffer in every family that computes them, are none; a wrong True only costs speed.
    """
    return not any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def _stop_detector(tokenizer: Any, stop: Sequence[str]) -> Callable[[list[int]], bool] | None:
    """Return a test whether the last tokens of an answer have just completed one of the texts `stop`."""
    if not stop:
        return None
    # enough tokens for the longest text, as one may be a single byte; and one more, in which it may begin
    window = max(len(text.encode()) for text in stop) + 1

    def completes_stop_text(ids: list[int]) -> bool:
        return first_stop(decode_answer(tokenizer, ids[-window:]), stop) is not None

    return completes_stop_text
