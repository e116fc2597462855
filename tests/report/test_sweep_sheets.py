"""The heat map of a sweep shows every cell, marks the right ones, and takes any set of ranges; so do its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loragate.report.sweep import choice_sentence, heat_maps, sweep_markdown, sweep_tables
from pages import sweep_record

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
    assert len(dots) == sum(not cell["differs"] for cell in sweep_record(GRID)["cells"])
    image = axes.images[0]
    assert image.norm.vmin == -image.norm.vmax
    assert "35.0 (30.0–40.0) %" in axes.get_title(loc="left")
    caption = " ".join(drawn[0].get_supxlabel().split())
    assert "n = 512 answers per cell (64 questions × 4 samples × 2 seeds)" in caption
    assert "Holm's adjustment over 42 cells" in caption


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


def test_one_map_per_objective() -> None:
    data = sweep_record([(-3, 1), (0, 1)])
    assert list(heat_maps(data)) == ["heatmap"]
    other = [{**cell, "objective": "anchored", "name": cell["name"] + " anchored"} for cell in data["cells"]]
    assert list(heat_maps({**data, "cells": [*data["cells"], *other]})) == ["heatmap_entropy", "heatmap_anchored"]
    assert heat_maps({**data, "choices": []}) == {}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_equal_data_give_equal_files(tmp_path: Path, suffix: str) -> None:
    for name in ("one", "other"):
        heat_maps(sweep_record(GRID[:7]))["heatmap"](tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"other.{suffix}").read_bytes()


def test_tables_and_sentences() -> None:
    data = sweep_record(GRID)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in sweep_tables(data):
        console.print(table)
    text = console.export_text()
    assert "27 cells below are in the files" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    markdown = sweep_markdown({**data, "failures": {"x_seed0": "no disk"}})
    assert markdown.count("\n| [") == 42
    assert "| [-3,1] |" in markdown
    assert "- `x_seed0`: no disk" in markdown
    sentence = choice_sentence(data, data["choices"][0])
    assert sentence.startswith("chosen: [-3,1], ")
    assert "optimistic" in sentence or "may be luck" in sentence
    assert "a regret of 2.0 points (-1.0 to +5.0)" in sentence
    remains = sweep_record(GRID, picked="adapter")
    assert choice_sentence(remains, remains["choices"][0]).startswith("the adapter remains: none of 42 cells")
