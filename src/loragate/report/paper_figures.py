"""The paper's figures, drawn from our own runs: entropy before and after, where λ lies, training time; and which record gives
which figure.

Beside `figures.py` and `sweep.py`, which draw scores, curves and ranges. The same rules: plain data in, one file out, no
number that was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loragate.errors import ConfigError, DataError
from loragate.report.figures import (
    Curve,
    Draw,
    Target,
    accuracy_bars,
    curve_of,
    drawn,
    grid,
    lambda_map,
    legend,
    line_chart,
    share_bars,
)
from loragate.report.scores import score_tables
from loragate.report.sources import Source
from loragate.report.sweep import heat_maps

BEFORE, AFTER, TIME = "#999999", "#D55E00", "#56B4E9"


def entropy_bars(pairs: Mapping[str, tuple[float, float]], to: Target) -> None:
    """Top-k entropy of held-out response tokens before and after gating, one pair of bars per calibration.

    Args:
        pairs: {label: (before, after)}, each divided by log k, teacher-forced, on rows that were not trained on.
    """
    with drawn(to, max(4.0, 1.4 + 1.1 * len(pairs)), 3.6) as figure:
        axes = figure.subplots()
        places = range(len(pairs))
        for offset, number, colour, label in ((-0.2, 0, BEFORE, "adapter"), (0.2, 1, AFTER, "gated")):
            heights = [pair[number] for pair in pairs.values()]
            bars = axes.bar([place + offset for place in places], heights, 0.38, color=colour, label=label)
            axes.bar_label(bars, fmt="%.3f", fontsize=8, padding=2)
        axes.set_xticks(list(places), list(pairs), rotation=20 if len(pairs) > 4 else 0)
        axes.set_ylabel("top-k entropy / log k")
        axes.set_title("Entropy of held-out rows before and after gating (its fall shows no better answers)")
        axes.margins(y=0.15)
        grid(axes, "y")
        figure.legend(loc="outside upper right", ncols=2, frameon=False)


def gate_shares(shares: Mapping[str, Mapping[str, float]], to: Target) -> None:
    """Where λ lies, in per cent of tokens over all gated modules: one stacked bar per gated model.

    Args:
        shares: {label: {"below_zero", "zero_to_one", "above_one"}}, shares of 1.
    """
    with drawn(to, 7.0, 1.5 + 0.45 * len(shares)) as figure:
        axes = figure.subplots()
        for number, bars in enumerate(share_bars(axes, list(shares.values()), "% of (token, module) pairs")):
            labels = [f"{bar.get_width():.1f}" if bar.get_width() >= 6 else "" for bar in bars]
            axes.bar_label(bars, labels, label_type="center", fontsize=9, color="black" if number else "white")
        axes.set_yticks(range(len(shares)), list(shares))
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)


def time_bars(times: Sequence[tuple[str, str, float]], to: Target) -> None:
    """Time of the training loop in minutes: steps and checkpoints, without loading, parity, checksums and measuring.

    Args:
        times: (label, "stage one" or "stage two", seconds), in the order to be drawn.
    """
    colours: dict[str, Any] = {"stage one": TIME, "stage two": AFTER}
    with drawn(to, 7.0, 1.5 + 0.4 * len(times)) as figure:
        axes = figure.subplots()
        minutes = [seconds / 60 for _, _, seconds in times]
        bars = axes.barh(range(len(times)), minutes, height=0.7, color=[colours[stage] for _, stage, _ in times])
        axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=3)
        axes.set_yticks(range(len(times)), [label for label, _, _ in times])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel("minutes in the training loop (one run each; loading, checks and evaluation left out)")
        grid(axes, "x")
        legend(figure, {stage: colour for stage, colour in colours.items() if stage in {at for _, at, _ in times}}, 2)


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
    curves: dict[str, Curve] = {}

    def add(source: Source, record: Any) -> None:
        tag = source.name.replace("/", "_")
        if source.kind == "evaluation":
            for task, table in zip(record["tasks"], score_tables(record)):
                drawings[f"scores_{tag}_{task['name']}"] = partial(accuracy_bars, table.lines)
        elif source.kind == "diagnosis" and record["kind"] == "realised gates":
            drawings[f"gates_{tag}"] = partial(lambda_map, record["modules"])
        elif source.kind == "sweep":
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
            # an artifact tells the time of the training beside it
            if runtime is not None and (source.name, stage) not in {time[:2] for time in times}:
                times.append((source.name, stage, runtime))

    for source in sources:
        source.read(partial(add, source))
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
