"""The figures of `loragate report --figures`: which record gives which figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from loragate.cli.report_sources import Source, readable
from loragate.errors import ConfigError, DataError

SUFFIXES = (".svg", ".pdf")
Drawing = Callable[[Path], None]


def draw_figures(sources: Sequence[Source], folder: Path, *, overwrite: bool = False) -> list[Path]:
    """Write every figure that the records allow, as SVG and PDF; returns the files.

    Raises:
        ConfigError: if one of them is there already and is not to be overwritten.
        DataError: if no record allows a figure.
    """
    drawings = planned(sources)
    if not drawings:
        raise DataError("none of these runs holds what a figure shows: scores, calibrations, gates, a sweep")
    written = {folder / f"{name}{suffix}": draw for name, draw in drawings.items() for suffix in SUFFIXES}
    present = [path for path in written if path.exists()]
    if present and not overwrite:
        raise ConfigError(f"--figures {folder}: {present[0].name} exists; choose another folder, or give --overwrite")
    for path, draw in written.items():
        draw(path)
    return list(written)


def planned(sources: Sequence[Source]) -> dict[str, Drawing]:
    """{file name without suffix: draws it}."""
    from loragate.report.figures import accuracy_bars, entropy_curve, lambda_map
    from loragate.report.heatmap import heat_maps
    from loragate.report.paper_figures import entropy_bars, gate_shares, time_bars

    drawings: dict[str, Drawing] = {}
    entropy: dict[str, tuple[float, float]] = {}
    shares: dict[str, dict[str, float]] = {}
    times: list[tuple[str, str, float]] = []
    # the artifact of a quickstart is one of its calibrations
    studied = {source.path.parent for source in sources if source.kind == "quickstart"}
    for source in sources:
        with readable(source):
            record, tag = source.record, source.name.replace("/", "_")
            if source.kind == "quickstart":
                drawings[f"scores_{tag}"] = partial(accuracy_bars, record["table"])
                drawings[f"gates_{tag}"] = partial(lambda_map, record["realised_gates"])
                histories = {name: value["history"] for name, value in record["calibrations"].items()}
                drawings[f"training_{tag}"] = partial(entropy_curve, histories)
                for name, value in record["calibrations"].items():
                    _calibration(f"{source.name} {name}", value["training"], entropy, shares, times)
            elif source.kind == "artifact" and record.get("training") and source.path.parent.parent not in studied:
                _calibration(source.name, record["training"], entropy, shares, times)
            elif source.kind == "sweep":
                drawings |= {f"{name}_{tag}": draw for name, draw in heat_maps(record).items()}
            elif source.kind == "training":
                runtime = next((r["train_runtime"] for r in reversed(record["history"]) if "train_runtime" in r), None)
                stage = "stage two" if record["run"].get("stage") == "calibrate" else "stage one"
                # an artifact tells the time of the training beside it
                if runtime is not None and (source.name, stage) not in {time[:2] for time in times}:
                    times.append((source.name, stage, runtime))
    if entropy:
        drawings["entropy"] = partial(entropy_bars, entropy)
    if shares:
        drawings["gate_shares"] = partial(gate_shares, shares)
    if times:
        drawings["training_time"] = partial(time_bars, times)
    return drawings


def _calibration(
    name: str,
    training: dict[str, Any],
    entropy: dict[str, tuple[float, float]],
    shares: dict[str, dict[str, float]],
    times: list[tuple[str, str, float]],
) -> None:
    if heldout := training.get("heldout"):
        entropy[name] = (heldout["entropy_before"], heldout["entropy_after"])
    if "below_zero" in training.get("gates", {}):
        shares[name] = training["gates"]
    # the loop alone, as the log of a training has it
    if training.get("training_seconds"):
        times.append((name, "stage two", training["training_seconds"]))
