"""Gate by gate and position by position: does entropy push λ the way the task value would?

For the coordinate i = (module, position) the paper's appendix compares −log k·∂F_k/∂λ_i = β h_i + b_i with
h_i = mean Cov_q(r, ∂z/∂λ_i) = ∂V_k/∂λ_i (eq:rw-coordinate-signal): entropy points the right way where both have one sign.
λ is supplied from outside here (eq:rw-causal-jacobian), at the values that the gates give it, so a coordinate's effect
includes all later positions and all later modules, but no other gate's reaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loragate.analysis.bootstrap import Interval, ratio
from loragate.analysis.directions import state_gradients
from loragate.analysis.external import supplied_coefficients
from loragate.analysis.reading import Batch, Reader
from loragate.analysis.task_values import ActionValues
from loragate.analysis.token_classes import CLASSES, TokenClasses
from loragate.gates.attach import gate_modules

PROMPT = "prompt"
GROUPS = (*CLASSES, PROMPT)
"""Class of the token that a position predicts; positions whose next token belongs to the prompt are "prompt"."""
LEAST = 50  # coordinates that a group needs to be called the best or the worst


@dataclass(frozen=True)
class Agreement:
    """How often entropy and task value agree on the sign of a λ's change.

    Attributes:
        name: "all", a class of tokens, or a module path.
        coordinates: number of λ with a non-zero derivative of both.
        share: share of them with one sign, with its interval over rows.
        weighted: the same, each counted by |∂V_k/∂λ|.
        raised: share of the λ that entropy wants larger; value_raised: that the task value wants larger.
    """

    name: str
    coordinates: int
    share: Interval
    weighted: Interval
    raised: float
    value_raised: float


class CoordinateSums:
    """Counts per row, module and class, filled row by row.

    Attributes:
        rows: one array [modules, classes, (count, agree, |h|, |h| where they agree, raised, value raised)] per row.
    """

    def __init__(self, model: Any) -> None:
        self.gates = gate_modules(model)
        self.modules = list(self.gates)
        self.rows: list[np.ndarray] = []

    def add(
        self,
        reader: Reader,
        batch: Batch,
        values: ActionValues,
        k: int,
        classes: TokenClasses,
        prompt_length: int | None = None,
    ) -> None:
        """Take in one row; the model carries the gates as they are.

        Args:
            prompt_length: tokens before the response, where only some of its positions are counted; by default all before the
                first counted token.
        """
        leaves: dict[str, torch.Tensor] = {}

        def leaf(path: str, _layer: Any, x: torch.Tensor) -> torch.Tensor | None:
            if path not in self.gates:
                return None  # the adapter's delta without a gate
            leaves[path] = self.gates[path].coefficients(x).detach().clone().requires_grad_()
            return leaves[path]

        with torch.enable_grad(), supplied_coefficients(reader.model, leaf):
            states = reader.states(batch)
            (entropy, value), _ = state_gradients(reader, states, values, k, ("entropy", "value_topk"))
            order = [leaves[path] for path in self.modules]
            wants = torch.autograd.grad(states, order, entropy, retain_graph=True, allow_unused=True)
            helps = torch.autograd.grad(states, order, value, allow_unused=True)
        labels, ids = batch["labels"][0].tolist(), batch["input_ids"][0].tolist()
        first = next(at for at, label in enumerate(labels) if label >= 0) if prompt_length is None else prompt_length
        groups = np.array(
            [len(CLASSES) if at + 1 < first else classes.index(token) for at, token in enumerate(ids[1:])],
            dtype=np.int64,
        )
        found = np.zeros((len(self.modules), len(GROUPS), 6))
        for index, (want, help_) in enumerate(zip(wants, helps, strict=True)):
            if want is None or help_ is None:
                continue
            w, h = (tensor[0, :-1].double().cpu().numpy() for tensor in (want, help_))
            kept = (w != 0) & (h != 0)
            agree = kept & (np.sign(w) == np.sign(h))
            columns = [kept, agree, kept * np.abs(h), agree * np.abs(h), kept & (w > 0), kept & (h > 0)]
            for column, numbers in enumerate(columns):
                found[index, :, column] = np.bincount(groups, numbers, minlength=len(GROUPS))
        self.rows.append(found)

    def summary(self, groups: Sequence[int], seed: int = 0) -> tuple[Agreement, ...]:
        """Agreement over everything, per class and per module; those with no coordinate are left out.

        Args:
            groups: of each row; rows of one group (answers to one question) are drawn together for intervals.
        """
        order = list(dict.fromkeys(groups))
        table = np.zeros((len(order), len(self.modules), len(GROUPS), 6))
        for group, row in zip(groups, self.rows, strict=True):
            table[order.index(group)] += row
        parts = [("all", table.sum((1, 2)))]
        parts += [(name, table[:, :, index].sum(1)) for index, name in enumerate(GROUPS)]
        parts += [(path, table[:, index].sum(1)) for index, path in enumerate(self.modules)]
        found = [agreement(name, sums, seed) for name, sums in parts]
        return tuple(row for row in found if row is not None)


def agreement(name: str, sums_NX: np.ndarray, seed: int) -> Agreement | None:
    """The agreement of sums per row, [N, 6] in the order of `CoordinateSums.rows`."""
    total = sums_NX.sum(0)
    share, weighted = ratio(sums_NX[:, 1], sums_NX[:, 0], seed=seed), ratio(sums_NX[:, 3], sums_NX[:, 2], seed=seed)
    if share is None or weighted is None:
        return None
    return Agreement(
        name=name,
        coordinates=int(total[0]),
        share=share,
        weighted=weighted,
        raised=float(total[4] / total[0]),
        value_raised=float(total[5] / total[0]),
    )


def best_and_worst(rows: Sequence[Agreement], names: Sequence[str]) -> tuple[Agreement, Agreement] | None:
    """Of the named ones with at least `LEAST` coordinates, those with the largest and smallest weighted share."""
    known = [row for row in rows if row.name in names and row.coordinates >= LEAST]
    if not known:
        return None
    return max(known, key=lambda row: row.weighted.mean), min(known, key=lambda row: row.weighted.mean)
