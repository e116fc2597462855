"""Whether the largest pass of a training fits into the memory that is free, told before its first step.

A machine without memory left ends a process without a word, often after hours.
"""

from __future__ import annotations

import logging
from typing import Any

import psutil
import torch
from peft.tuners.lora import LoraLayer

from loragate.gates.eligibility import NONE, quantization_of
from loragate.losses.objectives import Objective
from loragate.training.plan import GIB, Estimate, estimate

ON_CPU = 1.4
"""What a process on a CPU holds at least for each byte that is alive (1.3 to 2.1 were seen): freed blocks lie between others."""
logger = logging.getLogger("loragate")


def warn_where_memory_is_short(
    base: Any, args: Any, objective: Objective, longest: int, device: torch.device, gates: bool
) -> None:
    """Warn if a pass of the longest rows needs more than is free on `device`, where the base is already.

    Nothing is said of quantised and sharded bases, nor of models whose configuration says too little for an estimate.

    Args:
        base: the causal model, adapter and gates in place.
        args: of the trainer: rows of a pass, precision, checkpointing.
        longest: tokens of the longest row.
    """
    if device.type not in ("cpu", "cuda") or quantization_of(base) != NONE:
        return
    layers = [module for module in base.modules() if isinstance(module, LoraLayer)]

    def needed(gradient_checkpointing: bool) -> float:
        """Bytes beside the base."""
        found: Estimate = estimate(
            base,
            "calibrate" if gates else "sft",
            sequence=longest,
            rows=args.per_device_train_batch_size,
            adapter=[(one.in_features, one.out_features, max(one.r.values(), default=0)) for one in layers],
            base=str(base.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            autocast=args.bf16 or args.fp16,
            gradient_checkpointing=gradient_checkpointing,
            objective=None if gates else objective,
            dora=any(any(one.use_dora.values()) for one in layers),
            k=objective.k,
            passes=args.gradient_accumulation_steps,
        )
        return found.peak * (ON_CPU if device.type == "cpu" else 1.0) - found.weights

    try:
        need, lighter = needed(bool(args.gradient_checkpointing)), needed(True)
    except AttributeError:  # as of a state-space model
        return
    if need > (free := free_memory(device)):
        ways = ["fewer rows in a pass (per_device_train_batch_size)", "shorter ones (max_length)"]
        if not args.gradient_checkpointing:
            ways.insert(0, f"gradient checkpointing ({lighter / GIB:.1f} GiB)")
        logger.warning(
            "a pass of %d rows of %d tokens, the longest, needs about %.1f GiB beside the model, and %.1f are free: the "
            "training may be ended for want of memory. What helps: %s",
            args.per_device_train_batch_size,
            longest,
            need / GIB,
            free / GIB,
            ", ".join(ways),
        )


def free_memory(device: torch.device) -> int:
    """Bytes that a training can still take, as far as the device tells."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
