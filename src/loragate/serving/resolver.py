"""`NAME@OVERRIDE` as a model name that a client may ask vLLM for without anybody having loaded it.

vLLM asks its LoRA resolvers for a name it does not know, where loading at run time is allowed (`loragate serve --dynamic`).
This one knows the folders the server was started with, and answers for their names with an override behind them.
"""

from __future__ import annotations

import json

from loragate.errors import ConfigError, LoragateError
from loragate.gates.override_names import split_name


def virtual_place(name: str, folders: dict[str, str]) -> str | None:
    """The place `FOLDER@OVERRIDE` of a name; None for a name without a known override or of no served folder."""
    try:
        served, override = split_name(name)
    except ConfigError:
        return None
    if override is None or served not in folders:
        return None
    return f"{folders[served]}@{name.rpartition('@')[2]}"


def register_resolver(served: str) -> None:
    """Put the resolver into vLLM's registry.

    Args:
        served: JSON {served name: folder}.

    Raises:
        LoragateError: for anything else.
    """
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    try:
        folders = json.loads(served)
    except ValueError as error:
        raise LoragateError(f"LORAGATE_ADAPTERS is not valid JSON ({error})") from error
    if not isinstance(folders, dict) or not all(isinstance(folder, str) for folder in folders.values()):
        raise LoragateError("LORAGATE_ADAPTERS must be a JSON object of names and folders")

    class OverrideResolver(LoRAResolver):
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            place = virtual_place(lora_name, folders)
            # vLLM replaces the id by a free one
            return None if place is None else LoRARequest(lora_name, 1, place)

    LoRAResolverRegistry.register_resolver("loragate", OverrideResolver())
