"""Serving gated adapters: the vLLM plugin, which multiplies λ into vLLM's LoRA layers, and the servers of `loragate serve`.

`server` is the call: vLLM's own server (`vllm_server`), or ours without vLLM (`http_app` over `backend`). The plugin's files
(`plugin`, `hooks`, `layers`, `head`, `placing`) run inside vLLM: they know the gates and how a folder holds them, and nothing of
training, data or generation. `placing` imports vLLM and is imported there alone; everything else can be imported where vLLM is
absent.
"""

from loragate.serving.plugin import SUPPORTED_RANGE, TESTED_VERSIONS, why_unsupported

__all__ = ["SUPPORTED_RANGE", "TESTED_VERSIONS", "why_unsupported"]
