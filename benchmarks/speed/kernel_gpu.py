"""The Triton kernels of the gated LoRA operation against their plain PyTorch twins: a part of `benchmarks/gpu/run.py`.

Two questions at the widths of Qwen2.5-1.5B and 7B (hidden and MLP), rank 16, in bf16: do kernel and twin agree, and which is
faster. Agreement is measured against the reference in fp64 on the same rounded inputs: a kernel passes if its error is at
most 1.5 times the twin's plus 1e-5. Times are medians of alternating runs between CUDA events: a training step of one module
without the base product (forward and backward of `gated_delta`) and a forward without gradients at 16 tokens (decoding).
PEFT's plain delta, `B(A x)` by autograd, stands beside as the cost without a gate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from loragate.gates import backend
from loragate.gates.operation import gated_delta, gated_delta_reference
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap

CASES = [  # input width, output width, tokens
    (1536, 1536, 4096),
    (1536, 8960, 4096),
    (8960, 1536, 4096),
    (3584, 3584, 8192),
    (3584, 18944, 8192),
    (18944, 3584, 16384),
]
RANK, DECODED = 16, 16
GATE = {"signed_map": SignedMap(Range(-6, 3)), "scaling": 1.0}
SETTINGS = ("torch", "auto", "triton")
DEVICE, DTYPE = "cuda", torch.bfloat16  # "cpu" rehearses in Triton's interpreter, which knows no bf16 products


def choose(setting: str) -> None:
    """Make the operation use one of the settings of LORAGATE_KERNEL."""
    backend.chosen = lambda: setting


def operands(width: int, output: int, tokens: int) -> list[torch.Tensor]:
    draw = torch.Generator(device=DEVICE).manual_seed(0)

    def make(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=DEVICE).to(dtype or DTYPE)

    x, a, b = make(1, tokens, width), make(RANK, width) / width**0.5, make(output, RANK) / RANK**0.5
    return [x, a, b, make(width, dtype=torch.float32) / width**0.5, make(1, dtype=torch.float32) / 4]


def gradients(run: Callable[..., torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    """[out, grad x, grad w, grad b] for a fixed direction of the output."""
    x, a, b, weight, bias = (value.detach().clone() for value in values)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    out = run(x, a, b, weight, bias, **GATE)
    direction = torch.randn(out.shape, generator=torch.Generator(device=DEVICE).manual_seed(1), device=DEVICE)
    out.backward(direction.to(DTYPE).to(out.dtype))
    return [out.detach(), x.grad, weight.grad, bias.grad]


def agreement(width: int, output: int, tokens: int) -> dict[str, dict[str, float]]:
    """{setting: {quantity: relative error against fp64}}, over at most 1024 tokens."""
    values = operands(width, output, min(tokens, 1024))
    exact = gradients(gated_delta_reference, [value.double() for value in values])
    found = {}
    for setting in SETTINGS:
        choose(setting)
        found[setting] = {
            name: float((got.double() - true).norm() / true.norm())
            for name, got, true in zip(
                ("out", "x", "weight", "bias"), gradients(gated_delta, values), exact, strict=True
            )
        }
    return found


def milliseconds(run: Callable[[], object]) -> float:
    if DEVICE == "cpu":
        began = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def times(width: int, output: int, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """{setting or "peft": {"step", "decode": median milliseconds}}."""
    values = operands(width, output, tokens)
    x, a, b, weight, bias = values
    few = x[:, :DECODED]
    direction = torch.ones(1, tokens, output, dtype=DTYPE, device=DEVICE)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    factors = [a.clone().requires_grad_(), b.clone().requires_grad_()]

    def gated_step() -> None:
        gated_delta(leaves[0], a, b, leaves[1], leaves[2], **GATE).backward(direction)

    def plain_step() -> None:
        F.linear(F.linear(leaves[0], factors[0]), factors[1]).backward(direction)

    @torch.no_grad()
    def gated_decode() -> None:
        gated_delta(few, a, b, weight, bias, **GATE)

    @torch.no_grad()
    def plain_decode() -> None:
        F.linear(F.linear(few, a), b)

    kinds: dict[str, dict[str, list[float]]] = {name: {"step": [], "decode": []} for name in (*SETTINGS, "peft")}
    for turn in range(repeats + 3):
        for name, row in kinds.items():
            if name != "peft":
                choose(name)
            for kind, run in (
                ("step", plain_step if name == "peft" else gated_step),
                ("decode", plain_decode if name == "peft" else gated_decode),
            ):
                spent = milliseconds(run)
                if turn >= 3:  # compilation and warm-up
                    row[kind].append(spent)
    return {name: {kind: statistics.median(spent) for kind, spent in row.items()} for name, row in kinds.items()}


def measure(width: int, output: int, tokens: int, repeats: int) -> tuple[dict[str, Any], list[str]]:
    """One case's errors and times, and a line for every quantity in which a kernel does not pass."""
    row: dict[str, Any] = {"width": width, "output": output, "tokens": tokens, "rank": RANK}
    row["errors"] = agreement(width, output, tokens)
    row["milliseconds"] = times(width, output, tokens, repeats)
    failed = [
        f"{width} to {output}, {setting}, {name}: {error:.2g}"
        for setting in ("auto", "triton")
        for name, error in row["errors"][setting].items()
        if error > 1.5 * row["errors"]["torch"][name] + 1e-5
    ]
    return row, failed
