"""Trials on Ray Tune: worker processes that keep the base between trials, on this machine or on a cluster.

Ray decides where a trial runs and starts it again when its worker dies. What is finished is decided by the trials' files, so
nothing of Tune's own bookkeeping is needed to resume; it goes to a folder that is removed. On this machine, Ray's processes
are tied to ours by the kernel and end with it, however it ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from loragate.errors import ConfigError, LoragateError
from loragate.selection.candidate import Candidate
from loragate.selection.store import Store
from loragate.selection.sweep import Sweep, Workshop
from loragate.selection.trial import run_trial

# no telemetry, no files of loggers that nobody reads, and Ctrl-C is ours
for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
}.items():
    os.environ.setdefault(_name, _value)

try:
    import ray
    from ray import tune
except ImportError as error:
    raise ConfigError(f'--runner ray: Ray is not installed ({error}); pip install "loragate[sweep]"') from error

STATE = ".tune"
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
    def found(cls, workers: int, cpus: int, gpus: float | None, device: str) -> Resources:
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


class SweepTrial(tune.Trainable):
    """One worker; Tune gives it one trial after the other."""

    def setup(self, config: dict[str, Any], parts: tuple[Sweep, Store] | None = None, threads: int = 1) -> None:
        """Called once per worker."""
        assert parts is not None
        sweep, self.store = parts
        torch.set_num_threads(threads)
        self.workshop = Workshop(sweep)
        self.reset_config(config)

    def step(self) -> dict[str, Any]:
        """Run the whole trial as one step of Ray Tune."""
        try:
            run_trial(self.store, self.candidate, self.workshop.bench)
        except LoragateError:  # noted in the trial's folder; another attempt would fail alike
            return {"done": True, "failed": True}
        return {"done": True, "failed": False}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial in this actor, so that the loaded base is used again."""
        self.candidate = Candidate.from_record(new_config["trial"])
        return True


@contextmanager
def connected(resources: Resources) -> Iterator[None]:
    """A Ray to run on: the cluster of RAY_ADDRESS, or one of our own.

    Raises:
        ConfigError: if the cluster does not answer.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    require_answer(address)
    cores = max(os.cpu_count() or 1, round(max(resources.workers, 1) * resources.cpus))
    own = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    # a node of our own that was not up within Ray's 30 s is started once more: a busy machine is slow the first time
    for left in (0,) if address else (1, 0):
        try:
            _join(address, {} if address else own)
            break
        except Exception as error:  # Ray raises a bare Exception where a node was not up in time
            ray.shutdown()
            if left:
                continue
            what = f"RAY_ADDRESS={address}: no Ray cluster answers there" if address else "Ray could not be started"
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{what} ({said}); --runner sequential does without Ray") from error
    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails stands in the trial's folder
    try:
        yield
    finally:
        ray.shutdown()


def _join(address: str, own: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **own)


def require_answer(address: str) -> None:
    """Refuse a cluster address at which nothing listens; Ray itself would try for minutes.

    Raises:
        ConfigError: naming the address.
    """
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


def run_on_ray(sweep: Sweep, store: Store, pending: Sequence[Candidate], resources: Resources) -> None:
    """Run the pending trials on Ray; one whose worker dies is started again up to three times.

    Raises:
        ConfigError: if no Ray can be had, or no node has what one trial needs.
    """
    if pending:
        with connected(resources):
            _run(sweep, Store(store.folder.resolve(), store.study), pending, resources)


def _run(sweep: Sweep, store: Store, pending: Sequence[Candidate], resources: Resources) -> None:
    require_room(resources)
    state = store.folder / STATE
    shutil.rmtree(state, ignore_errors=True)
    needs = {"cpu": resources.cpus, **({"gpu": resources.gpus} if resources.gpus else {})}
    trainable: Any = tune.with_parameters(SweepTrial, parts=(sweep, store), threads=max(1, int(resources.cpus)))
    tuner = tune.Tuner(
        tune.with_resources(trainable, needs),
        param_space={"trial": tune.grid_search([one.as_record() for one in pending])},
        tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=resources.workers or None),
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=str(state),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=RETRIES),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
        ),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuner.fit()
    finally:
        shutil.rmtree(state, ignore_errors=True)


def require_room(resources: Resources) -> None:
    """Refuse a trial that no node could ever run.

    Raises:
        ConfigError: saying what was asked for and what there is.
    """
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in nodes):
        found = "; ".join(f"{node.get('CPU', 0):g} CPUs, {node.get('GPU', 0):g} GPUs" for node in nodes) or "no node"
        raise ConfigError(
            f"one trial asks for {resources.cpus:g} CPUs and {resources.gpus:g} GPUs, and Ray has {found}; lower "
            "--gpus-per-trial or --cpus-per-trial"
        )
