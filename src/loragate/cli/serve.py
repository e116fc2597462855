"""`loragate serve`: vLLM's OpenAI-compatible server for a gated adapter, its plain adapter and its base."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loragate import models
from loragate.cli.arguments import Command
from loragate.cli.options import ModelOptions
from loragate.errors import ConfigError
from loragate.serving.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions, ServerSettings):
    """Settings of `loragate serve`."""


def run(options: ServeOptions) -> int:
    """Serve until Ctrl-C, or with --verify compare vLLM with transformers."""
    from loragate.generation.vllm_engine import require_vllm

    require_vllm()
    if options.quantization != "none":
        raise ConfigError(
            f"--quantization {options.quantization} has no effect: vLLM loads the base itself; give its own flag, as in "
            '--vllm-args "--quantization bitsandbytes"'
        )
    # by the commit that a hub id means now, so that server and reference load the same
    settings = replace(options, model=models.resolve(options.model, options.base).source)
    if options.verify:
        from loragate.serving.parity import verify

        return verify(settings)
    from loragate.serving.vllm_server import serve

    return serve(settings, options.system)


COMMAND = Command(
    name="serve",
    options=ServeOptions,
    run=run,
    positional="model",
    examples=(
        "loragate serve gated",
        "loragate serve gated --port 8080 --adapters math=other-gated,style=plain-adapter",
        "loragate serve gated --overrides unit,constant=0.5",
        "loragate serve gated --verify",
    ),
    common="base host port adapters overrides dynamic verify max_model_len vllm_args dtype",
)
