"""What the gates do: realised λ on generated tokens, and the scores with them clipped, replaced or taken away.

Realised λ: an answer is read again with the gated model, and every λ that took part in choosing one of its tokens is counted: the
λ of all modules at the position whose logits the token was drawn from. Teacher-forced λ are those of the generation up to
rounding. Shares follow the paper's table, as `loragate.gates.control` counts them.

Interventions: the rows go through the same evaluation as `loragate eval` (same questions, random streams, graders), each under
its override of λ, and are compared with the unmodified gates, paired by question. An override that could change no λ of these
gates is refused or left out, because its row would repeat the reference.

Shapes: M modules, T counted tokens of a batch, C token classes, X sums of `loragate.gates.control.SUM_NAMES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from loragate.analysis.context import About, DiagnosticContext, Record
from loragate.analysis.rows import CLASSES, Histogram, Reader, Row, TokenClasses, no_progress, require_finite
from loragate.analysis.settings import DiagnoseSettings
from loragate.display import format_points, percent, pluralize
from loragate.errors import ConfigError
from loragate.evaluation.results import EvaluationRecord, Verdict, verdict
from loragate.evaluation.statistics import Difference, Estimate, compare, simultaneous
from loragate.evaluation.variants import ModelVariant
from loragate.gates import GateConfig, attached_config, trace_gates
from loragate.gates.control import Shares, regions
from loragate.gates.override import Override, parse_override
from loragate.gates.range import Range
from loragate.gates.schema import read_gate_config
from loragate.gates.strength import kind_of, layer_of
from loragate.generation import OnProgress
from loragate.losses.causal_head import response_mask
from loragate.validate import comma_list

PAPER = ("noreverse", "noextrapolate", "unit", "off")
TAKEN = {
    "noreverse": "reversal",
    "noextrapolate": "extrapolation",
    "unit": "leaving [0, 1]",
    "adapter": "gating at all",
}
"""What an intervention takes away, in words."""
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


@dataclass(frozen=True, kw_only=True)
class GatesRecord(Record):
    """`gates.json`.

    Attributes:
        lower, upper: the range.
        answers, tokens: what was read.
        all, by_class, by_layer, by_type, modules: λ by token class, layer, module type and module.
        histogram: of λ over all coefficients; 0 and 1 are edges.
    """

    lower: float
    upper: float
    answers: int
    tokens: int
    all: Shares
    by_class: dict[str, Shares]
    by_layer: dict[str, Shares]
    by_type: dict[str, Shares]
    modules: tuple[ModuleGates, ...]
    histogram: Histogram
    kind: Literal["realised gates"] = "realised gates"


def histogram_edges(bounds: Range) -> np.ndarray:
    """Edges from L to U with 0 and 1 among them, about four bins for each unit of λ."""
    parts = [(low, high) for low, high in ((bounds.lower, 0.0), (0.0, 1.0), (1.0, bounds.upper)) if low < high]
    steps = (max(1, round((high - low) * _BINS_PER_UNIT)) for low, high in parts)
    return np.unique(np.concatenate([np.linspace(*part, n + 1) for part, n in zip(parts, steps, strict=True)]))


def diagnose_gates(context: DiagnosticContext, settings: DiagnoseSettings) -> GatesRecord:
    """Realised λ on stored answers; writes gates.json. An error where there are none."""
    context.require_answers(settings)
    context.begin(drawing=False)
    found, source = context.answers(settings.of or "gated", settings)
    rows = [row for one in found for row in context.answer_rows(one)]
    context.require_rows(rows, source)
    with context.job("reading the answers with the gates", len(rows)) as on_progress:
        about = context.about(source, settings, "answers limit")
        record = measure_realised_gates(context.reader, rows, context.classes, about, context.batch_size, on_progress)
    return context.write_record(record, "gates", conclude_gates)


def measure_realised_gates(
    reader: Reader,
    rows: Sequence[Row],
    classes: TokenClasses,
    about: About,
    batch_size: int = 16,
    on_progress: OnProgress = no_progress,
) -> GatesRecord:
    """Realised λ of the gated model on the response tokens of `rows`, of which there is at least one; nothing is concluded yet."""
    # gates are in the body; the head would make logits over the vocabulary for every position, and nobody reads them
    body, bounds = reader.causal.base_model, attached_config(reader.model).range
    whole: dict[str, torch.Tensor] = {}
    edges, tokens, sums, bins = histogram_edges(bounds), 0, np.zeros(()), np.zeros(())
    for batch, _, ids_T in reader.batches(rows, batch_size, on_progress):
        with torch.no_grad(), trace_gates(reader.model) as traced:
            body(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
        # modules that see routed tokens (experts) have no λ per position
        whole = {path: one[0] for path, one in traced.items() if one and one[0].shape == batch["input_ids"].shape}
        mask = response_mask(batch).cpu()
        # λ at a position acts on the logits of the token after it, so that the last position of all has none to choose
        lam_MT = torch.stack([values[:, :-1][mask] for values in whole.values()]).double()
        require_finite(lam_MT, "λ of the gates, module by token")
        # [X, M, T] @ [T, C], one-hot: sums by class, then [M, C, X]
        member_TC = (classes.indices(ids_T)[:, None] == np.arange(len(CLASSES))).astype(np.float64)
        sums = sums + np.moveaxis(torch.stack(regions(lam_MT, bounds)).numpy() @ member_TC, 0, -1)
        bins = bins + np.histogram(lam_MT.clamp(bounds.lower, bounds.upper).numpy(), edges)[0]
        tokens += len(ids_T)
    places = [(layer_of(path), kind_of(path)) for path in whole]
    layers = sorted({layer for layer, _ in places if layer is not None})
    types = list(dict.fromkeys(kind for _, kind in places))

    def over(at: int, value: object) -> Shares:
        return Shares.from_sums(sums[[place[at] == value for place in places]].sum((0, 1)))

    return GatesRecord(
        about=about,
        lower=bounds.lower,
        upper=bounds.upper,
        answers=len(rows),
        tokens=tokens,
        all=Shares.from_sums(sums.sum((0, 1))),
        by_class=_by_class(sums.sum(0)),
        by_layer={str(layer): over(0, layer) for layer in layers},
        by_type={kind: over(1, kind) for kind in types},
        modules=tuple(
            ModuleGates(path, *place, Shares.from_sums(own.sum(0)), _by_class(own))
            for path, place, own in zip(whole, places, sums, strict=True)
        ),
        histogram=Histogram.of(edges, bins),
    )


def conclude_gates(record: GatesRecord) -> tuple[str, ...]:
    """What the gates do, in sentences."""
    everything = record.all
    text = [
        f"On {pluralize(record.tokens, 'token')} of {pluralize(record.answers, 'answer')} the gates reverse the delta (λ < 0) in "
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
        found = find_peak_cell(record, name)
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


def find_peak_cell(record: GatesRecord, name: str) -> tuple[ModuleGates, str, Shares] | None:
    """The module and token class with the largest share, among those with at least 50 coefficients (or all, if none)."""
    cells = [(module, kind, shares) for module in record.modules for kind, shares in module.by_class.items()]
    frequent = [cell for cell in cells if cell[2].count >= LEAST] or cells
    best = max(frequent, key=lambda cell: getattr(cell[2], name))
    return best if getattr(best[2], name) > 0 else None


def _by_class(sums_CX: np.ndarray) -> dict[str, Shares]:
    return {name: Shares.from_sums(row) for name, row in zip(CLASSES, sums_CX, strict=True) if row[0] > 0}


@dataclass(frozen=True)
class InterventionRow:
    """One intervention on one task; "gated" for the gates as they are, "base" and "adapter" beside them.

    Attributes:
        name, task: of the row and of the task.
        score: Avg@k.
        difference: to what is intervened on (the unmodified gates), paired by question; None for that itself.
        adjusted_p, verdict: p-value after Holm's adjustment over the evaluation, and what it shows; None likewise.
    """

    name: str
    task: str
    score: Estimate
    difference: Difference | None
    adjusted_p: float | None
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True)
class InterventionsRecord(Record):
    """`interventions.json`; the whole evaluation lies beside it in `results.json`.

    Attributes:
        rows: by task, then in the order asked for.
        left_out: interventions that can change no λ of this range, with the reason.
    """

    rows: tuple[InterventionRow, ...]
    left_out: tuple[str, ...]
    kind: Literal["interventions"] = "interventions"


def diagnose_interventions(context: DiagnosticContext, settings: DiagnoseSettings) -> InterventionsRecord:
    """The gates under every intervention, scored on the tasks; writes interventions.json beside the evaluation.

    Raises:
        ConfigError: where no task is named, for what `parse_interventions` refuses, and as `DiagnosticContext.begin`.
    """
    if not context.has_tasks:
        raise ConfigError("loragate diagnose interventions needs --suite or --tasks")
    loaded = context.begin()
    config = GateConfig(**read_gate_config(Path(loaded.names["gated"]))["gate"])
    chosen, left_out = parse_interventions(settings.interventions, config)
    # λ = 1 is the adapter, which has a row of its own
    names = [name for name in chosen if name != "off"]
    rows = [ModelVariant("gated", name, override=name) for name in names]
    record = context.evaluate(
        [ModelVariant("adapter"), ModelVariant("base"), ModelVariant("gated"), *rows], {"interventions": chosen}
    )
    tasks = ", ".join(info.name for info in record.tasks)
    about = context.about(f"tasks {tasks}", settings, "interventions limit samples")
    found = InterventionsRecord(about=about, rows=rows_of(record, names), left_out=tuple(left_out))
    return context.write_record(found, "interventions", conclude_interventions)


def parse_interventions(text: str, config: GateConfig) -> tuple[list[str], list[str]]:
    """The interventions of a comma-separated list, or the paper's where it is empty, and those left out with the reason.

    Raises:
        ConfigError: for an unknown name, or one asked for by name that cannot change any λ.
    """
    names = comma_list(text)
    chosen: list[str] = []
    left_out: list[str] = []
    for name in dict.fromkeys(names or PAPER):
        reason = without_effect(parse_override(name), config)
        if reason and names:
            raise ConfigError(f"--interventions {name} would repeat the gates as they are: {reason}")
        if reason:
            left_out.append(f"{name}: {reason}")
        else:
            chosen.append(name)
    return chosen, left_out


def without_effect(override: Override, config: GateConfig) -> str:
    """Why an override can change no λ of this range; empty where it can."""
    if override.constant is not None:
        return ""
    low = override.minimum is None or override.minimum <= config.lower
    high = override.maximum is None or override.maximum >= config.upper
    return f"λ never leaves [{config.lower:g}, {config.upper:g}]" if low and high else ""


def rows_of(record: EvaluationRecord, interventions: Sequence[str]) -> tuple[InterventionRow, ...]:
    """The rows, by task, with their paired differences to the unmodified gates."""
    wanted = {"adapter", "base", "gated", *(f"gated {name}" for name in interventions)}
    results = [result for result in record.results if result.label in wanted]
    others = [result for result in results if result.label != "gated"]
    # the evaluation's own comparisons are with the adapter; these are with the gates, [Q, 1] each, one mean a question
    scores = {(r.label, r.task): np.array(r.question_scores)[:, None] for r in results}
    differences = [compare(scores[r.label, r.task], scores["gated", r.task]) for r in others]
    shown: dict[tuple[str, str], tuple[Difference, float, Verdict]] = {}
    for one, found, p in zip(others, *simultaneous(differences), strict=True):
        shown[one.label, one.task] = (found, p, verdict(found, p=p))
    nothing = (None, None, None)
    return tuple(
        InterventionRow(r.control or r.variant, r.task, r.avg_at_k, *shown.get((r.label, r.task), nothing))
        for r in results
    )


def conclude_interventions(record: InterventionsRecord) -> tuple[str, ...]:
    """What the interventions show, in sentences."""
    text = []
    for task in dict.fromkeys(row.task for row in record.rows):
        asked = [row for row in record.rows if row.task == task]
        for row in (row for row in asked if row.name in TAKEN):
            says = {"better": "hurts", "worse": "helps"}.get(row.verdict or "", "makes no difference that can be shown")
            text.append(
                f"{task}: {TAKEN[row.name]} {says}: without it the score is {percent(row.score.mean)} %, "
                f"{in_points(row.difference)}."
            )
        best = max(asked, key=lambda row: row.score.mean)
        text.append(f"{task}: the highest score is {percent(best.score.mean)} %, of {best.name}.")
    if record.left_out:
        text.append("Not run, as they can change nothing: " + "; ".join(record.left_out) + ".")
    return tuple(text)


def in_points(difference: Difference | None) -> str:
    """ "+8.4 points (+4.2 to +12.5)"; empty where nothing was compared."""
    if difference is None:
        return ""
    return (
        f"{format_points(difference.mean)} points ({format_points(difference.low)} to {format_points(difference.high)})"
    )
