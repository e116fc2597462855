"""Which folders `loragate serve` serves, and under which names: base, gated, adapter, and those of --adapters and --overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loragate.cli.arguments import comma_list
from loragate.cli.hub import place_on_disk
from loragate.cli.models import require_place, revision_for
from loragate.cli.places import is_adapter, is_gated
from loragate.errors import ConfigError


def served_folders(options: Any) -> tuple[str, dict[str, str]]:
    """The base (its revision is `base_revision`), and the place of each adapter by its served name: a folder, or FOLDER@OVERRIDE.

    Raises:
        ConfigError: for a place that holds no adapter, a name that is taken, or an override that is not known.
    """
    from loragate.cli.models import adapter_record
    from loragate.gates.hub import split_base
    from loragate.gates.override_names import parse_override
    from loragate.gates.schema import read_gate_config

    folder = Path(options.model).resolve()
    if not is_adapter(folder):
        raise ConfigError(
            f"{options.model} is no local folder of a gated or plain adapter, which is what these settings serve"
        )
    if is_gated(folder):
        base = options.base or str(read_gate_config(folder)["base"]["id"])
        adapters = {"gated": str(folder), "adapter": str(folder / "adapter")}
    else:
        base = options.base or str(adapter_record(str(folder)).base_model_name_or_path)
        adapters = {"adapter": str(folder)}
    if not base:
        raise ConfigError(f"{folder} does not say on which base it was trained; name it with --base")
    require_place("base model", base)
    base = split_base(base)[0]
    for part in comma_list(options.adapters):
        name, place = _named_place(part)
        if name in (*adapters, "base"):
            raise ConfigError(f"--adapters {part}: the name {name} is taken; choose another")
        adapters[name] = place
    gated = [name for name, place in adapters.items() if is_gated(Path(place))]
    for text in comma_list(options.overrides):
        parse_override(text)
        if not gated:
            raise ConfigError(f"--overrides {text} has no effect: none of the adapters carries gates")
        adapters |= {f"{name}@{text}": f"{adapters[name]}@{text}" for name in gated}
    return base, adapters


def plain_part(place: str) -> Path:
    """The folder of the plain adapter of a served place."""
    from loragate.gates.override_names import split_folder

    folder = Path(split_folder(place)[0])
    return folder / "adapter" if is_gated(folder) else folder


def base_revision(options: Any) -> str:
    """The revision of the base: behind --base, else that of the record; empty where there is none, or another base is named."""
    return revision_for(options.model, options.base)


def tokenizer_places(options: Any, base: str) -> list[str]:
    """Where the tokenizer may be, the adapter's own copy first."""
    folder = Path(options.model)
    own = folder / "adapter" if is_gated(folder) else folder
    return [str(own / "tokenizer"), str(own), base]


def _named_place(part: str) -> tuple[str, str]:
    from loragate.gates.override_names import split_folder

    name, sign, place = part.partition("=")
    place = place_on_disk(place) if name and place else place
    folder = Path(split_folder(place)[0])
    if not sign or not name or not is_adapter(folder):
        raise ConfigError(
            f"--adapters {part}: expected NAME=FOLDER with the folder or hub id of a gated or plain adapter, or "
            "NAME=FOLDER@OVERRIDE"
        )
    return name, str(folder.resolve()) + place[len(str(split_folder(place)[0])) :]
