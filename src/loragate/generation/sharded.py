"""One list of prompts, several engines: data parallel generation.

A sample depends on the run seed, its question and its index alone, so the (question, sample) pairs can be dealt out to
any number of engines that hold the same model. `ShardedEngine` deals them out to a pool of Ray actors over the devices of one
or many machines, and collects. Nothing here knows which engine it is.

Ray Data's own stage for vLLM is not used: its rows carry no finish reason, and what one engine draws would take another
way than what many draw. Ray is imported here and nowhere else in generation.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loragate import errors
from loragate.errors import ConfigError, LoragateError
from loragate.generation.engine import Continuation, Engine, OnProgress, Prompts, Sample, split_by_question
from loragate.generation.sampling import SamplingConfig
from loragate.signals import keep_sigterm_handler


class ShardedEngine(Engine):
    """Sample with several engines at once; the samples are those of one engine.

    The guarantee of equal samples is that of the engine: exact for equal logits (see `sampling`). The replicas live as long as
    one call of `generate`. It joins the Ray cluster that the RAY_ADDRESS variable names or else starts Ray on this machine;
    every machine needs the same packages and files.

    Args:
        make_engine: returns an engine; called once for each replica, where the replica lives. It must survive a copy to another
            process, so it loads the model instead of holding one.
        shards: number of replicas.
        gpus: devices reserved for each; for `VllmEngine` as many as its `tensor_parallel`. Each also has a processor core.
        batch_size: the largest number of prompts handed to a replica, and to `on_samples`, together.
    """

    def __init__(
        self, make_engine: Callable[[], Engine], shards: int, *, gpus: float = 1.0, batch_size: int = 256
    ) -> None:
        self.make_engine = make_engine
        self.shards = shards
        self.gpus = gpus
        self.batch_size = batch_size

    def log_likelihoods(
        self, pairs: Sequence[Continuation], on_progress: OnProgress | None = None
    ) -> list[tuple[float, bool]]:
        """See `Engine.log_likelihoods`; one engine, made here, scores them all, as they cost a token each."""
        engine = self.make_engine()
        try:
            return engine.log_likelihoods(pairs, on_progress)
        finally:
            engine.close()

    def draw(
        self, prompts: Prompts, config: SamplingConfig, rows: list[tuple[int, int]]
    ) -> Generator[list[Sample], None, None]:
        """See `Engine.draw`.

        Raises what the engines raise, `ConfigError` when Ray is not installed or the cluster is too small for the replicas, and
        `LoragateError` when a replica was lost and samples are missing.
        """
        questions = len({question for question, _ in rows})
        # every replica gets a part, and none more than its share; the division rounds up
        parts = split_by_question(rows, min(self.batch_size, max(1, -(-questions // self.shards))))
        returned = 0
        for batch in self._drawn(prompts, config, parts) if parts else ():
            returned += len(batch)
            yield batch
        if returned != len(rows):  # a part that is missing must not look like a finished run
            raise LoragateError(
                f"{len(rows)} samples were to be drawn, but the {self.shards} replicas returned {returned}; draw the "
                "missing ones again."
            )

    def _drawn(
        self, prompts: Prompts, config: SamplingConfig, parts: Sequence[list[tuple[int, int]]]
    ) -> Iterator[list[Sample]]:
        """The samples of each part as soon as it is drawn, in any order."""
        ray = require_ray()
        logging.getLogger("ray.data").setLevel(logging.WARNING)  # a plan and a summary of every call, otherwise
        if not ray.is_initialized():
            # without an address Ray would join what a file in a folder of /tmp names, which any user can write
            address = os.environ.get("RAY_ADDRESS") or "local"
            with keep_sigterm_handler():
                ray.init(address=address, logging_level="warning", log_to_driver=False)
        resources = ray.cluster_resources()
        for name, each in (("GPU", self.gpus), ("CPU", 1.0)):
            if self.shards * each > resources.get(name, 0):
                raise ConfigError(
                    f"{self.shards} shards with {each:g} {name} each do not fit into a Ray cluster of "
                    f"{resources.get(name, 0):g} {name}; give fewer shards or add machines."
                )
        context = ray.data.DataContext.get_current()
        shown, context.enable_progress_bars = context.enable_progress_bars, False
        try:
            # one block per part: Ray Data hands out blocks, and a part is what a replica draws at a time
            items = ray.data.from_items([{"rows": json.dumps(rows)} for rows in parts], override_num_blocks=len(parts))
            drawn = items.map_batches(
                Replica,
                fn_constructor_args=(self.make_engine, prompts, config),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=min(self.shards, len(parts))),
                num_gpus=self.gpus,
                num_cpus=1.0,
            )
            for row in drawn.iter_rows():
                yield samples_of(row["drawn"])
        finally:
            context.enable_progress_bars = shown


@dataclass
class Replica:
    """What a Ray actor holds: one engine, made where the actor runs, every prompt and how to sample.

    An error that is addressed to a person comes back as a value, since Ray would hide it in its own.
    """

    make_engine: Callable[[], Engine]
    prompts: Prompts
    config: SamplingConfig
    engine: Engine | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """The samples of the (question, sample) pairs that are drawn together, numbered as in the whole list."""
        (text,) = batch["rows"]
        try:
            if self.engine is None:
                self.engine = self.make_engine()
            rows = [(question, sample) for question, sample in json.loads(text)]
            samples = self.engine.generate(self.prompts, self.config, pending=rows)
            drawn: dict[str, Any] = {"samples": [dataclasses.asdict(sample) for sample in samples]}
        except LoragateError as error:
            drawn = {"error": [type(error).__name__, str(error)]}
        # one text for Arrow, which would guess at the types of lists and of None
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
        raise ConfigError('Ray is not installed; run: pip install ".[sweep]" in a checkout') from None
    return ray
