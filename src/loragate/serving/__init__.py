"""Serving gated adapters: the vLLM plugin, which multiplies λ into vLLM's LoRA layers, token by token.

Knows the gates, vLLM, and nothing of training, data or generation. Everything of vLLM is imported inside functions, so
that this package can be imported where vLLM is absent.
"""

from loragate.serving.folder import FolderGates, read_folder, read_place
from loragate.serving.versions import SUPPORTED_RANGE, TESTED_VERSIONS, why_unsupported

__all__ = ["SUPPORTED_RANGE", "TESTED_VERSIONS", "FolderGates", "read_folder", "read_place", "why_unsupported"]
