"""The exact command of a planned option, with the launch configuration that the package ships."""

from __future__ import annotations

import shlex

from loragate.analysis.plan import Option, Plan
from loragate.training.strategy import launch_file

PER_MACHINE = 8


def launch_command(plan: Plan, option: Option) -> str:
    """The command line that runs `option`; capital words stand for the user's own files."""
    request = plan.request
    words = ["loragate", request.stage]
    if option.gpus > 1:
        config = str(launch_file(option.strategy))
        words = ["accelerate", "launch", "--config_file", config, "--num_processes", str(option.gpus)]
        if option.gpus > PER_MACHINE:
            machines = -(-option.gpus // PER_MACHINE)
            words += ["--num_machines", str(machines), "--machine_rank", "RANK", "--main_process_ip", "ADDRESS"]
            words += ["--main_process_port", "29500"]
        words += ["-m", "loragate", request.stage]
    if request.stage == "sft":
        words += ["--model", "MODEL" if request.model.endswith(".json") else request.model]
    else:
        words += ["--adapter", "ADAPTER"]
        # ranges are chosen in one process
        words += ["--range=L,U", "--unverified"] if option.gpus > 1 else ["--probe", "PROBE"]
    words += ["--data", "DATA", "--out", "OUT"]
    words += ["--max-length", str(request.seq), "--batch-size", str(request.batch)]
    words += ["--micro-batch-size", str(option.micro_batch)]
    words += ["--max-rows", str(request.rows)] if request.rows else []
    words += ["--epochs", f"{request.epochs:g}"] if request.epochs != 1 else []
    if request.stage == "sft":
        words += ["--rank", str(request.rank)]
        if request.target_modules != "all-linear":
            words += ["--target-modules", request.target_modules]
    elif request.k != 100:
        words += ["--k", str(request.k)]
    precision = "fp32" if option.strategy == "zero3" and request.precision == "bf16" else request.precision
    words += ["--dtype", plan.dtype, "--precision", precision]
    if option.quantization != "none":
        words += ["--quantization", option.quantization]
    if option.checkpointing:
        words.append("--gradient-checkpointing")
    return " ".join(shlex.quote(word) for word in words)
