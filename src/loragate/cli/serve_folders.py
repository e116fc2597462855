"""What `loragate serve` serves, and under which names: base, gated, adapter, and those of --adapters and --overrides."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loragate.cli.arguments import comma_list
from loragate.errors import ConfigError

if TYPE_CHECKING:
    from loragate.models import Place


def served_places(options: Any) -> tuple[Place, dict[str, Place]]:
    """The place of --model, whose base is served, and that of each adapter by its served name.

    Raises:
        ConfigError: for a place that holds no adapter, a name that is taken, or an override that is not known.
    """
    from loragate.gates.override_names import parse_override
    from loragate.models import require_here, resolve

    place = resolve(options.model, options.base)
    if place.kind == "base":
        raise ConfigError(f"{options.model} is no gated or plain adapter, which is what these settings serve")
    require_here("base model", place.base.name)
    adapters = {"gated": place, "adapter": place.plain} if place.kind == "gated" else {"adapter": place}
    for part in comma_list(options.adapters):
        name, more = _named_place(part)
        if name in (*adapters, "base"):
            raise ConfigError(f"--adapters {part}: the name {name} is taken; choose another")
        adapters[name] = more
    gated = {name: one for name, one in adapters.items() if one.kind == "gated" and not one.ref.override}
    for text in comma_list(options.overrides):
        parse_override(text)
        if not gated:
            raise ConfigError(f"--overrides {text} has no effect: none of the adapters carries gates")
        adapters |= {f"{name}@{text}": replace(one, ref=replace(one.ref, override=text)) for name, one in gated.items()}
    return place, adapters


def _named_place(part: str) -> tuple[str, Place]:
    from loragate.models import resolve

    name, sign, text = part.partition("=")
    expected = "NAME=FOLDER with the folder or hub id of a gated or plain adapter, or NAME=FOLDER@OVERRIDE"
    if not sign or not name or not text:
        raise ConfigError(f"--adapters {part}: expected {expected}")
    place = resolve(text, overrides=True, base_later=True)
    if place.kind == "base":
        raise ConfigError(f"--adapters {part}: expected {expected}")
    return name, place
