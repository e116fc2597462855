"""Which variants a loaded model can be, and where their answers come from: the model in memory, vLLM, or replicas on Ray."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from loragate.errors import ArtifactError, ConfigError, GateError
from loragate.evaluation.settings import EngineSettings
from loragate.evaluation.variants import ModelVariant, activate_variant, at_temperatures, variants_for
from loragate.gates.attach import gate_modules
from loragate.gates.control import base_unavailable_reason
from loragate.gates.eligibility import examine_adapter, require_gateable
from loragate.gates.override import Override, constant_name
from loragate.gates.strength import overrides_by_module
from loragate.generation import Engine, ShardedEngine, TransformersEngine, VllmEngine
from loragate.generation.vllm_engine import require_gate_plugin
from loragate.models import Loaded, Loading, open_model, open_without_weights, resolve
from loragate.models.folder_gates import read_gates, unreached_note
from loragate.models.loading import DEFAULT_LOADING
from loragate.models.merge import merge_and_save
from loragate.models.source import Kind, ModelRef

MERGED = "merged"
"""Folder, in that of the run, of a DoRA adapter merged into its base."""


def load(model: str, base: str = "", how: Loading = DEFAULT_LOADING, engine: str = "transformers") -> Loaded:
    """The model and tokenizer behind a name; its plain adapter where the gates are off; no weights for vLLM, which loads them.

    Raises:
        ConfigError: for a place that holds no model, or gates where the engine knows none.
    """
    place = resolve(model, base)
    if engine != "vllm":
        return open_model(place, how).detach_inactive_gates()
    loaded = open_without_weights(place, how).detach_inactive_gates()
    if loaded.kind == "gated":
        require_gate_plugin(loaded.names["gated"])
    return loaded


def unavailable_reason(loaded: Loaded, variant: ModelVariant) -> str:
    """Why the model cannot be this variant, in a few words; empty where it can."""
    if variant.weights == "base" and loaded.kind != "base" and loaded.model is not None:
        return base_unavailable_reason(loaded.model)  # vLLM loads the base by itself
    if variant.scale is None and variant.random is None:
        return ""
    place = loaded.model_source
    if place.is_dora:
        return "DoRA"
    if variant.random is not None:
        return "" if loaded.model is not None else "vLLM serves no random gates"
    override = Override(constant=variant.scale, part=variant.part)
    try:
        if loaded.model is None:
            require_gate_plugin(loaded.names["adapter"])
            read_gates(place.folder, override)
        elif loaded.kind == "gated":
            overrides_by_module(override, gate_modules(loaded.model))
        else:
            overrides_by_module(override, [one.path for one in require_gateable(examine_adapter(loaded.model))])
    except ConfigError:
        return "this vLLM serves no gates"
    except (ArtifactError, GateError) as error:
        return " ".join(str(error).split())
    return ""


def find_available_variants(
    loaded: Loaded,
    controls: str = "cheap",
    constants: Sequence[float | str] = (0.5,),
    temperatures: Sequence[float] = (),
) -> tuple[list[ModelVariant], dict[str, str]]:
    """(variants of the model that are scored side by side, {label of a variant that it cannot be: why}); see `variants_for`.

    Args:
        temperatures: of all variants, beside that of the tasks.
    """
    wanted = variants_for(loaded.kind, controls, constants, unreached_note(loaded.model_source))
    left_out = {variant.label: why for variant in wanted if (why := unavailable_reason(loaded, variant))}
    return at_temperatures([one for one in wanted if one.label not in left_out], temperatures), left_out


EngineContext = Callable[[ModelVariant], AbstractContextManager[Engine]]
"""The context in which an engine answers as a variant."""


def make_in_memory_engine(model: Any, tokenizer: Any, kind: Kind, batch_size: int = 64) -> EngineContext:
    """An `EngineContext` on a model in memory, of which every variant is a context; the model is left as it was found."""
    engine = TransformersEngine(model, tokenizer, batch_size=batch_size)

    @contextmanager
    def engine_for(variant: ModelVariant) -> Iterator[Engine]:
        with activate_variant(model, variant, kind):
            yield engine

    return engine_for


class EngineProvider:
    """Called with a variant, the context in which an engine answers as it.

    Args:
        settings: which engine, and how much it may use.
        model, base: as typed; a replica loads them anew.
        loaded: what `load` gave for them.
        folder: of the run, for what vLLM can only serve merged.
    """

    def __init__(self, settings: EngineSettings, model: str, base: str, loaded: Loaded, folder: Path) -> None:
        self.settings, self.model, self.base, self.loaded = settings, model, base, loaded
        self.folder = folder.resolve() / MERGED
        self._kept: tuple[str, VllmEngine] | None = None  # what vLLM has loaded, and the engine
        self._in_memory: EngineContext | None = None
        self._merged = False

    @contextmanager
    def __call__(self, variant: ModelVariant) -> Iterator[Engine]:
        """The engine that answers as `variant`."""
        loaded, size = self.loaded, self.settings.batch_size
        if self.settings.replicas > 1:
            # of each replica; counted here, where the devices are seen, as Ray hides those that were not asked for
            gpus = 0
            if torch.cuda.is_available() and loaded.loading.device != "cpu":
                gpus = self.settings.tensor_parallel if self.settings.engine == "vllm" else 1
            yield ShardedEngine(self.engine_factory(variant), self.settings.replicas, gpus=gpus, batch_size=size)
        elif loaded.model is None:
            base, adapter, override = self._vllm_names(variant)
            # adapters, gates and λ go with each request; only other weights need another engine
            if self._kept is None or self._kept[0] != base:
                self._end_vllm()  # one model in memory at a time
                names = loaded.names
                # made for an adapter also where the first variant is the base: all share its loaded weights
                largest = adapter or (
                    None if loaded.model_source.is_dora else names.get("gated") or names.get("adapter")
                )
                self._kept = base, self._vllm_of(base, largest)()
            yield self._kept[1].with_adapter(adapter, override)
        else:
            self._in_memory = self._in_memory or make_in_memory_engine(
                loaded.model, loaded.tokenizer, loaded.kind, size
            )
            with self._in_memory(variant) as engine:
                yield engine

    def engine_factory(self, variant: ModelVariant) -> Callable[[], Engine]:
        """Makes the engine of a variant from names alone, so that another process can."""
        if self.settings.engine == "vllm":
            return self._vllm_of(*self._vllm_names(variant))
        if variant.gates is not None:
            variant = replace(variant, gates=_resolve_local_path(variant.gates))
        return partial(
            load_replica_engine,
            _resolve_local_path(self.model),
            self.base,
            self.loaded.loading,
            variant,
            self.settings.batch_size,
        )

    def close(self) -> None:
        """End vLLM, where it runs, forget what was kept, and remove what was merged for it."""
        self._in_memory = None
        self._end_vllm()
        if self._merged:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._merged = False

    def _end_vllm(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def _vllm_names(self, variant: ModelVariant) -> tuple[str, str | None, str | None]:
        """(base, adapter or None, override or None) by which vLLM is the variant."""
        names, how = self.loaded.names, self.loaded.loading
        base = _resolve_local_path(names["base"])
        if variant.weights == "base":
            return base, None, None
        if self.loaded.model_source.is_dora:
            if not self._merged:
                shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was broken off
                merge_and_save(ModelRef(names["base"], self.loaded.commit), Path(names["adapter"]), self.folder, how)
                self._merged = True
            return str(self.folder), None, None
        # one λ for all goes over the gated modules, as it does in memory
        acts = "gated" if variant.scale is not None and "gated" in names else variant.weights
        override = variant.override if variant.scale is None else constant_name(variant.scale, variant.part)
        return base, _resolve_local_path(variant.gates or names[acts]), override

    def _vllm_of(self, base: str, adapter: str | None, override: str | None = None) -> partial[VllmEngine]:
        own = base == _resolve_local_path(self.loaded.names["base"])  # and not a merged folder
        return partial(
            VllmEngine,
            base,
            adapter,
            revision=(self.loaded.commit or None) if own else None,
            override=override,
            tokenizer=self.loaded.tokenizer,
            dtype=self.loaded.loading.dtype,
            batch_size=self.settings.batch_size,
            stop_token_ids=self.loaded.stop_token_ids,
            trust_remote_code=self.loaded.loading.trust_remote_code,
            tensor_parallel=self.settings.tensor_parallel,
            gpu_memory_utilization=self.settings.vllm_memory,
        )


def load_replica_engine(
    model: str, base: str, how: Loading, variant: ModelVariant, batch_size: int
) -> TransformersEngine:
    """A model of its own that answers as `variant` for as long as it lives; what a replica makes from names alone."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded = load(model, base, how)
    engine = TransformersEngine(loaded.model, loaded.tokenizer, batch_size=batch_size)
    context = activate_variant(loaded.model, variant, loaded.kind)
    context.__enter__()  # and left with the engine: a replica is this variant for life
    weakref.finalize(engine, context.__exit__, None, None, None)  # which also keeps the context from being collected
    return engine


def _resolve_local_path(place: str) -> str:
    """A folder by its whole path, as another process may start elsewhere; a hub id as it is."""
    return str(Path(place).resolve()) if Path(place).exists() else place
