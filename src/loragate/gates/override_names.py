"""Overrides of λ as short names, so that a folder or a served name can carry one: `my-gates@unit`, `math@constant=0.5`.

`gate_override` takes numbers; a server is given strings, and one string is one virtual adapter: the same tensors, another
λ. The grammar lives here alone, so that vLLM, our own server and export read a name alike.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from loragate.errors import ConfigError, nearest
from loragate.gates.gate import Override

NAMED = {
    "off": Override(constant=1.0),
    "unit": Override(minimum=0.0, maximum=1.0),
    "noreverse": Override(minimum=0.0),
    "noextrapolate": Override(maximum=1.0),
}
"""off: λ = 1, the plain adapter; the others are the paper's interventions clip(λ,0,1), max(λ,0) and min(λ,1)."""
GRAMMAR = ", ".join(["@" + name for name in NAMED] + ["@constant=0.5", "@clip=-1:2", "@clip=:1"])


def parse_override(text: str) -> Override:
    """The override of what stands behind the @: a name, `constant=C`, or `clip=A:B` with one of A and B left out at most.

    Raises:
        ConfigError: naming what was found and the known forms.
    """
    if text in NAMED:
        return NAMED[text]
    kind, sign, value = text.partition("=")
    if kind == "constant" and sign:
        return Override(constant=_number(text, value))
    if kind == "clip" and value.count(":") == 1 and value != ":":
        least, most = (_number(text, part) if part else None for part in value.split(":"))
        if least is not None and most is not None and least > most:
            raise ConfigError(f"@{text}: the lower bound is above the upper; write @clip={most:g}:{least:g}")
        return Override(minimum=least, maximum=most)
    known = [*NAMED, "constant", "clip"]
    raise ConfigError(f"@{text} is no known override of λ{nearest(kind, known)}; there are {GRAMMAR}")


def split_name(name: str) -> tuple[str, Override | None]:
    """A served name and the override behind its last @; None where there is no @.

    Raises:
        ConfigError: for an override that is not known.
    """
    head, sign, tail = name.rpartition("@")
    return (head, parse_override(tail)) if sign else (name, None)


def split_folder(place: str | Path) -> tuple[str, Override | None]:
    """A folder (or hub id) and the override behind its last @; a folder that exists under the whole name has none.

    Raises:
        ConfigError: for an override that is not known, behind a folder that exists.
    """
    place = str(place)
    head, sign, tail = place.rpartition("@")
    if not sign or not head or "/" in tail or Path(place).expanduser().exists():
        return place, None
    known = tail in NAMED or re.match(r"(constant|clip)=", tail)
    if not known and not Path(head).expanduser().is_dir():
        return place, None
    return head, parse_override(tail)


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"@{text}: expected a finite number, found {value!r}")
    return number
