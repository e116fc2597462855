"""What a sweep consists of: its trials, and everything else that its numbers depend on.

Both are written to `sweep.json` before anything runs. A resumed sweep must be the same sweep.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from loragate.errors import ConfigError, DataError
from loragate.files import first_difference, write_json
from loragate.gates.range import Range

RECORD = "sweep.json"
UNTOUCHED = "adapter"


@dataclass(frozen=True, order=True)
class Trial:
    """One training of gates and its scores, or the untouched adapter and its scores.

    Attributes:
        adapter: label of the adapter.
        lower, upper: bounds of λ; both 1 for the untouched adapter.
        seed: of the gates' start and of the order of the rows.
        objective: of the training; "adapter" for the untouched adapter.
    """

    adapter: str
    lower: float
    upper: float
    seed: int
    objective: str

    @classmethod
    def untouched(cls, adapter: str) -> Trial:
        """The adapter itself, λ = 1."""
        return cls(adapter, 1.0, 1.0, 0, UNTOUCHED)

    @property
    def kind(self) -> Literal["adapter", "gates"]:
        """Whether something is trained."""
        return "adapter" if self.objective == UNTOUCHED else "gates"

    @property
    def range(self) -> Range:
        """[lower, upper] as a value."""
        return Range(self.lower, self.upper)

    @property
    def slug(self) -> str:
        """Its folder: stable, unique, and fit for every file system."""
        if self.kind == "adapter":
            return f"{self.adapter}_untouched"
        return f"{self.adapter}_{self.objective}_{self.range.slug}_seed{self.seed}"

    @property
    def name(self) -> str:
        """As printed: "[-3,1] entropy, seed 0"."""
        if self.kind == "adapter":
            return "adapter, λ = 1"
        return f"{self.range} {self.objective}, seed {self.seed}"


@dataclass(frozen=True)
class SweepPlan:
    """All trials, in the order in which they are started, and what their numbers depend on.

    Attributes:
        trials: the untouched adapters first.
        identity: JSON-able; equal identities give equal numbers.
    """

    trials: tuple[Trial, ...]
    identity: Mapping[str, Any]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the identity; every result carries it."""
        text = json.dumps(self.identity, sort_keys=True, ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """The content of sweep.json."""
        content = {
            "format": "loragate sweep",
            "version": 1,
            **self.identity,
            "fingerprint": self.fingerprint,
            "trials": {trial.slug: asdict(trial) for trial in self.trials},
        }
        return json.loads(json.dumps(content))

    @classmethod
    def read(cls, folder: Path) -> SweepPlan:
        """The plan of a sweep that was begun in `folder`.

        Raises:
            DataError: if there is none, or it cannot be read.
        """
        path = folder / RECORD
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            trials = tuple(Trial(**trial) for trial in record.pop("trials").values())
            fingerprint = record.pop("fingerprint")
            plan = cls(trials, {key: value for key, value in record.items() if key not in ("format", "version")})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: not the record of a sweep ({error}); give the --out of `loragate sweep`"
            ) from None
        if plan.fingerprint != fingerprint:
            raise DataError(f"{path} was changed by hand: its fingerprint is of other settings; restore it")
        return plan

    def begin(self, folder: Path, resume: bool) -> None:
        """Write down what is being swept, or check that a resumed sweep is the same.

        Raises:
            ConfigError: naming the first difference.
            DataError: if the stored record cannot be read.
        """
        path, wanted = folder / RECORD, self.as_dict()
        if not resume:
            write_json(path, wanted)
            return
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path}: cannot be read ({error}); the sweep cannot be resumed, choose another --out"
            ) from error
        without = {"fingerprint": None}  # follows from the rest and says nothing to a person
        found = first_difference({**stored, **without}, {**wanted, **without})
        if found is not None:
            key, before, now = found
            raise ConfigError(
                f"--resume: {path} was begun with {key} = {before!r:.80}, now it is {now!r:.80}; repeat the command with the "
                "same settings, or choose another --out"
            )


def make_trials(
    adapters: Iterable[str], ranges: Sequence[Range], seeds: Sequence[int], objectives: Sequence[str]
) -> tuple[Trial, ...]:
    """The product, one adapter after the other so that workers seldom change it; each adapter itself comes first.

    Raises:
        ConfigError: for nothing to do, or a trial that is there twice.
    """
    for name, values in (("range", ranges), ("seed", seeds), ("objective", objectives)):
        if not values:
            raise ConfigError(f"the sweep has no {name}; give at least one")
        if repeated := [value for value in values if list(values).count(value) > 1]:
            raise ConfigError(f"the {name} {repeated[0]} is given twice; each trial runs once")
    trials: list[Trial] = []
    for adapter in adapters:
        trials.append(Trial.untouched(adapter))
        trials += [
            Trial(adapter, one.lower, one.upper, seed, objective)
            for objective in objectives
            for seed in seeds
            for one in ranges
        ]
    return tuple(trials)


def label_adapters(places: Sequence[str]) -> dict[str, str]:
    """{short label: place} for folders or hub ids, the label being the end of the place.

    Raises:
        ConfigError: for none, or the same place twice.
    """
    labels: dict[str, str] = {}
    if not places:
        raise ConfigError("the sweep has no adapter; give --adapter FOLDER")
    for place in places:
        if any(_same_place(place, other) for other in labels.values()):
            raise ConfigError(f"the adapter {place} is given twice; each trial runs once")
        stem = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(place).name).strip("-.") or "adapter"
        label, number = stem, 2
        while label in labels:
            label, number = f"{stem}-{number}", number + 1
        labels[label] = place
    return labels


def _same_place(one: str, other: str) -> bool:
    return one == other or (
        Path(one).exists() and Path(other).exists() and Path(one).resolve() == Path(other).resolve()
    )
