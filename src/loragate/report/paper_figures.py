"""Which record gives which figure: those of the paper, drawn from our own runs, for `loragate report --figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, DataError
from loragate.report.figures import (
    Curve,
    Draw,
    accuracy_bars,
    curve_of,
    entropy_bars,
    gate_shares,
    lambda_map,
    line_chart,
    time_bars,
)
from loragate.report.scores import score_tables
from loragate.report.selection import heat_maps
from loragate.report.sources import Source


def draw_figures(sources: Sequence[Source], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write every figure that the records allow, as SVG and PDF; returns the files.

    Raises:
        ConfigError: if one of them is there already and is not to be overwritten.
        DataError: if no record allows a figure.
    """
    drawings = planned(sources)
    if not drawings:
        raise DataError("none of these runs holds what a figure shows: scores, calibrations, gates, a sweep")
    written = {folder / f"{name}{suffix}": draw for name, draw in drawings.items() for suffix in (".svg", ".pdf")}
    present = [path for path in written if path.exists()]
    if present and not overwrite:
        raise ConfigError(f"--figures {folder}: {present[0].name} exists; choose another folder, or give --overwrite")
    for path, draw in written.items():
        draw(path)
    return list(written)


def planned(sources: Sequence[Source]) -> dict[str, Draw]:
    """{file name without suffix: draws it}."""
    drawings: dict[str, Draw] = {}
    entropy: dict[str, tuple[float, float]] = {}
    shares: dict[str, Mapping[str, float]] = {}
    times: list[tuple[str, str, float]] = []
    swept: dict[str, list[float]] = {}
    curves: dict[str, Curve] = {}

    def add(source: Source, record: Any) -> None:
        tag = source.name.replace("/", "_")
        if source.kind == "evaluation":
            for task, table in zip(record["tasks"], score_tables(record)):
                drawings[f"scores_{tag}_{task['name']}"] = partial(accuracy_bars, table.lines)
        elif source.kind == "diagnosis" and record["kind"] == "realised gates":
            drawings[f"gates_{tag}"] = partial(lambda_map, record["modules"])
        elif source.kind == "selection":
            drawings.update({f"{name}_{tag}": draw for name, draw in heat_maps(record).items()})
        elif source.kind == "artifact" and (training := record.get("training")):
            if heldout := training.get("heldout"):
                entropy[source.name] = (heldout["entropy_before"], heldout["entropy_after"])
            if "below_zero" in training.get("gates", {}):
                shares[source.name] = training["gates"]
            if training.get("training_seconds"):  # the loop alone, as the log of a training has it
                times.append((source.name, "stage two", training["training_seconds"]))
        elif source.kind == "training":
            if curve := curve_of(record["history"], "topk_entropy"):
                curves[source.name] = curve
            runtime = next((r["train_runtime"] for r in reversed(record["history"]) if "train_runtime" in r), None)
            stage = "stage two" if record["run"].get("stage") == "calibrate" else "stage one"
            sweep, of_sweep, _ = source.name.rpartition("/trials/")
            if of_sweep and runtime is not None:
                swept.setdefault(sweep, []).append(runtime)
            # an artifact tells the time of the training beside it
            elif runtime is not None and (source.name, stage) not in {time[:2] for time in times}:
                times.append((source.name, stage, runtime))

    for source in sources:
        source.read(partial(add, source))
    for sweep, seconds in swept.items():  # as the paper has it: the mean over ranges, one training each
        times.append((f"{sweep}, mean of {len(seconds)}", "stage two", sum(seconds) / len(seconds)))
    if entropy:
        drawings["entropy"] = partial(entropy_bars, entropy)
    if shares:
        drawings["gate_shares"] = partial(gate_shares, shares)
    if curves:
        title = "Training entropy (its fall does not show better answers)"
        drawings["training"] = partial(line_chart, curves, "top-k entropy / log k", title=title)
    if times:
        drawings["training_time"] = partial(time_bars, times)
    return drawings
