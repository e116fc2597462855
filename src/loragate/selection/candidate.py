"""What is tried: a range and an objective to train gates with, or what needs no training. Torch-free.

A candidate is a whole setting: what acts on the base, and the temperature at which it is sampled. What differs between two
candidates stands in their fields and nowhere else, so another thing to compare is another field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, nearest
from loragate.gates.range import Range
from loragate.training.settings import GATE_OBJECTIVES

KINDS = ADAPTER, BASE, CONSTANT, GATES = ("adapter", "base", "constant", "gates")
"""From the simplest on: nothing to add, something to leave off, one number, a folder of gates."""


@dataclass(frozen=True)
class Candidate:
    """Gates to train, or what needs no training: the adapter, its base, the adapter under one λ.

    Attributes:
        range: of λ; None where nothing is trained.
        objective: of the training, "entropy" being the paper's; "adapter", "base" or "constant" where nothing is trained.
        seed: of the gates' start and of the order of the rows.
        adapter: label of the adapter, where a study has several.
        temperature: of sampling, 0 for greedy; None takes the probe's.
        scale: the λ of a "constant".
    """

    range: Range | None
    objective: str = "entropy"
    seed: int = 0
    adapter: str = ""
    temperature: float | None = None
    scale: float = 1.0

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.objective if self.range is None else GATES

    @property
    def fixed(self) -> float:
        """The one λ of what is not trained."""
        return {ADAPTER: 1.0, BASE: 0.0}.get(self.kind, self.scale)

    @property
    def model(self) -> Candidate:
        """The same at no temperature: what is trained, or put on the model."""
        return replace(self, temperature=None)

    @property
    def cell(self) -> str:
        """What it is compared as, its seeds taken together: "[-3,1]", "[-3,1] anchored", "λ=0.5", "adapter T=0.3"."""
        if self.range is None:
            name = f"λ={self.scale:g}" if self.kind == CONSTANT else self.objective
        else:
            name = str(self.range) if self.objective == "entropy" else f"{self.range} {self.objective}"
        if self.temperature is None:
            return name
        return f"{name} T={self.temperature:g}" if self.temperature else f"{name} greedy"

    @property
    def name(self) -> str:
        """As printed where seeds are told apart: "[-3,1] entropy, seed 0"."""
        if self.range is None:
            return "adapter, λ = 1" if self.cell == ADAPTER else self.cell
        return f"{self.range} {self.objective}, seed {self.seed}"

    @property
    def slug(self) -> str:
        """Its folder: stable, unique, and fit for every file system."""
        if self.range is None:
            own = {ADAPTER: "untouched", CONSTANT: f"constant_{self.scale:g}"}.get(self.kind, self.kind)
        else:
            own = f"{self.objective}_{self.range.slug}_seed{self.seed}"
        heat = [] if self.temperature is None else [f"T{self.temperature:g}"]
        return "_".join([*filter(None, [self.adapter]), own, *heat])

    def as_record(self) -> dict[str, Any]:
        """As it stands in the study's file and in results; the adapter is λ = 1 and the base λ = 0."""
        lower, upper = (self.fixed, self.fixed) if self.range is None else (self.range.lower, self.range.upper)
        record = {
            "adapter": self.adapter,
            "lower": lower,
            "upper": upper,
            "seed": self.seed,
            "objective": self.objective,
        }
        return record if self.temperature is None else {**record, "temperature": self.temperature}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Candidate:
        """The candidate of `as_record`; raises KeyError, TypeError or GateError for what is none."""
        objective, lower = record["objective"], record["lower"]
        bounds = None if objective in (ADAPTER, BASE, CONSTANT) else Range(lower, record["upper"])
        scale = lower if objective == CONSTANT else 1.0
        return cls(bounds, objective, record["seed"], record["adapter"], record.get("temperature"), scale)


def parse_candidates(text: str, objective: str = "entropy", seed: int = 0) -> tuple[Candidate, ...]:
    """Candidates as typed: ranges separated by semicolons, each with its objective behind an @ where it has one of its own.

    Args:
        text: "0,1;-6,3;-3,1@anchored".
        objective, seed: of those that name none.

    What is no range or objective, stands there twice, or nothing at all is a ConfigError.
    """
    found: list[Candidate] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        bounds, _, own = part.partition("@")
        name = own.strip() or objective
        if name not in GATE_OBJECTIVES:
            raise ConfigError(f"the range {part} has the unknown objective {name!r}{nearest(name, GATE_OBJECTIVES)}")
        one = Candidate(Range.parse(bounds), name, seed)
        if one in found:
            raise ConfigError(f"in {text!r} the range {part} stands there twice; each is tried once")
        found.append(one)
    if not found:
        raise ConfigError(f"found no range in {text!r}; give at least one, such as -3,1")
    return tuple(found)


def grid(
    adapter: str, ranges: Sequence[Range], seeds: Sequence[int], objectives: Sequence[str]
) -> tuple[Candidate, ...]:
    """The product, and before it the adapter itself, by its label; a ConfigError names what is missing, or there twice."""
    for name, values in (("range", ranges), ("seed", seeds), ("objective", objectives)):
        if not values:
            raise ConfigError(f"the sweep has no {name}; give at least one")
        if repeated := [value for value in values if list(values).count(value) > 1]:
            raise ConfigError(f"the {name} {repeated[0]} is given twice; each trial runs once")
    trained = (Candidate(one, objective, seed, adapter) for objective in objectives for seed in seeds for one in ranges)
    return (Candidate(None, ADAPTER, adapter=adapter), *trained)


def label_of(place: str) -> str:
    """A short name of an adapter's folder or hub id, fit for a file: the end of it."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", Path(place).name).strip("-.") or "adapter"
