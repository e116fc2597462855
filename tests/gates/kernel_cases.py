"""The Triton kernels against their plain twins, in Triton's interpreter (fp32 and fp16; it has no sound bf16 product).

Run by test_kernel.py in a process of its own: the interpreter must be chosen before Triton is imported.
"""

import pytest
import torch

from loragate.gates import backend, kernel, operation
from loragate.gates.range import Range
from loragate.gates.signed_map import SignedMap

FP32, FP16 = torch.float32, torch.float16
LIMIT = {FP32: 2e-5, FP16: 4e-3}
SHAPES = [((2, 40), 64, 16), ((7,), 24, 1), ((1, 1), 16, 4), ((3, 11), 150, 5)]  # tokens, width, rank
SHAPES += [((65,), 33, 64), ((1, 80), 20, 3), ((0,), 32, 8)]
MAPS = [SignedMap(Range(-6, 3)), SignedMap(Range(-3, 1), 0.7), SignedMap(Range(0, 4), 2.0)]


@pytest.fixture(autouse=True)
def several_partial_sums(monkeypatch):
    monkeypatch.setattr(kernel, "_TOKENS_PER_SUM", 64)


def assert_near(found, expected, limit):
    """The largest difference, relative to the largest value."""
    assert found.shape == expected.shape
    if found.numel():
        found, expected = found.double(), expected.double()
        assert (found - expected).abs().max() <= limit * expected.abs().max().clamp(min=1e-12)


def operands(shape, width, rank, dtype):
    draw = torch.Generator().manual_seed(0)

    def make(*size, kind=dtype):
        return torch.randn(*size, generator=draw).to(kind)

    weight = make(width, kind=FP32) / width**0.5
    return make(*shape, width), make(rank, width) / width**0.5, make(40, rank), weight, make(1, kind=FP32) / 4


@pytest.mark.parametrize(("shape", "width", "rank"), SHAPES)
@pytest.mark.parametrize(("dtype", "weighted"), [(FP32, True), (FP32, False), (FP16, True)])
def test_parts_agree_with_their_twins(shape, width, rank, dtype, weighted):
    x, a, _, weight, bias = operands(shape, width, rank, dtype)
    for signed_map in MAPS if shape == (3, 11) else MAPS[:1]:
        arguments = (a, weight if weighted else None, bias, signed_map)
        plain = operation.gated_reduction(x, None, *arguments)
        for reduced in (None, plain[1]):
            found = kernel.gated_reduction(x, reduced, *arguments)
            limits = (LIMIT[dtype], LIMIT[dtype if reduced is None else FP32], LIMIT[FP32])  # gated, reduced, response
            for left, right, limit in zip(found, plain, limits, strict=True):
                assert left.dtype == right.dtype
                assert_near(left, right, limit)
        back = torch.randn(*shape, rank, generator=torch.Generator().manual_seed(1)).to(dtype)
        ours, theirs = (run.rank_space_backward(back, *plain[1:], signed_map, 2.0) for run in (kernel, operation))
        for left, right, limit in zip(ours, theirs, (LIMIT[FP32], LIMIT[dtype]), strict=True):
            assert left.dtype == right.dtype
            assert_near(left, right, limit)
        ours, theirs = (run.weight_gradient(theirs[0].float(), x) for run in (kernel, operation))
        assert_near(ours, theirs, LIMIT[FP32])


@pytest.mark.parametrize(
    "logit", [0.0, -0.0, 1e-7, -1e-7, 1e-3, -1e-3, 0.1249, 0.1251, -0.1251, 2.0, -2.0, 30.0, -30.0]
)
def test_the_map_at_its_join_and_ends(logit):
    """λ at v = 0 from both sides, at tiny logits and at both ends; and λ = 1 leaves the bits of A x."""
    x, a, _, _, _ = operands((5,), 32, 4, FP16)
    reduced, bias = torch.nn.functional.linear(x, a), torch.tensor([logit])
    found, expected = (run.gated_reduction(x, reduced, a, None, bias, MAPS[0]) for run in (kernel, operation))
    assert_near(found[2], expected[2], 2e-6)
    assert logit != 0 or torch.equal(found[0], reduced)
    response = expected[2].contiguous()
    slopes = [run.rank_space_backward(reduced, reduced, response, MAPS[0], 1.0)[0] for run in (kernel, operation)]
    assert_near(*slopes, 2e-6)


@pytest.fixture(params=["triton", "auto"])
def setting(request, monkeypatch):
    monkeypatch.setenv(backend.VARIABLE, request.param)
    backend.chosen.cache_clear()
    yield request.param
    backend.chosen.cache_clear()


def test_what_runs_in_a_kernel(setting):
    x, a, _, _, bias = operands((3,), 16, 4, FP32)
    assert backend.kernels_for(x, a, bias) is kernel
    assert backend.kernels_for(x.double(), a, bias) is None
    assert backend.kernels_for(x, torch.zeros(65, 16), bias) is None
    assert backend.projects(x, a) == (setting == "triton")


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("detach", [True, False])
def test_the_whole_operation_agrees_with_the_reference(setting, dtype, weighted, detach):
    """`gated_delta` and all its gradients through the kernels, against the reference by autograd in fp64."""
    settings = {"signed_map": SignedMap(Range(-6, 3), 0.8), "scaling": 2.0, "detach_input": detach}
    results = []
    for run, kind in ((operation.gated_delta, None), (operation.gated_delta_reference, torch.float64)):
        tensors = [value.to(kind or value.dtype).requires_grad_() for value in operands((2, 19), 48, 6, dtype)]
        x, a, b, weight, bias = tensors
        out = run(x, a, b, weight if weighted else None, bias, **settings)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in tensors)])
    for name, found, expected in zip(("out", "x", "a", "b", "weight", "bias"), *results, strict=True):
        assert (found is None) == (expected is None), name
        if found is not None:
            # the bias's gradient is a sum of terms that nearly cancel here
            assert_near(found, expected, LIMIT[dtype] * (20 if name == "bias" else 1))
