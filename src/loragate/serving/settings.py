"""Settings of a server; torch-free, so that a command line can be checked at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from loragate.models.settings import Loading
from loragate.validate import Count, Share, Size


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Loading):
    """What vLLM serves, and where.

    Attributes:
        model: gated folder, owner/name[@revision] of one on the hub, or PEFT adapter.
        base: where the base model is, instead of the recorded one.
        host: address to listen on; 127.0.0.1 accepts this machine only.
        port: port to listen on.
        adapters: more adapters to serve, gated or plain: NAME=FOLDER separated by commas, or NAME=owner/name[@revision]
            on the hub; a suffix such as @unit overrides λ.
        overrides: overrides of λ to list for every gated adapter, separated by commas: unit is listed as NAME@unit.
            Known: off, unit, noreverse, noextrapolate, constant=0.5, clip=-1:2. Clients can use any, listed or not.
        dynamic: let clients load and unload adapters while the server runs; for trusted clients only.
        verify: compare log-probs of vLLM with transformers, print the differences and stop; the exit status is 1 if
            they are too large.
        max_model_len: positions to plan for, prompt and answer together; 0 takes the model's.
        vllm_args: further arguments of vLLM's server, as one text.
        vllm_memory: share of a device's memory that vLLM may fill; 0 takes 0.9, or on a CPU half of what is free.
        tensor_parallel: devices that share one copy of the model.
    """

    model: str
    base: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    adapters: str = ""
    overrides: str = ""
    dynamic: bool = False
    verify: bool = False
    max_model_len: Size = 0
    vllm_args: str = ""
    vllm_memory: Share = 0.0
    tensor_parallel: Count = 1
