"""Tiles keep to the budget, agree with whole rows, and lead to the largest values, as exact as `torch.topk`."""

import pytest
import torch

from loragate.losses import projection
from loragate.losses.projection import (
    TILE_BYTES,
    Head,
    Projection,
    RunningTopK,
    grouped_topk,
    tiling,
)

V, D, C, K = 101, 16, 6, 5


def operands(dtype):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(C, D, generator=draw), torch.randn(V, D, generator=draw)
    return hidden.to(dtype), weight.to(dtype), torch.randn(V, generator=draw), draw


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (2.0, 3.0)])
def test_rows_tiles_and_the_way_back(monkeypatch, dtype, scale, softcap):
    monkeypatch.setattr(projection, "TILE_BYTES", 4 * D * 30)  # 30 widened rows at a time
    hidden, weight, bias, draw = operands(dtype)
    head = Projection(Head(weight, bias, scale, softcap))
    leaf = hidden.to(head.working).clone().requires_grad_()
    z = (leaf @ weight.to(head.working).T + bias) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    whole, slope = head.logits(hidden)
    whole = whole.clone()  # the next call writes over it
    assert whole.dtype == head.working
    torch.testing.assert_close(whole, z.detach(), rtol=1e-5, atol=1e-5)
    coefficient = torch.randn(C, V, generator=draw).to(head.working)
    (z * coefficient).sum().backward()
    torch.testing.assert_close(head.pull_back(coefficient, slope), leaf.grad, rtol=1e-4, atol=1e-4)
    parts, total = [], torch.zeros(C, D, dtype=head.working)
    for start, stop in ((0, 40), (40, 80), (80, V)):
        tile = head.tile(head.states(hidden), start, stop).clone()
        parts.append(tile)
        total += head.tile_back(coefficient[:, start:stop] * head.slope(tile), start, stop)
    torch.testing.assert_close(torch.cat(parts, -1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total, leaf.grad, rtol=1e-4, atol=1e-4)
    if head.widened:
        assert head.wide_rows.shape[0] <= 40, "never a widened copy of the head"


def test_bf16_factors_are_multiplied_exactly_wherever_the_processor_has_them(monkeypatch):
    draw, matmul = torch.Generator().manual_seed(0), getattr(torch.backends.mkldnn, "matmul", None)
    hidden, weight = (torch.randn(count, 1024, generator=draw) for count in (300, 700))
    before, asked = getattr(matmul, "fp32_precision", ""), []
    multiply = torch.mm

    def watch(*factors, **more):
        asked.append(getattr(matmul, "fp32_precision", ""))
        return multiply(*factors, **more)

    for low in (hidden.bfloat16(), hidden):
        head = Projection(Head(weight.bfloat16()))
        monkeypatch.setattr(torch, "mm", watch)
        z, _ = head.logits(low)
        monkeypatch.undo()
        exact = low.double() @ weight.bfloat16().double().T  # of size 100, of which bf16 would round away 0.5
        torch.testing.assert_close(z.double(), exact, rtol=0, atol=5e-4)
    native = before and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()
    assert asked == ["bf16" if native else before, before], "hidden states in fp32 are not rounded"
    assert getattr(matmul, "fp32_precision", "") == before
    with pytest.raises(RuntimeError), projection.products_of_bf16(True):
        torch.mm(hidden, weight)
    assert getattr(matmul, "fp32_precision", "") == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_sparse_way_back(monkeypatch, dtype, index):
    monkeypatch.setattr(projection, "TILE_BYTES", 1)  # one token at a time
    _, weight, _, draw = operands(dtype)
    indices = torch.randint(0, V, (C, K), generator=draw)
    coefficient = torch.randn(C, K, generator=draw)
    wanted = torch.einsum("tk,tkd->td", coefficient, weight.float()[indices])
    found = Projection(Head(weight)).pull_back_sparse(indices.to(index), coefficient)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 160, 8192, 32000, 151936, 262144])
@pytest.mark.parametrize("width", [64, 1536, 8192])
def test_tiles_keep_to_the_budget(device, widened, vocabulary, width):
    sizes = tiling(vocabulary, width, device, widened=widened)
    assert 4 * sizes.tokens * sizes.columns <= TILE_BYTES
    assert not widened or 4 * sizes.columns * width <= TILE_BYTES
    spans = sizes.spans(vocabulary)
    assert [start for start, _ in spans] == [0, *[stop for _, stop in spans[:-1]]]
    assert spans[-1][1] == vocabulary
    assert max(stop - start for start, stop in spans) <= sizes.columns
    least = min(stop - start for start, stop in spans)
    assert len(spans) == 1 or least > sizes.columns / 4, "no sliver at the end"


def rows(width):
    values = torch.randn(7, width, generator=torch.Generator().manual_seed(width))
    values[3, -1] = 50.0  # in the last columns, outside of every group
    values[4] = 1.0  # all equal
    values[5, : width // 2] = -torch.inf
    values[6] = values[6].round()  # many ties
    return values


def assert_exact(values, k, top, columns):
    torch.testing.assert_close(top, torch.topk(values, k).values, rtol=0, atol=0)
    torch.testing.assert_close(values.gather(1, columns.long()), top, rtol=0, atol=0)
    assert all(len(set(row)) == k for row in columns.tolist()), "no column twice"


@pytest.mark.parametrize(
    ("width", "k"),
    [(64 * 40, 10), (64 * 40 + 17, 10), (64 * 8 + 3, 2), (63, 5), (64 * 500 + 1, 100), (30 * 16 + 5, 30), (20, 20)],
)
def test_two_level_selection_is_exact(width, k):
    values = rows(width)
    assert_exact(values, k, *grouped_topk(values, k))


@pytest.mark.parametrize("piece", [1, 7, 64, 1000, 5000])
@pytest.mark.parametrize("k", [2, 40])
def test_rows_in_pieces(piece, k):
    values = rows(2111)
    running = RunningTopK(k)
    for start in range(0, 2111, piece):
        running.add(values[:, start : start + piece], start)
    assert_exact(values, k, *running.found)
