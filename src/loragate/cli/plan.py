"""`loragate plan`: memory, time and launch command of a training, before anything is downloaded or rented."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loragate.analysis.settings import Request
from loragate.cli.arguments import Command
from loragate.display import console, duration, quiet_logging
from loragate.errors import LoragateError
from loragate.files import write_json

if TYPE_CHECKING:
    from loragate.analysis.plan import Plan


@dataclass(frozen=True)
class PlanOptions(Request):
    """Settings of `loragate plan`.

    Attributes:
        json: also write the whole plan to this file ("-" prints it instead of the table).
    """

    json: str = ""


def run(options: PlanOptions) -> int:
    """Print the plan; an error that says what to change if nothing fits."""
    from loragate.analysis.plan import make_plan

    quiet_logging()
    plan = make_plan(options)
    command = plan.command(plan.chosen.way) if plan.chosen else ""
    record = {**asdict(plan), "command": command}
    if options.json == "-":
        print(json.dumps(record, indent=2))
    else:
        if options.json:
            write_json(Path(options.json), record)
        _print(plan, command)
    if plan.chosen is None:
        ways = "\n".join(f"- {change}" for change in plan.changes)
        raise LoragateError(
            f"nothing that was asked for fits into {plan.gpu.memory:g} GiB. Any of these would do:\n{ways}"
        )
    return 0


def _print(plan: Plan, command: str) -> None:
    from rich.table import Table

    out, request, counts = console(), plan.request, plan.parameters
    out.print(
        f"{request.model}: {counts.base / 1e9:.2f} billion parameters in {plan.dtype}, LoRA (r {request.rank}) "
        f"{counts.lora / 1e6:.1f} million, gates {counts.gates / 1e6:.2f} million\n"
        f"a step: {request.batch} rows of {request.seq} tokens on {plan.gpu.name} with {plan.gpu.memory:g} GiB",
        markup=False,
    )
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("strategy", "weights", "recompute", "rows", "GiB", "step", "run", ""):
        right: Any = "right" if name in ("rows", "GiB", "step", "run") else "left"
        table.add_column(name, justify=right, no_wrap=right == "right" or not name)
    for option in plan.options:
        way = option.way
        table.add_row(
            way.strategy if way.gpus == 1 else f"{way.strategy} ×{way.gpus}",
            plan.dtype if way.quantization == "none" else way.quantization,
            way.gradient_checkpointing,
            str(way.micro_batch),
            f"{option.gib:.1f}",
            duration(option.step),
            duration(option.seconds),
            "← take this" if option is plan.chosen else "" if option.fits else "too large",
        )
    out.print(table)
    out.print("recompute: gradient checkpointing; rows: micro-batch of one GPU; GiB: its peak; times are estimates")
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in plan.least.parts.items() if gib >= 0.005)
    out.print(f"GiB per GPU by part ({plan.least}): {parts}", markup=False)
    if command:
        out.print(f"next: {command}", markup=False, soft_wrap=True)


COMMAND = Command(
    name="plan",
    summary="Memory per GPU, time and launch command of a training, from the model's configuration alone.",
    options=PlanOptions,
    run=run,
    examples=(
        "loragate plan Qwen/Qwen2.5-Math-7B --gpus 1 --gpu-memory 4090",
        "loragate plan config.json --stage sft --gpus 8 --gpu-memory h100 --seq 4096 --json plan.json",
    ),
    positional="model",
    common=(
        "stage gpus gpu_memory seq batch micro_batch rank target_modules precision "
        "quantization gradient_checkpointing strategy rows epochs json"
    ),
)
