"""The two ways to run trials, behind one small interface: `with backend: run(...)`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any


class Sequential:
    """One after the other in this process."""

    def describe(self) -> str:
        return "one after the other in this process"

    def __enter__(self) -> Sequential:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def run(self, materials: Any, plan: Any, folder: Path, pending: list[Any]) -> None:
        from loragate.sweep.sequential import run_sequentially

        run_sequentially(materials, plan, folder, pending)


class OnRay:
    """In worker processes of Ray; raises `ConfigError` where Ray is absent."""

    def __init__(self, options: Any) -> None:
        from loragate.sweep import ray_tune

        self.ray_tune = ray_tune
        self.resources = resources_for(options)
        self.stack = ExitStack()

    def describe(self) -> str:
        address, found = os.environ.get("RAY_ADDRESS"), self.resources
        gpus = f", {found.gpus:g} GPU" if found.gpus else ""
        many = f"{found.workers} at a time" if found.workers else "as many at a time as fit"
        return (
            f"on {'the Ray cluster ' + address if address else 'a local Ray'}, {many} ({found.cpus:g} CPU{gpus} each)"
        )

    def __enter__(self) -> OnRay:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.close()

    def run(self, materials: Any, plan: Any, folder: Path, pending: list[Any]) -> None:
        if pending:
            self._connect()
            self.ray_tune.run_on_ray(materials, plan, folder, pending, self.resources)

    def _connect(self) -> None:
        if not self.ray_tune.ray.is_initialized():
            self.stack.enter_context(self.ray_tune.connected(self.resources))


def resources_for(options: Any) -> Any:
    """What one trial takes and how many run at a time.

    On this machine, trials share GPUs as asked; without one, every trial needs memory for its own base, so no more than four
    run at a time unless --workers says so. On a cluster the GPUs of the workers are not seen from here: one per trial is
    assumed, and --gpus-per-trial 0 is for a cluster of CPUs.
    """
    import torch

    from loragate.sweep.ray_tune import Resources

    cluster = bool(os.environ.get("RAY_ADDRESS"))
    cards = torch.cuda.device_count() if options.device in ("auto", "cuda") else 0
    usual = 1.0 if (cards or cluster) and options.device in ("auto", "cuda") else 0.0
    gpus = usual if options.gpus_per_trial is None else options.gpus_per_trial
    workers = options.workers
    if not workers and not cluster:
        cores = (os.cpu_count() or 1) // options.cpus_per_trial
        workers = max(1, int(cards / gpus)) if gpus else max(1, min(4, cores))
    return Resources(workers, float(options.cpus_per_trial), gpus)
