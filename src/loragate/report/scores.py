"""The tables of an evaluation and what they say in words, from the record's JSON.

One table per task, with what must stand beside a score: its interval, the paired difference to the adapter and what may be
said of it, how many answers were cut off and how many could not be judged. Last tables average over the tasks of a suite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from loragate.display import format_points, percent, pluralize, temperature_label
from loragate.report.table import (
    ABSENT,
    GROUP_OF,
    Cell,
    Line,
    Table,
    difference_cell,
    ends_of,
    format_cell,
    format_optional,
    share_cell,
    with_best_scores,
)
from loragate.selection_record import NOTABLE, count_unparsed_answers

Record = Mapping[str, Any]
COLUMNS = (
    "Model",
    "Score %",
    "vs adapter, points",
    "Majority %",
    "Cut off, no EOS %",
    "No answer %",
    "Tokens",
    "Entropy nats",
)
SUITE_COLUMNS = ("Model", "Mean over tasks %", "vs adapter, points")
RANGE = re.compile(r"\[(-?[\d.]+), ?(-?[\d.]+)\]")
"""In the label of gates that are one of several; it begins that of a sweep's cell."""
CELL = re.compile(rf"{RANGE.pattern}( ce)?( lr=[\d.e+-]+)?(, seed \d+)?")
"""The whole label of a sweep's cell; one with more behind it, such as "[-6,3] noreverse", is trained gates changed afterwards."""
SAMPLED = re.compile(rf"greedy|T=[\d.]+|({CELL.pattern}|(\w+ )?λ=[-\d.]+)( greedy| T=[\d.]+)?")
"""What may follow base, adapter or gates in a label that is no control of its own: a range, a temperature, one λ."""
NO_CHOICE = "a test may not choose among them"
NOT_SHOWN = "no difference shown"
VERDICTS = {"better": "significantly better than the adapter", "worse": "significantly worse than the adapter"}


def caption(record: Record) -> str:
    """What the columns mean, and what was done."""
    text = (
        "Ranges are 95 % intervals over questions; vs adapter is paired by question, at another temperature than the task's "
        "against the adapter there; its p, interval and verdict are after Holm's adjustment over all comparisons. Cut off: "
        "answers that met the length limit; below it, where it differs, no EOS: answers without an end of sequence. No answer: "
        "nothing that could be judged was found, for whatever reason. Tokens and entropy (nats per token): means over the answers."
    )
    if record["sandbox"]:
        text += f" Programs ran in the tier {record['sandbox']}."
    if agreement := record.get("agreement"):
        # None where a log-prob was no number
        label, worst = max(agreement.items(), key=lambda pair: (pair[1]["mean"] is None, pair[1]["mean"] or 0.0))
        mean = "is no number" if worst["mean"] is None else f"is {worst['mean']:.2g} nats a token"
        wrong = [name for name, one in agreement.items() if not one["agrees"]]
        text += (
            f" vLLM's log-probs of {sum(one['tokens'] for one in agreement.values()):,} tokens were compared with transformers: "
            f"the largest mean difference {mean} ({label}; limit {worst['limit']:g})."
        )
        if wrong:
            text += f" THEY DIFFER, so these are scores of other models: {', '.join(wrong)}."
    return "\n".join([text, *(f"warning: {warning}" for warning in record["warnings"])])


def score_tables(record: Record) -> list[Table]:
    """One table per task and, for several tasks of a suite, their average; rows that were left out come last."""
    tables = []
    for task in record["tasks"]:
        rows = rows_of(record, task["name"])
        lines = [_line(row, row["avg_at_k"], *_judged_cells(row, task["grader"])) for row in rows]
        if not task["grader"].startswith("lm-eval"):  # the harness is asked for no controls
            left_out = record.get("left_out", {}).items()
            lines += [Line(f"{row}, not applicable: {why}", [(ABSENT,)] * (len(COLUMNS) - 1)) for row, why in left_out]
        sampling, questions = task["sampling"], rows[0]["avg_at_k"]["questions"]
        title = f"{task['name']} v{task['version']} · Avg@{sampling['samples']}, {pluralize(questions, 'question')}, "
        title += f"T = {sampling['temperature']:g}, grader {task['grader']}"
        tables.append(
            with_best_scores(
                Table(title, COLUMNS, lines, hidden_on_terminal=(7,)), [row.get("at_best") for row in rows]
            )
        )
    for title, rows in suites_of(record):
        tables.append(Table(title, SUITE_COLUMNS, [_line(row, row["average"]) for row in rows]))
    return tables


def score_markdown(record: Record) -> str:
    """All of them as Markdown, ending in a line end."""
    return "\n\n".join([*(table.markdown() for table in score_tables(record)), *caption(record).split("\n")]) + "\n"


def _line(row: Record, score: Record, *more: Cell) -> Line:
    # as in a table of a selection; random gates and adapters that were trained otherwise are controls
    changed = "intervention" if RANGE.match(row["control"] or "") else "control"  # "[-6,3] unit": after their training
    group = GROUP_OF[row["variant"]] if SAMPLED.fullmatch(row["control"] or "greedy") else changed
    cells = [share_cell(score), difference_cell(row["comparison"], row["verdict"], row.get("adjusted_p")), *more]
    return Line(row_name(row), cells, group, score)


def _judged_cells(row: Record, grader: str) -> list[Cell]:
    """What follows score and difference in the row of a task."""
    majority, total = row["majority_at_k"], sum(row["reasons"].values())
    return [
        (ABSENT if majority is None or row["avg_at_k"]["samples"] == 1 else percent(majority["mean"]),),
        (percent(row["truncated"]), percent(row["no_eos"]) if row["no_eos"] != row["truncated"] else ""),
        (percent(count_unparsed_answers(row["reasons"], grader) / total),),
        (f"{row['tokens']:.{0 if row['tokens'] >= 100 else 1}f}",),
        (format_optional(row["entropy"], "{:.2f}".format),),
    ]


def row_name(row: Record) -> str:
    """ "gated", "adapter T=0.6"."""
    return row["variant"] if row["control"] is None else f"{row['variant']} {row['control']}"


def suites_of(record: Record) -> list[tuple[str, list[Record]]]:
    """[(title, rows)]: the averages of each suite, as "average of the 5 math tasks", and of suites with subsets over those."""
    found: dict[str, list[Record]] = {}
    for row in record["suites"]:
        found.setdefault(row["suite"], []).append(row)
    by_subset = [suite.removesuffix("/subsets") for suite in found if suite.endswith("/subsets")]
    titles = []
    for suite, rows in found.items():
        count, (name, *subsets) = rows[0]["average"]["tasks"], suite.split("/")
        title = f"{name}: average of its {count} subsets" if subsets else f"average of the {count} {suite} tasks"
        if suite == "retention" and by_subset:
            title += f" ({', '.join(by_subset)} by its subsets)"
        titles.append((title, rows))
    return titles


def rows_of(record: Record, task: str) -> list[Record]:
    """The results of one task, in the record's order."""
    return [row for row in record["results"] if row["task"] == task]


def compared_rows(record: Record) -> list[tuple[str, list[Record], str]]:
    """[(what was scored, rows, key of their scores)]: the averages of the suites, then the tasks that are in none of them."""
    averaged = {task for row in record["suites"] for task in row.get("tasks", ())}
    suites = [(title, rows, "average") for title, rows in suites_of(record)]
    alone = [task["name"] for task in record["tasks"] if task["name"] not in averaged]
    return suites + [(name, rows_of(record, name), "avg_at_k") for name in alone]


def _cells(rows: list[Record], temperature: float | None = None) -> tuple[int, int, int]:
    """(number of cells of a sweep at this temperature or the task's, of those significantly better, significantly worse)."""
    at = "" if temperature is None else f" {temperature_label(temperature)}"
    names = [(row["control"] or "", row["verdict"]) for row in rows if row["variant"] == "gated"]
    said = [verdict for name, verdict in names if name.endswith(at) and CELL.fullmatch(name.removesuffix(at))]
    return len(said), said.count("better"), said.count("worse")


def _cells_in_words(cells: tuple[int, int, int]) -> str:
    count, better, worse = cells
    return f"{better} of {pluralize(count, 'cell')} significantly better than the adapter, {worse} significantly worse"


def evaluation_statements(record: Record) -> list[str]:
    """What the record's own verdicts say of the gated model, task by task, and what stands beside it.

    Of the base it is said where it is better than the adapter, and always where there are no gates.
    """
    statements, is_entropy_lower = [], False
    gates = " ".join(filter(None, ("gated", own_range(record))))
    for task in record["tasks"]:
        rows, own = rows_of(record, task["name"]), temperature_label(task["sampling"]["temperature"])
        # the plain adapter, by its temperature
        adapters = {row["temperature"]: row for row in rows if row["variant"] == "adapter" and _is_plain(row)}
        for row in rows:
            # at another temperature gates are compared with the adapter there
            if row["variant"] != "gated" or not _is_plain(row):
                continue
            where = f"On {task['name']}, {row['control'] or own}"
            versus, adapter = row["comparison"], adapters.get(row["temperature"])
            if versus is None or adapter is None:
                statements.append(f"{where}, the adapter was not run, so no verdict on the gates is given.")
                continue
            statements.append(f"{where}, {_verdict_in_words(gates, row, adapter)}.")
            if row["temperature"] is None:
                statements += [f"{where}, {line}" for line in _confounder_lines(row, adapter, rows)]
                is_entropy_lower |= (
                    None not in (row["entropy"], adapter["entropy"]) and row["entropy"] < adapter["entropy"]
                )
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            if (cells := _cells(rows, temperature))[0]:
                at = own if temperature is None else temperature_label(temperature)
                statements.append(f"On {task['name']}, {at}, {_cells_in_words(cells)}; {NO_CHOICE}.")
        base = next((row for row in rows if row["variant"] == "base" and row["control"] is None), None)
        if base and base["comparison"] and None in adapters and (base["verdict"] == "better" or not _has_gates(record)):
            statements.append(f"On {task['name']}, {own}, {_verdict_in_words('the base', base, adapters[None])}.")
    if is_entropy_lower:
        statements.append("Gates are trained for low entropy, which does not show that answers are right.")
    return statements


def _verdict_in_words(name: str, row: Record, adapter: Record) -> str:
    versus = row["comparison"]
    says = VERDICTS.get(row["verdict"], "not significantly different from the adapter")
    return (
        f"{name} is {says}: {percent(row['avg_at_k']['mean'])} % against {percent(adapter['avg_at_k']['mean'])} % of the adapter "
        f"({format_points(versus['mean'])} points, interval {ends_of(versus)})"
    )


def _has_gates(record: Record) -> bool:
    return any(row["variant"] == "gated" for row in record["results"])


def own_range(record: Record) -> str:
    """The range of the gates that are called "gated" alone, "[0,1]"; empty where the record has none."""
    found = record.get("range")
    return f"[{found[0]:g},{found[1]:g}]" if found else ""


def _is_plain(row: Record) -> bool:
    """Whether nothing but the temperature tells a variant from its weights."""
    temperature = row["temperature"]
    return row["control"] == (None if temperature is None else temperature_label(temperature))


def _confounder_lines(gated: Record, adapter: Record, rows: list[Record]) -> list[str]:
    """What else may have done it: a control without training, no adapter at all, answers that come to an end."""
    lines, score = [], gated["avg_at_k"]["mean"]
    cheap = [row for row in rows if row["variant"] == "adapter" and (row["temperature"], row["scale"]) != (None, None)]
    best = max(cheap, key=lambda row: row["avg_at_k"]["mean"], default=None)
    if best is None:
        lines.append("no cheap control was run (lower temperature, one λ).")
    elif best["avg_at_k"]["mean"] >= score:
        lines.append(f"{row_name(best)} needs no training and scores {percent(best['avg_at_k']['mean'])} %.")
    bases = [row for row in rows if row["variant"] == "base" and row["avg_at_k"]["mean"] >= score]
    if bases:
        bare = max(bases, key=lambda row: row["avg_at_k"]["mean"])
        lines.append(f"the {row_name(bare)} scores {percent(bare['avg_at_k']['mean'])} % without any adapter.")
    cut, before = gated["truncated"], adapter["truncated"]
    if max(cut, before) >= NOTABLE:
        line = f"{percent(cut)} % of the answers of the gates are cut off, {percent(before)} % of the adapter's"
        if before - cut >= NOTABLE:
            line += ": part of any gain may be that answers now come to an end"
        elif cut - before >= NOTABLE:
            line += ": the gates make more answers run on"
        lines.append(f"{line}.")
    return lines


def advice_of(record: Record) -> tuple[str, str, list[str], Table]:
    """(what to do, what that scores, what the alternatives score, the table of these scores) of an evaluation.

    It is about the gates; without any, about the adapter and its base. A base that is significantly better than the adapter is
    always said.

    It follows the verdicts on the averages of suites and on the tasks that are in none; a task on which the gates are worse is
    named even where its average is not. The rest is named and not recommended: what was found the best on a test is not known
    to be the best elsewhere.
    """
    every = compared_rows(record)
    verdicts = _verdicts(every)
    single = _verdicts([(task["name"], rows_of(record, task["name"]), "avg_at_k") for task in record["tasks"]])
    verdicts |= {name: said for name, said in single.items() if said == "worse"}
    helped, hurt, unsure = (
        [where for where, said in verdicts.items() if said == verdict] for verdict in ("better", "worse", NOT_SHOWN)
    )
    # a gain at one temperature is none where the adapter alone is as good at another, and the reverse
    bests = {where: best for where in verdicts if (best := _best_of_both(record, where, "gated"))}
    beaten = {where: best for where, best in bests.items() if where in helped and best.verdict != "better"}
    risen = {
        where: best
        for where, best in bests.items()
        if where not in helped and best.compared and best.verdict == "better"
    }
    helped = [where for where in (*helped, *risen) if where not in beaten]
    hurt, unsure = ([where for where in places if where not in risen] for places in (hurt, unsure))
    cells = [(where, found) for where, rows, _ in every if (found := _cells(rows))[0]]
    bases = _verdicts(every, "base")
    # the base likewise: better at one temperature is not better where everybody may take the best
    turned = {
        where: (said, best)
        for where, said in bases.items()
        if said != NOT_SHOWN and (best := _best_of_both(record, where, "base")) and best.verdict != said
    }
    bases |= {where: best.verdict if best.compared else NOT_SHOWN for where, (_, best) in turned.items()}
    lost = [where for where, said in bases.items() if said == "better"]
    if cells and not verdicts:
        advice = "; ".join([*(f"On {where}, {_cells_in_words(found)}" for where, found in cells), NO_CHOICE])
    elif not verdicts and not _has_gates(record):
        advice = _advice_without_gates(bases)
    elif not verdicts:
        advice = "The gates were not compared with the adapter"
    elif helped and hurt:
        advice = f"Use the gates for {', '.join(helped)}, and the plain adapter for {', '.join(hurt)}"
    elif helped:
        advice = f"Use the gates for {', '.join(helped)}" if unsure else f"Use the gates: {VERDICTS['better']}"
    elif hurt:
        advice = "Use the plain adapter: the gates are significantly worse"
        advice += f" on {', '.join(hurt)}" if unsure or beaten else ""
    elif beaten:
        where, best = next(iter(beaten.items()))
        lead, alone = (" at another temperature", "own") if best.elsewhere else ("", "own temperature")
        advice = (
            f"Use the plain adapter{lead}: the gates are significantly better than it at the tasks' {alone} alone, "
            f"and at the best of each it has {best.said('the gates')}"
        )
        advice += f" on {where}" if len(verdicts) > 1 else ""
    else:
        advice = "Use the plain adapter: the gates are not significantly different from it"
    if beaten and (helped or hurt):
        advice += f"; on {', '.join(beaten)} the gates are better at the task's own temperature alone"
    if unsure and (helped or hurt or beaten):
        advice += f"; no difference shown on {', '.join(unsure)}"
    if lost and _has_gates(record):
        advice += f"; the base without any adapter is {VERDICTS['better']}"
        advice += f" on {', '.join(lost)}" if len(bases) > len(lost) else ""
    for where, best in risen.items():
        on = f"on {where} " if len(verdicts) > 1 else ""
        advice += f"; {on}at the best temperature of each: the adapter has {best.said('the gates')}"
    for where, (at_own, best) in turned.items():
        if _has_gates(record) and "better" not in (at_own, best.verdict):
            continue  # of gates; the base is not spoken of
        ahead = "the base is better than the adapter" if at_own == "better" else "the adapter is better than the base"
        advice += (
            f"; {f'on {where} ' if len(bases) > 1 else ''}{ahead} at the task's own temperature alone: at the best of each the "
            f"adapter has {best.said('the base')}"
        )
    spoken_of = (helped or ([] if hurt else [*beaten]))[:1]
    title, rows, key = next((one for one in every if one[0] in spoken_of), every[0])
    names = [*(task["name"] for task in record["tasks"]), *(name for name, _ in suites_of(record))]
    table = dict(zip(names, score_tables(record), strict=True))[title]
    own = {row["variant"]: row for row in rows if row["control"] is None}
    use_base = lost and not _has_gates(record) and title in lost
    chosen = "gated" if helped else "base" if use_base else "adapter"
    first = own.get(chosen) or rows[0]
    base_bests = {} if _has_gates(record) else {where: best for where, (_, best) in turned.items()}
    if best_both := {**base_bests, **beaten, **risen}.get(
        title
    ):  # advice about the best temperatures, with a score there
        plain = [row for row in rows if row["variant"] == chosen and _is_plain(row)]
        first = next((row for row in plain if {row["temperature"]} == best_both.temperatures[chosen]), first)
    score = f"{title}: {row_name(first)} {format_cell(share_cell(first[key]))} %"
    others = sorted((row for row in rows if row is not first), key=lambda row: -row[key]["mean"])
    listed = ", ".join(f"{row_name(row)} {percent(row[key]['mean'])} %" for row in others[:5])
    more = [f"Alternatives: {listed}."] if listed else []
    if others and others[0][key]["mean"] > first[key]["mean"]:
        more.append(
            f"{row_name(others[0])} scores higher here; whether to use it, a dev set says (loragate calibrate)."
        )
    return advice, score, more, table


def _advice_without_gates(bases: Mapping[str, str]) -> str:
    """What to do about the adapter, from {what was scored: the verdict on the base}."""
    if not bases:
        return "The adapter was not compared with its base"
    better, worse = ([where for where, said in bases.items() if said == verdict] for verdict in ("better", "worse"))
    unsure = [where for where in bases if where not in (*better, *worse)]
    left = f"; no difference shown on {', '.join(unsure)}" if unsure else ""
    if better and worse:
        return (
            f"Use the base without the adapter for {', '.join(better)}, where it is {VERDICTS['better']}, and the adapter for "
            f"{', '.join(worse)}{left}"
        )
    if better:
        on = f" on {', '.join(better)}" if unsure else ""
        return f"Use the base without the adapter: it is {VERDICTS['better']}{on}{left}"
    if worse:
        on = f" on {', '.join(worse)}" if unsure else ""
        return f"Use the adapter: it is significantly better than its base{on}{left}"
    return "The adapter is not significantly different from its base"


class _Best(NamedTuple):
    """The adapter and another model, each at its best temperature."""

    adapter: float
    other: float
    verdict: str
    """On the other model; by the scores alone where no comparison is on record, as of the average of a suite."""
    compared: bool
    elsewhere: bool
    """Whether the adapter's best is not the temperature of the tasks."""
    temperatures: dict[str, set[float]]
    """The best of each, by its variant; several where tasks differ."""

    def said(self, other: str) -> str:
        unsure = ", no significant difference" if self.verdict == NOT_SHOWN else ""
        return f"{percent(self.adapter)} % and {other} {percent(self.other)} %{unsure}"


def _best_of_both(record: Record, where: str, other: str) -> _Best | None:
    """What the adapter and another model score at the best temperature of each; None where both are best at the tasks' own.

    At several temperatures it is `at_best`, which the choice does not flatter.
    """
    heats = {task["name"]: task["sampling"]["temperature"] for task in record["tasks"]}
    tasks = next((rows[0].get("tasks", ()) for title, rows in suites_of(record) if title == where), (where,))
    scores, versus = {"adapter": 0.0, other: 0.0}, None
    elsewhere = dict.fromkeys(scores, False)
    best_at: dict[str, set[float]] = {name: set() for name in scores}
    for task in tasks:
        own = {row["variant"]: row for row in rows_of(record, task) if row["control"] is None}
        if not scores.keys() <= own.keys():
            return None
        for name in scores:
            best = own[name].get("at_best")
            heat = best["temperature"] if best else heats[task]
            best_at[name].add(heat)
            elsewhere[name] |= heat != heats[task]
            scores[name] += (best["score"] if best else own[name]["avg_at_k"])["mean"] / len(tasks)
            versus = best.get("comparison") if best and len(tasks) == 1 else None
    low, high = (versus["low"], versus["high"]) if versus else (scores[other] - scores["adapter"],) * 2
    verdict = "better" if low > 0 else "worse" if high < 0 else NOT_SHOWN
    if not any(elsewhere.values()):
        return None
    return _Best(scores["adapter"], scores[other], verdict, versus is not None, elsewhere["adapter"], best_at)


def _verdicts(every: list[tuple[str, list[Record], str]], variant: str = "gated") -> dict[str, str]:
    """{what was scored: the verdict on the gates themselves, or on the base}, where there is one."""
    return {
        where: row["verdict"]
        for where, rows, _ in every
        for row in rows
        if row["variant"] == variant and row["control"] is None and row["verdict"]
    }
