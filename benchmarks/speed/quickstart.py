"""Where the time of `loragate quickstart` goes: seconds of each stage, and the share of the data pipeline in training.

    python benchmarks/speed/quickstart.py [--quick] [--threads 1] [--out FILE]

The command runs as it is, in this process, into a temporary folder (quick: one range, few questions). The data pipeline
is what training spends on encoding rows and on waiting for batches. Wall seconds are what a user waits; CPU seconds say
the same of a machine that does nothing else.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import begin, finish, options, target

LIMIT = 180.0


class Clocks:
    """Seconds by name, wall and CPU; a name inside itself counts once."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.running: set[str] = set()

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        if name in self.running:
            yield
            return
        self.running.add(name)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.running.discard(name)
            self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall
            self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            with self.on(name):
                return function(*args, **options)

        return timed

    def record(self, name: str) -> dict[str, float]:
        return {"wall": round(self.wall[name], 2), "cpu": round(self.cpu[name], 2)}


def profile(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the quickstart once; its stages in order, and the data pipeline's share."""
    clocks = Clocks()
    stages: list[str] = []
    with clocks.on("whole"), tempfile.TemporaryDirectory() as scratch:
        with clocks.on("imports"):
            from torch.utils.data.dataloader import _BaseDataLoaderIter

            from loragate.display import Display
            from loragate.quickstart import QuickstartSettings, run
            from loragate.training import stage_one, stage_two

        class Timed(Display):
            @contextmanager
            def job(self, name: str, total: int = 0, unit: str = "") -> Iterator[Any]:
                stages.append(name)
                with clocks.on(name), super().job(name, total, unit) as job:
                    yield job

        with ExitStack() as patches:
            patches.enter_context(patch.object(run, "Display", Timed))
            for module, function, name in (
                (stage_one, "encode_rows", "data"),
                (stage_two, "encode_rows", "data"),
                (_BaseDataLoaderIter, "__next__", "data"),
                (run, "train_adapter", "training"),
                (run, "calibrate", "training"),
            ):
                patches.enter_context(patch.object(module, function, clocks.around(name, getattr(module, function))))
            run.run_quickstart(QuickstartSettings(out=str(Path(scratch) / "run"), **arguments))
    return {
        "whole": clocks.record("whole"),
        "stages": [{"stage": name, **clocks.record(name)} for name in ("imports", *stages)],
        "training": clocks.record("training"),
        "data": clocks.record("data"),
        "data_share_of_training": round(clocks.cpu["data"] / clocks.cpu["training"], 4),
    }


def main() -> None:
    chosen = begin(options(__doc__, "quickstart", repeats=1))
    arguments: dict[str, Any] = {"threads": chosen.threads}
    if chosen.quick:
        arguments |= {"ranges": "0,1", "questions": 20, "samples": 2}
    found = profile(arguments)
    print(f"\n{'':<44}{'wall s':>8}{'CPU s':>8}")
    for row in (*found["stages"], {"stage": "whole", **found["whole"]}):
        print(f"{row['stage']:<44}{row['wall']:>8.1f}{row['cpu']:>8.1f}")
    print(f"data pipeline: {100 * found['data_share_of_training']:.1f} % of the training's CPU time")
    judged = [] if chosen.quick else [target("quickstart, seconds", found["whole"]["wall"], at_most=LIMIT)]
    finish(chosen, {**found, "targets": judged})


if __name__ == "__main__":
    main()
