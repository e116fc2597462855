"""`loragate completion`: a script that completes commands and their options in bash, zsh or fish.

The words stand in the script itself, as cyclopts writes it from the signatures: pressing Tab starts no Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loragate.cli.arguments import Command, build_app
from loragate.cli.main import COMMANDS, command


@dataclass(frozen=True)
class CompletionOptions:
    """Settings of `loragate completion`.

    Attributes:
        shell: for which the script is.
    """

    shell: Literal["bash", "zsh", "fish"]


def script(shell: Literal["bash", "zsh", "fish"]) -> str:
    """The script of everything that `loragate` knows."""
    return build_app(map(command, COMMANDS), "completion").generate_completion(shell=shell)


def run(options: CompletionOptions) -> int:
    """Print the script."""
    print(script(options.shell), end="")
    return 0


COMMAND = Command(
    name="completion",
    options=CompletionOptions,
    run=run,
    examples=(
        "loragate completion bash > ~/.local/share/bash-completion/completions/loragate",
        "loragate completion fish",
    ),
    positional="shell",
)
