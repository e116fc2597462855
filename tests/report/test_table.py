"""A table shows every figure on a narrow terminal and as Markdown."""

from __future__ import annotations

import io

from rich.console import Console

from loragate.report.table import BEST, Line, Table, difference_cell, share_cell, with_best_scores

VERSUS = {"mean": 0.354, "low": -0.0001, "high": 0.4285, "p": 0.00009}
LINES = [
    Line("LoRA", [share_cell({"mean": 0.142, "low": 0.1024, "high": 0.1826}), difference_cell(None)]),
    Line("random gates", [share_cell(None), difference_cell(None)]),
    Line("SCALE [/red] a|b", [share_cell({"mean": 1.0, "low": 0.981, "high": 1.0}), difference_cell(VERSUS)]),
]
BESTS = [
    {"temperature": 0.3, "score": {"mean": 0.2, "low": 0.1, "high": 0.3}},
    None,
    {"temperature": 0.0, "score": {"mean": 0.5, "low": 0.4, "high": 0.6}},
]
SHEET = with_best_scores(Table("Results", ("Method", "Score %", "vs LoRA, points"), LINES, "What it means."), BESTS)


def rendered(sheet: Table, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(sheet)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_no_figure_is_cut_in_eighty_columns() -> None:
    lines = rendered(SHEET)
    text = " ".join("\n".join(lines).split())
    assert "…" not in text
    assert max(map(len, lines)) <= 80
    for figure in (
        "14.2",
        "10.2–18.3",
        "98.1–100.0",
        "+35.4, p<0.001",
        "0.0 to +42.9",
        "SCALE [/red] a|b",
        "What it means.",
    ):
        assert figure in text
    assert "LoRA 20.0 (10.0–30.0; T=0.3); SCALE [/red] a|b 50.0 (40.0–60.0; greedy)" in text


def test_markdown() -> None:
    title, _, *lines = SHEET.markdown().splitlines()
    assert title == "### Results"
    assert lines[:5] == [
        f"| Method | Score % | vs LoRA, points | {BEST} |",
        "| --- | ---: | ---: | ---: |",
        "| LoRA | 14.2 (10.2–18.3) | – | 20.0 (10.0–30.0; T=0.3) |",
        "| random gates | – | – | – |",
        r"| SCALE [/red] a\|b | 100.0 (98.1–100.0) | +35.4, p<0.001 (-0.0 to +42.9) | 50.0 (40.0–60.0; greedy) |",
    ]
    assert lines[-1] == "What it means."


def test_the_sign_of_an_end_shows_where_it_rounds_to_zero() -> None:
    above = {"mean": 0.1, "low": 0.0004, "high": 0.18, "p": 0.02}
    assert difference_cell(above, "better", 0.04)[1:] == ("+0.0 to +18.0", "better")
    assert difference_cell(above | {"low": -0.0004}, "no difference shown", 0.06)[1] == "-0.0 to +18.0"


def test_a_difference_stands_with_its_p_its_ends_and_its_verdict() -> None:
    above = {"mean": 0.1, "low": 0.02, "high": 0.18, "p": 0.02}
    assert difference_cell(above, "better", 0.04) == ("+10.0, p=0.040", "+2.0 to +18.0", "better")
    around = {"mean": 0.1, "low": -0.02, "high": 0.22, "p": 0.1}
    assert difference_cell(around, "no difference shown", 0.3)[1:] == ("-2.0 to +22.0", "not significant")
