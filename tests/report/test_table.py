"""The table shows every figure, also in a narrow terminal, and says what was not run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from loragate.report.table import CAPTION, p_value, percent, points, results_markdown, results_table

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


def rendered(width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(results_table(ROWS))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_numbers() -> None:
    assert [percent(share) for share in (0, 0.0004, 0.5, 0.9996, 1)] == ["0.0", "0.0", "50.0", "100.0", "100.0"]
    assert [points(share) for share in (0.354, -0.2, 0.0001, -0.0001)] == ["+35.4", "-20.0", "0.0", "0.0"]
    assert [p_value(p) for p in (0.00099, 0.001, 0.0315, 1)] == ["<0.001", "=0.001", "=0.032", "=1.000"]


def test_no_figure_is_cut_in_eighty_columns() -> None:
    text = rendered(80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for figure in ("14.2", "10.2–18.3", "95.8–100.0", "15.0", "1.12", "27.3"):
        assert figure in text
    assert "LoRA 20.0 (10.0–30.0; T = 0.3); SCALE [/red] a|b 50.0 (40.0–60.0; greedy)" in " ".join(text.split())
    for figure in ("98.1–100.0", "+35.4, p<0.001", "0.0 to +42.9", "0.26", "123.0", "LoRA"):
        assert figure in text


def test_names_with_brackets_are_shown_as_they_are() -> None:
    assert "SCALE [/red] a|b" in rendered(120)


def test_a_control_that_was_not_run_says_so_once() -> None:
    line = next(line for line in rendered(120).splitlines() if "random gates" in line)
    assert line.split() == ["random", "gates", "not", "run", "–", "–", "–", "–", "–"]


def test_groups_are_set_apart_and_columns_named() -> None:
    table = results_table(ROWS)
    assert [row.end_section for row in table.rows] == [True, True, False]
    assert len({len(list(column.cells)) for column in table.columns}) == 1
    assert CAPTION.split(";")[0] in " ".join(rendered(120).split())


def test_markdown() -> None:
    lines = results_markdown(ROWS).splitlines()
    names = "| Method | Accuracy % | vs LoRA points | Retention % | Cut off % | Entropy nats | Tokens |"
    assert lines[0] == f"{names} At its best temperature % |"
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    figures = "| LoRA | 14.2 (10.2–18.3) | – | 100.0 (95.8–100.0) | 15.0 | 1.12 | 27.3 |"
    assert lines[2] == f"{figures} 20.0 (10.0–30.0; T = 0.3) |"
    assert lines[3] == "| random gates | not run | – | – | – | – | – | – |"
    figures = r"| SCALE [/red] a\|b | 100.0 (98.1–100.0) | +35.4, p<0.001 (0.0 to +42.9) | – | 0.0 | 0.26 | 123.0 |"
    assert lines[4] == f"{figures} 50.0 (40.0–60.0; greedy) |"
    assert lines[6].startswith(CAPTION)
