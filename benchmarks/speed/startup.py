"""How soon the command line answers: `loragate --help`, every command's help, and the usual typing errors.

    python benchmarks/speed/startup.py [--quick] [--repeats 5] [--out FILE]

Each run is a fresh process; `python -c pass` alternates with them. CPU seconds (user and system of the process) are what
a quiet core takes in wall time, and are disturbed least by other programs; wall seconds stand beside them.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from common import begin, finish, options, spread, target

from loragate.cli.main import COMMANDS

LIMIT = 0.3


def calls(quick: bool) -> dict[str, list[str]]:
    """{what is shown: arguments of the Python interpreter}."""
    cli = ["-m", "loragate"]
    found = {
        "python -c pass": ["-c", "pass"],
        "import loragate": ["-c", "import loragate"],
        "loragate --help": [*cli, "--help"],
        "loragate --version": [*cli, "--version"],
        "loragate calibrat": [*cli, "calibrat"],
        "loragate calibrate --rang 1": [*cli, "calibrate", "--rang", "1"],
    }
    for name in ("calibrate", "eval") if quick else COMMANDS:
        found[f"loragate {name} --help"] = [*cli, name, "--help"]
    return found


def run(arguments: list[str]) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    chosen = begin(options(__doc__, "startup"))
    sides = calls(chosen.quick)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(chosen.repeats + 1):
        for name, arguments in sides.items():
            seconds = run(arguments)
            if turn:
                taken[name].append(seconds)
    rows: dict[str, Any] = {}
    plain = [cpu for cpu, _ in taken["python -c pass"]]
    for name, pairs in taken.items():
        ratio = statistics.median(cpu / other for (cpu, _), other in zip(pairs, plain, strict=True))
        rows[name] = {
            "cpu_seconds": spread([cpu for cpu, _ in pairs]),
            "wall_seconds": spread([wall for _, wall in pairs]),
            "to_python": round(ratio, 2),
        }
        print(f"{name:<34}{rows[name]['cpu_seconds']['median']:>8.3f} s CPU{ratio:>7.1f} × python -c pass")
    helps = {name: row["cpu_seconds"]["median"] for name, row in rows.items() if name.startswith("loragate")}
    slowest = max(helps, key=lambda name: helps[name])
    finish(
        chosen,
        {
            "calls": rows,
            "targets": [
                target("loragate --help, CPU seconds", helps["loragate --help"], at_most=LIMIT),
                target(f"the slowest ({slowest}), CPU seconds", helps[slowest], at_most=LIMIT),
            ],
        },
    )


if __name__ == "__main__":
    main()
