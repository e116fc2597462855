"""The paper's forward interventions: the trained gates clipped, replaced or taken away at inference, scored side by side.

The rows go through the same evaluation as `loragate eval` (same questions, same random streams, same graders), each under
its override of λ, and are compared with the unmodified gates, paired by question. An override that could change no λ
of these gates is refused or left out, because its row would repeat the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loragate.analysis.record import SCHEMA, About
from loragate.errors import ConfigError
from loragate.evaluation.results import EvaluationRecord, verdict
from loragate.evaluation.statistics import compare, holm
from loragate.evaluation.variants import Variant
from loragate.gates import GateConfig
from loragate.gates.gate import Override
from loragate.gates.override_names import parse_override

PAPER = ("noreverse", "noextrapolate", "unit", "off")
MEANINGS = {
    "noreverse": "no reversal, max(λ,0)",
    "noextrapolate": "no extrapolation, min(λ,1)",
    "unit": "unit interval, clip(λ,0,1)",
    "off": "gates off, λ = 1: the adapter",
}


@dataclass(frozen=True)
class Intervention:
    """One override of λ by name, as `MODEL@name` elsewhere."""

    name: str
    override: Override

    @property
    def variant(self) -> Variant:
        """Its row in an evaluation."""
        return Variant("gated", self.name, override=self.name)

    @property
    def meaning(self) -> str:
        """In words."""
        if self.name in MEANINGS:
            return MEANINGS[self.name]
        if self.override.constant is not None:
            return f"one λ = {self.override.constant:g} for all"
        return f"λ clipped: {self.name}"


@dataclass(frozen=True)
class InterventionRow:
    """One intervention on one task.

    Attributes:
        name, meaning: "gated" for the gates as they are; "base" and "adapter" stand beside them.
        score, low, high: Avg@k with its 95 % interval over questions.
        difference, difference_low, difference_high: to the unmodified gates, paired by question; None for these.
        p, verdict: sign-flip p-value after Holm's adjustment over the record, and what it shows.
        truncated, entropy, tokens: share of cut-off answers, mean entropy (None: not measured), mean length.
    """

    name: str
    meaning: str
    task: str
    score: float
    low: float
    high: float
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    p: float | None
    verdict: str | None
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


def choose(text: str, config: GateConfig) -> tuple[list[Intervention], list[str]]:
    """The interventions of a comma-separated list, or the paper's where it is empty, and those left out with the reason.

    Raises:
        ConfigError: for an unknown name, one given twice, or one asked for by name that cannot change any λ.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    chosen: list[Intervention] = []
    left_out: list[str] = []
    for name in names or PAPER:
        override = parse_override(name)
        reason = without_effect(override, config)
        if reason and names:
            raise ConfigError(f"--interventions {name} would repeat the gates as they are: {reason}")
        if any(other.name == name for other in chosen):
            raise ConfigError(f"--interventions names {name} twice")
        if reason:
            left_out.append(f"{name}: {reason}")
        else:
            chosen.append(Intervention(name, override))
    return chosen, left_out


def without_effect(override: Override, config: GateConfig) -> str:
    """Why an override can change no λ of this range; empty where it can."""
    if override.constant is not None:
        return ""
    low = override.minimum is None or override.minimum <= config.lower
    high = override.maximum is None or override.maximum >= config.upper
    return f"λ never leaves [{config.lower:g}, {config.upper:g}]" if low and high else ""


def rows_of(record: EvaluationRecord, interventions: Sequence[Intervention]) -> tuple[InterventionRow, ...]:
    """The rows with their paired differences to the unmodified gates."""
    meanings = {item.variant.name: item.meaning for item in interventions}
    meanings |= {"gated": "the gates as they are", "adapter": "the adapter, without gates", "base": "no adapter"}
    found = [
        result
        for info in record.tasks
        for result in record.results
        if result.task == info.name and result.name in meanings
    ]
    differences = {}
    for result in found:
        if result.name != "gated":
            own = np.array(result.question_scores)[:, None]
            reference = np.array(record.find(result.task, "gated").question_scores)[:, None]
            differences[result.name, result.task] = compare(own, reference)
    adjusted = dict(zip(differences, holm([d.p for d in differences.values()]), strict=True)) if differences else {}
    rows = []
    for result in found:
        key = (result.name, result.task)
        difference, p = differences.get(key), adjusted.get(key)
        rows.append(
            InterventionRow(
                name=result.control or result.variant,
                meaning=meanings[result.name],
                task=result.task,
                score=result.avg_at_k.mean,
                low=result.avg_at_k.low,
                high=result.avg_at_k.high,
                difference=None if difference is None else difference.mean,
                difference_low=None if difference is None else difference.low,
                difference_high=None if difference is None else difference.high,
                p=p,
                verdict=None if difference is None else verdict(difference, p=p),
                truncated=result.truncated,
                entropy=result.entropy,
                tokens=result.tokens,
            )
        )
    return tuple(rows)


def conclude(rows: Sequence[InterventionRow], left_out: Sequence[str]) -> tuple[str, ...]:
    """What the interventions show, in sentences."""
    words = {
        "noreverse": "reversal",
        "noextrapolate": "extrapolation",
        "unit": "leaving [0, 1]",
        "adapter": "gating at all",
    }
    text = []
    for task in dict.fromkeys(row.task for row in rows):
        for row in (row for row in rows if row.task == task and row.name in words):
            assert row.difference is not None
            assert row.difference_low is not None
            assert row.difference_high is not None
            says = {"better": "hurts", "worse": "helps"}.get(row.verdict or "", "makes no difference that can be shown")
            text.append(
                f"{task}: {words[row.name]} {says}: without it the score is {100 * row.score:.1f} %, "
                f"{100 * row.difference:+.1f} points ({100 * row.difference_low:+.1f} to {100 * row.difference_high:+.1f})."
            )
        scored = [row for row in rows if row.task == task]
        best = max(scored, key=lambda row: row.score)
        text.append(f"{task}: the highest score is {100 * best.score:.1f} %, of {best.name} ({best.meaning}).")
    if left_out:
        text.append("Not run, as they can change nothing: " + "; ".join(left_out) + ".")
    return tuple(text)
