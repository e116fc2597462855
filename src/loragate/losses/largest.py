"""The k largest of long rows, exact, and of rows that come in pieces.

Two levels: a row is cut into groups of columns, and only the k groups with the largest maxima can hold any of the k
largest values. A group is a set of columns at equal distances, so that the maxima of all groups come from a few
element-wise maxima of contiguous memory.
"""

from __future__ import annotations

import torch


def largest(values_CV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row and their columns, in descending order; k ≤ V.

    Among equal values at the boundary any may be returned, as with `torch.topk`.
    """
    size = _group_size(values_CV.shape[1], k)
    groups = values_CV.shape[1] // size
    if size == 1:
        return torch.topk(values_CV, k, dim=-1)
    grouped = values_CV[:, : groups * size].unflatten(-1, (size, groups))
    chosen_CK = torch.topk(grouped.amax(1), k, dim=-1, sorted=False).indices
    candidates = torch.gather(grouped, 2, chosen_CK.unsqueeze(1).expand(-1, size, -1)).flatten(1)
    tail = values_CV[:, groups * size :]
    top_CK, at_CK = torch.topk(torch.cat((candidates, tail), dim=-1) if tail.shape[1] else candidates, k, dim=-1)
    inside = at_CK < candidates.shape[1]
    member_CK = torch.div(at_CK, k, rounding_mode="floor")
    column_CK = member_CK * groups + torch.gather(chosen_CK, 1, at_CK % k)
    return top_CK, torch.where(inside, column_CK, at_CK - candidates.shape[1] + groups * size)


def _group_size(width: int, k: int) -> int:
    """Columns per group, 1 where grouping would not pay; the least work is near √(width / k)."""
    if width >= 64 * k:
        return 16
    return 8 if width >= 16 * k else 1


class RunningLargest:
    """The k largest of rows that come in pieces of columns."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.found: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, values_CV: torch.Tensor, start: int) -> None:
        """Take in columns `start`, `start` + 1, …"""
        top_CK, column_CK = largest(values_CV, min(self.k, values_CV.shape[1]))
        self.merge(top_CK, column_CK + start)

    def merge(self, top_CK: torch.Tensor, column_CK: torch.Tensor) -> None:
        """Take in values with their columns."""
        if self.found is not None:
            top_CK = torch.cat((self.found[0], top_CK), dim=-1)
            column_CK = torch.cat((self.found[1], column_CK), dim=-1)
        if self.found is not None or top_CK.shape[1] > self.k:
            top_CK, at_CK = torch.topk(top_CK, min(self.k, top_CK.shape[1]), dim=-1)
            column_CK = torch.gather(column_CK, 1, at_CK)
        self.found = (top_CK, column_CK)
