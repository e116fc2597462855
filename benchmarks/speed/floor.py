"""The arithmetic floor that a Stage-II step stands on.

The floor is counted by running it, not by a formula: the adapted model with everything frozen, forward; the gradient of
the activations from the last hidden state back to the first place where a gate can act, the outputs of the first layer's
queries, keys and values; and one projection of the response positions through the output head. What a gate step adds:
gate logits and their gradients, and the sparse backward of the head.
"""

from __future__ import annotations

import torch
from common import Counts, count
from contestants import Shape, adapter, batch


def floor(shape: Shape) -> Counts:
    """The counted floor of a Stage-II step; `saved` has no meaning here."""
    model, data = adapter(shape).requires_grad_(False), batch(shape)
    causal = model.get_base_model()
    first = causal.model.layers[0].self_attn
    for module in (first.q_proj, first.k_proj, first.v_proj):
        module.register_forward_hook(lambda _module, _inputs, out: out.detach().requires_grad_())

    def loss() -> torch.Tensor:
        hidden = causal.model(input_ids=data["input_ids"], use_cache=False).last_hidden_state
        causal.lm_head(hidden.detach().flatten(0, 1)[: shape.labelled])
        return hidden.sum()

    return count(model, loss)
