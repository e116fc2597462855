"""ΔH: what a finished delta does to the predictive entropy, token by token, on matched teacher-forced prefixes.

ΔH_t = H(π_LoRA,t) − H(π_Base,t) (eq:rw-delta-entropy), full vocabulary, nats; beside it KL(π_LoRA,t ‖ π_Base,t) says how far
the prediction moved. With gates a third reading stands beside the two, so that the record also holds the paper's first figure:
entropy before and after gating on held-out rows.

Shapes: T response tokens, C of one chunk, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch

from loragate.analysis.context import DiagnosticContext, Record, stored_answers
from loragate.analysis.gates import InterventionRow, in_points
from loragate.analysis.rows import (
    CHUNK,
    CLASSES,
    ClassEntropy,
    Histogram,
    Interval,
    Reader,
    Row,
    TokenClasses,
    bootstrap_ratio,
    distinct,
    no_progress,
    require_finite,
)
from loragate.analysis.settings import DiagnoseSettings
from loragate.analysis.supplied import SIGNS, Sign, suppress_by_delta_entropy, suppression_mask
from loragate.display import percent
from loragate.errors import ConfigError
from loragate.evaluation.evaluate import open_evaluation
from loragate.evaluation.variants import ModelVariant, activate_variant
from loragate.generation import OnProgress, TransformersEngine
from loragate.models.source import Kind
from loragate.validate import comma_list

BINS = 41
ALL = "all"
ROWS = 256
SHARE_ANSWERS = 2
LIKELIEST = 3
"""Tokens that are kept of each prediction."""


@dataclass(frozen=True)
class TokenEntropies:
    """What was measured at every response token, in the order of the rows.

    Attributes:
        rows: index of each token's row, [T].
        token_ids: the response token that is predicted there, [T].
        entropy: {"base", "adapter", and "gated" where there are gates}, nats, [T] each.
        top_token_ids: ids of the tokens that are likeliest there, first one first, [T, K] likewise; `top_probs` are their
            probabilities.
        kl: KL(adapter‖base), nats, [T].
    """

    rows: np.ndarray
    token_ids: np.ndarray
    entropy: Mapping[str, np.ndarray]
    top_token_ids: Mapping[str, np.ndarray]
    top_probs: Mapping[str, np.ndarray]
    kl: np.ndarray

    @property
    def agree(self) -> float:
        """Share of the tokens at which base and adapter hold the same token for the likeliest."""
        return float((self.top_token_ids["adapter"][:, 0] == self.top_token_ids["base"][:, 0]).mean())

    @property
    def delta(self) -> np.ndarray:
        """ΔH [T], nats."""
        return self.entropy["adapter"] - self.entropy["base"]


@dataclass(frozen=True)
class SuppressedRow(InterventionRow):
    """The adapter switched off by the sign of ΔH on one task, scored against the plain adapter.

    Attributes:
        suppressed: share of the generated tokens at which the delta was switched off.
    """

    suppressed: float


@dataclass(frozen=True, kw_only=True)
class EntropyRecord(Record):
    """`entropy.json`.

    Attributes:
        rows, tokens: what was read; 0 where only tasks were given.
        classes: "all" first, then the token classes that occur.
        distribution: of ΔH over tokens; what lies beyond the 1 % and 99 % quantiles is in the outer bins.
        interventions: scores with the delta switched off by the sign of ΔH; empty where no task was given.
    """

    rows: int
    tokens: int
    classes: tuple[ClassEntropy, ...]
    distribution: Histogram | None
    interventions: tuple[SuppressedRow, ...]
    kind: Literal["delta entropy"] = "delta entropy"


def diagnose_entropy(context: DiagnosticContext, settings: DiagnoseSettings) -> EntropyRecord:
    """ΔH on rows, and what switching the delta off by its sign does to the tasks' scores; writes entropy.json.

    Raises:
        ConfigError: where neither rows nor tasks are given, for an unknown sign, and as `DiagnosticContext.begin`.
    """
    if not (settings.rows or context.has_tasks):
        raise ConfigError(
            "loragate diagnose entropy needs --rows (ΔH on them), --suite or --tasks (interventions), or both"
        )
    signs = list(dict.fromkeys(comma_list(settings.suppress)))
    if not signs or set(signs) - set(SIGNS):
        raise ConfigError(f"--suppress {settings.suppress}: expected one of {', '.join(SIGNS)}, or both with a comma")
    context.begin(gated=False)
    sources: list[str] = []
    rows: list[Row] = []
    found: TokenEntropies | None = None
    if settings.rows:
        rows, source = context.rows(settings, ROWS)
        sources.append(source)
        with context.job("reading with base and adapter") as on_progress:
            found = _measure(context, rows, on_progress)
    suppressed = _intervene(context, signs) if context.has_tasks else ()
    if suppressed:
        sources.append(f"tasks {', '.join(dict.fromkeys(row.task for row in suppressed))}")
    record = EntropyRecord(
        about=context.about("; ".join(sources), settings, "suppress max_length limit"),
        rows=len(rows),
        tokens=len(found.token_ids) if found else 0,
        classes=by_class(found, rows, context.classes, context.seed) if found else (),
        distribution=distribution(found.delta) if found else None,
        interventions=suppressed,
    )
    return context.write_record(record, "entropy", conclude_entropy)


def _measure(context: DiagnosticContext, rows: Sequence[Row], on_progress: OnProgress = no_progress) -> TokenEntropies:
    found = measure_token_entropies(context.reader, context.loaded.kind, rows, context.batch_size, on_progress)
    for kind, entropy in found.entropy.items():
        require_finite(entropy, f"entropies of the {kind} model, token by token")
    return found


def _intervene(context: DiagnosticContext, signs: Sequence[str]) -> tuple[SuppressedRow, ...]:
    """Base, adapter, gates and the suppressed streams, scored on the tasks.

    A decision depends on the tokens before it and on base and adapter alone, so reading stored answers again gives the decisions
    that were taken.
    """
    gated = [ModelVariant("gated")] if context.loaded.kind == "gated" else []
    variants = [
        ModelVariant("adapter"),
        ModelVariant("base"),
        *gated,
        *(ModelVariant("adapter", sign) for sign in signs),
    ]

    model, tokenizer = context.loaded.model, context.loaded.tokenizer

    @contextmanager
    def engine_for(variant: ModelVariant) -> Iterator[TransformersEngine]:
        sign: Any = variant.control
        with context.acting(variant.weights), suppress_by_delta_entropy(model, sign) if sign else nullcontext():
            yield TransformersEngine(model, tokenizer, batch_size=context.batch_size)

    results, rows = context.evaluate(variants, {}, engine_for).results, []
    evaluation = open_evaluation(context.folder, context.request.grading)
    prepared = {task.task.name: task for task in evaluation.tasks}
    for one in results:
        if one.control is not None:  # the sign of ΔH; base, adapter and gates are in results.json
            answers = stored_answers(
                evaluation, ModelVariant("adapter", one.control), prepared[one.task], SHARE_ANSWERS
            )
            share = 0.0
            if read_again := context.answer_rows(answers):
                with context.job(f"reading the answers of {one.label} to {one.task} again"):
                    read = _measure(context, read_again)
                share = float(suppression_mask(cast(Sign, one.control), torch.from_numpy(read.delta)).double().mean())
            shown = (one.avg_at_k, one.comparison, one.adjusted_p, one.verdict)
            rows.append(SuppressedRow(one.label, one.task, *shown, share))
    return tuple(rows)


@torch.no_grad()
def measure_token_entropies(
    reader: Reader,
    kind: Kind,
    rows: Sequence[Row],
    batch_size: int = 16,
    on_progress: OnProgress = no_progress,
    *,
    gates: bool = True,
) -> TokenEntropies:
    """What base, adapter and (with gates) gated model predict at every response token.

    Args:
        gates: whether the gated model is read as well, where there is one.
    """
    streams: tuple[Kind, ...] = ("base", "adapter", "gated") if kind == "gated" and gates else ("base", "adapter")
    parts: dict[str, list[np.ndarray]] = {}

    def add(name: str, values: torch.Tensor) -> None:
        found = values.cpu().numpy()
        parts.setdefault(name, []).append(found.astype(np.float64) if values.is_floating_point() else found)

    where, ids = [], []
    for batch, rows_T, ids_T in reader.batches(rows, batch_size, on_progress):
        states = {}
        for name in streams:  # one model in memory, read as each in turn
            with activate_variant(reader.model, ModelVariant(name), kind):
                states[name] = reader.states(batch)
        for at in range(0, len(ids_T), CHUNK):
            log_p = {}
            for name in streams:  # the head, too, may be another in the base
                with activate_variant(reader.model, ModelVariant(name), kind):
                    log_p[name] = reader.log_probs(states[name][at : at + CHUNK])
            for name, log_p_CV in log_p.items():
                add(f"entropy {name}", torch.special.entr(log_p_CV.exp()).sum(-1))
                top = log_p_CV.topk(min(LIKELIEST, log_p_CV.shape[-1]), -1)
                add(f"likeliest {name}", top.indices)
                add(f"likeliest_prob {name}", top.values.exp())
            add("kl", divergence(log_p["adapter"], log_p["base"]))
        where.append(rows_T)
        ids.append(ids_T)
    whole = {name: np.concatenate(read) for name, read in parts.items()}
    entropy, likeliest, likeliest_prob = (
        {str(name): whole[f"{of} {name}"] for name in streams} for of in ("entropy", "likeliest", "likeliest_prob")
    )
    return TokenEntropies(np.concatenate(where), np.concatenate(ids), entropy, likeliest, likeliest_prob, whole["kl"])


def divergence(log_p_CV: torch.Tensor, log_r_CV: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ r) of log-probabilities, nats, [C]."""
    return (log_p_CV.exp() * (log_p_CV - log_r_CV)).sum(-1)


def by_class(
    found: TokenEntropies, rows: Sequence[Row], classes: TokenClasses, seed: int = 0
) -> tuple[ClassEntropy, ...]:
    """Means and shares over all tokens, then per token class in the order of `CLASSES`; `rows` are those that were measured."""
    kinds = classes.indices(found.token_ids)
    delta, of = found.delta, distinct(rows)[found.rows]
    count = int(of.max()) + 1

    def interval(values: np.ndarray, chosen: np.ndarray) -> Interval:
        sums = np.bincount(of[chosen], values[chosen], minlength=count)
        return bootstrap_ratio(sums, np.bincount(of[chosen], minlength=count), seed=seed)

    table = []
    for name in (ALL, *CLASSES):
        chosen = np.ones(len(kinds), dtype=bool) if name == ALL else kinds == CLASSES.index(name)
        if not chosen.any():  # a ratio over no token
            continue
        # in the order of the fields of `ClassEntropy`; without gates there is no third entropy
        each = (delta, (delta < 0).astype(float), (delta > 0).astype(float), found.kl, *found.entropy.values())
        table.append(ClassEntropy(name, int(chosen.sum()), *(interval(values, chosen) for values in each)))
    return tuple(table)


def distribution(delta: np.ndarray) -> Histogram:
    """Histogram over equal bins symmetric around 0; what lies beyond the 1 % and 99 % quantiles is in the outer ones."""
    reach = max(1e-6, *np.abs(np.quantile(delta, (0.01, 0.99))))
    edges = np.linspace(-reach, reach, BINS + 1)
    return Histogram.of(edges, np.histogram(np.clip(delta, -reach, reach), edges)[0])


def conclude_entropy(record: EntropyRecord) -> tuple[str, ...]:
    """What was found, in sentences."""
    text = []
    if record.classes:
        total, *classes = record.classes
        delta = total.delta
        moves = f"{'raises' if delta.mean > 0 else 'lowers'} the entropy by {abs(delta.mean):.3f} nats"
        if delta.low is None or delta.high is None or delta.low <= 0 <= delta.high:
            moves = f"is not shown to raise or lower the entropy: {delta.mean:+.3f} nats"
        text.append(
            f"The adapter {moves} per token on average "
            f"({total.base.mean:.3f} in the base, {total.adapter.mean:.3f} with it): ΔH is positive at "
            f"{100 * total.positive.mean:.1f} % and negative at {100 * total.negative.mean:.1f} % of {total.tokens:,} tokens."
        )
        text.append(f"It moves each prediction by {total.kl.mean:.3f} nats on average (KL to the base).")
        known = [row for row in classes if row.tokens >= max(20, 0.005 * total.tokens)]
        if len(known) > 1:
            top, low = max(known, key=lambda row: row.delta.mean), min(known, key=lambda row: row.delta.mean)
            text.append(
                f"It raises the entropy most on {top.name} ({top.delta.mean:+.3f} nats) and least on {low.name} "
                f"({low.delta.mean:+.3f})."
            )
        if total.gated is not None:
            text.append(f"With the gates the entropy of these tokens is {total.gated.mean:.3f} nats.")
    for row in record.interventions:
        text.append(
            f"{row.task}: switching the delta off where ΔH is {row.name.split()[-1]} ({100 * row.suppressed:.0f} % of the "
            f"generated tokens) scores {percent(row.score.mean)} %, {in_points(row.difference)} against the adapter "
            f"({row.verdict})."
        )
    return tuple(text)
