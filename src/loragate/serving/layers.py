"""vLLM's LoRA layers with gates: λ is multiplied into the rank-r buffer between A and B. And LoRA's products on a CPU.

Each adapter slot of a linear layer holds one gate per packed slice (three for qkv_proj, two for gate_up_proj), with bounds
of λ. A slot without gates has slopes of 0, so that λ is exactly 1; one more row, that of tokens without an
adapter, is clipped to 0. What a request lays over λ (`gates.override`) reaches each of its tokens as two more bounds, so that all
strengths of an adapter share its slot. Values live in tensors that are filled in place: nothing is baked into a compiled or
captured graph. On a CPU, and in a captured graph's small batches, the cost is the number of operations, not their size: what can
be worked out when a slot is filled (1/τ in weight and bias, the two slopes) is not worked out per token.

On a CPU vLLM gathers the A and B of every token, which costs many times the base's own product: `shrink_slots` and
`expand_slots` make one product with each per slot in the batch. On a GPU vLLM's kernels are left alone.

Models whose head may be adapted (Llama, Mistral, Qwen3) have it wrapped as soon as LoRA is on. vLLM's own operations for it on
a CPU take one row per sampled request: the log-probs of a prompt end the engine, and rows without an adapter get the last
slot's. So `add_head` works the rows out, slot by slot, for the slots that hold a head.

Shapes: T tokens or rows of logits, D input and O output width (of this rank), R rank, S adapter slots (of a gate's tensors, and
one more), N slices of the layer, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from loragate.gates.signed_map import SignedMap

NO_LIMITS = (-math.inf, math.inf)
"""(least λ, most λ) of a token whose request lays nothing over λ."""
_UNGATED = (0.0, 0.0, *NO_LIMITS)
_NO_ADAPTER = (0.0, 0.0, 0.0, 0.0)


def empty_slots(slots: int, slices: int, width: int, device: Any = None) -> tuple[torch.Tensor, ...]:
    """Gates of a layer whose slots hold none: weights [S, N, D], biases [S, N], constants [S, N, 4], all fp32.

    `slots` counts the adapters; the row after them belongs to tokens without one.
    """
    weight_SND = torch.zeros(slots + 1, slices, width, dtype=torch.float32, device=device)
    bias_SN = torch.zeros(slots + 1, slices, dtype=torch.float32, device=device)
    constants_SN4 = torch.tensor(_UNGATED, dtype=torch.float32, device=device).repeat(slots + 1, slices, 1)
    constants_SN4[-1] = torch.tensor(_NO_ADAPTER, dtype=torch.float32, device=device)
    return weight_SND, bias_SN, constants_SN4


def slot_constants(signed_map: SignedMap) -> torch.Tensor:
    """What `constants_SN4` holds for a gate: the slopes 1−L and U−1 of the signed map, and any λ as its limits."""
    return torch.tensor([signed_map.below, signed_map.above, *NO_LIMITS], dtype=torch.float32)


class TokenLimits:
    """(least λ, most λ) of every token of a batch, [M, 2] fp32 on the device, M the most tokens that a batch can have.

    One tensor for all layers, filled in place before a batch is computed.
    """

    def __init__(self, most_tokens: int, device: Any = None) -> None:
        self.values_M2 = torch.tensor(NO_LIMITS, dtype=torch.float32, device=device).repeat(most_tokens, 1)
        self.has_limits = False
        """Whether any token has limits; only where nothing is compiled or captured may this be asked."""
        self._known: tuple[torch.Tensor, SlotRows] = torch.empty(0), []
        self._strengths: torch.Tensor | None = None

    def fill(self, limits: Sequence[tuple[float, float]], tokens: Sequence[int]) -> None:
        """Set the limits of a batch: those of each request, and how many tokens of it the batch has."""
        before, self.has_limits = self.has_limits, any(each != NO_LIMITS for each in limits)
        self._strengths = None
        if self.has_limits:
            rows_R2 = torch.tensor(limits, dtype=torch.float32)
            rows_T2 = rows_R2.repeat_interleave(torch.as_tensor(tokens, dtype=torch.long), dim=0)
            self.values_M2[: len(rows_T2)].copy_(rows_T2)
        elif before:
            self.values_M2.copy_(torch.tensor(NO_LIMITS))

    def strengths(self, tokens: int) -> torch.Tensor:
        """λ of each token where its slot has no gates, [T, 1] fp32: 1 within the limits of its request."""
        if self._strengths is None or len(self._strengths) != tokens:
            least_T1, most_T1 = self.values_M2[:tokens].split(1, dim=1)
            self._strengths = torch.ones_like(least_T1).clamp(least_T1, most_T1)
        return self._strengths

    def owners(self, slots_T: torch.Tensor) -> SlotRows:
        """`group_rows_by_slot` a batch, on a CPU; worked out in its first layer."""
        if not torch.equal(self._known[0], slots_T):
            self._known = slots_T.clone(), group_rows_by_slot(slots_T)
        return self._known[1]


def slot_coefficients(
    x_TD: torch.Tensor,
    slots_T: torch.Tensor,
    weight_SND: torch.Tensor,
    bias_SN: torch.Tensor,
    constants_SN4: torch.Tensor,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
    limits_T2: torch.Tensor | None = None,
) -> torch.Tensor:
    """λ of every token under the gates of its own slot, [T, N] fp32: the signed map of `gates.signed_map`.

    Args:
        x_TD: input of the layer, any floating dtype.
        slots_T: slot of each token, -1 for a token without an adapter; entries out of range belong to padding.
        weight_SND, bias_SN: gate weights and biases, divided by τ.
        constants_SN4: (1−L, U−1, least λ, most λ).
        reduce: sums over the ranks of a row-parallel layer, each of which holds a part of D.
        limits_T2: (least λ, most λ) of each token's request; the slot's own limits come after them.
    """
    slots, slices, width = weight_SND.shape
    # -1 becomes the last row; padding of a captured graph carries arbitrary indices, which become some row
    own_T = slots_T.remainder(slots)
    table = weight_SND.view(slots * slices, width).t()
    if reduce is None:
        logits_TSN = torch.addmm(bias_SN.view(-1), x_TD.float(), table).view(-1, slots, slices)
    else:
        logits_TSN = torch.mm(x_TD.float(), table).view(-1, slots, slices)
    # every token's logits under the gates of all slots, of which it then takes its own: S and N are small, while picking each
    # token's weights first would copy [T, N, D]
    logits_TN = logits_TSN.gather(1, own_T.view(-1, 1, 1).expand(-1, 1, slices)).squeeze(1)
    if reduce is not None:
        # parts are summed before the map, which is not linear; the bias is added once, not on every rank
        logits_TN = reduce(logits_TN) + bias_SN[own_T]
    below_TN, above_TN, least_TN, most_TN = constants_SN4[own_T].unbind(-1)
    response_TN = logits_TN.tanh()
    slope_TN = torch.where(response_TN < 0, below_TN, above_TN)
    lam_TN = slope_TN * response_TN + 1.0
    if limits_T2 is not None:
        lam_TN = lam_TN.clamp(limits_T2[:, :1], limits_T2[:, 1:])
    return lam_TN.clamp(least_TN, most_TN)


SlotRows = Sequence[tuple[int, torch.Tensor | None]]
"""The slots in a batch, each with the rows of its tokens; None where all tokens are its own."""


def group_rows_by_slot(slots_T: torch.Tensor) -> SlotRows:
    """Which rows belong to which slot; rows of tokens without one (negative) belong to none."""
    used = [slot for slot in torch.unique(slots_T).tolist() if slot >= 0]
    if len(used) == 1 and bool((slots_T >= 0).all()):
        return [(used[0], None)]
    return [(slot, (slots_T == slot).nonzero()[:, 0]) for slot in used]


def shrink_slots(buffer_NTR: torch.Tensor, x_TD: torch.Tensor, a_NS1RD: Any, scale: float, owners: SlotRows) -> None:
    """scale · A x of every token under its own slot's A, written into the buffer in its dtype (fp32).

    Args:
        buffer_NTR: one [T, R] for each slice; rows of tokens without a slot keep what they hold.
        x_TD: input of the layer, any floating dtype.
        a_NS1RD: one [S, 1, R, D] for each slice.
        owners: of the batch.
    """
    for slot, rows in owners:
        own_TD = (x_TD if rows is None else x_TD[rows]).to(buffer_NTR.dtype)
        for buffer_TR, a_S1RD in zip(buffer_NTR, a_NS1RD):
            a_RD = a_S1RD[slot, 0].to(buffer_TR.dtype)
            reduced_TR = torch.mm(own_TD, a_RD.t())
            if scale != 1:
                reduced_TR.mul_(scale)
            if rows is None:
                buffer_TR[:, : len(a_RD)] = reduced_TR
            else:
                buffer_TR[rows, : len(a_RD)] = reduced_TR


def expand_slots(
    y_TO: torch.Tensor,
    buffer_NTR: torch.Tensor,
    b_NS1OR: Any,
    output_slices: tuple[int, ...],
    owners: SlotRows,
    start: int = 0,
    add: bool = True,
) -> None:
    """Add B of every token's own slot times its buffer to the columns of each slice, computed in the buffer's dtype.

    Args:
        y_TO: output of the layer, changed in place; rows of tokens without a slot keep their bits.
        buffer_NTR: one [T, R] for each slice.
        b_NS1OR: one [S, 1, O, R] for each slice; O is that of `output_slices`.
        output_slices: number of columns of each slice.
        owners: of the batch.
        start: first column of the first slice.
        add: False puts the products in place of what the columns hold.
    """
    for buffer_TR, b_S1OR, width in zip(buffer_NTR, b_NS1OR, output_slices):
        part_TO = y_TO[:, start : start + width]
        start += width
        for slot, rows in owners:
            b_RO = b_S1OR[slot, 0, :width].to(buffer_TR.dtype).t()
            own_TR = (buffer_TR if rows is None else buffer_TR[rows])[:, : len(b_RO)]
            if rows is None and part_TO.dtype == buffer_TR.dtype:
                part_TO.addmm_(own_TR, b_RO, beta=int(add))  # a beta of 0 never reads what the columns hold
                continue
            delta_TO = torch.mm(own_TR, b_RO).to(y_TO.dtype)
            if rows is None:
                part_TO.add_(delta_TO) if add else part_TO.copy_(delta_TO)
            elif add:
                part_TO.index_add_(0, rows, delta_TO)
            else:
                part_TO.index_copy_(0, rows, delta_TO)


class PunicaProxy:
    """Stands before vLLM's punica wrapper of one layer; what it does not define is the wrapper's own."""

    def __init__(self, punica: Any, layer: Any) -> None:
        self.punica = punica
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["punica"], name)


def token_limits(punica: Any) -> TokenLimits:
    """The limits of λ for the batches of one of vLLM's punica wrappers, shared by all layers that it serves."""
    found = getattr(punica, "loragate_limits", None)
    if found is None:
        tokens_M = punica._token_lora_indices
        found = punica.loragate_limits = TokenLimits(len(tokens_M), tokens_M.device)
    return found


class GatedPunica(PunicaProxy):
    """That of a linear layer: scales what shrinking leaves in the buffer, and makes both products itself on a CPU."""

    def __init__(self, punica: Any, layer: Any) -> None:
        super().__init__(punica, layer)
        self.limits = token_limits(punica)

    def slots(self, tokens: int) -> torch.Tensor:
        """Slot of each token, [T]; -1 for one without an adapter."""
        # the persistent buffer: the property of this name cuts it at a Python number, which a graph would bake in
        slots_T: torch.Tensor = self.punica._token_lora_indices[:tokens]
        return slots_T

    def add_shrink(self, y: Any, x: torch.Tensor, lora_a_stacked: Any, scale: float, **kwargs: Any) -> Any:
        """A x into the fp32 buffer [N, T, R], times λ."""
        flat_TD = x.view(-1, x.shape[-1])
        slots_T, layer = self.slots(len(flat_TD)), self.layer
        limits_T2: torch.Tensor | None = self.limits.values_M2[: len(flat_TD)]
        shrunk, buffer = None, y
        if x.device.type == "cpu":
            owners = self.limits.owners(slots_T)
            shrink_slots(y, flat_TD, lora_a_stacked, scale, owners)
            if not any(slot in layer.gated_slots for slot, _ in owners):
                if self.limits.has_limits:
                    strengths_T1 = self.limits.strengths(len(flat_TD))
                    for slot, rows in owners:
                        if slot not in layer.pinned_slots:
                            own = slice(None) if rows is None else rows
                            y[:, own] *= strengths_T1[own]
                return None  # else λ is exactly 1
            if not self.limits.has_limits:
                limits_T2 = None
        else:
            shrunk = self.punica.add_shrink(y, x, lora_a_stacked, scale, **kwargs)
            buffer = y if shrunk is None else shrunk
        lam_TN = slot_coefficients(
            flat_TD, slots_T, layer.gate_weight, layer.gate_bias, layer.gate_constants, layer.gate_reduce, limits_T2
        )
        buffer.mul_(lam_TN.t().unsqueeze(-1))
        return shrunk

    def add_expand(
        self,
        y: torch.Tensor,
        x: Any,
        lora_b_stacked: Any,
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """y plus B times the buffer."""
        if y.device.type != "cpu":
            return self.punica.add_expand(y, x, lora_b_stacked, output_slices, offset_start, add_inputs, **kwargs)
        flat_TO = y.view(-1, y.shape[-1])
        owners = self.limits.owners(self.slots(len(flat_TO)))
        expand_slots(flat_TO, x, lora_b_stacked, output_slices, owners, offset_start, add_inputs)
        return None

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
        kwargs.pop("buffer", None)  # None in vLLM 0.32: its kernels make their own, which λ could not reach
        if x.device.type == "cpu" and not self.limits.owners(self.slots(x.view(-1, x.shape[-1]).shape[0])):
            return None  # a batch of the base alone
        shape = (len(output_slices), x.size(0), lora_b_stacked[0].size(-1))
        buffer_NTR = torch.zeros(shape, dtype=torch.float32, device=x.device)
        self.add_shrink(buffer_NTR, x, lora_a_stacked, scale, **kwargs)
        return self.add_expand(y, buffer_NTR, lora_b_stacked, output_slices, add_inputs=add_inputs, **kwargs)


class GateMixin:
    """What a linear LoRA layer of vLLM gains: gates per slot beside its A and B."""

    def create_lora_weights(self: Any, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)  # type: ignore[misc]
        stacked = self.lora_a_stacked
        slices, width, device = len(stacked), stacked[0].shape[-1], stacked[0].device
        self.gate_weight, self.gate_bias, self.gate_constants = empty_slots(max_loras, slices, width, device)
        self.gate_reduce = _reduction(self)
        self.gated_slots: set[int] = set()
        self.pinned_slots: set[int] = set()

    def set_mapping(self: Any, punica_wrapper: Any) -> None:
        super().set_mapping(GatedPunica(punica_wrapper, self))  # type: ignore[misc]

    def reset_lora(self: Any, index: int) -> None:
        super().reset_lora(index)  # type: ignore[misc]
        self.gated_slots.discard(index)
        self.pinned_slots.discard(index)
        self.gate_weight[index] = 0
        self.gate_bias[index] = 0
        for column, value in enumerate(_UNGATED):
            self.gate_constants[index, :, column] = value

    def set_gate(
        self: Any,
        index: int,
        piece: int,
        weight_D: torch.Tensor | None,
        bias: float,
        signed_map: SignedMap,
    ) -> None:
        """Fill slot `index`, slice `piece`; the weight is the whole layer's."""
        tau = signed_map.tau
        self.gated_slots.add(index)
        self.pinned_slots.discard(index)
        if weight_D is not None:
            width = self.gate_weight.shape[-1]
            # a row-parallel layer holds the features of its rank; any other holds all of them on every rank
            start = self.tp_rank * width if self.gate_reduce is not None else 0
            self.gate_weight[index, piece].copy_(weight_D[start : start + width] / tau)
        self.gate_bias[index, piece] = bias / tau
        self.gate_constants[index, piece].copy_(slot_constants(signed_map))

    def pin_slot_to_one(self: Any, index: int) -> None:
        """Hold slot `index` at λ = 1 until a gate is set: what a gated adapter leaves ungated no override reaches."""
        self.pinned_slots.add(index)
        self.gate_constants[index, :, 2:] = 1.0

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


class HeadPunica(PunicaProxy):
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
