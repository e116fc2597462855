"""`loragate env`: what is installed, on what it can run, which optional parts are present, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from loragate.cli.arguments import Command
from loragate.evaluation.sandbox import TIERS, probe
from loragate.training.strategy import launch_file
from loragate.version import __version__

OPTIONAL = {
    "math_verify": 'a second grader of math answers (pip install ".[math]" in a checkout)',
    "lm_eval": 'retention suites (pip install ".[eval]" in a checkout)',
    "ray": 'sweeps on several processes, replicas (pip install ".[sweep]" in a checkout)',
    "vllm": 'fast sampling and serving (pip install ".[vllm]" in a checkout, in an environment of its own)',
    "tensorboard": "logging to TensorBoard (--report-to tensorboard)",
    "trackio": "logging to Trackio",
    "wandb": "logging to Weights & Biases",
    "bitsandbytes": '4- and 8-bit bases (pip install ".[quantization]" in a checkout)',
    "gguf": 'bases in one GGUF file (pip install ".[gguf]" in a checkout)',
    "gradio": 'loragate explore (pip install ".[explore]" in a checkout)',
}


@dataclass(frozen=True)
class EnvOptions:
    """Settings of `loragate env`.

    Attributes:
        json: print the findings as JSON.
    """

    json: bool = False


def run(options: EnvOptions) -> int:
    """Print the findings; status 1 if something required is missing or too old."""
    found = findings()
    if options.json:
        print(json.dumps(found, indent=2))
        return 1 if found["problems"] else 0
    print(f"loragate {found['loragate']}, Python {found['python']} on {found['platform']} ({sys.executable})")
    for name, version in found["versions"].items():
        print(f"  {name:<18} {version or 'missing'}")
    print("devices: " + ", ".join(found["devices"]))
    print("optional parts:")
    for name, purpose in OPTIONAL.items():
        print(f"  {name:<18} {found['optional'][name] or 'not installed'}: {purpose}")
    print(f"sandbox for programs: {', '.join(found['sandbox']) or 'none'}")
    if found["sandbox_problem"]:
        print(f"  bubblewrap, which runs programs of models safely, does not work: {found['sandbox_problem']}")
    hub = "offline" if found["offline"] else "reachable if the network is"
    print(f"disk: {found['free_disk_gib']} GiB free; hub: {hub}")
    print(f"configurations for accelerate launch: {launch_file('*')}")
    for problem in found["problems"]:
        print(f"problem: {problem}")
    print("next: loragate quickstart" if not found["problems"] else "mend the problems above first")
    return 1 if found["problems"] else 0


def findings() -> dict[str, Any]:
    """Versions, devices, optional parts and problems as plain data."""
    import torch

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
    devices = [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads{_arithmetic()})"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(index).total_memory / 2**30
            devices.append(f"cuda:{index} ({torch.cuda.get_device_name(index)}, {memory:.0f} GiB)")
    if torch.backends.mps.is_available():
        devices.append("mps")
    free = shutil.disk_usage(os.getcwd()).free / 2**30
    if free < 1:
        problems.append(f"only {free:.1f} GiB free on the disk of the current folder")
    return {
        "loragate": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "devices": devices,
        "optional": {name: _version(name) for name in OPTIONAL},
        "sandbox": [tier for tier in TIERS if probe(tier) is None],
        "sandbox_problem": probe("bubblewrap"),
        "free_disk_gib": round(free, 1),
        "offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
        "problems": problems,
    }


def _arithmetic() -> str:
    """What the processor computes with, and whether it multiplies bf16 itself: elsewhere bf16 is slower than float32."""
    import torch

    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # which older torch does not have
    bf16 = [has for name, has in known.items() if "bf16" in name]
    said = "" if not bf16 else ", bf16" if any(bf16) else ", no bf16: use float32"
    return f", {torch.backends.cpu.get_cpu_capability()}{said}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


COMMAND = Command(
    name="env",
    options=EnvOptions,
    run=run,
    examples=("loragate env", "loragate env --json"),
)
