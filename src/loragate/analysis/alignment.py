"""Does entropy descent raise a task value? The terms of the paper's theorem, which its experiments do not measure: at the gates
and module by module.

With v = ∇V_k or ∇V (task direction) and G = Ĝ_k or G_k (entropy direction), the theorem asks for a β > 0 and a ρ < 1 with
‖G − βv‖ ≤ ρβ‖v‖. The left side over the right is smallest at β* = ‖G‖²/⟨G, v⟩, where ρ* = sin of the angle between G and
v. So **the condition can be met exactly when the angle is below 90°**, and ρ* says how well; with a right or obtuse angle
no β does. (β is free in the paper; nothing else in the condition is.)

Everything is computed from inner products between rows' directions, so that rows can be drawn again for intervals.

Shapes: N rows, W draws, 4 directions in the order of `directions.NAMES`, P gate parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from loragate.analysis.context import DiagnosticContext, Record
from loragate.analysis.directions import (
    NAMES,
    Agreement,
    RowDirections,
    agreements,
    by_group,
    coordinate_sums,
    gather,
    parameter_slices,
    row_directions,
)
from loragate.analysis.rows import Array, Interval, percentiles, require_finite, row_weights
from loragate.analysis.settings import DiagnoseSettings
from loragate.errors import ConfigError
from loragate.gates import train_gates_only
from loragate.gates.schema import read_gate_config
from loragate.losses.entropy import support_size

LEAST = 50  # coordinates that a class needs to be called the best or the worst
Verdict = Literal["holds", "fails", "not shown"]
SEMI, FULL, TOPK, VALUE = range(len(NAMES))
DRAWS = 1000


@dataclass(frozen=True)
class Condition:
    """Whether one form of the theorem's condition can be met.

    Attributes:
        entropy_norm, value_norm: ‖G‖ and ‖v‖.
        cosine: of the angle between G and v, with its interval over rows; None where one of them is zero.
        angle: in degrees.
        rho: ρ* = sin of the angle, 1 where it is 90° or more.
        verdict: "holds" where the whole interval of the cosine lies above 0, "fails" where it lies at or below 0,
            "not shown" otherwise.
    """

    entropy_norm: float
    value_norm: float
    cosine: Interval | None
    angle: float | None
    rho: Interval | None
    verdict: Verdict


@dataclass(frozen=True)
class Terms:
    """All terms on one set of gate parameters: all of them, or a module's.

    Attributes:
        name: "all", or a module path.
        complete: G_k against ∇V_k, the error being e_ψ (eq:rw-alignment-identity, Assumption 1).
        stopped: Ĝ_k against ∇V_k, the error being e_ψ + b_sg (eq:rw-stopped-alignment).
        total: Ĝ_k against ∇V, the error being e_total = e_ψ + b_sg + b_tail (eq:rw-total-error): what training does
            against the value over the full vocabulary.
        stopped_error: ‖b_sg‖/‖G_k‖, b_sg = Ĝ_k − G_k (eq:rw-stopped-directions); 0 at zero gates, None if G_k = 0.
        tail_error: ‖∇V_k − ∇V‖/‖∇V‖, which is ‖b_tail‖/(β‖∇V‖) for every β; None if ∇V = 0.
        gain: ⟨∇V, Ĝ_k⟩, the first-order gain in V per unit of step η/log k (the paper's test for any update u:
            ⟨∇V, u⟩ > 0), with its interval.
    """

    name: str
    complete: Condition
    stopped: Condition
    total: Condition
    stopped_error: float | None
    tail_error: float | None
    gain: Interval


def terms(
    name: str, rows: Sequence[RowDirections], place: slice = slice(None), seed: int = 0, draws: int = DRAWS
) -> Terms:
    """The terms on the gate parameters in one place of the directions, with intervals over rows."""
    flat = np.concatenate([row.vectors[:, place].numpy() for row in rows]).astype(np.float64)  # [N·4, P']
    require_finite(flat, f"the directions of {name}, in their gate parameters")
    gram = (flat @ flat.T).reshape(len(rows), -1)  # [N, 4·N·4], of sums over positions
    tokens = np.array([row.tokens for row in rows], dtype=np.float64)

    def means(weights_WN: Array) -> Array:
        """Inner products of the mean directions, [W, 4, 4], for rows counted so often.

        The mean of direction i is Σ_n w_n v_ni / Σ_n w_n tokens_n, and so ⟨i, j⟩ = Σ_nm w_n w_m ⟨v_ni, v_mj⟩ over that squared:
        drawing rows again needs the inner products alone, not vectors of the length of all gates.
        """
        left = (weights_WN @ gram).reshape(-1, len(NAMES), len(rows), len(NAMES))
        products: Array = np.einsum("dinj,dn->dij", left, weights_WN)
        return products / (weights_WN @ tokens)[:, None, None] ** 2

    point = means(np.ones((1, len(rows))))[0]
    # one row drawn again and again is the same row: no interval
    drawn = means(row_weights(len(rows), draws if len(rows) > 1 else 0, seed))
    return Terms(
        name=name,
        complete=condition(point, drawn, FULL, TOPK),
        stopped=condition(point, drawn, SEMI, TOPK),
        total=condition(point, drawn, SEMI, VALUE),
        stopped_error=relative(point[SEMI, SEMI] - 2 * point[SEMI, FULL] + point[FULL, FULL], point[FULL, FULL]),
        tail_error=relative(point[TOPK, TOPK] - 2 * point[TOPK, VALUE] + point[VALUE, VALUE], point[VALUE, VALUE]),
        gain=Interval(float(point[VALUE, SEMI]), *percentiles(drawn[:, VALUE, SEMI])),
    )


def condition(point: Array, drawn: Array, entropy: int, value: int) -> Condition:
    """One form of the condition from inner products [4, 4] and bootstrap draws [W, 4, 4]."""
    g, v, inner = (float(point[a, b]) for a, b in ((entropy, entropy), (value, value), (entropy, value)))
    norms = math.sqrt(max(g, 0.0)), math.sqrt(max(v, 0.0))
    if norms[0] == 0 or norms[1] == 0:
        return Condition(*norms, None, None, None, "not shown")
    cosine = max(-1.0, min(1.0, inner / (norms[0] * norms[1])))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = drawn[:, entropy, value] / np.sqrt(drawn[:, entropy, entropy] * drawn[:, value, value])
    low, high = percentiles(cosines)
    # ρ falls as the cosine rises, so that its low end comes from the cosine's high one
    rho_low, rho_high = (None, None) if low is None or high is None else (smallest_rho(high), smallest_rho(low))
    return Condition(
        entropy_norm=norms[0],
        value_norm=norms[1],
        cosine=Interval(cosine, low, high),
        angle=math.degrees(math.acos(cosine)),
        rho=Interval(smallest_rho(cosine), rho_low, rho_high),
        verdict="not shown" if low is None or high is None or low <= 0 < high else "holds" if low > 0 else "fails",
    )


def smallest_rho(cosine: float) -> float:
    """The smallest ρ with ‖G − βv‖ ≤ ρβ‖v‖ over all β > 0: the sine of the angle, 1 (not attained) from 90° on."""
    return math.sqrt(max(0.0, 1.0 - cosine * cosine)) if cosine > 0 else 1.0


def relative(difference_squared: float, reference_squared: float) -> float | None:
    """‖a − b‖/‖b‖ from squared norms; None where the reference is zero."""
    return math.sqrt(max(difference_squared, 0.0) / reference_squared) if reference_squared > 0 else None


@dataclass(frozen=True, kw_only=True)
class AlignmentRecord(Record):
    """`alignment.json`.

    Attributes:
        value_of: what the value was taken from, in words.
        rows: what the intervals are over: rows that differ, or questions, all answers to one together.
        tokens: what the means are over.
        k: support of the entropy objective.
        top_is_best: share of positions whose likeliest action is among those of the highest value on the support; the
            margin m > 0 of eq:rw-margin, read position by position.
        all: terms on all gate parameters.
        modules: terms on each module's own parameters.
        coordinates: agreement of signs (eq:rw-coordinate-signal) over everything and per class.
    """

    value_of: str
    rows: int
    tokens: int
    k: int
    top_is_best: float
    all: Terms
    modules: tuple[Terms, ...]
    coordinates: tuple[Agreement, ...]
    kind: Literal["alignment"] = "alignment"


def diagnose_alignment(context: DiagnosticContext, settings: DiagnoseSettings) -> AlignmentRecord:
    """The terms on rows, or on stored answers; writes alignment.json.

    Raises:
        ConfigError: for rows or answers that do not fit the value, and as `DiagnosticContext.begin`.
    """
    if settings.value == "reference" and settings.rows and settings.run:
        raise ConfigError(
            "--value reference reads either --rows FILE or the answers of --run FOLDER; leave out one of them"
        )
    if settings.value == "reward" and settings.rows:
        raise ConfigError("--value reward needs graded answers, not --rows: give --run FOLDER")
    if not settings.rows:
        context.require_answers(settings)
    loaded = context.begin(drawing=False)
    model, reader, seed = loaded.model, context.reader, context.seed
    k = settings.k
    if k is None:  # the paper's where the folder does not say
        trained = read_gate_config(Path(loaded.names["gated"]))["k"]
        k = 100 if trained is None else int(trained)
    k = support_size(k, model.get_output_embeddings().weight.shape[0])
    cases, source, value_of = gather(context, settings)
    train_gates_only(model)  # gates that are loaded are frozen
    with context.job("directions", len(cases)) as on_progress:
        rows = by_group(cases, lambda case: row_directions(reader, case, k), on_progress)
    with context.job("single coefficients", len(cases)) as on_progress:
        sums = by_group(cases, lambda case: coordinate_sums(reader, case, k, context.classes), on_progress)
    tokens = sum(row.tokens for row in rows)
    slices = parameter_slices(model).items()
    record = AlignmentRecord(
        about=context.about(source, settings, "value reference max_rows max_length"),
        value_of=value_of,
        rows=len(rows),
        tokens=tokens,
        k=k,
        top_is_best=sum(row.top_is_best for row in rows) / tokens,
        all=terms("all", rows, seed=seed),
        modules=tuple(terms(path, rows, place, seed, DRAWS // 2) for path, place in slices),
        coordinates=agreements(sums, seed),
    )
    return context.write_record(record, "alignment", conclude_alignment)


def conclude_alignment(record: AlignmentRecord) -> tuple[str, ...]:
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
        text.append(
            f"At these gates {says}. The direction of training and that of the task value enclose {total.angle:.0f}°, cosine "
            f"{total.cosine.mean:.2f}{total.cosine.ends()}, so the smallest ρ is {total.rho.mean:.3f}."
        )
    errors = []
    for what, share in (
        ("stopping the gradient at the gates' inputs changes the direction", record.all.stopped_error),
        (f"leaving out the tail beyond the top {record.k} changes the task direction", record.all.tail_error),
    ):
        if share is not None:
            errors.append(f"{what} by {100 * share:.1f} %" if share >= 5e-4 else f"{what} by less than 0.05 %")
    if errors:
        text.append(f"{'; '.join(errors)} of its length.".capitalize())
    if record.coordinates:
        everything, *classes = record.coordinates
        text.append(
            f"Single λ (module and position): entropy points the right way for {100 * everything.share.mean:.0f} % of "
            f"{everything.coordinates:,}, {100 * everything.weighted.mean:.0f} % when weighted by what they matter for the "
            f"value. The likeliest token is the best one at {100 * record.top_is_best:.0f} % of the positions."
        )
        known = sorted((row for row in classes if row.coordinates >= LEAST), key=lambda row: row.weighted.mean)
        if len(known) > 1:
            text.append(
                f"It is most often right where {_where(known[-1])} ({100 * known[-1].weighted.mean:.0f} %) and least where "
                f"{_where(known[0])} ({100 * known[0].weighted.mean:.0f} %)."
            )
    if record.modules:
        verdicts = [row.total.verdict for row in record.modules]
        text.append(
            f"Module by module the condition holds in {verdicts.count('holds')}, fails in {verdicts.count('fails')} and is open "
            f"in {verdicts.count('not shown')} of {len(verdicts)}."
        )
    return tuple(text)


def _where(row: Agreement) -> str:
    names = {"prompt": "the prompt is read", "end": "the answer's end comes next", "space": "white space comes next"}
    return names.get(row.name, f"{row.name} come next")
