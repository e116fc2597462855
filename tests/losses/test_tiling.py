"""Tile sizes keep to the budget and cover the vocabulary once."""

import pytest
import torch

from loragate.losses import tiling as module
from loragate.losses.projection import needs_widening
from loragate.losses.tiling import BUDGET, Tiling, chunks, tiling


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 160, 8192, 32000, 151936, 262144])
@pytest.mark.parametrize("width", [64, 1536, 8192])
def test_tiles_keep_to_the_budget(device, widened, vocabulary, width):
    sizes = tiling(vocabulary, width, device, widened=widened)
    assert 4 * sizes.tokens * sizes.columns <= BUDGET
    assert not widened or 4 * sizes.columns * width <= BUDGET
    spans = sizes.spans(vocabulary)
    assert [start for start, _ in spans] == [0, *[stop for _, stop in spans[:-1]]]
    assert spans[-1][1] == vocabulary
    assert max(stop - start for start, stop in spans) <= sizes.columns
    least = min(stop - start for start, stop in spans)
    assert len(spans) == 1 or least > sizes.columns / 4, "no sliver at the end"


def test_what_the_caller_asks_for(monkeypatch):
    sizes = tiling(151936, 1536, "cpu", widened=False, tokens=4096)
    assert sizes == Tiling(4096, 4096)
    monkeypatch.setattr(module, "BUDGET", 1)
    assert tiling(151936, 1536, "cpu", widened=False) == Tiling(16, 16)
    assert chunks(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 6)]
    assert needs_widening(torch.zeros(1, dtype=torch.bfloat16))
    assert not needs_widening(torch.zeros(1))
