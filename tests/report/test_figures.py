"""Figures hold what they were given, overlap nothing and appear whole or not at all."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest

from loragate.errors import ConfigError, LoragateError
from loragate.report.figures import MODULES as SEVEN
from loragate.report.figures import accuracy_bars, column_chart, curve_of, lambda_map, line_chart, module_map
from loragate.report.selection import heat_map
from loragate.report.table import Line

KINDS = ("down_proj", "q_proj", "v_proj")


def line(name: str, group: str, mean: float | None) -> Line:
    score = None if mean is None else {"mean": mean, "low": max(0, mean - 0.04), "high": min(1, mean + 0.04)}
    return Line(name, [], group, score)


ROWS = [
    line("base", "control", 1.0),
    line("LoRA", "baseline", 0.142),
    line("random gates", "control", None),
    line("SCALE [-6, 3]", "scale", 0.0),
    line("max(λ, 0)", "intervention", 0.5),
]
CURVE = [(step, 0.2 / step) for step in range(1, 30)]


def module(layer: int | None, kind: str, mean: float, count: int = 9) -> dict[str, Any]:
    shares = {"mean": mean, "count": count, "below_zero": 0.2, "zero_to_one": 0.5, "above_one": 0.3}
    return {"layer": layer, "type": kind, "all": shares}


MODULES = [module(layer, kind, layer - 0.5) for layer in (0, 2, 10) for kind in KINDS]


@pytest.mark.parametrize(("suffix", "head"), [("png", b"\x89PNG\r\n"), ("svg", b"<?xml"), ("PNG", b"\x89PNG\r\n")])
def test_the_suffix_decides_the_format(tmp_path: Path, suffix: str, head: bytes) -> None:
    path = tmp_path / "new" / f"map.{suffix}"
    lambda_map(MODULES, path)
    assert path.read_bytes().startswith(head)
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


def test_bars_show_values_and_whiskers(tmp_path: Path, drawn: list[Any]) -> None:
    accuracy_bars(ROWS, tmp_path / "bars.svg")
    axes = drawn[0].axes[0]
    names = [row.name for row in ROWS if row.score]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    assert [patch.get_width() for patch in axes.patches] == [100, 14.2, 0, 50]
    assert [text.get_text() for text in axes.texts] == ["100.0", "14.2", "0.0", "50.0"]
    segments = [container.lines[2][0].get_segments()[0][:, 0].tolist() for container in axes.containers[1::2]]
    assert segments == [pytest.approx(ends) for ends in ([96, 100], [10.2, 18.2], [0, 4], [46, 54])]
    assert [text.get_text() for text in drawn[0].legends[0].texts] == ["Control", "Baseline", "Gated", "Intervention"]
    # text is drawn as outlines, so that it looks the same everywhere; each has its comment in the file
    comments = re.findall(r"<!-- (.*?) -->", (tmp_path / "bars.svg").read_text(encoding="utf-8"))
    assert {*names, "14.2"} <= set(comments)


def test_curves_are_labelled_and_leave_out_what_is_not_finite(tmp_path: Path, drawn: list[Any]) -> None:
    log = [{"step": 3, "loss": 1.0}, *({"step": step, "topk_entropy": value} for step, value in CURVE[::-1])]
    curves = {"[-6, 3]": curve_of(log, "topk_entropy"), "[0, 1]": [*CURVE, (30, float("nan"))]}
    line_chart(curves, "entropy", tmp_path / "curve.png")
    lines = drawn[0].axes[0].lines
    assert [line.get_label() for line in lines] == ["[-6, 3]", "[0, 1]"]
    for one in lines:
        assert list(zip(one.get_xdata(), one.get_ydata(), strict=True)) == CURVE
    assert [text.get_text() for text in drawn[0].legends[0].texts] == ["[-6, 3]", "[0, 1]"]
    assert len(curve_of([{"step": step, "nll": 1} for step in range(999)], "nll")) == 200


def test_map_orders_layers_and_kinds_and_is_centred_at_one(tmp_path: Path, drawn: list[Any]) -> None:
    lambda_map(MODULES, tmp_path / "map.png")
    left, right = drawn[0].axes[:2]
    image = left.images[0]
    assert [label.get_text() for label in left.get_yticklabels()] == ["0", "2", "10"]
    assert [label.get_text() for label in left.get_xticklabels()] == ["q_proj", "v_proj", "down_proj"]
    assert image.get_array().tolist() == [[-0.5] * 3, [1.5] * 3, [9.5] * 3]
    assert (image.norm.vmin + image.norm.vmax) / 2 == 1
    assert image.norm.vmax == 9.5
    assert [text.get_text() for text in left.texts[:4]] == ["−0.50", "−0.50", "−0.50", "1.50"]
    assert [patch.get_width() for patch in right.patches] == pytest.approx([20] * 3 + [50] * 3 + [30] * 3)


@pytest.mark.parametrize("name", ["figure.jpeg", "figure"])
def test_other_formats_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.png, \.svg or \.pdf"):
        accuracy_bars(ROWS, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bars.png"
    path.write_bytes(b"old")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    with pytest.raises(LoragateError, match="the disk is full"):
        accuracy_bars(ROWS, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_narrow_bars_have_letters_that_a_phone_shows(tmp_path: Path, drawn: list[Any]) -> None:
    name = "adapter middle λ=0.5 greedy (recommended)"
    for narrow in (False, True):
        accuracy_bars([line(name, "baseline", 1.0)], tmp_path / f"{narrow}.svg", narrow=narrow)
    for figure, least in zip(drawn, (6, 10), strict=True):
        labels = [*figure.axes[0].get_yticklabels(), *figure.axes[0].get_xticklabels(), *figure.axes[0].texts]
        scale = min(1, 320 / (72 * figure.get_figwidth()))  # a phone of 390 has 320 px for it
        assert round(min(label.get_fontsize() for label in labels) * scale) == pytest.approx(least, abs=1)
        assert labels[0].get_text().replace("\n", " ") == name
        figure.draw_without_rendering()
        assert labels[0].get_window_extent().x0 >= 0, "it is not cut off"


def test_maps_of_seven_columns_fit_a_phone_and_their_letters_can_be_read_there(
    tmp_path: Path, drawn: list[Any]
) -> None:
    cells = {(layer, kind): 0.01 * (layer + 1) for layer in range(4) for kind in SEVEN}
    lambda_map([module(layer, kind, -0.5) for layer, kind in cells], tmp_path / "λ.svg")
    module_map(cells, dict.fromkeys(range(4), 0.02), dict.fromkeys(SEVEN, 0.03), "nats", tmp_path / "modules.svg")
    score = {"label": "", "mean": 0.5, "low": 0.45, "high": 0.55, "difference": None}
    ranges = {(lower, upper): score for lower in range(-6, 1) for upper in (1, 3)}
    heat_map("the dev set", score, ranges, "-", "", tmp_path / "ranges.svg")
    for figure in drawn:
        smallest = 0.9  # of its size on a page, which has 358 px of a phone's 390
        assert smallest * 72 * figure.get_figwidth() <= 358
        figure.draw_without_rendering()
        for axes in figure.axes:
            labels = [one for one in (*axes.get_xticklabels(), *axes.get_yticklabels()) if one.get_visible()]
            assert all(smallest * one.get_fontsize() > 10 for one in (*axes.texts, *labels) if one.get_text())
        widths = [one.get_window_extent().width for one in figure.axes[0].texts if one.get_text()]
        columns = figure.axes[0].get_window_extent().width / 7
        assert max(widths) < columns, "figures of neighbours do not touch"


def test_columns_with_open_ends_say_so(tmp_path: Path, drawn: list[Any]) -> None:
    for ends in (False, True):
        column_chart([-2.0, -1.0, 0.0, 1.0, 2.0], [5, 1, 2, 2], "ΔH", tmp_path / f"{ends}.svg", open_ends=ends)
    closed, open_ = (figure.axes[0] for figure in drawn)
    assert [text.get_text() for text in closed.texts] == []
    assert [text.get_text() for text in open_.texts] == ["≤ −1", "≥ 1"]
    colours = [patch.get_facecolor() for patch in open_.patches]
    assert colours[0] == colours[3] != colours[1] == colours[2]
    assert len({patch.get_facecolor() for patch in closed.patches}) == 1
