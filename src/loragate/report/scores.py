"""The tables of an evaluation and what they say in words, from the record's JSON.

One table per task, with what must stand beside a score: its interval, the paired difference to the adapter and what may be
said of it, how many answers were cut off and how many could not be judged. Last tables average over the tasks of a suite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
UNSURE = "not significantly different from the adapter"
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
    says = VERDICTS.get(row["verdict"], UNSURE)
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


class _Standing(NamedTuple):
    """How gates or the base stand to the adapter, each at its best temperature.

    Attributes:
        verdict: of the comparison there; where none is on record, as of the average of a suite, of that at the tasks' own
            temperature, unless the best scores say otherwise.
        note: what each scores at its best, where that is not at the tasks' own; else empty.
        best: the best temperature of each, by its variant, where it is not the task's own; empty where tasks are averaged.
    """

    verdict: str
    note: str
    best: Mapping[str, float]


def _standings(record: Record, variant: str) -> dict[str, _Standing]:
    """{what was scored: how "gated" or "base" stands there}: averages of suites, tasks in none, and those where it is worse."""
    places = [(title, rows, tuple(rows[0].get("tasks", (title,)))) for title, rows, _ in compared_rows(record) if rows]
    found = {title: _standing(record, variant, rows, tasks) for title, rows, tasks in places}
    for name in (task["name"] for task in record["tasks"]):
        if (one := _standing(record, variant, rows_of(record, name), (name,))) and one.verdict == "worse":
            found.setdefault(name, one)
    return {title: one for title, one in found.items() if one}


def _standing(record: Record, variant: str, rows: list[Record], tasks: Sequence[str]) -> _Standing | None:
    said = next((row["verdict"] for row in rows if row["variant"] == variant and row["control"] is None), None)
    own = {task["name"]: task["sampling"]["temperature"] for task in record["tasks"]}
    plain = [row for row in record["results"] if row["task"] in tasks and row["control"] is None]
    models = {name: [row for row in plain if row["variant"] == name] for name in ("adapter", variant)}
    if said is None or any(len(found) != len(tasks) for found in models.values()):
        return said and _Standing(said, "", {})
    heats, means = {}, {}
    for name, found in models.items():
        bests = [row.get("at_best") or {"temperature": own[row["task"]], "score": row["avg_at_k"]} for row in found]
        heats[name] = [best["temperature"] for best in bests]
        means[name] = sum(best["score"]["mean"] for best in bests) / len(bests)
    if all(found == [own[task] for task in tasks] for found in heats.values()):
        return _Standing(said, "", {})
    at_best = models[variant][0].get("at_best") if len(tasks) == 1 else None
    verdict = (at_best or {}).get("verdict")
    if verdict is None:
        is_otherwise = means[variant] <= means["adapter"] if said == "better" else means[variant] >= means["adapter"]
        verdict = NOT_SHOWN if is_otherwise else said
    is_one = len(tasks) == 1
    labels = {name: f"{name} {temperature_label(found[0])}" if is_one else name for name, found in heats.items()}
    scores = [f"{labels[name]} {percent(mean)} %" for name, mean in means.items()]
    note = f"at the best temperature of each: {', '.join(scores)}"
    if verdict != said:
        at = temperature_label(own[tasks[0]]) if is_one else "the tasks' own temperatures"
        note += f"; {variant} is {VERDICTS.get(said, UNSURE)} at {at} alone"
    best = {name: found[0] for name, found in heats.items() if is_one and found[0] != own[tasks[0]]}
    return _Standing(verdict, note, best)


def _advise(standings: Mapping[str, _Standing], model: str, adapter: str, loser: str, unsure: str) -> str:
    """What to use where, the model or the adapter; `loser` begins what is said of the model where it is worse."""
    better, worse, rest = (
        [where for where, one in standings.items() if one.verdict == verdict]
        for verdict in ("better", "worse", NOT_SHOWN)
    )
    left = f"; no difference shown on {', '.join(rest)}" if rest else ""
    if better and worse:
        return f"Use {model} for {', '.join(better)}, and {adapter} for {', '.join(worse)}{left}"
    if not (better or worse):
        return unsure
    where = f" for {', '.join(better or worse)}" if rest else ""
    return (
        f"Use {model}{where}: {VERDICTS['better']}{left}"
        if better
        else f"Use {adapter}{where}: {loser} {VERDICTS['worse']}{left}"
    )


def advice_of(record: Record) -> tuple[str, str, list[str], Table]:
    """(what to do, what that scores, notes and what the alternatives score, the table of these scores) of an evaluation.

    It is about the gates; without any, about the adapter and its base. A base that is better than the adapter is always said.
    The rest is named and not recommended: what was found the best on a test is not known to be the best elsewhere.
    """
    every, has_gates = compared_rows(record), _has_gates(record)
    gates, base = _standings(record, "gated"), _standings(record, "base")
    about = gates if has_gates else base
    cells = [(where, found) for where, rows, _ in every if (found := _cells(rows))[0]]
    if cells and not gates:
        advice = "; ".join([*(f"On {where}, {_cells_in_words(found)}" for where, found in cells), NO_CHOICE])
    elif not about:
        advice = f"The {'gates were' if has_gates else 'base was'} not compared with the adapter"
    elif has_gates:
        unsure = f"Use the plain adapter: the gates are {UNSURE}"
        advice = _advise(gates, "the gates", "the plain adapter", "the gates are", unsure)
    else:
        unsure = f"The base is {UNSURE}"
        advice = _advise(base, "the base without the adapter", "the adapter", "the base is", unsure)
    ahead = [where for where, one in base.items() if one.verdict == "better"]
    if ahead and has_gates:
        advice += f"; the base without any adapter is {VERDICTS['better']}"
        advice += f" on {', '.join(ahead)}" if len(base) > len(ahead) else ""
    helped = [where for where, one in about.items() if one.verdict == "better"]
    title, rows, key = next((one for one in every if one[0] in helped), every[0])
    names = [*(task["name"] for task in record["tasks"]), *(name for name, _ in suites_of(record))]
    table = dict(zip(names, score_tables(record), strict=True))[title]
    chosen = "adapter" if title not in helped else "gated" if has_gates else "base"
    heat = about[title].best.get(chosen) if title in about else None
    control = None if heat is None else temperature_label(heat)
    first = next((row for row in rows if (row["variant"], row["control"]) == (chosen, control)), rows[0])
    score = f"{title}: {row_name(first)} {format_cell(share_cell(first[key]))} %"
    more = [f"On {where}, {one.note}." for found in (gates, base) for where, one in found.items() if one.note]
    others = sorted((row for row in rows if row is not first), key=lambda row: -row[key]["mean"])
    if others:
        listed = ", ".join(f"{row_name(row)} {percent(row[key]['mean'])} %" for row in others[:5])
        more.append(f"Alternatives: {listed}.")
    if others and others[0][key]["mean"] > first[key]["mean"]:
        more.append(
            f"{row_name(others[0])} scores higher here; whether to use it, a dev set says (loragate calibrate)."
        )
    return advice, score, more, table
