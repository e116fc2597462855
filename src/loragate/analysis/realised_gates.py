"""What the gates do on generated tokens: realised λ per layer, module type and token class.

An answer is read again with the gated model, and every λ that took part in choosing one of its tokens is counted: the λ
of all modules at the position whose logits the token was drawn from ("written", the default), or at the position where
the token itself is read ("read"). Teacher-forced λ are those of the generation up to rounding. Shares follow the paper's
table, as `loragate.gates.recording` counts them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from loragate.analysis.delta_entropy import Histogram
from loragate.analysis.rows import CLASSES, Interval, Reader, Row, TokenClasses, ratio, unheard
from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.subject import SCHEMA, About, Subject
from loragate.gates import attached_config, trace_gates
from loragate.gates.range import Range
from loragate.gates.recording import STATISTICS, Shares, regions
from loragate.generation import OnProgress
from loragate.training.scoring import counted

Position = Literal["written", "read"]
LEAST = 50
_BINS_PER_UNIT = 4


@dataclass(frozen=True)
class ModuleGates:
    """One gated module. `layer` is None outside numbered layers; `type` is the last part of the name."""

    module: str
    layer: int | None
    type: str
    all: Shares
    by_class: dict[str, Shares]
    histogram: tuple[int, ...]


@dataclass(frozen=True)
class GatesRecord:
    """`gates.json`.

    Attributes:
        about: models, source, seed, versions.
        lower, upper: the range.
        position: "written" or "read".
        answers, tokens: what was read.
        token_counts: tokens by class.
        below_zero, zero_to_one, above_one: shares over all coefficients with intervals over answers' questions.
        all, by_class, by_layer, by_type, modules: λ by token class, layer, module type and module.
        histogram: of λ over all coefficients; 0 and 1 are edges.
        conclusion: what it says, in sentences.
    """

    about: About
    lower: float
    upper: float
    position: Position
    answers: int
    tokens: int
    token_counts: dict[str, int]
    below_zero: Interval
    zero_to_one: Interval
    above_one: Interval
    all: Shares
    by_class: dict[str, Shares]
    by_layer: dict[str, Shares]
    by_type: dict[str, Shares]
    modules: tuple[ModuleGates, ...]
    histogram: Histogram
    conclusion: tuple[str, ...]
    kind: str = "realised gates"
    schema: int = SCHEMA


def histogram_edges(bounds: Range) -> np.ndarray:
    """Edges from L to U with 0 and 1 among them, about four bins for each unit of λ."""
    parts = [np.linspace(0.0, 1.0, _BINS_PER_UNIT + 1)]
    if bounds.lower < 0:
        parts.insert(0, np.linspace(bounds.lower, 0.0, max(1, round(-bounds.lower * _BINS_PER_UNIT)) + 1)[:-1])
    if bounds.upper > 1:
        parts.append(np.linspace(1.0, bounds.upper, max(1, round((bounds.upper - 1) * _BINS_PER_UNIT)) + 1)[1:])
    return np.concatenate(parts)


def diagnose_gates(subject: Subject, settings: DiagnoseSettings) -> GatesRecord:
    """Realised λ on answers, stored or drawn now; writes gates.json.

    Raises:
        ConfigError: where there is neither a run nor a task, and as `Subject.begin`.
    """
    subject.require_answers(settings)
    subject.begin(drawing=not settings.run)
    found, source = subject.answers(settings.of or "gated", settings)
    position = settings.position
    rows: list[Row] = []
    groups: list[int] = []
    for one in found:
        first = max(groups, default=-1) + 1
        rows += one.rows(subject.loaded.tokenizer)
        groups += [first + sample.question for sample in one.samples]
    with subject.job("reading the answers with the gates", len(rows)) as on_progress:
        counts = count_gates(subject.reader, rows, groups, subject.classes, position, subject.batch_size, on_progress)
    about = subject.about(source, settings, "position answers limit")
    return subject.keep(summarise(counts, about, position, len(rows), subject.seed), "gates")


class GateCounts:
    """Sums over realised λ, filled batch by batch.

    Attributes:
        sums: [modules, classes, statistics] float64.
        bins: [modules, bins] int64.
        groups: [groups, (count, below, above)] by the caller's group of each row (question), for intervals.
    """

    def __init__(self, modules: Sequence[str], bounds: Range, groups: int) -> None:
        self.modules, self.bounds = list(modules), bounds
        self.edges = histogram_edges(bounds)
        self.sums = np.zeros((len(self.modules), len(CLASSES), len(STATISTICS)))
        self.bins = np.zeros((len(self.modules), len(self.edges) - 1), dtype=np.int64)
        self.groups = np.zeros((groups, 3))
        self.token_counts = np.zeros(len(CLASSES), dtype=np.int64)

    def add(self, lam_MT: torch.Tensor, classes_T: np.ndarray, groups_T: np.ndarray) -> None:
        """Count λ [modules, tokens] of tokens with these classes and groups."""
        values = lam_MT.double()
        parts_SMT = torch.stack(regions(values, self.bounds)).numpy()
        member_TC = (classes_T[:, None] == np.arange(len(CLASSES))[None]).astype(np.float64)
        self.sums += np.moveaxis(parts_SMT @ member_TC, 0, -1)
        for column, part_MT in enumerate(parts_SMT[:3]):  # count, below, above
            self.groups[:, column] += np.bincount(groups_T, part_MT.sum(0), minlength=len(self.groups))
        for module, row in enumerate(values.clamp(self.bounds.lower, self.bounds.upper).numpy()):
            self.bins[module] += np.histogram(row, self.edges)[0]
        self.token_counts += member_TC.sum(0).astype(np.int64)


def count_gates(
    reader: Reader,
    rows: Sequence[Row],
    groups: Sequence[int],
    classes: TokenClasses,
    position: Position = "written",
    batch_size: int = 16,
    on_progress: OnProgress = unheard,
) -> GateCounts:
    """Realised λ of the gated model on the response tokens of `rows`.

    Args:
        groups: of each row, from 0; rows of one group (answers to one question) are drawn together for intervals.
    """
    # gates are in the body; the head would make logits over the vocabulary for every position, and nobody reads them
    body, config = reader.causal.base_model, attached_config(reader.model)
    shift = 0 if position == "written" else 1
    found: GateCounts | None = None
    for batch, rows_T, ids_T in reader.batches(rows, batch_size, on_progress):
        with torch.no_grad(), trace_gates(reader.model) as traced:
            body(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
        mask = counted(batch).cpu()
        count, width = mask.shape
        # modules that see routed tokens (experts) have no λ per position
        whole = {path: one[0] for path, one in traced.items() if one and one[0].shape == (count, width + 1)}
        if found is None:
            found = GateCounts(list(whole), config.range, max(groups) + 1)
        lam_MT = torch.stack([values[:, shift : shift + width][mask] for values in whole.values()])
        found.add(lam_MT, classes.indices(ids_T), np.asarray(groups)[rows_T])
    assert found is not None
    return found


def summarise(counts: GateCounts, about: About, position: Position, answers: int, seed: int = 0) -> GatesRecord:
    """The record of what was counted."""
    places = [_place(path) for path in counts.modules]
    layers = sorted({layer for layer, _ in places if layer is not None})
    types = list(dict.fromkeys(kind for _, kind in places))
    modules = tuple(
        ModuleGates(
            module=path,
            layer=layer,
            type=kind,
            all=Shares.of(sums.sum(0)),
            by_class=_by_class(sums),
            histogram=tuple(bins.tolist()),
        )
        for path, (layer, kind), sums, bins in zip(counts.modules, places, counts.sums, counts.bins, strict=True)
    )

    def over(at: int, value: Any) -> Shares:
        chosen = [place[at] == value for place in places]
        return Shares.of(counts.sums[chosen].sum((0, 1)))

    total, below, above = counts.groups.T
    record = GatesRecord(
        about=about,
        lower=counts.bounds.lower,
        upper=counts.bounds.upper,
        position=position,
        answers=answers,
        tokens=int(counts.token_counts.sum()),
        token_counts={name: int(n) for name, n in zip(CLASSES, counts.token_counts, strict=True) if n},
        below_zero=ratio(below, total, seed),
        zero_to_one=ratio(total - below - above, total, seed),
        above_one=ratio(above, total, seed),
        all=Shares.of(counts.sums.sum((0, 1))),
        by_class=_by_class(counts.sums.sum(0)),
        by_layer={str(layer): over(0, layer) for layer in layers},
        by_type={kind: over(1, kind) for kind in types},
        modules=modules,
        histogram=Histogram(tuple(counts.edges.tolist()), tuple(counts.bins.sum(0).tolist())),
        conclusion=(),
    )
    return replace(record, conclusion=conclude(record))


def conclude(record: GatesRecord) -> tuple[str, ...]:
    """What the gates do, in sentences."""
    everything = record.all
    text = [
        f"On {record.tokens:,} tokens of {record.answers} answers the gates reverse the delta (λ < 0) in "
        f"{100 * everything.below_zero:.1f} %, keep it within [0, 1] in {100 * everything.zero_to_one:.1f} % and extrapolate "
        f"it (λ > 1) in {100 * everything.above_one:.1f} % of the coefficients; the mean λ is {everything.mean:.2f}."
    ]
    for verb, name, possible, end in (
        ("reverse", "below_zero", record.lower < 0, "starts at 0"),
        ("extrapolate", "above_one", record.upper > 1, "ends at 1"),
    ):
        if not possible:
            text.append(f"They cannot {verb}: the range {end}.")
            continue
        found = most(record, name)
        if found is None:
            text.append(f"They {verb} nowhere.")
            continue
        module, kind, shares = found
        place = f"layer {module.layer} {module.type}" if module.layer is not None else module.module
        text.append(
            f"They {verb} most in {place} on {kind} ({100 * getattr(shares, name):.0f} % of {shares.count} coefficients)."
        )
    ends = everything.at_lower + everything.at_upper
    text.append(
        f"{100 * ends:.1f} % of the coefficients are saturated ({100 * everything.at_lower:.1f} % at L = {record.lower:g}, "
        f"{100 * everything.at_upper:.1f} % at U = {record.upper:g}): there tanh has no slope left and training cannot move "
        "them."
        if ends > 0
        else "No coefficient is saturated at an end of the range."
    )
    return tuple(text)


def most(record: GatesRecord, name: str) -> tuple[ModuleGates, str, Shares] | None:
    """The module and token class with the largest share, among those with at least 50 coefficients (or all, if none)."""
    cells = [(module, kind, shares) for module in record.modules for kind, shares in module.by_class.items()]
    frequent = [cell for cell in cells if cell[2].count >= LEAST] or cells
    best = max(frequent, key=lambda cell: getattr(cell[2], name))
    return best if getattr(best[2], name) > 0 else None


def _place(path: str) -> tuple[int | None, str]:
    number = re.search(r"\.(\d+)\.", path)
    return (int(number.group(1)) if number else None), path.rsplit(".", 1)[-1]


def _by_class(sums_CX: np.ndarray) -> dict[str, Shares]:
    return {name: Shares.of(row) for name, row in zip(CLASSES, sums_CX, strict=True) if row[0] > 0}
