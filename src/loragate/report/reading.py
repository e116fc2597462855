"""Results in plain words, the unwelcome ones included.

The reading is a pure function of the rows that `table.py` describes. It says "better" or "worse" only where an interval
allows it, holds the gain against every cheaper way to the same gain, and names what was not run. A row may carry two
further keys: "kind" ("temperature", "greedy", "global" or "base") says which cheap control it is where its name does not,
and "versus_gated" {mean, low, high} is its paired difference to the gated row, used in place of the two accuracy
intervals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from loragate.display import percent, points
from loragate.report.table import Row, p_value

Order = Literal["above", "below", "unclear"]

CHEAP = {"temperature": "lower temperature", "greedy": "greedy decoding", "global": "one global λ"}
REFERENCES = {
    "base": {
        "is": "without any adapter",
        "absent": "The base was not run: whether this task needs an adapter at all is not known.",
        "above": ": the gated adapter does worse here than no adapter",
        "unclear": ": adapter and gates together show no gain",
    },
    "dft": {
        "is": "another loss in the fine-tuning itself",
        "absent": "DFT was not run: whether a better loss in the fine-tuning itself would do as much is not known.",
        "above": ": where the fine-tuning can be repeated, it is the better choice here",
    },
}
LEVEL = 0.05
"""A difference is called better or worse where its p is at most this and its interval excludes zero."""
NOTABLE_TRUNCATION = 0.05
"""Share of answers from which truncation is held to matter."""


def read_results(rows: Sequence[Row], *, adapter_name: str = "LoRA", gated_name: str = "SCALE") -> list[str]:
    """Return what the rows allow to be concluded, one statement per entry.

    The adapter's row is the one named `adapter_name`. The gated row is the one named `gated_name` or, where there is
    none, every row of the group "scale". Verdicts against the adapter rest on the paired interval in "versus_lora".
    """
    adapter = next((row for row in rows if row["name"] == adapter_name and _was_run(row)), None)
    named = [row for row in rows if row["name"] == gated_name]
    gated = [row for row in named or rows if (named or row["group"] == "scale") and _was_run(row)]
    statements: list[str] = []
    if not gated:
        statements.append(f"{gated_name} was not run: nothing can be concluded about the gates.")
    for row in gated:
        statements.append(_verdict(row, adapter, adapter_name))
        statements += _against_cheap_controls(rows, row, adapter, adapter_name)
        statements += [_against(name, rows, row) for name in REFERENCES]
        statements.append(_retention(rows, row, adapter, adapter_name))
        statements += _termination_and_entropy(row, adapter, adapter_name)
    if len(gated) > 1:
        statements.append(
            f"{len(gated)} gated variants are compared on the same questions: the best of them is flattered by the choice."
        )
    statements.append(
        "The intervals cover the choice of questions only. Results of one base and one training seed do not generalise "
        "to other bases, adapters or seeds."
    )
    return statements


def _verdict(gated: Row, adapter: Row | None, adapter_name: str) -> str:
    versus = gated.get("versus_lora")
    if adapter is None or versus is None:
        return f"{gated['name']} was not compared with {adapter_name} question by question, so no verdict is given."
    size = (
        f"{_score(gated)} against {_score(adapter)}, a difference of {points(versus['mean'])} points "
        f"(95 % interval {points(versus['low'])} to {points(versus['high'])}, p{p_value(versus['p'])})"
    )
    decided = versus["p"] <= LEVEL  # with the interval, the rule of evaluation records
    if decided and versus["low"] > 0:
        return f"{gated['name']} is better than {adapter_name}: {size}."
    if decided and versus["high"] < 0:
        return f"{gated['name']} is worse than {adapter_name}: {size}. Use {adapter_name} without these gates."
    return f"No difference between {gated['name']} and {adapter_name} is shown: {size}. That does not prove them equal."


def _against_cheap_controls(rows: Sequence[Row], gated: Row, adapter: Row | None, adapter_name: str) -> list[str]:
    statements, missing = [], []
    for kind, noun in CHEAP.items():
        best = _best([row for row in rows if _kind(row, adapter_name) == kind])
        if best is None:
            missing.append(noun)
            continue
        helps = adapter is not None and best["accuracy"]["mean"] > adapter["accuracy"]["mean"]
        stands, remark = {
            "above": ("above", f": {noun} is the cheaper fix here" if helps else ""),
            "below": ("below", f": {noun} alone does not do as much"),
            "unclear": ("not told apart from", f": {noun} alone may do as much, without training" if helps else ""),
        }[_order(best, gated)]
        where = f"{gated['name']} ({_score(gated)})"
        statements.append(f"{_lead(best)} scores {_score(best)}, {stands} {where}{remark}.")
    if missing:
        verb = "was" if len(missing) == 1 else "were"
        statements.append(
            f"{_listed(missing).capitalize()} {verb} not run: whether so cheap a change would do as much is not known."
        )
    return statements


def _against(reference: str, rows: Sequence[Row], gated: Row) -> str:
    """The gated row against the best row of a kind of `REFERENCES`."""
    said = REFERENCES[reference]
    best = _best([row for row in rows if _kind(row, "") == reference])
    if best is None:
        return said["absent"]
    order = _order(best, gated)
    stands = {"above": "above", "below": "below", "unclear": "not told apart from"}[order]
    return f"{_lead(best)}, {said['is']}, scores {_score(best)}, {stands} {gated['name']}{said.get(order, '')}."


def _retention(rows: Sequence[Row], gated: Row, adapter: Row | None, adapter_name: str) -> str:
    ours = gated.get("retention")
    base = next((row for row in rows if _kind(row, "") == "base" and row.get("retention")), None)
    others = {adapter_name: adapter, "the base": base}
    compared = {name: row["retention"] for name, row in others.items() if row is not None and row.get("retention")}
    if ours is None or not compared:
        return f"Retention was not measured: what {gated['name']} costs on other skills is not known."
    figures = ", ".join(f"{name} {percent(other['mean'])} %" for name, other in compared.items())
    figures = f"{gated['name']} {percent(ours['mean'])} %, {figures}"
    lost = [name for name, other in compared.items() if ours["high"] < other["low"]]
    if lost:
        return f"Retention is lost against {_listed(lost)}: {figures}."
    gained = [name for name, other in compared.items() if ours["low"] > other["high"]]
    if gained:
        return f"Retention is kept, and above {_listed(gained)}: {figures}."
    return f"Retention is kept as far as the intervals can tell: {figures}."


def _termination_and_entropy(gated: Row, adapter: Row | None, adapter_name: str) -> list[str]:
    statements = []
    before_row: Row = adapter if adapter is not None else {}
    cut, cut_before = gated.get("truncated"), before_row.get("truncated")
    if cut is not None:
        before = "" if cut_before is None else f", {percent(cut_before)} % of {adapter_name}"
        statement = f"Cut off at the length limit: {percent(cut)} % of the answers of {gated['name']}{before}."
        if cut_before is not None and cut_before - cut >= NOTABLE_TRUNCATION:
            statement += " Part of any gain may be that answers now come to an end."
        elif cut_before is not None and cut - cut_before >= NOTABLE_TRUNCATION:
            statement += " The gates make more answers run on."
        if cut >= NOTABLE_TRUNCATION:
            statement += " A longer limit may change these scores."
        statements.append(statement)
    entropy, entropy_before = gated.get("entropy"), before_row.get("entropy")
    if entropy is not None and entropy_before is not None:
        statements.append(
            f"Entropy per token is {entropy:.2f} nats for {gated['name']} and {entropy_before:.2f} for {adapter_name}. "
            "Low entropy is what the gates were trained for; it does not show that answers are right."
        )
    return statements


def _was_run(row: Row) -> bool:
    return not row.get("not_run") and row.get("accuracy") is not None


def _best(rows: Sequence[Row]) -> Row | None:
    return max(filter(_was_run, rows), key=lambda row: row["accuracy"]["mean"], default=None)


def _kind(row: Row, adapter_name: str) -> str | None:
    """Which untrained control or reference a row is, by its "kind" or else by its name; None for all other rows."""
    if row["name"].lower().startswith("dft"):
        return "dft"
    if row["group"] != "control" or "kind" in row:
        return row.get("kind")
    name = row["name"].lower()
    if name.startswith("base"):
        return "base"
    if "per module" in name:
        return None
    if "global" in name or re.search(r"(λ|lambda)\s*=", name):
        return "global"
    if not name.startswith(adapter_name.lower()):
        return None
    if "greedy" in name:
        return "greedy"
    return "temperature" if re.search(r"\bt\s*=|temperature", name) else None


def _order(row: Row, gated: Row) -> Order:
    """Where a row stands against the gated one: by its paired difference if it has one, else by disjoint intervals."""
    versus = row.get("versus_gated")
    ours, theirs = gated["accuracy"], row["accuracy"]
    low, high = (
        (versus["low"], versus["high"]) if versus else (theirs["low"] - ours["high"], theirs["high"] - ours["low"])
    )
    return "above" if low > 0 else "below" if high < 0 else "unclear"


def _score(row: Row) -> str:
    return f"{percent(row['accuracy']['mean'])} %"


def _lead(row: Row) -> str:
    """The row's name as the first word of a sentence."""
    return row["name"][:1].upper() + row["name"][1:]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
