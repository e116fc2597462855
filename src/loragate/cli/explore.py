"""`loragate explore`: type a prompt, compare base, LoRA and gated, move bounds, see tokens change colour."""

from __future__ import annotations

import os
from dataclasses import dataclass

from loragate.cli.arguments import Command
from loragate.cli.options import ModelOptions
from loragate.validate import Port


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(ModelOptions):
    """Settings of `loragate explore`.

    Attributes:
        model: gated folder, or owner/name[@revision] of one on the hub.
        port: port on 127.0.0.1; 0 takes a free one.
        prompt: initial text of the prompt box.
        raw: pass the prompt to the model unchanged, without the chat template.
        base: where the base model is, instead of the recorded one.
    """

    model: str
    port: Port = 7860
    prompt: str = ""
    raw: bool = False
    base: str = ""


def run(options: ExploreOptions) -> int:
    """Load, build the page, serve it until Ctrl-C."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    from loragate.serving.explore import explorer_of, launch

    page = explorer_of(
        options.model, options, base=options.base, prompt=options.prompt, raw=options.raw, system=options.system
    )
    launch(page, options.port)
    return 0


COMMAND = Command(
    name="explore",
    options=ExploreOptions,
    run=run,
    examples=(
        "loragate explore runs/quickstart/gated",
        "loragate explore my-gated-adapter --base path/to/base --port 8000",
    ),
    positional="model",
)
