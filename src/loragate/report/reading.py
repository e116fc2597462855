"""A quickstart's results in plain words, the unwelcome ones included.

The reading is a pure function of the rows that `table.py` describes, with the paired difference of each to the gated row,
"versus_gated" {mean, low, high}, beside it. It says "better" or "worse" only where an interval allows it, and holds the gain
against every cheaper way to the same gain.
"""

from __future__ import annotations

from collections.abc import Sequence

from loragate.display import percent, points
from loragate.report.table import Row, p_value

CHEAP = {
    ("LoRA, T = 0.6", "LoRA, T = 0.3"): "lower temperature",
    ("LoRA, greedy",): "greedy decoding",
    ("LoRA, one λ",): "one global λ",
}
"""What costs no training, by the beginning of its rows' names."""
REFERENCES = {
    "base": (
        "Base, without any adapter,",
        {
            "above": ": the gated adapter does worse here than no adapter",
            "unclear": ": adapter and gates together show no gain",
        },
    ),
    "DFT": (
        "DFT, another loss in the fine-tuning itself,",
        {"above": ": where the fine-tuning can be repeated, it is the better choice here"},
    ),
}
STANDS = {"above": "above", "below": "below", "unclear": "not told apart from"}
LEVEL = 0.05
"""A difference is called better or worse where its p is at most this and its interval excludes zero."""
NOTABLE_TRUNCATION = 0.05
"""Share of answers from which truncation is held to matter."""


def read_results(rows: Sequence[Row], gated_name: str) -> list[str]:
    """Return what the rows of a quickstart allow to be concluded, one statement per entry.

    Args:
        rows: the adapter's is named "LoRA"; all rows of `CHEAP` and `REFERENCES` are there.
        gated_name: of the row that is read.
    """
    named = {row["name"]: row for row in rows}
    gated, adapter = named[gated_name], named["LoRA"]
    statements = [verdict_in_words(gated, adapter)]
    for names, noun in CHEAP.items():
        found = [row for row in rows if row["name"].startswith(names) and row["accuracy"]]
        statements.append(_against_cheap(max(found, key=lambda row: row["accuracy"]["mean"]), noun, gated, adapter))
    for name, (lead, remarks) in REFERENCES.items():
        order = _order(named[name], gated)
        statements.append(f"{lead} scores {_score(named[name])}, {STANDS[order]} {gated_name}{remarks.get(order, '')}.")
    statements += [_retention(gated, {"LoRA": adapter, "the base": named["base"]}), _termination(gated, adapter)]
    statements.append(
        f"Entropy per token is {gated['entropy']:.2f} nats for {gated_name} and {adapter['entropy']:.2f} for LoRA. "
        "Low entropy is what the gates were trained for; it does not show that answers are right."
    )
    statements.append(
        "The intervals cover the choice of questions only. Results of one base and one training seed do not generalise "
        "to other bases, adapters or seeds."
    )
    return statements


def verdict_in_words(gated: Row, adapter: Row) -> str:
    """Whether the gated row is better or worse than the adapter's, by its paired difference "versus_lora"."""
    versus = gated["versus_lora"]
    size = (
        f"{_score(gated)} against {_score(adapter)}, a difference of {points(versus['mean'])} points "
        f"(95 % interval {points(versus['low'])} to {points(versus['high'])}, p{p_value(versus['p'])})"
    )
    decided = versus["p"] <= LEVEL  # with the interval, the rule of evaluation records
    if decided and versus["low"] > 0:
        return f"{gated['name']} is better than {adapter['name']}: {size}."
    if decided and versus["high"] < 0:
        return f"{gated['name']} is worse than {adapter['name']}: {size}. Use {adapter['name']} without these gates."
    return (
        f"No difference between {gated['name']} and {adapter['name']} is shown: {size}. That does not prove them equal."
    )


def _against_cheap(best: Row, noun: str, gated: Row, adapter: Row) -> str:
    helps = best["accuracy"]["mean"] > adapter["accuracy"]["mean"]
    order = _order(best, gated)
    remark = {
        "above": f": {noun} is the cheaper fix here" if helps else "",
        "below": f": {noun} alone does not do as much",
        "unclear": f": {noun} alone may do as much, without training" if helps else "",
    }[order]
    return f"{best['name']} scores {_score(best)}, {STANDS[order]} {gated['name']} ({_score(gated)}){remark}."


def _retention(gated: Row, others: dict[str, Row]) -> str:
    ours = gated["retention"]
    compared = {name: row["retention"] for name, row in others.items()}
    figures = ", ".join(f"{name} {percent(other['mean'])} %" for name, other in compared.items())
    figures = f"{gated['name']} {percent(ours['mean'])} %, {figures}"
    if lost := [name for name, other in compared.items() if ours["high"] < other["low"]]:
        return f"Retention is lost against {' and '.join(lost)}: {figures}."
    if gained := [name for name, other in compared.items() if ours["low"] > other["high"]]:
        return f"Retention is kept, and above {' and '.join(gained)}: {figures}."
    return f"Retention is kept as far as the intervals can tell: {figures}."


def _termination(gated: Row, adapter: Row) -> str:
    cut, before = gated["truncated"], adapter["truncated"]
    statement = (
        f"Cut off at the length limit: {percent(cut)} % of the answers of {gated['name']}, {percent(before)} % of LoRA."
    )
    if before - cut >= NOTABLE_TRUNCATION:
        statement += " Part of any gain may be that answers now come to an end."
    elif cut - before >= NOTABLE_TRUNCATION:
        statement += " The gates make more answers run on."
    if cut >= NOTABLE_TRUNCATION:
        statement += " A longer limit may change these scores."
    return statement


def _order(row: Row, gated: Row) -> str:
    """Where a row stands against the gated one, by its paired difference: a key of `STANDS`."""
    versus = row["versus_gated"]
    return "above" if versus["low"] > 0 else "below" if versus["high"] < 0 else "unclear"


def _score(row: Row) -> str:
    return f"{percent(row['accuracy']['mean'])} %"
