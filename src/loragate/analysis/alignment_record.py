"""`alignment.json`: the theorem's terms on given rows, per module and over checkpoints, and what they say."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loragate.analysis.alignment import Terms
from loragate.analysis.coordinates import GROUPS, Agreement, best_and_worst
from loragate.analysis.directions import RowDirections
from loragate.analysis.record import SCHEMA, About


@dataclass(frozen=True)
class Update:
    """What training did between two stored points.

    Attributes:
        begin, end: names of the points.
        norm: ‖u‖ of the update u = ψ(end) − ψ(begin).
        gain: ⟨∇V(begin), u⟩, its first-order effect on the task value; above 0 it helped (the paper's test).
        cosine: between u and ∇V(begin); None where one is zero.
        descent: cosine between u and Ĝ_k(begin): how far the optimiser went along entropy descent.
    """

    begin: str
    end: str
    norm: float
    gain: float
    cosine: float | None
    descent: float | None


@dataclass(frozen=True)
class AlignmentRecord:
    """`alignment.json`.

    Attributes:
        about: models, source, seed, versions.
        value: "reference", "reward" or "rollouts".
        value_of: what the value was taken from, in words.
        rows, tokens: what the means are over.
        k: support of the entropy objective.
        top_is_best: share of positions whose likeliest action is among those of the highest value on the support; the
            margin m > 0 of eq:rw-margin, read position by position.
        all: terms on all gate parameters.
        modules: terms on each module's own parameters.
        checkpoints: terms on all parameters at each stored point of training, in order; empty where none was given.
        updates: between consecutive points.
        coordinates: agreement of signs (eq:rw-coordinate-signal) over everything, per class, per module.
        conclusion: what it says, in sentences.
    """

    about: About
    value: str
    value_of: str
    rows: int
    tokens: int
    k: int
    top_is_best: float
    all: Terms
    modules: tuple[Terms, ...]
    checkpoints: tuple[Terms, ...]
    updates: tuple[Update, ...]
    coordinates: tuple[Agreement, ...]
    conclusion: tuple[str, ...]
    kind: str = "alignment"
    schema: int = SCHEMA


def mean_direction(rows: Sequence[RowDirections], name: str) -> Tensor:
    """The mean direction over all counted positions, [P] fp64."""
    return torch.stack([row.vectors[name].double() for row in rows]).sum(0) / sum(row.tokens for row in rows)


def updates(points: Mapping[str, Tensor], directions: Mapping[str, Mapping[str, Tensor]]) -> tuple[Update, ...]:
    """What training did between consecutive points.

    Args:
        points: {name: gate parameters [P]} in order.
        directions: {name: {"entropy_semi", "value"}} mean directions there.
    """
    names = list(points)
    found = []
    for begin, end in itertools.pairwise(names):
        moved = points[end].double() - points[begin].double()
        value, entropy = directions[begin]["value"], directions[begin]["entropy_semi"]
        found.append(
            Update(
                begin,
                end,
                float(moved.norm()),
                float(value @ moved),
                _cosine(value, moved),
                _cosine(entropy, moved),
            )
        )
    return tuple(found)


def _cosine(a: Tensor, b: Tensor) -> float | None:
    size = float(a.norm() * b.norm())
    return float(np.clip(float(a @ b) / size, -1, 1)) if size > 0 else None


def conclude(record: AlignmentRecord) -> tuple[str, ...]:
    """What was found, in sentences."""
    total = record.all.total
    text = []
    if total.cosine is None or total.angle is None or total.rho is None:
        which = "entropy" if total.entropy_norm == 0 else "task"
        text.append(f"Nothing can be said about the condition: the {which} direction is exactly zero at these gates.")
    else:
        says = {
            "holds": "the theorem's condition can be met: a small step of training raises the task value",
            "fails": "the theorem's condition fails for every β: a small step of training does not raise the task value",
            "not shown": "whether the theorem's condition can be met is not shown: the interval includes 90°",
        }[total.verdict]
        ends = ""
        if total.cosine.low is not None and total.cosine.high is not None:
            ends = f" ({total.cosine.low:.2f} to {total.cosine.high:.2f})"
        text.append(
            f"At these gates {says}. The direction of training and that of the task value enclose {total.angle:.0f}°, cosine "
            f"{total.cosine.mean:.2f}{ends}, so the smallest ρ is {total.rho.mean:.3f}."
        )
    errors = []
    if record.all.stopped_error is not None:
        share = _percent(record.all.stopped_error)
        errors.append(f"stopping the gradient at the gates' inputs changes the direction by {share}")
    if record.all.tail_error is not None:
        share = _percent(record.all.tail_error)
        errors.append(f"leaving out the tail beyond the top {record.k} changes the task direction by {share}")
    if errors:
        text.append(f"{'; '.join(errors)} of its length.".capitalize())
    everything = next((row for row in record.coordinates if row.name == "all"), None)
    if everything is not None:
        text.append(
            f"Single λ (module and position): entropy points the right way for {100 * everything.share.mean:.0f} % of "
            f"{everything.coordinates:,}, {100 * everything.weighted.mean:.0f} % when weighted by what they matter for the "
            f"value. The likeliest token is the best one at {100 * record.top_is_best:.0f} % of the positions."
        )
        ends_of_classes = best_and_worst(record.coordinates, GROUPS)
        if ends_of_classes is not None and ends_of_classes[0] is not ends_of_classes[1]:
            best, worst = ends_of_classes
            text.append(
                f"It is most often right where {_where(best)} ({100 * best.weighted.mean:.0f} %) and least where "
                f"{_where(worst)} ({100 * worst.weighted.mean:.0f} %)."
            )
    held = [row for row in record.modules if row.total.verdict == "holds"]
    failed = [row for row in record.modules if row.total.verdict == "fails"]
    if record.modules:
        text.append(
            f"Module by module the condition holds in {len(held)}, fails in {len(failed)} and is open in "
            f"{len(record.modules) - len(held) - len(failed)} of {len(record.modules)}."
        )
    if record.updates:
        helped = sum(update.gain > 0 for update in record.updates)
        text.append(
            f"Over training, {helped} of {len(record.updates)} stretches between checkpoints went towards a higher task value "
            "to first order."
        )
    return tuple(text)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 5e-4 else "less than 0.05 %"


def _where(row: Agreement) -> str:
    names = {"prompt": "the prompt is read", "end": "the answer's end comes next", "space": "white space comes next"}
    return names.get(row.name, f"{row.name} come next")
