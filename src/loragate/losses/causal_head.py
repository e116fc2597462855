"""Token statistics out of a causal language model, through its own forward or in two steps, and the KL to a frozen reference.

`add_statistics_forward` lets `model(..., statistics=StatisticsRequest(...), labels=...)` run the backbone and the
token-statistics head in place of the language-model head. It goes through the model's forward, so that wrappers (PEFT,
DDP, FSDP, autocast) see an ordinary call. What a family does around its head (scale, soft cap, bias) is read from its
configuration and then checked against the model's own logits; a head that does not pass, that carries an adapter or trains, or
that has no body of its own before it, is served by the slow path over full logits instead: its "states" are the logits.

Objectives that hold a model near a reference (EKSFT) need KL(p ‖ r) over the whole vocabulary at every response token, and its
gradient. Both models' hidden states are projected chunk by chunk, so that two chunks of fp32 logits are alive at a time; the
backward projects them once more. Which tokens carry which term is decided between forward and backward, which is why nothing is
folded into the forward. The reference carries no gradient, and neither does a head.

Shapes: B sequences, S positions, T labelled (response) tokens of a batch in row order, D hidden, V vocabulary, C tokens of one
chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from loragate.errors import ConfigError
from loragate.losses.entropy import support_size
from loragate.losses.head import IGNORE_INDEX, STATISTICS, TokenStatistics, statistics_of_logits, token_statistics
from loragate.losses.projection import MIN_TILE_SIDE, TILE_BYTES, Head, Projection, chunks
from loragate.modes import evaluation_mode, whole_parameter


@dataclass(frozen=True)
class Reference:
    """A frozen reference's next-token distributions at the labelled positions of one batch, in row order."""

    states: torch.Tensor  # hidden [T, D], or logits [T, V] where there is no head
    head: Head | None  # the reference's own, frozen

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, V."""
        return int(self.states.shape[-1]) if self.head is None else self.head.vocabulary

    def log_probs(self, vocabulary: int) -> torch.Tensor:
        """log r of all positions, [T, V] fp32: for the slow path over full logits. A ConfigError if the vocabularies differ."""
        require_same_vocabulary(self.vocabulary, vocabulary)
        return _log_softmax_of(self, slice(None), None if self.head is None else Projection(self.head))


@dataclass(frozen=True)
class StatisticsRequest:
    """What to compute at the labelled positions; see `token_statistics` for the fields.

    With a `reference` (of the same batch) there is also the KL to it, which is always differentiable.
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

    Calling it twice has no further effect. Without the keyword the forward is the original one. `verified` is what `verify_head`
    found before the model was sharded, None to verify now. Returns whether the fused head will be used, not the slow path over
    full logits (see the module text).
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
        head = None if head is None else gather_head(head)
        # the last position predicts nothing that is known
        if head is None:
            states = self._loragate_forward(*args, **kwargs).logits[:, :-1]
        else:
            states = self.base_model(*args, **kwargs).last_hidden_state[:, :-1].to(head.weight.device)
        shifted = labels[:, 1:].to(states.device)
        if isinstance(statistics, ReferenceRequest):
            return Reference(states[shifted != IGNORE_INDEX].detach(), head)
        return statistics_of_states(states, head, shifted, statistics)

    model.forward = types.MethodType(forward, model)
    return bool(model._loragate_statistics)


def gather_head(head: Head) -> Head:
    """The head with its full weight and bias, once per forward pass, where FSDP2 or tensor parallelism spread it.

    In FSDP2's root group the weight is whole already. Every process must call this.
    """
    if not hasattr(head.weight, "full_tensor"):
        return head
    bias = None if head.bias is None else whole_parameter(head.bias)
    return dataclasses.replace(head, weight=whole_parameter(head.weight), bias=bias)


@torch.no_grad()
def verify_head(model: Any) -> bool:
    """Does the head as read from the configuration reproduce the model's own logits on a few tokens?

    Compared in the model's dtype, relative to the largest logit; 2 % cover the rounding of half precision.
    """
    head = read_head(model)
    if head is None or head.weight.device.type == "meta":
        return False
    head = gather_head(head)
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
        # a head in a precision of its own (fp32 over a body in bf16) is multiplied under autocast alone
        mixed = hidden.dtype != head.weight.dtype
        half = any(dtype in (torch.bfloat16, torch.float16) for dtype in (hidden.dtype, head.weight.dtype))
        lower = min(hidden.dtype, head.weight.dtype, key=lambda dtype: dtype.itemsize)
        with torch.autocast(tokens.device.type, lower, enabled=mixed):
            own = model(input_ids=tokens, use_cache=False).logits.float()
    if hidden.shape[-1] != head.weight.shape[1]:
        return False
    logits = head.logits(hidden, head.weight.dtype)
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
    stats = _statistics_of_states(states, head, labels, request)
    if request.gradients is None:
        return stats
    # full logits and a reference differentiate all that they compute
    unread = [name for name in STATISTICS if name not in request.gradients]
    return stats._replace(**{name: getattr(stats, name).detach() for name in unread})


def _statistics_of_states(
    states: torch.Tensor, head: Head | None, labels: torch.Tensor, request: StatisticsRequest
) -> TokenStatistics:
    reference = request.reference
    if head is not None:
        fused = functools.partial(
            token_statistics,
            states,
            head.weight,
            labels,
            k=request.k,
            bias=head.bias,
            scale=head.scale,
            softcap=head.softcap,
        )
        if reference is None:
            return fused(outputs=request.outputs, gradients=request.gradients)
        stats = reference_statistics(states, head, labels, reference)
        k = support_size(request.k, stats.k)
        if k == stats.k:
            return stats
        partial_entropy = stats.topk_entropy.new_empty(0)  # as of any statistic that was not asked for
        if "topk_entropy" in request.outputs:  # its support is another one, so the states are projected once more
            partial_entropy = fused(outputs=("topk_entropy",)).topk_entropy
        return stats._replace(topk_entropy=partial_entropy, k=k)
    mask = labels != IGNORE_INDEX
    if not bool(mask.any()):
        k = support_size(request.k, states.shape[-1])
        return TokenStatistics.without_labels(states, mask, k, kl=reference is not None)
    compared = None if reference is None else reference.log_probs(states.shape[-1]).to(states.device)
    if bool(mask.all()):  # selected already: no second copy of [T, V]
        return statistics_of_logits(states, labels, request.k, None if compared is None else compared.view_as(states))
    return statistics_of_logits(states[mask], labels[mask], request.k, compared).spread(labels.shape, mask)


def response_mask(batch: Batch) -> torch.Tensor:
    """bool [B, S-1]: positions whose next token is a response token."""
    return batch["labels"][:, 1:] != IGNORE_INDEX


def predicting_mask(batch: Batch) -> torch.Tensor:
    """bool [B, S]: `response_mask` in the shape of the pass, for what is recorded of it (`Recording.token_mask`)."""
    # λ at a position acts on the logits of the token after it; the last position of all has none to choose
    return torch.nn.functional.pad(response_mask(batch), (0, 1))


def reference_statistics(
    hidden: torch.Tensor, head: Head, labels: torch.Tensor, reference: Reference, *, chunk_tokens: int | None = None
) -> TokenStatistics:
    """Log-probability, full entropy and KL(p ‖ reference) at the positions whose label counts.

    Args:
        hidden: [..., D], already shifted: position t predicts `labels[..., t]`.
        labels: [...] int64, −100 where a position does not count.
        reference: of the same batch; its rows are the positions that count, in order.
        chunk_tokens: positions per chunk; by default as many as fit 64 MiB of fp32 logits, at most 128 on a CPU.

    Returns:
        `TokenStatistics` shaped like `labels` with `kl`; `topk_entropy` is the full entropy divided by log V. All are
        differentiable with respect to `hidden`. A ConfigError if the reference has another vocabulary or number of positions.
    """
    vocabulary = head.vocabulary
    require_same_vocabulary(reference.vocabulary, vocabulary)
    mask = labels != IGNORE_INDEX
    chosen_TD = hidden[mask]
    count = chosen_TD.shape[0]
    if reference.states.shape[0] != count:
        raise ConfigError(f"the reference holds {reference.states.shape[0]} positions, the batch has {count} labels")
    if count == 0:
        return TokenStatistics.without_labels(hidden, mask, vocabulary, kl=True)
    if chunk_tokens is None:
        most = 128 if hidden.device.type == "cpu" else 1 << 20
        chunk_tokens = min(most, max(MIN_TILE_SIDE, TILE_BYTES // (4 * vocabulary)))
    moved = replace(reference, states=reference.states.detach().to(hidden.device))
    log_prob_T, entropy_T, kl_T = _ReferenceStatistics.apply(chosen_TD, labels[mask], head, moved, chunk_tokens)
    values = TokenStatistics(log_prob_T, entropy_T, entropy_T / math.log(vocabulary), mask, vocabulary, kl_T)
    return values.spread(labels.shape, mask)


def _projections(head: Head, other: Head | None) -> tuple[Projection, Projection | None]:
    """(the model's, the reference's); one and the same where they share the head's weight."""
    # a shared head's rows are widened once, and both write their logits into the same memory
    own = Projection(head)
    if other is None:
        return own, None
    return own, own if other.weight is head.weight else Projection(other)


class _ReferenceStatistics(torch.autograd.Function):
    """(log_prob [T], entropy [T], KL [T]) in fp32 nats."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, labels_T: torch.Tensor, head: Head, reference: Reference, chunk: int
    ) -> Any:
        parts = []
        with torch.autocast(hidden_TD.device.type, enabled=False):
            own, other = _projections(head, reference.head)
            for rows in chunks(hidden_TD.shape[0], chunk):
                log_p_CV, log_r_CV, _ = _distributions(own, other, reference, hidden_TD[rows], rows)
                p_CV = log_p_CV.exp()
                parts.append(
                    (
                        log_p_CV.gather(-1, labels_T[rows].unsqueeze(-1)).squeeze(-1),
                        -torch.linalg.vecdot(p_CV, log_p_CV),
                        torch.linalg.vecdot(p_CV, log_p_CV - log_r_CV),
                    )
                )
        ctx.save_for_backward(hidden_TD, labels_T)  # no [T, V]: the backward projects both models again
        ctx.head, ctx.reference, ctx.chunk = head, reference, chunk
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob_T: Any, grad_entropy_T: Any, grad_kl_T: Any) -> Any:
        hidden_TD, labels_T = ctx.saved_tensors
        parts = []
        with torch.autocast(hidden_TD.device.type, enabled=False):
            own, other = _projections(ctx.head, ctx.reference.head)
            for rows in chunks(hidden_TD.shape[0], ctx.chunk):
                log_p_CV, log_r_CV, slope = _distributions(own, other, ctx.reference, hidden_TD[rows], rows)
                p_CV = log_p_CV.exp()
                grad_y, grad_h, grad_k = (
                    grad[rows].unsqueeze(-1) for grad in (grad_log_prob_T, grad_entropy_T, grad_kl_T)
                )
                # d log p_y/dz = e_y − p;  dH/dz = −p (log p + H);  dKL/dz = p (log p − log r − KL)
                # the last two are p (x − Σ p x), with x = −log p and x = log p − log r: their x are added first
                inner_CV = (grad_k - grad_h) * log_p_CV - grad_k * log_r_CV
                mean_C1 = torch.linalg.vecdot(p_CV, inner_CV).unsqueeze(-1)
                coefficient_CV = p_CV * (inner_CV - mean_C1 - grad_y)
                coefficient_CV.scatter_add_(-1, labels_T[rows].unsqueeze(-1), grad_y)
                parts.append(own.pull_back(coefficient_CV, slope))
        return torch.cat(parts).to(hidden_TD.dtype), None, None, None, None


def _distributions(
    own: Projection, other: Projection | None, reference: Reference, hidden_CD: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | float]:
    """(log p [C, V], log r [C, V], slope of the model's logits)."""
    # a projection reuses its buffer, and both may be one: the reference is normalised into memory of its own first
    log_r_CV = _log_softmax_of(reference, rows, other)
    z_CV, slope = own.logits(hidden_CD)
    return torch.log_softmax(z_CV, -1), log_r_CV, slope


def _log_softmax_of(reference: Reference, rows: slice, projection: Projection | None) -> torch.Tensor:
    """log r of some positions, [C, V], in memory of its own."""
    states_CD = reference.states[rows]
    if projection is None:
        return torch.log_softmax(states_CD if states_CD.dtype == torch.float64 else states_CD.float(), -1)
    z_CV, _ = projection.logits(states_CD.to(projection.weight_VD.device))
    return torch.log_softmax(z_CV, -1).to(states_CD.device)


def require_same_vocabulary(reference: int, model: int) -> None:
    """Raises ConfigError for two heads of different sizes."""
    if reference != model:
        raise ConfigError(
            f"the reference model has a vocabulary of {reference} and the model one of {model}; a KL between them is not "
            "defined. Take a reference of the same family with the same tokenizer and padding"
        )
