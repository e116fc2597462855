"""Where the plugin takes hold of vLLM: what its methods become, and the classes and layers that take the place of its own.

Every place is called by the name under which `serving.plugin` checks it, so that this can be imported, and tested, where vLLM
is absent. What needs PEFT, which vLLM does without, is imported on first use.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from loragate import models
from loragate.errors import LoragateError
from loragate.gates.override import Override, split_folder, virtual_place
from loragate.gates.recommended import generation_settings, recommended_temperature, warn_elsewhere
from loragate.models.source import is_gated, sampling_of
from loragate.serving.layers import gated_class, head_class, score_prompts
from loragate.version import __version__

ADAPTERS_VARIABLE = "LORAGATE_ADAPTERS"
"""Environment variable: JSON {served name: folder}, whose NAME@OVERRIDE are loaded when a client first asks for one."""


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> None:
    """Put `method` in the place of one of vLLM's; it is given the original before what that is given."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    setattr(owner, name, replaced)


def load_adapter(original: Any, self: Any, lora_request: Any) -> Any:
    """`_load_adapter` that reads gates beside the adapter, and refuses them before anything is activated."""
    from loragate.serving.placing import place_gates

    try:
        named, override = split_folder(lora_request.lora_path)
        # a hub id is downloaded
        folder = Path(resolve_name("vllm.lora.utils:get_adapter_absolute_path")(named))
        if override is None and not is_gated(folder):
            _require_unchanged(self, lora_request, "")
            return original(self, lora_request)
        gates = models.read_gates(folder, override)
        _require_unchanged(self, lora_request, gates.digest)
        placed = place_gates(gates, self._adapter_manager)
    except LoragateError as error:
        raise ValueError(str(error)) from error
    moved = copy.copy(lora_request)  # a msgspec struct
    moved.lora_path = str(gates.adapter)
    lora = original(self, moved)
    lora.loragate, lora.loragate_folder = placed, lora_request.lora_path
    return lora


def add_adapter(original: Any, self: Any, lora_request: Any) -> bool:
    """`add_adapter` that notices an id given to another folder; vLLM would go on with the one it has."""
    held = self._adapter_manager.list_adapters().get(lora_request.lora_int_id)
    if held is not None:
        before = getattr(held, "loragate_folder", None)
        changed = before != lora_request.lora_path
        if changed and (before is not None or _gated_folder(lora_request.lora_path)):
            self._adapter_manager.remove_adapter(lora_request.lora_int_id)
    added: bool = original(self, lora_request)
    return added


def validate_request(original: Any, self: Any, lora_request: Any) -> None:
    """The front end's check of a request: what is wrong with a gated folder is this request's error, not the engine's."""
    original(self, lora_request)
    if lora_request is None:
        return
    try:
        found = _gated_folder(lora_request.lora_path)
        if found is None or not found[0].is_dir():
            return
        from loragate.models.folder_gates import stamp

        checked = self.__dict__.setdefault("_loragate_checked", {})
        now, key = stamp(found[0]), (lora_request.lora_name, lora_request.lora_path)
        if checked.get(key) != now:
            _require_unchanged(self, lora_request, models.read_gates(*found).digest)
            checked[key] = now
    except LoragateError as error:
        raise ValueError(str(error)) from error


def recommend_sampling(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """The server's look-up of a request's adapter; what the request leaves open is sampled as the adapter's folder recommends.

    vLLM's own defaults are one for all names, and base and plain adapter keep those.
    """
    lora_request = original(self, request, *args, **kwargs)
    if lora_request is None or getattr(request, "temperature", 0.0) is not None:
        return lora_request
    temperature = recommended_temperature(_sampling(lora_request.lora_path))
    if temperature is not None:
        # vLLM reads no do_sample: greedy decoding is a temperature of 0 there
        for key, value in {**generation_settings(temperature), "temperature": temperature}.items():
            if getattr(request, key, value) is None:
                setattr(request, key, value)
    return lora_request


def warn_of_sampling(
    original: Any, self: Any, prompt: Any, sampling_params: Any, *args: Any, lora_request: Any = None, **kwargs: Any
) -> Any:
    """A server's `generate` that warns where an adapter is sampled at another temperature than its folder recommends."""
    if lora_request is not None:
        record = _sampling(lora_request.lora_path)
        warn_elsewhere(lora_request.lora_name, record, sampling_params.temperature, logging.getLogger("loragate"))
    return original(self, prompt, sampling_params, *args, lora_request=lora_request, **kwargs)


@functools.lru_cache(maxsize=1024)
def _sampling(path: str) -> dict[str, Any]:
    """The record of an adapter's folder as it is served, see `sampling_of`; {} for a folder that will be refused."""
    try:
        named, override = split_folder(path)
        return sampling_of(Path(named).expanduser()) if override is None else {}
    except LoragateError:
        return {}


def compile_cache_key(original: Any, self: Any, *args: Any, **kwargs: Any) -> str:
    """The key of vLLM's compile cache with the plugin in it: a graph made without gates must not be taken for one with."""
    text = f"{original(self, *args, **kwargs)}:loragate {__version__}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def refuse_gates(reason: str, original: Any, self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
    """`_load_adapter` that names the reason when a gated folder comes; plain adapters are vLLM's own affair."""
    if _gated_folder(getattr(lora_request, "lora_path", "")):
        raise ValueError(reason)
    return original(self, lora_request, *args, **kwargs)


def _gated_folder(path: str) -> tuple[Path, Override | None] | None:
    """(folder, override) of a request for which λ has to be computed; None for a plain adapter, and for what is not here."""
    named, override = split_folder(path)
    folder = Path(named).expanduser()
    return (folder, override) if override is not None or is_gated(folder) else None


def _require_unchanged(owner: Any, lora_request: Any, digest: str) -> None:
    """Refuse other gates under a name and folder that were served before.

    The keys of vLLM's prefix cache hold the adapter's name and path, not its values: blocks of the old gates would be
    taken for the new ones'.
    """
    known = owner.__dict__.setdefault("_loragate_digests", {})
    before = known.setdefault((lora_request.lora_name, lora_request.lora_path), digest)
    if before != digest:
        raise LoragateError(
            f"{lora_request.lora_path}: the folder has changed since it was served as {lora_request.lora_name!r}. vLLM's "
            "prefix cache cannot tell the two apart: put the new gates into a folder of their own, or load them under "
            "another name"
        )


def manager_class(lora_manager: type) -> type:
    """vLLM's `LRUCacheLoRAModelManager` that fills the gates of a slot together with its A and B."""

    class GatedLoRAModelManager(lora_manager):
        def activate_adapter(self, lora_id: int) -> bool:
            try:
                activated: bool = super().activate_adapter(lora_id)
                gates = getattr(self._registered_adapters.cache.get(lora_id), "loragate", None)
                if activated and gates is not None:
                    gates.fill(self.modules, self.lora_index_to_id.index(lora_id))
            except Exception:
                # vLLM marks the adapter as active before its slot is filled: left so, it would be served half-loaded
                self.remove_adapter(lora_id)
                raise
            return activated

    return GatedLoRAModelManager


def override_resolver(folders: dict[str, str]) -> Any:
    """NAME@OVERRIDE as a model name that a client may ask for without anybody having loaded it.

    vLLM asks its resolvers for a name it does not know, where loading at run time is allowed (`loragate serve --dynamic`).
    """
    lora_resolver: type = resolve_name("vllm.lora.resolver:LoRAResolver")
    request: Any = resolve_name("vllm.lora.request:LoRARequest")

    class OverrideResolver(lora_resolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            place = virtual_place(lora_name, folders)
            # vLLM replaces the id by a free one
            return None if place is None else request(lora_name, 1, place)

    return OverrideResolver()


REPLACED: dict[str, Callable[..., Any]] = {
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": load_adapter,
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter": add_adapter,
    "vllm.v1.engine.input_processor:InputProcessor._validate_lora": validate_request,
    "vllm.entrypoints.serve.engine.serving:BaseServing._maybe_get_adapters": recommend_sampling,
    "vllm.v1.engine.async_llm:AsyncLLM.generate": warn_of_sampling,
    "vllm.config:VllmConfig.compute_hash": compile_cache_key,
}
"""{a method of vLLM's: what takes its place}."""
REPLACED_ON_CPU: dict[str, Callable[..., Any]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": score_prompts,
}
"""The same where vLLM runs on a CPU, whose runner is a subclass of the one for GPUs; see `serving.layers`."""


def install() -> None:
    """Put gates into vLLM's LoRA layers, and everything that belongs to them."""
    utils: Any = resolve_name("vllm.lora.utils")
    on_cpu = resolve_name("vllm.platforms:current_platform").is_cpu()
    if served := os.environ.get(ADAPTERS_VARIABLE):
        registry: Any = resolve_name("vllm.lora.resolver:LoRAResolverRegistry")
        registry.register_resolver("loragate", override_resolver(json.loads(served)))
    # the classes among which vLLM looks for one that fits a layer
    utils._all_lora_classes = type(utils._all_lora_classes)(gated_class(cls) for cls in utils._all_lora_classes)
    if on_cpu:
        utils.LogitsProcessorWithLoRA = head_class(utils.LogitsProcessorWithLoRA)
    manager: type = resolve_name("vllm.lora.model_manager:LRUCacheLoRAModelManager")
    worker: Any = resolve_name("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager")
    worker._manager_cls = manager_class(manager)
    for place, method in {**REPLACED, **(REPLACED_ON_CPU if on_cpu else {})}.items():
        owner, _, name = place.rpartition(".")
        replace_method(resolve_name(owner), name, method)
