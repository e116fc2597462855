"""Where the answers of a row come from: the model in memory, vLLM, or several copies of either as replicas on Ray.

Shared by commands that evaluate; `evaluation_inputs.py` says what is loaded, this file who answers with it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loragate.cli.arguments import flag_of
from loragate.cli.evaluation_inputs import load_inputs
from loragate.errors import ConfigError

if TYPE_CHECKING:
    from loragate.models import Loaded

MERGED = "merged"
"""Folder, in that of the run, of a DoRA adapter merged into its base."""


class Engines:
    """Called with a row, the context in which an engine answers as this row.

    Args:
        options: of the command: model, engine, batch_size, replicas, vllm_memory, tensor_parallel and what loading needs.
        loaded: what `load_inputs` gave for them.

    Raises:
        ConfigError: for a number that cannot be used, and where vLLM or Ray is needed and not installed.
    """

    def __init__(self, options: Any, loaded: Loaded) -> None:
        self.options, self.loaded = options, loaded
        self._kept: tuple[str, Any] | None = None  # what vLLM has loaded, and the engine
        for name in ("replicas", "tensor_parallel", "batch_size"):
            if getattr(options, name) < 1:
                raise ConfigError(f"{flag_of(name)} {getattr(options, name)}: give at least 1")
        if not 0 <= options.vllm_memory <= 1:
            raise ConfigError(f"--vllm-memory {options.vllm_memory:g}: expected a share above 0 and at most 1, or 0")
        if options.engine == "vllm":
            from loragate.generation.vllm_engine import require_vllm

            require_vllm()
        if options.replicas > 1:
            from loragate.generation.sharded import require_ray

            require_ray()

    @contextmanager
    def __call__(self, variant: Any) -> Iterator[Any]:
        """The engine that answers as `variant`."""
        if self.options.replicas > 1:
            yield self._sharded(variant)
        elif self.loaded.model is None:
            yield self._vllm(variant)
        else:
            from loragate.evaluation.variants import acting
            from loragate.generation import TransformersEngine

            with acting(self.loaded.model, variant, self.loaded.kind):
                yield TransformersEngine(
                    self.loaded.model, self.loaded.tokenizer, batch_size=int(self.options.batch_size)
                )

    def _vllm(self, variant: Any) -> Any:
        base, adapter, override = self._served(variant)
        if self._kept is None or self._kept[0] != base:
            self.close()  # one model in memory at a time
            names = self.loaded.names
            # made for an adapter also where the first row is the base: the rows share its loaded weights
            room = adapter or (None if self.loaded.place.is_dora else names.get("gated") or names.get("adapter"))
            self._kept = base, self._vllm_of(base, room)()
        return self._kept[1].acting_as(adapter, override)

    def _served(self, variant: Any) -> tuple[str, str | None, str | None]:
        """(base, adapter or None, override or None) by which vLLM is the row."""
        names = self.loaded.names
        base = _anywhere(names["base"])
        if variant.acts == "base":
            return base, None, None
        if self.loaded.place.is_dora:
            return str(self.merged()), None, None
        # one λ for all goes over the gated modules, as it does in memory
        acts = "gated" if variant.constant is not None and "gated" in names else variant.acts
        override = variant.override if variant.constant is None else f"constant={variant.constant!r}"
        return base, _anywhere(variant.gates or names[acts]), override

    def merged(self) -> Path:
        """The folder of the DoRA adapter merged into its base: written into the run folder, or there already."""
        from loragate.conversion.merge import merge_adapter

        names, options = self.loaded.names, self.options
        folder = Path(options.out).resolve() / MERGED
        return merge_adapter(
            names["base"], names["adapter"], folder, dtype=options.dtype, revision=self.loaded.commit or None
        )

    def close(self) -> None:
        """End vLLM, where it runs."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def finish(self) -> None:
        """Remove what only an evaluation that goes on would use."""
        shutil.rmtree(Path(self.options.out) / MERGED, ignore_errors=True)

    def _sharded(self, variant: Any) -> Any:
        from loragate.generation import RayData, ShardedEngine

        executor = RayData(gpus=self._gpus())
        return ShardedEngine(
            self._make(variant), self.options.replicas, executor, batch_size=int(self.options.batch_size)
        )

    def _make(self, variant: Any) -> Callable[[], Any]:
        """Makes the engine of a row from names alone, so that another process can."""
        if self.options.engine != "vllm":
            row = variant if variant.gates is None else replace(variant, gates=_anywhere(variant.gates))
            return partial(RowEngine, self.options, _anywhere(self.options.model), row)
        return self._vllm_of(*self._served(variant))

    def _vllm_of(self, base: str, adapter: str | None, override: str | None = None) -> Callable[[], Any]:
        from loragate.generation import VllmEngine
        from loragate.serving.vllm_server import usual_share

        options = self.options
        own = base == _anywhere(self.loaded.names["base"])  # and not a merged folder
        return partial(
            VllmEngine,
            base,
            adapter,
            revision=(self.loaded.commit or None) if own else None,
            override=override,
            tokenizer=self.loaded.tokenizer,
            dtype=options.dtype,
            batch_size=options.batch_size,
            stop_token_ids=self.loaded.stop_token_ids,
            gpu_memory_utilization=options.vllm_memory or usual_share(),
            tensor_parallel=options.tensor_parallel,
        )

    def _gpus(self) -> int:
        import torch

        if not torch.cuda.is_available() or self.options.device == "cpu":
            return 0
        return int(self.options.tensor_parallel) if self.options.engine == "vllm" else 1


class RowEngine:
    """A model of its own that answers as `variant`; what a replica makes from names alone."""

    def __init__(self, options: Any, model: str, variant: Any) -> None:
        from loragate.generation import TransformersEngine

        self.loaded, self.variant = load_inputs(options, model), variant
        self.engine = TransformersEngine(self.loaded.model, self.loaded.tokenizer, batch_size=options.batch_size)

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        """Generate with the variant's gates and adapter active; arguments as in `Engine.generate`."""
        return self._act(self.engine.generate, *arguments, **keywords)

    def log_likelihoods(self, *arguments: Any, **keywords: Any) -> Any:
        """As `ScoringEngine.log_likelihoods`."""
        return self._act(self.engine.log_likelihoods, *arguments, **keywords)

    def _act(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        from loragate.evaluation.variants import acting

        with acting(self.loaded.model, self.variant, self.loaded.kind):
            return method(*arguments, **keywords)


def _anywhere(place: str) -> str:
    """A folder by its whole path, as another process may start elsewhere; a hub id as it is."""
    return str(Path(place).resolve()) if Path(place).exists() else place
