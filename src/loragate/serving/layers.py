"""vLLM's linear LoRA layers with gates: λ is multiplied into the rank-r buffer between A and B.

Each adapter slot of a layer holds one gate per packed slice (three for qkv_proj, two for gate_up_proj). A slot without
gates holds zeros and the range [1, 1], so that λ is exactly 1; a token without an adapter gets 0. Values live in tensors
that are filled in place: nothing is baked into a compiled or captured graph.

Shapes: T tokens, D input width (of this rank), R rank, S adapter slots, N slices of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loragate.gates.signed_map import gate_coefficient

BIAS, TAU, LOWER, UPPER = range(4)
_UNGATED = (0.0, 1.0, 1.0, 1.0)


def slot_coefficients(
    x_TD: torch.Tensor,
    slots_T: torch.Tensor,
    weight_SND: torch.Tensor,
    constants_SN4: torch.Tensor,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """λ of every token under the gates of its own slot, [N, T] fp32.

    Args:
        x_TD: input of the layer, any floating dtype.
        slots_T: slot of each token, -1 for a token without an adapter; entries out of range belong to padding.
        weight_SND, constants_SN4: gate weights, and (bias, τ, L, U), fp32.
        reduce: sums over the ranks of a row-parallel layer, each of which holds a part of D.
    """
    slots, slices, width = weight_SND.shape
    logits_TSN = torch.matmul(x_TD.float(), weight_SND.view(slots * slices, width).t()).view(-1, slots, slices)
    # padding of a captured graph carries arbitrary indices
    own_T = slots_T.clamp(0, slots - 1)
    logits_TN = logits_TSN.gather(1, own_T.view(-1, 1, 1).expand(-1, 1, slices)).squeeze(1)
    if reduce is not None:
        logits_TN = reduce(logits_TN)
    constants_TN4 = constants_SN4[own_T]
    lam_TN = gate_coefficient(
        logits_TN + constants_TN4[..., BIAS],
        constants_TN4[..., LOWER],
        constants_TN4[..., UPPER],
        constants_TN4[..., TAU],
    )
    # vLLM 0.32 on a CPU reads index -1 as the last slot: a token without an adapter would get that one's delta
    return torch.where((slots_T >= 0).unsqueeze(-1), lam_TN, 0.0).t()


class GatedPunica:
    """Stands before vLLM's punica wrapper of one layer and scales what its shrink leaves in the buffer."""

    def __init__(self, punica: Any, layer: Any) -> None:
        self.punica = punica
        self.layer = layer

    def add_shrink(self, y: Any, x: torch.Tensor, lora_a_stacked: Any, scale: float, **kwargs: Any) -> Any:
        """A x into the fp32 buffer [N, T, R], times λ."""
        shrunk = self.punica.add_shrink(y, x, lora_a_stacked, scale, **kwargs)
        buffer = y if shrunk is None else shrunk
        flat_TD = x.view(-1, x.shape[-1])
        layer = self.layer
        # the persistent buffer: the property of this name cuts it at a Python number, which a graph would bake in
        slots_T = self.punica._token_lora_indices[: flat_TD.shape[0]]
        lam_NT = slot_coefficients(flat_TD, slots_T, layer.gate_weight, layer.gate_constants, layer.gate_reduce)
        buffer.mul_(lam_NT.unsqueeze(-1))
        return shrunk

    def add_expand(self, *args: Any, **kwargs: Any) -> Any:
        """B times the buffer, as vLLM does it."""
        return self.punica.add_expand(*args, **kwargs)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> Any:
        """Both in turn; vLLM's own method would call its own shrink."""
        add_inputs = kwargs.pop("add_inputs", True)
        kwargs.pop("buffer", None)
        shape = (len(output_slices), x.size(0), lora_b_stacked[0].size(-1))
        buffer_NTR = torch.zeros(shape, dtype=torch.float32, device=x.device)
        self.add_shrink(buffer_NTR, x, lora_a_stacked, scale, **kwargs)
        return self.punica.add_expand(y, buffer_NTR, lora_b_stacked, output_slices, add_inputs=add_inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["punica"], name)


class GateMixin:
    """What a linear LoRA layer of vLLM gains: gates per slot beside its A and B."""

    def create_lora_weights(self: Any, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        stacked = self.lora_a_stacked
        slices, width, device = len(stacked), stacked[0].shape[-1], stacked[0].device
        self.gate_weight = torch.zeros(max_loras, slices, width, dtype=torch.float32, device=device)
        self.gate_constants = torch.tensor(_UNGATED, dtype=torch.float32, device=device).repeat(max_loras, slices, 1)
        self.gate_reduce = _reduction(self)

    def set_mapping(self: Any, punica_wrapper: Any) -> None:
        super().set_mapping(GatedPunica(punica_wrapper, self))  # type: ignore[misc]

    def reset_lora(self: Any, index: int) -> None:
        super().reset_lora(index)  # type: ignore[misc]
        self.gate_weight[index] = 0
        for place, value in enumerate(_UNGATED):
            self.gate_constants[index, :, place] = value

    def set_gate(
        self: Any,
        index: int,
        piece: int,
        weight_D: torch.Tensor | None,
        bias: float,
        settings: tuple[float, float, float],
    ) -> None:
        """Fill slot `index`, slice `piece`; `settings` are (τ, L, U), and the weight is that of the whole layer."""
        if weight_D is not None:
            width = self.gate_weight.shape[-1]
            start = self.tp_rank * width if self.gate_reduce is not None else 0
            self.gate_weight[index, piece].copy_(weight_D[start : start + width])
        values = torch.tensor([bias, *settings], dtype=torch.float32)
        self.gate_constants[index, piece].copy_(values)

    def gate_width(self: Any) -> int:
        """Input width of the whole layer, over all ranks."""
        return self.gate_weight.shape[-1] * (self.tp_size if self.gate_reduce is not None else 1)


def gated_class(lora_class: type) -> type:
    """`lora_class` with gates; any class that is no linear LoRA layer comes back as it is."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    if not issubclass(lora_class, BaseLinearLayerWithLoRA) or issubclass(lora_class, GateMixin):
        return lora_class
    return type("Gated" + lora_class.__name__, (GateMixin, lora_class), {"__module__": __name__})


def _reduction(layer: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """How the parts of w·h come together: row-parallel layers hold a part of the input on each rank."""
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.lora.layers import RowParallelLinearWithLoRA

    split = isinstance(layer, RowParallelLinearWithLoRA) and layer.tp_size > 1
    return tensor_model_parallel_all_reduce if split else None
