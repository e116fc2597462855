"""Whether the largest pass of a training fits into the memory that is free: made to fit, or told before the first step.

A machine without memory left ends a process without a word, often after hours.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from peft.tuners.lora import LoraLayer

from loragate.gates.eligibility import NONE, quantization_of
from loragate.losses.objectives import Objective
from loragate.training.plan import GIB, Estimate, estimate
from loragate.training.settings import GateTrainingSettings, TrainSettings
from loragate.training.strategy import detect_launch

ON_CPU = 1.4
"""What a process on a CPU holds at least for each byte that is alive (1.3 to 2.1 were seen): freed blocks lie between others."""
logger = logging.getLogger("loragate")


Settings = TypeVar("Settings", bound=TrainSettings)


def pass_memory(
    base: Any,
    rows: int,
    longest: int,
    objective: Objective | None,
    *,
    gates: bool,
    autocast: bool,
    checkpointing: bool,
    **more: Any,
) -> float | None:
    """Bytes beside the base, on its device, that a training with passes of `rows` rows of `longest` tokens needs.

    None for quantised and sharded bases, and for models whose configuration says too little for an estimate. `gates` says what is
    trained, `objective` by what; `more` goes on to `estimate`.
    """
    device = next(base.parameters()).device
    if device.type not in ("cpu", "cuda") or quantization_of(base) != NONE:
        return None
    layers = [module for module in base.modules() if isinstance(module, LoraLayer)]
    try:
        found: Estimate = estimate(
            base,
            "calibrate" if gates else "sft",
            sequence=longest,
            rows=rows,
            adapter=[(one.in_features, one.out_features, max(one.r.values(), default=0)) for one in layers],
            base=str(base.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            autocast=autocast,
            gradient_checkpointing=checkpointing,
            objective=objective,
            dora=any(any(one.use_dora.values()) for one in layers),
            **more,
        )
    except AttributeError:  # as of a state-space model
        return None
    return found.peak * (ON_CPU if device.type == "cpu" else 1.0) - found.weights


def fit_passes(
    asked: Settings, lengths: np.ndarray, base: Any, objective: Objective | None, k: int, recorded: int = 0
) -> Settings:
    """Settings `fitted` to rows, with fewer of them in a pass where memory is short and `asked` leaves their number open.

    Steps keep their rows: the gradient of one is the same sum over the same tokens, and only its rounding depends on the passes.
    `lengths` are the tokens of each row; `objective` is None for gates' own, `k` its support; `recorded` the rows of the run
    that is resumed, which goes on as it began, or 0.
    """
    launch, longest = detect_launch(), int(lengths.max())
    fitted = asked.fitted(len(lengths), launch.processes)
    batch, most = fitted.batch_size, fitted.per_device_train_batch_size
    if asked.per_device_train_batch_size or launch.processes > 1 or launch.is_sharded:
        return fitted
    if recorded:
        return replace(fitted, per_device_train_batch_size=recorded)

    def need(rows: int) -> float | None:
        how: dict[str, Any] = {"k": k, "passes": batch // rows, "gates": isinstance(asked, GateTrainingSettings)}
        how |= {"autocast": fitted.precision != "fp32", "checkpointing": fitted.gradient_checkpointing}
        return pass_memory(base, rows, longest, objective, **how)

    whole = need(most)
    if whole is None or whole <= (free := free_memory(next(base.parameters()).device)):
        return fitted
    fewer = [rows for rows in range(most - 1, 0, -1) if batch % rows == 0]
    rows = next((rows for rows in fewer if (need(rows) or 0.0) <= free), 1)
    if rows < most:
        logger.warning(
            "passes of %d of the %d rows of a step in place of %d, as one with the longest (%d tokens) needs about %.1f GiB "
            "beside the model and %.1f are free; the steps stay the same, and per_device_train_batch_size sets it",
            rows, batch, most, longest, whole / GIB, free / GIB,
        )  # fmt: skip
    return replace(fitted, per_device_train_batch_size=rows)


def warn_where_memory_is_short(base: Any, args: Any, objective: Objective, longest: int, gates: bool) -> None:
    """Warn if a pass of the longest rows, with the arguments of a trainer, needs more than is free where the base is."""
    given = base, args.per_device_train_batch_size, longest, objective
    how = {"autocast": args.bf16 or args.fp16, "k": objective.k, "passes": args.gradient_accumulation_steps}
    how["gates"] = gates
    need = pass_memory(*given, checkpointing=bool(args.gradient_checkpointing), **how)
    if need is not None and need > (free := free_memory(next(base.parameters()).device)):
        ways = ["fewer rows in a pass (per_device_train_batch_size)", "shorter ones (max_length)"]
        if args.per_device_train_batch_size == 1:
            del ways[0]
        if not args.gradient_checkpointing and (lighter := pass_memory(*given, checkpointing=True, **how)) is not None:
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
