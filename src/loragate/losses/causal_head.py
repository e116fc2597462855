"""Token statistics out of a causal language model: through its own forward, or in two steps.

`add_statistics_forward` lets `model(..., statistics=StatisticsRequest(...), labels=...)` run the backbone and the
token-statistics head in place of the language-model head. It goes through the model's forward, so that wrappers (PEFT,
DDP, FSDP, autocast) see an ordinary call. `ResponseScorer` leaves the model as it is and hands out the states between body and
head, for those who read several things from one pass of the body. What a family does around its head (scale, soft cap, bias) is
read from its configuration and then checked against the model's own logits; a head that does not pass, that carries an
adapter or trains, or that has no body of its own before it, is served by the slow path over full logits instead: its "states"
are the logits.

Shapes: B sequences, S positions, T response tokens of a batch in row order, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loragate.errors import TrainingError
from loragate.losses.divergence import Reference, reference_statistics
from loragate.losses.entropy import support_size
from loragate.losses.head import IGNORED, STATISTICS, TokenStatistics, statistics_of_logits, token_statistics
from loragate.losses.projection import Head as Head
from loragate.modes import evaluation_mode


@dataclass(frozen=True)
class StatisticsRequest:
    """What to compute at the labelled positions; see `token_statistics` for the fields.

    With a `reference` (of the same batch) the statistics are those of `reference_statistics`: log-probability, full entropy
    and KL to the reference, all differentiable.
    """

    k: int = 100
    outputs: tuple[str, ...] = STATISTICS
    gradients: tuple[str, ...] | None = None
    reference: Reference | None = None


@dataclass(frozen=True)
class ReferenceRequest:
    """Ask for the model's distribution at the labelled positions, as a `Reference` without gradient."""


Batch = dict[str, torch.Tensor]
"""What the collator gives: input_ids, attention_mask and labels, each [B, S]."""


def causal_model(model: Any) -> Any:
    """The causal LM inside PEFT's wrapper, or the model itself."""
    getter = getattr(model, "get_base_model", None)
    return getter() if callable(getter) else model


def read_head(model: Any) -> Head | None:
    """The model's output head by its configuration, or None where it is not one frozen linear map."""
    module = model.get_output_embeddings()
    copies = getattr(module, "modules_to_save", None)  # PEFT keeps a copy for each adapter beside the original
    if copies is not None:
        active = [name for name in getattr(module, "active_adapters", []) if name in copies]
        disabled = bool(getattr(module, "disable_adapters", False))
        module = module.original_module if disabled or not active else copies[active[0]]
    if not isinstance(module, nn.Linear) or hasattr(module, "lora_A"):
        return None
    weight = module.weight
    if weight.requires_grad or not weight.is_floating_point():
        return None
    if hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "full_tensor"):
        return None  # torchao's quantised tensors call themselves floating-point, but have no rows to multiply by
    config = model.config.get_text_config()
    # multipliers: Cohere's logit_scale, Falcon-H1's lm_head_multiplier; divisor: Granite's logits_scaling
    divisor = getattr(config, "logits_scaling", None)
    scale = 1.0 if divisor is None else 1.0 / float(divisor)
    if divisor is not None and config.model_type == "hyperclovax":
        scale = float(divisor)
    given = (getattr(config, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
    scale = next((float(value) for value in given if value is not None), scale)
    return Head(weight, module.bias, scale, getattr(config, "final_logit_softcapping", None))


def add_statistics_forward(model: Any, verified: bool | None = None) -> bool:
    """Teach `model` (the causal LM itself, without PEFT's wrapper) the `statistics=` keyword.

    Calling it twice has no further effect. Without the keyword the forward is the original one.

    Args:
        model: the causal LM.
        verified: what `verify_head` found before the model was sharded; None to verify now.

    Returns:
        True if the fused head will be used, False if the slow path over full logits will (see the module text).
    """
    if getattr(model, "_loragate_statistics", None) is not None:
        return bool(model._loragate_statistics)
    model._loragate_statistics = verify_head(model) if verified is None else verified
    # a bound method on the instance, which `copy.deepcopy` binds to the copy; one in a closure would stay the original's
    model._loragate_forward = model.forward

    # `generate` validates its keywords against the class's signature, so that is the one to show
    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        statistics: StatisticsRequest | ReferenceRequest | None = None,
        labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        if statistics is None:
            if labels is not None:
                kwargs["labels"] = labels
            return self._loragate_forward(*args, **kwargs)
        kwargs.pop("num_items_in_batch", None)  # trainers hand it to every forward; not every body takes it
        kwargs["use_cache"] = False
        head = read_head(self) if self._loragate_statistics else None
        head = None if head is None else gathered(head)
        # the last position predicts nothing that is known
        if head is None:
            states = self._loragate_forward(*args, **kwargs).logits[:, :-1]
        else:
            states = self.base_model(*args, **kwargs).last_hidden_state[:, :-1].to(head.weight.device)
        shifted = labels[:, 1:].to(states.device)
        if isinstance(statistics, ReferenceRequest):
            return Reference(states[shifted != IGNORED].detach(), head)
        return statistics_of_states(states, head, shifted, statistics)

    model.forward = types.MethodType(forward, model)
    return bool(model._loragate_statistics)


def gathered(head: Head) -> Head:
    """The head with its full weight and bias, once per forward pass, where FSDP2, ZeRO-3 or tensor parallelism spread it.

    In FSDP2's root group the weight is whole already. Every process must call this.
    """
    if not any(hasattr(head.weight, name) for name in ("full_tensor", "ds_id")):
        return head
    bias = None if head.bias is None else whole_parameter(head.bias)
    return dataclasses.replace(head, weight=whole_parameter(head.weight), bias=bias)


def whole_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's full values, where FSDP2, ZeRO-3 or tensor parallelism spread it; every process must ask."""
    if hasattr(parameter, "full_tensor"):
        return parameter.full_tensor()
    if not hasattr(parameter, "ds_id"):
        return parameter
    if parameter.numel() == getattr(parameter, "ds_numel", None):
        return parameter.detach().clone()  # a small parameter that DeepSpeed keeps, or one in use
    import deepspeed

    # the values vanish again where the context ends, and the backward pass needs them: a copy
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


@torch.no_grad()
def verify_head(model: Any) -> bool:
    """Does the head as read from the configuration reproduce the model's own logits on a few tokens?

    Compared in the model's dtype, relative to the largest logit; 2 % cover the rounding of half precision.
    """
    head = read_head(model)
    if head is None or head.weight.device.type == "meta":
        return False
    head = gathered(head)
    # a few tokens spread over the vocabulary
    count = min(8, head.weight.shape[0])
    step = max(1, head.weight.shape[0] // (count + 1))
    tokens = (torch.arange(1, count + 1, device=head.weight.device) * step % head.weight.shape[0]).unsqueeze(0)
    with evaluation_mode(model):
        try:
            hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        except (TypeError, AttributeError):
            # another kind of body, or none: Llama4ForCausalLM's base_model is itself. The slow path meets an error of its own
            return False
        own = model(input_ids=tokens, use_cache=False).logits.float()
    if hidden.shape[-1] != head.weight.shape[1]:
        return False
    logits = head.logits(hidden, head.weight.dtype)
    half = head.weight.dtype in (torch.bfloat16, torch.float16)
    limit = (2e-2 if half else 1e-4) * max(1.0, float(own.abs().max()))
    return bool((logits - own).abs().max() <= limit)


def statistics_of_states(
    states: torch.Tensor, head: Head | None, labels: torch.Tensor, request: StatisticsRequest
) -> TokenStatistics:
    """What a request asks of states, shaped like `labels`.

    Args:
        states: hidden [..., D] under `head`, or logits [..., V] where that is None; shifted, so that each predicts its label.
        labels: [...] int64, on the device of the states; −100 where a position does not count.
    """
    reference = request.reference
    if head is not None and reference is not None:
        return reference_statistics(states, head, labels, reference)
    if head is not None:
        return token_statistics(
            states,
            head.weight,
            labels,
            k=request.k,
            bias=head.bias,
            scale=head.scale,
            softcap=head.softcap,
            outputs=request.outputs,
            gradients=request.gradients,
        )
    mask = labels != IGNORED
    if not bool(mask.any()):
        k = support_size(request.k, states.shape[-1])
        return TokenStatistics.without_labels(states, mask, k, kl=reference is not None)
    # beside a KL the entropy is the full one, as `reference_statistics` has it
    k = request.k if reference is None else 0
    compared = None if reference is None else reference.log_probs(states.shape[-1]).to(states.device)
    if bool(mask.all()):  # selected already: no second copy of [T, V]
        return statistics_of_logits(states, labels, k, compared)
    return statistics_of_logits(states[mask], labels[mask], k, compared).spread(labels.shape, mask)


def counted(batch: Batch) -> torch.Tensor:
    """bool [B, S-1]: positions whose next token is a response token."""
    return batch["labels"][:, 1:] != IGNORED


class ResponseScorer:
    """The response tokens of batches from the collator: states of one pass of the body, and statistics of these.

    Attributes:
        model: as it is called; a wrapper included.
        causal: the causal LM in it.
        fused: whether the output head is projected in chunks (False: full logits).
    """

    def __init__(self, model: Any, precision: str = "fp32") -> None:
        self.model, self.causal = model, causal_model(model)
        self.fused = verify_head(self.causal)
        self.autocast = precision == "bf16"

    def states(self, batch: Batch) -> torch.Tensor:
        """Final hidden states (or full logits) at the positions that predict a response token, [T, D] (or [T, V])."""
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        device = batch["input_ids"].device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            if self.fused:
                output = self.causal.base_model(**inputs).last_hidden_state
            else:
                output = self.causal(**inputs).logits
        # a model that is spread over devices ends on another one than it begins
        return output[:, :-1][counted(batch).to(output.device)]

    def statistics(self, states: torch.Tensor, batch: Batch, request: StatisticsRequest) -> TokenStatistics:
        """What a request asks of the `states` of a batch, each [T]."""
        head = self.head() if self.fused else None
        states = states if head is None else states.to(head.weight.device)
        labels_T = batch["labels"][:, 1:][counted(batch)]
        return statistics_of_states(states, head, labels_T.to(states.device), request)

    def head(self) -> Head:
        """The frozen output head; raises TrainingError where it is none any more."""
        head = read_head(self.causal)
        if head is None:
            raise TrainingError("the output head changed during training; it must stay frozen")
        return head
