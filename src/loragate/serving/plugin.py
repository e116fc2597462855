"""The vLLM plugin: `LoRARequest(name, id, GATED_FOLDER)` and `--lora-modules name=GATED_FOLDER` are served with gates.

vLLM calls `register` in every process it starts. Linear LoRA layers get gates beside A and B; loading an adapter reads
the gates that lie beside it; activating it fills its slot. Plain adapters, and the base, keep their numbers. On a CPU two faults
of vLLM's are mended for all requests: in the vocabulary's head (`serving.layers`), and with seeds of prompts read in parts, which
end its engine (`serving.hooks`). Where the plugin cannot work (another vLLM version, a hook that moved) gated folders are refused
with the reason and everything else is left alone. Without the plugin, vLLM finds no adapter at the top of a gated folder and
refuses it too.

Here is what decides whether gates can be served: first the version is asked, then each place for what is relied upon.
`serving.hooks` has what takes the place of vLLM's own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import re
from pkgutil import resolve_name
from types import SimpleNamespace

from loragate.version import __version__

logger = logging.getLogger("vllm.loragate")
MARK = "loragate_gates"
"""Attribute of vLLM's WorkerLoRAManager: "" where gates are served, otherwise the reason why not."""
TESTED_VERSIONS = ("0.32.0",)
"""vLLM versions that the tests of this release ran with."""
SUPPORTED_RANGE = ">=0.32,<0.34"
"""The versions in which gates are served. 0.33, which has no build for a CPU, was read and not run: scripts/vllm_contract.py."""
_LOWEST, _BELOW = (0, 32), (0, 34)

_MANAGERS, _PUNICA = "vllm.lora.worker_manager:", "vllm.lora.punica_wrapper.punica_base:PunicaWrapperBase."
_KEYS = "vllm.v1.core.kv_cache_utils:_gen_lora_extra_hash_keys"
HOOKS = {
    "vllm.lora.utils:from_layer": "layer max_loras lora_config packed_modules_list",
    "vllm.lora.utils:get_adapter_absolute_path": "lora_path",
    "vllm.lora.utils:parse_fine_tuned_lora_name": "name weights_mapper",
    "vllm.lora.layers.base:BaseLayerWithLoRA.set_mapping": "punica_wrapper",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.create_lora_weights": "max_loras lora_config",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.reset_lora": "index",
    f"{_PUNICA}add_shrink": "y x lora_a_stacked scale",
    f"{_PUNICA}add_expand": "y x lora_b_stacked output_slices offset_start add_inputs",
    f"{_PUNICA}add_lora_linear": "y x lora_a_stacked lora_b_stacked scale output_slices",
    f"{_PUNICA}add_lora_logits": "y x lora_a_stacked lora_b_stacked scale",
    "vllm.lora.utils:LogitsProcessorWithLoRA.set_mapping": "punica_wrapper",
    "vllm.lora.utils:LogitsProcessorWithLoRA.set_lora": "index lora_a lora_b",
    "vllm.lora.utils:LogitsProcessorWithLoRA.reset_lora": "index",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict": "hidden_states num_scheduled_tokens",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "",
    f"{_MANAGERS}WorkerLoRAManager._load_adapter": "lora_request",
    f"{_MANAGERS}LRUCacheWorkerLoRAManager.add_adapter": "lora_request",
    "vllm.lora.model_manager:LRUCacheLoRAModelManager.activate_adapter": "lora_id",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.set_active_loras": "input_batch num_scheduled_tokens",
    "vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin._set_active_loras": "token_lora_mapping lora_requests",
    "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs": "req_ids idx_mapping num_scheduled_tokens",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": "params lora_request",
    "vllm.v1.engine.input_processor:InputProcessor._validate_lora": "lora_request",
    "vllm.v1.engine.async_llm:AsyncLLM.add_lora": "lora_request",
    "vllm.v1.engine.async_llm:AsyncLLM.encode": "prompt pooling_params request_id lora_request",
    "vllm.v1.engine.async_llm:AsyncLLM.generate": "prompt sampling_params request_id lora_request",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.load_lora_adapter": "request",
    "vllm.entrypoints.openai.models.serving:OpenAIServingModels.show_available_models": "",
    "vllm.entrypoints.openai.models.api_router:attach_router": "app",
    "vllm.entrypoints.serve.engine.serving:BaseServing._check_model": "request",
    "vllm.entrypoints.serve.engine.serving:BaseServing._maybe_get_adapters": "request",
    _KEYS: "request",
    "vllm.config:VllmConfig.compute_hash": "",
    "vllm.distributed:get_pp_group": "",
}
"""{what the plugin calls or replaces, as module:name: the parameters that it relies upon}."""


def vllm_version() -> str:
    """The version of the installed vLLM, such as "0.32.0" or "0.32.0+cpu"; "" where there is none."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def why_unsupported(version: str) -> str | None:
    """None for a version that serves gates, otherwise a sentence that names the range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and _LOWEST <= (int(found[1]), int(found[2])) < _BELOW:
        return None
    return (
        f"vLLM {version or 'of unknown version'} cannot serve gates with this loragate: it supports vllm{SUPPORTED_RANGE} "
        f"(tested: {', '.join(TESTED_VERSIONS)}). Install such a version, use transformers (loragate generate, or --engine "
        "transformers of an evaluation), or serve the plain adapter in the folder's adapter/"
    )


def missing_hook() -> str | None:
    """None when vLLM has everything that the plugin holds on to, otherwise the first that is gone or different."""
    for place, parameters in HOOKS.items():
        shown = place.replace(":", ".")
        try:
            known = inspect.signature(resolve_name(place)).parameters
        except AttributeError:
            return f"{shown} is gone"
        if lost := [name for name in parameters.split() if name not in known]:
            return f"{shown} takes no {lost[0]} any more"
    requests = [SimpleNamespace(lora_name="name", lora_int_id=1, lora_path=path) for path in ("folder", "folder@unit")]
    keys = [resolve_name(_KEYS)(SimpleNamespace(lora_request=request)) for request in requests]
    if keys[0] == keys[1]:
        return "the keys of its prefix cache hold no adapter's path any more, so that two strengths would share blocks"
    return None


def register() -> None:
    """Entry point of `vllm.general_plugins`; may be called many times, and never raises."""
    try:
        from loragate.serving.hooks import install, refuse_gates, replace_method

        manager = resolve_name(f"{_MANAGERS}WorkerLoRAManager")
        if hasattr(manager, MARK):
            return
        reason = why_unsupported(vllm_version())
        if reason is None and (hook := missing_hook()) is not None:
            reason = (
                f"this build of vLLM {vllm_version()} differs from the one that loragate {__version__} knows ({hook}); "
                "gates cannot be served in it"
            )
        if reason is None:
            install()
        elif hasattr(manager, "_load_adapter"):
            replace_method(manager, "_load_adapter", functools.partial(refuse_gates, reason))
        setattr(manager, MARK, reason or "")
        package = logging.getLogger("loragate")
        if package.level == logging.NOTSET:
            # the root of a server that `loragate serve` starts shows errors alone, and the package's warnings would be lost
            package.setLevel(logging.WARNING)
    except Exception:
        # an exception here would end vLLM for those who serve no gates; without hooks it refuses gated folders itself
        logger.exception("the loragate plugin could not be set up; gated adapters will be refused")
