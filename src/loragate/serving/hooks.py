"""Where the plugin takes hold of vLLM. Importing this needs vLLM, of a version that `serving.versions` knows to have it all."""

from __future__ import annotations

import json
import os
from typing import Any

import vllm.lora.utils as lora_utils
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from loragate.gates.override_names import virtual_place
from loragate.serving.head import head_class, scoring_prompts
from loragate.serving.layers import gated_class
from loragate.serving.plugin import ADAPTERS, adding, hashing, loading, recommending, validating, warning


class GatedLoRAModelManager(LRUCacheLoRAModelManager):
    """Fills the gates of a slot together with its A and B."""

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


class OverrideResolver(LoRAResolver):
    """NAME@OVERRIDE as a model name that a client may ask for without anybody having loaded it.

    vLLM asks its resolvers for a name it does not know, where loading at run time is allowed (`loragate serve --dynamic`).
    """

    def __init__(self, folders: dict[str, str]) -> None:
        self.folders = folders

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        place = virtual_place(lora_name, self.folders)
        # vLLM replaces the id by a free one
        return None if place is None else LoRARequest(lora_name, 1, place)


def install() -> None:
    """Put gates into vLLM's LoRA layers, and everything that belongs to them."""
    if served := os.environ.get(ADAPTERS):
        LoRAResolverRegistry.register_resolver("loragate", OverrideResolver(json.loads(served)))
    lora_utils._all_lora_classes = type(lora_utils._all_lora_classes)(
        gated_class(cls) for cls in lora_utils._all_lora_classes
    )
    if current_platform.is_cpu():
        lora_utils.LogitsProcessorWithLoRA = head_class(lora_utils.LogitsProcessorWithLoRA)
        GPUModelRunner._get_prompt_logprobs_dict = scoring_prompts(GPUModelRunner._get_prompt_logprobs_dict)
    LRUCacheWorkerLoRAManager._manager_cls = GatedLoRAModelManager
    WorkerLoRAManager._load_adapter = loading(
        WorkerLoRAManager._load_adapter, lora_utils.get_adapter_absolute_path, lambda: get_pp_group().world_size == 1
    )
    LRUCacheWorkerLoRAManager.add_adapter = adding(LRUCacheWorkerLoRAManager.add_adapter)
    InputProcessor._validate_lora = validating(InputProcessor._validate_lora)
    BaseServing._maybe_get_adapters = recommending(BaseServing._maybe_get_adapters)
    AsyncLLM.generate = warning(AsyncLLM.generate)
    VllmConfig.compute_hash = hashing(VllmConfig.compute_hash)
