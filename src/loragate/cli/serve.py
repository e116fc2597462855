"""`loragate serve`: vLLM's OpenAI-compatible server for a gated adapter, its plain adapter and its base."""

from __future__ import annotations

from dataclasses import dataclass

from loragate.cli.arguments import Command
from loragate.cli.options import ModelOptions
from loragate.errors import ConfigError
from loragate.serving.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions, ServerSettings):
    """Settings of `loragate serve`."""


def run(options: ServeOptions) -> int:
    """Serve until Ctrl-C."""
    from loragate.generation.vllm_engine import require_vllm

    require_vllm()
    if options.quantization != "none":
        raise ConfigError(
            f"--quantization {options.quantization} has no effect: vLLM loads the base itself; give its own flag, as in "
            '--vllm-args "--quantization bitsandbytes"'
        )
    if options.device != "auto":
        number = options.device.rpartition(":")[2] if ":" in options.device else "0"
        raise ConfigError(
            f"--device {options.device} has no effect: vLLM takes the devices that it sees; leave it out, and say which with the "
            f"environment variable CUDA_VISIBLE_DEVICES, as in CUDA_VISIBLE_DEVICES={number} loragate serve {options.model}"
        )
    from loragate.serving.vllm_server import serve

    return serve(options, options.system)


COMMAND = Command(
    name="serve",
    options=ServeOptions,
    run=run,
    positional="model",
    examples=(
        "loragate serve gated",
        "loragate serve gated --port 8080 --adapters math=other-gated,style=plain-adapter",
        "loragate serve gated --adapters half=gated@constant=0.5",
    ),
    common="base host port adapters dynamic max_model_len vllm_args dtype",
)
