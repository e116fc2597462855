"""ΔH: what a finished delta does to the predictive entropy, token by token, on matched teacher-forced prefixes.

ΔH_t = H(π_LoRA,t) − H(π_Base,t) (eq:rw-delta-entropy), full vocabulary, nats. With gates a third reading stands beside
the two, so that the record also holds the paper's first figure: entropy before and after gating on held-out rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loragate.analysis.bootstrap import Interval, ratio
from loragate.analysis.reading import Reader, Row, batches, counted
from loragate.analysis.record import SCHEMA, About
from loragate.analysis.token_classes import CLASSES, TokenClasses
from loragate.errors import ConfigError
from loragate.evaluation.variants import Kind, Variant, acting
from loragate.files import write_text

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
BINS = 41
ALL = "all"


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
class SuppressedRow:
    """One row of the hard intervention on one task.

    Attributes:
        name: "adapter", "base", "gated", "adapter negative", "adapter positive".
        task: name of the task.
        score, low, high: Avg@k with its 95 % interval over questions.
        difference, difference_low, difference_high, p, verdict: to the plain adapter, paired by question, p after Holm's
            adjustment; None for the adapter itself.
        suppressed: share of the generated tokens at which the delta was switched off; None for other rows.
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


def measure(
    model: Any,
    kind: Kind,
    rows: Sequence[Row],
    pad_token_id: int,
    batch_size: int = 16,
    on_progress: Callable[[int, int], None] | None = None,
) -> TokenEntropies:
    """Entropies and log-probabilities of base, adapter and (with gates) gated model at every response token.

    Raises:
        ConfigError: for a base without adapter.
    """
    if kind == "base":
        raise ConfigError("ΔH compares an adapter with its base; the model has no adapter")
    names = ("base", "adapter", *(("gated",) if kind == "gated" else ()))
    reader = Reader(model)
    entropy: dict[str, list[np.ndarray]] = {name: [] for name in names}
    log_prob: dict[str, list[np.ndarray]] = {name: [] for name in names}
    where, ids = [], []
    for done, batch in enumerate(batches(rows, pad_token_id, batch_size, reader.device), 1):
        for name in names:
            with acting(model, Variant(name), kind):
                found = reader.read(batch)
            entropy[name].append(found.entropy.double().cpu().numpy())
            log_prob[name].append(found.log_prob.double().cpu().numpy())
        mask = counted(batch)
        where.append((mask.nonzero()[:, 0].cpu() + (done - 1) * batch_size).numpy())
        ids.append(batch["labels"][:, 1:][mask].cpu().numpy())
        if on_progress is not None:
            on_progress(min(done * batch_size, len(rows)), len(rows))
    return TokenEntropies(
        np.concatenate(where),
        np.concatenate(ids),
        {name: np.concatenate(parts) for name, parts in entropy.items()},
        {name: np.concatenate(parts) for name, parts in log_prob.items()},
    )


def by_class(
    found: TokenEntropies, classes: TokenClasses, threshold: float = 0.0, seed: int = 0
) -> tuple[ClassEntropy, ...]:
    """Means and shares over all tokens, then per token class in the order of `CLASSES`."""
    kinds = classes.indices(found.token_ids)
    delta, count = found.delta, int(found.rows.max()) + 1

    def interval(values: np.ndarray, chosen: np.ndarray) -> Interval:
        sums = np.bincount(found.rows[chosen], values[chosen], minlength=count)
        sizes = np.bincount(found.rows[chosen], minlength=count)
        result = ratio(sums, sizes, seed=seed)
        assert result is not None
        return result

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
    for task in dict.fromkeys(row.task for row in interventions):
        for row in (row for row in interventions if row.task == task and row.suppressed is not None):
            assert row.suppressed is not None
            text.append(
                f"{task}: switching the delta off where ΔH is {row.name.split()[-1]} ({100 * row.suppressed:.0f} % of the "
                f"generated tokens) scores {100 * row.score:.1f} %, {_against(row)}."
            )
    return tuple(text)


def _against(row: SuppressedRow) -> str:
    if row.difference is None or row.difference_low is None or row.difference_high is None:
        return "with nothing to compare"
    return (
        f"{100 * row.difference:+.1f} points against the adapter ({100 * row.difference_low:+.1f} to "
        f"{100 * row.difference_high:+.1f}; {row.verdict})"
    )
