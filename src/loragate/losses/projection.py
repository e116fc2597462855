"""The output head of one call, tile by tile: fp32 logits, the way back to the hidden states, and running statistics.

All sizes come from one budget of bytes, so that the head's memory is the same whatever the batch, the vocabulary and the width;
beside a tile of logits live, for log-probability and entropy, at most two more of its size. Head rows of low precision are
multiplied as they are on CUDA; elsewhere they are widened to fp32, one tile of them at a time, so that a widened copy of the
head never exists. A processor that multiplies bf16 still multiplies them, and hidden states in bf16, as what they are.

Per token a running maximum m, Σ e^(z−m) and Σ e^(z−m)(z−m) give log-sum-exp and entropy after the last tile; the k largest logits
are merged from tile to tile. The gradient of log-probability, e_y − p pulled back through the head, is summed in the same pass,
rescaled whenever the maximum moves: it costs one product per tile and no second projection.

Shapes: C tokens of one chunk, T tokens, D hidden, V vocabulary (or the columns of one tile), K support.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

TILE_BYTES = 64 << 20
"""Bytes of one tile of logits, of the head rows widened for it, and of the rows that a sparse backward gathers at a time."""

MIN_TILE_SIDE = 16
"""Tokens, and columns, of a tile at the least, whatever the budget."""


@dataclass(frozen=True)
class Tiling:
    """Sizes of one tile: `tokens` × `columns` of the vocabulary."""

    tokens: int
    columns: int

    def spans(self, vocabulary: int) -> list[tuple[int, int]]:
        """First column and end of each tile of a row, as even as multiples of 64 allow."""
        count = -(-vocabulary // self.columns)
        unit = 64 if self.columns >= 64 and self.columns % 64 == 0 else 1  # sizes that matrix products like
        blocks = -(-vocabulary // unit)
        ends = [min(vocabulary, unit * (blocks * (at + 1) // count)) for at in range(count)]
        return list(zip([0, *ends[:-1]], ends, strict=True))


def preferred_tokens(device: str) -> int:
    """Tokens that make the product with a tile of head rows worth reading them, by device type.

    A GPU needs some 300 multiplications per weight read to be busy; a CPU is content with fewer tokens, and the search for
    the largest is quicker the wider the tile.
    """
    return 128 if device == "cpu" else 512


def tiling(vocabulary: int, width: int, device: str, *, widened: bool, tokens: int | None = None) -> Tiling:
    """Tile sizes for logits of four bytes, of a head [V, D] on a type of device.

    `widened` says whether head rows are copied to fp32 for the product; their copy then keeps to the budget too. `tokens` are the
    positions of a tile where the caller insists.
    """
    # 64 MiB: 128 tokens × 131,072, or 512 × 32,768
    columns = max(MIN_TILE_SIDE, TILE_BYTES // (4 * (tokens or preferred_tokens(device))))
    if widened:
        columns = min(columns, max(MIN_TILE_SIDE, TILE_BYTES // (4 * width)))
    columns = min(columns, vocabulary)
    if tokens is None:
        tokens = max(MIN_TILE_SIDE, TILE_BYTES // (4 * columns))
        if device == "cpu" and not widened:
            # the logits of a narrow vocabulary are then still in the cache when they are searched
            tokens = min(tokens, preferred_tokens(device))
    return Tiling(tokens, columns)


def chunks(count: int, size: int) -> list[slice]:
    """Slices of `size` that cover `count` positions."""
    return [slice(at, at + size) for at in range(0, count, size)]


@dataclass(frozen=True)
class Head:
    """A frozen output head, `weight` [V, D] and `bias` [V] or None, and what the family does between it and the softmax:
    z = softcap·tanh((W h + bias)·scale / softcap)."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, V."""
        return int(self.weight.shape[0])

    def logits(self, hidden: torch.Tensor, working: torch.dtype) -> torch.Tensor:
        """Full logits [..., V] by plain autograd, multiplied in `working`; at least fp32 from there on."""
        bias = None if self.bias is None else self.bias.to(working)
        z = F.linear(hidden.to(working), self.weight.to(working), bias)
        z = (z if working == torch.float64 else z.float()) * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


class Projection:
    """fp32 logits of frozen head rows, with the family's scale and soft cap.

    Logits are written into memory that the next call uses again.
    """

    def __init__(self, head: Head) -> None:
        self.vocabulary, self.scale, self.softcap = head.vocabulary, head.scale, head.softcap
        self.weight_VD = weight_VD = head.weight
        self.working = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        self.direct = multiplies_directly(weight_VD)
        self.widened = needs_widening(weight_VD)
        self.bias_V = None if head.bias is None else head.bias.to(self.working)
        self.room: torch.Tensor | None = None
        self.wide_rows: torch.Tensor | None = None
        self.wide_span: tuple[int, int] | None = None
        self.both_bf16 = False

    def states(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """Hidden states in the dtype in which they are multiplied."""
        self.both_bf16 = hidden_CD.dtype == self.weight_VD.dtype == torch.bfloat16
        return hidden_CD.to(self.weight_VD.dtype if self.direct else self.working)

    def tile(self, states_CD: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """z [C, stop − start] of some columns; `states_CD` as `states` gives them."""
        if self.direct:
            z_CV = product_in_fp32(states_CD, self.weight_VD[start:stop].t())
        else:
            z_CV = self._multiply(states_CD, start, stop, self._logits_buffer(states_CD, stop - start))
        return self._apply_bias_scale_softcap(z_CV, start, stop)

    def slope(self, z: torch.Tensor) -> torch.Tensor | float:
        """dz/d(W h) at logits z: of their shape where there is a soft cap, else the constant `scale`."""
        cap = self.softcap
        if cap is None:
            return self.scale
        # d/dx cap·tanh(x·scale/cap) = scale·(1 − tanh²), and tanh is z/cap: no need to keep W h
        return (z / cap).square_().neg_().add_(1.0).mul_(self.scale)

    def tile_back(self, coefficient_CV: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Σ_v coefficient·W_v over some columns, [C, D]."""
        if self.direct:
            return product_in_fp32(coefficient_CV.to(self.weight_VD.dtype), self.weight_VD[start:stop])
        return torch.mm(coefficient_CV, self._rows(start, stop))

    def logits(self, hidden_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """(z [C, V], its `slope`): whole rows, for objectives that need them."""
        states_CD = self.states(hidden_CD)
        if not self.widened:
            z_CV = self.tile(states_CD, 0, self.vocabulary)
        else:
            z_CV = self._logits_buffer(states_CD, self.vocabulary)
            for start, stop in self._widened_spans():
                self._multiply(states_CD, start, stop, z_CV[:, start:stop])
            z_CV = self._apply_bias_scale_softcap(z_CV, 0, self.vocabulary)
        return z_CV, self.slope(z_CV)

    def pull_back(self, coefficient_CV: torch.Tensor, slope: torch.Tensor | float) -> torch.Tensor:
        """Σ_v coefficient·dz/dh over whole rows, [C, D]."""
        weighted = coefficient_CV * slope
        if not self.widened:
            return self.tile_back(weighted, 0, self.vocabulary)
        total = weighted.new_zeros((weighted.shape[0], self.weight_VD.shape[1]))
        for start, stop in self._widened_spans():
            total.addmm_(weighted[:, start:stop], self._rows(start, stop))
        return total

    def pull_back_sparse(self, indices_TK: torch.Tensor, coefficient_TK: torch.Tensor) -> torch.Tensor:
        """Σ_j coefficient_j · W[index_j], [T, D], for a coefficient on K logits: K·D multiplications per token."""
        if self.weight_VD.dtype == self.working:
            return F.embedding_bag(indices_TK, self.weight_VD, per_sample_weights=coefficient_TK, mode="sum")
        # embedding_bag would round the coefficients to the rows' dtype; instead K rows of D numbers, as they are and widened,
        # are gathered for as many tokens at a time as fit the budget
        total_TD = coefficient_TK.new_empty((indices_TK.shape[0], self.weight_VD.shape[1]))
        size = self.weight_VD.shape[1] * (self.weight_VD.element_size() + total_TD.element_size())
        count = max(1, TILE_BYTES // (indices_TK.shape[1] * size))
        for at in range(0, indices_TK.shape[0], count):
            rows = slice(at, at + count)
            gathered = F.embedding(indices_TK[rows], self.weight_VD).to(self.working)
            # [T, 1, K] · [T, K, D]
            torch.bmm(coefficient_TK[rows].unsqueeze(1), gathered, out=total_TD[rows].unsqueeze(1))
        return total_TD

    def _multiply(self, states_CD: torch.Tensor, start: int, stop: int, out_CV: torch.Tensor) -> torch.Tensor:
        """W h of some columns, written to `out_CV`."""
        with products_of_bf16(self.both_bf16):
            return torch.mm(states_CD, self._rows(start, stop).t(), out=out_CV)

    def _apply_bias_scale_softcap(self, z_CV: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """z of some columns, from W h there and in its memory."""
        if self.bias_V is not None:
            z_CV += self.bias_V[start:stop]
        if self.scale != 1.0:
            z_CV *= self.scale
        cap = self.softcap
        return z_CV if cap is None else z_CV.div_(cap).tanh_().mul_(cap)

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        """Head rows to multiply by, [stop − start, D]: a view, or a widened copy that lives until other rows are asked for.

        A tile is projected and pulled back before the next one, so the copy serves both.
        """
        if not self.widened:
            return self.weight_VD[start:stop]
        count = stop - start
        if self.wide_rows is None or self.wide_rows.shape[0] < count:
            self.wide_rows = self.wide_span = None  # the old rows go before the new ones come
            self.wide_rows = self.weight_VD.new_empty((count, self.weight_VD.shape[1]), dtype=self.working)
        if self.wide_span != (start, stop):
            self.wide_rows[:count].copy_(self.weight_VD[start:stop])
            self.wide_span = (start, stop)
        return self.wide_rows[:count]

    def _widened_spans(self) -> list[tuple[int, int]]:
        step = max(1, TILE_BYTES // (4 * self.weight_VD.shape[1]))
        return [(at, min(at + step, self.vocabulary)) for at in range(0, self.vocabulary, step)]

    def _logits_buffer(self, states_CD: torch.Tensor, columns: int) -> torch.Tensor:
        """Memory for one tile's logits, used again by the next tile."""
        size = states_CD.shape[0] * columns
        if self.room is None or self.room.numel() < size:
            self.room = None
            self.room = states_CD.new_empty(size, dtype=self.working)
        return self.room[:size].view(states_CD.shape[0], columns)


def multiplies_directly(weight_VD: torch.Tensor) -> bool:
    """Whether low-precision weights are used as they are (CUDA)."""
    return weight_VD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float16)


def needs_widening(weight_VD: torch.Tensor) -> bool:
    """Whether head rows are copied to fp32, tile by tile, to be multiplied in fp32: low precision off CUDA."""
    return weight_VD.dtype in (torch.bfloat16, torch.float16) and not multiplies_directly(weight_VD)


@contextmanager
def products_of_bf16(exact: bool) -> Iterator[None]:
    """Let a processor that multiplies bf16 do so with fp32 copies of bf16 numbers, summed and returned in fp32.

    Nothing is rounded that was not, as the copies hold bf16 numbers, and the product takes 0.4 of the time on AVX512 with bf16.
    The setting is PyTorch's for the whole process (2.9 and later), put back at once. Nothing is done where not both factors are
    such copies (`exact`), and nothing on other processors.
    """
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if not (exact and hasattr(matmul, "fp32_precision") and native()):
        yield
        return
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def product_in_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left · right with fp32 accumulation and an fp32 result from low-precision inputs."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


class OnlineSoftmaxStatistics:
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
        self.top = RunningTopK(top)
        count, working = hidden_CD.shape[0], head.working
        # the smallest number and no infinity, whose differences would be NaN in a tile that is masked throughout
        self.maximum_C = hidden_CD.new_full((count,), torch.finfo(working).min, dtype=working)
        self.total_C = self.maximum_C.new_zeros(count)
        self.weighted_C = self.maximum_C.new_zeros(count)
        self.label_C = self.maximum_C.new_zeros(count)
        self.pull_CD = self.maximum_C.new_zeros((count, hidden_CD.shape[1])) if direction else None

    def add_tile(self, start: int, stop: int) -> None:
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

    def logsumexp(self) -> torch.Tensor:
        """log Σ e^z, [C]."""
        return self.maximum_C + self.total_C.log()

    def log_prob(self) -> torch.Tensor:
        """log p of the label, [C]."""
        return self.label_C - self.logsumexp()

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

    `log_z_C` is log-sum-exp over the whole vocabulary, `entropy_C` the full entropy where it has a gradient; g_y and g_h are each
    [C] or None, not both None.
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


def grouped_topk(values_CV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
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


class RunningTopK:
    """The k largest of rows that come in pieces of columns."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.found: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, values_CV: torch.Tensor, start: int) -> None:
        """Take in columns `start`, `start` + 1, …"""
        top_CK, column_CK = grouped_topk(values_CV, min(self.k, values_CV.shape[1]))
        column_CK = column_CK + start
        if self.found is not None:
            top_CK = torch.cat((self.found[0], top_CK), dim=-1)
            column_CK = torch.cat((self.found[1], column_CK), dim=-1)
            top_CK, at_CK = torch.topk(top_CK, min(self.k, top_CK.shape[1]), dim=-1)
            column_CK = torch.gather(column_CK, 1, at_CK)
        self.found = (top_CK, column_CK)
