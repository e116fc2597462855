"""Where the plugin takes hold of vLLM: what the methods of its workers become, and the classes and layers put in their place.

What becomes of a request before it reaches a worker is in `serving.frontend`.

Every place is called by the name under which `serving.plugin` checks it, so that this can be imported, and tested, where vLLM
is absent. What needs PEFT, which vLLM does without, is imported on first use.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from loragate import models
from loragate.errors import LoragateError
from loragate.gates.override import parse_slot_override, split_folder
from loragate.models.source import is_gated
from loragate.serving import frontend
from loragate.serving.frontend import require_unchanged, split_gated_path
from loragate.serving.layers import NO_LIMITS, gated_class, head_class, score_prompts, token_limits
from loragate.version import __version__


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

    moved, placed = copy.copy(lora_request), None  # a msgspec struct
    try:
        named, override = split_folder(lora_request.lora_path)
        moved.lora_path = named
        # a hub id is downloaded
        folder = Path(resolve_name("vllm.lora.utils:get_adapter_absolute_path")(named))
        part = override is not None and override.part is not None
        if part or is_gated(folder):
            # what else lies over λ comes with each request
            gates = models.read_gates(folder, override if part else None)
            require_unchanged(self, moved, gates.digest)
            placed = place_gates(gates, self._adapter_manager)
            moved.lora_path = str(gates.adapter)
        else:
            require_unchanged(self, moved, "")
            if override is not None:
                models.read_gates(folder, override)
    except LoragateError as error:
        raise ValueError(str(error)) from error
    lora = original(self, moved)
    lora.loragate, lora.loragate_folder = placed, parse_slot_override(lora_request.lora_path)[0]
    return lora


def add_adapter(original: Any, self: Any, lora_request: Any) -> bool:
    """`add_adapter` that notices an id given to another folder; vLLM would go on with the one it has."""
    held = self._adapter_manager.list_adapters().get(lora_request.lora_int_id)
    if held is not None:
        before = getattr(held, "loragate_folder", None)
        if before is not None and before != parse_slot_override(lora_request.lora_path)[0]:
            self._adapter_manager.remove_adapter(lora_request.lora_int_id)
    added: bool = original(self, lora_request)
    return added


@functools.lru_cache(maxsize=4096)
def limits_of(path: str) -> tuple[float, float]:
    """(least λ, most λ) that an adapter's path lays over its λ."""
    override = parse_slot_override(path)[1]
    return NO_LIMITS if override is None else override.limits


def fill_limits(manager: Any, lora_requests: list[Any], tokens: Any) -> None:
    """Tell the layers of a worker the limits of λ of a batch: its requests' adapters in order, and the tokens of each."""
    limits = [NO_LIMITS if one is None else limits_of(one.lora_path) for one in lora_requests]
    for punica in manager._adapter_manager.punica_wrapper_mapping.values():
        token_limits(punica).fill(limits, tokens)


def set_active(original: Any, self: Any, input_batch: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
    """`set_active_loras` of vLLM's first model runner, with the strengths of the batch."""
    adapters = [self.requests[name].lora_request for name in input_batch.req_ids]
    fill_limits(self.lora_manager, adapters, num_scheduled_tokens)
    return original(self, input_batch, num_scheduled_tokens, *args, **kwargs)


def keep_batch(original: Any, self: Any, req_ids: Any, idx_mapping: Any, num_scheduled_tokens: Any) -> Any:
    """`make_lora_inputs` of the second model runner, which alone knows the batch; see `set_kept_active`."""
    self.loragate_batch = [self.lora_requests.get(name) for name in req_ids], num_scheduled_tokens
    return original(self, req_ids, idx_mapping, num_scheduled_tokens)


def set_kept_active(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`_set_active_loras` of both model runners, with the strengths of the batch that the second one has just made up."""
    state = getattr(self, "lora_state", None)
    if (batch := getattr(state, "loragate_batch", None)) is not None:
        fill_limits(self.lora_manager, *batch)
        self.lora_state.loragate_batch = None
    return original(self, *args, **kwargs)


def hide_discarded_generators(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`sample_tokens` on a CPU that draws without a request's own seed where only a part of its prompt was read.

    The token is dropped, and vLLM 0.32 would then wind the request's generator back, which a CPU's cannot: its engine would end.
    """
    generators, dropped = self.input_batch.generators, self.discard_request_mask.np
    held = {row: generators.pop(row) for row in list(generators) if dropped[row]}
    try:
        return original(self, *args, **kwargs)
    finally:
        generators.update(held)


def compile_cache_key(original: Any, self: Any, *args: Any, **kwargs: Any) -> str:
    """The key of vLLM's compile cache with the plugin in it: a graph made without gates must not be taken for one with."""
    text = f"{original(self, *args, **kwargs)}:loragate {__version__}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def refuse_gates(reason: str, original: Any, self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
    """`_load_adapter` that names the reason when a gated folder comes; plain adapters are vLLM's own affair."""
    if split_gated_path(getattr(lora_request, "lora_path", "")):
        raise ValueError(reason)
    return original(self, lora_request, *args, **kwargs)


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


REPLACED: dict[str, Callable[..., Any]] = {
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter": load_adapter,
    "vllm.lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter": add_adapter,
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.set_active_loras": set_active,
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras": set_kept_active,
    "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs": keep_batch,
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": frontend.apply_fields,
    "vllm.v1.engine.input_processor:InputProcessor._validate_lora": frontend.validate_request,
    "vllm.entrypoints.serve.engine.serving:BaseServing._check_model": frontend.check_model,
    "vllm.entrypoints.serve.engine.serving:BaseServing._maybe_get_adapters": frontend.find_adapter,
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter": frontend.load_adapter,
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": frontend.add_adapter,
    "vllm.v1.engine.async_llm:AsyncLLM.encode": frontend.answer,
    "vllm.v1.engine.async_llm:AsyncLLM.generate": frontend.answer,
    "vllm.config:VllmConfig.compute_hash": compile_cache_key,
}
"""{a method of vLLM's: what takes its place}."""
REPLACED_ON_CPU: dict[str, Callable[..., Any]] = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": score_prompts,
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": hide_discarded_generators,
}
"""The same where vLLM runs on a CPU, whose runner is a subclass of the one for GPUs; see `serving.layers`."""


def install() -> None:
    """Put gates into vLLM's LoRA layers, and everything that belongs to them."""
    utils: Any = resolve_name("vllm.lora.utils")
    on_cpu = resolve_name("vllm.platforms:current_platform").is_cpu()
    # the classes among which vLLM looks for one that fits a layer
    utils._all_lora_classes = type(utils._all_lora_classes)(gated_class(cls) for cls in utils._all_lora_classes)
    if on_cpu:
        utils.LogitsProcessorWithLoRA = head_class(utils.LogitsProcessorWithLoRA)
    manager: type = resolve_name("vllm.lora.model_manager:LRUCacheLoRAModelManager")
    worker: Any = resolve_name("vllm.lora.worker_manager:LRUCacheWorkerLoRAManager")
    worker._manager_cls = manager_class(manager)
    frontend.open_log()
    frontend.add_routes(resolve_name("vllm.entrypoints.openai.models.api_router:router"))
    for place, method in {**REPLACED, **(REPLACED_ON_CPU if on_cpu else {})}.items():
        owner, _, name = place.rpartition(".")
        replace_method(resolve_name(owner), name, method)
