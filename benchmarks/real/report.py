"""The tables of the study on the real model, from the records that `measure.py` kept; no model is loaded.

    python benchmarks/real/report.py [--records FOLDER] [--write] [--check]

Best against best: everybody may use the best temperature. A temperature that is picked by the answers that it is then
scored by flatters whoever has more of them, so it is picked on one half of the test questions and scored on the other, and
the reverse; stories are not torn apart by the halves, as the questions are in the order of their stories. Differences are
paired by question; intervals are over questions (95 %), not over trainings. A method with fewer temperatures than the
adapter's is not compared. Fixes are questions that the adapter's greedy answer gets wrong and the method's right, breaks
the reverse. `--write` writes RESULTS.md beside this file, `--check` tells whether it is that of the
records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from measure import DESIGN, RECORDS, Asked, asked_of, demonstrations, read_design, records_of, situation_of
from measure import REST as OF_REST
from scipy import stats

from loragate.evaluation import average_at_k, compare
from loragate.evaluation.statistics import Difference, compare_suites
from reading import best_by_halves, gap_of_best, interval, points, report_command, scores

Lines = Mapping[tuple[str, str], Mapping[str, Any]]
"""The lines of one cell's record: {(method, what): line}."""

ADAPTER = "LoRA"
GREEDY = Asked("test").what
REST = OF_REST[0].what
FORMULA, OPERATION = re.compile(r"\\boxed\{(.*?)\}"), re.compile(r"[-+*/]")


RESULTS = Path(__file__).with_name("RESULTS.md")
ON_GPU = Path(__file__).with_name("records-gpu")  # trained again on an H200
AGAIN = Path(__file__).with_name("records-again")  # adapters trained again on a CPU for methods that came later
TITLE = """# All results of the study on real models

Made by `report.py` from `records/` and `records-gpu/`; [README.md](README.md) says what they mean.
Scores are percents with 95 % intervals over questions, differences are points. The standard error of best against
best is taken 1.2 times as large (`benchmarks/reading.py`). "not run" stands where a temperature was not asked."""
HEAD = (
    "method",
    "T = 1",
    "0.6",
    "0.3",
    "greedy",
    "best against the adapter's best",
    "fixes / breaks, greedy",
    "longer formulas / right of the others, greedy, %",
    "λ < 0 / > 1, %",
    "retention",
)


def is_longer(text: str) -> bool:
    """Whether the formula in the box has two operations or more; not, if there is none."""
    formula = FORMULA.search(text)
    return formula is not None and len(OPERATION.findall(formula[1])) > 1


def are_longer(line: Mapping[str, Any]) -> np.ndarray:
    """`is_longer` of the first answers, [Q]."""
    return np.array([is_longer(texts[0]) for texts in line["texts"]])


def longer_and_right(line: Mapping[str, Any]) -> str:
    """Share of the first answers whose formula has two operations or more, and of the others those that are right; percents."""
    long_Q = are_longer(line)
    others = scores(line)[~long_Q, 0]
    return f"{100 * long_Q.mean():.0f} / {100 * others.mean():.0f}" if len(others) else "100 / –"


@cache
def rows_of(cell: str) -> dict[str, list[dict[str, str]]]:
    """The rows that a cell deals to adapters and gates: `measure.demonstrations`."""
    return demonstrations(situation_of(cell, read_design(DESIGN)), int(cell.rsplit("-", 1)[1]))


def share_of_longer_rows(cell: str) -> float:
    """Of the rows that a cell deals to adapters and gates."""
    return float(np.mean([is_longer(row["response"]) for rows in rows_of(cell).values() for row in rows]))


def weighed(cells: Mapping[str, Lines], method: str) -> Difference:
    """A method's greedy answers against the adapter's, test and rest weighed as the cells' rows are.

    Several cells ask the same questions; of each question the mean over them.
    """
    share = float(np.mean([share_of_longer_rows(cell) for cell in cells]))
    own, other = (
        [np.mean([scores(lines[who, what]) for lines in cells.values()], axis=0) for what in (GREEDY, REST)]
        for who in (method, ADAPTER)
    )
    return compare_suites(own, other, weights=(1 - share, share))


def against_adapter(cell: str, lines: Lines, method: str) -> tuple[Difference, Difference, Difference]:
    """A method's greedy answers against the adapter's: on the test, on the rest, and weighed."""
    test, rest = (compare(*(scores(lines[who, what]) for who in (method, ADAPTER))) for what in (GREEDY, REST))
    return test, rest, weighed({cell: lines}, method)


def side_by_side(cell: str, lines: Lines, method: str) -> list[str]:
    """Right and longer on the test, the same on the rest, and what `against_adapter` says of the rest and weighed."""
    both = [lines[method, what] for what in (GREEDY, REST)]
    cells = [f"{100 * of(one).mean():.{digits}f}" for one in both for of, digits in ((scores, 1), (are_longer, 0))]
    return [*cells, *(["", ""] if method == ADAPTER else map(interval, against_adapter(cell, lines, method)[1:]))]


def heats(design: dict[str, Any], split: str = "test") -> list[Asked]:
    """The temperatures of a split, from the hottest on."""
    return sorted((one for one in asked_of(design) if one.split == split), key=lambda one: -one.temperature)


def at_every_temperature(lines: Lines, method: str, asked: list[Asked]) -> np.ndarray | None:
    """Score of each question at each temperature, [temperatures, Q]; None if one is missing."""
    if any((method, one.what) not in lines for one in asked):
        return None
    return np.stack([scores(lines[method, one.what]).mean(axis=1) for one in asked])


def ledger(lines: Lines, method: str, what: str = GREEDY) -> tuple[int, int] | None:
    """(fixes, breaks) of the greedy answers against the adapter's."""
    if not {(method, what), (ADAPTER, what)} <= set(lines):
        return None
    own, other = scores(lines[method, what])[:, 0], scores(lines[ADAPTER, what])[:, 0]
    return int(((own == 1) & (other == 0)).sum()), int(((own == 0) & (other == 1)).sum())


def perplexity(line: Mapping[str, Any]) -> float:
    """Of the base's own solutions."""
    return float(np.exp(-sum(line["log_likelihoods"]) / sum(line["tokens"])))


def row(lines: Lines, method: str, asked: list[Asked]) -> list[str]:
    """One method's line of a cell's table; what was not run is said to be so."""
    cells = [method]
    for one in asked:
        if (method, one.what) in lines:
            found = average_at_k(scores(lines[method, one.what]))
            cells.append(f"{100 * found.mean:.1f} ({100 * found.low:.1f}–{100 * found.high:.1f})")
        else:
            cells.append("not run")
    own, other = at_every_temperature(lines, method, asked), at_every_temperature(lines, ADAPTER, asked)
    if own is None or other is None:
        cells.append("not run")
    elif method == ADAPTER:
        cells.append(f"{100 * best_by_halves(own).mean():.1f}")
    else:
        cells.append(interval(gap_of_best([own], [other])))
    kept = ledger(lines, method)
    cells.append("" if method == ADAPTER else "not run" if kept is None else f"{kept[0]} / {kept[1]}")
    cells.append(longer_and_right(lines[method, GREEDY]) if (method, GREEDY) in lines else "not run")
    share = lines.get((method, "training"), {}).get("gates")
    cells.append("" if share is None else f"{100 * share['below_zero']:.0f} / {100 * share['above_one']:.0f}")
    line = lines.get((method, "retention"))
    cells.append("not run" if line is None else f"{perplexity(line):.2f}")
    return cells


def development(lines: Lines, design: dict[str, Any]) -> str:
    """The adapter on the development questions: is the situation fit to tell anything apart?"""
    found = {
        one.temperature: 100 * scores(lines[ADAPTER, one.what]).mean()
        for one in heats(design, "dev")
        if (ADAPTER, one.what) in lines
    }
    if not found:
        return "The adapter's answers to the development questions: not run."
    said = ", ".join(f"{value:.1f} % {f'at T = {heat:g}' if heat else 'greedily'}" for heat, value in found.items())
    return f"On the development questions the adapter has {said}."


def of_methods(lines: Lines, design: dict[str, Any]) -> str:
    """The table of a cell: a line for each method that was begun."""
    asked = heats(design)
    methods = [method for method in design["methods"] if any(key[0] == method for key in lines)]
    rows = [row(lines, method, asked) for method in methods]
    rule = ["---", *["---:"] * (len(HEAD) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (HEAD, rule, *rows))


def cell_part(name: str, lines: Lines, design: dict[str, Any]) -> str:
    """Table and two sentences of one cell."""
    parts = [
        f"**{name}.** {development(lines, design)}",
        of_methods(lines, design),
        rest_part(lines, design),
    ]
    return "\n\n".join(filter(None, parts))


def rest_part(lines: Lines, design: dict[str, Any]) -> str:
    """Greedy answers to the rest of the pool, where it was asked."""
    rows = []
    for method in design["methods"]:
        if (line := lines.get((method, REST))) is None:
            continue
        own, found = scores(line), average_at_k(scores(line))
        cells = [
            method,
            f"{100 * found.mean:.1f} ({100 * found.low:.1f}–{100 * found.high:.1f})",
            "",
            "",
            longer_and_right(line),
        ]
        if method != ADAPTER and (kept := ledger(lines, method, REST)) is not None:
            cells[2:4] = [interval(compare(own, scores(lines[ADAPTER, REST]))), f"{kept[0]} / {kept[1]}"]
        rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return ""
    head = [
        "Greedily, on the rest of the pool, where nine questions in ten need two operations:",
        "",
        "| method | right, % | against the adapter | fixes / breaks | longer formulas / right of the others, % |",
        "|---|---:|---:|---:|---:|",
    ]
    return "\n".join([*head, *rows])


def both_kinds(records: Mapping[str, Lines], design: dict[str, Any]) -> str:
    """Greedy answers to the test and to the rest of the pool; cells that ask the same questions stand side by side."""
    alike: dict[tuple[str, str | None], dict[str, Lines]] = {}
    for cell, lines in records.items():
        if {(ADAPTER, GREEDY), (ADAPTER, REST)} <= set(lines):
            same = (cell.rsplit("-", 1)[1], situation_of(cell, design).get("base"))
            alike.setdefault(same, {})[cell] = lines
    return "\n\n".join(beside(cells, design) for cells in alike.values()) or "Not asked yet."


def beside(cells: Mapping[str, Lines], design: dict[str, Any]) -> str:
    """The table of cells that ask the same questions, and their mean for who was asked in all."""
    titles = ["right, %: test / rest", "longer, %: test / rest", "weighed, difference"]
    head = ["method", *(f"{cell}: {titles[0]}" if not at else titles[at] for cell in cells for at in range(3))]
    head += ["mean of the cells, weighed"] if len(cells) > 1 else []
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for method in design["methods"]:
        both = {(method, GREEDY), (method, REST)}
        asked = {cell: lines for cell, lines in cells.items() if both <= set(lines)}
        if not asked:
            continue
        row = ["adapter" if method == ADAPTER else method]
        for cell in cells:
            if cell in asked:
                test, test_longer, rest, rest_longer, _, gap = side_by_side(cell, asked[cell], method)
                row += [f"{test} / {rest}", f"{test_longer} / {rest_longer}", gap]
            else:
                row += ["not run", "", ""]
        if len(cells) > 1:
            row.append("" if method == ADAPTER or len(asked) < len(cells) else interval(weighed(cells, method)))
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def over_trainings(places: Mapping[str, Mapping[str, Lines]], design: dict[str, Any]) -> str:
    """Of who was asked both kinds with three training seeds of a place or more: the mean over seeds, with an interval over seeds.

    Each cell's difference is weighed as its rows are. Cells of one seed share rows and initialisation, so their mean counts
    once; the interval is Student's.
    """
    rows = []
    for place, records in places.items():
        for method in design["methods"]:
            gaps: dict[str, list[float]] = {}
            each = []
            for name, lines in records.items():
                asked = {(who, what) for who in (method, ADAPTER) for what in (GREEDY, REST)} <= set(lines)
                if method == ADAPTER or not asked or "base" in situation_of(name, design):
                    continue
                gap = weighed({name: lines}, method).mean
                gaps.setdefault(name.rsplit("-", 1)[1], []).append(gap)
                each.append(f"{name} {points(gap)}")
            if len(gaps) < 3:
                continue
            means = [float(np.mean(found)) for found in gaps.values()]
            half = stats.t.ppf(0.975, len(means) - 1) * np.std(means, ddof=1) / len(means) ** 0.5
            mean = float(np.mean(means))
            said = f"{points(mean)} ({points(mean - half)} to {points(mean + half)})"
            rows.append(f"| {method} | {place} | {len(means)} | {said} | {', '.join(each)} |")
    head = ["| method | where | seeds | weighed, mean over seeds | each cell |", "|---|---|---:|---:|---|"]
    return "\n".join([*head, *rows]) if rows else "No method was asked both kinds with three seeds yet."


def two_machines(here: Mapping[str, Lines], there: Mapping[str, Lines]) -> str:
    """How far greedy scores of the same cell and method differ between two machines that trained them both."""
    said = []
    for kind, what in (("test", GREEDY), ("rest", REST)):
        pairs = [
            (100 * scores(line).mean(), 100 * scores(here[cell][method, asked]).mean())
            for cell, lines in there.items()
            for (method, asked), line in lines.items()
            if asked == what and method != "base" and (method, asked) in here.get(cell, {})
        ]
        if len(pairs) > 2:
            gaps = np.array([there - here for there, here in pairs])
            said.append(
                f"of the {kind} {len(gaps)} scores differ by {gaps.mean():+.1f} points on average, standard deviation "
                f"{gaps.std(ddof=1):.1f}, at most {np.abs(gaps).max():.1f}"
            )
    return f"Trained on both machines, greedily: {'; '.join(said)}." if said else ""


def on_gpu(here: Mapping[str, Lines], there: Mapping[str, Lines], design: dict[str, Any]) -> str:
    """Everything of the GPU's records."""
    parts = ["## Trained again on a GPU", both_kinds(there, design), two_machines(here, there)]
    for name, lines in there.items():
        parts += [f"**{name}.**", of_methods(lines, design)]
    return "\n\n".join(filter(None, parts))


def over_cells(records: Mapping[str, Lines], design: dict[str, Any], which: str = "the cells") -> str:
    """Each method against the adapter over all cells that asked both: mean differences by question; all cells ask the same ones.

    Intervals are over questions; the adapters and gates of these cells are taken as they are.
    """
    asked, rows = heats(design), []
    for method in design["methods"]:
        if method == ADAPTER:
            continue
        pairs = {
            name: (own, other)
            for name, lines in records.items()
            if (own := at_every_temperature(lines, method, asked)) is not None
            and (other := at_every_temperature(lines, ADAPTER, asked)) is not None
        }
        if len(pairs) < 2:
            continue
        each = [
            [[scores(records[name][who, one.what]).mean(axis=1) for name in pairs] for who in (method, ADAPTER)]
            for one in asked
        ]
        gaps = [compare(*(np.mean(side, axis=0)[:, None] for side in sides)) for sides in each]
        cells = [interval(gap) for gap in [*gaps, gap_of_best(*zip(*pairs.values()))]]
        found = [kept for name in pairs if (kept := ledger(records[name], method)) is not None]
        counted = f"{sum(one for one, _ in found)} / {sum(one for _, one in found)}"
        rows.append(f"| {method} | {len(pairs)} | {' | '.join(cells)} | {counted} |")
    head = [
        "| method | cells | T = 1 | 0.6 | 0.3 | greedy | best against the adapter's best | fixes / breaks, greedy |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([f"**Over {which}**, points above the adapter:", "", *head, *rows]) if rows else ""


def tables(records: Mapping[str, Lines], design: dict[str, Any]) -> str:
    """All tables but that of both kinds."""
    planned = [f"{one['situation']}-{one['seed']}" for one in design["cells"]]
    # another base's cell stands for itself
    alike = {name: records[name] for name in records if "base" not in situation_of(name, design)}
    later = {name: lines for name, lines in alike.items() if not name.endswith("-0")}  # whose predictions knew seed 0
    parts = [
        over_cells(alike, design),
        over_cells(later, design, "the cells of later seeds alone"),
        *(cell_part(name, records[name], design) for name in planned if name in records),
    ]
    return "\n\n".join(filter(None, parts))


def read(folder: Path, design: dict[str, Any]) -> dict[str, Lines]:
    """{cell: lines} of the cells that were begun, the base's lines among them."""
    found = {}
    for one in design["cells"]:
        name = f"{one['situation']}-{one['seed']}"
        own, of_base = records_of(name, design, folder)
        if own.lines:
            found[name] = {**own.lines, **of_base.lines}
    return found


def page(records: Mapping[str, Lines], there: Mapping[str, Lines], design: dict[str, Any]) -> str:
    """RESULTS.md; `there` are the GPU's records."""
    parts = [
        TITLE,
        "## Both kinds of questions, greedily",
        both_kinds(records, design),
        "## Over trainings",
        over_trainings({"CPU": {**records, **read(AGAIN, design)}, "GPU": there}, design),
        "## At every temperature",
        tables(records, design),
        on_gpu(records, there, design),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def main() -> None:
    design = read_design(DESIGN)
    report_command(__doc__, RECORDS, RESULTS, lambda records: page(read(records, design), read(ON_GPU, design), design))


if __name__ == "__main__":
    main()
