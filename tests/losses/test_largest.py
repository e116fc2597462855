"""The two-level search for the largest against `torch.topk`, on whole rows and on rows in pieces."""

import pytest
import torch

from loragate.losses.running import RunningLargest, largest


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
    assert_exact(values, k, *largest(values, k))


@pytest.mark.parametrize("piece", [1, 7, 64, 1000, 5000])
@pytest.mark.parametrize("k", [2, 40])
def test_rows_in_pieces(piece, k):
    values = rows(2111)
    running = RunningLargest(k)
    for start in range(0, 2111, piece):
        running.add(values[:, start : start + piece], start)
    assert_exact(values, k, *running.found)
