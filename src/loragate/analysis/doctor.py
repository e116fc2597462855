"""What is installed, on what it can run, which optional parts are present, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import time
from importlib import metadata
from typing import Any

import torch
from packaging.requirements import Requirement

from loragate.evaluation.sandbox import TIERS, probe
from loragate.version import __version__

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


def findings() -> dict[str, Any]:
    """Versions, devices, optional parts and problems as plain data."""
    versions: dict[str, str | None] = {}
    problems = []
    try:
        required = metadata.requires("loragate") or ()
    except metadata.PackageNotFoundError:
        required = ()
        problems.append("loragate is not installed, only found; what it requires is not known: pip install -e .")
    for text in required:
        wanted = Requirement(text)
        if wanted.marker is not None:
            continue  # of an optional part
        found = versions[wanted.name] = _version(wanted.name)
        if found is None:
            problems.append(f"{wanted.name} is missing; pip install '{wanted}'")
        elif not wanted.specifier.contains(found, prereleases=True):
            problems.append(f"{wanted.name} {found} does not fit {wanted.specifier}; pip install -U '{wanted}'")
    devices = [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            devices.append(f"cuda:{index} ({torch.cuda.get_device_name(index)}, {memory:.0f} GiB)")
    if torch.backends.mps.is_available():
        devices.append("mps")
    # what decides which kernels run on the CPU; torch.cpu.get_capabilities() is younger than the lowest torch
    extensions = {
        "AVX512-BF16": torch.cpu._is_avx512_bf16_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    free = shutil.disk_usage(os.getcwd()).free / 2**30
    if free < 1:
        problems.append(f"only {free:.1f} GiB free on the disk of the current folder")
    return {
        "loragate": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "devices": devices,
        "instructions": [
            torch.backends.cpu.get_cpu_capability(),
            *(name for name, there in extensions.items() if there),
        ],
        "cpu_gflops": _products(),
        "optional": {name: _version(name) for name in OPTIONAL},
        "sandbox": [tier for tier in TIERS if probe(tier) is None],
        "sandbox_problem": probe("bubblewrap"),
        "free_disk_gib": round(free, 1),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
        "problems": problems,
    }


def consequences(found: dict[str, Any]) -> list[str]:
    """What follows from the CPU's "instructions" and "cpu_gflops" for a run on the CPU, a sentence each."""
    if "AVX512-BF16" in found["instructions"]:
        four_bit = (
            "4-bit bases: bitsandbytes would pack their weights here at the first forward; loragate keeps them unpacked, so "
            "that training, evaluation and other processors compute the same"
        )
    else:
        four_bit = "4-bit bases: bitsandbytes does not pack their weights here"
    speeds = found["cpu_gflops"]
    ratio = speeds["bfloat16"] / speeds["float32"]
    faster = "--precision bf16 and --dtype bfloat16" if ratio > 1 else "--precision fp32 and --dtype float32"
    products = f"matrix products on the CPU: {speeds['bfloat16']} GFLOP/s in bfloat16, {speeds['float32']} in float32"
    return [four_bit, f"{products}, so {faster} are likely faster"]


def _products(size: int = 768, rounds: int = 7) -> dict[str, int]:
    """10⁹ operations a second in square matrix products, by dtype; instruction sets alone do not tell which dtype is faster.

    The dtypes take turns, and a median passes over what else the machine does.
    """
    pairs = {name: torch.randn(2, size, size).to(getattr(torch, name)) for name in ("float32", "bfloat16")}
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(rounds):
        for name, (left, right) in pairs.items():
            began = time.perf_counter()
            left @ right.T
            seconds[name].append(time.perf_counter() - began)
    return {name: max(1, round(2e-9 * size**3 / statistics.median(taken))) for name, taken in seconds.items()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
