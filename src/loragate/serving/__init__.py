"""Serving gated adapters in vLLM: the plugin, which multiplies λ into its LoRA layers, and `loragate serve`, which starts it.

The plugin's files (`plugin`, `hooks`, `layers`, `placing`) run inside vLLM: they know the gates and how a folder holds them, and
nothing of training, data or generation. `placing` imports vLLM and is imported there alone; everything else can be imported
where vLLM is absent. `vllm_server` launches vLLM's own server, `verify` compares any server with
transformers. `explore` is the explorer's page over a model in memory.
"""

import lazy_loader

from loragate.serving.plugin import SUPPORTED_RANGE, TESTED_VERSIONS, why_unsupported

__getattr__, _, _ = lazy_loader.attach(__name__, submodules=["verify"])
__all__ = ["SUPPORTED_RANGE", "TESTED_VERSIONS", "verify", "why_unsupported"]
