"""The paper's forward interventions: the trained gates clipped, replaced or taken away at inference, scored side by side.

The rows go through the same evaluation as `loragate eval` (same questions, same random streams, same graders), each under
its override of λ, and are compared with the unmodified gates, paired by question. An override that could change no λ
of these gates is refused or left out, because its row would repeat the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.subject import SCHEMA, About, Subject
from loragate.errors import ConfigError
from loragate.evaluation.results import EvaluationRecord, TaskResult, verdict
from loragate.evaluation.statistics import Difference, compare, holm
from loragate.evaluation.variants import Variant
from loragate.gates import GateConfig
from loragate.gates.gate import Override
from loragate.gates.override_names import parse_override
from loragate.gates.schema import read_gate_config

PAPER = ("noreverse", "noextrapolate", "unit", "off")
MEANINGS = {
    "gated": "the gates as they are",
    "adapter": "the adapter, without gates",
    "base": "no adapter",
    "noreverse": "no reversal, max(λ,0)",
    "noextrapolate": "no extrapolation, min(λ,1)",
    "unit": "unit interval, clip(λ,0,1)",
}
# what an intervention takes away, in words
TAKEN = {
    "noreverse": "reversal",
    "noextrapolate": "extrapolation",
    "unit": "leaving [0, 1]",
    "adapter": "gating at all",
}


@dataclass(frozen=True)
class ScoredRow:
    """One row on one task, against the row that it is compared with.

    Attributes:
        name, task: of the row and of the task.
        score, low, high: Avg@k with its 95 % interval over questions.
        difference, difference_low, difference_high: paired by question; None for the row of the comparison itself.
        p, verdict: sign-flip p-value after Holm's adjustment over the record, and what it shows; None likewise.
    """

    name: str
    task: str
    score: float
    low: float
    high: float
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    p: float | None
    verdict: str | None

    @property
    def points(self) -> tuple[str, str]:
        """The difference and its interval in points: "+8.4" and "+4.2 to +12.5"; dashes where there is none."""
        if self.difference is None or self.difference_low is None or self.difference_high is None:
            return "–", "–"
        return f"{100 * self.difference:+.1f}", f"{100 * self.difference_low:+.1f} to {100 * self.difference_high:+.1f}"


def scored(name: str, result: TaskResult, difference: Difference | None, p: float | None) -> dict[str, Any]:
    """The fields of a `ScoredRow` of that name, compared by `difference` with its adjusted p."""
    found: dict[str, Any] = dict.fromkeys(("difference", "difference_low", "difference_high", "p", "verdict"))
    if difference is not None:
        found = {"difference": difference.mean, "difference_low": difference.low, "difference_high": difference.high}
        found |= {"p": p, "verdict": verdict(difference, p=p)}
    mean = result.avg_at_k
    return {"name": name, "task": result.task, "score": mean.mean, "low": mean.low, "high": mean.high, **found}


@dataclass(frozen=True)
class InterventionRow(ScoredRow):
    """One intervention on one task; "gated" for the gates as they are, "base" and "adapter" beside them.

    Differences are to the unmodified gates.

    Attributes:
        meaning: what the intervention does to λ.
        truncated, entropy, tokens: share of cut-off answers, mean entropy (None: not measured), mean length.
    """

    meaning: str
    truncated: float
    entropy: float | None
    tokens: float


@dataclass(frozen=True)
class InterventionsRecord:
    """`interventions.json`; the whole evaluation lies beside it in `results.json`.

    Attributes:
        about: models, source, seed, versions.
        lower, upper: the range of the gates.
        rows: by task, then in the order asked for.
        left_out: interventions that can change no λ of this range, with the reason.
        conclusion: what it says, in sentences.
    """

    about: About
    lower: float
    upper: float
    rows: tuple[InterventionRow, ...]
    left_out: tuple[str, ...]
    conclusion: tuple[str, ...]
    kind: str = "interventions"
    schema: int = SCHEMA


def diagnose_interventions(subject: Subject, settings: DiagnoseSettings) -> InterventionsRecord:
    """The gates under every intervention, scored on the tasks; writes interventions.json beside the evaluation.

    Raises:
        ConfigError: where no task is named, for what `choose` refuses, and as `Subject.begin`.
    """
    if not subject.has_tasks:
        raise ConfigError("loragate diagnose interventions needs --suite or --tasks")
    loaded = subject.begin()
    config = GateConfig(**read_gate_config(Path(loaded.names["gated"]))["gate"])
    chosen, left_out = choose(settings.interventions, config)
    # λ = 1 is the adapter, which has a row of its own
    names = [name for name in chosen if name != "off"]
    rows = [Variant("gated", name, override=name) for name in names]
    record = subject.evaluate([Variant("adapter"), Variant("base"), Variant("gated"), *rows], {"interventions": chosen})
    compared = rows_of(record, names)
    tasks = ", ".join(info.name for info in record.tasks)
    found = InterventionsRecord(
        about=subject.about(f"tasks {tasks}", settings, "interventions limit samples"),
        lower=config.lower,
        upper=config.upper,
        rows=compared,
        left_out=tuple(left_out),
        conclusion=conclude(compared, left_out),
    )
    return subject.keep(found, "interventions")


def choose(text: str, config: GateConfig) -> tuple[list[str], list[str]]:
    """The interventions of a comma-separated list, or the paper's where it is empty, and those left out with the reason.

    Raises:
        ConfigError: for an unknown name, one given twice, or one asked for by name that cannot change any λ.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
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
    results = [
        result
        for info in record.tasks
        for result in record.results
        if result.task == info.name and result.name in wanted
    ]
    differences = {}
    for result in results:
        if result.name != "gated":
            own = np.array(result.question_scores)[:, None]
            reference = np.array(record.find(result.task, "gated").question_scores)[:, None]
            differences[result.name, result.task] = compare(own, reference)
    adjusted = dict(zip(differences, holm([found.p for found in differences.values()]), strict=True))
    rows = []
    for result in results:
        name, key = result.control or result.variant, (result.name, result.task)
        rows.append(
            InterventionRow(
                **scored(name, result, differences.get(key), adjusted.get(key)),
                meaning=meaning_of(name),
                truncated=result.truncated,
                entropy=result.entropy,
                tokens=result.tokens,
            )
        )
    return tuple(rows)


def meaning_of(name: str) -> str:
    """What a row does to λ, in a few words."""
    if name in MEANINGS:
        return MEANINGS[name]
    constant = parse_override(name).constant
    return f"λ clipped: {name}" if constant is None else f"one λ = {constant:g} for all"


def conclude(rows: Sequence[InterventionRow], left_out: Sequence[str]) -> tuple[str, ...]:
    """What the interventions show, in sentences."""
    text = []
    for task in dict.fromkeys(row.task for row in rows):
        asked = [row for row in rows if row.task == task]
        for row in (row for row in asked if row.name in TAKEN):
            says = {"better": "hurts", "worse": "helps"}.get(row.verdict or "", "makes no difference that can be shown")
            points, ends = row.points
            text.append(
                f"{task}: {TAKEN[row.name]} {says}: without it the score is {100 * row.score:.1f} %, {points} points ({ends})."
            )
        best = max(asked, key=lambda row: row.score)
        text.append(f"{task}: the highest score is {100 * best.score:.1f} %, of {best.name} ({best.meaning}).")
    if left_out:
        text.append("Not run, as they can change nothing: " + "; ".join(left_out) + ".")
    return tuple(text)
