"""What a training takes of the machine's memory beside the tensors that are alive, and what another allocator changes.

    python benchmarks/resident.py [--stages sft calibrate] [--layers 6] [--jemalloc FILE] [--out FILE]

Each case trains a random model of the width of Qwen2.5-0.5B for two steps on one CPU thread, with gradient checkpointing, in a
process of its own under each allocator: glibc's as it is; glibc's with blocks of 4 MiB and more given back at once; jemalloc,
preloaded, where it is installed. Resident is the most that the kernel counted since the first step began (VmHWM); planned is what
`loragate.training.plan` counts as alive at once. CPU time is of both steps; of three runs that alternate, the median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from plan_memory import Case, planned, train

WIDTH = {"vocab_size": 8192, "hidden_size": 896, "intermediate_size": 4864, "tie_word_embeddings": True}
WIDTH |= {"num_attention_heads": 14, "num_key_value_heads": 2}
JEMALLOC = Path("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")


def case_of(stage: str, layers: int) -> Case:
    shape = tuple({**WIDTH, "num_hidden_layers": layers}.items())
    return Case(stage, "llama", stage, rows=8, padded=True, shape=shape, checkpointing=True)


def child(stage: str, layers: int) -> None:
    """Print {"resident": MiB, "seconds": CPU seconds} of the two steps."""
    from loragate.training.trainer import StatisticsTrainer

    torch.set_num_threads(1)
    began: list[float] = []
    step = StatisticsTrainer.training_step

    def counted(self: Any, *given: Any, **named: Any) -> torch.Tensor:
        if not began:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # what loading took is over
            began.append(time.process_time())
        return step(self, *given, **named)

    StatisticsTrainer.training_step = counted  # type: ignore[method-assign]
    train(case_of(stage, layers), [])
    seconds = time.process_time() - began[0]
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    print(json.dumps({"resident": int(status["VmHWM"].split()[0]) / 1024, "seconds": seconds}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=("sft", "calibrate"), default=("sft", "calibrate"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--jemalloc", type=Path, default=JEMALLOC)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "resident.json")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.layers)
        return
    large = str(4 << 20)
    allocators = {"glibc": {}, "glibc, 4 MiB": {"MALLOC_MMAP_THRESHOLD_": large, "MALLOC_TRIM_THRESHOLD_": large}}
    if options.jemalloc.is_file():
        allocators["jemalloc"] = {"LD_PRELOAD": str(options.jemalloc)}
    stages: dict[str, Any] = {}
    for stage in options.stages:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in allocators}
        for _ in range(3):
            for name, changed in allocators.items():
                command = [sys.executable, __file__, "--child", stage, "--layers", str(options.layers)]
                done = subprocess.run(command, env=os.environ | changed, capture_output=True, text=True, check=True)
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
        found = {
            name: {key: round(statistics.median(one[key] for one in own), 1) for key in ("resident", "seconds")}
            for name, own in runs.items()
        }
        stages[stage] = {"planned_mib": round(planned(case_of(stage, options.layers)).peak / 2**20, 1), **found}
        print(stage, json.dumps(stages[stage]), flush=True)
    record = {"torch": torch.__version__, "layers": options.layers, "rows": 8, "tokens": 256, "stages": stages}
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
