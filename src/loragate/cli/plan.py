"""`loragate plan`: memory, time and launch command of a training, before anything is downloaded or rented."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from loragate.cli.arguments import Command
from loragate.cli.display import console, duration
from loragate.cli.preflight import quiet_logging
from loragate.errors import LoragateError
from loragate.files import write_json

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class PlanOptions:
    """Settings of `loragate plan`.

    Attributes:
        model: hub id, model folder or config.json; only the configuration is read, no weights.
        stage: sft (Stage I) or calibrate (Stage II).
        gpus: GPUs, counted over all machines.
        gpu_memory: memory of one GPU in GiB, or its name (h100, a100-80, a100-40, l40s, 4090, ...).
        seq: tokens of the longest rows; memory is planned for passes full of such rows.
        batch: rows per optimiser step over all GPUs.
        micro_batch: rows per pass and GPU; 0 takes the largest number that fits, up to 16.
        rank: LoRA's r.
        target_modules: all-linear, or module names separated by commas.
        precision: bf16 or fp16 autocast, or fp32.
        dtype: dtype of the base, auto (the checkpoint's), float32, bfloat16 or float16.
        quantization: none, 8bit, 4bit, or any to compare them.
        gradient_checkpointing: yes, no, or any to compare both.
        strategy: single, ddp, fsdp2, zero3, or any to compare them.
        response_share: share of the tokens that are response tokens.
        padding: plan for rows of different lengths in one pass, which needs an attention mask.
        k: support of the top-k entropy (Stage II).
        rows: rows of the training; 0 takes the paper's 100,000 (sft) or 20,000 (calibrate).
        epochs: passes over the rows.
        mean_length: mean tokens of a row, for the time estimate; 0 takes seq.
        utilisation: share of the GPU's peak throughput that the time assumes.
        revision: branch, tag or commit of a hub id.
        json: also write the whole plan to this file ("-" prints it instead of the tables).
        trust_remote_code: run model code from the hub.
    """

    model: str
    stage: str = "calibrate"
    gpus: int = 1
    gpu_memory: str = "a100-80"
    seq: int = 4096
    batch: int = 128
    micro_batch: int = 0
    rank: int = 16
    target_modules: str = "all-linear"
    precision: str = "bf16"
    dtype: str = "auto"
    quantization: str = "any"
    gradient_checkpointing: str = "any"
    strategy: str = "any"
    response_share: float = 0.75
    padding: bool = True
    k: int = 100
    rows: int = 0
    epochs: float = 1.0
    mean_length: float = 0
    utilisation: float = 0.4
    revision: str = ""
    json: str = ""
    trust_remote_code: bool = False


def run(options: PlanOptions) -> int:
    """Print the plan; an error that says what to change if nothing fits."""
    quiet_logging()
    from loragate.analysis.plan import Request, make_plan

    request = Request(**{field.name: getattr(options, field.name) for field in fields(Request)})
    plan = make_plan(request, revision=options.revision, trust=options.trust_remote_code)
    record = as_record(plan)
    if options.json and options.json != "-":
        write_json(Path(options.json), record)
    if options.json == "-":
        print(json.dumps(record, indent=2))
    else:
        _print(plan, record)
    if plan.chosen is None:
        ways = "\n".join(f"- {change}" for change in plan.changes)
        raise LoragateError(
            f"nothing that was asked for fits into {plan.gpu.memory:g} GiB. Any one of these would do:\n{ways}"
        )
    return 0


def as_record(plan: Any) -> dict[str, Any]:
    """The plan as plain data."""
    from loragate.analysis.plan_launch import launch_command

    chosen = plan.chosen
    return {
        "request": asdict(plan.request),
        "gpu": asdict(plan.gpu),
        "dtype": plan.dtype,
        "parameters": {key: value for key, value in asdict(plan.parameters).items() if key != "modules"},
        "tokens_per_step": plan.request.batch * plan.request.seq,
        "flops_per_token": plan.cost.per_token(plan.request.stage),
        "options": [option.as_record() for option in plan.options],
        "chosen": None if chosen is None else {**chosen.as_record(), "command": launch_command(plan, chosen)},
        "changes": plan.changes,
    }


def _print(plan: Any, record: dict[str, Any]) -> None:
    from rich.table import Table

    out, request, counts = console(), plan.request, plan.parameters
    trains = "gates" if request.stage == "calibrate" else "LoRA"
    out.print(
        f"{request.model}: {counts.base / 1e9:.2f} billion parameters in {plan.dtype}, LoRA (r {request.rank}) "
        f"{counts.lora / 1e6:.1f} million"
        + (f", gates {counts.gates / 1e6:.2f} million" if counts.gates else "")
        + f"; {trains} train",
        markup=False,
    )
    out.print(
        f"a step: {request.batch} rows of {request.seq} tokens = {record['tokens_per_step']:,} tokens, "
        f"{record['flops_per_token'] / 1e9:.1f} GFLOP each (counted, without recomputation)",
        markup=False,
    )
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("strategy", "weights", "ckpt"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "GiB", "step", "run"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for option in plan.options:
        mark = "← take this" if option is plan.chosen else ("" if option.fits else "too large")
        table.add_row(
            option.strategy if option.gpus == 1 else f"{option.strategy} ×{option.gpus}",
            _SHORT.get(plan.dtype, plan.dtype) if option.quantization == "none" else option.quantization,
            "yes" if option.checkpointing else "no",
            str(option.micro_batch),
            f"{option.memory.total / 2**30:.1f}",
            duration(option.time.step),
            duration(option.time.total),
            mark,
        )
    out.print(table)
    out.print("ckpt: gradient checkpointing; rows: micro-batch of one GPU; GiB: its peak; times are estimates")
    best = plan.chosen or min(plan.options, key=lambda option: option.memory.total)
    parts = {name: value for name, value in best.memory.as_gib().items() if name != "total" and value >= 0.0005}
    out.print(
        f"GiB per GPU by part ({best.strategy}, micro-batch {best.micro_batch}): "
        + ", ".join(f"{name} {value:.2f}" for name, value in parts.items()),
        markup=False,
    )
    out.print(
        f"assumed: {plan.gpu.name} with {plan.gpu.memory:g} GiB, "
        f"{plan.gpu.half if request.precision != 'fp32' else plan.gpu.single:g} TFLOP/s at {request.utilisation:g} utilisation, "
        f"{plan.gpu.link:g} GB/s between GPUs; rows as long as "
        + (f"{request.mean_length:g} tokens on average" if request.mean_length else "the limit")
        + "; of head and temporary only the larger counts",
        markup=False,
    )
    if plan.chosen is not None:
        out.print(f"next: {record['chosen']['command']}", markup=False, soft_wrap=True)


COMMAND = Command(
    name="plan",
    summary="Memory per GPU, FLOPs, time and launch command of a training, from the model's configuration alone.",
    options=PlanOptions,
    run=run,
    examples=(
        "loragate plan Qwen/Qwen2.5-Math-7B --gpus 1 --gpu-memory 4090",
        "loragate plan config.json --stage sft --gpus 8 --gpu-memory h100 --seq 4096 --json plan.json",
    ),
    positional="model",
)
