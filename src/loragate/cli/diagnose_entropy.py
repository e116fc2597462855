"""`loragate diagnose entropy`: ΔH on held-out rows, and what switching the delta off by its sign does to the score."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loragate.analysis.delta_entropy import (
    EntropyRecord,
    SuppressedRow,
    by_class,
    conclude,
    distribution,
    measure,
    write_tokens,
)
from loragate.analysis.reading import answer_rows
from loragate.analysis.suppression import SIGNS, Suppression, suppressing
from loragate.cli.diagnose import DiagnoseOptions
from loragate.cli.diagnose_inputs import Session, begin, classes_of, evaluate, pad_id, read_rows
from loragate.errors import ConfigError
from loragate.evaluation.prepared import read_questions
from loragate.evaluation.variants import Variant, acting
from loragate.generation import read_samples
from loragate.validate import comma_list

ROWS = 256
SHARE_ANSWERS = 2


def run(options: DiagnoseOptions) -> int:
    """Measure, intervene where tasks were named, write entropy.json and tokens.jsonl."""

    if not (options.rows or options.suite or options.tasks):
        raise ConfigError(
            "loragate diagnose entropy needs --rows (ΔH on them), --suite or --tasks (interventions), or both"
        )
    wanted: list[Any] = comma_list(options.suppress)
    rules = [Suppression(sign, options.threshold, options.prompt_too) for sign in wanted]
    if not rules:
        raise ConfigError(f"--suppress is empty; give one of {', '.join(SIGNS)}, or both")
    session = begin(options, gated=False)
    loaded, classes = session.loaded, classes_of(session.loaded)
    table: tuple[Any, ...] = ()
    quantiles: dict[str, float] = {}
    sources: list[str] = []
    histogram, count, tokens = None, 0, 0
    if options.rows:
        rows, source = read_rows(session, ROWS)
        sources.append(source)
        with session.display.job("reading with base and adapter") as job:
            found = measure(
                loaded.model, loaded.kind, rows, pad_id(loaded.tokenizer), options.batch_size, job.advance_to
            )
        table = by_class(found, classes, options.threshold, options.seed)
        histogram, quantiles = distribution(found.delta)
        count, tokens = len(rows), len(found.token_ids)
        write_tokens(session.folder / "tokens.jsonl", loaded.tokenizer, rows, found, classes)
        session.out.print(class_table(table))
    suppressed: tuple[Any, ...] = ()
    if session.has_tasks:
        suppressed = intervene(session, rules)
        sources.append(f"tasks {', '.join(dict.fromkeys(row.task for row in suppressed))}")
    record = EntropyRecord(
        about=session.about("; ".join(sources), "suppress", "threshold", "prompt_too", "max_length", "limit"),
        rows=count,
        tokens=tokens,
        threshold=options.threshold,
        classes=table,
        distribution=histogram,
        quantiles=quantiles,
        interventions=suppressed,
        conclusion=conclude(table, suppressed),
    )
    follow = "gates" if loaded.kind == "gated" else "entropy"
    tail = f"--tasks … --out {options.out}-gates" if follow == "gates" else "--suite … --out …"
    return session.finish(record, "entropy", f"loragate diagnose {follow} --model {options.model} {tail}")


def intervene(session: Session, rules: list[Any]) -> tuple[Any, ...]:
    """Score base, adapter, gates and the suppressed streams on the tasks."""

    loaded = session.loaded
    by_name = {Variant("adapter", rule.sign).name: rule for rule in rules}
    variants = [Variant("adapter"), Variant("base"), *([Variant("gated")] if loaded.kind == "gated" else [])]
    variants += [Variant("adapter", rule.sign) for rule in rules]

    @contextmanager
    def acting_as(variant: Any) -> Iterator[None]:

        rule = by_name.get(variant.name)
        with acting(loaded.model, Variant(variant.acts), loaded.kind):
            if rule is None:
                yield
            else:
                with suppressing(loaded.model, rule):
                    yield

    identity = {"threshold": session.options.threshold, "prompt_too": session.options.prompt_too}
    record = evaluate(session, variants, identity, acting_as)
    shares = {
        (name, info.name): suppressed_share(session, name, info.name, rule)
        for name, rule in by_name.items()
        for info in record.tasks
    }
    return tuple(
        SuppressedRow(
            name=result.name,
            task=result.task,
            score=result.avg_at_k.mean,
            low=result.avg_at_k.low,
            high=result.avg_at_k.high,
            difference=None if result.comparison is None else result.comparison.mean,
            difference_low=None if result.comparison is None else result.comparison.low,
            difference_high=None if result.comparison is None else result.comparison.high,
            p=result.adjusted_p,
            verdict=result.verdict,
            suppressed=shares.get((result.name, result.task)),
        )
        for result in record.results
    )


def suppressed_share(session: Session, name: str, task: str, rule: Any) -> float:
    """Share of generated tokens at which the delta was off, from the first answers to every question.

    A decision depends on the tokens before it and on base and adapter alone, so reading the stored answers again gives the
    decisions that were taken.
    """

    slug = Variant("adapter", name.split()[-1]).slug
    samples = read_samples(session.folder / "samples" / slug / f"{task}.jsonl")
    kept = [sample for sample in samples if sample.sample < SHARE_ANSWERS and sample.token_ids]
    prompts = [question.prompt for question in read_questions(session.folder, task)]
    loaded = session.loaded
    rows = answer_rows(loaded.tokenizer, prompts, kept)
    with session.display.job(f"reading the answers of {name} to {task} again"):
        found = measure(loaded.model, loaded.kind, rows, pad_id(loaded.tokenizer), session.options.batch_size)
    return float(rule.chosen(torch.from_numpy(found.delta)).double().mean())


def class_table(rows: tuple[Any, ...]) -> Any:
    """ΔH by token class."""
    from rich.table import Table

    table = Table(title="ΔH = H(adapter) − H(base), nats per token; 95 % intervals over rows")
    for name in ("tokens of class", "number", "ΔH", "ΔH < 0, %", "ΔH > 0, %", "H base", "H adapter", "H gated"):
        table.add_column(name, justify="left" if name == "tokens of class" else "right")
    for row in rows:
        ends = "" if row.delta.low is None else f" ({row.delta.low:+.3f} to {row.delta.high:+.3f})"
        gated = "–" if row.gated is None else f"{row.gated.mean:.3f}"
        shares = f"{100 * row.negative.mean:.1f}", f"{100 * row.positive.mean:.1f}"
        means = f"{row.base.mean:.3f}", f"{row.adapter.mean:.3f}", gated
        table.add_row(row.name, f"{row.tokens:,}", f"{row.delta.mean:+.3f}{ends}", *shares, *means)
    return table
