"""Triton kernels of the gated LoRA operation; the functions of `loragate.gates.operation` are their plain twins.

The forward kernel reads x once for the gate logit and, if asked, for A x; the backward kernel turns Bᵀ·dout into the
gradient of the logit and the gradient of A x in one pass over rank space; the third kernel sums g_t·x_t without an fp32 copy
of x. All accumulate in fp32. The products with B and Bᵀ stay with the BLAS library. Importing this module needs Triton;
`loragate.gates.backend` decides whether it is used.

Shapes: T tokens (any leading shape), D input width, R rank.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from loragate.gates.signed_map import SignedMap

MAX_RANK = 64  # a block of A x, [BLOCK_T, BLOCK_R] in fp32, is held in registers
_TOKENS_PER_SUM = 1024  # what one program of the weight's gradient adds up; torch adds up the programs


@triton.jit
def _tanh(x):
    """Exact to a few fp32 roundings everywhere, also near zero, where fresh gates live and (1 − e)/(1 + e) cancels."""
    # the series of tanh up to x⁷: below 1/8 its next term is under 2e-9 of x
    square = x * x
    small = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    decay = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.125, small, tl.where(x < 0, -large, large))


@triton.jit
def _forward_kernel(
    x_ptr,
    a_ptr,
    weight_ptr,
    bias_ptr,
    reduced_ptr,
    gated_ptr,
    response_ptr,
    tokens,
    below,
    above,
    tau,
    D: tl.constexpr,
    R: tl.constexpr,
    PROJECT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = token < tokens
    rank = tl.arange(0, BLOCK_R)
    real_R = rank < R
    row = token.to(tl.int64)  # T·D may exceed 2³¹
    logit = tl.zeros([BLOCK_T], dtype=tl.float32)
    product = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    if PROJECT or WEIGHT:
        for start in range(0, D, BLOCK_D):
            column = start + tl.arange(0, BLOCK_D)
            real_D = column < D
            x = tl.load(x_ptr + row[:, None] * D + column[None, :], mask=real_T[:, None] & real_D[None, :], other=0.0)
            if PROJECT:
                a = tl.load(
                    a_ptr + rank[None, :] * D + column[:, None], mask=real_R[None, :] & real_D[:, None], other=0.0
                )
                product = tl.dot(x, a, product, input_precision="ieee")  # fp32 factors without TF32's rounding
            if WEIGHT:
                weight = tl.load(weight_ptr + column, mask=real_D, other=0.0)
                logit += tl.sum(x.to(tl.float32) * weight[None, :], axis=1)
    # the logit of all of D is known now, and only then λ
    response = _tanh((logit + tl.load(bias_ptr)) / tau)  # v [BLOCK_T]
    lam = 1.0 + tl.where(response < 0, response * below, response * above)
    place = row[:, None] * R + rank[None, :]
    real = real_T[:, None] & real_R[None, :]
    if PROJECT:
        reduced = product.to(reduced_ptr.dtype.element_ty)  # rounded before it is gated, as the plain form does
        tl.store(reduced_ptr + place, reduced, mask=real)
    else:
        reduced = tl.load(reduced_ptr + place, mask=real, other=0.0)
    gated = lam[:, None] * reduced.to(tl.float32)
    tl.store(gated_ptr + place, gated.to(gated_ptr.dtype.element_ty), mask=real)
    tl.store(response_ptr + token, response, mask=real_T)


@triton.jit
def _backward_kernel(
    back_ptr,
    reduced_ptr,
    response_ptr,
    inner_ptr,
    grad_logit_ptr,
    tokens,
    below,
    above,
    tau,
    scaling,
    R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_T = token < tokens
    rank = tl.arange(0, BLOCK_R)
    real = real_T[:, None] & (rank < R)[None, :]
    place = token.to(tl.int64)[:, None] * R + rank[None, :]
    # what is masked is 0, so that it adds nothing to the sums over R
    back = tl.load(back_ptr + place, mask=real, other=0.0).to(tl.float32) * scaling
    reduced = tl.load(reduced_ptr + place, mask=real, other=0.0).to(tl.float32)
    response = tl.load(response_ptr + token, mask=real_T, other=0.0)
    slope = tl.where(response < 0, below, above)
    # dλ = ⟨Bᵀ·dout, A x⟩, then through λ(v) and tanh
    grad_logit = tl.sum(back * reduced, axis=1) * slope * (1.0 - response * response) / tau
    tl.store(grad_logit_ptr + token, grad_logit, mask=real_T)
    inner = (1.0 + slope * response)[:, None] * back
    tl.store(inner_ptr + place, inner.to(inner_ptr.dtype.element_ty), mask=real)


@triton.jit
def _weight_gradient_kernel(
    x_ptr,
    grad_logit_ptr,
    partial_ptr,
    tokens,
    D: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    real_D = column < D
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for start in range(0, SPAN, BLOCK_T):  # this program's tokens, in order: atomic additions would not repeat
        token = tl.program_id(1) * SPAN + start + tl.arange(0, BLOCK_T)
        real_T = token < tokens
        place = token.to(tl.int64)[:, None] * D + column[None, :]
        x = tl.load(x_ptr + place, mask=real_T[:, None] & real_D[None, :], other=0.0).to(tl.float32)
        grad = tl.load(grad_logit_ptr + token, mask=real_T, other=0.0)
        total += tl.sum(grad[:, None] * x, axis=0)
    tl.store(partial_ptr + tl.program_id(1) * D + column, total, mask=real_D)


def _device_of(tensor: torch.Tensor) -> AbstractContextManager:
    # Triton launches on the current device, which need not be that of a model spread over several
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def gated_reduction(
    x_TD: torch.Tensor,
    reduced_TR: torch.Tensor | None,
    lora_a_RD: torch.Tensor,
    weight_D: torch.Tensor | None,
    bias_1: torch.Tensor,
    signed_map: SignedMap,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(λ ⊙ A x, A x, v) as `loragate.gates.operation.gated_reduction`; A x is computed here when `reduced_TR` is None.

    x and A of one dtype (fp32, fp16, bf16), gate parameters fp32; v is fp32.
    """
    flat_TD = x_TD.reshape(-1, x_TD.shape[-1]).contiguous()
    tokens, width = flat_TD.shape
    rank, leading = lora_a_RD.shape[0], x_TD.shape[:-1]
    project = reduced_TR is None
    reduced = flat_TD.new_empty(tokens, rank) if reduced_TR is None else reduced_TR.reshape(-1, rank).contiguous()
    gated = torch.empty_like(reduced)
    response = torch.empty(tokens, dtype=torch.float32, device=flat_TD.device)
    block = 16 if tokens <= 16 else 32  # 16 is the least that tl.dot takes; decoding has few tokens
    if tokens == 0:
        return gated.view(*leading, rank), reduced.view(*leading, rank), response.view(leading)
    with _device_of(flat_TD):
        _forward_kernel[(triton.cdiv(tokens, block),)](
            flat_TD,
            lora_a_RD.contiguous(),
            bias_1 if weight_D is None else weight_D,  # some pointer must be given; WEIGHT says that it is not read
            bias_1,
            reduced,
            gated,
            response,
            tokens,
            signed_map.below,
            signed_map.above,
            float(signed_map.tau),
            D=width,
            R=rank,
            PROJECT=project,
            WEIGHT=weight_D is not None,
            BLOCK_T=block,
            BLOCK_D=min(128, max(16, triton.next_power_of_2(width))),
            BLOCK_R=max(16, triton.next_power_of_2(rank)),  # tl.dot again
        )
    return gated.view(*leading, rank), reduced.view(*leading, rank), response.view(leading)


def rank_space_backward(
    back_TR: torch.Tensor, reduced_TR: torch.Tensor, response_T: torch.Tensor, signed_map: SignedMap, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of the logit [T] fp32, gradient of A x [T, R] in the dtype of `back_TR`), as the twin in `operation`."""
    rank = back_TR.shape[-1]
    back, reduced = back_TR.reshape(-1, rank).contiguous(), reduced_TR.reshape(-1, rank).contiguous()
    inner = torch.empty_like(back)
    grad_logit = torch.empty(back.shape[0], dtype=torch.float32, device=back.device)
    if back.shape[0] == 0:
        return grad_logit.view(response_T.shape), inner.view(back_TR.shape)
    with _device_of(back):
        _backward_kernel[(triton.cdiv(back.shape[0], 64),)](
            back,
            reduced,
            response_T.reshape(-1).contiguous(),
            inner,
            grad_logit,
            back.shape[0],
            signed_map.below,
            signed_map.above,
            float(signed_map.tau),
            float(scaling),
            R=rank,
            BLOCK_T=64,
            BLOCK_R=triton.next_power_of_2(rank),
        )
    return grad_logit.view(response_T.shape), inner.view(back_TR.shape)


def weight_gradient(grad_logit_T: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
    """Σ_t g_t · x_t, [D] fp32, as the twin in `operation`; the order of summation is fixed, so that it repeats exactly."""
    flat_TD = x_TD.reshape(-1, x_TD.shape[-1]).contiguous()
    tokens, width = flat_TD.shape
    parts = max(1, triton.cdiv(tokens, _TOKENS_PER_SUM))  # one part of zeros where there is no token
    partial = torch.empty(parts, width, dtype=torch.float32, device=flat_TD.device)
    with _device_of(flat_TD):
        _weight_gradient_kernel[(triton.cdiv(width, 64), parts)](
            flat_TD,
            grad_logit_T.reshape(-1).contiguous(),
            partial,
            tokens,
            D=width,
            SPAN=_TOKENS_PER_SUM,
            BLOCK_T=64,
            BLOCK_D=64,
        )
    return partial.sum(0)
