"""Memory of one GPU by part, for each way of spreading a model: alone, DDP, FSDP2, ZeRO-3; full, 8-bit or 4-bit weights.

The part that depends on the step comes from a trace (`plan_trace.py`); this file adds what is held throughout and what
sharding and quantisation change. All sizes are bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from loragate.analysis.plan_model import Parameters
from loragate.analysis.plan_trace import Footprint
from loragate.gates.quantised import EIGHT_BIT, FOUR_BIT, NONE

STRATEGIES = ("single", "ddp", "fsdp2", "zero3")
QUANTIZATIONS = (NONE, EIGHT_BIT, FOUR_BIT)
FP32 = 4
# assumptions, printed with every plan
CONTEXT = 0.8 * 2**30  # CUDA context, cuBLAS workspaces
COMMUNICATION = 0.5 * 2**30  # NCCL buffers, with several GPUs
FRAGMENTATION = 0.04  # of everything that is allocated
ZERO3_LIVE = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters: gathered parameters kept for reuse
BLOCK_4BIT, BLOCK_OF_BLOCKS = (
    64,
    256,
)  # NF4 with double quantisation: one byte per 64 weights, one fp32 per 256 of these


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at the worst moment of a step.

    Attributes:
        weights: this GPU's share of the base.
        adapter: LoRA factors and gates, fp32.
        gradients: of what trains, with DDP's buckets.
        optimizer: AdamW's two moments, fp32.
        gathered: whole weights that sharding puts together for a moment.
        activations: kept from the forward for the backward pass.
        head: the head's chunk workspace; it is gone before the backward pass.
        temporary: what else forward or backward need for a moment; of this and `head` only the larger counts.
        overhead: context, communication buffers, fragmentation (assumed).
    """

    weights: float
    adapter: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    head: float
    temporary: float
    overhead: float

    @property
    def held(self) -> float:
        """What is in memory between two steps."""
        return self.weights + self.adapter + self.optimizer

    @property
    def allocated(self) -> float:
        """The peak of what the step itself allocates and holds, without overhead."""
        return self.held + self.gradients + self.gathered + self.activations + max(self.head, self.temporary)

    @property
    def total(self) -> float:
        """Peak of a step in bytes, with the assumed overhead."""
        return self.allocated + self.overhead

    def as_gib(self) -> dict[str, float]:
        """Parts and total in GiB, for JSON."""
        return {name: round(value / 2**30, 4) for name, value in {**asdict(self), "total": self.total}.items()}


def weight_bytes(parameters: Parameters, dtype: torch.dtype, quantization: str) -> float:
    """Bytes of the whole base; quantised are the linear layers but the head, as bitsandbytes does it."""
    size = dtype.itemsize
    rest = (parameters.base - parameters.linear) * size
    if quantization == EIGHT_BIT:
        return rest + parameters.linear + FP32 * parameters.linear_rows
    if quantization == FOUR_BIT:
        blocks = parameters.linear / BLOCK_4BIT
        return rest + parameters.linear / 2 + blocks + FP32 * blocks / BLOCK_OF_BLOCKS
    return float(parameters.base * size)


def gpu_memory(
    parameters: Parameters,
    footprint: Footprint,
    *,
    stage: str,
    strategy: str,
    gpus: int,
    dtype: torch.dtype,
    quantization: str = NONE,
    accumulating: bool = False,
    tokens: int = 0,
) -> Memory:
    """Memory of one GPU.

    Args:
        parameters, footprint: of the model and of one pass on one GPU.
        stage: "sft" or "calibrate".
        strategy: one of `STRATEGIES`.
        gpus: GPUs that share the work.
        dtype: of the weights that are not quantised.
        quantization: one of `QUANTIZATIONS`.
        accumulating: gradients of earlier passes are held during a pass (else the trace has them).
        tokens: tokens of a pass, for the buffers of 8-bit products.
    """
    size = dtype.itemsize
    sharded = strategy in ("fsdp2", "zero3")
    weights = weight_bytes(parameters, dtype, quantization)
    trained = parameters.trained(stage)
    # gates stay whole on every GPU; LoRA factors are sharded with the base
    lora = parameters.lora / gpus if sharded else parameters.lora
    own = parameters.gates if stage == "calibrate" else lora
    gradients = FP32 * own * float(accumulating) + FP32 * trained * float(strategy == "ddp")
    gathered = 0.0
    if strategy == "fsdp2":
        # the root group (embeddings, head) is whole while the model runs, and two layers: this one and the next
        gathered = size * (parameters.root + 2 * min(parameters.block, parameters.base - parameters.root))
    elif strategy == "zero3":
        gathered = size * min(float(parameters.base), max(ZERO3_LIVE, parameters.root + parameters.block))
    temporary = footprint.temporary
    if quantization == FOUR_BIT:
        temporary += size * parameters.largest_linear
    elif quantization == EIGHT_BIT:
        # the weight widened for the backward pass, or the input in 8 bits beside an int32 product
        widest = max((d_in + 4 * d_out for d_in, d_out, _ in parameters.modules), default=0)
        temporary += max(size * parameters.largest_linear, float(tokens * widest))
    parts: dict[str, Any] = {
        "weights": weights / gpus if sharded else weights,
        "adapter": FP32 * (lora + parameters.gates),
        "gradients": gradients,
        "optimizer": 2.0 * FP32 * own,
        "gathered": gathered,
        "activations": footprint.saved,
        "head": footprint.head_workspace,
        "temporary": temporary,
    }
    known = Memory(**parts, overhead=0.0)
    overhead = CONTEXT + (COMMUNICATION if gpus > 1 else 0.0) + FRAGMENTATION * known.allocated
    return Memory(**parts, overhead=overhead)
