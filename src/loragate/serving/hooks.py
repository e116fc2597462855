"""Where the plugin takes hold of vLLM. Importing this needs vLLM, of a version that `serving.versions` knows to have it all."""

from __future__ import annotations

import json
import os
from typing import Any

import vllm.lora.utils as lora_utils
from vllm.config import VllmConfig
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from loragate.gates.override import virtual_place
from loragate.serving import plugin
from loragate.serving.head import head_class, score_prompts
from loragate.serving.layers import gated_class
from loragate.serving.plugin import take_over


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
    if served := os.environ.get(plugin.ADAPTERS):
        LoRAResolverRegistry.register_resolver("loragate", OverrideResolver(json.loads(served)))
    lora_utils._all_lora_classes = type(lora_utils._all_lora_classes)(
        gated_class(cls) for cls in lora_utils._all_lora_classes
    )
    if current_platform.is_cpu():
        lora_utils.LogitsProcessorWithLoRA = head_class(lora_utils.LogitsProcessorWithLoRA)
        take_over(GPUModelRunner, "_get_prompt_logprobs_dict", score_prompts)
    LRUCacheWorkerLoRAManager._manager_cls = GatedLoRAModelManager
    take_over(WorkerLoRAManager, "_load_adapter", plugin.load)
    take_over(LRUCacheWorkerLoRAManager, "add_adapter", plugin.add)
    take_over(InputProcessor, "_validate_lora", plugin.check_request)
    take_over(BaseServing, "_maybe_get_adapters", plugin.recommend)
    take_over(AsyncLLM, "generate", plugin.warn)
    take_over(VllmConfig, "compute_hash", plugin.compile_key)
