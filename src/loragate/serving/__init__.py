"""Serving gated adapters: the vLLM plugin, which multiplies λ into vLLM's LoRA layers, token by token.

Knows the gates, how a folder holds them, vLLM, and nothing of training, data or generation. Everything of vLLM is imported
inside functions, so that this package can be imported where vLLM is absent.
"""

from loragate.serving.versions import SUPPORTED_RANGE, TESTED_VERSIONS, why_unsupported

__all__ = ["SUPPORTED_RANGE", "TESTED_VERSIONS", "why_unsupported"]
