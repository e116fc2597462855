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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, LoragateError
from loragate.sweep.plan import SweepPlan, Trial
from loragate.sweep.trials import Materials, TrialRunner

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


class SweepTrial(tune.Trainable):
    """One worker; Tune gives it one trial after the other."""

    def setup(
        self, config: dict[str, Any], parts: tuple[Materials, SweepPlan, str] | None = None, threads: int = 1
    ) -> None:
        """Called once per worker."""
        import torch

        assert parts is not None
        materials, plan, folder = parts
        torch.set_num_threads(threads)
        self.runner = TrialRunner(materials, plan, Path(folder))
        self.trial = Trial(**config["trial"])

    def step(self) -> dict[str, Any]:
        """The whole trial."""
        try:
            self.runner.run(self.trial)
        except LoragateError:  # noted in the trial's folder; another attempt would fail alike
            return {"done": True, "failed": True}
        return {"done": True, "failed": False}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """The next trial on the same base."""
        self.trial = Trial(**new_config["trial"])
        return True


@contextmanager
def connected(resources: Resources) -> Iterator[bool]:
    """A Ray to run on: the cluster of RAY_ADDRESS, or one of our own; yields whether it is a cluster.

    Raises:
        ConfigError: if the cluster does not answer.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    require_answer(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if address:
                ray.init(address=address, **quiet)
            else:
                cores = max(os.cpu_count() or 1, round(max(resources.workers, 1) * resources.cpus))
                ray.init(
                    address="local",
                    num_cpus=cores,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    **quiet,
                )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            what = f"RAY_ADDRESS={address}: no Ray cluster answers there" if address else "Ray could not be started"
            raise ConfigError(f"{what} ({str(error).splitlines()[0]}); --runner sequential does without Ray") from error
    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails stands in the trial's folder
    try:
        yield bool(address)
    finally:
        ray.shutdown()


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


def run_on_ray(
    materials: Materials, plan: SweepPlan, folder: Path, pending: Sequence[Trial], resources: Resources
) -> None:
    """Run the pending trials on the connected Ray; one whose worker dies is started again up to three times.

    Raises:
        ConfigError: if no node has what one trial needs.
    """
    if not pending:
        return
    require_room(resources)
    state = folder.resolve() / STATE
    shutil.rmtree(state, ignore_errors=True)
    needs = {"cpu": resources.cpus, **({"gpu": resources.gpus} if resources.gpus else {})}
    parts = (materials, plan, str(folder.resolve()))
    trainable: Any = tune.with_parameters(SweepTrial, parts=parts, threads=max(1, int(resources.cpus)))
    tuner = tune.Tuner(
        tune.with_resources(trainable, needs),
        param_space={"trial": tune.grid_search([asdict(trial) for trial in pending])},
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
