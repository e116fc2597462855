"""The record of a selection (`selection.json`, and an artifact's evidence): what was chosen, on what scores, and that in words.

`calibrate` and `sweep` write it; commands and reports say it with the sentences here, so that one choice has one wording. Scores
are shares of 1. It knows no model and no other room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from loragate import records
from loragate.display import format_points, format_temperature, percent, pluralize
from loragate.errors import DataError
from loragate.validate import validate

FILE = "selection.json"
Kind = Literal["adapter", "base", "scale", "gates"]
PROGRAM_GRADERS = ("humaneval", "mbpp")
"""Graders that run what was answered."""
NOTABLE = 0.05
"""Share of answers from which being cut off is held to matter."""
DEV_SET_CAVEAT = (
    "the dev set must hold every kind of question that the adapter will be asked; other kinds are not measured "
    "(--retention-data, a second set, guards abilities that must be kept)"
)


@dataclass(frozen=True)
class Score:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{percent(self.mean)} % ({percent(self.low)}–{percent(self.high)})"


@dataclass(frozen=True)
class ScoreDifference(Score):
    """A paired difference to the baseline with its 95 % interval.

    Attributes:
        p: two-sided, of no difference.
        z: mean ÷ standard error, by which the rule goes; None where all questions differ alike.
        stderr, df, limit, confidence: as of `evaluation.statistics.Difference`.
    """

    p: float
    z: float | None = None
    stderr: float | None = None
    df: float | None = None
    limit: float | None = None
    confidence: float = 0.95

    def __str__(self) -> str:
        z = "" if self.z is None else f", z = {self.z:.2f}"
        return f"{format_points(self.mean)} points (95 % interval {format_points(self.low)} to {format_points(self.high)}{z})"


@dataclass(frozen=True)
class RetentionScore(Score):
    """The score on the retention set; stderr, questions and samples as of `evaluation.statistics.Estimate`."""

    stderr: float
    questions: int
    samples: int


@dataclass(frozen=True)
class VariantScore(Score):
    """What a variant scored on the dev set.

    Attributes:
        label: as in tables, such as "gated [0,1] T=0.3".
        weights: what acted.
        temperature: of sampling, 0 for greedy.
        samples: answers to each question.
        difference: to the baseline; None for the baseline itself.
        truncated, no_eos: shares of the answers that met the length limit, or had no end of sequence.
        tokens: mean length of an answer.
        retention: None where it was not evaluated.
    """

    label: str
    weights: Kind
    temperature: float
    samples: int
    difference: ScoreDifference | None
    truncated: float
    no_eos: float
    tokens: float
    retention: RetentionScore | None = None


@dataclass(frozen=True)
class Recommendation:
    """The variant to use.

    Attributes:
        label, weights, temperature: as of its `VariantScore`.
        scale: the one λ, where that is recommended.
        part: where it holds: a third of the layers ("lower", "middle", "upper"); None for all modules.
        range, trial: of the gates, where they are; the trial's name is its folder's.
        score: on the dev set.
        reason: why this one, without a full stop.
    """

    label: str
    weights: Kind
    temperature: float
    scale: float | None
    range: tuple[float, float] | None
    trial: str | None
    score: Score
    reason: str
    part: str | None = None

    def format_advice(self) -> str:
        """What to do: "Use the adapter alone, greedily"."""
        what = {
            "adapter": "the adapter alone",
            "base": "the base without the adapter",
            "scale": _strength(self.scale, self.part),
            "gates": f"the gates {self.label.removeprefix('gated ').removesuffix(' greedy').split(' T=')[0]}",
        }[self.weights]
        return f"Use {what}, {format_temperature(self.temperature)}"


def _strength(scale: float | None, part: str | None) -> str:
    """One λ in words; empty where there is none."""
    if scale is None:
        return ""
    if part is None:
        return f"one λ = {scale:g} for all modules"
    return f"λ = {scale:g} in the {part} third of the layers and the adapter as it is in the others"


@dataclass(frozen=True)
class DevInfo:
    """The dev set and how it was asked.

    Attributes:
        unread: share of the adapter's answers that the grader could not read.
        dropped: {what they are also among: number of questions left out for it}.
        warnings: what speaks against relying on the scores, sentences.
        form: how the questions were put to the model, after "were asked"; empty in records of earlier versions.
    """

    source: str
    questions: int
    samples: int
    max_new_tokens: int
    task: str
    grader: str
    unread: float
    dropped: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    form: str = ""


@dataclass(frozen=True)
class RetentionInfo:
    """The retention set, {variant: why it was not taken} of those that lose on it; the rest as of `DevInfo`.

    Attributes:
        right: share of the adapter's answers that are right; None where it was not asked.
    """

    source: str
    vetoed: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    grader: str = ""
    unread: float = 0.0
    right: float | None = None


@dataclass(frozen=True)
class SelectionRecord:
    """What was chosen, and on what evidence.

    Attributes:
        rule: in words.
        recommendation: what to use.
        baseline: label of what everything is compared with.
        variants: every variant that was scored.
        dev, retention: the sets of questions.
        left_out: {variant: why it is none here}.
        diverged: {trial: why} of trainings that did not stay finite.
        schema: of this file.
    """

    rule: str
    recommendation: Recommendation
    baseline: str
    variants: tuple[VariantScore, ...]
    dev: DevInfo
    retention: RetentionInfo | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    diverged: dict[str, str] = field(default_factory=dict)
    schema: Literal[1] = 1

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        found: dict[str, Any] = records.to_json(self)
        return found

    def format_score(self) -> str:
        """What the recommended variant scores: "62.5 % (44.9–77.3) on 32 dev questions"."""
        return f"{self.recommendation.score} on {self.dev.questions} dev questions"

    def _best(self) -> dict[Kind, VariantScore]:
        """The best of each kind."""
        best: dict[Kind, VariantScore] = {}
        for row in self.variants:
            if row.weights not in best or row.mean > best[row.weights].mean:
                best[row.weights] = row
        return best

    def alternatives(self) -> str:
        """The best of each other kind, with its score; empty where there is none."""
        others = [f"{row.label} {row}" for kind, row in self._best().items() if kind != self.recommendation.weights]
        return f"The best of each other kind: {', '.join(others)}." if others else ""

    def all_right(self) -> str:
        """That nothing could score above the baseline; empty where something could."""
        found = self.recommendation
        all_of_them = found.label == self.baseline and found.score.mean == 1
        said = "All of them are right, so no variant could score above it; harder questions tell variants apart."
        return said if all_of_them else ""

    def beside_base(self) -> str:
        """That the adapter is not shown to beat its base; empty where it is, or where the base is recommended or was not asked."""
        base = self._best().get("base")
        if self.recommendation.weights == "base" or base is None or base.difference is None or base.difference.high < 0:
            return ""
        return (
            f"The adapter is not shown to beat its base on these questions: {base.label} is {base.difference} from "
            f"{self.baseline}."
        )

    def _cut_off(self) -> list[str]:
        """How many answers met the limit, of the baseline, what was chosen and the best of each kind; empty where few did."""
        named = {self.baseline, self.recommendation.label, *(row.label for row in self._best().values())}
        cut = [
            f"{percent(row.truncated)} % of the answers of {row.label}"
            for row in self.variants
            if row.label in named and row.truncated >= NOTABLE
        ]
        limit = f"met the limit of {self.dev.max_new_tokens} tokens and were cut off"
        return [f"{', '.join(cut)} {limit}; a larger --dev-max-new-tokens lets them end."] if cut else []

    def kept(self) -> list[str]:
        """What is recommended on the retention set beside the adapter; a warning where it loses there, if not clearly."""
        scores = {row.label: row.retention for row in self.variants if row.retention is not None}
        chosen, own, other = self.recommendation.label, scores.get(self.recommendation.label), scores.get(self.baseline)
        if own is None:
            return []
        if other is None or chosen == self.baseline:
            return [f"On the retention set it has {own}."]
        said = [f"On the retention set it has {own}, {self.baseline} {other}."]
        if own.mean < other.mean:
            said.append(
                f"Warning, retention set: {chosen} scores below {self.baseline} there; on {own.questions} questions that is no "
                "clear loss, and no proof that there is none."
            )
        return said

    def sentences(self) -> list[str]:
        """What to use and why, what the alternatives scored, and what the choice does not say."""
        found = self.recommendation
        said = [f"{found.format_advice()}: {self.format_score()}; {found.reason}."]
        said += filter(None, (self.all_right(), self.alternatives(), self.beside_base()))
        if found.label != self.baseline:
            said.append(
                f"It was picked from {len(self.variants)} settings, and the interval is that of one comparison: its score is "
                "flattered by the choice; measure it on other questions."
            )
        for name, question_set in (("dev", self.dev), ("retention", self.retention)):
            said += [
                f"{pluralize(count, f'{name} question')} {'was' if count == 1 else 'were'} left out: also among {what}."
                for what, count in (question_set.dropped if question_set else {}).items()
            ]
            said += [
                f"Warning, {name} set: {warning.rstrip('.')}."
                for warning in (question_set.warnings if question_set else ())
            ]
        said += self._cut_off()
        vetoed = {} if self.retention is None else self.retention.vetoed
        said += [f"{label} was not taken: it {why}." for label, why in vetoed.items()]
        said += [f"{name} is left out: {why}." for name, why in self.left_out.items()]
        said += [f"The training of {name} diverged and takes no part: {why}." for name, why in self.diverged.items()]
        for name, question_set in (("dev", self.dev), ("retention", self.retention)):
            if question_set is not None and question_set.unread > 0.5:
                said.append(
                    f"Warning, {name} set: the grader {question_set.grader!r} reads no answer in {percent(question_set.unread)} % "
                    "of the adapter's responses; does the prompt ask for the form that it reads?"
                )
        if next(row.mean for row in self.variants if row.label == self.baseline) == 0:
            said.append(
                f"Warning, dev set: {self.baseline} answers none of it right; does the prompt ask for the form that the grader "
                f"{self.dev.grader!r} reads?"
            )
        said += self.kept()
        if self.retention is not None and self.retention.right == 0:
            said.append(
                "Warning, retention set: the adapter answers none of it right, so that nothing can be lost there."
            )
        if self.dev.form:
            said.append(
                f"The dev questions were asked {self.dev.form}; asked in another way, other variants may be better."
            )
        return [*said, f"This holds for questions like these: {DEV_SET_CAVEAT}."]


def read_selection_record(found: Path | Mapping[str, Any]) -> SelectionRecord:
    """The record in a file, or in what was read from one; raises `DataError`, naming file and key, for anything else."""
    if isinstance(found, Path):
        return records.read(SelectionRecord, found, "was it written to its end, by this version of loragate?")
    return validate(SelectionRecord, found, "selection", DataError)


def is_selection(record: object) -> bool:
    """Whether a free-form record is one of a selection; one of gates that were taken as they came has no scores."""
    return isinstance(record, Mapping) and "recommendation" in record


def count_unparsed_answers(reasons: Mapping[str, int], grader: str) -> int:
    """Number of answers in which a grader found nothing to judge; a program that ends with an error was judged.

    Args:
        reasons: {reason of a verdict: number of answers}.
    """
    if grader in PROGRAM_GRADERS:
        return sum(reasons.get(reason, 0) for reason in ("no_code", "syntax"))
    return sum(count for reason, count in reasons.items() if reason not in ("ok", "wrong"))


def format_choice_reason(
    best: str, baseline: str, gap: ScoreDifference | None, accepted: bool, vetoed: bool = False
) -> str:
    """Why a variant was chosen, in a sentence that agrees with the interval in it.

    Args:
        best: label of the variant with the highest mean.
        baseline: label of what it was weighed against.
        gap: between them; None where the baseline is the best.
        accepted: whether the rule took the best one.
        vetoed: whether any was excluded for what it lost on the retention set.
    """
    if gap is None:
        return f"no variant {'that keeps the retention set ' * vetoed}scored above {baseline}"
    if not accepted:
        return f"{best} is above it by {gap}, which may be chance"
    if gap.low > 0:
        return f"it beats {baseline} by {gap}"
    return f"it is above {baseline} by {gap}: likely a gain, but the interval does not exclude none"
