"""The tables of the study on the real model, from the records that `measure.py` kept; no model is loaded.

    python benchmarks/real/report.py [--records FOLDER] [--write] [--check]

Best against best: everybody may use the best temperature. A temperature that is picked by the answers that it is then
scored by flatters whoever has more of them, so it is picked on one half of the test questions and scored on the other, and
the reverse; stories are not torn apart by the halves, as the questions are in the order of their stories. Differences are
paired by question; intervals are over questions (95 %), not over trainings. A method with fewer temperatures than the
adapter's is not compared. Fixes are questions that the adapter's greedy answer gets wrong and the method's right, breaks
the reverse. `--write` writes RESULTS.md beside this file and the table of docs/real-study.md, `--check` tells whether both
are those of the records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from kinds import (
    ADAPTER,
    GREEDY,
    REST,
    Lines,
    are_longer,
    interval,
    lacking,
    longer_and_right,
    points,
    scores,
    side_by_side,
    sign_of,
    weighed,
)
from measure import RECORDS, Asked, asked_of, read_design, records_of, situation_of
from scipy import stats

from loragate.evaluation import average_at_k, compare
from loragate.files import write_text
from loragate.gates.range import Range
from loragate.selection.candidate import Candidate
from loragate.selection.recommend import recommend

DEVELOPMENT = Asked("dev").what
DOCS = Path(__file__).parents[2] / "docs" / "real-study.md"
RESULTS = Path(__file__).with_name("RESULTS.md")
ON_GPU = Path(__file__).with_name("records-gpu")  # by `at_once.py`
AGAIN = Path(__file__).with_name("records-again")  # adapters trained again on a CPU for methods that came later
TITLE = """# All results of the study on real models

Made by `report.py` from `records/` and `records-gpu/`; [docs/real-study.md](../../docs/real-study.md) says what they mean.
Scores are percents with 95 % intervals over questions, differences are points. "not run" stands where a temperature was not
asked."""
LOST = 5  # points, of a method that the sign should have marked
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


def heats(design: dict[str, Any], split: str = "test") -> list[Asked]:
    """The temperatures of a split, from the hottest on."""
    return sorted((one for one in asked_of(design) if one.split == split), key=lambda one: -one.temperature)


def at_its_best(lines: Lines, method: str, asked: list[Asked]) -> np.ndarray | None:
    """Score per question [Q] at the temperature that is best on the other half of the questions; None if one is missing."""
    if any((method, one.what) not in lines for one in asked):
        return None
    means = np.stack([scores(lines[method, one.what]).mean(axis=1) for one in asked])  # [temperatures, Q]
    half = means.shape[1] // 2
    first, second = means[:, :half], means[:, half:]
    return np.concatenate([first[np.argmax(second.mean(axis=1))], second[np.argmax(first.mean(axis=1))]])


def ledger(lines: Lines, method: str, what: str = GREEDY) -> tuple[int, int] | None:
    """(fixes, breaks) of the greedy answers against the adapter's."""
    if not {(method, what), (ADAPTER, what)} <= set(lines):
        return None
    own, other = scores(lines[method, what])[:, 0], scores(lines[ADAPTER, what])[:, 0]
    return int(((own == 1) & (other == 0)).sum()), int(((own == 0) & (other == 1)).sum())


def agreement_of_forms(records: Mapping[str, Lines]) -> str:
    """How far the greedy scores go with the share of longer formulas, over cells and methods; the base writes no formula."""
    greedy = [
        line
        for lines in records.values()
        for (method, what), line in lines.items()
        if what == GREEDY and method != "base"
    ]
    shares, right = ([float(of(line).mean()) for line in greedy] for of in (are_longer, scores))
    if len(greedy) < 3 or min(np.ptp(shares), np.ptp(right)) == 0:
        return ""
    others = [float(scores(line)[~long_Q, 0].mean()) for line in greedy if (long_Q := are_longer(line)).mean() < 0.7]
    low, middle, high = (100 * np.quantile(others, at) for at in (0.1, 0.5, 0.9))
    return (
        f"Over {len(greedy)} sets of greedy answers (cells and methods), the score and the share of longer formulas correlate "
        f"at {np.corrcoef(shares, right)[0, 1]:.2f}. Of the other answers {middle:.0f} % are right in the median set "
        f"({low:.0f} to {high:.0f} % in the middle 80 % of the sets, without those that have 70 % longer formulas or more)."
    )


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
    own, other = at_its_best(lines, method, asked), at_its_best(lines, ADAPTER, asked)
    if own is None or other is None:
        cells.append("not run")
    elif method == ADAPTER:
        cells.append(f"{100 * own.mean():.1f}")
    else:
        cells.append(interval(compare(own[:, None], other[:, None])))
    kept = ledger(lines, method)
    cells.append("" if method == ADAPTER else "not run" if kept is None else f"{kept[0]} / {kept[1]}")
    cells.append(longer_and_right(lines[method, GREEDY]) if (method, GREEDY) in lines else "not run")
    share = lines.get((method, "training"), {}).get("gates")
    cells.append("" if share is None else f"{100 * share['below_zero']:.0f} / {100 * share['above_one']:.0f}")
    line = lines.get((method, "retention"))
    cells.append("not run" if line is None else f"{perplexity(line):.2f}")
    return cells


def recommended(name: str, lines: Lines, design: dict[str, Any], probe: Mapping[Candidate, np.ndarray]) -> Candidate:
    """What `calibrate` recommends with the development questions as its probe, which may lack kinds of the cell's rows."""
    while (found := recommend(probe).setting).kind in ("constant", "gates"):
        method = next(one for one in design["methods"] if model_of(one, design) == found.model)
        if not {(ADAPTER, DEVELOPMENT), (method, DEVELOPMENT)} <= set(lines):
            break
        if not (lacking(name, lines, DEVELOPMENT).get("told") and sign_of(lines, method, DEVELOPMENT).get("told")):
            break
        probe = {one: values for one, values in probe.items() if one.model != found.model}
    return found


def automatic(name: str, lines: Lines, design: dict[str, Any]) -> str:
    """What the former rule and the recommendation pick by the development answers, and what each gives up on the test."""
    probe, test = (settings(lines, design, split) for split in ("dev", "test"))
    if not {Candidate(None, temperature=1.0, objective="adapter")} <= set(probe) <= set(test):
        return "The automatic choice: not run."
    warm = {one: found for one, found in probe.items() if one.temperature == 1 and one.kind in ("adapter", "gates")}
    former = max(warm, key=lambda one: warm[one].mean())  # the adapter comes first and wins ties
    now, cold = recommended(name, lines, design, probe), Candidate(None, temperature=0.0, objective="adapter")
    scored = {one: float(found.mean()) for one, found in test.items()}
    top = max(scored, key=lambda one: scored[one])
    said = [
        f"{rule} {one.cell}, {points(scored[one] - scored[top])} points from the best of {len(test)} settings on the test"
        for rule, one in (("by the answers at T = 1 alone (the former rule)", former), ("as recommended now,", now))
    ]
    said += [f"without asking anything, {cold.cell}, {points(scored[cold] - scored[top])} points"]
    return f"The automatic choice by the development answers: {'; '.join(said)} ({top.cell})."


def settings(lines: Lines, design: dict[str, Any], split: str) -> dict[Candidate, np.ndarray]:
    """{setting: verdicts [questions, samples]} of what `calibrate` chooses from, at all temperatures that were asked."""
    return {
        replace(model, temperature=one.temperature): scores(lines[name, one.what])
        for name in design["methods"]
        if (model := model_of(name, design))
        for one in heats(design, split)
        if (name, one.what) in lines
    }


def model_of(method: str, design: dict[str, Any]) -> Candidate | None:
    """What a method is to `calibrate`; None for what it does not choose from."""
    spec = design["methods"][method]
    if method in (ADAPTER, "base"):
        return Candidate(None, "adapter" if method == ADAPTER else method)
    if "constant" in spec:
        return Candidate(None, "constant", scale=spec["constant"])
    return Candidate(Range.parse(spec["calibrate"]["range"])) if method in design["automatic"] else None


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
        automatic(name, lines, design),
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


def marked(records: Mapping[str, Lines], design: dict[str, Any]) -> str:
    """Where both kinds of questions were asked: does the sign that `calibrate` prints go with a loss on one of them?

    The sign is read from the greedy test answers.
    """
    rows: list[str] = []
    lost: dict[bool, list[bool]] = {True: [], False: []}
    for name, lines in records.items():
        both = [method for method in design["methods"] if {(method, GREEDY), (method, REST)} <= set(lines)]
        for method in both if ADAPTER in both else ():
            found = sign_of(lines, method)
            if method in (ADAPTER, "base") or not found:  # nothing is said of answers in prose
                continue
            gaps = [
                float((scores(lines[method, what]) - scores(lines[ADAPTER, what])).mean()) for what in (GREEDY, REST)
            ]
            lost[found["told"]].append(100 * min(gaps) <= -LOST)
            cells = [
                f"{name}: {method}",
                f"{100 * found['shifted']:.0f}",
                f"{found['spread']:.1f} / {found['adapter_spread']:.1f}",
                "marked" if found["told"] else "",
                *map(points, gaps),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    if not rows:
        return ""
    head = [
        "**The sign of other forms of answers** against what was lost, where both kinds of questions were asked:",
        "",
        "| | shifted, % | forms / the adapter's | | test, points | rest, points |",
        "|---|---:|---:|---|---:|---:|",
    ]
    said = (
        f"Of {len(lost[True])} that are marked {sum(lost[True])} lose {LOST} points or more on one of the two kinds, of "
        f"{len(lost[False])} that are not {sum(lost[False])}."
    )
    return "\n".join([*head, *rows, "", said])


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
    parts = ["## Trained again on a GPU", both_kinds(there, design), two_machines(here, there), marked(there, design)]
    for name, lines in there.items():
        parts += [f"**{name}.**", of_methods(lines, design)]
    return "\n\n".join(filter(None, parts))


def narrow(records: Mapping[str, Lines]) -> str:
    """Would `calibrate` say that these questions lack kinds of the rows? Of the development questions, and of the rest."""
    sets, rows = {"development questions": DEVELOPMENT, "rest of the pool": REST}, []
    told: dict[str, list[bool]] = {name: [] for name in sets}
    for cell, lines in records.items():
        cells = []
        for name, what in sets.items():
            found = lacking(cell, lines, what) if (ADAPTER, what) in lines else {}
            cells.append(f"{found['spread']:.1f} / {found['rows_spread']:.1f}" if found else "")
            told[name] += [found["told"]] if found else []
            cells.append("told" if found.get("told") else "")
        rows += [f"| {' | '.join([cell, *cells])} |"] if any(cells) else []
    if not rows:
        return ""
    said = "; ".join(f"of the {name} it is told in {sum(one)} of {len(one)} cells" for name, one in told.items() if one)
    head = [
        "**Does a probe lack kinds of questions?** Forms of the adapter's greedy answers / of as many responses of its rows:",
        "",
        "| | development questions | | rest of the pool | |",
        "|---|---:|---|---:|---|",
    ]
    return "\n".join([*head, *rows, "", f"{said[0].upper()}{said[1:]}."])


def over_seeds(records: Mapping[str, Lines], design: dict[str, Any]) -> str:
    """Best against best of every situation that has several seeds: the mean of the cells and each cell's own."""
    asked, rows = heats(design), []
    for situation in design["situations"]:
        cells = [lines for name, lines in records.items() if name.rsplit("-", 1)[0] == situation]
        for method in design["methods"]:
            pairs = [(at_its_best(lines, method, asked), at_its_best(lines, ADAPTER, asked)) for lines in cells]
            gaps = [float((own - other).mean()) for own, other in pairs if own is not None and other is not None]
            if method != ADAPTER and len(gaps) > 1:
                each = ", ".join(map(points, gaps))
                rows.append(f"| {situation} | {method} | {points(float(np.mean(gaps)))} | {each} |")
    head = ["| situation | method | mean of the seeds | each seed |", "|---|---|---:|---|"]
    return "\n".join([*head, *rows]) if rows else "No situation has two seeds yet."


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
            if (own := at_its_best(lines, method, asked)) is not None
            and (other := at_its_best(lines, ADAPTER, asked)) is not None
        }
        if len(pairs) < 2:
            continue
        each = [
            [[scores(records[name][who, one.what]).mean(axis=1) for name in pairs] for who in (method, ADAPTER)]
            for one in asked
        ]
        gaps = [compare(*(np.mean(side, axis=0)[:, None] for side in sides)) for sides in [*each, zip(*pairs.values())]]
        cells = [interval(gap) for gap in gaps]
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
    lacking = [name for name in planned if name not in records]
    parts = []
    # another base's cell stands for itself
    alike = {name: records[name] for name in records if "base" not in situation_of(name, design)}
    parts += [part] if (part := over_cells(alike, design)) else []
    parts += [part] if (part := agreement_of_forms(alike)) else []
    parts += [part] if (part := marked(records, design)) else []
    parts += [part] if (part := narrow(records)) else []
    later = {name: lines for name, lines in alike.items() if not name.endswith("-0")}  # whose predictions knew seed 0
    parts += [part] if (part := over_cells(later, design, "the cells of later seeds alone")) else []
    parts.append(over_seeds(records, design) if records else "No answer to a test question has been drawn yet.")
    parts += [cell_part(name, records[name], design) for name in planned if name in records]
    parts.append(f"Not begun: {', '.join(lacking)}." if lacking else "Every cell was begun.")
    return "\n\n".join(parts)


def read(folder: Path, design: dict[str, Any]) -> dict[str, Lines]:
    """{cell: lines} of the cells that were begun, the base's lines among them."""
    found = {}
    for one in design["cells"]:
        name = f"{one['situation']}-{one['seed']}"
        own, of_base = records_of(name, design, folder)
        if own.lines:
            found[name] = {**own.lines, **of_base.lines}
    return found


def pages(records: Mapping[str, Lines], there: Mapping[str, Lines], design: dict[str, Any]) -> dict[Path, str]:
    """What the two pages are to hold; `there` are the GPU's records."""
    page = DOCS.read_text(encoding="utf-8")
    made = {
        "kinds": both_kinds(records, design),
        "trainings": over_trainings({"CPU": {**records, **read(AGAIN, design)}, "GPU": there}, design),
    }
    for name, table in made.items():
        before, rest = page.split(f"<!-- {name}: begin -->")
        _, after = rest.split(f"<!-- {name}: end -->")
        page = f"{before}<!-- {name}: begin -->\n\n{table}\n\n<!-- {name}: end -->{after}"
    parts = [TITLE, tables(records, design), *([on_gpu(records, there, design)] if there else [])]
    return {DOCS: page, RESULTS: "\n\n".join(parts) + "\n"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--write", action="store_true", help="write the pages; without it the tables are printed")
    parser.add_argument("--check", action="store_true", help="change nothing; the exit status tells")
    given = parser.parse_args()
    design = read_design()
    records = read(given.records, design)
    if not (given.write or given.check):
        print(both_kinds(records, design), tables(records, design), sep="\n\n")
        return
    found = pages(records, read(ON_GPU, design), design)
    if given.check:
        sys.exit(any(path.read_text(encoding="utf-8") != text for path, text in found.items()))
    for path, text in found.items():
        write_text(path, text)


if __name__ == "__main__":
    main()
