"""`loragate diagnose gates`: realised λ on generated tokens, per layer, module type and token class."""

from __future__ import annotations

from typing import Any

from loragate.cli.diagnose_inputs import begin, classes_of, pad_id, read_answers


def run(options: Any) -> int:
    """Read the answers, count λ, write gates.json."""
    from loragate.analysis.reading import answer_rows
    from loragate.analysis.realised_gates import count_gates, summarise

    session = begin(options, gated=True)
    loaded = session.loaded
    found, _, source = read_answers(session, "gated")
    rows: list[Any] = []
    groups: list[int] = []
    for answers in found:
        first = max(groups, default=-1) + 1
        rows += answer_rows(loaded.tokenizer, answers.prepared.prompts, answers.samples)
        groups += [first + sample.question for sample in answers.samples]
    with session.display.job("reading the answers with the gates", len(rows)) as job:
        counts = count_gates(
            loaded.model,
            rows,
            groups,
            classes_of(loaded),
            pad_id(loaded.tokenizer),
            options.position,
            options.batch_size,
            job.advance_to,
        )
    about = session.about(source, "position", "answers", "limit")
    record = summarise(counts, about, options.position, len(rows), options.seed)
    for table in tables(record):
        session.out.print(table)
    where = (
        "--suite …" if options.run else f"--{'suite' if options.suite else 'tasks'} {options.suite or options.tasks}"
    )
    line = f"loragate diagnose interventions --model {options.model} {where} --out {options.out}-interventions"
    return session.finish(record, "gates", line)


def tables(record: Any) -> list[Any]:
    """Shares by token class, module type and layer."""
    from rich.table import Table

    found = []
    everything = {"all": record.all}
    for title, groups in (
        ("token class", {**everything, **record.by_class}),
        ("module type", record.by_type),
        ("layer", record.by_layer),
    ):
        table = Table(title=f"realised λ by {title}, % of coefficients (range [{record.lower:g}, {record.upper:g}])")
        for name in (title, "λ < 0", "0 ≤ λ ≤ 1", "λ > 1", "at L", "at U", "mean λ", "number"):
            table.add_column(name, justify="left" if name == title else "right")
        for name, shares in groups.items():
            parts = (shares.below_zero, shares.zero_to_one, shares.above_one, shares.at_lower, shares.at_upper)
            percent = [f"{100 * part:.1f}" for part in parts]
            table.add_row(name, *percent, f"{shares.mean:+.2f}", f"{shares.count:,}")
        found.append(table)
    return found
