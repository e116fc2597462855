"""`loragate doctor`: what is installed, on what it can run, which optional parts are present."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import Any

from loragate.cli.arguments import Command
from loragate.training.strategy import launch_file
from loragate.version import __version__

REQUIRED = {
    "torch": "2.8",
    "transformers": "5.19",
    "peft": "0.21",
    "trl": "1.16",
    "accelerate": "1.12",
    "datasets": "4.7",
}
OPTIONAL = {
    "math_verify": 'math answers in eval and calibrate (pip install "loragate[math]")',
    "lm_eval": 'retention suites (pip install "loragate[eval]")',
    "ray": 'sweeps on several processes, replicas (pip install "loragate[sweep]")',
    "vllm": 'fast sampling and serving (pip install "loragate[vllm]", in an environment of its own)',
    "tensorboard": "logging to TensorBoard (--report-to tensorboard)",
    "trackio": "logging to Trackio",
    "wandb": "logging to Weights & Biases",
    "bitsandbytes": '4- and 8-bit bases (pip install "loragate[quantization]")',
    "gguf": 'bases in one GGUF file (pip install "loragate[gguf]")',
    "gradio": 'loragate explore (pip install "loragate[explore]")',
    "deepspeed": "--strategy zero3",
}


@dataclass(frozen=True)
class DoctorOptions:
    """Settings of `loragate doctor`.

    Attributes:
        json: print the findings as JSON.
    """

    json: bool = False


def findings() -> dict[str, Any]:
    """Versions, devices, optional parts and problems as plain data."""
    import torch

    from loragate.evaluation.sandbox import available_tiers, probe

    versions = {name: _version(name) for name in [*REQUIRED, "safetensors", "tokenizers", "matplotlib"]}
    devices = [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            devices.append(f"cuda:{index} ({torch.cuda.get_device_name(index)}, {memory:.0f} GiB)")
    if torch.backends.mps.is_available():
        devices.append("mps")
    problems = []
    for name, lowest in REQUIRED.items():
        found = versions[name]
        if found is None:
            problems.append(f"{name} is missing; pip install '{name}>={lowest}'")
        elif _numbers(found) < _numbers(lowest):
            problems.append(f"{name} {found} is older than {lowest}; pip install -U {name}")
    free = shutil.disk_usage(os.getcwd()).free / 2**30
    if free < 1:
        problems.append(f"only {free:.1f} GiB free on the disk of the current folder")
    return {
        "loragate": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "devices": devices,
        "instructions": _instructions(),
        "optional": {name: _version(name) for name in OPTIONAL},
        "sandbox": available_tiers(),
        "sandbox_problem": probe("bubblewrap"),
        "free_disk_gib": round(free, 1),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
        "problems": problems,
    }


def run(options: DoctorOptions) -> int:
    """Print the findings; status 1 if something required is missing or too old."""
    found = findings()
    if options.json:
        print(json.dumps(found, indent=2))
        return 1 if found["problems"] else 0
    print(f"loragate {found['loragate']}, Python {found['python']} on {found['platform']} ({sys.executable})")
    for name, version in found["versions"].items():
        print(f"  {name:<14} {version or 'missing'}")
    print("devices: " + ", ".join(found["devices"]))
    instructions = found["instructions"]
    lacking = [name for name in ("AVX512-BF16", "AMX") if name not in instructions]
    print(f"instructions: {', '.join(instructions)}" + (f" (no {' or '.join(lacking)})" if lacking else ""))
    for sentence in _consequences(instructions):
        print(f"  {sentence}")
    print("optional parts:")
    for name, purpose in OPTIONAL.items():
        print(f"  {name:<14} {found['optional'][name] or 'not installed'}: {purpose}")
    tiers = ", ".join(found["sandbox"]) or "none"
    print(f"sandbox for programs: {tiers}")
    if found["sandbox_problem"]:
        print(f"  bubblewrap, which runs programs of models safely, does not work: {found['sandbox_problem']}")
    print(
        f"disk: {found['free_disk_gib']} GiB free; hub: {'offline' if found['offline'] else 'reachable if the network is'}"
    )
    print(f"configurations for accelerate launch: {launch_file('*')}")
    for problem in found["problems"]:
        print(f"problem: {problem}")
    print("next: loragate quickstart" if not found["problems"] else "mend the problems above first")
    return 1 if found["problems"] else 0


def _instructions() -> list[str]:
    """What of the CPU's instruction set decides which kernels run: torch's level, then AVX512-BF16 and AMX where they are."""
    import torch

    # torch.cpu.get_capabilities() says the same in public, but is younger than the lowest torch
    extensions = {
        "AVX512-BF16": torch.cpu._is_avx512_bf16_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    return [torch.backends.cpu.get_cpu_capability(), *(name for name, there in extensions.items() if there)]


def _consequences(instructions: list[str]) -> list[str]:
    """What follows from `_instructions` for a run on the CPU, a sentence each."""
    if "AVX512-BF16" in instructions:
        four_bit = (
            "4-bit bases: bitsandbytes would pack their weights here at the first forward; loragate keeps them unpacked, so "
            "that training, evaluation and other processors compute the same"
        )
    else:
        four_bit = "4-bit bases: bitsandbytes does not pack their weights here"
    if {"AVX512-BF16", "AMX"} & set(instructions) or not instructions[0].startswith("AVX"):
        return [four_bit]
    return [four_bit, "bfloat16 on the CPU: no instructions for it here, so --dtype float32 is faster"]


def _version(name: str) -> str | None:
    from importlib import metadata  # as heavy as all else that the help of this command needs

    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "unknown"


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)


COMMAND = Command(
    name="doctor",
    summary="Print versions, devices and optional parts. Run this first when something does not work.",
    options=DoctorOptions,
    run=run,
    examples=("loragate doctor", "loragate doctor --json"),
)
