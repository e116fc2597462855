"""Statistics of next-token distributions whose logits come tile by tile, so that no full row of them ever exists.

Per token a running maximum m, Σ e^(z−m) and Σ e^(z−m)(z−m) give log-sum-exp and entropy after the last tile; the k
largest logits are merged from tile to tile. The gradient of log-probability, e_y − p pulled back through the head, is
summed in the same pass, rescaled whenever the maximum moves: it costs one product per tile and no second projection.

Shapes: C tokens of one chunk, V columns of one tile, D hidden, K support.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from loragate.losses.projection import Projection


class RunningRows:
    """The running statistics of one chunk of tokens.

    Args:
        head, hidden_CD, labels_C: what is projected, and where log-probability is read.
        top: how many of the largest logits to keep; 0 for none.
        normalise: gather what log-sum-exp and log-probability are made of.
        entropy: and the full entropy.
        direction: and d log p / d hidden.
    """

    def __init__(
        self,
        head: Projection,
        hidden_CD: torch.Tensor,
        labels_C: torch.Tensor,
        *,
        top: int,
        normalise: bool,
        entropy: bool,
        direction: bool,
    ) -> None:
        self.head, self.labels_C, self.normalise, self.with_entropy = head, labels_C, normalise, entropy
        self.states_CD = head.states(hidden_CD)
        self.top = RunningLargest(top)
        count, working = hidden_CD.shape[0], head.working
        # the smallest number and no infinity, whose differences would be NaN in a tile that is masked throughout
        self.maximum_C = hidden_CD.new_full((count,), torch.finfo(working).min, dtype=working)
        self.total_C = self.maximum_C.new_zeros(count)
        self.weighted_C = self.maximum_C.new_zeros(count)
        self.label_C = self.maximum_C.new_zeros(count)
        self.pull_CD = self.maximum_C.new_zeros((count, hidden_CD.shape[1])) if direction else None

    def take(self, start: int, stop: int) -> None:
        """Project the tile of columns from `start` to `stop`, and add what it holds."""
        z_CV = self.head.tile(self.states_CD, start, stop)
        if self.top.k:
            self.top.add(z_CV, start)
        if not self.normalise:
            return
        at_C, inside_C = label_columns(self.labels_C, start, stop)
        # each label lies in one tile: the others add 0
        self.label_C += torch.where(inside_C, z_CV.gather(-1, at_C.unsqueeze(-1)).squeeze(-1), 0.0)
        slope = self.head.slope(z_CV) if self.pull_CD is not None else None  # before z is overwritten
        highest_C = torch.maximum(self.maximum_C, z_CV.amax(-1))
        self._rescale(highest_C)
        below_CV = z_CV.sub_(highest_C.unsqueeze(-1))  # in place: the logits are not needed any more
        if self.with_entropy:
            share_CV = below_CV.exp()
            self.weighted_C += torch.linalg.vecdot(share_CV, below_CV)
        else:
            share_CV = below_CV.exp_()
        self.total_C += share_CV.sum(-1)
        if self.pull_CD is not None:
            if isinstance(slope, torch.Tensor):
                share_CV *= slope
            self.pull_CD += self.head.tile_back(share_CV, start, stop)  # [C, V]·[V, D], while the tile is there

    def _rescale(self, highest_C: torch.Tensor) -> None:
        """State the sums relative to a new maximum."""
        gap_C = self.maximum_C - highest_C
        decay_C = gap_C.exp()
        # before total_C decays: Σ e^(z−m)(z−m′) = Σ e^(z−m)(z−m) + (m−m′) Σ e^(z−m)
        self.weighted_C += gap_C * self.total_C
        self.weighted_C *= decay_C
        self.total_C *= decay_C
        if self.pull_CD is not None:
            self.pull_CD *= decay_C.unsqueeze(-1)
        self.maximum_C = highest_C

    def normaliser(self) -> torch.Tensor:
        """log Σ e^z, [C]."""
        return self.maximum_C + self.total_C.log()

    def log_prob(self) -> torch.Tensor:
        """log p of the label, [C]."""
        return self.label_C - self.normaliser()

    def entropy(self) -> torch.Tensor:
        """Full entropy in nats, [C]."""
        # −Σ p log p with log p = (z − m) − log Σ e^(z−m)
        return self.total_C.log() - self.weighted_C / self.total_C

    def direction(self) -> torch.Tensor:
        """d log p / d hidden, [C, D]: the slope at the label times its head row, less the mean of all rows under p."""
        assert self.pull_CD is not None
        mean_CD = self.pull_CD / self.total_C.unsqueeze(-1)
        if self.head.softcap is None:
            mean_CD *= self.head.scale  # a slope that varies went into each tile
        own_CD = F.embedding(self.labels_C, self.head.weight_VD).to(self.head.working)
        # without a soft cap the slope is one number
        slope_C = torch.ones_like(self.label_C) * self.head.slope(self.label_C)
        return torch.addcmul(mean_CD.neg_(), own_CD, slope_C.unsqueeze(-1))


def label_columns(labels_C: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each label in a tile, whether it lies there); the column is some valid one where it does not."""
    inside_C = (labels_C >= start) & (labels_C < stop)
    return (labels_C - start).clamp(0, stop - start - 1), inside_C


def recomputed_gradient(
    head: Projection,
    spans: list[tuple[int, int]],
    hidden_CD: torch.Tensor,
    labels_C: torch.Tensor,
    log_z_C: torch.Tensor,
    entropy_C: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    grad_h: torch.Tensor | None,
) -> torch.Tensor:
    """d(Σ g_y log p_y + g_h H)/d hidden, [C, D], by projecting the tiles once more.

    Args:
        spans: the tiles.
        hidden_CD, labels_C: the chunk.
        log_z_C: log-sum-exp over the whole vocabulary.
        entropy_C: full entropy, where it has a gradient.
        grad_y, grad_h: g_y and g_h, each [C] or None; not both None.
    """
    states_CD = head.states(hidden_CD)
    total_CD = log_z_C.new_zeros(hidden_CD.shape)
    less_y = 0.0 if grad_y is None else -grad_y.unsqueeze(-1)
    for start, stop in spans:
        z_CV = head.tile(states_CD, start, stop)
        slope = head.slope(z_CV)
        # d log p_y/dz = e_y − p;  dH/dz = −p (log p + H)
        log_p_CV = z_CV.sub_(log_z_C.unsqueeze(-1))
        if grad_h is None:
            coefficient_CV = log_p_CV.exp_().mul_(less_y)
        else:
            assert entropy_C is not None
            p_CV = log_p_CV.exp()
            coefficient_CV = log_p_CV.add_(entropy_C.unsqueeze(-1)).mul_(-grad_h.unsqueeze(-1)).add_(less_y).mul_(p_CV)
            del p_CV
        if grad_y is not None:
            at_C, inside_C = label_columns(labels_C, start, stop)
            coefficient_CV.scatter_add_(-1, at_C.unsqueeze(-1), (grad_y * inside_C).unsqueeze(-1))
        coefficient_CV *= slope
        total_CD += head.tile_back(coefficient_CV, start, stop)
        del z_CV, log_p_CV, coefficient_CV, slope  # before the next tile is made
    return total_CD


def largest(values_CV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row and their columns, in descending order; k ≤ V.

    Two levels: a row is cut into groups of columns, and only the k groups with the largest maxima can hold any of the k
    largest values. A group is a set of columns at equal distances, so that the maxima of all groups come from a few
    element-wise maxima of contiguous memory. Among equal values at the boundary any may be returned, as with `torch.topk`.
    """
    width = values_CV.shape[1]
    if width < 16 * k:
        return torch.topk(values_CV, k, dim=-1)  # grouping would not pay
    size = 16 if width >= 64 * k else 8  # columns per group; the least work is near √(width / k)
    groups = width // size
    grouped = values_CV[:, : groups * size].unflatten(-1, (size, groups))  # [C, size, groups]
    chosen_CK = torch.topk(grouped.amax(1), k, dim=-1, sorted=False).indices
    candidates = torch.gather(grouped, 2, chosen_CK.unsqueeze(1).expand(-1, size, -1)).flatten(1)
    tail = values_CV[:, groups * size :]  # fewer than `size` columns, in no group
    top_CK, at_CK = torch.topk(torch.cat((candidates, tail), dim=-1) if tail.shape[1] else candidates, k, dim=-1)
    # where each of the k stands: its member of a group and which of the chosen groups, back to a column of the row
    inside = at_CK < candidates.shape[1]
    member_CK = torch.div(at_CK, k, rounding_mode="floor")
    column_CK = member_CK * groups + torch.gather(chosen_CK, 1, at_CK % k)
    return top_CK, torch.where(inside, column_CK, at_CK - candidates.shape[1] + groups * size)


class RunningLargest:
    """The k largest of rows that come in pieces of columns."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.found: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, values_CV: torch.Tensor, start: int) -> None:
        """Take in columns `start`, `start` + 1, …"""
        top_CK, column_CK = largest(values_CV, min(self.k, values_CV.shape[1]))
        column_CK = column_CK + start
        if self.found is not None:
            top_CK = torch.cat((self.found[0], top_CK), dim=-1)
            column_CK = torch.cat((self.found[1], column_CK), dim=-1)
            top_CK, at_CK = torch.topk(top_CK, min(self.k, top_CK.shape[1]), dim=-1)
            column_CK = torch.gather(column_CK, 1, at_CK)
        self.found = (top_CK, column_CK)
