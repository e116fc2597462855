"""The output head of one call: chunk-wise fp32 logits, the way back to the hidden states, and the search for the largest.

Shapes: C tokens of one chunk, T tokens, D hidden, V vocabulary, K support.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_GROUP = 64


@dataclass(frozen=True)
class HeadOptions:
    """What a family does between the projection and the softmax: z = softcap·tanh((W h + bias)·scale / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Head:
    """A frozen output head and what follows it: `weight` [V, D], `bias` [V] or None, logit scale and soft cap."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    softcap: float | None

    def projection(self) -> Projection:
        """The head at work."""
        return Projection(self.weight, self.bias, HeadOptions(self.scale, self.softcap))


class Projection:
    """Chunk-wise fp32 logits of frozen head rows, with the family's scale and soft cap."""

    def __init__(self, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, options: HeadOptions) -> None:
        self.options = options
        self.working = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
        self.direct = multiplies_directly(weight_VD)
        self.weight_VD = weight_VD if self.direct else weight_VD.to(self.working)
        self.bias_V = None if bias_V is None else bias_V.to(self.working)
        self.buffer_CV: torch.Tensor | None = None

    def logits(self, hidden_CD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(z [C, V], dz/d(W h) [C, V] or None where it is the constant `scale`)."""
        if self.direct:
            z_CV = product_in_fp32(hidden_CD.to(self.weight_VD.dtype), self.weight_VD.t())
        else:
            z_CV = torch.mm(hidden_CD.to(self.working), self.weight_VD.t(), out=self._room(hidden_CD))
        if self.bias_V is not None:
            z_CV += self.bias_V
        if self.options.scale != 1.0:
            z_CV *= self.options.scale
        cap = self.options.softcap
        if cap is None:
            return z_CV, None
        squashed_CV = z_CV.div_(cap).tanh_()
        slope_CV = (1.0 - squashed_CV * squashed_CV) * self.options.scale
        return squashed_CV * cap, slope_CV

    def _room(self, hidden_CD: torch.Tensor) -> torch.Tensor:
        """Memory for one chunk's logits, used again by the next chunk."""
        count = hidden_CD.shape[0]
        if self.buffer_CV is None or self.buffer_CV.shape[0] < count:
            self.buffer_CV = hidden_CD.new_empty((count, self.weight_VD.shape[0]), dtype=self.working)
        return self.buffer_CV[:count]

    def pull_back(self, coefficient_CV: torch.Tensor, slope_CV: torch.Tensor | None) -> torch.Tensor:
        """Σ_v coefficient·dz/dh, [C, D], for a dense coefficient over the vocabulary."""
        weighted = coefficient_CV * (self.options.scale if slope_CV is None else slope_CV)
        if self.direct:
            return torch.mm(weighted.to(self.weight_VD.dtype), self.weight_VD).to(self.working)
        return torch.mm(weighted, self.weight_VD)

    def pull_back_sparse(self, indices_TK: torch.Tensor, coefficient_TK: torch.Tensor) -> torch.Tensor:
        """Σ_j coefficient_j · W[index_j], [T, D], for a coefficient on K logits."""
        if not self.direct:
            return F.embedding_bag(indices_TK, self.weight_VD, per_sample_weights=coefficient_TK, mode="sum")
        rows = max(1, (64 << 20) // (indices_TK.shape[1] * self.weight_VD.shape[1]))
        parts = [
            torch.einsum("tk,tkd->td", weights, F.embedding(indices, self.weight_VD).float())
            for indices, weights in zip(indices_TK.split(rows), coefficient_TK.split(rows), strict=True)
        ]
        return torch.cat(parts)


def multiplies_directly(weight_VD: torch.Tensor) -> bool:
    """Whether low-precision weights are used as they are (CUDA); elsewhere they are widened once per call."""
    return weight_VD.is_cuda and weight_VD.dtype in (torch.bfloat16, torch.float16)


def product_in_fp32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left · right with fp32 accumulation and an fp32 result from low-precision inputs."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def largest(values_CV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row and their columns, in descending order; exact, in two levels for wide rows.

    The k groups of columns with the largest maxima hold the k largest values, so only those groups are searched. Among
    equal values at the boundary either column may be returned, as with `torch.topk`.
    """
    groups = values_CV.shape[1] // _GROUP
    if groups < 4 * k:
        return torch.topk(values_CV, k, dim=-1)
    grouped = values_CV[:, : groups * _GROUP].unflatten(-1, (groups, _GROUP))
    chosen_CK = torch.topk(grouped.amax(-1), k, dim=-1, sorted=False).indices
    candidates = torch.gather(grouped, 1, chosen_CK.unsqueeze(-1).expand(-1, -1, _GROUP)).flatten(1)
    tail = values_CV[:, groups * _GROUP :]
    top_CK, at_CK = torch.topk(torch.cat((candidates, tail), dim=-1) if tail.shape[1] else candidates, k, dim=-1)
    inside = at_CK < candidates.shape[1]
    group_CK = torch.gather(chosen_CK, 1, torch.where(inside, at_CK // _GROUP, 0))
    column_CK = group_CK * _GROUP + at_CK % _GROUP
    return top_CK, torch.where(inside, column_CK, at_CK - candidates.shape[1] + groups * _GROUP)
