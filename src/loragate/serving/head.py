"""The vocabulary's head in vLLM on a CPU: each row of logits gets the head of its own adapter, if that has one.

Models whose head may be adapted (Llama, Mistral, Qwen3) have it wrapped as soon as LoRA is on. vLLM's own operations for it on
a CPU take one row per sampled request: the log-probs of a prompt, with a row per prompt token, end the engine; and rows
without an adapter get the last slot's. They also copy a head's B once per row, though hardly any adapter has one. So the
rows are worked out here, slot by slot, for the slots that hold a head. On a GPU vLLM's kernels are left alone.

Shapes: T rows of logits, D hidden width, R rank, S adapter slots, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch


def add_head(
    logits_TV: torch.Tensor,
    hidden_TD: torch.Tensor,
    slots_T: torch.Tensor,
    heads: set[int],
    a_S1RD: torch.Tensor,
    b_S1VR: torch.Tensor,
) -> None:
    """Add B A h to the logits in place, in fp32, where a row's slot is one of `heads`; other rows keep their bits."""
    for slot in heads:
        own = slots_T == slot
        if own.any():  # most batches hold no row of an adapter with a head
            shrunk_TR = hidden_TD[own].float() @ a_S1RD[slot, 0].float().t()
            delta_TV = shrunk_TR @ b_S1VR[slot, 0].float().t()
            logits_TV[own, : delta_TV.shape[1]] += delta_TV.to(logits_TV.dtype)


class PunicaFront:
    """Stands before vLLM's punica wrapper of one layer; what it does not define is the wrapper's own."""

    def __init__(self, punica: Any, layer: Any) -> None:
        self.punica = punica
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["punica"], name)


class HeadPunica(PunicaFront):
    """That of the vocabulary's head."""

    def add_lora_logits(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, **kwargs: Any
    ) -> torch.Tensor:
        """`add_head`; vLLM's `scale` of the head is always 1."""
        layer = self.layer
        if layer.heads:
            sampled = layer.prompt_slot is None
            slots_T = self.punica.sampler_indices if sampled else torch.full((len(x),), layer.prompt_slot)
            add_head(y, x, slots_T, layer.heads, lora_a_stacked, lora_b_stacked)
        return y


def head_class(lora_class: type) -> type:
    """vLLM's `LogitsProcessorWithLoRA` that knows which slots hold a head, and whose prompt is being scored."""

    class HeadLogitsProcessor(lora_class):
        prompt_slot: int | None = None
        """Slot of the request whose prompt tokens the rows are, -1 for the base; None where rows are sampled requests."""

        def create_lora_weights(self, *args: Any, **kwargs: Any) -> None:
            super().create_lora_weights(*args, **kwargs)
            self.heads: set[int] = set()

        def set_mapping(self, punica_wrapper: Any) -> None:
            super().set_mapping(HeadPunica(punica_wrapper, self))

        def reset_lora(self, index: int) -> None:
            super().reset_lora(index)
            self.heads.discard(index)

        def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
            super().set_lora(index, lora_a, lora_b)
            self.heads.add(index)

    return HeadLogitsProcessor


def score_prompts(
    original: Any, self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
) -> dict[str, Any]:
    """`_get_prompt_logprobs_dict` of vLLM's runner, one request at a time, so that the head knows whose rows it is given."""
    if not self.lora_config:
        scored: dict[str, Any] = original(self, hidden_states, num_scheduled_tokens)
        return scored
    manager = self.lora_manager._adapter_manager
    heads = [layer for layer in manager.modules.values() if hasattr(layer, "prompt_slot")]
    found: dict[str, Any] = {}
    # the original drops the requests that it has finished
    for request in [name for name in self.num_prompt_logprobs if name in num_scheduled_tokens]:
        adapter = self.input_batch.request_lora_mapping[self.input_batch.req_id_to_index[request]]
        for head in heads:
            head.prompt_slot = manager.lora_index_to_id.index(adapter) if adapter else -1
        try:
            # it passes over requests of which nothing is scheduled
            found |= original(self, hidden_states, {request: num_scheduled_tokens[request]})
        finally:
            for head in heads:
                head.prompt_slot = None
    return found
