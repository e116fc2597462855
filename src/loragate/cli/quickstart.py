"""`loragate quickstart`: the whole method on the tiny world, offline, with its controls and an honest reading."""

from __future__ import annotations

import os

from loragate.cli.arguments import Command, resolved_yaml
from loragate.files import write_text
from loragate.gates.range import parse_ranges
from loragate.quickstart import QuickstartSettings


def run(options: QuickstartSettings) -> int:
    """Run the study, print the table and its reading, write the run folder."""
    parse_ranges(options.ranges)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported: models this small gain nothing from a GPU
    from loragate.quickstart.run import run_quickstart

    folder = run_quickstart(options)
    write_text(folder / "config.yaml", resolved_yaml(options))
    return 0


COMMAND = Command(
    name="quickstart",
    options=QuickstartSettings,
    run=run,
    examples=(
        "loragate quickstart",
        "loragate quickstart --seed 1 --out runs/second",
    ),
)
