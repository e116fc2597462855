"""The tables of the study at the paper's size, from the records that `measure.py` kept; no model is loaded.

    python benchmarks/paper_size/report.py [--records FOLDER] [--write] [--check]

Scores are of the questions that a method has answered so far; differences are paired by question, over those that both have.
Best against best: each family's setting (method and temperature) is picked on one half of the questions and scored on the other,
and the reverse; a setting counts where it has, in all seeds that are compared, all questions that their LoRAs have. Of settings
equal on a half the first of design.yaml counts, the hottest first. Intervals are over questions (95 %), not over trainings. A
verdict is open until all seeds have all questions under all settings of the waves that every seed runs.
`--write` writes RESULTS.md and the pictures of each cell beside this file, `--check` tells whether it is that of the records.
"""

from __future__ import annotations

import gzip
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from cells import Record, file_name, read_design
from loragate.evaluation import average_at_k, compare
from loragate.evaluation.statistics import Difference
from loragate.report.figures import LINES, grid, open_figure, paired_dots
from loragate.selection.select import select
from reading import best_by_halves, gap_of_best, interval, report_command, scores

HERE = Path(__file__).parent
RECORDS, RESULTS, DESIGN = HERE / "records", HERE / "RESULTS.md", HERE / "design.yaml"
MAIN, GUARDS, VOTES = "gsm8k", ("humaneval", "mmlu_stem", "svamp", "math500"), "gsm8k_of_8"
MAIN_GATES = "gates [-6,3]"
ADAPTER, GATES, OTHERS = "LoRA", "entropy gates", "all but entropy gates"
HEATS = (1.0, 0.6, 0.3, 0.0)
DEV, DEALS = 128, 200
PICTURED = ((MAIN, 1.0), (MAIN, 0.0), ("humaneval", 0.0), ("mmlu_stem", 0.0))
TITLE = """# Results of the study at the paper's size

Made by `report.py` from `records/`; [PROTOCOL.md](PROTOCOL.md) says what was asked and what counts. Scores are percents and
differences points, with 95 % intervals over questions and the number of questions. Weights of 4 bits were unpacked, so these are
not the published models."""

Answers = Mapping[tuple[str, str, float], Mapping[str, float]]
"""{(method, test, temperature): {question: score}}."""


Own = dict[tuple[str, str, float], dict[str, float]]


def read(folder: Path, cell: str) -> tuple[Own, Own, dict[str, dict[str, Any]]]:
    """(answers, shares that the token limit cut off, trainings by method) of a cell and the base; slices are put together."""
    answers: Own = {}
    cuts: Own = {}
    trainings = {}
    for path in sorted([*(folder / cell).rglob("*.jsonl.gz"), *(folder / "base").glob("*.jsonl.gz")]):
        for (method, what), line in Record(path).lines.items():
            if what == "training":
                trainings[method] = line
                continue
            test, heat, _ = what.split(" ")
            values = votes(line) if "extracted" in line else scores(line).mean(axis=1)
            cut = scores({"correct": line["cut_off"], "samples": line["samples"]}).mean(axis=1)
            for side, found in ((answers, values), (cuts, cut)):
                into = side.setdefault((method, test, float(heat.removeprefix("T="))), {})
                into.update(zip(line["questions"], found.tolist(), strict=True))
    return answers, cuts, trainings


def votes(line: Mapping[str, Any]) -> np.ndarray:
    """Whether the most frequent answer of each question is right, [Q]; of equally frequent ones the first."""
    right, samples = scores(line), line["samples"]
    found = []
    for place, verdicts in enumerate(right):
        texts = line["extracted"][place * samples : (place + 1) * samples]
        counted = Counter(text for text in texts if text is not None)
        found.append(verdicts[texts.index(counted.most_common(1)[0][0])] if counted else 0.0)
    return np.array(found)


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Of two methods, in points with its interval; empty where they share no questions."""
    return said(over([(one, other)]))


def score(answers: Answers, method: str, test: str, heat: float) -> str:
    values = answers.get((method, test, heat))
    if not values or len(values) < 2:
        return "not run"
    found = average_at_k(np.array(list(values.values()))[:, None])
    return f"{100 * found.mean:.1f} ({100 * found.low:.1f}–{100 * found.high:.1f}; {len(values)})"


def family(cells: Sequence[Answers], methods: list[str]) -> list[np.ndarray]:
    """Scores [settings, Q] of a family in each cell, on all questions that the LoRA has in every cell.

    Of the settings that have them in every cell; empty where there is none.
    """
    asked = [{name for heat in HEATS for name in cell.get((ADAPTER, MAIN, heat), {})} for cell in cells]
    names = sorted(set.intersection(*asked))
    settings = [
        (who, MAIN, heat)
        for who in methods
        for heat in HEATS
        if len(names) > 3 and all(cell.get((who, MAIN, heat), {}).keys() >= set(names) for cell in cells)
    ]
    return [np.array([[cell[key][name] for name in names] for key in settings]) for cell in cells] if settings else []


def best_against_best(cells: Sequence[Answers], methods: list[str], others: list[str]) -> OverSeeds | None:
    """Of two families on the mean over cells; None where one has no setting, or the LoRA was not asked greedily everywhere.

    Without its greedy answers, the LoRA's best and that of all but gates are not what anybody would use.
    """
    if not all(cell.get((ADAPTER, MAIN, 0.0)) for cell in cells):
        return None
    one, other = family(cells, methods), family(cells, others)
    if not one or not other:
        return None
    means = [float((best_by_halves(a) - best_by_halves(b)).mean()) for a, b in zip(one, other)]
    return gap_of_best(one, other), means, one[0].shape[1]


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    head, *body = rows
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def main_table(answers: Answers, trainings: Mapping[str, Any], design: dict[str, Any]) -> str:
    """GSM8K at every temperature, and the difference to the LoRA at T = 1 and greedily."""
    rows = [["method", "T = 1", "0.6", "0.3", "greedy", "to the LoRA, T = 1", "greedily", "λ < 0 / > 1, %"]]
    for method in design["methods"]:
        if not any(who == method and test == MAIN for who, test, _ in answers):
            continue
        gaps = [
            ""
            if method == ADAPTER
            else difference(answers.get((method, MAIN, heat), {}), answers.get((ADAPTER, MAIN, heat), {}))
            for heat in (1.0, 0.0)
        ]
        share = trainings.get(method, {}).get("gates")
        shares = "" if share is None else f"{100 * share['below_zero']:.0f} / {100 * share['above_one']:.0f}"
        rows.append([method, *(score(answers, method, MAIN, heat) for heat in HEATS), *gaps, shares])
    if (ADAPTER, VOTES, 0.6) in answers:
        rows.append(["LoRA, majority of 8", "", score(answers, ADAPTER, VOTES, 0.6), *[""] * 5])
    return table(rows)


def family_table(answers: Answers, design: dict[str, Any]) -> str:
    """Best against best: each family against the LoRA, and the entropy gates against each."""
    families = design["families"]
    rows = [["family", "settings", "best, %", "against the LoRA's best", "entropy gates against it"]]
    alone = {f"{method} alone": [method] for method in families[GATES]}
    for name, methods in (families | alone).items():
        if found := family([answers], methods):
            against = None if name == ADAPTER else best_against_best([answers], methods, [ADAPTER])
            gates = None if name in (GATES, *alone) else best_against_best([answers], families[GATES], methods)
            best = f"{100 * best_by_halves(found[0]).mean():.1f}"
            rows.append([name, str(len(found[0])), best, said(against), said(gates)])
    return table(rows) if len(rows) > 1 else "Not asked yet."


def chosen_by_rule(answers: Answers, methods: Iterable[str]) -> str:
    """What the rule of `calibrate` takes by dev sets dealt from the questions, and how that does on the others."""
    known = answers.get((ADAPTER, MAIN, 0.0), {})
    scores = {
        f"{who} {f'T={heat:g}' if heat else 'greedy'}": np.array([own[name] for name in sorted(known)])[:, None]
        for who in methods
        for heat in reversed(HEATS)
        if (own := answers.get((who, MAIN, heat), {})).keys() >= known.keys()
    }
    baseline, generator = f"{ADAPTER} greedy", np.random.default_rng(0)
    if len(known) < 2 * DEV or len(scores) < 2:
        return ""
    picks, gaps = Counter[str](), []
    for _ in range(DEALS):
        order = generator.permutation(len(known))
        dev, rest = order[:DEV], order[DEV:]
        picks[pick := select({name: own[dev] for name, own in scores.items()}, baseline).label] += 1
        gaps.append(100 * float((scores[pick][rest] - scores[baseline][rest]).mean()))
    taken = ", ".join(f"{name} {100 * count / DEALS:.0f} %" for name, count in picks.most_common())
    return (
        f"The rule of `calibrate`, over {DEALS} dev sets of {DEV} of these questions, takes: {taken}. On the other "
        f"questions that is {np.mean(gaps):+.1f} points to the LoRA greedily in the mean, {min(gaps):+.1f} at worst."
    )


def limited(design: dict[str, Any]) -> dict[str, str]:
    """{method: gates that it is when nothing limits their λ} of the interventions."""
    return {name: spec["limited"] for name, spec in design["methods"].items() if "limited" in spec}


def intervention_table(answers: Answers, design: dict[str, Any]) -> str:
    """Gates whose λ is limited at inference, against the same gates as they are; empty where none was asked."""
    rows = [["λ limited at inference", "T = 1", "to the gates as they are", "greedy", "to the gates as they are"]]
    for method, gates in limited(design).items():
        row = [method]
        for heat in (1.0, 0.0):
            own, whole = (answers.get((who, MAIN, heat), {}) for who in (method, gates))
            row += [score(answers, method, MAIN, heat), difference(own, whole)]
        if any(row[2::2]):
            rows.append(row)
    return table(rows) if len(rows) > 1 else ""


def guard_table(answers: Answers, design: dict[str, Any]) -> str:
    """The other tests, greedily and at T = 1, each with the greedy difference to the LoRA."""
    rows = [["method", *(f"{test}{heat}" for test in GUARDS for heat in (", greedy", ", to the LoRA", ", T = 1"))]]
    for method in design["methods"]:
        row = [method]
        for test in GUARDS:
            own, other = (answers.get((who, test, 0.0), {}) for who in (method, ADAPTER))
            row += [score(answers, method, test, 0.0), "" if method == ADAPTER else difference(own, other)]
            row.append(score(answers, method, test, 1.0))
        if any(cell not in ("not run", "") for cell in row[1:]):
            rows.append(row)
    return table(rows) if len(rows) > 1 else "Not asked yet."


def cut_table(cuts: Answers, design: dict[str, Any]) -> str:
    """Answers that the token limit cut off."""
    asked = [(test, heat) for test in (MAIN, *GUARDS) for heat in (0.0, 1.0)]
    rows = [["method", *(f"{test}, {f'T = {heat:g}' if heat else 'greedy'}" for test, heat in asked)]]
    for method in design["methods"]:
        found = [cuts.get((method, *key)) for key in asked]
        if any(found):
            rows.append([method, *(f"{100 * np.mean(list(one.values())):.0f}" if one else "" for one in found)])
    return table(rows) if len(rows) > 1 else "Not asked yet."


def over_seeds(cells: Mapping[str, Answers], design: dict[str, Any]) -> str:
    """Differences to the LoRA on the mean of a situation's seeds, by question; those that have all seeds of the situation."""
    rows = [["situation", "method or family", "seeds", "T = 1", "greedy", "best against best", "verdict"]]
    families = design["families"]
    compared = {name: [name] for name in design["methods"]} | families
    del compared[ADAPTER]
    with gzip.open(HERE / "questions" / f"{design['tests'][MAIN]['file']}.jsonl.gz") as file:
        questions = sum(1 for _ in file)

    def whole(own: list[Answers], situation: str, methods: list[str]) -> bool:
        """Whether all seeds are there, with all questions under all settings of these methods that every seed runs."""
        seeds = {cell["seed"] for cell in design["plan"] if cell["situation"] == situation}
        wanted = {setting for setting in settings_of_all(design, situation) if setting[0] in methods}
        asked = (len(cell.get((who, MAIN, heat), {})) for cell in own for who, heat in wanted)
        return len(own) == len(seeds) and all(count == questions for count in asked)

    for situation in design["situations"]:
        own = [one for name, one in cells.items() if name.rsplit("-", 1)[0] == situation]
        if len(own) < 2:
            continue
        seeds = {cell["seed"] for cell in design["plan"] if cell["situation"] == situation}
        for name, methods in compared.items():
            sides = [
                over([(one.get((name, MAIN, heat), {}), one.get((ADAPTER, MAIN, heat), {})) for one in own])
                for heat in (1.0, 0.0)
            ]
            bests = best_against_best(own, methods, [ADAPTER])
            done = whole(own, situation, [*methods, ADAPTER])
            judged = verdict(bests, done) if name in families and name != OTHERS else ""
            rows.append([situation, name, f"{len(own)} of {len(seeds)}", *map(said, (*sides, bests)), judged])
        more = best_against_best(own, families[GATES], families[OTHERS])
        names = [situation, f"{GATES} against {OTHERS}", f"{len(own)} of {len(seeds)}"]
        done = whole(own, situation, [*families[GATES], *families[OTHERS]])
        rows.append([*names, "", "", said(more), verdict(more, done)])
    kept = [row for row in rows if any(row[3:])]
    return table(kept) if len(kept) > 1 else "No two seeds of a situation yet."


OverSeeds = tuple[Difference, list[float], int]
"""A difference on the mean over seeds, that of each seed, and the number of questions."""


def over(pairs: list[tuple[Mapping[str, float], Mapping[str, float]]]) -> OverSeeds | None:
    """Of two methods, a pair of answers for each seed, on the questions that all have; None for fewer than two."""
    shared = set.intersection(*(set(side) for pair in pairs for side in pair))
    if len(shared) < 2:
        return None
    names = sorted(shared)
    one_SQ, other_SQ = (np.array([[pair[at][name] for name in names] for pair in pairs]) for at in (0, 1))
    gap = compare(one_SQ.mean(axis=0)[:, None], other_SQ.mean(axis=0)[:, None])
    return gap, (one_SQ - other_SQ).mean(axis=1).tolist(), len(names)


def said(found: OverSeeds | None) -> str:
    """In points, with its interval and the number of questions."""
    return "" if found is None else f"{interval(found[0])[:-1]}; {found[2]})"


def settings_of_all(design: dict[str, Any], situation: str) -> set[tuple[str, float]]:
    """(method, temperature) on GSM8K that every seed of a situation runs."""
    of_seeds: dict[int, set[tuple[str, float]]] = {}
    for cell in design["plan"]:
        if cell["situation"] == situation:
            waves = (design["waves"][name] for name in cell["waves"])
            of_seeds.setdefault(cell["seed"], set()).update(
                (who, float(heat))
                for wave in waves
                if wave["test"] == MAIN
                for who in wave["methods"]
                for heat in wave["temperatures"]
            )
    return set.intersection(*of_seeds.values())


def verdict(found: OverSeeds | None, done: bool) -> str:
    """By the protocol: the interval leaves 0 out, and every seed is on the same side; open until all is asked."""
    if found is None:
        return ""
    gap, means, _ = found
    if not done:
        return "open"
    if gap.low > 0 and min(means) > 0:
        return "helps"
    return "harms" if gap.high < 0 and max(means) < 0 else "not shown"


def cost_table(folder: Path, cells: Iterable[str]) -> str:
    """Seconds that trainings and answers took, [-6,3] for the gates, beside other work on the machine."""
    head = ["cell", "fine-tuning, s", "gates, s", "gates ÷ fine-tuning"]
    rows = [[*head, *(f"{who}, 100 answers {how}, s" for who in ("LoRA", "gates") for how in ("greedy", "T = 1"))]]
    for cell in cells:
        took: dict[str, list[float]] = {}
        for method in (ADAPTER, MAIN_GATES):
            for path in (folder / cell / file_name(method)).glob("*.jsonl.gz"):
                for (_, what), line in Record(path).lines.items():
                    test, heat, *_ = f"{what} ".split(" ")
                    asked = len(line.get("questions", ())) * line.get("samples", 1)
                    seconds = line.get("train_runtime") or line.get("training_seconds") or line["seconds"] * 100 / asked
                    if what == "training" or test == MAIN:
                        took.setdefault(f"{method} {heat if asked else what}", []).append(seconds)
        if {f"{ADAPTER} training", f"{MAIN_GATES} training"} <= took.keys():
            stage, gates = took[f"{ADAPTER} training"][0], took[f"{MAIN_GATES} training"][0]
            keys = [f"{method} T={heat}" for method in (ADAPTER, MAIN_GATES) for heat in (0, 1)]
            answers = [f"{np.median(took[key]):.0f}" if key in took else "" for key in keys]
            rows.append([cell, f"{stage:.0f}", f"{gates:.0f}", f"{gates / stage:.2f}", *answers])
    return table(rows) if len(rows) > 1 else "Nothing was trained yet."


def cells_of(records: Path, design: dict[str, Any]) -> Iterator[tuple[Path, list[str]]]:
    """The folder of each model on record, and the cells of it that were begun."""
    names = dict.fromkeys(f"{cell['situation']}-{cell['seed']}" for cell in design["plan"])
    for folder in sorted(path for path in records.iterdir() if path.is_dir()) if records.is_dir() else []:
        yield folder, [name for name in names if (folder / name).is_dir()]


def picture_name(kind: str, model: str, cell: str) -> str:
    return f"{kind}_{model}_{cell}.svg"


def panels(answers: Answers) -> list[tuple[str, float]]:
    """What a picture shows: (test, temperature) of which the base and the LoRA both have answers."""
    return [key for key in PICTURED if all(len(answers.get((who, *key), {})) > 1 for who in ("base", ADAPTER))]


def by_temperature(answers: Answers, design: dict[str, Any]) -> dict[str, list[float]]:
    """{method: temperatures of GSM8K that it has, hottest first} of the contenders that have two or more."""
    asked = {
        method: [heat for heat in HEATS if len(answers.get((method, MAIN, heat), {})) > 1]
        for method in design["methods"]
        if method not in limited(design)
    }
    return {method: heats for method, heats in asked.items() if len(heats) > 1}


def draw_temperatures(answers: Answers, design: dict[str, Any], to: Path) -> None:
    """The score of each contender over the temperature, with whiskers, set beside each other where they would hide."""
    shown = by_temperature(answers, design)
    with open_figure(to, 4.9, 3.4) as figure:
        axes = figure.subplots()
        for place, (method, heats) in enumerate(shown.items()):
            found = [average_at_k(np.array(list(answers[method, MAIN, heat].values()))[:, None]) for heat in heats]
            x = [heat + 0.012 * (place - (len(shown) - 1) / 2) for heat in heats]
            colour, dash = LINES[place % len(LINES)], "--" if place >= len(LINES) else "-"
            axes.plot(x, [100 * one.mean for one in found], dash, color=colour, marker="o", markersize=5, label=method)
            axes.vlines(x, [100 * one.low for one in found], [100 * one.high for one in found], color=colour)
        axes.set_xticks(HEATS, [f"{heat:g}" if heat else "greedy" for heat in HEATS])
        axes.set_xlabel("temperature")
        axes.set_ylabel("right answers, %")
        axes.set_ylim(bottom=0)
        grid(axes, "y")
        figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=9)


def draw(records: Path, into: Path, design: dict[str, Any]) -> None:
    """Two pictures of each cell: scores over the temperature, and those of all methods that have what base and LoRA have."""
    for folder, cells in cells_of(records, design):
        for cell in cells:
            answers, *_ = read(folder, cell)
            if by_temperature(answers, design):
                draw_temperatures(answers, design, into / picture_name("temperatures", folder.name, cell))
            if not (shown := panels(answers)):
                continue
            rows = []
            for method in (ADAPTER, *(one for one in design["methods"] if one != ADAPTER)):
                sides = [answers.get((method, *key), {}) for key in shown]
                if all(len(side) > 1 for side in sides):
                    found = [average_at_k(np.array(list(side.values()))[:, None]) for side in sides]
                    colour = LINES[1] if "gates" in method else LINES[0]
                    rows.append((method, colour, [(100 * one.mean, 100 * one.low, 100 * one.high) for one in found]))
            labels = [f"{test}\n{f'T = {heat:g}' if heat else 'greedy'}, %" for test, heat in shown]
            paired_dots(rows, labels, into / picture_name("scores", folder.name, cell))


def page(records: Path, design: dict[str, Any]) -> str:
    """RESULTS.md."""
    parts = [TITLE]
    for folder, cells in cells_of(records, design):
        begun = {name: read(folder, name) for name in cells}
        parts.append(f"## {folder.name}")
        for name, (answers, cuts, trainings) in begun.items():
            title = f"### {name}: GSM8K"
            pictures = {"temperatures": by_temperature(answers, design), "scores": panels(answers)}
            shown = [
                f"![{kind} of {name}]({picture_name(kind, folder.name, name)})" for kind in pictures if pictures[kind]
            ]
            parts += [title, main_table(answers, trainings, design), *shown]
            parts += ["Best against best, GSM8K:", family_table(answers, design)]
            parts += [rule] if (rule := chosen_by_rule(answers, design["methods"])) else []
            if limits := intervention_table(answers, design):
                parts += ["Interventions, GSM8K:", limits]
            parts += ["Other tests:", guard_table(answers, design)]
            parts += ["Cut off at the token limit, %:", cut_table(cuts, design)]
        parts += [
            "### Over seeds, against the LoRA",
            over_seeds({name: one for name, (one, *_) in begun.items()}, design),
            "### What it took",
            "On two cores that had other work; 100 answers: the median of the slices.",
            cost_table(folder, cells),
        ]
    return "\n\n".join(parts if len(parts) > 1 else [*parts, "Nothing was run yet."]) + "\n"


def main() -> None:
    design = read_design(DESIGN)
    report_command(
        __doc__, RECORDS, RESULTS, lambda records: page(records, design), lambda *paths: draw(*paths, design)
    )


if __name__ == "__main__":
    main()
