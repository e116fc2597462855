"""`loragate verify`: whether a server, or llama.cpp, computes a served adapter as transformers does."""

from __future__ import annotations

from loragate import serving
from loragate.cli.arguments import Command
from loragate.serving.settings import VerifySettings


def run(options: VerifySettings) -> int:
    """Check, print the table, and return 1 where a check fails."""
    return int(serving.verify.verify(options))


COMMAND = Command(
    name="verify",
    options=VerifySettings,
    run=run,
    positional="adapter",
    examples=(
        "loragate verify path/to/adapter --endpoint http://127.0.0.1:8000/v1",
        "loragate verify gated --endpoint http://127.0.0.1:8000/v1 --adapters math=other-gated --dtype float32",
        "loragate verify path/to/adapter --llama-cpp base.gguf --lora adapter.gguf",
    ),
    common="endpoint llama_cpp lora base served_adapter served_base adapters strength_by limit json out dtype",
)
