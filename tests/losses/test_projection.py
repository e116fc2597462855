"""Whole rows and tiles of one head agree, whether its rows are used as they are or widened tile by tile."""

import pytest
import torch

from loragate.losses import projection
from loragate.losses.projection import Head, Projection

V, D, C, K = 101, 16, 6, 5


def operands(dtype):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(C, D, generator=draw), torch.randn(V, D, generator=draw)
    return hidden.to(dtype), weight.to(dtype), torch.randn(V, generator=draw), draw


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.5, None), (2.0, 3.0)])
def test_rows_tiles_and_the_way_back(monkeypatch, dtype, scale, softcap):
    monkeypatch.setattr(projection, "BUDGET", 4 * D * 30)  # 30 widened rows at a time
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_the_sparse_way_back(monkeypatch, dtype, index):
    monkeypatch.setattr(projection, "BUDGET", 1)  # one token at a time
    _, weight, _, draw = operands(dtype)
    indices = torch.randint(0, V, (C, K), generator=draw)
    coefficient = torch.randn(C, K, generator=draw)
    wanted = torch.einsum("tk,tkd->td", coefficient, weight.float()[indices])
    found = Projection(Head(weight)).pull_back_sparse(indices.to(index), coefficient)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
