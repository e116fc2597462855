"""What a recipe file may not decide for the one who runs it: which programs start, and what code of others may run.

Recipes are passed on like data. A value that opens this machine counts only when the command line of the run says it too.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError
from loragate.recipes.library import HERE
from loragate.recipes.recipe import YOURS, Recipe, Stage

GUARDED = {"trust_remote_code": False, "sandbox": "bubblewrap", "probe_sandbox": "bubblewrap"}
"""Option to its value that asks for nothing."""
LAUNCHER_FILES = HERE.parent / "training" / "accelerate"
# all of them take a value, so that no word between them can be a script
LAUNCHER_FLAGS = {"--config_file", "--num_processes", "--num_machines", "--machine_rank", "--mixed_precision"}
LAUNCHER_FLAGS |= {"--main_process_ip", "--main_process_port", "--gpu_ids"}


def require_asked(recipe: str, stage: Stage, options: Any) -> None:
    """Refuse a guarded option that the recipe sets and the command line does not.

    Args:
        recipe: its name, for the message.
        options: the stage's, as its command has them.

    Raises:
        ConfigError: saying how to ask for it.
    """
    for name, harmless in GUARDED.items():
        value = getattr(options, name, harmless)
        if value != harmless and stage.marks.get(name) != YOURS:
            text = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError(
                f"{recipe}: stage '{stage.name}' sets {name} to {text}, which lets code of others run with less or no "
                f"protection; where you trust it, ask for it yourself: --set {stage.name}.{name}={text}"
            )


def require_known_launcher(recipe: Recipe) -> None:
    """Refuse a launcher in a recipe that is more than `accelerate launch` of loragate with numbers and a shipped file.

    Raises:
        ConfigError: saying how to ask for it.
    """
    try:
        words = shlex.split(recipe.launcher)
    except ValueError as error:
        raise ConfigError(f"{recipe.name}: launcher is {recipe.launcher!r}: {error}") from None
    flags, values = words[2:-2:2], words[3:-2:2]
    known = words[:2] == ["accelerate", "launch"] and words[-2:] == ["-m", "loragate"] and len(flags) == len(values)
    known = known and set(flags) <= LAUNCHER_FLAGS and not any(value.startswith("-") for value in values)
    files = [Path(value).resolve().parent for flag, value in zip(flags, values) if flag == "--config_file"]
    if words and not (known and all(folder == LAUNCHER_FILES.resolve() for folder in files)):
        raise ConfigError(
            f"{recipe.name} starts training with a program of its own choice, {recipe.launcher!r}; where that is what you want, "
            f"give it yourself: --launcher {shlex.quote(recipe.launcher)}"
        )
