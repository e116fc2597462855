"""The engine's own decoding loop: a prompt is read once for all its samples, and rows leave the batch when they end.

`transformers.generate` reads a prompt anew for every sample and feeds rows that have ended until the longest is done.
Here the distinct prompts of a batch are read, their key-value cache is copied to the rows of their samples, and the cache
is cut down to the running rows whenever enough have ended. `plain_decoder` says for which models this is known to be
right; the engine leaves every other to `generate`. How a token is drawn is not known here.

Shapes: U distinct prompts, B rows, b rows still in the batch, T positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from loragate.generation.sampling import SeededSampler

DROP_SHARE = 1 / 8
"""The batch is cut down once this share of its rows has ended.

Cutting copies the cache of the rows that stay, which costs about what one step of a growing cache costs anyway; with this
share a batch of B rows is cut at most about ln(B) / ln(8/7) times.
"""


ROOM = 64
"""Places for tokens to come that a cache makes at a time."""

READ_AT_ONCE = 1024
"""Tokens of prompts that a CPU reads at a time: what a layer makes of them stays in its cache, in three quarters of the time."""


def plain_decoder(model: Any) -> Any | None:
    """Return the causal language model inside `model` if `decode` may run it, else None.

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


@dataclass(frozen=True)
class Reading:
    """What a model has left of a prompt of T tokens: keys and values of every layer, [heads, T, width], and logits [V] fp32."""

    keys: list[Tensor]
    values: list[Tensor]
    logits_V: Tensor

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return sum(one.nbytes for one in (*self.keys, *self.values, self.logits_V))


class KeptPrompts:
    """Readings of prompts, for models that answer them again: at another temperature, or with more samples.

    Where there is no room left, what the weights that were asked longest ago have read is forgotten.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int = 1 << 30) -> None:
        self.budget, self.used = budget, 0
        self.of_weights: dict[Hashable, dict[tuple[int, ...], Reading]] = {}

    def begin(self, weights: Hashable) -> None:
        """From now on the model acts as these weights."""
        # taken out and put back: the weights asked last stand last in the dictionary
        self.of_weights[weights] = self.of_weights.pop(weights, {})

    @property
    def readings(self) -> dict[tuple[int, ...], Reading]:
        """{token ids of a prompt: what the present weights have read of it}."""
        return self.of_weights[next(reversed(self.of_weights))]

    def add(self, prompt: tuple[int, ...], reading: Reading) -> None:
        """Keep it, if there is room."""
        while self.used + reading.bytes > self.budget and len(self.of_weights) > 1:
            forgotten = self.of_weights.pop(next(iter(self.of_weights)))
            self.used -= sum(one.bytes for one in forgotten.values())
        if self.used + reading.bytes <= self.budget:
            self.readings[prompt] = reading
            self.used += reading.bytes


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer with room behind them, where a step writes its token; `DynamicLayer` copies all that there is."""

    room: dict[str, Tensor]  # [B, heads, at least T, width]; `keys` and `values` are its first T places

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `DynamicLayer.update`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.room = {}
        held = self.get_seq_length()  # T places are written; states are [B, heads, new places, width]
        end = held + key_states.shape[-2]
        for name, states in (("keys", key_states), ("values", value_states)):
            room = self.room.get(name)
            if room is None or room.shape[-2] < end:
                room = states.new_empty(*states.shape[:-2], end + ROOM, states.shape[-1])
                if held:
                    room[..., :held, :] = getattr(self, name)
                self.room[name] = room
            room[..., held:end, :] = states
            setattr(self, name, room[..., :end, :])  # a view: attention reads it, and nothing is copied
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """See `DynamicLayer.batch_select_indices`; the new rows are given room when they grow."""
        super().batch_select_indices(indices)
        self.room = {}


def decode(
    causal: Any,
    prompts: Sequence[Sequence[int]],
    sampler: SeededSampler,
    max_new_tokens: int,
    pad_id: int,
    kept: KeptPrompts | None = None,
) -> list[list[int]]:
    """Return the generated tokens of every row, [B, T]; `sampler.tokens_B` says how many of them count.

    Args:
        causal: what `plain_decoder` returned, in evaluation mode.
        prompts: token ids of each row's prompt; equal ones are read once.
        sampler: chooses every token and knows which rows have ended.
        max_new_tokens: the largest of `sampler.limits_B`.
        pad_id: a token for places that are masked.
        kept: readings of these weights, which grow; only where `keeps_prompts` says that they are all there is.
    """
    places: dict[tuple[int, ...], int] = {}
    # which of the U distinct prompts each row has; the dictionary keeps them in the order in which they come
    read_B = torch.tensor([places.setdefault(tuple(prompt), len(places)) for prompt in prompts])
    ids_UT, mask_UT = padded(places, pad_id, "left")
    width, lengths_b = ids_UT.shape[1], mask_UT.sum(-1)
    # what is masked stands in front of a prompt; behind it every place will hold a token
    mask_bT = torch.cat([mask_UT, mask_UT.new_ones(len(places), max_new_tokens)], dim=-1).to(causal.device)
    cache = _new_cache(causal)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    forward = _reader(causal, cache)
    if kept is None:
        # positions count real tokens from 0; padding has some position, which the mask hides
        logits_bV = forward(ids_UT, mask_bT[:, :width], (mask_UT.cumsum(-1) - 1).clamp(min=0))
    else:
        logits_bV = _recall(causal, list(places), kept, pad_id, cache)
    if len(places) < len(prompts):  # from U rows to B
        cache.batch_select_indices(read_B)
        logits_bV, lengths_b, mask_bT = logits_bV[read_B], lengths_b[read_B], mask_bT[read_B]

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


def keeps_prompts(causal: Any | None) -> bool:
    """Whether readings may be laid together in another batch than they were made in.

    Not where layers keep a window of the last tokens, padding included, where places and positions are one, or where rotary
    angles follow the longest row of a batch. On an accelerator reading is cheap beside decoding, and memory is scarce.
    """
    if causal is None or not takes_positions(causal) or causal.device.type != "cpu":
        return False
    config = causal.config.get_text_config(decoder=True)
    # under either name, old and new, as a text: their forms differ between versions of transformers
    angles = str([getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")])
    if "longrope" in angles or "dynamic" in angles:
        return False
    return all(type(layer) is DynamicLayer for layer in _new_cache(causal).layers)


def _recall(
    causal: Any, prompts: Sequence[tuple[int, ...]], kept: KeptPrompts, pad_id: int, cache: DynamicCache
) -> Tensor:
    """Fill the empty `cache` with the prompts' keys and values, aligned at their last tokens; returns their logits [U, V]."""
    found = {prompt: kept.readings[prompt] for prompt in prompts if prompt in kept.readings}
    new = [prompt for prompt in prompts if prompt not in found]
    while new:  # as many at a time as fit into READ_AT_ONCE tokens, padding included
        count = max(1, READ_AT_ONCE // max(map(len, new)))
        now, new = new[:count], new[count:]
        ids_NT, mask_NT = padded(now, pad_id, "left")
        read = _new_cache(causal)
        logits_NV = _reader(causal, read)(ids_NT, mask_NT, (mask_NT.cumsum(-1) - 1).clamp(min=0))
        for row, prompt in enumerate(now):
            # copies, so that what is kept does not hold the batch that it was read in
            keys, values = (
                [getattr(layer, name)[row, :, -len(prompt) :].clone() for layer in read.layers]
                for name in ("keys", "values")
            )
            found[prompt] = Reading(keys, values, logits_NV[row].clone())
            kept.add(prompt, found[prompt])
    width = max(map(len, prompts))
    for index in range(len(found[prompts[0]].keys)):  # layer by layer, [U, heads, width, head width]
        both = []
        for name in ("keys", "values"):
            rows = [getattr(found[prompt], name)[index] for prompt in prompts]
            laid_UHTD = rows[0].new_zeros(len(rows), rows[0].shape[0], width, rows[0].shape[-1])
            for laid_HTD, row in zip(laid_UHTD, rows):
                laid_HTD[:, width - row.shape[1] :] = row
            both.append(laid_UHTD)
        cache.update(*both, index)
    return torch.stack([found[prompt].logits_V for prompt in prompts])


def takes_positions(causal: Any | None) -> bool:
    """Whether `causal` is a model that `decode` runs and tells the positions of its tokens."""
    return causal is not None and "position_ids" in inspect.signature(causal.forward).parameters


def padded(rows: Iterable[Sequence[int]], pad_id: int, side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
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
        if takes_positions(causal):
            inputs["position_ids"] = positions
        output = causal(**{name: value.to(causal.device) for name, value in inputs.items()}, **fixed)
        logits: Tensor = output.logits[:, -1].float()  # [rows, 1 or T, V]: of the last position in any case
        return logits

    return forward
