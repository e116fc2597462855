"""The map of a selection shows every range, marks the right ones, and takes any set of ranges; so do its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loragate.report.selection import heat_maps, read_selection, selection_table, write_maps, write_selection
from pages import estimate, evaluation_record, row, selection_record, sweep_record

GRID = [(lower, upper) for upper in range(1, 7) for lower in range(-6, 1)]


def draw(data: dict[str, Any], folder: Path) -> None:
    for name, one in heat_maps(data).items():
        one(folder / f"{name}.png")


def test_the_papers_grid(tmp_path: Path, drawn: list[Any]) -> None:
    draw(sweep_record(GRID), tmp_path)
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["−6", "−5", "−4", "−3", "−2", "−1", "0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["6", "5", "4", "3", "2", "1"]
    texts = [text.get_text() for text in axes.texts]
    assert (len(texts), texts[0], texts[-2]) == (2 * 42, "10.0", "90.0")
    assert [(text.get_position()[0], round(text.get_position()[1])) for text in axes.texts[-2:]] == [(6, 0), (6, 0)]
    (chosen,) = axes.patches
    assert (round(chosen.get_x() + 0.44), round(chosen.get_y() + 0.44)) == (3, 5)
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    differences = [one["difference"] for one in sweep_record(GRID)["variants"][2:]]
    assert len(dots) == sum(one["low"] <= 0 <= one["high"] for one in differences)
    assert axes.images[0].norm.vmin == -axes.images[0].norm.vmax


def test_nothing_overlaps_or_is_cut_off(tmp_path: Path, drawn: list[Any]) -> None:
    draw(sweep_record(GRID), tmp_path)
    draw(sweep_record([(-3, 1), (0, 1), (-6, 3)]), tmp_path)
    for figure in drawn:
        figure.draw_without_rendering()
        texts = [*figure.axes[0].texts, *figure.axes[0].get_xticklabels(), *figure.axes[0].get_yticklabels()]
        letters = [text.get_fontsize() for text in (*figure.axes[0].texts, *figure.texts)]
        assert 0.9 * min(letters) > 10, "a phone shows a chart at 0.9 of its size"
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
        boxes += [text.get_window_extent() for text in figure.texts]
        for place, box in enumerate(boxes):
            assert figure.bbox.x0 <= box.x0
            assert box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0
            assert not any(box.overlaps(other) for other in boxes[:place])


def test_ranges_that_form_no_grid_and_grids_with_a_gap(tmp_path: Path, drawn: list[Any]) -> None:
    draw(sweep_record([(-3, 1), (0, 1), (-6, 3), (-1.5, 1.25), (-2, 7)]), tmp_path)
    draw(sweep_record([cell for cell in GRID if cell != (-6, 6)], chosen=(9, 9)), tmp_path)
    column, gap = (figure.axes[0] for figure in drawn)
    labels = [label.get_text() for label in column.get_yticklabels()]
    assert labels == ["[−6, 3]", "[−3, 1]", "[−2, 7]", "[−1.5, 1.25]", "[0, 1]"]
    assert gap.images[0].get_array().mask.sum() == 1
    assert len(gap.texts) == 2 * 41
    assert not gap.patches, "where the adapter remains, no range is framed"


def test_variants_that_differ_in_more_than_the_range_have_maps_of_their_own() -> None:
    data = sweep_record([(-3, 1), (0, 1)])
    other = [{**one, "label": one["label"].replace("] ", "] ce ")} for one in data["variants"][2:]]
    names = list(heat_maps({**data, "variants": [*data["variants"], *other]}))
    assert names == ["heatmap_gated_greedy", "heatmap_gated_ce_greedy"]
    assert list(heat_maps(selection_record())) == ["heatmap"]


def test_an_evaluation_of_several_ranges_has_a_map_for_each_task_or_suite(tmp_path: Path, drawn: list[Any]) -> None:
    cells = [row("gated", mean, f"[{ends}], seed 0") for ends, mean in (("-3,1", 0.5), ("0,1", 0.1))]
    cooler = row("gated", 0.9, "[-6,3] greedy", temperature=0.0)
    record = evaluation_record(row("adapter", 0.3), *cells, cooler)
    assert write_maps(record, tmp_path) == ["heatmap_t"]
    assert [text.get_text() for text in drawn[0].axes[0].texts] == ["50.0", "45.0–55.0", "10.0", "5.0–15.0"]
    assert write_maps(evaluation_record(), tmp_path) == []
    best = {**evaluation_record(row("adapter", 0.3), row("gated", 0.7), row("gated", 0.5, "[-3,1]")), "suites": []}
    assert heat_maps(best) == {}, "nothing says the range of gates that are alone in their folder"
    (one,) = heat_maps({**best, "range": [0.0, 1.0]}).values()
    assert set(one.args[2]) == {(0, 1), (-3, 1)}


def test_the_map_of_a_suite_leaves_out_the_averages_at_other_temperatures() -> None:
    own = [row("adapter", 0.3), row("gated", 0.5, "[-3,1], seed 0"), row("gated", 0.1, "[0,1], seed 0")]
    cool = [{**one, "temperature": 0.0, "control": f"{one['control'] or ''} greedy".lstrip()} for one in own]
    results = [{**one, "task": task} for one in (*own, *cool) for task in ("a", "b")]
    keys = ("variant", "control", "comparison", "verdict")
    averages = [
        {**{key: one[key] for key in keys}, "average": {**one["avg_at_k"], "tasks": 2}} for one in (*own, *cool)
    ]
    suites = [{**one, "suite": "math", "tasks": ["a", "b"]} for one in averages]
    record = {**evaluation_record(*results), "suites": suites}
    record["tasks"] = [{**record["tasks"][0], "name": name} for name in ("a", "b")]
    assert list(heat_maps(record)) == ["heatmap_math"], (
        "the greedy cells would be coloured by the adapter that is sampled"
    )


def test_equal_data_give_equal_files_and_a_table_of_all(tmp_path: Path) -> None:
    for name in ("one", "other"):
        assert write_selection(read_selection(sweep_record(GRID)), tmp_path / name) == ["heatmap"]
    for file in ("heatmap.png", "heatmap.svg", "selection.md"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    markdown = (tmp_path / "one" / "selection.md").read_text()
    assert markdown.count("\n| gated [") == 42
    assert "| gated [-3,1] greedy (recommended) |" in markdown
    assert "flattered by the choice" in markdown


def test_the_record_of_a_selection() -> None:
    found = read_selection(selection_record())
    (adapter, best, *_) = selection_table(found).lines
    assert adapter.cells[1] == ("–",)
    assert best.cells == [("48.0", "43.0–53.0"), ("+8.0", "+3.0 to +13.0", "z = 2.7"), ("0.0",)], (
        "no retention was measured"
    )
    half = {**estimate(0.5), "stderr": 0.02, "questions": 40, "samples": 1}
    kept = [{**one, "retention": half} for one in selection_record()["variants"]]
    assert selection_table(read_selection({**selection_record(), "variants": kept})).columns[-1] == "Retention %"
    assert read_selection({"selection": None}) is read_selection(None) is None


def test_the_best_gates_are_named_however_low_they_score() -> None:
    record = selection_record()
    own, *_, gates = record["variants"]
    scales = [{**own, "label": f"adapter λ=0.{number} greedy", "mean": 0.9} for number in range(1, 9)]
    record |= {"variants": [own, *scales, {**gates, "mean": 0.1}]}
    record["recommendation"] = {**record["recommendation"], "label": own["label"], "weights": "adapter"}
    found = read_selection(record)
    assert f"{gates['label']} 10.0 % (" in found.alternatives()
    assert gates["label"] in [line.name for line in selection_table(found, most=4).lines]
