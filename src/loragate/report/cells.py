"""The results of a sweep as tables and sentences, from its record (plain data)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loragate.display import percent, points
from loragate.files import write_text
from loragate.report.heatmap import heat_maps
from loragate.report.table import ABSENT, Cell, Line, Sheet, interval, or_absent, p_value, share_cell

COLUMNS = ("Cell", "Probe %", "vs adapter, points", "Seeds %", "Entropy", "Ended %", "λ < 0 / > 1 %")
ROWS = 15


def sweep_tables(record: Mapping[str, Any], most: int | None = ROWS) -> list[Sheet]:
    """The adapter, then the cells from the best down, the first `most` of them; nothing before the adapter was scored."""
    tables = []
    for choice in record["choices"]:
        mine = [cell for cell in record["cells"] if cell["difference"] is not None]
        mine.sort(key=lambda cell: -cell["probe"]["mean"])
        ended = (or_absent(choice["adapter_signs"].get("finished"), percent),)
        own = [share_cell(choice["adapter_probe"]), *[(ABSENT,)] * 3, ended, (ABSENT,)]
        lines = [Line("adapter", own), *(_line(cell, choice) for cell in mine[:most])]
        title = f"{choice['adapter']}: Avg@{record['samples']} on {record['questions']} probe questions"
        left = f" {len(mine) - most} cells below are in the files." if most and len(mine) > most else ""
        tables.append(Sheet(title, COLUMNS, lines, _caption(record) + left, wide=(3, 6)))
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
    """All cells as Markdown, ending in a line end."""
    parts = ["# Sweep"]
    for choice, table in zip(record["choices"], sweep_tables(record, most=None), strict=True):
        parts += [table.markdown(), choice_sentence(record, choice)]
    for title, key in (("Diverged, and out of the comparison:", "diverged"), ("Not finished:", "failures")):
        reasons = record.get(key) or {}
        if reasons:
            parts.append(f"{title}\n\n" + "\n".join(f"- `{slug}`: {error}" for slug, error in reasons.items()))
    return "\n\n".join(parts) + "\n"


def suite_table(record: Mapping[str, Any]) -> Sheet:
    """The cells of one adapter on a suite, from the best down; from the record of `selection.outcome`."""
    (choice,) = record["choices"]
    title = f"{choice['adapter']}: {record['suite']}, mean over {len(record['tasks'])} tasks, Avg@{record['samples']}"
    lines = [Line("adapter", [share_cell(choice["adapter_score"]), (ABSENT,)])]
    for cell in sorted(record["cells"], key=lambda cell: -cell["score"]["mean"]):
        lines.append(Line(_name(cell), [share_cell(cell["score"]), _versus(cell)], _group(cell, choice)))
    return Sheet(title, ("Cell", "Score %", "vs adapter, points"), lines, choice_sentence(record, choice))


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
        cell = next(cell for cell in record["cells"] if cell["name"] == choice["picked"])
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


def _line(cell: Mapping[str, Any], choice: Mapping[str, Any]) -> Line:
    gates, after = cell["gates"], cell["entropy_after"]
    seeds = ", ".join(percent(mean) for mean in cell["by_seed"]) if len(cell["by_seed"]) > 1 else ABSENT
    entropy = ABSENT if after is None else f"{cell['entropy_before']:.3f} → {after:.3f}"
    ended = or_absent(cell["signs"].get("finished"), percent)
    shares = f"{percent(gates['below_zero'])} / {percent(gates['above_one'])}" if "below_zero" in gates else ABSENT
    cells = [share_cell(cell["probe"]), _versus(cell), (seeds,), (entropy,), (ended,), (shares,)]
    return Line(_name(cell), cells, _group(cell, choice))


def _group(cell: Mapping[str, Any], choice: Mapping[str, Any]) -> str:
    return "scale" if cell["name"] == choice["picked"] else ""


def _name(cell: Mapping[str, Any]) -> str:
    return str(cell["name"]) + ("" if cell["complete"] else " (incomplete)")


def _versus(cell: Mapping[str, Any]) -> Cell:
    """The difference to the adapter, with p where all seeds are there."""
    versus = cell["difference"]
    return points(versus["mean"]), f"p{p_value(versus['p_holm'])}" if cell["complete"] else ""


def _caption(record: Mapping[str, Any]) -> str:
    return (
        "Ranges are 95 % intervals over questions, seeds averaged within each; they say nothing about other adapters. vs "
        f"adapter: paired by question, p after Holm's adjustment over {record['comparisons']} comparisons. Entropy: the training "
        "objective, no evidence of better answers. Ended: answers that the model ended itself."
    )
