"""Everything that needs a GPU, the most important first, in a given time; results are written after every part.

    python benchmarks/gpu/run.py [--minutes 25] [--only parity step] [--rehearse] [--out FILE]

`make gpu PYTHON=python3` runs this with an interpreter that has a CUDA build of PyTorch, transformers and peft; nothing is
installed or downloaded. Each part is a process of its own with a time limit of its own. One that fails, hangs or lacks a
library is recorded as such, with what it had measured by then, and the next one runs. `--rehearse` runs every part on the CPU
with tiny shapes: it shows that the parts work, and its times say nothing. Parts of the same machine that are not run again
stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "src"), str(HERE.parent / "speed")]

LIMITS = {  # seconds of each part, by priority
    "parity": 150,
    "step": 360,
    "decode": 300,
    "token": 240,
    "serving": 60,
    "compile": 240,
    "fsdp2": 90,
    "four_bit": 90,
}
TIMED = ("step", "decode", "compile", "token", "serving")
LEFT_OUT = 3  # exit status of a part that lacks something


def machine(rehearsal: bool) -> dict[str, Any]:
    """GPU, driver and versions; no names of hosts or users, no paths."""
    import torch
    from common import versions

    found: dict[str, Any] = {"python": platform.python_version(), **versions(), "cuda": torch.version.cuda}
    found["cores"] = os.cpu_count()
    if rehearsal:
        return found
    facts = torch.cuda.get_device_properties(0)
    driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.run(driver, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found["driver"] = "unknown"
    capability = f"{facts.major}.{facts.minor}"
    return {**found, "gpu": facts.name, "capability": capability, "memory_gib": round(facts.total_memory / 2**30, 1)}


def run_part(name: str, seconds: float, rehearsal: bool) -> dict[str, Any]:
    """One part in a process of its own: its state, seconds, what it measured, and the end of what it printed if it failed."""
    paths = [str(ROOT / "src"), str(HERE.parent / "speed"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    if rehearsal:
        environment |= {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="loragate-gpu-") as place:
        kept, log = Path(place) / "result.json", Path(place) / "log"
        command = [sys.executable, "-W", "ignore", str(HERE / "run.py"), "--part", name, "--out", str(kept)]
        began = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--rehearse"] if rehearsal else command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        measured = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
        states = {0: "done", LEFT_OUT: f"left out: {measured.pop('left_out', 'no reason was given')}"}
        found["state"] = (
            f"stopped after {seconds:.0f} s" if code is None else states.get(code, f"failed with status {code}")
        )
        found["result"] = measured
        if code not in (0, LEFT_OUT):
            found["log"] = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    return found


def run_all(names: list[str], minutes: float, rehearsal: bool, out: Path) -> dict[str, Any]:
    """Run the parts in turn and write the record after each."""
    from loragate.files import read_json, write_json

    end = time.monotonic() + 60 * minutes
    record: dict[str, Any] = {"rehearsal": rehearsal, "minutes": minutes, "machine": machine(rehearsal), "parts": {}}
    if out.is_file() and (before := read_json(out)).get("machine") == record["machine"]:
        record["parts"] = before["parts"]  # parts that are not run again stay
    write_json(out, record)
    for name in names:
        left = end - time.monotonic()
        if left < 10:
            record["parts"][name] = {"state": "left out: no time was left"}
        else:
            print(f"== {name}", flush=True)
            record["parts"][name] = run_part(name, min(LIMITS[name], left), rehearsal)
        print(f"   {record['parts'][name]['state']}", flush=True)
        write_json(out, record)
    return record


def act(name: str, kept: Path, rehearsal: bool) -> int:
    """Run one part in this process."""
    import parts
    import timings
    import torch

    from loragate.files import write_json

    task = parts.Task("cpu" if rehearsal else "cuda", rehearsal, kept)
    # fp32 means fp32: no TF32 in what is compared with fp64
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        getattr(timings if name in TIMED else parts, name)(task)
    except parts.LeftOut as reason:
        write_json(kept, {**task.found, "left_out": str(reason)})
        return LEFT_OUT
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25, help="of all parts together")
    parser.add_argument("--only", nargs="+", default=list(LIMITS), choices=list(LIMITS), metavar="PART")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument(
        "--out", type=Path, help="default benchmarks/results/gpu.json, of a rehearsal build/bench/gpu.json"
    )
    parser.add_argument("--part", choices=list(LIMITS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        return act(chosen.part, chosen.out, chosen.rehearse)
    import torch

    if not chosen.rehearse and not torch.cuda.is_available():
        print(
            "no CUDA device was found by this interpreter; name another with PYTHON=, or use --rehearse",
            file=sys.stderr,
        )
        return 1
    out = chosen.out or (ROOT / "build" / "bench" if chosen.rehearse else HERE.parent / "results") / "gpu.json"
    record = run_all(chosen.only, chosen.minutes, chosen.rehearse, out)
    print(f"written to {out}")
    return any(part["state"].startswith(("failed", "stopped")) for part in record["parts"].values())


if __name__ == "__main__":
    sys.exit(main())
