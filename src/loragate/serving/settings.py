"""Settings of `serve` and `verify`; torch-free, so that a command line can be checked at once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from loragate import models
from loragate.errors import ConfigError
from loragate.models.settings import Loading
from loragate.validate import NonNegativeFloat, NonNegativeInt, Port, PositiveInt, UnitInterval, comma_list

if TYPE_CHECKING:
    from loragate.models.source import ModelSource


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Loading):
    """What vLLM serves, and where.

    Attributes:
        model: gated folder, owner/name[@revision] of one on the hub, or PEFT adapter.
        base: where the base model is, instead of the recorded one.
        host: address to listen on; 127.0.0.1 accepts this machine only.
        port: port to listen on.
        adapters: more adapters to serve, gated or plain: NAME=FOLDER separated by commas, or NAME=owner/name[@revision]
            on the hub; a suffix such as @unit overrides λ. Clients can ask for NAME@unit whether it is listed or not.
        dynamic: let clients load and unload adapters while the server runs; for trusted clients only.
        max_model_len: positions to plan for, prompt and answer together; 0 takes the model's.
        vllm_args: further arguments of vLLM's server, as one text.
        vllm_memory: share of a device's memory that vLLM may fill; 0 takes 0.9, or on a CPU half of what is free.
        tensor_parallel: devices that share one copy of the model.
        dtype: what vLLM computes in; auto is vLLM's: the checkpoint's, but 16 bits for one in float32, on a CPU too.
    """

    model: str
    base: str = ""
    host: str = "127.0.0.1"
    port: Port = 8000
    adapters: str = ""
    dynamic: bool = False
    max_model_len: NonNegativeInt = 0
    vllm_args: str = ""
    vllm_memory: UnitInterval = 0.0
    tensor_parallel: PositiveInt = 1


@dataclass(frozen=True, kw_only=True)
class VerifySettings(Loading):
    """What is checked, and against which reference.

    Attributes:
        adapter: folder, or owner/name[@revision] on the hub, of the adapter that is served, plain or gated; with @OVERRIDE
            where the served λ is overridden.
        endpoint: URL of an OpenAI-compatible server; its key is read from the environment variable OPENAI_API_KEY.
        llama_cpp: GGUF file of the base, for llama.cpp in this process instead of a server.
        lora: GGUF file of the adapter, with --llama-cpp.
        base: where the base model is, instead of the recorded one.
        served_adapter: what the server calls the adapter; by default a model from that folder, or called adapter. Of
            llama-server the file's id, path, or name without .gguf where no other is called so.
        served_base: what the server calls the base; by default base, or the model without a parent.
        adapters: further served adapters that must not mix with this one: NAME=FOLDER separated by commas.
        strength_by: how a request says a strength: name (NAME@constant=0.5), lora_scale (a field beside it) or none; auto asks
            for a name. llama-server has a list of its own.
        prompts: prompts for each served model.
        tokens: greedy tokens of each answer.
        limit: largest mean difference of a log-prob, in nats; 0 takes 0.001 with --dtype float32, else 0.1.
        dtype: what the runtime computes in, and the reference with it; auto is any of 16 bits.
        json: print the record as JSON.
        out: folder for verify.json.
    """

    adapter: str
    endpoint: str = ""
    llama_cpp: str = ""
    lora: str = ""
    base: str = ""
    served_adapter: str = ""
    served_base: str = ""
    adapters: str = ""
    strength_by: Literal["auto", "name", "lora_scale", "none"] = "auto"
    prompts: PositiveInt = 4
    tokens: PositiveInt = 24
    limit: NonNegativeFloat = 0.0
    json: bool = False
    out: str = ""


def named_adapters(text: str, taken: Collection[str]) -> dict[str, ModelSource]:
    """{served name: where the adapter is} of NAME=FOLDER or NAME=FOLDER@OVERRIDE, separated by commas.

    Raises:
        ConfigError: for another form, a folder without an adapter, an override that is not known, or a name in `taken`.
    """
    found: dict[str, ModelSource] = {}
    for part in comma_list(text):
        name, _, folder = part.partition("=")
        source = models.resolve(folder, allow_override=True, base_optional=True) if name and folder else None
        if source is None or source.kind == "base":
            raise ConfigError(
                f"--adapters {part}: expected NAME=FOLDER with the folder or hub id of a gated or plain adapter, or "
                "NAME=FOLDER@OVERRIDE"
            )
        if name in taken or name in found:
            raise ConfigError(f"--adapters {part}: the name {name} is taken; choose another")
        found[name] = source
    return found
