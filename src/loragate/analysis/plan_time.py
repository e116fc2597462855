"""How long a step takes, estimated: counted FLOPs over peak throughput times a stated utilisation, against the link.

An estimate to choose between strategies and to see the order of magnitude, not a promise: the utilisation is an
assumption that every plan prints and that `--utilisation` replaces by a measured one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from loragate.analysis.cost import StepCost, step_cost
from loragate.analysis.plan_machines import Gpu
from loragate.analysis.plan_memory import FP32
from loragate.analysis.plan_model import Parameters

UTILISATION = 0.4
# what strategies and quantised weights leave of it
STRATEGY_FACTOR = {"single": 1.0, "ddp": 0.97, "fsdp2": 0.9, "zero3": 0.8}
QUANTIZATION_FACTOR = {"none": 1.0, "8bit": 0.55, "4bit": 0.75}


@dataclass(frozen=True)
class Time:
    """Estimated seconds.

    Attributes:
        compute: of one pass (forward and backward) on one GPU.
        link: moving weights of one pass and gradients between GPUs, which runs beside the computation.
        step: of one optimiser step.
        total: of the whole training.
        flops: counted floating-point operations of one optimiser step, all GPUs.
        bound: "compute" or "link", whichever is longer.
    """

    compute: float
    link: float
    step: float
    total: float
    flops: float
    bound: str


def cost_of(parameters: Parameters, sequence: int, response_share: float = 0.75, k: int = 100) -> StepCost:
    """The counted cost per token of a plan's model."""
    return step_cost(
        parameters.modules,
        parameters.active,
        parameters.head,
        attention_width=parameters.attention_width,
        layers=parameters.layers,
        sequence=sequence,
        response_share=response_share,
        k=k,
        hidden=parameters.hidden,
    )


def estimate_time(
    parameters: Parameters,
    cost: StepCost,
    gpu: Gpu,
    *,
    stage: str,
    strategy: str,
    gpus: int,
    rows_per_pass: int,
    batch: int,
    mean_length: float,
    rows: int,
    epochs: float,
    checkpointing: bool,
    quantization: str,
    dtype: torch.dtype,
    half: bool,
    utilisation: float = UTILISATION,
) -> Time:
    """Time of a step and of a training over `rows` rows.

    Args:
        parameters, cost, gpu: model, FLOPs per token, machine.
        stage, strategy, gpus, checkpointing, quantization, dtype: as in `gpu_memory`.
        rows_per_pass, batch: rows per GPU and pass, and per optimiser step.
        mean_length: tokens per row that are computed.
        half: matrix products in 16 bits.
        utilisation: share of the peak that one GPU reaches with 16-bit weights.
    """
    per_token = cost.per_token(stage, checkpointing)
    peak = (gpu.half if half else gpu.single) * 1e12
    reached = peak * utilisation * STRATEGY_FACTOR[strategy] * QUANTIZATION_FACTOR[quantization]
    compute = per_token * rows_per_pass * mean_length / reached
    passes = max(1, batch // (rows_per_pass * gpus))
    per_pass = per_step = 0.0
    if gpus > 1:
        share = (gpus - 1) / gpus
        if strategy in ("fsdp2", "zero3"):
            # the base is gathered for the forward and again for the backward
            per_pass = 2 * share * parameters.base * dtype.itemsize / (gpu.link * 1e9)
        per_step = 2 * share * FP32 * parameters.trained(stage) / (gpu.link * 1e9)
    step = passes * max(compute, per_pass) + per_step
    steps = math.ceil(math.ceil(rows / batch) * epochs)
    return Time(
        compute=compute,
        link=per_pass,
        step=step,
        total=steps * step,
        flops=per_token * batch * mean_length,
        bound="link" if per_pass > compute else "compute",
    )
