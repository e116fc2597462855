"""The page as text: what is escaped, what is embedded, what is refused."""

import base64
import hashlib
import html.parser
import itertools
import json
import re

import pytest

from loragate.errors import LoragateError
from loragate.report.page.build import Block, Section, build_page, safe_json, tokens_block
from loragate.report.page.charts import column_chart, lambda_colour, line_chart, ticks
from loragate.report.page.scores import evaluation_statements, selection_blocks, sweep_blocks
from loragate.report.page.training import gates_blocks, training_blocks
from loragate.report.table import results_table
from pages import HOSTILE, estimate, quickstart_record, quickstart_rows, sweep_record, traces


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


def whole_page():
    record = quickstart_record()
    histories = {HOSTILE: record["calibrations"]["[-6,3]"]["history"]}
    sections = [
        Section("scores", HOSTILE, [results_table(record["table"])]),
        Section("gates", "Gates", gates_blocks(record["realised_gates"], -6, 3)),
        Section("training", "Training", training_blocks(histories)),
        Section("tokens", "Tokens", [tokens_block(traces())]),
    ]
    return build_page(HOSTILE, record["reading"], sections, HOSTILE)


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
    policy = dict(reader.attributes).get("content", "")
    policies = [value for name, value in reader.attributes if name == "content" and "script-src" in (value or "")]
    assert len(policies) == 1, policy
    assert f"'sha256-{digest}'" in policies[0]
    assert "default-src 'none'" in policies[0]
    addresses = [value for name, value in reader.attributes if name in ("src", "href") and not value.startswith("#")]
    assert addresses == ["data:,"]
    assert "@import" not in page
    assert "url(" not in page


def test_a_row_that_was_not_run_says_so():
    page = build_page("t", [], [Section("scores", "Scores", [results_table(quickstart_rows())])])
    assert re.search(r"random gates</th>\s*<td class=\"absent\">not run", page)


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


def test_a_page_that_grows_too_large_is_refused():
    block = Block("text", ["x" * 3_100_000])
    with pytest.raises(LoragateError, match="more than 3 MB"):
        build_page("t", [], [Section("a", "b", (block,))])


def test_the_chart_holds_every_point_and_a_zero_line():
    chart = str(line_chart({"one": [(0, 1.0), (10, 0.5)], "two": [(5, 0.75)]}, x_label="step", y_label="loss"))
    assert [len(found.split()) for found in re.findall(r'points="([^"]*)"', chart)] == [2, 1]
    assert chart.count("<circle") == 1
    assert ">0</text>" in chart
    heights = [float(pair.split(",")[1]) for pair in re.findall(r'points="([^"]*)"', chart)[0].split()]
    assert heights[0] < heights[1]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 157), (0.0, 0.037), (-3, 2)])
def test_ticks_are_round_and_inside(low, high):
    values = ticks(low, high)
    assert 2 <= len(values) <= 6
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in values)
    steps = {round(b - a, 9) for a, b in itertools.pairwise(values)}
    assert len(steps) == 1


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("value", [-6, -3, -0.5, 0, 0.4, 1, 1.5, 2.2, 3])
def test_numbers_can_be_read_on_their_colours(value):
    background, ink = lambda_colour(value, -6, 3)
    lights = sorted((luminance(background), 1.0 if ink == "#fff" else 0.0))
    assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5  # WCAG AA


def test_one_is_neutral_and_the_ends_differ():
    assert lambda_colour(1, -6, 3)[0] == "#ececec"
    assert len({lambda_colour(value, -6, 3)[0] for value in (-6, 0, 1, 3)}) == 4


def test_histogram_columns_have_the_heights_of_their_shares():
    chart = str(column_chart([0, 1, 2], [1, 3], "x"))
    heights = [float(value) for value in re.findall(r'class="column"[^>]*height="([^"]*)"', chart)]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)


def evaluation(gated, verdict, control):
    def row(variant, mean, control=None):
        versus = (
            None
            if variant == "adapter" and control is None
            else {"mean": mean - 0.3, "low": mean - 0.4, "high": mean - 0.2, "p": 0.01}
        )
        return {
            "task": "t",
            "variant": variant,
            "control": control,
            "avg_at_k": estimate_of(mean),
            "comparison": versus,
            "verdict": verdict,
        }

    rows = [row("adapter", 0.3), row("gated", gated), row("adapter", control, "T=0.3")]
    return {"tasks": [{"name": "t"}], "results": rows}


def estimate_of(mean):
    return {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "questions": 10, "samples": 4}


def test_the_summary_names_the_verdict_and_the_cheaper_control():
    better = evaluation_statements(evaluation(0.5, "better", 0.4))
    assert better == [
        "On t, gated is better than the adapter: 50.0 % against 30.0 % of the adapter (+20.0 points, 95 % interval +10.0 "
        "to +30.0)."
    ]
    cheaper = evaluation_statements(evaluation(0.5, "better", 0.6))
    assert cheaper[1] == "On t, adapter T=0.3 needs no training and scores 60.0 %."
    assert "worse than the adapter" in evaluation_statements(evaluation(0.1, "worse", 0.2))[0]
    # gates at a lower temperature meet the adapter there, and are no control of themselves
    record = evaluation(0.5, "better", 0.6)
    versus = {"mean": -0.1, "low": -0.2, "high": -0.05, "p": 0.01}
    gated = {**record["results"][1], "control": "T=0.3", "temperature": 0.3, "avg_at_k": estimate_of(0.9)}
    record["results"].append({**gated, "comparison": versus, "verdict": "worse"})
    said = evaluation_statements(record)
    assert said[1] == "On t, adapter T=0.3 needs no training and scores 60.0 %."
    assert said[2].startswith(
        "On t, T=0.3, gated is worse than the adapter: 90.0 % against 60.0 % of the adapter (-10.0"
    )
    assert "not told apart" in evaluation_statements(evaluation(0.31, "no difference shown", 0.2))[0]


def test_a_sweep_marks_the_chosen_and_the_oracle_cell():
    block, sentence = sweep_blocks(sweep_record([(-3, 1), (-2, 2), (0, 1)]))
    cells = {row["name"]: row["cells"][0] for row in block.data["rows"]}
    assert {name: cell["mark"] for name, cell in cells.items()} == {
        "[−3, 1]": "chosen",
        "[−2, 2]": "oracle",
        "[0, 1]": "",
    }
    assert cells["[−2, 2]"]["text"] == "50.0"
    assert {name for name, cell in cells.items() if "·" in cell["note"]} == {"[−2, 2]"}
    assert len({cell["background"] for cell in cells.values()}) == 3
    assert sentence.data[0].startswith("chosen: [-3,1]")


def test_what_was_picked_is_marked_among_the_evidence():
    evidence = {"adapter": estimate(0.4), "[-3,1]": estimate(0.5), "[0,1]": estimate(0.45)}
    selection = {"method": "best of 2", "accepted": True, "picked": "[-3,1]", "evidence": evidence}
    section = Section("selection", "How the range was chosen", selection_blocks(selection))
    assert [line.name for line in section.blocks[1].lines] == ["adapter", "[-3,1] (chosen)", "[0,1]"]
