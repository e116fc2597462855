"""The gated LoRA operation: δ = (α/r) · B (λ ⊙ (A x)), with λ one number per token.

λ is a scalar per token and B is linear, so gating the rank-r activation equals gating the d_out output; the fused form
keeps only x, A x, v and λ for the backward pass and never a (tokens × d_out) tensor. x is kept as it came and cast to the
factors' dtype where it is computed with, so modules of one input (q, k and v) keep one x between them. The plain form
stands beside it and is what the tests hold the fused form to. Nothing here knows PEFT.

Shapes: T tokens (any leading shape), D input width, R rank, O output width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from loragate.gates.override import Override
from loragate.gates.signed_map import SignedMap


def gate_logits(x_TD: torch.Tensor, weight_D: torch.Tensor | None, bias_1: torch.Tensor) -> torch.Tensor:
    """g = w·h + b per token (eq:rw-gate-logit), in the gate's dtype (fp32) whatever the dtype of x and autocast.

    Autocast would turn `x.float() @ w` into a bf16 product, so it is off here. Without a weight g = b for every token.
    """
    if weight_D is None:
        return bias_1.expand(x_TD.shape[:-1])
    # entering a context takes longer than the whole product for one decoded token
    if not torch.is_autocast_enabled(x_TD.device.type):
        return torch.matmul(x_TD.to(weight_D.dtype), weight_D) + bias_1
    with torch.autocast(x_TD.device.type, enabled=False):
        return torch.matmul(x_TD.to(weight_D.dtype), weight_D) + bias_1


def up_project(gated_TR: torch.Tensor, lora_b_OR: torch.Tensor, scaling: float) -> torch.Tensor:
    """(α/r) · B z, bit for bit as PEFT computes it: `F.linear(z, B) * scaling`.

    A power of two may be multiplied in on either side of a product without changing a bit, and the rank-r side is the
    cheap one.
    """
    if abs(math.frexp(scaling)[0]) != 0.5:  # frexp gives a power of two, and nothing else, the mantissa ±0.5
        return F.linear(gated_TR, lora_b_OR) * scaling
    return F.linear(gated_TR if scaling == 1.0 else gated_TR * scaling, lora_b_OR)


def scale_tokens(lam_T: torch.Tensor, values_TR: torch.Tensor) -> torch.Tensor:
    """λ ⊙ values, computed in the wider dtype of both and returned in that of `values` (so λ = 1 changes no bit)."""
    return (lam_T.unsqueeze(-1) * values_TR).to(values_TR.dtype)  # [T, 1]·[T, R]


def gated_delta_reference(
    x_TD: torch.Tensor,
    lora_a_RD: torch.Tensor,
    lora_b_OR: torch.Tensor,
    weight_D: torch.Tensor | None,
    bias_1: torch.Tensor,
    signed_map: SignedMap,
    scaling: float,
    *,
    detach_input: bool = True,
    override: Override | None = None,
) -> torch.Tensor:
    """The gated delta in plain PyTorch, differentiable by autograd; also the path taken when λ is overridden.

    Args:
        x_TD: module input, [..., D]; cast to the factors' dtype.
        lora_a_RD, lora_b_OR: the frozen LoRA factors.
        weight_D, bias_1: gate parameters (fp32); `weight_D` None for module and global granularity.
        signed_map: from logit to λ.
        scaling: PEFT's own scaling of the layer (α/r, or α/√r with rsLoRA).
        detach_input: the gate reads a detached x.
        override: laid over λ after the map.

    Returns:
        [..., O] in the dtype that `F.linear` gives for the factors.
    """
    x_TD = x_TD.to(lora_a_RD.dtype)
    lam_T = gate_coefficient_of_input(x_TD, weight_D, bias_1, signed_map, detach_input, override)
    return up_project(scale_tokens(lam_T, F.linear(x_TD, lora_a_RD)), lora_b_OR, scaling)


def gate_coefficient_of_input(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    bias_1: torch.Tensor,
    signed_map: SignedMap,
    detach_input: bool = True,
    override: Override | None = None,
) -> torch.Tensor:
    """λ per token, [...], from the module input, with what is laid over it."""
    lam_T = signed_map(gate_logits(x_TD.detach() if detach_input else x_TD, weight_D, bias_1))
    return lam_T if override is None else override(lam_T)


def _gated_reduction(
    x_TD: torch.Tensor,
    lora_a_RD: torch.Tensor,
    weight_D: torch.Tensor | None,
    bias_1: torch.Tensor,
    signed_map: SignedMap,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(λ ⊙ A x, A x, v, λ): all of the operation that is not a product with B."""
    x_TD = x_TD.to(lora_a_RD.dtype)
    reduced_TR = F.linear(x_TD, lora_a_RD)
    response_T = signed_map.response(gate_logits(x_TD, weight_D, bias_1))
    lam_T = signed_map.of_response(response_T)
    return scale_tokens(lam_T, reduced_TR), reduced_TR, response_T, lam_T


class _GatedDelta(torch.autograd.Function):
    """Forward as the reference; backward by hand from x, A x, v and λ, in as few operators as there can be.

    A batch of two thousand tokens on a GPU waits for the start of each operator, not for its arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        lora_a_RD: torch.Tensor,
        lora_b_OR: torch.Tensor,
        weight_D: torch.Tensor | None,
        bias_1: torch.Tensor,
        signed_map: SignedMap,
        scaling: float,
        detach_input: bool,
    ) -> torch.Tensor:
        gated_TR, reduced_TR, response_T, lam_T = _gated_reduction(x_TD, lora_a_RD, weight_D, bias_1, signed_map)
        # x as it came: q, k and v of a block then keep one tensor between them; R and 2 numbers a token beside it
        ctx.save_for_backward(x_TD, reduced_TR, response_T, lam_T, lora_a_RD, lora_b_OR, weight_D)
        ctx.signed_map, ctx.scaling, ctx.detach_input = signed_map, scaling, detach_input
        return up_project(gated_TR, lora_b_OR, scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: torch.Tensor) -> Any:
        x_TD, reduced_TR, response_T, lam_T, lora_a_RD, lora_b_OR, weight_D = ctx.saved_tensors
        scaling, signed_map = ctx.scaling, ctx.signed_map
        need_x, need_a, need_b, need_weight, need_bias = ctx.needs_input_grad[:5]
        grad_x = grad_a = grad_b = grad_weight = grad_bias = None
        if need_x or need_a or need_weight or need_bias:
            cast_TD = x_TD.to(lora_a_RD.dtype)  # anew, in place of a second copy of x kept since the forward pass
            # backward runs outside of autocast, so that every product casts its operands to dout's dtype itself
            back_TR = torch.matmul(grad_TO, lora_b_OR.to(grad_TO.dtype))  # [T, O]·[O, R]: the one product of width O
            # Bᵀ·dout carries both gradients: that of λ_t is its product with (A x)_t, and λ_t times it is that of (A x)_t
            working = response_T.dtype  # fp32 beside half-precision factors: the sum over R is taken in it
            wide_TR = back_TR.to(working)
            grad_lam_T = (wide_TR * reduced_TR.to(working)).sum(-1)
            # dλ/dg = dλ/dv · dv/dg with tanh' = 1 − v²; α/r and 1/τ are numbers in the slope
            slope_T = signed_map.slope(response_T, scaling / signed_map.tau)
            grad_logit_T = torch.ops.aten.tanh_backward(grad_lam_T * slope_T, response_T)
            scaled_T = lam_T if scaling == 1.0 else lam_T * scaling
            inner_TR = (scaled_T.unsqueeze(-1) * wide_TR).to(back_TR.dtype)
            if need_weight:  # Σ_t g_t · x_t, [D]
                flat_TD = cast_TD.reshape(-1, cast_TD.shape[-1])
                grad_weight = torch.matmul(grad_logit_T.reshape(-1), flat_TD.to(working))
            if need_bias:  # [1], the sum over all tokens
                grad_bias = grad_logit_T.sum().reshape(1)
            if need_x:
                grad_x = torch.matmul(inner_TR, lora_a_RD.to(grad_TO.dtype)).to(cast_TD.dtype)  # [T, R]·[R, D]
                if not ctx.detach_input and weight_D is not None:
                    # the gate's own way to x, which the semi-gradient leaves out
                    grad_x = grad_x + (grad_logit_T.unsqueeze(-1) * weight_D).to(cast_TD.dtype)
                grad_x = grad_x.to(x_TD.dtype)
            if need_a:  # [R, T]·[T, D]
                grad_a = torch.matmul(
                    inner_TR.reshape(-1, inner_TR.shape[-1]).t(), cast_TD.reshape(-1, x_TD.shape[-1]).to(grad_TO.dtype)
                ).to(lora_a_RD.dtype)
        if need_b:  # [O, T]·[T, R]
            gated_TR = scale_tokens(lam_T, reduced_TR).to(grad_TO.dtype)
            flat_OT = grad_TO.reshape(-1, grad_TO.shape[-1]).t()
            grad_b = (torch.matmul(flat_OT, gated_TR.reshape(-1, gated_TR.shape[-1])) * scaling).to(lora_b_OR.dtype)
        return grad_x, grad_a, grad_b, grad_weight, grad_bias, None, None, None


def gated_delta(
    x_TD: torch.Tensor,
    lora_a_RD: torch.Tensor,
    lora_b_OR: torch.Tensor,
    weight_D: torch.Tensor | None,
    bias_1: torch.Tensor,
    signed_map: SignedMap,
    scaling: float,
    *,
    detach_input: bool = True,
) -> torch.Tensor:
    """The fused gated delta; same arguments and values as `gated_delta_reference` without overrides.

    Saved for the backward pass: x (the module input, which the modules of a block share), A x, v and λ. Gradients flow to
    x, A, B, w and b as far as they need one; second derivatives are refused by autograd. Where nothing needs a gradient
    (generation) the same arithmetic runs without autograd's bookkeeping.
    """
    tensors = (x_TD, lora_a_RD, lora_b_OR, weight_D, bias_1)
    # `apply` would save tensors for a backward pass that nobody asks for
    if not torch.is_grad_enabled() or not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        gated_TR = _gated_reduction(x_TD, lora_a_RD, weight_D, bias_1, signed_map)[0]
        return up_project(gated_TR, lora_b_OR, scaling)
    return _GatedDelta.apply(x_TD, lora_a_RD, lora_b_OR, weight_D, bias_1, signed_map, scaling, detach_input)
