"""Runs the Triton kernels in Triton's interpreter and prints their distance from the plain twins, one JSON line a case.

Started by test_kernel.py in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import itertools
import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from loragate.gates import backend, kernel, operation
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap

SHAPES = [  # tokens, width, rank
    ((2, 40), 64, 16),
    ((7,), 24, 1),
    ((1, 1), 16, 4),
    ((3, 11), 150, 5),
    ((65,), 33, 64),
    ((1, 80), 20, 3),
    ((0,), 32, 8),
]
MAPS = [SignedMap(Range(-6, 3)), SignedMap(Range(-3, 1), 0.7), SignedMap(Range(0, 4), 2.0)]


def relative(found, expected):
    if expected.numel() == 0:
        return 0.0 if found.shape == expected.shape else 1.0
    found, expected = found.double(), expected.double()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def operands(shape, width, rank, dtype, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def make(*size, kind=dtype):
        return torch.randn(*size, generator=draw).to(kind)

    fp32 = torch.float32
    weight = make(width, kind=fp32) / width**0.5
    return make(*shape, width), make(rank, width) / width**0.5, make(40, rank), weight, make(1, kind=fp32) / 4


def parts(shape, width, rank, dtype, weighted, signed_map):
    """The three functions of the kernel module against their twins; bits where both do the same roundings."""
    x, a, _, weight, bias = operands(shape, width, rank, dtype)
    weight = weight if weighted else None
    plain = operation.gated_reduction(x, None, a, weight, bias, signed_map)
    one_pass = kernel.gated_reduction(x, None, a, weight, bias, signed_map)
    given = kernel.gated_reduction(x, plain[1], a, weight, bias, signed_map)
    back = torch.randn(*shape, rank, generator=torch.Generator().manual_seed(1)).to(dtype)
    through = [run.rank_space_backward(back, *plain[1:], signed_map, 2.0) for run in (kernel, operation)]
    sums = [run.weight_gradient(through[1][0].float(), x) for run in (kernel, operation)]
    names = ("gated", "reduced", "response")
    errors = {name: relative(left, right) for name, left, right in zip(names, one_pass, plain, strict=True)}
    errors |= {f"given_{name}": relative(left, right) for name, left, right in zip(names, given, plain, strict=True)}
    errors |= {
        "grad_logit": relative(through[0][0], through[1][0]),
        "inner": relative(through[0][1], through[1][1]),
        "grad_weight": relative(*sums),
    }
    same = all(
        left.shape == right.shape and left.dtype == right.dtype
        for left, right in zip((*one_pass, *given, *through[0]), (*plain, *plain, *through[1]), strict=True)
    )
    return {"errors": errors, "same_form": same}


def ends():
    """λ at v = 0 from both sides, at tiny logits and at both ends; and λ = 1 leaves the bits of A x."""
    x, a, _, _, _ = operands((5,), 32, 4, torch.float16)
    reduced = torch.nn.functional.linear(x, a)
    errors = {}
    for logit in (0.0, -0.0, 1e-7, -1e-7, 1e-3, -1e-3, 0.1249, 0.1251, -0.1251, 2.0, -2.0, 30.0, -30.0):
        bias = torch.tensor([logit])
        found = kernel.gated_reduction(x, reduced, a, None, bias, MAPS[0])
        expected = operation.gated_reduction(x, reduced, a, None, bias, MAPS[0])
        errors[str(logit)] = relative(found[2], expected[2])
        if logit == 0:
            errors["bits"] = 0.0 if torch.equal(found[0], reduced) else 1.0
        slopes = [
            run.rank_space_backward(reduced, reduced, expected[2].contiguous(), MAPS[0], 1.0)[0]
            for run in (kernel, operation)
        ]
        errors[f"slope {logit}"] = relative(*slopes)
    return errors


def whole(dtype, weighted, detach):
    """`gated_delta` and all its gradients through the kernels, against the reference by autograd in fp64."""
    values = operands((2, 19), 48, 6, dtype)
    settings = {"signed_map": SignedMap(Range(-6, 3), 0.8), "scaling": 2.0, "detach_input": detach}
    results = []
    for run, kind in ((operation.gated_delta, None), (operation.gated_delta_reference, torch.float64)):
        tensors = [(value if kind is None else value.to(kind)).requires_grad_() for value in map(torch.clone, values)]
        x, a, b, weight, bias = tensors
        out = run(x, a, b, weight if weighted else None, bias, **settings)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in tensors)])
    errors = {}
    for name, found, expected in zip(("out", "x", "a", "b", "weight", "bias"), *results, strict=True):
        assert (found is None) == (expected is None), name
        if found is not None:
            errors[name] = relative(found, expected)
    return errors


def report(part, setting, case, dtype, **found):
    print(json.dumps({"part": part, "setting": setting, "case": case, "dtype": dtype, **found}))


def main():
    kernel._TOKENS_PER_SUM = 64  # so that a few tokens make several partial sums
    x, a, _, _, bias = operands((3,), 16, 4, torch.float32)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    for (name, dtype), shape, weighted in itertools.product(dtypes.items(), SHAPES, (True, False)):
        if name == "fp16" and not weighted:
            continue
        for bounds in MAPS if shape == SHAPES[3] else MAPS[:1]:
            found = parts(*shape, dtype, weighted, bounds)
            report("parts", None, f"{name} {shape} {weighted} {bounds}", name, **found)
    report("ends", None, "", "fp32", errors=ends())
    for setting in ("triton", "auto"):
        os.environ["LORAGATE_KERNEL"] = setting
        backend.chosen.cache_clear()
        assert backend.kernels_for(x, a, bias) is kernel
        assert backend.kernels_for(x.double(), a, bias) is None
        assert backend.kernels_for(x, torch.zeros(65, 16), bias) is None
        assert backend.projects(x, a) == (setting == "triton")
        for (name, dtype), weighted, detach in itertools.product(dtypes.items(), (True, False), (True, False)):
            report("whole", setting, f"{name} {weighted} {detach}", name, errors=whole(dtype, weighted, detach))


main()
