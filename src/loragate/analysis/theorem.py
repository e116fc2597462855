"""Does entropy descent raise the task value? The terms of the paper's theorem, which its experiments do not measure.

With v = ∇V_k or ∇V (task direction) and G = Ĝ_k or G_k (entropy direction), the theorem asks for a β > 0 and a ρ < 1 with
‖G − βv‖ ≤ ρβ‖v‖. The left side over the right is smallest at β* = ‖G‖²/⟨G, v⟩, where ρ* = sin of the angle between G and
v. So **the condition can be met exactly when the angle is below 90°**, and ρ* says how well; with a right or obtuse angle
no β does. (β is free in the paper; nothing else in the condition is.)

Everything is computed from inner products between rows' directions, so that rows can be drawn again for intervals.

Shapes: N rows, W draws, 4 directions in the order of `directions.NAMES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loragate.analysis.directions import NAMES, RowDirections
from loragate.analysis.rows import Array, Interval, percentiles, row_weights

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
    """All terms on one set of gate parameters: all of them, a module's, or those of a checkpoint.

    Attributes:
        name: "all", a module path, or a point of training ("start", "step 100", "end").
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
