"""Trials on Ray: worker processes that keep the base between trials, on this machine or on a cluster.

Ray decides where a worker runs and starts it again when it dies. What is finished is decided by the trials' files. On this
machine, Ray's processes are tied to ours by the kernel and end with it, however it ends.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from loragate.errors import ConfigError, LoragateError
from loragate.selection.selection_run import OnTrial, Open, SelectionRun, no_trial
from loragate.selection.trials import Trial
from loragate.signals import keep_sigterm_handler

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry

try:
    import ray
    from ray.util import ActorPool
except ImportError as error:
    raise ConfigError(f'--runner ray: Ray is not installed ({error}); pip install ".[sweep]" in a checkout') from error

RETRIES = 3
OBJECT_STORE_BYTES = 128 * 1024 * 1024  # trials pass through files


@dataclass(frozen=True)
class Resources:
    """What trials may use.

    Attributes:
        workers: trials at a time; 0 for as many as fit.
        cpus, gpus: per trial; a fraction of a GPU shares it.
    """

    workers: int = 0
    cpus: float = 1.0
    gpus: float = 0.0

    @classmethod
    def detect(cls, workers: int, cpus: int, gpus: float | None, device: str) -> Resources:
        """What one trial takes and how many run at a time, as far as it was not said.

        On this machine, trials share GPUs as asked; without one, every trial needs memory for its own base, so no more than
        four run at a time unless `workers` says so. On a cluster the GPUs of the workers are not seen from here: one per
        trial is assumed, and 0 is for a cluster of CPUs.
        """
        cluster = bool(os.environ.get("RAY_ADDRESS"))
        cards = torch.cuda.device_count() if device in ("auto", "cuda") else 0
        if gpus is None:
            gpus = 1.0 if (cards or cluster) and device in ("auto", "cuda") else 0.0
        if not workers and not cluster:
            cores = (os.cpu_count() or 1) // cpus
            workers = max(1, int(cards / gpus)) if gpus else max(1, min(4, cores))
        return cls(workers, float(cpus), gpus)

    def describe(self) -> str:
        """ "on a local Ray, 2 at a time (1 CPU each)"."""
        address = os.environ.get("RAY_ADDRESS")
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        many = f"{self.workers} at a time" if self.workers else "as many at a time as fit"
        where = f"the Ray cluster {address}" if address else "a local Ray"
        return f"on {where}, {many} ({self.cpus:g} CPU{gpus} each)"


class Worker:
    """One process; it is given one trial after the other."""

    def __init__(self, open_run: Open, threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self.open_run = open_run
        self.opened: SelectionRun | None = None

    def run(self, trial: Trial) -> tuple[Trial, bool]:
        """Run a whole trial; whether it is finished. What goes wrong is noted in its folder."""
        try:
            self.opened = self.opened or self.open_run(trial)
            self.opened.run_trial(trial)
        except LoragateError:
            return trial, False  # another attempt would fail alike
        except Exception:
            os._exit(1)  # Ray tries it again in a fresh process, which an error of a GPU needs
        return trial, True


@contextmanager
def ray_session(resources: Resources) -> Iterator[None]:
    """A Ray to run on: the cluster of RAY_ADDRESS, which must answer (ConfigError), or one of our own."""
    address = os.environ.get("RAY_ADDRESS", "")
    check_address_reachable(address)
    cores = max(os.cpu_count() or 1, round(max(resources.workers, 1) * resources.cpus))
    own: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    # a node of our own that was not up within Ray's 30 s is started once more: a busy machine is slow the first time
    for left in (0,) if address else (1, 0):
        try:
            with warnings.catch_warnings(action="ignore"):
                given = {} if address else own
                with keep_sigterm_handler():
                    ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **given)
            break
        except Exception as error:  # Ray raises a bare Exception where a node was not up in time
            ray.shutdown()
            if left:
                continue
            what = f"RAY_ADDRESS={address}: no Ray cluster answers there" if address else "Ray could not be started"
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{what} ({said}); --runner sequential does without Ray") from error
    logging.getLogger("ray").setLevel(logging.CRITICAL)  # what fails stands in the trial's folder
    try:
        yield
    finally:
        ray.shutdown()


def check_address_reachable(address: str) -> None:
    """Refuse (ConfigError) an address at which nothing listens; Ray itself would try for minutes."""
    host, sign, port = address.removeprefix("ray://").rpartition(":")
    if not (sign and port.isdigit()):
        return  # "auto", "local" or none
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConfigError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error.strerror or error}); start it, unset RAY_ADDRESS "
            "for a Ray of its own on this machine, or take --runner sequential"
        ) from error


def run_on_ray(open_run: Open, pending: Sequence[Trial], on_trial: OnTrial = no_trial, *, resources: Resources) -> None:
    """Run the pending trials on Ray; one whose worker dies is started again up to three times.

    Every worker calls `open_run`, which travels to it, for a model of its own. `on_trial` is told of a trial when it has ended.
    ConfigErrors are those of `ray_session` and `count_parallel_trials`.
    """
    with ray_session(resources):
        fits = count_parallel_trials(resources)
        actor: Any = ray.remote(num_cpus=resources.cpus, num_gpus=resources.gpus, max_restarts=-1)(Worker)
        given = (open_run, max(1, int(resources.cpus)))
        count = min(len(pending), fits, resources.workers or fits)
        pool: Any = ActorPool([actor.options(max_task_retries=RETRIES).remote(*given) for _ in range(count)])
        for one in pending:
            pool.submit(lambda worker, one: worker.run.remote(one), one)
        while pool.has_next():
            # lost several times; whoever reads the folder sees that it is missing
            with suppress(ray.exceptions.RayError):
                trial, done = pool.get_next_unordered()
                on_trial(trial, "finished" if done else "failed")
            while (idle := pool.pop_idle()) is not None:
                ray.kill(idle)  # its room goes to workers that Ray could not start yet


def count_parallel_trials(resources: Resources) -> int:
    """How many trials fit on the nodes at a time; a ConfigError says what one asks for that no node has."""
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = sum(min(int(node.get(name, 0.0) / need + 1e-9) for name, need in wanted.items() if need) for node in nodes)
    if not fits:
        found = "; ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes) or "no node"
        raise ConfigError(
            f"one trial asks for {resources.cpus:g} CPUs and {resources.gpus:g} GPUs, and Ray has {found}; lower "
            "--gpus-per-trial or --cpus-per-trial"
        )
    return fits
