"""`loragate diagnose interventions`: the gates clipped, replaced or taken away at inference, against the gates as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loragate.analysis.interventions import InterventionsRecord, choose, conclude, rows_of
from loragate.cli.diagnose import DiagnoseOptions
from loragate.cli.diagnose_inputs import begin, evaluate
from loragate.errors import ConfigError
from loragate.evaluation.variants import Variant
from loragate.gates import GateConfig
from loragate.gates.schema import read_gate_config


def run(options: DiagnoseOptions) -> int:
    """Score every intervention, write interventions.json and results.json."""

    if not (options.suite or options.tasks):
        raise ConfigError("loragate diagnose interventions needs --suite or --tasks")
    session = begin(options, gated=True)
    config = GateConfig(**read_gate_config(Path(session.loaded.names["gated"]))["gate"])
    chosen, left_out = choose(options.interventions, config)
    # λ = 1 is the adapter, which has a row of its own
    scored = [item for item in chosen if item.name != "off"]
    variants = [Variant("adapter"), Variant("base"), Variant("gated"), *[item.variant for item in scored]]
    identity = {"interventions": [item.name for item in chosen]}
    record = evaluate(session, variants, identity)
    rows = rows_of(record, scored)
    result = InterventionsRecord(
        about=session.about(
            f"tasks {', '.join(info.name for info in record.tasks)}", "interventions", "limit", "samples"
        ),
        lower=config.lower,
        upper=config.upper,
        rows=rows,
        left_out=tuple(left_out),
        conclusion=conclude(rows, left_out),
    )
    session.out.print(table(result))
    line = f"loragate diagnose gates --model {options.model} --run {options.out} --out {options.out}-gates"
    return session.finish(result, "interventions", line)


def table(record: Any) -> Any:
    """Scores and paired differences to the unmodified gates."""
    from rich.table import Table

    found = Table(
        title=f"interventions on gates in [{record.lower:g}, {record.upper:g}]; differences to the gates as they are"
    )
    for name in ("task", "row", "score %", "difference, points", "p (Holm)", "shows"):
        found.add_column(name, justify="left" if name in ("task", "row", "shows") else "right")
    for row in record.rows:
        score = f"{100 * row.score:.1f} ({100 * row.low:.1f}–{100 * row.high:.1f})"
        if row.difference is None:
            found.add_row(row.task, f"{row.name}: {row.meaning}", score, "–", "–", "")
            continue
        ends = f"({100 * row.difference_low:+.1f} to {100 * row.difference_high:+.1f})"
        difference = f"{100 * row.difference:+.1f} {ends}"
        found.add_row(row.task, f"{row.name}: {row.meaning}", score, difference, f"{row.p:.3f}", row.verdict or "")
    return found
