"""The paper's forward interventions: the trained gates clipped, replaced or taken away at inference, scored side by side.

The rows go through the same evaluation as `loragate eval` (same questions, same random streams, same graders), each under
its override of λ, and are compared with the unmodified gates, paired by question. An override that could change no λ
of these gates is refused or left out, because its row would repeat the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.subject import DiagnosticContext, Record
from loragate.display import percent, points
from loragate.errors import ConfigError
from loragate.evaluation.results import EvaluationRecord, Verdict, verdict
from loragate.evaluation.statistics import Difference, Estimate, compare, holm
from loragate.evaluation.variants import ModelVariant
from loragate.gates import GateConfig
from loragate.gates.override import Override, parse_override
from loragate.gates.schema import read_gate_config
from loragate.validate import comma_list

PAPER = ("noreverse", "noextrapolate", "unit", "off")
# what an intervention takes away, in words
TAKEN = {
    "noreverse": "reversal",
    "noextrapolate": "extrapolation",
    "unit": "leaving [0, 1]",
    "adapter": "gating at all",
}


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


def diagnose_interventions(subject: DiagnosticContext, settings: DiagnoseSettings) -> InterventionsRecord:
    """The gates under every intervention, scored on the tasks; writes interventions.json beside the evaluation.

    Raises:
        ConfigError: where no task is named, for what `choose` refuses, and as `DiagnosticContext.begin`.
    """
    if not subject.has_tasks:
        raise ConfigError("loragate diagnose interventions needs --suite or --tasks")
    loaded = subject.begin()
    config = GateConfig(**read_gate_config(Path(loaded.names["gated"]))["gate"])
    chosen, left_out = choose(settings.interventions, config)
    # λ = 1 is the adapter, which has a row of its own
    names = [name for name in chosen if name != "off"]
    rows = [ModelVariant("gated", name, override=name) for name in names]
    record = subject.evaluate(
        [ModelVariant("adapter"), ModelVariant("base"), ModelVariant("gated"), *rows], {"interventions": chosen}
    )
    tasks = ", ".join(info.name for info in record.tasks)
    about = subject.about(f"tasks {tasks}", settings, "interventions limit samples")
    found = InterventionsRecord(about=about, rows=rows_of(record, names), left_out=tuple(left_out))
    return subject.keep(found, "interventions", conclude)


def choose(text: str, config: GateConfig) -> tuple[list[str], list[str]]:
    """The interventions of a comma-separated list, or the paper's where it is empty, and those left out with the reason.

    Raises:
        ConfigError: for an unknown name, one given twice, or one asked for by name that cannot change any λ.
    """
    names = comma_list(text)
    chosen: list[str] = []
    left_out: list[str] = []
    for name in names or PAPER:
        reason = without_effect(parse_override(name), config)
        if reason and names:
            raise ConfigError(f"--interventions {name} would repeat the gates as they are: {reason}")
        if name in chosen:
            raise ConfigError(f"--interventions names {name} twice")
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
    for one, found, p in zip(others, differences, holm([found.p for found in differences]), strict=True):
        shown[one.label, one.task] = (found, p, verdict(found, p=p))
    nothing = (None, None, None)
    return tuple(
        InterventionRow(r.control or r.variant, r.task, r.avg_at_k, *shown.get((r.label, r.task), nothing))
        for r in results
    )


def conclude(record: InterventionsRecord) -> tuple[str, ...]:
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
    return f"{points(difference.mean)} points ({points(difference.low)} to {points(difference.high)})"
