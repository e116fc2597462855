"""A table shows every figure on a narrow terminal and as Markdown, and says what was not run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from loragate.display import percent, points
from loragate.report.table import CAPTION, Line, Sheet, p_value, results_table

ROWS: list[dict[str, Any]] = [
    {
        "name": "LoRA",
        "group": "baseline",
        "accuracy": {"mean": 0.142, "low": 0.1024, "high": 0.1826},
        "retention": {"mean": 1.0, "low": 0.9581, "high": 1.0},
        "truncated": 0.15,
        "entropy": 1.1234,
        "tokens": 27.34,
        "versus_lora": None,
        "at_best": {"temperature": 0.3, "score": {"mean": 0.2, "low": 0.1, "high": 0.3}},
        "not_run": False,
    },
    {"name": "random gates", "group": "control", "accuracy": None, "retention": None, "not_run": True},
    {
        "name": "SCALE [/red] a|b",
        "group": "scale",
        "accuracy": {"mean": 1.0, "low": 0.981, "high": 1.0},
        "retention": None,
        "truncated": 0.0004,
        "entropy": 0.26,
        "tokens": 123.0,
        "versus_lora": {"mean": 0.354, "low": -0.0001, "high": 0.4285, "p": 0.00009},
        "at_best": {"temperature": 0.0, "score": {"mean": 0.5, "low": 0.4, "high": 0.6}},
        "not_run": False,
    },
]
AT_BEST = "LoRA 20.0 (10.0–30.0; T = 0.3); SCALE [/red] a|b 50.0 (40.0–60.0; greedy)"


def rendered(sheet: Sheet, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(sheet)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_numbers() -> None:
    assert [percent(share) for share in (0, 0.0004, 0.5, 0.9996, 1)] == ["0.0", "0.0", "50.0", "100.0", "100.0"]
    assert [points(share) for share in (0.354, -0.2, 0.0001, -0.0001)] == ["+35.4", "-20.0", "0.0", "0.0"]
    assert [p_value(p) for p in (0.00099, 0.001, 0.0315, 1)] == ["<0.001", "=0.001", "=0.032", "=1.000"]


def test_no_figure_is_cut_in_eighty_columns() -> None:
    lines = rendered(results_table(ROWS))
    text = "\n".join(lines)
    assert "…" not in text
    assert max(map(len, lines)) <= 80
    for figure in ("14.2", "10.2–18.3", "95.8–100.0", "15.0", "1.12", "27.3"):
        assert figure in text
    for figure in ("98.1–100.0", "+35.4, p<0.001", "0.0 to +42.9", "0.26", "123.0", "LoRA"):
        assert figure in text
    assert AT_BEST in " ".join(text.split())
    assert CAPTION in " ".join(text.split())


def test_names_are_no_markup_and_what_was_not_run_says_so_once() -> None:
    lines = rendered(results_table(ROWS), 120)
    assert any("SCALE [/red] a|b" in line for line in lines)
    line = next(line for line in lines if "random gates" in line)
    assert line.split() == ["random", "gates", "not", "run", "–", "–", "–", "–", "–"]


def test_groups_are_set_apart() -> None:
    table = results_table(ROWS).__rich__()
    assert [row.end_section for row in table.rows] == [True, True, False]


def test_markdown() -> None:
    title, _, *lines = results_table(ROWS).markdown().splitlines()
    assert title == "### Results"
    assert lines[:5] == [
        "| Method | Accuracy % | vs LoRA points | Retention % | Cut off % | Entropy nats | Tokens |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| LoRA | 14.2 (10.2–18.3) | – | 100.0 (95.8–100.0) | 15.0 | 1.12 | 27.3 |",
        "| random gates | not run | – | – | – | – | – |",
        r"| SCALE [/red] a\|b | 100.0 (98.1–100.0) | +35.4, p<0.001 (0.0 to +42.9) | – | 0.0 | 0.26 | 123.0 |",
    ]
    assert AT_BEST in lines[6]
    assert lines[7] == CAPTION


def test_a_terminal_leaves_wide_columns_out_and_breaks_lines() -> None:
    sheet = Sheet("", ("name", "a b, %", "wide"), [Line("x", [("1.0", "0.5\nto 1.5"), ("seen elsewhere",)])], wide=(2,))
    words = [word for word in " ".join(rendered(sheet)).split() if "─" not in word]
    assert words == ["a", "b", "name", "%", "x", "1.0", "0.5", "to", "1.5"]
    assert "| x | 1.0 (0.5 to 1.5) | seen elsewhere |" in sheet.markdown()
