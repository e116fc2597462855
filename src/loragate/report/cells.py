"""The results of a sweep as tables and sentences, for the terminal and for Markdown, from its record (plain data)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from loragate.files import write_text
from loragate.report.heatmap import heat_maps
from loragate.report.table import (
    ABSENT,
    Cell,
    interval,
    markdown_table,
    or_absent,
    p_value,
    percent,
    points,
    share_cell,
    stacked,
    terminal_table,
)

COLUMNS = ("Cell", "Probe %", "vs adapter, points", "Seeds %", "Entropy", "Ended %", "λ < 0 / > 1 %")
ROWS = 15
SHOWN = (0, 1, 2, 4, 5)  # the columns that fit a terminal of 80


def sweep_tables(record: Mapping[str, Any]) -> list[Table]:
    """One table per adapter: itself, then its cells from the best down, at most 15."""
    tables = []
    for choice in record["choices"]:
        cells = _ranked(record, choice)
        left = f" {len(cells) - ROWS} cells below are in the files." if len(cells) > ROWS else ""
        table = terminal_table(_title(record, choice), [COLUMNS[place] for place in SHOWN], _caption(record) + left)
        for name, values in _rows(choice, cells[:ROWS]):
            row = ((name,), *values)
            table.add_row(*stacked(row[place] for place in SHOWN), style="bold" if name == choice["picked"] else None)
        tables.append(table)
    return tables


def write_sweep(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Write `sweep_results.md` and the heat maps, .png and .svg; returns the names of the maps."""
    write_text(folder / "sweep_results.md", sweep_markdown(record))
    maps = heat_maps(record)
    for name, draw in maps.items():
        for suffix in ("png", "svg"):
            draw(folder / f"{name}.{suffix}")
    return list(maps)


def sweep_markdown(record: Mapping[str, Any]) -> str:
    """All cells of all adapters as Markdown, ending in a line end."""
    parts = ["# Sweep"]
    for choice in record["choices"]:
        rows = _rows(choice, _ranked(record, choice))
        named = [(f"**{name}**" if name == choice["picked"] else name, cells) for name, cells in rows]
        table = markdown_table(COLUMNS, named)
        parts.append(f"## {_title(record, choice)}\n\n{table}\n\n{choice_sentence(record, choice)}")
    parts.append(_caption(record))
    for title, key in (("Diverged, and out of the comparison:", "diverged"), ("Not finished:", "failures")):
        reasons = record.get(key) or {}
        if reasons:
            parts.append(f"{title}\n\n" + "\n".join(f"- `{slug}`: {error}" for slug, error in reasons.items()))
    return "\n\n".join(parts) + "\n"


def suite_table(record: Mapping[str, Any]) -> Table:
    """The cells of one adapter on a suite, from the best down; from the record of `selection.evaluated`."""
    (choice,) = record["choices"]
    title = f"{choice['adapter']}: {record['suite']}, mean over {len(record['tasks'])} tasks, Avg@{record['samples']}"
    table = terminal_table(title, ("Cell", "Score %", "vs adapter, points"), choice_sentence(record, choice))
    table.add_row(*stacked([("adapter",), share_cell(choice["adapter_score"]), (ABSENT,)]))
    for cell in sorted(record["cells"], key=lambda cell: -cell["score"]["mean"]):
        row = (_name(cell),), share_cell(cell["score"]), _versus(cell)
        table.add_row(*stacked(row), style="bold" if cell["name"] == choice["picked"] else None)
    return table


def _suite_sentence(record: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    """What a suite says of the cells: the best one, read as an oracle, and the one that a probe had chosen."""
    oracle = choice["oracle"]
    if oracle["name"] == "adapter":
        text = f"none of {choice['candidates']} cells is above the adapter's {interval(oracle['score'])} % on {record['suite']}."
    else:
        text = (
            f"highest on {record['suite']}: {oracle['name']} with {interval(oracle['score'])} %. It was found on these "
            "questions themselves, so its mean is optimistic (an oracle)."
        )
    if oracle["regret"]:
        regret = oracle["regret"]
        text += (
            f" The probe had chosen {choice['picked']}, {points(regret['mean']).lstrip('+')} points below "
            f"({points(regret['low'])} to {points(regret['high'])})."
        )
    return text + f" p after Holm's adjustment over {record['comparisons']} cells."


def choice_sentence(record: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    """What was chosen and what stands behind it, the oracle apart from it; or what a suite says of the cells."""
    if "suite" in record:
        return _suite_sentence(record, choice)
    own = choice["adapter_probe"]
    size = f"{record['questions']} questions × {record['samples']} samples × {len(record['seeds'])} seeds"
    if choice["accepted"]:
        cell = next(c for c in record["cells"] if c["adapter"] == choice["adapter"] and c["name"] == choice["picked"])
        difference = cell["difference"]
        text = (
            f"chosen: {choice['picked']}, {interval(cell['probe'])} % on the probe ({size}) against {interval(own)} % of the "
            f"adapter: {points(difference['mean'])} points, p{p_value(difference['p'])}, "
            f"{p_value(difference['p_holm']).lstrip('=')} after Holm's adjustment over {record['comparisons']} cells. "
        )
        text += (
            "The mean is optimistic, because the cell was picked for it."
            if cell["differs"]
            else "That is not told apart from the adapter: the gain may be luck."
        )
    elif not choice["candidates"]:
        text = "the adapter remains: no cell's training stayed finite in all its seeds."
    else:
        text = f"the adapter remains: none of {choice['candidates']} cells is above its {interval(own)} % on the probe ({size})."
    oracle = choice.get("oracle")
    if oracle is not None:
        regret = oracle["regret"]
        text += (
            f" Oracle on the test set, not used to choose: {oracle['name']} with {interval(oracle['test'])} %; the choice has "
            f"{interval(oracle['chosen_test'])} % there, a regret of {points(regret['mean']).lstrip('+')} points "
            f"({points(regret['low'])} to {points(regret['high'])}), and {points(oracle['chosen_minus_adapter']['mean'])} points "
            "from the adapter."
        )
    return text


def _rows(choice: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Cell]]]:
    """(name, cells) of the adapter and of these cells of the grid."""
    ended = choice["adapter_signs"].get("finished")
    own: list[Cell] = [share_cell(choice["adapter_probe"]), *[(ABSENT,)] * 3, (or_absent(ended, percent),), (ABSENT,)]
    rows = [("adapter", own)]
    for cell in cells:
        gates, after = cell["gates"], cell["entropy_after"]
        shares = f"{percent(gates['below_zero'])} / {percent(gates['above_one'])}" if "below_zero" in gates else ABSENT
        found: list[Cell] = [
            share_cell(cell["probe"]),
            _versus(cell),
            (", ".join(percent(mean) for mean in cell["by_seed"]) if len(cell["by_seed"]) > 1 else ABSENT,),
            (ABSENT if after is None else f"{cell['entropy_before']:.3f} → {after:.3f}",),
            (or_absent(cell["signs"].get("finished"), percent),),
            (shares,),
        ]
        rows.append((_name(cell), found))
    return rows


def _name(cell: Mapping[str, Any]) -> str:
    return str(cell["name"]) + ("" if cell["complete"] else " (incomplete)")


def _versus(cell: Mapping[str, Any]) -> Cell:
    """The difference to the adapter, with p where all seeds are there."""
    versus = cell["difference"]
    return points(versus["mean"]), f"p{p_value(versus['p_holm'])}" if cell["complete"] else ""


def _ranked(record: Mapping[str, Any], choice: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    mine = [cell for cell in record["cells"] if cell["adapter"] == choice["adapter"] and cell["difference"] is not None]
    return sorted(mine, key=lambda cell: -cell["probe"]["mean"])


def _title(record: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    return f"{choice['adapter']}: Avg@{record['samples']} on {record['questions']} probe questions"


def _caption(record: Mapping[str, Any]) -> str:
    return (
        "Ranges are 95 % intervals over questions, seeds averaged within each; they say nothing about other adapters. vs "
        f"adapter: paired by question, p after Holm's adjustment over {record['comparisons']} comparisons. Entropy: the training "
        "objective, no evidence of better answers. Ended: answers that the model ended itself."
    )
