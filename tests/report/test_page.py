"""The page as text: what is escaped, what is embedded, what is refused."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import re
from functools import cache, partial
from pathlib import Path

import pytest

from loragate.evaluation.results import SuiteResult
from loragate.report.blocks import (
    Banner,
    Section,
    build_page,
    chart,
    diagnosis_blocks,
    render_chart,
    safe_json,
    selection_blocks,
    tokens_block,
    training_blocks,
)
from loragate.report.figures import column_chart, line_chart
from loragate.report.page import banner_of
from loragate.report.scores import evaluation_statements, score_tables
from loragate.report.selection import read_selection, selection_table
from loragate.report.sources import Source
from loragate.selection_record import read_selection_record
from pages import HISTORY, HOSTILE, estimate, evaluation_record, gates_record, row, selection_record, traces


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.scripts, self.attributes, self.text, self.tags, self.inside = [], [], [], [], None

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = tag
        if tag == "script":
            self.scripts.append([dict(attrs), ""])

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts[-1][1] += data
        else:
            self.text.append(data)

    def handle_endtag(self, tag):
        self.inside = None


@cache
def whole_page():
    sections = [
        Section("scores", HOSTILE, score_tables(evaluation_record(row("adapter", 0.2), row("gated", 0.4, HOSTILE)))),
        Section("gates", "Gates", diagnosis_blocks(gates_record())),
        Section("training", "Training", training_blocks({HOSTILE: HISTORY})),
        Section("tokens", "Tokens", [tokens_block(traces())]),
    ]
    return build_page(HOSTILE, Banner(HOSTILE, HOSTILE, [f"SCALE is better. {HOSTILE}"]), sections, HOSTILE)


def test_hostile_text_stays_text():
    page = whole_page()
    reader = Reader()
    reader.feed(page)
    assert len(reader.scripts) == 2
    kinds = [attributes.get("type") for attributes, _ in reader.scripts]
    assert kinds == ["application/json", None]
    assert json.loads(reader.scripts[0][1])["questions"][0]["answers"][0]["tokens"][0] == HOSTILE
    assert "img" not in reader.tags
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert sum(HOSTILE in text for text in reader.text) >= 4


def test_only_the_pages_own_script_may_run_and_nothing_is_loaded():
    page = whole_page()
    reader = Reader()
    reader.feed(page)
    digest = base64.b64encode(hashlib.sha256(reader.scripts[1][1].encode()).digest()).decode()
    policies = [value for name, value in reader.attributes if name == "content" and "script-src" in (value or "")]
    assert len(policies) == 1
    assert f"'sha256-{digest}'" in policies[0]
    assert "default-src 'none'" in policies[0]
    names = ("src", "href", "xlink:href")
    addresses = {value for name, value in reader.attributes if name in names and not value.startswith("#")}
    assert {value.partition(",")[0] for value in addresses} == {"data:", "data:image/png;base64"}
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_the_json_block_cannot_be_ended():
    assert "<" not in safe_json({"a": HOSTILE})
    assert ">" not in safe_json({"a": HOSTILE})
    assert json.loads(safe_json({"a": HOSTILE})) == {"a": HOSTILE}
    with pytest.raises(ValueError):
        safe_json(float("nan"))


def test_traces_are_cut_to_the_limit_and_the_cut_is_told():
    record = traces(questions=40, tokens=200)
    size = len(safe_json(record["questions"][0]))
    cut, whole = (tokens_block(record, limit=limit * size).data for limit in (10, 100))
    assert 5 <= len(cut["traces"]["questions"]) <= 12
    assert cut["left_out"] == 40 - len(cut["traces"]["questions"])
    assert (len(whole["traces"]["questions"]), whole["left_out"]) == (40, 0)


def test_a_figure_on_the_page_is_text_in_the_ink_of_the_page():
    curves = {"$one$ <b>": [(0, 1.0), (10, float("nan"))], "two": [(5, 0.75)]}
    for draw in (partial(line_chart, curves, "loss & more"), partial(column_chart, [0, 1, 2], [1, 3], "loss & more")):
        svg = str(render_chart(chart(draw, "A <title>")).data)
        assert svg.startswith('<svg viewBox="0 0 ')
        assert 'aria-label="A &lt;title&gt;"' in svg
        assert "loss &amp; more</text>" in svg
        assert "currentColor" in svg
        assert "#010203" not in svg
        assert "DejaVu" not in svg
        assert "nan" not in svg
        assert len(re.findall(r' id="[\w.]+_\d+"', svg)) == 0
        assert "$one$ &lt;b&gt;</text>" in svg or draw.func is column_chart


def test_the_summary_names_the_verdict_and_what_else_may_have_done_it():
    def statements(gated, verdict, control, **more):
        cooler = row("adapter", control, "T=0.3", temperature=0.3)
        versus = {"mean": gated - 0.3, "low": gated - 0.4, "high": gated - 0.2, "p": 0.01}
        result = row("gated", gated, comparison=versus, verdict=verdict, **more)
        rows = [row("adapter", 0.3), result, cooler, row("base", 0.25), row("adapter", 0.9, "DFT")]
        return evaluation_statements(evaluation_record(*rows, row("gated", 0.9, "random gates")))

    assert statements(0.5, "better", 0.4) == [
        "On t, T=1, gated is significantly better than the adapter: 50.0 % against 30.0 % of the adapter (+20.0 points, "
        "interval +10.0 to +30.0)."
    ]
    assert statements(0.5, "better", 0.6)[1:] == ["On t, T=1, adapter T=0.3 needs no training and scores 60.0 %."]
    worse = statements(0.1, "worse", 0.05, truncated=0.2)
    assert "significantly worse than the adapter" in worse[0]
    assert worse[1] == "On t, T=1, the base scores 25.0 % without any adapter."
    assert worse[2].endswith(
        "20.0 % of the answers of the gates are cut off, 1.0 % of the adapter's: the gates make more answers run on."
    )
    (unsure, *_) = statements(0.31, "no difference shown", 0.2)
    assert "not significantly different" in unsure


def test_without_gates_the_adapter_is_compared_with_its_base():
    def found(verdict, *more):
        record = evaluation_record(row("adapter", 0.3), row("base", 0.4, verdict=verdict), *more)
        return banner(record), evaluation_statements(record)

    opening, said = found("better")
    assert opening.advice == "Use the base without the adapter: significantly better than the adapter"
    assert opening.score.startswith("t: base 40.0")
    assert said == [
        "On t, T=1, the base is significantly better than the adapter: 40.0 % against 30.0 % of the adapter (+10.0 points, "
        "interval +5.0 to +15.0)."
    ]
    opening, said = found("worse")
    assert opening.advice == "Use the adapter: the base is significantly worse than the adapter"
    assert "the base is significantly worse" in said[0]
    assert found("no difference shown")[0].advice == "The base is not significantly different from the adapter"
    cooler = [
        row("base", score, how, temperature=heat) for score, how, heat in ((0.5, "T=0.3", 0.3), (0.6, "greedy", 0.0))
    ]
    _, said = found("better", row("gated", 0.35), *cooler)
    assert [line for line in said if "without any adapter" in line] == [
        "On t, T=1, the base greedy scores 60.0 % without any adapter."
    ]
    assert banner(evaluation_record(row("base", 0.4, comparison=None, verdict=None))).advice.startswith(
        "The base was not"
    )
    opening, said = found("better", row("gated", 0.5))
    assert opening.advice == (
        "Use the gates: significantly better than the adapter; the base without any adapter is significantly better than the "
        "adapter"
    )
    assert "the base is significantly better" in said[-1]
    assert "the base is" not in " ".join(found("worse", row("gated", 0.5))[1])
    both = banner(
        selection_record(),
        evaluation_record(row("adapter", 0.3), row("gated", 0.5), row("base", 0.4, verdict="better")),
    )
    assert "the base is significantly better" in both.more[-1]


def test_what_is_said_at_another_temperature_is_said_against_the_adapter_there():
    greedy = {"temperature": 0.0}
    gates, random = (row("gated", 0.1, how, verdict="worse", **greedy) for how in ("greedy", "random gates greedy"))
    (said,) = evaluation_statements(evaluation_record(row("adapter", 0.9, "greedy", **greedy), gates, random))
    assert said.startswith("On t, greedy, gated is significantly worse than the adapter: 10.0 % against 90.0 %")
    alone = evaluation_statements(evaluation_record(gates))
    assert alone == ["On t, greedy, the adapter was not run, so no verdict on the gates is given."]


def test_a_selection_has_its_sentence_its_map_and_its_numbers():
    sentence, chart_, numbers = selection_blocks(selection_record())
    assert sentence.data[0].startswith(
        "Use the gates [-6,3], greedily: 48.0 % (43.0–53.0) on 64 dev questions; it beats"
    )
    assert "Frame:" in str(render_chart(chart_).data)
    names = [line.name for line in numbers.lines]
    assert names == ["adapter greedy", "gated [-6,3] greedy (recommended)", "gated [0,1] greedy", "base greedy"]
    # a range that the user gave has a sentence where others have scores
    (said,) = selection_blocks({"range": [-3, 1], "reason": "taken without a dev set"})
    assert said.data == ("Selection: taken without a dev set.",)


def banner(*records):
    kinds = {"cells": "selection", "variants": "selection", "gate": "artifact", "results": "evaluation"}
    kind_of = [next(kind for key, kind in kinds.items() if key in record) for record in records]
    return banner_of(
        [Source(kind, Path("r.json"), record, "run") for kind, record in zip(kind_of, records, strict=True)]
    )


def test_the_banner_says_what_to_do_its_score_and_the_alternatives():
    found = banner(selection_record())
    record = read_selection_record(selection_record())
    assert found.advice == "Use the gates [-6,3], greedily" == record.recommendation.format_advice()
    assert record.sentences()[0].startswith(f"{found.advice}: {found.score}; "), "the command says the same"
    assert (
        found.more[0]
        == record.alternatives()
        == "The best of each other kind: adapter greedy 40.0 % (35.0–45.0), base greedy 30.0 % (25.0–35.0)."
    )
    assert found.more[1] == "Why: it beats the greedy adapter with z = 2.7."
    assert "gated [-6,3]" in str(found.chart.data)
    artifact = {"gate": {}, "selection": selection_record()}
    assert banner(selection_record(), artifact) == found, "the same record twice is one selection"
    both = banner(selection_record(), evaluation_record())
    assert both.advice == found.advice
    assert both.more[-1].startswith("On t, T=1, gated is significantly better")


def test_the_banner_of_an_evaluation_follows_its_verdicts():
    def advice(verdict):
        return banner(evaluation_record(row("adapter", 0.3), row("base", 0.1), row("gated", 0.4, verdict=verdict)))

    helps, unsure = advice("better"), advice("no difference shown")
    assert helps.advice == "Use the gates: significantly better than the adapter"
    assert helps.score == "t: gated 40.0 (35.0–45.0) %"
    assert helps.more == ["Alternatives: adapter 30.0 %, base 10.0 %."]
    assert unsure.advice.startswith("Use the plain adapter: the gates are not significantly different")
    assert unsure.score.startswith("t: adapter 30.0")
    assert advice("worse").advice == "Use the plain adapter: the gates are significantly worse than the adapter"
    assert banner().advice == "No scores were given to this report"


def at_best(temperature, score, gap=None):
    versus = gap and {"mean": sum(gap) / 2, "low": gap[0], "high": gap[1], "p": 0.5}
    verdict = gap and ("better" if gap[0] > 0 else "worse" if gap[1] < 0 else "no difference shown")
    return {"temperature": temperature, "score": estimate(score), "comparison": versus, "verdict": verdict}


GATES_HELP = "Use the gates: significantly better than the adapter"
GATES_HARM = "Use the plain adapter: the gates are significantly worse than the adapter"
GATES_UNSURE = "Use the plain adapter: the gates are not significantly different from the adapter"
BASE_HELPS = "Use the base without the adapter: significantly better than the adapter"
BASE_HARMS = "Use the adapter: the base is significantly worse than the adapter"
BASE_UNSURE = "The base is not significantly different from the adapter"


@pytest.mark.parametrize(
    ("name", "verdict", "adapter", "other", "advice"),
    [
        # both are best where the task samples: its own verdict
        ("gated", "better", at_best(1.0, 0.6), at_best(1.0, 0.61, (-0.02, 0.04)), GATES_HELP),
        ("gated", "better", None, None, GATES_HELP),
        # the comparison of the bests
        ("gated", "better", at_best(0.0, 0.6), at_best(0.0, 0.61, (-0.02, 0.04)), GATES_UNSURE),
        ("gated", "better", at_best(0.0, 0.6), at_best(0.0, 0.4, (-0.3, -0.1)), GATES_HARM),
        ("gated", "worse", at_best(0.0, 0.6), at_best(0.3, 0.7, (0.05, 0.2)), GATES_HELP),
        ("gated", "no difference shown", at_best(0.0, 0.6), at_best(0.0, 0.7, (0.05, 0.2)), GATES_HELP),
        ("base", "better", at_best(0.0, 0.6), at_best(0.0, 0.5, (-0.2, -0.01)), BASE_HARMS),
        ("base", "worse", at_best(0.0, 0.6), at_best(0.0, 0.61, (-0.02, 0.04)), BASE_UNSURE),
        ("base", "worse", at_best(0.0, 0.6), at_best(0.0, 0.7, (0.05, 0.2)), BASE_HELPS),
        ("base", "worse", at_best(0.0, 0.6), at_best(0.0, 0.5, (-0.2, -0.01)), BASE_HARMS),
        # none on record: the verdict at the task's own, unless the best scores say otherwise
        ("gated", "better", at_best(0.0, 0.6), None, GATES_UNSURE),
        ("gated", "better", at_best(0.0, 0.45), at_best(0.0, 0.46), GATES_HELP),
        ("gated", "worse", at_best(0.0, 0.6), at_best(0.0, 0.7), GATES_UNSURE),
        ("gated", "no difference shown", at_best(0.0, 0.6), at_best(0.0, 0.7), GATES_UNSURE),
        ("base", "better", at_best(0.0, 0.6), at_best(0.0, 0.5), BASE_UNSURE),
        ("base", "better", at_best(0.0, 0.6), at_best(0.0, 0.7), BASE_HELPS),
    ],
)
def test_the_advice_compares_each_model_at_its_best_temperature(name, verdict, adapter, other, advice):
    rows = [row("adapter", 0.38, at_best=adapter), row(name, 0.47, verdict=verdict, at_best=other)]
    found = banner(evaluation_record(*rows))
    assert found.advice == advice
    noted = [line for line in found.more if "at the best temperature of each" in line]
    assert len(noted) == (adapter is not None and adapter["temperature"] == 0)
    if verdict == "better" and advice in (GATES_UNSURE, GATES_HARM, BASE_UNSURE, BASE_HARMS):
        assert noted[0].startswith("On t, at the best temperature of each: adapter greedy 60.0 %, ")
        assert noted[0].endswith(f"; {name} is significantly better than the adapter at T=1 alone.")


def test_a_base_that_is_better_at_its_best_is_named_beside_gates():
    rows = [row("adapter", 0.3, at_best=at_best(0.0, 0.6)), row("gated", 0.4, at_best=at_best(0.0, 0.7, (0.02, 0.1)))]
    base = row("base", 0.2, verdict="worse", at_best=at_best(0.0, 0.8, (0.05, 0.2)))
    found = banner(evaluation_record(*rows, base))
    assert found.advice == f"{GATES_HELP}; the base without any adapter is significantly better than the adapter"
    assert "adapter greedy 60.0 %, base greedy 80.0 %; base is significantly worse" in found.more[1]


@pytest.mark.parametrize(
    ("gap", "score"), [((0.05, 0.2), "t: gated greedy 71.0"), ((-0.2, -0.05), "t: adapter T=0.3 61.0")]
)
def test_the_score_of_the_banner_is_of_the_temperature_that_its_advice_is_about(gap, score):
    found = banner(
        evaluation_record(
            row("adapter", 0.3, at_best=at_best(0.3, 0.6)),
            row("gated", 0.2, verdict="worse", at_best=at_best(0.0, 0.6 + sum(gap) / 2, gap)),
            row("adapter", 0.61, "T=0.3", temperature=0.3),
            row("gated", 0.73, "λ=0.5 greedy", temperature=0.0),
            row("gated", 0.71, "greedy", temperature=0.0),
        )
    )
    assert found.score.startswith(score)
    (alternatives,) = [line for line in found.more if line.startswith("Alternatives")]
    assert score.split(": ")[1].rsplit(" ", 1)[0] not in alternatives.split(": ")[1].split(" %, ")[0]


def record_of(tasks, average=()):
    """An evaluation's record of {task: verdict on the gates}; `average`: tasks with an average, on which the gates are better."""
    one = evaluation_record()
    rows = [
        {**result, "task": name}
        for name, verdict in tasks.items()
        for result in (row("adapter", 0.3), row("gated", 0.4 if verdict == "better" else 0.2, verdict=verdict))
    ]
    suites = [
        {**row(variant, mean, verdict=verdict), "suite": "math", "tasks": list(average)}
        for variant, mean, verdict in (("adapter", 0.3, None), ("gated", 0.4, "better"))
        if average
    ]
    suites = [{**each, "average": {**each["avg_at_k"], "tasks": len(average)}} for each in suites]
    names = {field.name for field in dataclasses.fields(SuiteResult)}
    suites = [{name: value for name, value in each.items() if name in names} for each in suites]
    return {**one, "tasks": [{**one["tasks"][0], "name": name} for name in tasks], "results": rows, "suites": suites}


def test_the_banner_names_every_place_and_scores_where_the_gates_won():
    same = dict.fromkeys(("t1", "t2", "t3"), "no difference shown")
    found = banner(record_of({**same, "t4": "better"}))
    assert (
        found.advice == "Use the gates for t4: significantly better than the adapter; no difference shown on t1, t2, t3"
    )
    assert found.score == "t4: gated 40.0 (35.0–45.0) %"
    assert found.chart.title.startswith("t4 v1")
    found = banner(record_of({"a": "worse", "b": "no difference shown"}))
    assert found.advice == (
        "Use the plain adapter for a: the gates are significantly worse than the adapter; no difference shown on b"
    )


def test_a_task_that_is_in_no_average_or_worse_than_its_average_is_in_the_banner():
    tasks = {"m1": "better", "m2": "worse", "m3": "no difference shown", "openbookqa": "worse"}
    found = banner(record_of(tasks, average=("m1", "m2", "m3")))
    assert found.advice == ("Use the gates for average of the 3 math tasks, and the plain adapter for openbookqa, m2")
    assert found.score.startswith("average of the 3 math tasks: gated 40.0")
    assert found.chart.title == "average of the 3 math tasks"
    both = banner(selection_record(), record_of(tasks))
    assert [line.split(",")[0] for line in both.more[-3:]] == ["On m1", "On m2", "On openbookqa"]


def test_the_cells_of_a_sweep_are_counted_and_none_is_chosen():
    cells = [row("gated", 0.4, f"[-{n},1], seed 0", verdict=verdict) for n, verdict in enumerate(("better", "worse"))]
    record = evaluation_record(row("adapter", 0.3), *cells, row("gated", 0.9, "random gates"))
    said = "On t, 1 of 2 cells significantly better than the adapter, 1 significantly worse; a test may not choose among them"
    assert banner(record).advice == said
    statement = said.replace("On t,", "On t, T=1,") + "."
    assert evaluation_statements(record) == [statement]
    greedy = [row("gated", 0.4, f"[-{n},1], seed 0 greedy", temperature=0.0, verdict="better") for n in (0, 1)]
    cooler = {**record, "results": [*record["results"], *greedy]}
    assert banner(cooler).advice == said, "each cell once, at the temperature of the tasks"
    assert evaluation_statements(cooler) == [
        statement,
        "On t, greedy, 2 of 2 cells significantly better than the adapter, 0 significantly worse; a test may not choose among "
        "them.",
    ]
    changed = [row("gated", 0.4, f"[-6,3] {name}") for name in ("noreverse", "noextrapolate", "unit", "clip=-1:2")]
    ablated = {**record, "results": [*record["results"], *changed]}
    assert banner(ablated).advice == said, "gates that were changed after training are no cells"
    assert evaluation_statements(ablated) == [statement]
    assert (
        banner(evaluation_record(row("adapter", 0.3), *changed)).advice
        == "The gates were not compared with the adapter"
    )


def test_gates_are_named_with_the_range_that_was_recorded():
    record = {**evaluation_record(), "models": {"gated": "q/run/trials/entropy_-6_3_seed0/gated"}, "range": [0.0, 1.0]}
    assert evaluation_statements(record)[0].startswith("On t, T=1, gated [0,1] is significantly better")
    assert evaluation_statements({**record, "range": None})[0].startswith("On t, T=1, gated is significantly better")


def test_the_groups_of_an_evaluation_are_those_of_a_selection():
    groups = {
        "control": [("base", None), ("base", "greedy"), ("gated", "random gates"), ("adapter", "DFT")],
        "baseline": [
            ("adapter", None),
            ("adapter", "T=0.6"),
            ("adapter", "λ=0.25"),
            ("adapter", "lower λ=-0.5 greedy"),
        ],
        "scale": [
            ("gated", None),
            ("gated", "greedy"),
            ("gated", "T=0.3"),
            ("gated", "[-3,1]"),
            ("gated", "[0,1] greedy"),
        ],
    }
    groups["intervention"] = [("gated", "[-6,3] unit")]
    for group, labels in groups.items():
        (table,) = score_tables(evaluation_record(*(row(variant, 0.4, control) for variant, control in labels)))
        assert [line.group for line in table.lines] == [group] * len(labels)
    chosen = {
        line.name.split(" [")[0]: line.group for line in selection_table(read_selection(selection_record())).lines
    }
    assert chosen == {"adapter greedy": "baseline", "base greedy": "control", "gated": "scale"}


def test_the_banner_of_a_choice_says_what_broke():
    kept = {**estimate(0.9), "stderr": 0.02, "questions": 40, "samples": 1}
    record = selection_record()
    variants = [{**one, "retention": kept} for one in record["variants"]]
    lost = {f"gated [-{n},1] greedy": "loses 85.0 points on the retention set" for n in range(1, 5)}
    retention = {"source": "r.jsonl", "vetoed": lost, "right": 0.9, "warnings": ["it is small"]}
    dev = {**record["dev"], "warnings": ["the grader reads nothing"]}
    more = banner({**record, "variants": variants, "dev": dev, "retention": retention}).more
    assert "On the retention set it has 90.0 % (85.0–95.0), adapter greedy 90.0 % (85.0–95.0)." in more
    assert [line for line in more if "not taken" in line] == [
        *(f"gated [-{n},1] greedy was not taken: it loses 85.0 points on the retention set." for n in (1, 2, 3)),
        "1 more was not taken for what is lost there.",
    ]
    assert more[-2:] == ["Warning, dev set: the grader reads nothing.", "Warning, retention set: it is small."]


def test_a_program_that_raises_is_an_answer():
    def silent(grader):
        record = evaluation_record(row("adapter", 0.3, reasons={"ok": 4, "error": 5, "no_code": 1}))
        record["tasks"][0]["grader"] = grader
        (sheet,) = score_tables(record)
        return sheet.lines[0].cells[list(sheet.columns).index("No answer %") - 1]

    assert silent("humaneval") == ("10.0",)
    assert silent("exact") == ("60.0",)


def test_the_banner_says_where_the_questions_are_too_easy():
    record = selection_record()
    assert not any("harder questions" in line for line in banner(record).more)
    easy = {**record["recommendation"], "label": record["baseline"], "score": estimate(1.0)}
    assert "harder questions" in banner({**record, "recommendation": easy}).more[0]
