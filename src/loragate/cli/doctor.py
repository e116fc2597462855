"""`loragate doctor`: what is installed, on what it can run, which optional parts are present."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from loragate.cli.arguments import Command
from loragate.training.strategy import launch_file


@dataclass(frozen=True)
class DoctorOptions:
    """Settings of `loragate doctor`.

    Attributes:
        json: print the findings as JSON.
    """

    json: bool = False


def run(options: DoctorOptions) -> int:
    """Print the findings; status 1 if something required is missing or too old."""
    from loragate.analysis.doctor import OPTIONAL, consequences, findings

    found = findings()
    if options.json:
        print(json.dumps(found, indent=2))
        return 1 if found["problems"] else 0
    print(f"loragate {found['loragate']}, Python {found['python']} on {found['platform']} ({sys.executable})")
    for name, version in found["versions"].items():
        print(f"  {name:<18} {version or 'missing'}")
    print("devices: " + ", ".join(found["devices"]))
    instructions = found["instructions"]
    lacking = [name for name in ("AVX512-BF16", "AMX") if name not in instructions]
    print(f"instructions: {', '.join(instructions)}" + (f" (no {' or '.join(lacking)})" if lacking else ""))
    for sentence in consequences(found):
        print(f"  {sentence}")
    print("optional parts:")
    for name, purpose in OPTIONAL.items():
        print(f"  {name:<18} {found['optional'][name] or 'not installed'}: {purpose}")
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


COMMAND = Command(
    name="doctor",
    options=DoctorOptions,
    run=run,
    examples=("loragate doctor", "loragate doctor --json"),
)
