"""One list of prompts, several engines: data parallel generation.

A sample depends on the run seed, its question and its index alone, so the (question, sample) pairs can be dealt out to
any number of engines that hold the same model. `ShardedEngine` deals them out and collects; an executor says where the
engines live: `RayData` in a pool of Ray actors over the devices of one or many machines.
Nothing here knows which engine it is.

Ray Data's own stage for vLLM is not used: its rows carry no finish reason, and what one engine draws would take another
way than what many draw. Ray is imported here and nowhere else in this room.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loragate import errors
from loragate.errors import ConfigError, LoragateError
from loragate.generation.engine import Continuation, Engine, OnProgress, Sample, collect
from loragate.generation.requests import Prompts, pending_rows, split_by_question
from loragate.generation.sampling import SamplingConfig

Rows = list[tuple[int, int]]
"""(question, sample) pairs that are drawn together."""


@dataclass(frozen=True)
class Job:
    """All that a replica needs beside the rows: how to make its engine, every prompt and how to sample."""

    make_engine: Callable[[], Engine]
    prompts: Prompts
    config: SamplingConfig

    def draw(self, engine: Engine, rows: Rows) -> list[Sample]:
        """The samples of these rows, numbered as in the whole job."""
        return engine.generate(self.prompts, self.config, pending=rows)


Executor = Callable[[Job, Sequence[Rows], int], Iterator[list[Sample]]]
"""Runs the parts of a job on so many engines; yields the samples of each part as soon as it is drawn, in any order."""


class ShardedEngine:
    """Sample with several engines at once; the samples are those of one engine.

    `make_engine` returns an engine and is called once for each of the `shards` replicas, where the replica lives; for
    Ray it must survive a copy to another process, so it loads the model instead of holding one. The replicas live as
    long as one call of `generate`. `batch_size` is the largest number of prompts handed to a replica, and to
    `on_samples`, together.

    The guarantee of equal samples is that of the engine: exact for equal logits (see `sampling`).
    """

    def __init__(
        self, make_engine: Callable[[], Engine], shards: int, executor: Executor, *, batch_size: int = 256
    ) -> None:
        for name, value in (("shards", shards), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1.")
        self.make_engine = make_engine
        self.shards = shards
        self.executor = executor
        self.batch_size = batch_size

    def log_likelihoods(
        self, pairs: Sequence[Continuation], on_progress: OnProgress | None = None
    ) -> list[tuple[float, bool]]:
        """See `ScoringEngine.log_likelihoods`; one engine, made here, scores them all, as they cost a token each."""
        engine: Any = self.make_engine()
        try:
            found: list[tuple[float, bool]] = engine.log_likelihoods(pairs, on_progress)
            return found
        finally:
            getattr(engine, "close", lambda: None)()

    def generate(
        self,
        prompts: Prompts,
        config: SamplingConfig,
        on_progress: OnProgress | None = None,
        *,
        pending: Collection[tuple[int, int]] | None = None,
        on_samples: Callable[[Sequence[Sample]], None] | None = None,
    ) -> list[Sample]:
        """Return the samples ordered by (question, sample); see `Engine.generate`.

        Raises what the engines raise, and `LoragateError` when a replica was lost and samples are missing.
        """
        rows = pending_rows(len(prompts), config.samples, pending)
        questions = len({question for question, _ in rows})
        # every replica gets a part, and none more than its share
        parts = split_by_question(rows, min(self.batch_size, max(1, -(-questions // self.shards))))
        drawn = self.executor(Job(self.make_engine, prompts, config), parts, self.shards)
        samples = collect(drawn, len(rows), on_progress, on_samples)
        if [(sample.question, sample.sample) for sample in samples] != rows:
            raise LoragateError(
                f"{len(rows)} samples were to be drawn, but the {self.shards} replicas returned {len(samples)}; draw the "
                "missing ones again."
            )
        return samples


@dataclass(frozen=True)
class RayData:
    """The executor on a Ray cluster: Ray Data maps the parts over a pool of actors, each with an engine of its own.

    It joins the cluster that the RAY_ADDRESS variable names or else starts Ray on this machine. Every machine needs the
    same packages and files.

    Attributes:
        gpus: devices reserved for each engine; for `VllmEngine` as many as its `tensor_parallel`.
        cpus: processor cores reserved for each engine.

    Raises `ConfigError` when Ray is not installed or the cluster is too small for the replicas.
    """

    gpus: float = 1.0
    cpus: float = 1.0

    def __call__(self, job: Job, parts: Sequence[Rows], replicas: int) -> Iterator[list[Sample]]:
        """Yield the samples of each part as soon as it is drawn, in any order."""
        if not parts:
            return
        ray = require_ray()
        logging.getLogger("ray.data").setLevel(logging.WARNING)  # a plan and a summary of every call, otherwise
        if not ray.is_initialized():
            # without an address Ray would join what a file in a folder of /tmp names, which any user can write
            address = os.environ.get("RAY_ADDRESS") or "local"
            ray.init(address=address, logging_level="warning", log_to_driver=False)
        self._require_room(ray.cluster_resources(), replicas)
        context = ray.data.DataContext.get_current()
        shown, context.enable_progress_bars = context.enable_progress_bars, False
        try:
            # one block per part: Ray Data hands out blocks, and a part is what a replica draws at a time
            items = ray.data.from_items([{"rows": json.dumps(rows)} for rows in parts], override_num_blocks=len(parts))
            drawn = items.map_batches(
                _Replica,
                fn_constructor_args=(job,),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=min(replicas, len(parts))),
                num_gpus=self.gpus,
                num_cpus=self.cpus,
            )
            for row in drawn.iter_rows():
                yield samples_of(row["drawn"])
        finally:
            context.enable_progress_bars = shown

    def _require_room(self, resources: dict[str, float], replicas: int) -> None:
        for name, each in (("GPU", self.gpus), ("CPU", self.cpus)):
            if replicas * each > resources.get(name, 0):
                raise ConfigError(
                    f"{replicas} shards with {each:g} {name} each do not fit into a Ray cluster of "
                    f"{resources.get(name, 0):g} {name}; give fewer shards or add machines."
                )


class _Replica:
    """What a Ray actor holds: one engine, made where the actor runs.

    An error that is addressed to a person comes back as a value, since Ray would hide it in its own.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.engine: Engine | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        (text,) = batch["rows"]
        try:
            if self.engine is None:
                self.engine = self.job.make_engine()
            samples = self.job.draw(self.engine, [(question, sample) for question, sample in json.loads(text)])
            drawn: dict[str, Any] = {"samples": [dataclasses.asdict(sample) for sample in samples]}
        except LoragateError as error:
            drawn = {"error": [type(error).__name__, str(error)]}
        return {"drawn": [json.dumps(drawn, allow_nan=False)]}


def samples_of(drawn: str) -> list[Sample]:
    """What a replica returned; raises the error that it met."""
    found = json.loads(drawn)
    if "error" in found:
        name, message = found["error"]
        raise getattr(errors, name, LoragateError)(message)
    return [Sample(**{**fields, "token_ids": tuple(fields["token_ids"])}) for fields in found["samples"]]


def require_ray() -> Any:
    """Ray; raises `ConfigError` when it is not installed."""
    try:
        import ray.data
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ray":
            raise
        raise ConfigError("Ray is not installed; run: pip install loragate[sweep]") from None
    return ray
