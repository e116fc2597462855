"""The output head of one call: fp32 logits tile by tile, and the way back to the hidden states.

Head rows of low precision are multiplied as they are on CUDA; elsewhere they are widened to fp32, one tile of them at a
time, so that a widened copy of the head never exists.

Shapes: C tokens of one chunk, T tokens, D hidden, V vocabulary (or the columns of one tile), K support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from loragate.losses.tiling import BUDGET


@dataclass(frozen=True)
class Head:
    """A frozen output head, `weight` [V, D] and `bias` [V] or None, and what the family does between it and the softmax:
    z = softcap·tanh((W h + bias)·scale / softcap)."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

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
        self.scale, self.softcap = head.scale, head.softcap
        self.weight_VD = weight_VD = head.weight
        self.working = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        self.direct = multiplies_directly(weight_VD)
        self.widened = needs_widening(weight_VD)
        self.bias_V = None if head.bias is None else head.bias.to(self.working)
        self.room: torch.Tensor | None = None
        self.wide_rows: torch.Tensor | None = None
        self.wide_span: tuple[int, int] | None = None

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary, V."""
        return int(self.weight_VD.shape[0])

    def states(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """Hidden states in the dtype in which they are multiplied."""
        return hidden_CD.to(self.weight_VD.dtype if self.direct else self.working)

    def tile(self, states_CD: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """z [C, stop − start] of some columns; `states_CD` as `states` gives them."""
        if self.direct:
            z_CV = product_in_fp32(states_CD, self.weight_VD[start:stop].t())
        else:
            z_CV = torch.mm(states_CD, self._rows(start, stop).t(), out=self._room(states_CD, stop - start))
        return self._finished(z_CV, start, stop)

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
            z_CV = self._room(states_CD, self.vocabulary)
            for start, stop in self._widened_spans():
                torch.mm(states_CD, self._rows(start, stop).t(), out=z_CV[:, start:stop])
            z_CV = self._finished(z_CV, 0, self.vocabulary)
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
        count = max(1, BUDGET // (indices_TK.shape[1] * size))
        for at in range(0, indices_TK.shape[0], count):
            rows = slice(at, at + count)
            gathered = F.embedding(indices_TK[rows], self.weight_VD).to(self.working)
            # [T, 1, K] · [T, K, D]
            torch.bmm(coefficient_TK[rows].unsqueeze(1), gathered, out=total_TD[rows].unsqueeze(1))
        return total_TD

    def _finished(self, z_CV: torch.Tensor, start: int, stop: int) -> torch.Tensor:
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
        step = max(1, BUDGET // (4 * self.weight_VD.shape[1]))
        return [(at, min(at + step, self.vocabulary)) for at in range(0, self.vocabulary, step)]

    def _room(self, states_CD: torch.Tensor, columns: int) -> torch.Tensor:
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


def product_in_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left · right with fp32 accumulation and an fp32 result from low-precision inputs."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())
