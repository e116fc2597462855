"""What may be laid over λ, and its short names, so that a folder or a served name can carry one: `my-gates@unit`.

A constant may hold for a part of the model alone, `my-adapter@lower=0.5`; `gates.strength` knows which modules these are.

`gate_override` takes numbers or a string; a server is given strings, and one string is one virtual adapter: the same tensors,
another λ. The grammar lives here alone, so that Python, vLLM, generate and export read a name alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from loragate.errors import ConfigError, GateError, nearest

BANDS = ("lower", "middle", "upper")
"""Thirds of the layers that an adapter touches, the first ones lower."""
FAMILIES = ("attention", "mlp")
LARGEST = torch.finfo(torch.float32).max
"""The largest number that λ, which is computed in fp32, can be."""


@dataclass(frozen=True)
class Override:
    """λ clipped to [minimum, maximum], or replaced by `constant`: everywhere, or in `part` alone and by 1 elsewhere.

    A GateError for a contradiction, or a number that is not finite.
    """

    minimum: float | None = None
    maximum: float | None = None
    constant: float | None = None
    part: str | None = None  # of `BANDS` or `FAMILIES`, or a kind of module such as "q_proj"

    def __post_init__(self) -> None:
        given = [value for value in (self.minimum, self.maximum, self.constant) if value is not None]
        if not all(abs(value) <= LARGEST for value in given):  # a NaN is not either
            raise GateError(f"an override of λ takes finite numbers, found {given}")
        if self.constant is not None and len(given) > 1:
            raise GateError("an override of λ takes either constant or minimum/maximum, not both")
        if self.part is not None and self.constant is None:
            raise GateError(f"an override of λ for {self.part} takes a constant")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise GateError(f"an override of λ: minimum {self.minimum:g} is above maximum {self.maximum:g}")

    @property
    def limits(self) -> tuple[float, float]:
        """(least λ, most λ): what clipping comes to, for a constant as well; a GateError where that differs by module."""
        if self.part is not None:
            raise GateError(f"λ = {self.constant:g} for {self.part} alone is no one limit for all modules")
        if self.constant is not None:
            return self.constant, self.constant
        return (-math.inf if self.minimum is None else self.minimum, math.inf if self.maximum is None else self.maximum)

    def __call__(self, lam: torch.Tensor) -> torch.Tensor:
        """What is applied in place of λ, same shape and dtype."""
        return lam.clamp(*self.limits)


NAMED_OVERRIDES = {
    "off": Override(constant=1.0),
    "unit": Override(minimum=0.0, maximum=1.0),
    "noreverse": Override(minimum=0.0),
    "noextrapolate": Override(maximum=1.0),
}
"""off: λ = 1, the plain adapter; the others are the paper's interventions clip(λ,0,1), max(λ,0) and min(λ,1)."""
GRAMMAR = ", ".join(
    ["@" + name for name in NAMED_OVERRIDES]
    + ["@constant=0.5", "@clip=-1:2", "@clip=:1", *(f"@{part}=0.5" for part in (*BANDS, *FAMILIES)), "@q_proj=0.5"]
)
_KIND = re.compile(r"[A-Za-z0-9]+(?:_[A-Za-z0-9]+)+")  # with an underscore, which no name of the grammar has


def constant_name(constant: float, part: str | None = None) -> str:
    """The short name of a constant: "constant=0.5", "lower=0.5"."""
    return f"{part or 'constant'}={constant!r}"


def parse_override(text: str) -> Override:
    """The override of what stands behind the @: a name, `constant=C`, `PART=C`, or `clip=A:B`, of which A or B may be left out.

    A ConfigError with the known forms for anything else.
    """
    if text in NAMED_OVERRIDES:
        return NAMED_OVERRIDES[text]
    kind, sign, value = text.partition("=")
    try:
        if kind == "constant" and sign:
            return Override(constant=float(value))
        if _is_part(kind) and sign:
            return Override(constant=float(value), part=kind)
        if kind == "clip" and value.count(":") == 1 and value != ":":
            least, most = (float(end) if end else None for end in value.split(":"))
            return Override(least, most)
    except GateError as error:
        raise ConfigError(f"@{text}: {error}") from error
    except ValueError as error:
        takes = "one or two numbers, as in @clip=-1:2 or @clip=:1" if kind == "clip" else f"a number, as in @{kind}=0.5"
        raise ConfigError(f"@{text}: {kind} takes {takes}, found {value!r}") from error
    known = [*NAMED_OVERRIDES, "constant", "clip", *BANDS, *FAMILIES]
    raise ConfigError(f"@{text} is no known override of λ{nearest(kind, known)}; there are {GRAMMAR}")


def _is_part(name: str) -> bool:
    return name in BANDS or name in FAMILIES or _KIND.fullmatch(name) is not None


FIELDS = ("lora_scale", "lora_gates")
"""Fields of a request that lay an override over λ: one number for the whole adapter, or the name of an override."""


def requested_override(fields: Mapping[str, object]) -> str | None:
    """The override that a request's fields ask for, as it stands behind an @; None where they ask for none.

    `lora_scale` is any finite number; `lora_gates` the text of an override. A ConfigError for both at once, for anything else,
    and for a field that starts with `lora_` and is none of the two.
    """
    given = {name: value for name, value in fields.items() if name.startswith("lora_") and value is not None}
    for name in given:
        if name not in FIELDS:
            raise ConfigError(f"{name} is no field of a request{nearest(name, FIELDS)}; there are {', '.join(FIELDS)}")
    if len(given) > 1:
        raise ConfigError("lora_scale and lora_gates are two overrides of λ; give one of them")
    for name, value in given.items():
        if name == "lora_gates":
            if not isinstance(value, str):
                raise ConfigError(f"lora_gates takes the name of an override, found {value!r}; there are {GRAMMAR}")
            asked = value.removeprefix("@")
            if (part := parse_override(asked).part) is not None:
                raise ConfigError(
                    f"lora_gates: {asked} holds for a part of the model ({part}), which takes a slot of its own; name it as the "
                    f"model instead, NAME@{asked}"
                )
            return asked
        number = float(value) if isinstance(value, (int, float)) and abs(value) < LARGEST else math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise ConfigError(f"lora_scale takes a finite number, found {value!r:.60}")
        return f"constant={number + 0.0!r}"  # -0.0 becomes 0.0
    return None


def split_name(name: str) -> tuple[str, Override | None]:
    """A served name and the override behind its last @; None where there is no @, a ConfigError for one that is not known."""
    head, sign, tail = name.rpartition("@")
    return (head, parse_override(tail)) if sign else (name, None)


def split_folder(place: str | Path) -> tuple[str, Override | None]:
    """A folder (or hub id) and the override behind its last @; a folder that exists under the whole name has none.

    A ConfigError for an override that is not known, behind a folder that exists.
    """
    place = str(place)
    head, sign, tail = place.rpartition("@")
    if not sign or not head or "/" in tail or Path(place).expanduser().exists():
        return place, None
    kind, equals, _ = tail.partition("=")
    known = tail in NAMED_OVERRIDES or (equals and (kind in ("constant", "clip") or _is_part(kind)))
    if not known and not Path(head).expanduser().is_dir():
        return place, None
    return head, parse_override(tail)


def parse_slot_override(place: str | Path) -> tuple[str, Override | None]:
    """What a slot of a server holds, and what each of its requests lays over λ; a constant for a part belongs to the slot."""
    folder, override = split_folder(place)
    return (str(place), None) if override is not None and override.part is not None else (folder, override)
