"""What an examination leaves behind, `doctor.json`: verdict, findings, measures; frozen dataclasses, read as strictly as written.

A part that did not run is None. Intervals are over rows or prompts, 95 %. Nats are natural units of log-probability.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from loragate import records
from loragate.analysis.rows import ClassEntropy, Interval
from loragate.gates.adapter_rules import Finding

FILE = "doctor.json"
OUTPUT_NAMES = (FILE, "doctor.html", "run")
"""What a check-up leaves in its folder."""
Verdict = Literal["healthy", "unfinished", "warnings", "broken"]


@dataclass(frozen=True)
class Module:
    """One LoRA layer's delta W = scale · B·A.

    Attributes:
        path, kind, layer: module path in the base's own names, its last part, its layer (None outside the layers).
        rank, scale: of the factors; α/r, or α/√r with rsLoRA.
        norm: Frobenius norm of the delta.
        effective_rank: exp of the entropy of the delta's squared singular values as shares; 1 to rank.
        share: of the sum of all modules' squared norms.
    """

    path: str
    kind: str
    layer: int | None
    rank: int
    scale: float
    norm: float
    effective_rank: float
    share: float


@dataclass(frozen=True)
class Static:
    """From the files alone.

    Attributes:
        adapter, base: as they were named; base is empty where none is known.
        rank, alpha: of the configuration.
        parameters: numbers in the adapter's file.
        modules: of every LoRA layer that could be read.
        beside: what the adapter changes beside LoRA's factors, in words.
        gateable: number of modules by verdict: {"gate": n, "leave": n, "refuse": n}; empty where no base configuration is here.
        reasons: why modules are left or refused, without repetition.
        cost: {"gate_parameters", "lora_parameters", "gate_share", "tflop_per_million_tokens", "ratio_to_lora_step", "peak_gib"}
            of training gates; empty likewise.
        training: `cost` in a sentence; empty likewise.
        endings: tokens that end a turn; `stops` says whether generation ends there (None: not known).
        gates: of a gated folder {"modules", "lower", "upper", "granularity", "off", "temperature"}; empty for a plain adapter.
    """

    adapter: str
    base: str
    rank: int | None = None
    alpha: float | None = None
    parameters: int = 0
    modules: tuple[Module, ...] = ()
    beside: tuple[str, ...] = ()
    gateable: dict[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    cost: dict[str, float] = field(default_factory=dict)
    training: str = ""
    endings: tuple[str, ...] = ()
    stops: bool | None = None
    gates: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answering:
    """How one model's greedy answers to all prompts look; shares of 1.

    Attributes:
        tokens: mean length of an answer.
        cut: share that met the length limit.
        repeats: share that end in a loop.
        thinking: share that begins with a block of thoughts, closed or cut by the limit; None where neither model writes one.
        languages: share of the answers in the language that was asked for, of the prompts of other languages than English.
    """

    tokens: float
    cut: float
    repeats: float
    thinking: float | None
    languages: float | None


@dataclass(frozen=True)
class AnswerPair:
    """The answers of base and adapter to one prompt.

    Attributes:
        kind: of the prompt: "english", "code", "arithmetic", "language", "thinking", or "yours".
        nats: of the adapter on the base's own answer minus of the base itself, per token; None where it was not read.
        flags: what is odd about the adapter's answer: "cut" by the limit, "repeats" at its end, another "language" than asked for,
            without the "thinking" of the base's.
    """

    prompt: str
    kind: str
    base: str
    adapter: str
    nats: float | None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answers:
    """Behaviour on prompts.

    Attributes:
        max_new_tokens: the length limit.
        base, adapter: None for the base where it cannot be had.
        forgetting: nats per token that the base's own answers lose under the adapter, by λ ("0.5", "1"); empty without a base.
        retention_base, retention_adapter: share right on the retention questions; None where none were given.
        pairs: every prompt with both answers.
    """

    max_new_tokens: int
    base: Answering | None
    adapter: Answering
    forgetting: dict[str, Interval]
    retention_base: Interval | None
    retention_adapter: Interval | None
    pairs: tuple[AnswerPair, ...]


@dataclass(frozen=True)
class Cell:
    """Modules of one layer and kind (None: of all): nats per token between the adapter with and without them."""

    layer: int | None
    kind: str | None
    nats: float


@dataclass(frozen=True)
class ChangedToken:
    """A place where the adapter changed the prediction much.

    Attributes:
        before, token, after: text around the token that stands there.
        kl: nats.
        base, adapter: the likeliest tokens as text with their probabilities.
    """

    before: str
    token: str
    after: str
    kl: float
    base: tuple[tuple[str, float], ...]
    adapter: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Effect:
    """What the adapter does to predictions.

    Attributes:
        source: what was read, in words.
        rows, tokens: how much.
        agree: share of tokens at which both put the same token first.
        classes: "all" first.
        cells: by layer and kind, by layer, by kind; on `cell_tokens` tokens.
        changed: the most changed tokens, most first.
    """

    source: str
    rows: int
    tokens: int
    agree: float
    classes: tuple[ClassEntropy, ...]
    cell_tokens: int
    cells: tuple[Cell, ...]
    changed: tuple[ChangedToken, ...]


@dataclass(frozen=True)
class Learned:
    """Losses on the examples, nats per response token.

    Attributes:
        source: of the examples.
        rows, tokens: how much was read.
        base: of the base; None where it cannot be had.
        adapter: of the adapter as it is.
        gain: base minus adapter, paired over rows; None likewise.
        scales: {"0.5": loss of adapter × 0.5}, with 0 and 1 among them.
        heldout: loss of the adapter on questions of the same kind with their answers, and the base's; None where none were given.
    """

    source: str
    rows: int
    tokens: int
    base: Interval | None
    adapter: Interval
    gain: Interval | None
    scales: dict[str, Interval]
    heldout: Interval | None = None
    heldout_base: Interval | None = None


@dataclass(frozen=True)
class Point:
    """One way to use the adapter.

    Attributes:
        label: "1", "0.5", "upper 0.5", "mlp 0", "gates".
        group: "scale" (all modules), "band", "kind" or "gates".
        strength: λ of the modules meant; None for gates.
        target: see `Strength.target`.
        retention: see `Strength.retention`.
        accuracy: share right on the dev set, of scales where one was given.
        kept: share right on the retention set, likewise.
    """

    label: str
    group: Literal["scale", "band", "kind", "gates"]
    strength: float | None
    target: Interval
    retention: Interval
    accuracy: Interval | None = None
    kept: Interval | None = None


@dataclass(frozen=True)
class Strength:
    """Target against retention.

    Attributes:
        target: what `Point.target` is, in nats per token, lower is better: "loss" on the examples, or "kept", what the adapter's
            own answers lose where no examples were given.
        retention: what `Point.retention` is: "forgetting", nats per token that the base's own answers lose, lower is better.
        decided_by: what `least` and `best` go by: the target, or "accuracy" on the dev set where one was given.
        points: the curve over s first.
        least: label of the least scale below 1 that keeps the target; None where none does.
        best: label of a scale that is better than 1 by more than its interval, and of a loss by as much as a finding needs; None
            where none is.
        sentences: what to do and what it gives back.
    """

    target: Literal["loss", "kept"]
    retention: Literal["forgetting"]
    decided_by: Literal["loss", "kept", "accuracy"]
    points: tuple[Point, ...]
    least: str | None
    best: str | None
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Measures:
    """All figures, by part."""

    static: Static
    answers: Answers | None = None
    effect: Effect | None = None
    learned: Learned | None = None
    strength: Strength | None = None


@dataclass(frozen=True)
class Examination:
    """An adapter's check-up.

    Attributes:
        verdict: "broken" with a finding of severity error, "warnings" with a warning, else "unfinished" with parts that were
            not done, else "healthy".
        summary: the verdict in one line.
        findings: worst first.
        measures: the figures behind them.
        unfinished: parts that were not done (Ctrl-C).
        seconds: spent, by part.
        versions: of the packages.
        left_out: what the finished parts did not read, ask or judge, and why; a sentence each.
    """

    verdict: Verdict
    summary: str
    findings: tuple[Finding, ...]
    measures: Measures
    unfinished: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    schema: Literal[1] = 1

    def to_json(self) -> dict[str, Any]:
        """What the file holds."""
        found: dict[str, Any] = records.to_json(self)
        return found


def read_examination(path: Path) -> Examination:
    """The examination in a doctor.json; raises `DataError`, naming file and key, for anything else."""
    return records.read(Examination, path, "was it written to its end, by this version of loragate?")


ORDER = ("error", "warning", "note")


def build_examination(
    findings: Iterable[Finding],
    measures: Measures,
    *,
    unfinished: tuple[str, ...] = (),
    seconds: Mapping[str, float] | None = None,
    left_out: tuple[str, ...] = (),
) -> Examination:
    """The examination of these findings, worst first."""
    ordered = tuple(sorted(findings, key=lambda one: ORDER.index(one.severity)))
    worst = ordered[0].severity if ordered else "note"
    verdict: Verdict = "unfinished" if unfinished else "healthy"
    verdict = "broken" if worst == "error" else "warnings" if worst == "warning" else verdict
    count = sum(one.severity == worst for one in ordered)
    named = ", ".join(dict.fromkeys(one.code for one in ordered if one.severity == worst))
    # without its base an adapter is not known to be usable
    unseen = any(one.code == "base-unreachable" for one in ordered)
    summary = {
        "broken": f"broken: {count} error{'s' * (count != 1)} ({named})",
        "warnings": f"{'not known without its base' if unseen else 'usable'}, with {count} warning{'s' * (count != 1)} ({named})",
        "unfinished": f"nothing found so far; {len(unfinished)} of {len(fields(Measures))} parts not done",
        "healthy": "healthy, as far as its files show"
        if measures == Measures(measures.static)
        else "healthy: nothing was found that speaks against using it",
    }[verdict]
    versions = records.package_versions()
    return Examination(verdict, summary, ordered, measures, unfinished, dict(seconds or {}), versions, left_out)
