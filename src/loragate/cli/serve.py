"""`loragate serve`: an OpenAI-compatible server for a gated adapter, its plain adapter and its base."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Literal

from loragate import models
from loragate.cli.arguments import Command
from loragate.cli.options import ModelOptions
from loragate.effects import require_effect
from loragate.serving.settings import ServerSettings
from loragate.training.preflight import check_loading


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions, ServerSettings):
    """Settings of `loragate serve`."""


def run(options: ServeOptions) -> int:
    """Serve until Ctrl-C."""
    from loragate.serving.server import serve

    asked = models.resolve(options.model, options.base)
    # vLLM serves adapters alone here; a comparison with it needs it in any case, and says so where it is absent
    fits = importlib.util.find_spec("vllm") is not None and asked.kind != "base"
    with_vllm = options.engine == "vllm" or (options.engine == "auto" and (fits or options.verify))
    engine: Literal["vllm", "transformers"] = "vllm" if with_vllm else "transformers"
    require_effect("serve", options, flags=True, engine=engine)
    check_loading(options)
    # by the commit that a hub id means now, so that server and reference load the same
    return serve(replace(options, model=asked.source, engine=engine), options, options.system)


COMMAND = Command(
    name="serve",
    options=ServeOptions,
    run=run,
    positional="model",
    examples=(
        "loragate serve gated",
        "loragate serve gated --port 8080 --adapters math=other-gated,style=plain-adapter",
        "loragate serve gated --overrides unit,constant=0.5",
        "loragate serve gated --engine transformers",
        "loragate serve gated --verify",
    ),
    common="base host port engine adapters overrides dynamic verify max_model_len vllm_args dtype quantization device",
)
