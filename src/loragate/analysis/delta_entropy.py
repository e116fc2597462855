"""ΔH: what a finished delta does to the predictive entropy, token by token, on matched teacher-forced prefixes.

ΔH_t = H(π_LoRA,t) − H(π_Base,t) (eq:rw-delta-entropy), full vocabulary, nats. With gates a third reading stands beside
the two, so that the record also holds the paper's first figure: entropy before and after gating on held-out rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from loragate.analysis.interventions import ScoredRow, scored
from loragate.analysis.rows import (
    CLASSES,
    Interval,
    Reader,
    Row,
    TokenClasses,
    answer_rows,
    ratio,
    unheard,
)
from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.subject import SCHEMA, About, Subject
from loragate.analysis.supplied import SIGNS, Suppression, suppressing
from loragate.errors import ConfigError
from loragate.evaluation.prepared import read_questions
from loragate.evaluation.variants import Kind, Variant, acting
from loragate.files import write_text
from loragate.generation import OnProgress, read_samples

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BINS = 41
ALL = "all"
ROWS = 256
SHARE_ANSWERS = 2


@dataclass(frozen=True)
class TokenEntropies:
    """What was measured at every response token, in the order of the rows.

    Attributes:
        rows: index of each token's row, [T].
        token_ids: the response token that is predicted there, [T].
        entropy: {"base", "adapter", and "gated" where there are gates}, nats, [T] each.
        log_prob: log-probability of the response token, likewise.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    entropy: Mapping[str, np.ndarray]
    log_prob: Mapping[str, np.ndarray]

    @property
    def delta(self) -> np.ndarray:
        """ΔH [T], nats."""
        return self.entropy["adapter"] - self.entropy["base"]


@dataclass(frozen=True)
class ClassEntropy:
    """One class of tokens (or "all"); intervals over rows.

    Attributes:
        tokens: number of tokens.
        delta: mean ΔH in nats.
        negative, positive: share of tokens with ΔH below minus, above plus the threshold.
        base, adapter, gated: mean entropies; gated is None without gates.
    """

    name: str
    tokens: int
    delta: Interval
    negative: Interval
    positive: Interval
    base: Interval
    adapter: Interval
    gated: Interval | None


@dataclass(frozen=True)
class Histogram:
    """Counts between consecutive edges; what lies outside is counted in the first and last bin."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class SuppressedRow(ScoredRow):
    """One row of the hard intervention on one task: "adapter", "base", "gated", "adapter negative", "adapter positive".

    Differences are to the plain adapter.

    Attributes:
        suppressed: share of the generated tokens at which the delta was switched off; None for other rows.
    """

    suppressed: float | None


@dataclass(frozen=True)
class EntropyRecord:
    """`entropy.json`.

    Attributes:
        about: models, source, seed, versions.
        rows, tokens: what was read; 0 where only tasks were given.
        threshold: nats, for `negative` and `positive` and for the interventions.
        classes: "all" first, then the token classes that occur.
        distribution: of ΔH over tokens, limited to the 1 % and 99 % quantiles.
        quantiles: of ΔH, by probability.
        interventions: scores with the delta switched off by the sign of ΔH; empty where no task was given.
        conclusion: what it says, in sentences.
    """

    about: About
    rows: int
    tokens: int
    threshold: float
    classes: tuple[ClassEntropy, ...]
    distribution: Histogram | None
    quantiles: dict[str, float]
    interventions: tuple[SuppressedRow, ...]
    conclusion: tuple[str, ...]
    kind: str = "delta entropy"
    schema: int = SCHEMA


def diagnose_entropy(subject: Subject, settings: DiagnoseSettings) -> EntropyRecord:
    """ΔH on rows, and what switching the delta off by its sign does to the tasks' scores; writes entropy.json and tokens.jsonl.

    Raises:
        ConfigError: where neither rows nor tasks are given, for an unknown sign, and as `Subject.begin`.
    """
    if not (settings.rows or subject.has_tasks):
        raise ConfigError(
            "loragate diagnose entropy needs --rows (ΔH on them), --suite or --tasks (interventions), or both"
        )
    signs: list[Any] = [sign.strip() for sign in settings.suppress.split(",") if sign.strip()]
    threshold = settings.threshold
    rules = [Suppression(sign, threshold, settings.prompt_too) for sign in signs]
    if not rules:
        raise ConfigError(f"--suppress is empty; give one of {', '.join(SIGNS)}, or both")
    loaded = subject.begin(gated=False)
    table: tuple[ClassEntropy, ...] = ()
    histogram, found = None, None
    quantiles: dict[str, float] = {}
    sources: list[str] = []
    encoded: list[Row] = []
    if settings.rows:
        encoded, source = subject.rows(settings, ROWS)
        sources.append(source)
        with subject.job("reading with base and adapter") as on_progress:
            found = measure(subject.reader, loaded.kind, encoded, subject.batch_size, on_progress)
        table = by_class(found, subject.classes, threshold, subject.seed)
        histogram, quantiles = distribution(found.delta)
        write_tokens(subject.folder / "tokens.jsonl", loaded.tokenizer, encoded, found, subject.classes)
    suppressed = _intervene(subject, rules) if subject.has_tasks else ()
    if suppressed:
        sources.append(f"tasks {', '.join(dict.fromkeys(row.task for row in suppressed))}")
    record = EntropyRecord(
        about=subject.about("; ".join(sources), settings, "suppress threshold prompt_too max_length limit"),
        rows=len(encoded),
        tokens=0 if found is None else len(found.token_ids),
        threshold=threshold,
        classes=table,
        distribution=histogram,
        quantiles=quantiles,
        interventions=suppressed,
        conclusion=conclude(table, suppressed),
    )
    return subject.keep(record, "entropy")


def _intervene(subject: Subject, rules: Sequence[Suppression]) -> tuple[SuppressedRow, ...]:
    """Base, adapter, gates and the suppressed streams, scored on the tasks."""
    suppressed = {Variant("adapter", rule.sign): rule for rule in rules}
    gated = [Variant("gated")] if subject.loaded.kind == "gated" else []
    variants = [Variant("adapter"), Variant("base"), *gated, *suppressed]

    @contextmanager
    def acting_as(variant: Variant) -> Iterator[None]:
        rule = suppressed.get(variant)
        with subject.acting(variant.acts), nullcontext() if rule is None else suppressing(subject.loaded.model, rule):
            yield

    identity = {"threshold": rules[0].threshold, "prompt_too": rules[0].prompt}
    record = subject.evaluate(variants, identity, acting_as)
    shares = {
        (variant.name, info.name): _suppressed_share(subject, variant, info.name, rule)
        for variant, rule in suppressed.items()
        for info in record.tasks
    }
    return tuple(
        SuppressedRow(
            **scored(result.name, result, result.comparison, result.adjusted_p),
            suppressed=shares.get((result.name, result.task)),
        )
        for result in record.results
    )


def _suppressed_share(subject: Subject, variant: Variant, task: str, rule: Suppression) -> float:
    """Share of generated tokens at which the delta was off, from the first answers to every question.

    A decision depends on the tokens before it and on base and adapter alone, so reading the stored answers again gives the
    decisions that were taken.
    """
    samples = read_samples(subject.folder / "samples" / variant.slug / f"{task}.jsonl")
    kept = [sample for sample in samples if sample.sample < SHARE_ANSWERS and sample.token_ids]
    prompts = [question.prompt for question in read_questions(subject.folder, task)]
    rows = answer_rows(subject.loaded.tokenizer, prompts, kept)
    with subject.job(f"reading the answers of {variant.name} to {task} again"):
        found = measure(subject.reader, subject.loaded.kind, rows, subject.batch_size)
    return float(rule.chosen(torch.from_numpy(found.delta)).double().mean())


def measure(
    reader: Reader, kind: Kind, rows: Sequence[Row], batch_size: int = 16, on_progress: OnProgress = unheard
) -> TokenEntropies:
    """Entropies and log-probabilities of base, adapter and (with gates) gated model at every response token."""
    streams: tuple[Kind, ...] = ("base", "adapter", "gated") if kind == "gated" else ("base", "adapter")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in streams}
    where, ids = [], []
    for batch, rows_T, ids_T in reader.batches(rows, batch_size, on_progress):
        for name in streams:
            with acting(reader.model, Variant(name), kind):
                found = reader.read(batch)
            parts[name].append(torch.stack([found.entropy, found.log_prob]).double().cpu().numpy())
        where.append(rows_T)
        ids.append(ids_T)
    both = {name: np.concatenate(read, axis=1) for name, read in parts.items()}  # [2, T] each
    entropy, log_prob = ({name: read[at] for name, read in both.items()} for at in (0, 1))
    return TokenEntropies(np.concatenate(where), np.concatenate(ids), entropy, log_prob)


def by_class(
    found: TokenEntropies, classes: TokenClasses, threshold: float = 0.0, seed: int = 0
) -> tuple[ClassEntropy, ...]:
    """Means and shares over all tokens, then per token class in the order of `CLASSES`."""
    kinds = classes.indices(found.token_ids)
    delta, count = found.delta, int(found.rows.max()) + 1

    def interval(values: np.ndarray, chosen: np.ndarray) -> Interval:
        sums = np.bincount(found.rows[chosen], values[chosen], minlength=count)
        return ratio(sums, np.bincount(found.rows[chosen], minlength=count), seed=seed)

    table = []
    for name in (ALL, *CLASSES):
        chosen = np.ones(len(kinds), dtype=bool) if name == ALL else kinds == CLASSES.index(name)
        if not chosen.any():
            continue
        means = {stream: interval(values, chosen) for stream, values in found.entropy.items()}
        table.append(
            ClassEntropy(
                name=name,
                tokens=int(chosen.sum()),
                delta=interval(delta, chosen),
                negative=interval((delta < -threshold).astype(float), chosen),
                positive=interval((delta > threshold).astype(float), chosen),
                base=means["base"],
                adapter=means["adapter"],
                gated=means.get("gated"),
            )
        )
    return tuple(table)


def distribution(delta: np.ndarray) -> tuple[Histogram, dict[str, float]]:
    """Histogram over equal bins symmetric around 0, and quantiles."""
    quantiles = {f"{p:g}": float(value) for p, value in zip(QUANTILES, np.quantile(delta, QUANTILES), strict=True)}
    reach = max(abs(quantiles["0.01"]), abs(quantiles["0.99"]), 1e-6)
    edges = np.linspace(-reach, reach, BINS + 1)
    counts = np.histogram(np.clip(delta, -reach, reach), edges)[0]
    return Histogram(tuple(edges.tolist()), tuple(counts.tolist())), quantiles


def write_tokens(path: Path, tokenizer: Any, rows: Sequence[Row], found: TokenEntropies, classes: TokenClasses) -> None:
    """One JSON object per row: its response tokens with ΔH, entropies and log-probabilities, for later display."""
    lines = []
    ends = np.searchsorted(found.rows, np.arange(len(rows) + 1))
    for index, row in enumerate(rows):
        at = slice(ends[index], ends[index + 1])
        ids = found.token_ids[at].tolist()
        first = next((place for place, label in enumerate(row["labels"]) if label >= 0), 0)
        record: dict[str, Any] = {
            "row": int(row["row"]),
            "prompt": tokenizer.decode(row["input_ids"][:first]),
            "token_ids": ids,
            "tokens": [tokenizer.decode([token]) for token in ids],
            "classes": [classes.name(token) for token in ids],
            "delta_entropy": [round(value, 5) for value in found.delta[at].tolist()],
        }
        for name in found.entropy:
            record[f"{name}_entropy"] = [round(value, 5) for value in found.entropy[name][at].tolist()]
            record[f"{name}_log_prob"] = [round(value, 5) for value in found.log_prob[name][at].tolist()]
        lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False))
    write_text(path, "".join(line + "\n" for line in lines))


def conclude(classes: Sequence[ClassEntropy], interventions: Sequence[SuppressedRow]) -> tuple[str, ...]:
    """What was found, in sentences."""
    text = []
    if classes:
        total = classes[0]
        moves = "raises" if total.delta.mean > 0 else "lowers"
        text.append(
            f"The adapter {moves} the entropy by {abs(total.delta.mean):.3f} nats per token on average "
            f"({total.base.mean:.3f} in the base, {total.adapter.mean:.3f} with it): ΔH is positive at "
            f"{100 * total.positive.mean:.1f} % and negative at {100 * total.negative.mean:.1f} % of {total.tokens:,} tokens."
        )
        known = [row for row in classes[1:] if row.tokens >= max(20, 0.005 * total.tokens)]
        if len(known) > 1:
            top, low = max(known, key=lambda row: row.delta.mean), min(known, key=lambda row: row.delta.mean)
            text.append(
                f"It raises the entropy most on {top.name} ({top.delta.mean:+.3f} nats) and least on {low.name} "
                f"({low.delta.mean:+.3f})."
            )
        if total.gated is not None:
            text.append(f"With the gates the entropy of these tokens is {total.gated.mean:.3f} nats.")
    for row in interventions:
        if row.suppressed is not None:
            points, ends = row.points
            text.append(
                f"{row.task}: switching the delta off where ΔH is {row.name.split()[-1]} ({100 * row.suppressed:.0f} % of the "
                f"generated tokens) scores {100 * row.score:.1f} %, {points} points against the adapter ({ends}; {row.verdict})."
            )
    return tuple(text)
