"""Every speed benchmark, one after the other, each in a process of its own; then the tables of docs/speed.md.

    python benchmarks/speed/run.py [--quick] [--only step scaling] [--threads 1] [--repeats 5]

`make bench` runs this. With --quick all of it takes about three minutes on a quiet machine, writes to build/bench and leaves the
committed results and pages alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# cheapest first
SCRIPTS = ("true_shapes", "head", "step", "scaling", "decode", "real_size")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats and small cases")
    parser.add_argument("--only", nargs="+", default=list(SCRIPTS), choices=SCRIPTS, metavar="NAME")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=0)
    chosen = parser.parse_args()
    flags = ["--quick"] if chosen.quick else []
    flags += ["--repeats", str(chosen.repeats)] if chosen.repeats else []
    failed, taken = [], {}
    for name in chosen.only:
        script = HERE / f"{name}.py"
        print(f"== {name}", flush=True)
        began = time.perf_counter()
        done = subprocess.run([sys.executable, "-W", "ignore", str(script), "--threads", str(chosen.threads), *flags])
        taken[name] = time.perf_counter() - began
        if done.returncode:
            failed.append(name)
    if not chosen.quick and not failed:
        failed += ["page"] if subprocess.run([sys.executable, str(HERE / "page.py")]).returncode else []
    print("== seconds: " + ", ".join(f"{name} {seconds:.0f}" for name, seconds in taken.items()))
    if failed:
        print(f"== failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
