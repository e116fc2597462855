"""The engine's own decoding loop: a prompt is read once for all its samples, and rows leave the batch when they end.

`transformers.generate` reads a prompt anew for every sample and feeds rows that have ended until the longest is done.
Here the distinct prompts of a batch are read, their key-value cache is copied to the rows of their samples, and the cache
is cut down to the running rows whenever enough have ended. `plain_decoder` says for which models this is known to be
right; the engine leaves every other to `generate`. How a token is drawn is not known here.

Shapes: U distinct prompts, B rows, b rows still in the batch, T positions, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from loragate.generation.sampling import SeededSampler

DROP_SHARE = 1 / 8
"""The batch is cut down once this share of its rows has ended.

Cutting copies the cache of the rows that stay, which costs about what one step of a growing cache costs anyway; with this
share a batch of B rows is cut at most about ln(B) / ln(8/7) times.
"""


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
        and type(causal).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
        and not getattr(causal, "_is_stateful", False)
        and not getattr(causal.config, "is_encoder_decoder", False)
        and "past_key_values" in inspect.signature(causal.forward).parameters
        and not getattr(causal.forward, "state_per_row", False)
        and all(getattr(adapter.peft_type, "value", adapter.peft_type) == "LORA" for adapter in adapters)
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


def decode(
    causal: Any, prompts: Sequence[Sequence[int]], sampler: SeededSampler, max_new_tokens: int, pad_id: int
) -> list[list[int]]:
    """Return the generated tokens of every row, [B, T]; `sampler.tokens_B` says how many of them count.

    Args:
        causal: what `plain_decoder` returned, in evaluation mode.
        prompts: token ids of each row's prompt; equal ones are read once.
        sampler: chooses every token and knows which rows have ended.
        max_new_tokens: the largest of `sampler.limits_B`.
        pad_id: a token for places that are masked.
    """
    places: dict[tuple[int, ...], int] = {}
    read_B = torch.tensor([places.setdefault(tuple(prompt), len(places)) for prompt in prompts])
    ids_UT, mask_UT = pad_left([list(prompt) for prompt in places], pad_id)
    width, lengths_b = ids_UT.shape[1], mask_UT.sum(-1)
    # what is masked stands in front of a prompt; behind it every place will hold a token
    mask_bT = torch.cat([mask_UT, mask_UT.new_ones(len(places), max_new_tokens)], dim=-1).to(causal.device)
    cache = _new_cache(causal)
    forward = _reader(causal, cache)
    logits_bV = forward(ids_UT, mask_bT[:, :width], (mask_UT.cumsum(-1) - 1).clamp(min=0))
    if len(places) < len(prompts):
        cache.batch_select_indices(read_B)
        logits_bV, lengths_b, mask_bT = logits_bV[read_B], lengths_b[read_B], mask_bT[read_B]

    tokens_BT = torch.full((len(prompts), max_new_tokens), pad_id)
    # mixtures of experts decode with another kernel than they read with, where transformers has one
    with getattr(causal, "_optimize_model_for_decode", nullcontext)():
        for step in range(max_new_tokens):
            chosen_b = sampler.choose(tokens_BT[sampler.rows_b, :step], logits_bV).cpu()
            tokens_BT[sampler.rows_b, step] = chosen_b
            stopped_b = sampler.stopped_B[sampler.rows_b]
            if step + 1 == max_new_tokens or bool(stopped_b.all()):
                break
            if int(stopped_b.sum()) >= DROP_SHARE * len(stopped_b):
                kept = (~stopped_b).nonzero()[:, 0]
                cache.batch_select_indices(kept)
                sampler.keep(kept)
                chosen_b, lengths_b, mask_bT = chosen_b[kept], lengths_b[kept], mask_bT[kept]
            # a row that has ended and is still fed must not pass the end of a table of positions
            fed_b = torch.minimum(sampler.limits_B[sampler.rows_b] - 1, torch.tensor(step))
            logits_bV = forward(chosen_b[:, None], mask_bT[:, : width + step + 1], (lengths_b + fed_b)[:, None])
    rows: list[list[int]] = tokens_BT.tolist()
    return rows


def takes_positions(causal: Any | None) -> bool:
    """Whether `causal` is a model that `decode` runs and tells the positions of its tokens."""
    return causal is not None and "position_ids" in inspect.signature(causal.forward).parameters


def pad_left(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return the rows as one tensor, aligned at their last token, and the mask of real tokens; both [B, T] int64."""
    width = max(map(len, rows))
    input_ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows])
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return input_ids, attention_mask


def _new_cache(causal: Any) -> DynamicCache:
    return DynamicCache(config=causal.config.get_text_config(decoder=True))


def _reader(causal: Any, cache: DynamicCache) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A forward pass on top of `cache`: (ids, mask, positions) to the last position's logits, [rows, V] fp32."""
    taken = inspect.signature(causal.forward).parameters
    # the same inputs as `generate` gives, and the same precision of what it hands to its processors
    fixed = {"past_key_values": cache, "use_cache": True, "return_dict": True}
    if "logits_to_keep" in taken:
        fixed["logits_to_keep"] = 1

    def forward(ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        inputs = {"input_ids": ids, "attention_mask": mask}
        if takes_positions(causal):
            inputs["position_ids"] = positions
        output = causal(**{name: value.to(causal.device) for name, value in inputs.items()}, **fixed)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    return forward
