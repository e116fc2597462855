"""The page of a check-up: everything measured is shown, what was not is said, and hostile text stays text."""

import json
from dataclasses import replace

import pytest
from test_page import Reader

from examinations import (
    FINDINGS,
    about,
    answers_part,
    effect_part,
    examination,
    learned_part,
    static_part,
    strength_part,
)
from loragate.analysis.rows import Interval
from loragate.doctor.record import FILE, AnswerPair, ChangedToken, Measures, Point, build_examination
from loragate.errors import DataError
from loragate.gates.adapter_rules import Finding
from loragate.report.blocks import render_chart as drawn_block
from loragate.report.examination import examination_banner, examination_sections, write_page
from loragate.report.figures import module_map, paired_dots, strength_curve
from loragate.report.page import page
from loragate.report.sources import find_sources
from pages import HOSTILE

ANCHORS = ["findings", "strength", "where", "changed", "answers", "learned", "made"]


def sections_of(record):
    return {section.anchor: section.blocks for section in examination_sections(record.to_json())}


def tables(blocks):
    """{what a table is called: {name of a line: its cells}}"""
    inside = [one for block in blocks for one in (block.data if block.kind == "row" else [block])]
    return {
        one.title or one.collapsed_label: {line.name: [cell[0] for cell in line.cells] for line in one.lines}
        for one in inside
        if one.kind == "table"
    }


def test_what_was_left_out_stands_among_the_findings(tmp_path):
    record = replace(examination(), left_out=("the dev set is not asked: one λ does not reach it",))
    listed = sections_of(record)["findings"][-1]
    assert (listed.kind, listed.data) == ("list", ["The dev set is not asked: one λ does not reach it."])
    write_page(record.to_json(), tmp_path / "page.html")
    assert "What was left out" in (tmp_path / "page.html").read_text()
    older = {key: value for key, value in record.to_json().items() if key != "left_out"}
    assert not any(block.title == "What was left out" for block in examination_sections(older)[0].blocks)


def spoiled(record):
    """The record with hostile text wherever a user or a model may have put it."""
    found = record.measures
    pair = AnswerPair(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 0.5, (HOSTILE,))
    token = ChangedToken(HOSTILE, HOSTILE, HOSTILE, 1.0, ((HOSTILE, 0.5),), ((HOSTILE, 0.5),))
    modules = tuple(replace(one, kind=HOSTILE) if one.kind == "q_proj" else one for one in found.static.modules)
    measures = Measures(
        replace(found.static, adapter=HOSTILE, base=HOSTILE, modules=modules, training=HOSTILE, reasons=(HOSTILE,)),
        replace(found.answers, pairs=(pair,)),
        replace(found.effect, source=HOSTILE, changed=(token,)),
        replace(found.learned, source=HOSTILE),
        replace(found.strength, sentences=(HOSTILE,)),
    )
    return build_examination((Finding("x", "warning", HOSTILE, HOSTILE),), measures, seconds=record.seconds)


def test_the_page_is_one_file_in_which_hostile_text_stays_text(tmp_path):
    path = tmp_path / "doctor.html"
    write_page(spoiled(examination()).to_json(), path)
    text = path.read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)
    assert len(reader.scripts) == 1
    assert "img" not in reader.tags
    assert not [value for name, value in reader.attributes if name.startswith("on")]
    links = [
        value for name, value in reader.attributes if name in ("href", "src") and not value.startswith(("#", "data:"))
    ]
    assert links == ["doctor.json"]
    assert "window.stolen" in "".join(reader.text)
    assert reader.tags.count("svg") == 5
    assert [f"#{anchor}" in text for anchor in [*ANCHORS, "provenance"]] == [True] * 8
    assert len(text.encode()) < 500_000


def test_sections_stand_in_order_and_open_with_a_sentence():
    found = sections_of(examination())
    assert list(found) == ANCHORS
    for anchor, blocks in found.items():
        assert blocks[0].kind == "text", anchor
        assert blocks[0].data[0].endswith((".", ").")), anchor


@pytest.mark.parametrize(
    ("part", "anchors"),
    [("answers", {"answers"}), ("effect", {"where", "changed"}), ("learned", {"learned"}), ("strength", {"strength"})],
)
def test_a_part_that_could_not_be_measured_has_no_section(part, anchors):
    assert set(ANCHORS) - set(sections_of(examination(**{part: None}))) == anchors


def said_in(record, tmp_path):
    write_page(record.to_json(), tmp_path / "page.html")
    reader = Reader()
    reader.feed((tmp_path / "page.html").read_text(encoding="utf-8"))
    return " ".join(" ".join(reader.text).split())


def test_what_was_not_measured_is_said_with_the_reason(tmp_path):
    parts = ("answers", "effect", "learned", "strength")
    broken = Finding(
        "weights-absent", "error", "adapter_model.safetensors is not there", "copy it from where it was trained"
    )
    record = build_examination(
        (broken,), Measures(replace(static_part(), modules=())), unfinished=parts, seconds={"static": 0.4}
    )
    text = said_in(record, tmp_path)
    assert "Do not use this adapter as it is: 1 error" in text
    assert "What to do first: Copy it from where it was trained." in text
    assert "adapter_model.safetensors is not there." in text
    assert "they need a model that can be loaded" in text
    assert "how it answers not done" in text
    quick = replace(record, unfinished=(), findings=(), verdict="healthy")
    text = said_in(quick, tmp_path)
    assert "how it answers not asked for (--quick)" in text
    assert "Everything that was checked is as it should be." in text
    ended = examination_banner(examination(unfinished=("learned", "strength")).to_json())
    assert ended.more[-1] == "Not measured: what it learned, how strongly it should act; --resume goes on with them."


def test_the_banner_says_the_verdict_and_what_to_do():
    found = examination_banner(examination().to_json())
    assert (found.advice, found.tone) == ("Usable, but read this first: 1 warning", "warning")
    assert found.more[0].startswith("What to do first: Use it at strength 0.5")
    assert found.more[1].startswith("At 0.75 times its strength it keeps what it is for")
    healthy = examination_banner(examination(findings=FINDINGS[1:]).to_json())
    assert (healthy.advice, healthy.tone) == ("Healthy: nothing was found that speaks against using it", "good")
    begun = examination_banner(examination(findings=FINDINGS[1:], unfinished=("effect", "strength")).to_json())
    assert (begun.advice, begun.tone) == ("Nothing found so far; 2 of 5 parts not done", "grey")
    faulty = examination_banner(examination(unfinished=("strength",)).to_json())
    assert (faulty.advice, faulty.tone) == (found.advice, "warning")


def test_without_examples_the_page_says_its_own_answers():
    own = replace(strength_part(), least="0.75", best="0.5", decided_by="kept", target="kept")
    record = examination(strength=own)
    unsaid = "(without examples, --data, nothing says how right they are): see “How strongly it should act”."
    assert examination_banner(record.to_json()).more[1:] == [
        f"At 0.5 times its strength it predicts its own answers better {unsaid}",
        f"At 0.75 times its strength it keeps its own answers {unsaid}",
    ]
    blocks = sections_of(record)["strength"]
    assert "whole × 0.75 (least that keeps its own answers)" in next(iter(tables(blocks).values()))
    assert "picture shows its own answers beside what the base could do before" in blocks[0].data[0]
    assert "hat it is for" not in str([drawn_block(block) for block in blocks])


@pytest.mark.parametrize(
    ("gain", "told"),
    [
        (
            (0.01, -0.02, 0.04),
            "0.010 (−0.020 to 0.040) nats per token less than the base's; 0 is in the interval, so a difference is not shown.",
        ),
        (
            (-0.03, -0.1, 0.04),
            "0.030 (−0.040 to 0.100) nats per token more than the base's; 0 is in the interval, so a difference is not shown.",
        ),
        ((-0.3, -0.4, -0.2), "0.300 (0.200 to 0.400) nats per token more than the base's."),
        ((0.3, 0.2, 0.4), "0.300 (0.200 to 0.400) nats per token less than the base's."),
        ((0.3, None, None), "0.300 nats per token less than the base's."),
    ],
)
def test_what_was_learned_has_its_signed_interval(gain, told):
    learned = replace(learned_part(), gain=Interval(*gain))
    assert sections_of(examination(learned=learned))["learned"][0].data[1] == f"The adapter's loss is {told}"


def test_strengths_are_named_and_marked():
    (numbers,) = tables(sections_of(examination())["strength"]).values()
    assert list(numbers)[:5] == [
        "the base (0)",
        "whole × 0.25",
        "whole × 0.5",
        "whole × 0.75 (least that keeps what it is for)",
        "as it is",
    ]
    assert {"upper third off", "upper third × 0.5", "mlp off", "with its gates"} <= set(numbers)
    assert numbers["as it is"] == ["1.350", "0.310"]
    scores = {"accuracy": about(0.5), "kept": about(0.25)}
    points = [replace(one, **(scores if one.group == "scale" else {})) for one in strength_part().points]
    right = replace(strength_part(), points=tuple(points), least=None, best="0.5", decided_by="accuracy", target="kept")
    blocks = sections_of(examination(strength=right))["strength"]
    (numbers,) = tables(blocks).values()
    assert numbers["as it is"] == ["50.0", "1.350", "25.0", "0.310"]
    assert numbers["mlp off"] == ["–", "1.600", "–", "0.150"]
    assert "whole × 0.5 (better by more than chance)" in numbers
    assert blocks[-1].columns[2] == "loss on its own answers, nats per token"


def test_parts_that_were_switched_off_by_layer_and_kind_alone_are_bars():
    whole = tuple(one for one in effect_part().cells if one.layer is None or one.kind is None)
    found = tables(sections_of(examination(effect=replace(effect_part(), cells=whole)))["where"])
    assert list(found) == ["By layer", "By kind of module"]
    assert found["By kind of module"]["down_proj"] == ["0.180"]
    assert "where" not in sections_of(examination(effect=replace(effect_part(), cells=())))


def test_a_base_that_cannot_be_had_is_said_and_has_no_figures():
    answers = replace(answers_part(), base=None, forgetting={}, retention_base=None)
    learned = replace(learned_part(), base=None, gain=None, heldout_base=None, scales={})
    found = sections_of(examination(answers=answers, learned=learned))
    assert "its base cannot be had" in found["answers"][0].data[0]
    assert tables(found["answers"])[""]["length of an answer, tokens"] == ["–", "33.8"]
    assert [name for name, _ in found["answers"][-1].data["pairs"][0]["answers"]] == ["Adapter"]
    assert list(tables(found["learned"])[""]) == ["adapter, on the examples", "adapter, on held-out questions"]


def test_figures_of_too_few_rows_stand_without_an_interval():
    def bare(value):
        if isinstance(value, dict):
            ends = {"mean", "low", "high"} == set(value)
            return {key: None if ends and key != "mean" else bare(one) for key, one in value.items()}
        return [bare(one) for one in value] if isinstance(value, list) else value

    found = {section.anchor: section.blocks for section in examination_sections(bare(examination().to_json()))}
    figures = [drawn_block(block) for block in found["strength"]]
    assert any(line.cells[0][1].startswith("too few rows") for line in figures[-1].lines)


def test_each_token_that_changed_most_is_seen_once():
    first = effect_part().changed[0]
    again = tuple(replace(first, kl=5.0 - n) for n in range(3))
    changes = sections_of(
        examination(effect=replace(effect_part(), changed=(first, *again, *effect_part().changed[1:])))
    )
    found = changes["changed"][-1].data
    assert [one["token"] for one in found["first"]] == ["sad", "⏎", "<|im_end|>", "∅"]
    assert found["first"][0]["before"].endswith("I am  ")
    assert [one["kl"] for one in found["more"]] == ["5.00", "4.00", "3.00"]
    assert found["first"][0]["models"][0] == ("base", [("sorry", "61"), (" the", "12"), ("glad", "4")])
    assert found["first"][0]["models"][1] == ("adapter", [(" sad", "93"), (" sorry", "3")]), "0.1 % says nothing"


def test_odd_answers_come_first():
    pairs = sections_of(examination(prompts=8))["answers"][-1]
    assert pairs.data["said"] == "All 8 prompts with the answers of both; the first 2 have something odd"
    assert [one["flags"] for one in pairs.data["pairs"]][:3] == [["cut at the limit", "repeats itself"]] * 2 + [[]]
    assert "0.10 nats per token less likely" in pairs.data["pairs"][0]["nats"]


def test_a_map_shows_layers_kinds_and_their_sums(tmp_path, drawn):
    cells = {(0, "up_proj"): 0.2, (1, "up_proj"): 1.0, (1, "q_proj"): 0.01, (None, "lm_head"): 0.5}
    module_map(cells, {0: 0.2, 1: 1.1}, {"q_proj": 0.01, "up_proj": 1.2, "lm_head": 0.5}, "nats", tmp_path / "map.png")
    squares, above, beside = drawn[0].axes
    assert [label.get_text() for label in squares.get_yticklabels()] == ["0", "1", "–"]
    assert [label.get_text() for label in squares.get_xticklabels()] == ["q_proj", "up_proj", "lm_head"]
    assert [text.get_text() for text in squares.texts] == ["0.20", "1.00", "0.50"], "0.01 is as good as no colour"
    assert [bar.get_height() for bar in above.patches] == [0.01, 1.2, 0.5]
    assert [bar.get_width() for bar in beside.patches] == [0.2, 1.1, 0]


def test_a_curve_marks_strengths_and_writes_what_lies_far_outside(tmp_path, drawn):
    curve = {0: (2.0, 1.9, 2.1), 1: (1.0, 0.9, 1.1), 2: (9.0, 8.0, 10.0)}
    strength_curve(
        [("a", curve, "x", "#111111"), ("b", curve, "y", "#222222")],
        {"as it is": 1, "least": 0},
        tmp_path / "curve.png",
    )
    upper, lower = drawn[0].axes
    assert [text.get_text() for text in upper.texts] == ["↑ 9"]
    assert upper.get_ylim()[1] < 5
    assert [line.get_xdata()[0] for line in lower.lines[1:]] == [1, 0]
    assert [text.get_text() for text in drawn[0].legends[0].texts] == ["as it is", "least"]


def test_dots_stand_beside_the_first_row(tmp_path, drawn):
    rows = [
        ("as it is", "#000000", [(1, 0.9, 1.1), (2, 1.9, 2.1)]),
        ("half", "#000000", [(3, 2.9, 3.1), (4, 3.9, 4.1)]),
    ]
    paired_dots(rows, ["left", "right"], tmp_path / "dots.png")
    left, right = drawn[0].axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["as it is", "half"]
    assert [line.get_xdata()[0] for line in right.lines if len(line.get_xdata()) == 1] == [2, 4]
    assert (left.patches[0].get_x(), left.patches[0].get_width()) == pytest.approx((0.9, 0.2))


def test_one_measure_is_one_panel(tmp_path, drawn):
    paired_dots([("as it is", "#000000", [(1, 0.9, 1.1)])], ["left"], tmp_path / "dots.png")
    strength_curve([("loss", {0.0: (2, 1, 3), 1.0: (1, 0, 2)}, "nats", "#000000")], {}, tmp_path / "curve.png")
    assert [len(figure.axes) for figure in drawn] == [1, 1]


def test_a_report_shows_the_check_up_of_a_folder(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(examination(strength=None).to_json()), encoding="utf-8")
    (source,) = find_sources(tmp_path)
    assert source.kind == "examination"
    text = page([source], "t")
    assert "Usable, but read this first: 1 warning" in text
    (tmp_path / FILE).write_text('{"verdict": "fine"}', encoding="utf-8")  # of another program
    with pytest.raises(DataError, match=r"doctor\.json"):
        find_sources(tmp_path)


def test_the_strength_without_a_curve_is_a_table_alone():
    gates = Point("gates", "gates", None, Interval(1.0, None, None), Interval(0.1, None, None))
    found = sections_of(examination(strength=replace(strength_part(), points=(gates,))))["strength"]
    assert tables(found) == {"The numbers": {"with its gates": ["1.000", "0.100"]}}
