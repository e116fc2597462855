"""The map of a selection shows every range, marks the right ones, and takes any set of ranges; so do its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loragate.report.selection import heat_maps, read_selection, selection_table, write_selection
from pages import selection_record, sweep_record

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
    assert len(texts) == 2 * 42
    assert texts[:2] == ["10.0", "±5.0"]
    assert texts[-2:] == ["90.0", "±5.0"]
    assert [(text.get_position()[0], round(text.get_position()[1])) for text in axes.texts[-2:]] == [(6, 0), (6, 0)]
    frames = {patch.get_linestyle(): patch for patch in axes.patches}
    assert len(axes.patches) == 2
    chosen = next(patch for style, patch in frames.items() if style in ("-", "solid"))
    assert (round(chosen.get_x() + 0.44), round(chosen.get_y() + 0.44)) == (3, 5)
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    differences = [cell["difference"] for cell in sweep_record(GRID)["cells"]]
    assert len(dots) == sum(one["low"] <= 0 <= one["high"] for one in differences)
    image = axes.images[0]
    assert image.norm.vmin == -image.norm.vmax
    assert "35.0 (30.0–40.0) %" in axes.get_title(loc="left")
    caption = " ".join(drawn[0].get_supxlabel().split())
    assert "Score on the dev set (64 questions)" in caption
    assert "paired difference to the adapter contains 0" in caption


def test_nothing_overlaps_or_is_cut_off(tmp_path: Path, drawn: list[Any]) -> None:
    draw(sweep_record(GRID), tmp_path)
    draw(sweep_record([(-3, 1), (0, 1), (-6, 3)]), tmp_path)
    for figure in drawn:
        figure.draw_without_rendering()
        texts = [*figure.axes[0].texts, *figure.axes[0].get_xticklabels(), *figure.axes[0].get_yticklabels()]
        boxes = [text.get_window_extent() for text in texts if text.get_text()]
        boxes += [text.get_window_extent() for text in figure.texts]
        for place, box in enumerate(boxes):
            assert figure.bbox.x0 <= box.x0
            assert box.x1 <= figure.bbox.x1
            assert figure.bbox.y0 <= box.y0
            assert not any(box.overlaps(other) for other in boxes[:place])


def test_ranges_that_form_no_grid_stand_in_one_column(tmp_path: Path, drawn: list[Any]) -> None:
    draw(sweep_record([(-3, 1), (0, 1), (-6, 3), (-1.5, 1.25), (-2, 7)]), tmp_path)
    axes = drawn[0].axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["[−6, 3]", "[−3, 1]", "[−2, 7]", "[−1.5, 1.25]", "[0, 1]"]
    assert len(axes.texts) == 10


def test_a_gap_in_a_grid_stays_empty(tmp_path: Path, drawn: list[Any]) -> None:
    draw(sweep_record([cell for cell in GRID if cell != (-6, 6)]), tmp_path)
    assert drawn[0].axes[0].images[0].get_array().mask.sum() == 1
    assert len(drawn[0].axes[0].texts) == 2 * 41


def test_where_the_adapter_remains_nothing_is_framed(tmp_path: Path, drawn: list[Any]) -> None:
    data = sweep_record(GRID, picked="adapter")
    data["choices"][0]["oracle"] = None
    draw(data, tmp_path)
    assert not drawn[0].axes[0].patches
    assert "Frame" not in drawn[0].get_supxlabel()


def test_variants_that_differ_in_more_than_the_range_have_maps_of_their_own() -> None:
    data = sweep_record([(-3, 1), (0, 1)])
    assert list(heat_maps(data)) == ["heatmap"]
    other = [{**cell, "name": cell["name"] + " ce"} for cell in data["cells"]]
    assert list(heat_maps({**data, "cells": [*data["cells"], *other]})) == ["heatmap", "heatmap_ce"]
    assert heat_maps({**data, "choices": []}) == {}
    assert list(heat_maps(selection_record())) == ["heatmap"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_data_give_equal_files(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "other"):
        heat_maps(sweep_record(GRID[:7]))["heatmap"](tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"other.{suffix}").read_bytes()


def test_tables_and_sentences(tmp_path: Path) -> None:
    data = sweep_record(GRID)
    (view,) = read_selection(data)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(selection_table(view))
    text = console.export_text()
    assert "27 more are in the files" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert write_selection(data, tmp_path) == ["heatmap"]
    markdown = (tmp_path / "sweep_results.md").read_text()
    assert markdown.count("\n| [") == 42
    assert "| [-3,1] (recommended) |" in markdown
    assert view.sentence().startswith("Use [-3,1]: ")
    assert "Alternatives: [0,6] 90.0 %, [-1,6] 88.0 %" in view.sentence()
    assert "adapter 35.0 %, and 37 more." in view.sentence(), "the adapter is always named"
    assert "an oracle that was not used to choose" in view.sentence()
    (remains,) = read_selection(sweep_record(GRID, picked="adapter"))
    assert remains.advice() == "Use adapter"


def test_the_record_of_a_selection() -> None:
    (view,) = read_selection(selection_record())
    assert view.chosen is not None
    assert (view.label, view.chosen.range, view.questions) == ("gated [-6,3] greedy", (-6.0, 3.0), 64)
    (adapter, best, *_) = selection_table(view).lines
    assert adapter.cells[1] == ("–",)
    assert best.cells == [("48.0", "43.0–53.0"), ("+8.0", "+3.0 to +13.0", "z = 2.7")], "no retention was measured"
    assert "z of 1.28" in selection_table(view).caption
    kept = {**selection_record(), "variants": [{**one, "retention": 0.5} for one in selection_record()["variants"]]}
    (kept_view,) = read_selection(kept)
    assert selection_table(kept_view).columns[-1] == "Retention %"
    assert read_selection({"selection": None}) == read_selection(None) == []


def test_scores_by_name_are_read_too() -> None:
    """The evidence of an artifact."""
    evidence = {"adapter": {"mean": 0.4, "low": 0.3, "high": 0.5}, "[-3,1]": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    (view,) = read_selection({"method": "best of 2", "picked": "[-3,1]", "evidence": evidence})
    assert view.sentence().startswith("Use [-3,1]: 50.0 (40.0–60.0) % on the dev set. Alternatives: adapter 40.0 %.")
