"""An output head whose rows are spread over the processes of a tensor-parallel group, and what they tell each other.

Every process of the group holds the same hidden states and labels, projects them on its own rows, and keeps its own k
largest logits and sums of exponentials. Exchanged are k candidates per token, three sums per token, and the gradient by
the hidden states: never logits, never head rows.

A head counts as spread by vocabulary when its weight is a DTensor, sharded by rows over a mesh whose dimension is named
"tp" (as in `init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))`). Any other DTensor, such as FSDP2's, belongs to
processes with different tokens and is gathered instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loragate.errors import ConfigError

MESH_DIMENSION = "tp"


@dataclass(frozen=True)
class Shard:
    """This process's rows of the head: from vocabulary index `first` on, out of `vocabulary`, in a process group."""

    group: Any
    first: int
    vocabulary: int

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise maximum over the group."""
        values = values.clone()
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, self.group)
        return values

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place."""
        values = values.contiguous()
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.SUM, self.group)
        return values

    def candidates(self, top_CK: torch.Tensor, index_CK: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Everyone's largest values and their vocabulary indices, [C, processes · k]; −∞ fills what a short part lacks."""
        missing = k - top_CK.shape[1]
        if missing:
            top_CK = torch.nn.functional.pad(top_CK, (0, missing), value=-torch.inf)
            index_CK = torch.nn.functional.pad(index_CK, (0, missing), value=self.first)
        return self._gathered(top_CK), self._gathered(index_CK)

    def _gathered(self, values_CK: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(values_CK) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(parts, values_CK.contiguous(), self.group)
        return torch.cat(parts, dim=-1)

    def require_same_tokens(self, labels_T: torch.Tensor) -> None:
        """Raises ConfigError, on every process, unless all processes of the group have the same labels."""
        position = torch.arange(1, labels_T.shape[0] + 1, device=labels_T.device)
        # modulo 2⁶⁴ for integers: equal for equal labels, and as good as never for others
        mark = torch.stack((torch.tensor(labels_T.shape[0], device=labels_T.device), ((labels_T + 1) * position).sum()))
        marks = [torch.empty_like(mark) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(marks, mark, self.group)
        if any(not torch.equal(other, mark) for other in marks):
            raise ConfigError(
                "the processes that share this output head have different labels; tensor parallelism of the head needs "
                "the same batch on all of them (split batches over another dimension of the device mesh)"
            )


def is_vocabulary_sharded(weight: torch.Tensor) -> bool:
    """Whether a head's weight is spread by rows over a tensor-parallel group (see the module text)."""
    if not hasattr(weight, "device_mesh"):
        return False
    placements = weight.placements  # type: ignore[attr-defined]
    return weight.device_mesh.mesh_dim_names == (MESH_DIMENSION,) and len(placements) == 1 and placements[0].is_shard(0)


def local_head(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, Shard | None]:
    """This process's rows of weight and bias, and where they belong; a head that is not sharded comes back as it is.

    Raises:
        ConfigError: for a DTensor that is not spread by vocabulary over a mesh dimension named "tp", and for a group of
            more processes than there are rows to go round.
    """
    if not hasattr(weight, "device_mesh"):
        return weight, bias, None
    if not is_vocabulary_sharded(weight):
        raise ConfigError(
            f"the output head is a DTensor with {weight.placements} over the mesh {weight.device_mesh}; pass "  # type: ignore[attr-defined]
            f'weight.full_tensor(), or shard it by rows over a mesh whose one dimension is named "{MESH_DIMENSION}"'
        )
    mesh = weight.device_mesh
    size = -(-weight.shape[0] // mesh.size())  # as `torch.chunk` cuts, and so DTensor
    if size * (mesh.size() - 1) >= weight.shape[0]:
        raise ConfigError(
            f"a vocabulary of {weight.shape[0]} leaves one of {mesh.size()} tensor-parallel processes without a row of "
            "the head; use fewer processes"
        )
    local, first = weight.to_local().detach(), size * mesh.get_local_rank()  # type: ignore[attr-defined]
    if bias is not None:
        whole = bias.full_tensor() if hasattr(bias, "full_tensor") else bias
        bias = whole[first : first + local.shape[0]]
    return local, bias, Shard(mesh.get_group(), first, int(weight.shape[0]))
