"""The range of λ as a value: parsed, checked, printed and read back here and nowhere else.

Torch-free, so that a command line can be checked at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic_core import core_schema

from loragate.errors import ConfigError, GateError


@dataclass(frozen=True, order=True)
class Range:
    """λ ∈ [lower, upper]; contains 0 (the base) and 1 (the adapter itself), or is refused (GateError).

    The paper writes L < 0 < 1 < U and runs the end points L = 0 and U = 1 all the same, so these are legal.

    Attributes:
        lower: L ≤ 0, the strongest reversal; 0 forbids reversal.
        upper: U ≥ 1, the strongest extrapolation; 1 forbids extrapolation.
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        for name in ("lower", "upper"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise GateError(f"gate {name} must be a finite number, found {value!r}")
            object.__setattr__(self, name, float(value) + 0.0)  # -0 is 0
        lower, upper = self.lower, self.upper
        if lower > upper:
            raise GateError(
                f"the range {lower:g},{upper:g} is the wrong way round: write the lower bound first, --ranges={upper:g},{lower:g}"
            )
        if lower > 0:
            raise GateError(f"the lower bound must be ≤ 0 so that a gate can switch a delta off, found {lower:g}")
        if upper < 1:
            raise GateError(
                f"the upper bound must be ≥ 1 so that λ = 1 (the adapter itself) is inside, found {upper:g}"
            )

    @classmethod
    def parse(cls, text: str) -> Range:
        """A range as typed, "-3,1", or as printed, "[-3,1]"; a ConfigError for anything else."""
        try:
            lower, upper = (float(part) for part in text.strip("[]() ").split(","))  # two, or a ValueError
        except ValueError:
            raise ConfigError(f"a range is two numbers L,U, such as --ranges=-3,1; found {text!r}") from None
        try:
            return cls(lower, upper)
        except GateError as error:
            raise ConfigError(f"{text}: {error}") from error

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A range as files hold it: "-3,1", [-3, 1] or {"lower": -3, "upper": 1}."""

        def read(value: Any) -> Range:
            try:
                if isinstance(value, str):
                    return cls.parse(value)
                if isinstance(value, Range):
                    return value
                return cls(**value) if isinstance(value, dict) else cls(*value)
            except TypeError:
                raise ValueError(f"two numbers, [-3, 1]; found {value!r:.80}") from None
            except (ConfigError, GateError) as error:
                raise ValueError(str(error)) from None  # pydantic says where

        return core_schema.no_info_plain_validator_function(read)

    @property
    def cli_text(self) -> str:
        """As typed on a command line: "-3,1"."""
        return f"{_plain(self.lower)},{_plain(self.upper)}"

    @property
    def slug(self) -> str:
        """As part of a file name: "-3_1"."""
        return self.cli_text.replace(",", "_")

    def __str__(self) -> str:
        return f"[{self.cli_text}]"


GRID = tuple(Range(lower, upper) for upper in range(1, 7) for lower in range(-6, 1))
"""The paper's 42 ranges, column by column of its heat maps."""


def parse_ranges(text: str) -> tuple[Range, ...]:
    """Ranges of "grid" (the paper's 42) or "-3,1;0,1;-6,3".

    Raises:
        ConfigError: naming the part that is no range, or that stands there twice.
    """
    if text.strip().lower() == "grid":
        return GRID
    found: list[Range] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        try:
            one = Range.parse(part)
        except ConfigError as error:
            raise ConfigError(f"--ranges: {error}") from None
        if one in found:
            raise ConfigError(f"--ranges: the range {part} stands there twice; each is tried once")
        found.append(one)
    if not found:
        raise ConfigError('--ranges is empty; write "grid", or ranges such as --ranges="-3,1;0,1;-6,3"')
    return tuple(found)


def _plain(number: float) -> str:
    """ "-3" of -3.0, and any other number with the digits that give it again."""
    return repr(number).removesuffix(".0")
