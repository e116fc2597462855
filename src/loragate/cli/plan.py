"""`loragate plan`: memory, time and launch command of a training, before anything is downloaded or rented."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from loragate.analysis.settings import Request
from loragate.cli.arguments import Command
from loragate.display import console, duration
from loragate.errors import LoragateError
from loragate.report.table import Line, Table

if TYPE_CHECKING:
    from loragate.analysis.plan import Plan


@dataclass(frozen=True)
class PlanOptions(Request):
    """Settings of `loragate plan`.

    Attributes:
        json: print the plan as JSON.
    """

    json: bool = False


def run(options: PlanOptions) -> int:
    """Print the plan; an error that says what to change if nothing fits."""
    from loragate.analysis.plan import make_plan

    plan = make_plan(options)
    if options.json:
        print(json.dumps(asdict(plan), indent=2))
    else:
        _print(plan)
    if plan.chosen is None:
        ways = "\n".join(f"- {change}" for change in plan.changes)
        raise LoragateError(
            f"nothing that was asked for fits into {plan.gpu.memory:g} GiB. Any of these would do:\n{ways}"
        )
    return 0


def _print(plan: Plan) -> None:
    out, request, counts = console(), plan.request, plan.parameters
    out.print(
        f"{request.model}: {counts.base / 1e9:.2f} billion parameters in {plan.dtype}, LoRA (r {request.rank}) "
        f"{counts.lora / 1e6:.1f} million, gates {counts.gates / 1e6:.2f} million\n"
        f"a step: {request.batch} rows of {request.seq} tokens on {plan.gpu.name} with {plan.gpu.memory:g} GiB",
        markup=False,
    )
    lines = []
    for option in plan.options:
        way = option.way
        cells = [
            plan.dtype if way.quantization == "none" else way.quantization,
            way.gradient_checkpointing,
            str(way.micro_batch),
            f"{option.gib:.1f}",
            duration(option.step),
            duration(option.seconds),
            "←" if option is plan.chosen else "yes" if option.fits else "no",
        ]
        name = way.strategy if way.gpus == 1 else f"{way.strategy} ×{way.gpus}"
        lines.append(Line(name, [(cell,) for cell in cells]))
    note = "recompute: gradient checkpointing; rows: micro-batch of one GPU; GiB: its peak; times are estimates; ←: take this"
    out.print(Table("", ("strategy", "weights", "recompute", "rows", "GiB", "step", "run", "fits"), lines, note))
    # those that would print as 0.00 are left out
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in plan.least.parts.items() if gib >= 0.005)
    out.print(f"GiB per GPU by part ({plan.least}): {parts}", markup=False)
    if plan.command:
        out.print(f"next: {plan.command}", markup=False, soft_wrap=True)


COMMAND = Command(
    name="plan",
    options=PlanOptions,
    run=run,
    examples=(
        "loragate plan Qwen/Qwen2.5-Math-7B --gpus 1 --gpu-memory 4090",
        "loragate plan config.json --stage sft --gpus 8 --gpu-memory h100 --seq 4096 --json > plan.json",
    ),
    positional="model",
    common=(
        "stage gpus gpu_memory seq batch micro_batch rank target_modules precision "
        "quantization gradient_checkpointing strategy rows epochs json"
    ),
)
